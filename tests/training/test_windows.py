"""Steps of a model whose layers see windows or everything: packing, meshes, stages and kernels.

Decoder and towers also make the other choices that come with windows in published models. The
reference is one device, or the sum of single examples.
"""

import numpy as np
import pytest

from jaxmllm.runtime.compilations import CompilationCounter
from tests.support import (
    DECODER_CHOICES,
    EXHAUSTIVE,
    Result,
    added,
    assert_close,
    assert_same,
    scaled,
    slow_cases,
)
from tests.training.programs.test_staged import computed

EXAMPLES = np.random.default_rng(0).permutation(96)[:16]
MODEL = {
    **DECODER_CHOICES,
    "model__language__layers": 5,  # divisible by none of the numbers of stages below
    "model__language__window": 20,
    "model__language__full_layers": [1, 4],
    "model__language__window_rope_theta": 100.0,
    "model__vision__layers": 2,
    "model__vision__window": 4,
    "model__vision__full_layers": [0],
    "model__vision__gated_mlp": True,
    "model__vision__patch_frames": 2,
    "model__vision__patch_bias": False,
    "model__vision__projector": {"mlp_width": 24, "gelu": "exact"},
    "model__audio__layers": 2,
    "model__audio__positions": "sinusoidal",
    "model__audio__silence": "masked",
    "model__audio__attention": "chunk",
    "model__audio__pool": 2,
    "model__audio__key_bias": False,  # its gradient is 0 where positions are not rotary
    "model__audio__projector": {"linear": True},
}
BLOCKS = {name: {"block": 16} for name in ("vision", "audio", "language")}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one(setups, by_example):
    return setups(by_example(phases=BLOCKS, **MODEL), 1)


@pytest.fixture(scope="module")
def whole(one) -> Result:
    return one.gradients(one.step(EXAMPLES))


def test_packed_equals_unpacked(one, whole):
    steps = [one.step([example]) for example in EXAMPLES]
    single_grads = [scaled(one.gradients(step).grads, step.targets) for step in steps]
    assert_close(
        scaled(whole.grads, sum(step.targets for step in steps)), added(single_grads), 1e-5
    )


def test_a_window_is_seen_in_the_loss(setups, by_example, whole):
    """Without an effect of the window, the other tests would prove nothing about windows."""
    full = setups(
        by_example(phases=BLOCKS, **MODEL | {"model__language__full_layers": [0, 1, 2, 4]}), 1
    )
    full_result = full.gradients(full.step(EXAMPLES))
    # More than the other comparisons tolerate
    assert abs(full_result.mean_loss - whole.mean_loss) > 1e-4


@pytest.mark.parametrize("batches", [3, pytest.param(20, marks=EXHAUSTIVE)])
def test_batches_compile_nothing_anew(one, batches):
    one.gradients(one.step(EXAMPLES))
    rng = np.random.default_rng(1)
    counter = CompilationCounter()
    for _ in range(batches):
        one.gradients(one.step(rng.permutation(96)[:16]))
    assert counter.names == []
    counter.close()


CASES = {  # devices, mesh, what else
    "data4": (4, {"data": 4}, {}),
    "fsdp2-tensor2-kept": (
        4,
        {"data": 1, "fsdp": 2, "tensor": 2},
        {"components__language__remat": ["attention", "mlp"]},
    ),
    "context2": (2, {"data": 1, "context": 2}, {}),
    "context4-tensor2": (8, {"data": 1, "context": 4, "tensor": 2}, {}),
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
    "stages2-kept": (
        2,
        {"data": 1},
        {
            "pipeline": {
                "stages": 2,
                "layout": "segments",
                "schedule": "interleaved",
                "kept_residuals": 2,
            },
            "components__language__remat": ["projections", "mlp"],
        },
    ),
}


@pytest.mark.parametrize("devices, mesh, changes", slow_cases(CASES, {"stages2-context2-segments"}))
def test_parts_of_rows_and_stages_leave_the_mathematics_alone(
    setups, by_example, whole, devices, mesh, changes
):
    setup = setups(by_example(mesh=mesh, phases=BLOCKS, **changes, **MODEL), devices)
    step = setup.step(EXAMPLES)
    result = computed(setup, step) if "pipeline" in changes else setup.gradients(step)
    assert_same(result, whole, 1e-5)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_both_kernels_compute_the_same(setups, by_example):
    """The GPU's kernel needs heads of 16 numbers; it is interpreted here."""
    wide_heads = MODEL | {
        "model__language__head_size": 16,
        "model__language__rope_sections": [4, 2, 2],
    }
    kernels = ("jax", "gpu")
    jax_kernel, gpu_kernel = (
        setups(by_example(phases=BLOCKS, components__language__attention=kernel, **wide_heads), 1)
        for kernel in kernels
    )
    examples = [
        jax_kernel.of_kind(kind)[0] for kind in ((), ("vision",), ("audio",), ("vision", "audio"))
    ]
    expected = jax_kernel.gradients(jax_kernel.step(examples))
    assert_same(gpu_kernel.gradients(gpu_kernel.step(examples)), expected, 1e-5)
