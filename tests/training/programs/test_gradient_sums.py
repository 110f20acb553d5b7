"""Gradients that devices reduce once per step equal those that they reduce in every microbatch.

The reference is the same step on one device (the fixture `alone`), which reduces nothing.
"""

import jax
import numpy as np
import pytest

from jaxmllm.runtime.compilations import CompilationCounter
from tests.support import ENCODER_LAYOUT, assemble, assert_close, assert_same, slow_cases

COMPONENTS = ("vision", "audio", "language", "projector__vision", "projector__audio")
STEP = {f"components__{name}__reduce": "step" for name in COMPONENTS}
EXAMPLES = range(40)
TIED = {"model__language__tie_embeddings": True}
WIDE = {f"components__{name}__layout": ENCODER_LAYOUT for name in ("vision", "audio")}
SPANS = {
    f"phases__{phase}": {"block": 8, "capacities": [slots], "spans": spans, "kept_residuals": kept}
    for phase, slots, spans, kept in (
        ("vision", 64, [2], 1),
        ("audio", 256, [2], 0),
        ("language", 96, [1, 2], 0),
    )
}
MESHES = {  # mesh, further changes
    "data2-fsdp2": ({"data": 2, "fsdp": 2}, {}),
    "fsdp4": ({"data": 1, "fsdp": 4}, {}),
    "fsdp2-tensor2-tied": ({"data": 1, "fsdp": 2, "tensor": 2}, TIED),
    "fsdp2-tensor2-encoders-over-tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, WIDE),
    "fsdp2-context2": ({"data": 1, "fsdp": 2, "context": 2}, {}),
    "spans": ({"data": 2, "fsdp": 4}, SPANS),
}


@pytest.mark.parametrize(
    "mesh, changes",
    slow_cases(MESHES, {"fsdp2-tensor2-encoders-over-tensor"}),
)
def test_gradients_reduced_once_are_the_same(setups, by_example, mesh, changes):
    model_changes = {key: value for key, value in changes.items() if key.startswith("model")}
    alone = setups(by_example(**model_changes), 1)
    expected = alone.gradients(alone.step(EXAMPLES))
    setup = setups(by_example(mesh=mesh, **STEP, **changes), int(np.prod(list(mesh.values()))))
    step = setup.step(EXAMPLES)
    assert max(map(len, step.rows.values())) > 1
    assert len(step.rows["vision"]) > setup.programs.kept_residuals.get("vision", 0)
    assert_same(setup.gradients(step), expected, 1e-5)


@pytest.mark.slow
def test_one_component_alone_and_no_further_compilation(setups, by_example, alone):
    """Frozen parameters have no sums, and steps of other sizes compile nothing."""
    setup = setups(
        by_example(
            mesh={"data": 1, "fsdp": 2},
            components__language={"reduce": "step", "train": ["layers.*", "head"]},
            components__vision__freeze=True,
        ),
        2,
    )
    expected = alone.gradients(alone.step(EXAMPLES)).grads
    sums = setup.programs.accumulators
    assert sums["language"].keys() == {"layers", "head"} and "vision" not in sums
    assert sums["language"]["head"].shape[0] == 2
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(sums["language"]["layers"]["mlp"]))
    summed = setup.gradients(setup.step(EXAMPLES)).grads
    assert_close(
        summed, {name: _part(expected[name], grads) for name, grads in summed.items()}, 1e-5
    )
    state = setup.programs.init(0)
    state, _ = setup.programs.train(state, setup.put(setup.step([0, 1])))  # transfers compile, too
    counter = CompilationCounter()
    for examples in (range(7), range(30), range(2)):
        state, metrics = setup.programs.train(state, setup.put(setup.step(examples)))
        assert np.isfinite(jax.device_get(metrics["loss"]))
    assert counter.names == []
    counter.close()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_sums_in_bfloat16_are_rounded_once(by_example):
    """`reduce_dtype: compute` narrows what a step sends; microbatches add up in float32."""
    bfloat16 = {f"components__{name}__compute_dtype": "bfloat16" for name in COMPONENTS}
    narrow = {f"components__{name}__reduce_dtype": "compute" for name in COMPONENTS}
    mesh = {"data": 1, "fsdp": 2}
    wide, rounded = (
        assemble(by_example(mesh=mesh, **STEP, **bfloat16, **changes), 2)
        for changes in ({}, narrow)
    )
    step = wide.step(EXAMPLES)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(rounded.programs.accumulators))
    rounded_grads = rounded.gradients(step).grads
    wide_grads = wide.gradients(step).grads
    # A few roundings to bfloat16, each of at most 2**-9
    assert_close(rounded_grads, wide_grads, 2**-6)
    differ = jax.tree.map(lambda a, b: bool(np.any(a != b)), rounded_grads, wide_grads)
    assert any(jax.tree.leaves(differ)), "what is sent is not rounded"


def _part(tree, like):
    """The leaves of `tree` at the keys that `like` has."""
    return {
        key: _part(tree[key], value) if isinstance(value, dict) else tree[key]
        for key, value in like.items()
    }
