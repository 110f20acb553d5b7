"""Steps whose rows several ranks share, of one span or of many, against one device.

All are slow; test_shared_rows.py tests the same by single functions, in seconds.
"""

import math

import jax
import numpy as np
import pytest

from jaxmllm.balance.records import RowClass
from jaxmllm.runtime.compilations import CompilationCounter
from tests.support import ENCODER_LAYOUT, Result, assemble, assert_same, slow_cases
from tests.training.test_precision import COMPUTE, LEAF_TOLERANCE, LOSS_TOLERANCE, assert_near
from tests.training.test_windows import MODEL as WINDOWS

EXAMPLES = np.random.default_rng(0).permutation(96)[:24]
SMALL = {"vision": 16, "audio": 64, "language": 32}  # slots of a rank; the longest items fill 8
pytestmark = pytest.mark.slow
WIDE = {"components__vision__layout": ENCODER_LAYOUT, "components__audio__layout": ENCODER_LAYOUT}


def phases(spans):
    """Rows in which the longest items fit on the longest span alone."""
    # The longest items fill 8 ranks' worth of SMALL slots, whatever the longest span is
    factor = -(-8 // max(spans))
    return {
        name: {"block": 16, "capacities": [factor * capacity], "spans": spans}
        for name, capacity in SMALL.items()
    }


@pytest.fixture(scope="module")
def whole(alone) -> Result:
    return alone.gradients(alone.step(EXAMPLES))


def used_spans(step):
    return {span for spans in step.spans.values() for span in spans}


@pytest.fixture(scope="module")
def mixed(setups, by_example):
    return setups(by_example(mesh={"data": 4, "fsdp": 2}, phases=phases([1, 2, 4, 8])), 8)


def test_rows_of_many_spans_leave_the_mathematics_alone(mixed, whole):
    step = mixed.step(EXAMPLES)
    assert len(used_spans(step)) >= 2
    for phase in SMALL:
        longest = mixed.corpus.gather(EXAMPLES).phases[phase].length.max()
        assert longest > SMALL[phase], "some item lies on several ranks"
    assert_same(mixed.gradients(step), whole, 1e-5)


CASES = {  # mesh, spans, further changes
    "span2": ({"data": 8}, [2], {}),
    "span4": ({"data": 4, "fsdp": 2}, [4], {}),
    "span8": ({"fsdp": 8, "data": 1}, [8], {}),
    "span3": ({"data": 3}, [1, 3], {}),
    "span6": ({"data": 6}, [1, 2, 6], {}),
    "span3-span6": ({"data": 6}, [1, 3, 6], {}),
    "span5": ({"data": 5}, [1, 5], {}),
    "span7": ({"data": 7}, [1, 7], {}),
    "data8": ({"data": 8}, [1, 8], {}),
    "tensor2": ({"data": 2, "fsdp": 2, "tensor": 2}, [1, 2, 4], {}),
    "encoders-over-tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, [1, 2, 4], WIDE),
    "context2": ({"data": 2, "fsdp": 2, "context": 2}, [1, 2, 4], {}),
    "context2-span2": ({"data": 4, "context": 2}, [2], {}),
}


@pytest.mark.parametrize("mesh, spans, changes", slow_cases(CASES, {"encoders-over-tensor"}))
def test_spans_leave_the_mathematics_alone(setups, by_example, whole, mesh, spans, changes):
    config = by_example(mesh=mesh, phases=phases(spans), **changes)
    setup = setups(config, math.prod(mesh.values()))
    step = setup.step(EXAMPLES)
    assert used_spans(step) <= set(spans) and max(used_spans(step)) > 1
    assert_same(setup.gradients(step), whole, 1e-5)


@pytest.mark.parametrize(("tokens", "span", "block"), [(64, 8, 32), (96, 8, 32), (256, 2, 64)])
def test_a_rank_may_hold_few_blocks_or_less_than_one(
    setups, by_example, whole, tokens, span, block
):
    """Attention takes smaller blocks in these rows, and only in these."""
    slots = {"vision": tokens, "audio": 4 * tokens, "language": tokens}
    rows = {
        name: {"block": 128, "capacities": [capacity], "spans": [span]}
        for name, capacity in slots.items()
    }
    setup = setups(by_example(mesh={"data": 4, "fsdp": 2}, phases=rows), 8)
    attention = setup.programs.attention
    assert attention.blocks == dict.fromkeys(slots, 128)
    assert attention.smaller_blocks == {
        (name, RowClass(capacity, span)): block for name, capacity in slots.items()
    }
    assert_same(setup.gradients(setup.step(EXAMPLES)), whole, 1e-5)


CUT = {"model__vision__merge": 3, "model__audio__merge": 3, "model__audio__chunk_frames": 36}


@pytest.mark.parametrize(
    ("mesh", "spans"),
    [
        pytest.param({"data": 4, "fsdp": 2}, [1, 2, 8], marks=pytest.mark.exhaustive),
        ({"data": 2, "fsdp": 2, "context": 2}, [4]),
    ],
)
def test_blocks_may_cut_tokens(setups, by_example, mesh, spans):
    """A language token is 9 patches or 12 frames, and a block is 16 patches or 64 frames."""
    slots = {"vision": 9 * 16, "audio": 3 * 64, "language": 32}
    rows = {
        name: {"block": 16, "capacities": [capacity * mesh.get("context", 1)], "spans": spans}
        for name, capacity in slots.items()
    }
    single_device = setups(by_example(phases={name: {"block": 16} for name in SMALL}, **CUT), 1)
    meshed = setups(by_example(mesh=mesh, phases=rows, **CUT), 8)
    step = meshed.step(EXAMPLES)
    assert all(max(step.spans[phase]) > 1 for phase in ("vision", "audio"))
    assert_same(meshed.gradients(step), single_device.gradients(single_device.step(EXAMPLES)), 1e-5)


@pytest.mark.exhaustive
def test_layers_with_windows(setups, by_example):
    single_device = setups(by_example(phases={name: {"block": 16} for name in SMALL}, **WINDOWS), 1)
    meshed = setups(by_example(mesh={"data": 4, "fsdp": 2}, phases=phases([1, 2, 8]), **WINDOWS), 8)
    step = meshed.step(EXAMPLES)
    assert max(used_spans(step)) > 1
    assert_same(meshed.gradients(step), single_device.gradients(single_device.step(EXAMPLES)), 1e-5)


def test_ranks_without_any_item(mixed, alone):
    """With one example, most ranks compute padding, alone or in groups."""
    for kind in ((), ("vision",), ("audio",), ("vision", "audio")):
        examples = alone.of_kind(kind)[:1]
        expected = alone.gradients(alone.step(examples))
        actual = mixed.gradients(mixed.step(examples))
        np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-5)
        for name, tree in expected.grads.items():
            if any(np.any(leaf) for leaf in jax.tree.leaves(tree)):
                assert_same(
                    Result({name: actual.grads[name]}, actual.loss, actual.targets, 0),
                    Result({name: tree}, expected.loss, expected.targets, 0),
                    1e-5,
                )


