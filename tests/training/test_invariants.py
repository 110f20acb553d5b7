"""Packing, the plan and the mesh leave loss and gradients as they are.

The reference is the same step on one device (the fixture `whole`), or the sum of single examples.
"""

import math
from typing import get_args

import jax
import numpy as np
import pytest

from jaxmllm.balance.records import Mode
from jaxmllm.data.rows import fill
from tests.balance.any_plan import any_plan
from tests.support import (
    ENCODER_LAYOUT,
    Result,
    added,
    assemble,
    assert_close,
    assert_same,
    scaled,
    slow_cases,
    without_targets,
)

EXAMPLES = np.random.default_rng(0).permutation(96)[:24]


@pytest.fixture(scope="module")
def whole(alone) -> Result:
    return alone.gradients(alone.step(EXAMPLES))


def test_examples_cover_every_modality(alone):
    step = alone.step(EXAMPLES)
    assert all(len(step.rows[phase]) >= 1 for phase in alone.spec.phases)
    assert {len(alone.corpus.example(i).media) for i in EXAMPLES} >= {0, 1, 2}
    assert max(row["segments"].max() for row in step.rows["language"]) >= 3  # packed


def test_packed_equals_unpacked(alone, whole):
    single_grads = []
    targets = []
    for i in EXAMPLES:
        step = alone.step([i])
        single = alone.gradients(step)
        source = alone.corpus.source_of(i)
        assert single.targets[source] == step.targets == whole.targets[source]
        np.testing.assert_allclose(single.loss[source], whole.loss[source], rtol=1e-5)
        single_grads.append(scaled(single.grads, step.targets))
        targets.append(step.targets)
    assert_close(scaled(whole.grads, sum(targets)), added(single_grads), 1e-5)


@pytest.mark.parametrize("kind", [(), ("vision",), ("audio",), ("vision", "audio")])
def test_neighbours_in_a_row_leave_an_examples_gradients_alone(alone, kind):
    """Among others, whose targets are masked, an example has the gradients that it has alone."""
    i = next(i for i in EXAMPLES if i in alone.of_kind(kind))
    source = alone.corpus.source_of(i)
    packed = alone.step(EXAMPLES)
    packed_result = alone.gradients(without_targets(packed, [source], keep=True))
    single_result = alone.gradients(alone.step([i]))
    used = {
        name: g
        for name, g in single_result.grads.items()
        if any(np.any(leaf) for leaf in jax.tree.leaves(g))
    }
    assert set(used) == {"language", *kind, *(f"projector.{phase}" for phase in kind)}
    # A step's loss is a mean over the targets that were planned, masked ones included
    factor = packed.targets / single_result.targets.sum()
    assert_close({name: scaled(packed_result.grads[name], factor) for name in used}, used, 1e-5)


# ---------------------------------------------------------------------------- any plan on any mesh

