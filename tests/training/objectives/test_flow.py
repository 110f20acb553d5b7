"""Flow matching: the noise of patches, and the loss of both kinds of predictions.

The references are closed forms: predictions with no error or a constant one, and sums by hand.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from jaxmllm.training.objectives.flow import (
    LEAST_TIME,
    NoisyPatches,
    euler_step,
    flow_losses,
    flow_sums,
    patch_noise,
    time_bands,
)
from sharding.mesh import make_mesh
from sharding.rules import make_layout

KEY = np.array([7, 9], np.uint32)


def test_noise_belongs_to_the_patch_and_not_to_its_place():
    patches = np.arange(40, dtype=np.int32)
    noise_of = jax.jit(lambda keys, patches: patch_noise(keys, patches, 12))
    noise = np.asarray(noise_of(np.tile(KEY, (40, 1)), patches))
    order = np.random.default_rng(0).permutation(40)[:17]
    moved_noise = np.asarray(noise_of(np.tile(KEY, (17, 1)), patches[order]))
    np.testing.assert_array_equal(moved_noise, noise[order])
    # The noise is standard normal: 480 draws have a mean within 3 standard errors of 0
    assert abs(noise.mean()) < 0.15 and abs(noise.std() - 1) < 0.1
    assert len(np.unique(noise)) == noise.size
    other_noise = np.asarray(noise_of(np.tile(KEY[::-1], (40, 1)), patches))
    assert not np.isin(other_noise, noise).any()


def patches_at(times, seed=0):
    """Noisy patches of one row at these times, and the images that they were made from."""
    rng = np.random.default_rng(seed)
    image, noise = rng.normal(size=(2, 1, len(times), 6))
    time = np.asarray(times)[None]
    noisy = (1 - time[..., None]) * image + time[..., None] * noise
    return image, NoisyPatches(*map(jnp.asarray, (noisy, noise - image, time)))


def test_right_predictions_of_either_kind_have_no_loss():
    image, patches = patches_at([0.0, 0.01, 0.3, 1.0])
    counted = jnp.ones((1, 4), bool)
    np.testing.assert_allclose(flow_losses("velocity", patches.velocity, patches, counted), 0)
    np.testing.assert_allclose(
        flow_losses("sample", jnp.asarray(image), patches, counted), 0, atol=1e-9
    )


def test_an_error_of_the_image_is_one_of_the_velocity_over_the_time():
    """An error of the image is divided by the time, but by no less than LEAST_TIME."""
    image, patches = patches_at([0.02, 0.5, 0.8])
    counted = jnp.array([[True, True, False]])
    error = 0.1
    losses = flow_losses("sample", jnp.asarray(image + error), patches, counted)
    expected = [(error / LEAST_TIME) ** 2, (error / 0.5) ** 2, 0]
    np.testing.assert_allclose(losses[0], expected, rtol=1e-4)
    velocity = flow_losses("velocity", patches.velocity + error, patches, counted)
    np.testing.assert_allclose(velocity[0], [error**2, error**2, 0], rtol=1e-4)


def test_losses_are_told_by_source_and_by_quarter_of_the_times():
    """A row has three items and padding; its fifth patch does not count.

    Time 1 falls in the last quarter.
    """
    layout = make_layout(make_mesh({"data": 1}, jax.devices()[:1]))
    losses = jnp.array([[1.0, 2.0, 4.0, 8.0, 0.0, 0.0]])
    counted = jnp.array([[True, True, True, True, False, False]])
    owners = jnp.array([[1, 1, 2, 3, 3, 0]])
    times = jnp.array([[0.2, 0.2, 0.25, 1.0, 1.0, 0.0]])
    sums = flow_sums(layout, 3, losses, counted, owners, jnp.array([[2, 0, 2, -1]]), times)
    assert sums.loss.tolist() == [[4.0, 0.0, 11.0]]
    assert sums.patches.tolist() == [[1.0, 0.0, 3.0]]
    assert time_bands() == ["0", "0.25", "0.5", "0.75"]
    assert sums.loss_by_time.tolist() == [[3.0, 4.0, 0.0, 8.0]]
    assert sums.patches_by_time.tolist() == [[2.0, 1.0, 0.0, 1.0]]
    # float32 counts in steps of two from here on, so counts have to be integers
    running_sum = jnp.int32(2**24)
    assert (running_sum + sums.patches).sum() == 3 * 2**24 + 4
    assert (running_sum + sums.patches_by_time).sum() == 4 * 2**24 + 4


def test_steps_along_right_predictions_of_either_kind_end_at_the_image():
    """Any number of steps will do, even if the last one begins at a time below LEAST_TIME."""
    image, patches = patches_at([1.0, 1.0])
    velocity = patches.velocity
    for times in ([1.0, 0.0], [1.0, 0.7, 0.2, LEAST_TIME / 4, 0.0]):
        drawn = {"velocity": patches.noisy, "sample": patches.noisy}
        predictions = {"velocity": velocity, "sample": jnp.asarray(image)}
        for time, next_time in pairwise(map(jnp.asarray, times)):
            for kind, predicted in predictions.items():
                drawn[kind] = euler_step(kind, predicted, drawn[kind], time, next_time)
        for noisy in drawn.values():
            np.testing.assert_allclose(noisy, image, atol=1e-6)
