"""Learning rates, clipping and AdamW against their formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmllm.config.schema import OptimizerConfig
from jaxmllm.training.optimizer import clip_scale, learning_rate, make_optimizer


def rates(steps, at, **settings):
    """Learning rates of a run of `steps` steps at the steps `at`; their peak is 0.5."""
    config = OptimizerConfig(learning_rate=0.5, **settings)
    return [float(learning_rate(config, steps, jnp.asarray(step, jnp.int32))) for step in at]


def test_warm_up_is_linear_and_never_zero():
    warm_up_rates = rates(100, range(6), warmup_steps=4, schedule="constant")
    np.testing.assert_allclose(
        warm_up_rates, [0.125, 0.21875, 0.3125, 0.40625, 0.5, 0.5], rtol=1e-6
    )


def test_cosine_falls_to_its_final_scale():
    cosine_rates = rates(110, [0, 10, 35, 60, 110, 500], warmup_steps=10, final_scale=0.2)
    # Half and a quarter of the way down
    middle = 0.5 * (0.2 + 0.8 * 0.5)
    quarter = 0.5 * (0.2 + 0.8 * (1 + np.cos(np.pi / 4)) / 2)
    np.testing.assert_allclose(cosine_rates, [0.05, 0.5, quarter, middle, 0.1, 0.1], rtol=1e-6)


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert rates(10, [0, 9], schedule="constant") == [0.5, 0.5]
    assert rates(10, [0]) == [0.5]


def test_a_run_shorter_than_its_warm_up_has_finite_rates():
    assert np.isfinite(rates(3, range(5), warmup_steps=8)).all()


@pytest.mark.parametrize(("limit", "factor"), [(1.0, 0.2), (5.0, 1.0), (50.0, 1.0), (None, 1.0)])
def test_clipping(limit, factor):
    assert clip_scale(jnp.asarray(5.0), limit) == pytest.approx(factor, rel=1e-6)


def test_clipping_zero_gradients_leaves_them_zero():
    assert clip_scale(jnp.asarray(0.0), 1.0) == 1


def test_adam_with_decoupled_decay_of_matrices_alone():
    """The reference is AdamW by its definition; only `head` and `up` are matrices that decay."""
    names = ["embedding", "head", "up", "up_bias", "query_bias", "bias"]
    rng = np.random.default_rng(0)
    params = {
        "x": {name: rng.standard_normal((3, 2)) for name in names},
        "norm": {"scale": rng.standard_normal(3)},
    }
    config = OptimizerConfig(
        learning_rate=1.0, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.1
    )
    with jax.enable_x64(True):
        optimizer = make_optimizer(config)
        state = optimizer.init(params)
        update = jax.jit(optimizer.update)
        moments = jax.tree.map(lambda leaf: (0 * leaf, 0 * leaf), params)
        for step in range(1, 4):
            grads = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), params)
            updates, state = update(grads, state, params)
            for path, p in jax.tree.leaves_with_path(params):
                group, name = (key.key for key in path)
                g, (m, v) = grads[group][name], moments[group][name]
                m = 0.8 * m + 0.2 * g
                v = 0.9 * v + 0.1 * g * g
                moments[group][name] = m, v
                expected = m / (1 - 0.8**step) / (np.sqrt(v / (1 - 0.9**step)) + 1e-3)
                if name in ("head", "up"):
                    expected = expected + 0.1 * p
                np.testing.assert_allclose(
                    updates[group][name], expected, rtol=1e-10, err_msg=f"{step} {name}"
                )


def test_what_towers_add_to_their_slots_is_not_decayed():
    """With gradients of zero, decay alone would move a parameter."""
    params = {name: jnp.ones((2, 3)) for name in ("class_token", "position_embedding", "patch")}
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1.0, weight_decay=0.1))
    updates, _ = optimizer.update(optax.tree.zeros_like(params), optimizer.init(params), params)
    assert {name for name, update in updates.items() if update.any()} == {"patch"}
