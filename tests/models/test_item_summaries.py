"""What every slot of a generator's rows knows of its whole item: distances to its edges, and the
mean of its conditions."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmllm.models import diffusion
from jaxmllm.models.diffusion import by_slot, edge_distances, edge_features, mean_conditions
from jaxmllm.models.rows import GeneratorRows
from sharding.mesh import make_mesh
from sharding.rules import make_layout

LAYOUT = make_layout(make_mesh({"data": 1}, jax.devices()[:1]))
# A picture of 2 x 3 patches with two conditions; padding; and a clip of two frames of one patch,
# whose condition is hidden.
OWNERS = [1] * 8 + [0] + [2] * 3
SEGMENTS = [1] * 8 + [0] + [0, 2, 2]
CONDITIONS = [4, 5] + [-1] * 7 + [6, -1, -1]
PICTURE = [(0, row, column) for row in (-1, 0) for column in (-2, -1, 0)]
POSITIONS = [(0, 9, 9), (0, 9, 9), *PICTURE, (0, 0, 0), (7, 7, 7), (3, 0, 0), (4, 0, 0)]


# The same items where conditions are read by cross-attention, and lie in slots of patches.
APART = {
    "owners": [1] * 6 + [0] + [2] * 3,
    "segments": [1] * 6 + [0] + [2, 2, 0],
    "conditions": [4, 5] + [-1] * 5 + [6, 7, 8],
    "readers": [1, 1] + [0] * 8,
    "positions": [*PICTURE, (0, 0, 0), (3, 0, 0), (4, 0, 0), (9, 9, 9)],
}


def rows(apart: bool = False) -> GeneratorRows:
    """Rows with the arrays above; what no test reads is left out."""
    arrays = {
        "owners": OWNERS,
        "segments": SEGMENTS,
        "conditions": CONDITIONS,
        "positions": POSITIONS,
    }
    if apart:
        arrays = APART
    values = {name: jnp.asarray(value, jnp.int32)[None] for name, value in arrays.items()}
    empty = dict.fromkeys(GeneratorRows._fields)
    return GeneratorRows(**empty | values | {"times": jnp.zeros((1, 3))})


def test_patches_read_how_far_they_are_from_the_edges_of_their_item():
    """Distances from the middle of a patch to the first and last edge along
    time, height and width."""
    distances = np.asarray(edge_distances(LAYOUT, rows()))[0]
    picture = [
        (0.5, row + 1.5, column + 2.5, 0.5, 0.5 - row, 0.5 - column) for _, row, column in PICTURE
    ]
    assert distances[2:8].tolist() == [list(patch) for patch in picture]
    assert distances[10:].tolist() == [[0.5] * 3 + [1.5, 0.5, 0.5], [1.5] + [0.5] * 5]
    apart_distances = np.asarray(edge_distances(LAYOUT, rows(apart=True)))[0]
    assert apart_distances[:6].tolist() == distances[2:8].tolist()
    assert apart_distances[7:9].tolist() == distances[10:].tolist()
    features = np.asarray(edge_features(jnp.asarray(distances[None]), 16))
    assert features.shape == (1, 12, 6 * 16)
    # Features are cosines and sines of wave lengths from 3 to 192 patches.
    shortest, longest = features[0, 2].reshape(6, 2, 8)[1, :, [0, -1]]
    for (cosine, sine), wave in ((shortest, 3.0), (longest, 192.0)):
        angle = 2 * np.pi * 0.5 / wave
        np.testing.assert_allclose((cosine, sine), (np.cos(angle), np.sin(angle)), atol=1e-6)


def test_the_mean_of_conditions_is_that_of_those_that_are_seen():
    """The mean of slots 0 and 1 for the picture, zeros where the condition is hidden, and for
    an owner without any."""
    conditions = jnp.arange(24.0).reshape(1, 12, 2)
    means = np.asarray(mean_conditions(LAYOUT, rows(), conditions))[0]
    assert means.tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    apart_means = mean_conditions(LAYOUT, rows(apart=True), conditions[:, :10])
    assert np.asarray(apart_means)[0].tolist() == means.tolist()


def test_vectors_are_those_of_the_owners_however_they_are_found(monkeypatch):
    """By a product, as on CPUs, or looked up, as elsewhere: the same numbers, the same gradients,
    and zeros for padding."""
    random = np.random.default_rng(0)
    owners = jnp.asarray([OWNERS, OWNERS[::-1]], jnp.int32)
    vectors = jnp.asarray(random.normal(size=(2, 2, 3, 4)), jnp.float32)
    direction = jnp.asarray(random.normal(size=(3, 2, 12, 4)), jnp.float32)

    def of_slots(vectors):
        values = jnp.stack(by_slot(LAYOUT, vectors, owners))
        return (values * direction).sum(), values

    def computed():
        (_, values), gradient = jax.jit(jax.value_and_grad(of_slots, has_aux=True))(vectors)
        return np.asarray(values), np.asarray(gradient)

    multiplied = computed()
    monkeypatch.setattr(diffusion, "_multiplied", diffusion._looked_up)
    jax.clear_caches()
    looked_up = computed()
    padded = np.pad(vectors, ((0, 0), (1, 0), (0, 0), (0, 0)))
    expected = padded[np.arange(2)[:, None], owners]
    for values, gradient in (multiplied, looked_up):
        np.testing.assert_array_equal(np.moveaxis(values, 0, 2), expected)
        np.testing.assert_array_equal(gradient, multiplied[1])
