"""Whole steps in bfloat16 are those in float32, up to the rounding of bfloat16."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmllm.phases import LANGUAGE
from tests.support import EXHAUSTIVE, Setup, assemble

EXAMPLES = np.random.default_rng(0).permutation(96)[:24]
COMPONENTS = ("vision", "audio", "language", "projector__vision", "projector__audio")
COMPUTE = {f"components__{name}__compute_dtype": "bfloat16" for name in COMPONENTS}
# An operation in bfloat16 is off by up to 2^-9 = 0.2 %. Through encoder, projector and decoder and back again that adds
# up to 5 % of a leaf's norm at most (audio, whose gradients come a long way); an error of mathematics is off by 100 %.
LEAF_TOLERANCE = 0.08
ADDED_TOLERANCE = (
    1e-6  # of the sum of microbatches: measured 2e-8, and 4e-3 where it is kept in bfloat16
)
LOSS_TOLERANCE = 2e-3  # of a mean over some hundred tokens, measured 1e-4


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
    step, reference = setup.step(EXAMPLES), alone.step(EXAMPLES)
    found, expected = setup.gradients(step), alone.gradients(reference)
    assert found.mean_loss == pytest.approx(expected.mean_loss, rel=LOSS_TOLERANCE)
    assert found.mean_loss != expected.mean_loss, "was it computed in float32?"
    np.testing.assert_array_equal(found.targets, expected.targets)
    assert_near(found.grads, expected.grads, LEAF_TOLERANCE)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found.grads)} == {param_dtype}
    added = jax.tree.leaves(setup.programs.accumulators)
    assert {leaf.dtype.name for leaf in added} == {"float32"}, (
        "microbatches add up without rounding"
    )

    moved, metrics = update(setup, step)
    wanted, _ = update(alone, reference)
    assert metrics["loss"] == pytest.approx(expected.mean_loss, rel=LOSS_TOLERANCE)
    assert metrics["skipped"] == 0 and np.isfinite(metrics["gradient_norm"])
    # The first update of Adam is the sign of the gradient, which rounding turns where that is next to nothing.
    for name in wanted:
        want, got = (
            np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree[name])])
            for tree in (wanted, moved)
        )
        cosine = want @ got / np.linalg.norm(want) / np.linalg.norm(got)
        assert cosine > 0.95, f"{name}: {cosine:.3f}"


@pytest.mark.slow
def test_microbatches_add_up_without_rounding(by_example):
    """Small rows, so that one device has many microbatches; each of them alone is the step without the targets of the
    others. Their gradients in bfloat16 add up to that of the step, whose error is that of one of them."""
    rows = {"phases__language": {"block": 32, "capacities": [160], "spans": [1]}}
    narrow, wide = (assemble(by_example(**rows, **compute), 1) for compute in (COMPUTE, {}))
    examples = np.random.default_rng(0).permutation(96)[:48]
    step, reference = narrow.step(examples), wide.step(examples)
    count = len(step.rows[LANGUAGE])
    assert count >= 16

    def gradient(setup, step):
        grads = setup.gradients(step, setup.params).grads[LANGUAGE]
        return np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(grads)])

    def error(found, expected):
        return np.linalg.norm(found - expected) / np.linalg.norm(expected)

    parts = [gradient(narrow, alone_in(step, number)) for number in range(count)]
    exact = [gradient(wide, alone_in(reference, number)) for number in range(count)]
    whole = gradient(narrow, step)
    assert error(whole, sum(parts)) < ADDED_TOLERANCE
    assert error(whole, sum(exact)) < np.median([*map(error, parts, exact)])


def alone_in(step, number: int):
    """The step with the targets of one language microbatch alone."""
    rows = [
        row if at == number else row | {"targets": np.full_like(row["targets"], -1)}
        for at, row in enumerate(step.rows[LANGUAGE])
    ]
    return dataclasses.replace(step, rows=step.rows | {LANGUAGE: rows})


def assert_near(found, expected, tolerance: float) -> None:
    """Every leaf is off by at most `tolerance` of its norm."""
    for (path, want), got in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True
    ):
        want, got = np.float64(want), np.float64(got)
        difference = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert difference < tolerance, f"{jax.tree_util.keystr(path)}: {difference:.3f}"


def update(setup: Setup, step):
    """By how much one step moves every parameter of a fresh state, and its metrics."""
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
