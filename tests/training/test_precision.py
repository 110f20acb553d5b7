"""Steps in bfloat16 are those in float32, up to the rounding of bfloat16.

The reference is one device in float32; each tolerance has the measured value beside it.
"""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmllm.phases import LANGUAGE
from tests.support import EXHAUSTIVE, Setup, assemble

EXAMPLES = np.random.default_rng(0).permutation(96)[:24]
COMPONENTS = ("vision", "audio", "language", "projector__vision", "projector__audio")
COMPUTE = {f"components__{name}__compute_dtype": "bfloat16" for name in COMPONENTS}
# An operation in bfloat16 is off by up to 2^-9 = 0.2 %. Through encoder, projector, decoder and
# back, that adds up to at most 5 % of a leaf's norm (audio, whose gradients pass through the most
# layers). A mathematical error is off by 100 %.
LEAF_TOLERANCE = 0.08
# Relative to the sum of microbatches: measured 2e-8, and 4e-3 if the sum is kept in bfloat16
ADDED_TOLERANCE = 1e-6
LOSS_TOLERANCE = 2e-3  # of a mean over some hundred tokens; measured 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "param_dtype, devices, mesh",
    [
        pytest.param(
            "float32",
            8,
            {"data": 2, "fsdp": 2, "tensor": 2},
            id="fsdp-tensor",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("float32", 1, {"data": 1}, id="one", marks=EXHAUSTIVE),
        pytest.param("bfloat16", 8, {"data": 2, "fsdp": 2, "tensor": 2}, id="bfloat16-params"),
    ],
)
def test_a_step_in_bfloat16_is_that_in_float32(
    setups, by_example, alone, param_dtype, devices, mesh
):
    setup = setups(by_example(mesh=mesh, run__param_dtype=param_dtype, **COMPUTE), devices)
    step = setup.step(EXAMPLES)
    reference = alone.step(EXAMPLES)
    result = setup.gradients(step)
    expected = alone.gradients(reference)
    assert result.mean_loss == pytest.approx(expected.mean_loss, rel=LOSS_TOLERANCE)
    assert result.mean_loss != expected.mean_loss, "was it computed in float32?"
    np.testing.assert_array_equal(result.targets, expected.targets)
    assert_near(result.grads, expected.grads, LEAF_TOLERANCE)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(result.grads)} == {param_dtype}
    sums = jax.tree.leaves(setup.programs.accumulators)
    assert {leaf.dtype.name for leaf in sums} == {"float32"}, "microbatches add up without rounding"

    actual_update, metrics = update(setup, step)
    expected_update, _ = update(alone, reference)
    assert metrics["loss"] == pytest.approx(expected.mean_loss, rel=LOSS_TOLERANCE)
    assert metrics["skipped"] == 0 and np.isfinite(metrics["gradient_norm"])
    # The first update of Adam is the sign of the gradient, which rounding may flip near zero
    for name in expected_update:
        expected_change, actual_change = (
            np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree[name])])
            for tree in (expected_update, actual_update)
        )
        cosine = (
            expected_change
            @ actual_change
            / np.linalg.norm(expected_change)
            / np.linalg.norm(actual_change)
        )
        assert cosine > 0.95, f"{name}: {cosine:.3f}"


@pytest.mark.slow
def test_microbatches_add_up_without_rounding(by_example):
    """The sum over microbatches adds no error to that of a single one.

    Rows are small, so that one device has many microbatches. A microbatch alone is the step with
    the targets of all others masked.
    """
    rows = {"phases__language": {"block": 32, "capacities": [160], "spans": [1]}}
    narrow, wide = (assemble(by_example(**rows, **compute), 1) for compute in (COMPUTE, {}))
    examples = np.random.default_rng(0).permutation(96)[:48]
    step = narrow.step(examples)
    reference = wide.step(examples)
    microbatches = len(step.rows[LANGUAGE])
    assert microbatches >= 16

    def gradient(setup, step):
        grads = setup.gradients(step, setup.params).grads[LANGUAGE]
        return np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(grads)])

    def error(found, expected):
        return np.linalg.norm(found - expected) / np.linalg.norm(expected)

    rounded_parts = [gradient(narrow, alone_in(step, index)) for index in range(microbatches)]
    exact_parts = [gradient(wide, alone_in(reference, index)) for index in range(microbatches)]
    rounded_sum = gradient(narrow, step)
    assert error(rounded_sum, sum(rounded_parts)) < ADDED_TOLERANCE
    assert error(rounded_sum, sum(exact_parts)) < np.median(
        [*map(error, rounded_parts, exact_parts)]
    )


def alone_in(step, number: int):
    """The step with the targets of one language microbatch alone."""
    rows = [
        row if index == number else row | {"targets": np.full_like(row["targets"], -1)}
        for index, row in enumerate(step.rows[LANGUAGE])
    ]
    return dataclasses.replace(step, rows=step.rows | {LANGUAGE: rows})


def assert_near(found, expected, tolerance: float) -> None:
    """Every leaf is off by at most `tolerance` of its norm."""
    for (path, expected_leaf), actual_leaf in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True
    ):
        expected_leaf = np.float64(expected_leaf)
        actual_leaf = np.float64(actual_leaf)
        difference = np.linalg.norm(actual_leaf - expected_leaf) / np.linalg.norm(expected_leaf)
        assert difference < tolerance, f"{jax.tree_util.keystr(path)}: {difference:.3f}"


def update(setup: Setup, step):
    """The change of every parameter in one step from a fresh state, and the step's metrics."""
    state = setup.programs.init(0)
    before = jax.device_get(state.params)
    state, metrics = setup.programs.train(state, setup.put(step))
    after = jax.device_get(state.params)
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(
        lambda leaf: leaf.dtype, before
    )
    return jax.tree.map(
        lambda new, old: np.float64(new) - np.float64(old), after, before
    ), jax.device_get(metrics)