MODES = get_args(Mode)
ALONG = {
    f"components__{name}__layout": {"batch": ["data", "fsdp", "context"]}
    for name in ("vision", "audio")
}
WIDE = {"components__vision__layout": ENCODER_LAYOUT, "components__audio__layout": ENCODER_LAYOUT}
SLOW_MESHES = {
    "mixed-encoders-over-tensor": (8, {"data": 2, "fsdp": 2, "tensor": 2}, WIDE),
    "data2": (2, {"data": 2}, {}),
    "data4": (4, {"data": 4}, {}),
    "fsdp2": (2, {"fsdp": 2, "data": 1}, {}),
    "fsdp4": (4, {"fsdp": 4, "data": 1}, {}),
    "fsdp8": (8, {"fsdp": 8, "data": 1}, {}),
    "data4-fsdp2": (8, {"data": 4, "fsdp": 2}, {}),
    "tensor2": (2, {"data": 1, "tensor": 2}, {}),
    "tensor2-encoders-over-tensor": (2, {"data": 1, "tensor": 2}, WIDE),
    "data2-tensor2": (4, {"data": 2, "tensor": 2}, {}),
    "fsdp4-tensor2": (8, {"data": 1, "fsdp": 4, "tensor": 2}, {}),
    "data4-tensor2-encoders-over-tensor": (8, {"data": 4, "tensor": 2}, WIDE),
    "mixed": (8, {"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "context2": (2, {"data": 1, "context": 2}, {}),
    "context4": (4, {"data": 1, "context": 4}, {}),
    "context8": (8, {"data": 1, "context": 8}, {}),
    "fsdp2-context2-tensor2": (8, {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, {}),
    "data2-context2-tensor2": (8, {"data": 2, "context": 2, "tensor": 2}, {}),
    "data2-context4-encoders-over-context": (8, {"data": 2, "context": 4}, ALONG),
}
MESHES = [  # devices, mesh, further changes; ranks are data * fsdp
    pytest.param(8, {"data": 8}, {}, id="data8"),
    *slow_cases(SLOW_MESHES, {"mixed-encoders-over-tensor", "fsdp2-context2-tensor2"}),
]


@pytest.mark.parametrize("devices, mesh, changes", MESHES)
def test_mesh_and_plan_leave_the_mathematics_alone(
    setups, by_example, alone, whole, devices, mesh, changes
):
    """Ranks are data * fsdp, times the further axes that encoders are split over."""
    setup = setups(by_example(mesh=mesh, **changes), devices)
    language_ranks = setup.spec.phases["language"].ranks
    devices_per_rank = math.prod(mesh.get(axis, 1) for axis in ("context", "tensor"))
    encoder_ranks = language_ranks * (devices_per_rank if changes else 1)
    assert [phase.ranks for phase in setup.spec.phases.values()] == [
        encoder_ranks,
        encoder_ranks,
        language_ranks,
    ]
    assert language_ranks * devices_per_rank == devices
    # The alignment does not depend on how rows are split
    assert setup.corpus.formats["audio"].alignment == 8
    # Initial parameters are the same on every mesh, bit for bit
    for name in alone.params:
        jax.tree.map(np.testing.assert_array_equal, setup.params[name], alone.params[name])
    for mode in MODES:
        assert_same(setup.gradients(setup.step(EXAMPLES, mode=mode)), whole, 1e-5)


@pytest.fixture(scope="module")
def cramped(setups, by_example):
    """Rows of two classes, small pools and smaller pairs: many microbatches, pools and rounds."""
    return setups(
        by_example(
            mesh={"data": 2},
            phases__vision={"block": 32, "capacities": [96, 32]},
            phases__audio={"block": 16, "capacities": [448, 128]},
            phases__language={"block": 32, "capacities": [160, 64]},
            balance__pool_slots=160,
            balance__pair_slots=24,
        ),
        2,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "phases"])
def test_row_classes_pools_and_rounds_leave_the_mathematics_alone(cramped, whole, mode):
    step = cramped.step(EXAMPLES, mode=mode)
    assert len(set(step.capacities["language"])) == 2
    assert all(len(rows) >= (4 if phase == "language" else 2) for phase, rows in step.rows.items())
    assert max(step.pools["language"]) >= 1
    assert len(step.rounds["vision"]) >= 3
    assert_same(cramped.gradients(step), whole, 1e-5)


# ---------------------------------------------------------------------------- rows that several ranks hold

# Slots of a complete row, enough for every item of the sample
ROW_SLOTS = {"vision": 128, "audio": 512, "language": 192}


def rows_of_spans(encoders, language):
    """`phases` of a config with rows of these spans; only the widest rows hold every item."""
    spans = {"vision": encoders, "audio": encoders, "language": language}
    return {
        phase: {"block": 8, "capacities": [slots // max(spans[phase])], "spans": [*spans[phase]]}
        for phase, slots in ROW_SLOTS.items()
    }


SPANS = {  # devices, mesh, spans of encoders and of the language model, further changes
    "data2": (2, {"data": 2}, (2,), (1, 2), {}),
    "data8": (8, {"data": 8}, (1, 2, 4, 8), (1, 2, 4, 8), {}),
    "data2-fsdp4": (8, {"data": 2, "fsdp": 4}, (2, 8), (1, 4), {}),
    "data4-tensor2-encoders-over-tensor": (8, {"data": 4, "tensor": 2}, (2, 8), (1, 4), WIDE),
    "only-encoders": (8, {"data": 2, "fsdp": 2, "tensor": 2}, (1, 8), (1,), WIDE),
    "data4-context2": (8, {"data": 4, "context": 2}, (1, 4), (1, 4), {}),
    "encoders-over-context": (8, {"data": 2, "context": 4}, (2, 8), (2,), ALONG),
}


def in_any_plan(setup, seed):
    """The rows of a random plan that no planner would make: empty groups, scattered media."""
    formats = setup.corpus.formats
    alignment = {phase: formats[phase].alignment for phase in formats} | {"language": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "plan_step", lambda items, spec: any_plan(seed, items, spec, alignment))
        return setup.step(EXAMPLES)


def media_are_cut(step):
    """Whether the tokens of media lie on both sides of an edge between two ranks."""
    arrived = [
        row["arrived"].reshape(len(row["arrived"]), span, -1)
        for row, span in zip(step.rows["language"], step.spans["language"], strict=True)
        if span > 1
    ]
    return any(((slots[:, 1:, 0] >= 0) & (slots[:, :-1, -1] >= 0)).any() for slots in arrived)


@pytest.mark.parametrize(
    "devices, mesh, spans_of_encoders, spans_of_language, changes",
    slow_cases(SPANS, {"data2", "encoders-over-context"}),
)
def test_rows_of_several_ranks_leave_the_mathematics_alone(
    setups, by_example, whole, devices, mesh, spans_of_encoders, spans_of_language, changes
):
    rows = rows_of_spans(spans_of_encoders, spans_of_language)
    setup = setups(by_example(mesh=mesh, phases=rows, **changes), devices)
    steps = [setup.step(EXAMPLES), *(in_any_plan(setup, seed) for seed in (0, 1))]
    for phase, spec in setup.spec.phases.items():
        spans = spans_of_language if phase == "language" else spans_of_encoders
        assert {row_class.span for row_class in spec.classes} == set(spans)
        used_spans = {span for step in steps for span in step.spans[phase]}
        assert len(used_spans) >= min(len(spans), 2) and used_spans <= set(spans)
        assert max(spec.capacities) < setup.corpus.longest(phase) or max(spans) == 1
    assert any(map(media_are_cut, steps)) == (max(spans_of_language) > 1)
    for step in steps:
        assert_same(setup.gradients(step), whole, 1e-5)
    evaluated = jax.device_get(setup.programs.evaluate(setup.params, setup.put(steps[1])))
    np.testing.assert_allclose(evaluated.sums.loss.sum(0), whole.loss, rtol=1e-5)


@pytest.mark.slow
def test_float64_agrees_to_ten_digits(by_example):
    """Agreement to ten digits in float64 shows that differences in float32 are rounding."""
    double = {
        "run__param_dtype": "float64",
        "components": {
            name: {"compute_dtype": "float64"} for name in ("vision", "audio", "language")
        }
        | {"projector": {name: {"compute_dtype": "float64"} for name in ("vision", "audio")}},
    }
    with jax.enable_x64(True):
        single_device = assemble(by_example(**double), 1)
        reference = single_device.gradients(single_device.step(EXAMPLES))
        assert reference.loss.dtype == np.float64
        single_results = [single_device.gradients(single_device.step([i])) for i in EXAMPLES]
        unpacked = added([scaled(single.grads, single.targets.sum()) for single in single_results])
        assert_close(scaled(reference.grads, reference.targets.sum()), unpacked, 1e-10)

        changes = double["components"] | {
            name: double["components"][name] | {"layout": ENCODER_LAYOUT}
            for name in ("vision", "audio")
        }
        mesh = {"data": 1, "context": 2, "tensor": 2}
        meshed = assemble(by_example(mesh=mesh, **double | {"components": changes}), 4)
        for mode in ("none", "phases"):
            assert_same(meshed.gradients(meshed.step(EXAMPLES, mode=mode)), reference, 1e-10)