def test_batches_compile_nothing_anew(mixed):
    rng = np.random.default_rng(2)
    state = mixed.programs.init(0)
    # The first steps also compile transfers, which the counter below would report
    state, _ = mixed.programs.train(state, mixed.put(mixed.step(range(96))))
    state, _ = mixed.programs.train(state, mixed.put(mixed.step([0, 1])))
    counter = CompilationCounter()
    spans_seen = set()
    for _ in range(20):
        step = mixed.step(rng.permutation(96)[: rng.integers(1, 49)])
        spans_seen |= used_spans(step)
        state, metrics = mixed.programs.train(state, mixed.put(step))
        assert np.isfinite(jax.device_get(metrics["loss"]))
    assert counter.names == []
    counter.close()
    assert len(spans_seen) >= 3


@pytest.mark.slow
@pytest.mark.exhaustive
def test_float64_agrees_to_ten_digits(by_example):
    components = {name: {"compute_dtype": "float64"} for name in SMALL} | {
        "projector": {name: {"compute_dtype": "float64"} for name in ("vision", "audio")}
    }
    double = {"run__param_dtype": "float64", "components": components}
    with jax.enable_x64(True):
        single_device = assemble(by_example(**double), 1)
        meshed = assemble(
            by_example(
                mesh={"data": 2, "fsdp": 2, "context": 2}, phases=phases([1, 2, 4]), **double
            ),
            8,
        )
        step = meshed.step(EXAMPLES)
        assert max(used_spans(step)) > 1
        assert_same(
            meshed.gradients(step), single_device.gradients(single_device.step(EXAMPLES)), 1e-10
        )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_step_in_bfloat16_is_that_in_float32(setups, by_example, whole):
    meshed = setups(by_example(mesh={"data": 4, "fsdp": 2}, phases=phases([2, 8]), **COMPUTE), 8)
    result = meshed.gradients(meshed.step(EXAMPLES))
    assert result.mean_loss == pytest.approx(whole.mean_loss, rel=LOSS_TOLERANCE)
    assert_near(result.grads, whole.grads, LEAF_TOLERANCE)
