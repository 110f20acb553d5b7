"""Steps of a model whose decoder adds features of tower layers to its first layers.

Packing, meshes and stages are compared with one device. Positions are those that published models
of this kind have. Tokens of sound go through the same pools and add nothing.
"""

import numpy as np
import pytest

from tests.support import Result, added, assert_close, assert_same, scaled, slow_cases
from tests.training.programs.test_staged import computed
from tests.training.test_spans import phases

EXAMPLES = np.random.default_rng(0).permutation(96)[:16]
MODEL = {
    "model__language__layers": 5,  # divisible by none of the numbers of stages below
    "model__language__rope_interleaved": True,
    "model__vision__layers": 3,
    "model__vision__deepstack_layers": [0, 2],
    "model__vision__positions": "rotary_and_resampled",
    "model__vision__position_grid": 5,
    "model__audio__layers": 2,
}
BLOCKS = {name: {"block": 16} for name in ("vision", "audio", "language")}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one(setups, by_example):
    return setups(by_example(phases=BLOCKS, **MODEL), 1)


@pytest.fixture(scope="module")
def whole(one) -> Result:
    return one.gradients(one.step(EXAMPLES))


@pytest.mark.exhaustive
def test_packed_equals_unpacked(one, whole):
    steps = [one.step([example]) for example in EXAMPLES]
    single_grads = [scaled(one.gradients(step).grads, step.targets) for step in steps]
    assert_close(
        scaled(whole.grads, sum(step.targets for step in steps)), added(single_grads), 1e-5
    )


@pytest.mark.exhaustive
def test_what_is_added_is_seen_in_the_loss(setups, by_example, whole):
    """Without an effect on the loss, the other tests would prove nothing about the additions."""
    single_addition = setups(
        by_example(phases=BLOCKS, **MODEL | {"model__vision__deepstack_layers": [2]}), 1
    )
    single_addition_result = single_addition.gradients(single_addition.step(EXAMPLES))
    assert abs(single_addition_result.mean_loss - whole.mean_loss) > 1e-4


CASES = {  # devices, mesh, what else
    "spans": (8, {"data": 4, "fsdp": 2}, {"phases": phases([1, 2, 8])}),
    "context2-tensor2": (8, {"data": 2, "context": 2, "tensor": 2}, {}),
    "stages2": (2, {"data": 1}, {"pipeline": {"stages": 2, "layout": "chain"}}),
    "stages2-context2-segments": (
        4,
        {"data": 1, "context": 2},
        {"pipeline": {"stages": 2, "layout": "segments"}},
    ),
    "stages4-split": (
        4,
        {"data": 1},
        {"pipeline": {"stages": 4, "layout": "parallel", "split_backward": True}},
    ),
}


@pytest.mark.parametrize("devices, mesh, changes", slow_cases(CASES, {"stages2"}))
def test_meshes_and_stages_leave_the_mathematics_alone(
    setups, by_example, whole, devices, mesh, changes
):
    setup = setups(by_example(**{"mesh": mesh, "phases": BLOCKS} | changes | MODEL), devices)
    step = setup.step(EXAMPLES)
    result = computed(setup, step) if "pipeline" in changes else setup.gradients(step)
    assert_same(result, whole, 1e-5)
