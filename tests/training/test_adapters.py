"""Steps with adapters: what they train, in any plan, on any mesh and in stages, and a resumed run.

The reference is one device, or the sum of single examples.
"""

import json
from contextlib import closing

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmllm.config.strict_yaml import write_text
from jaxmllm.runtime.checkpoint_files import read_arrays, saved_specs
from jaxmllm.runtime.compilations import CompilationCounter
from jaxmllm.train import main as train
from tests.support import (
    DECODER_CHOICES,
    ENCODER_LAYOUT,
    Result,
    added,
    assemble,
    assert_close,
    assert_same,
    scaled,
    slow_cases,
    tiny_config,
)

EXAMPLES = np.random.default_rng(2).permutation(96)[:12]
ADAPTERS = {
    "language": {"rank": 4, "alpha": 8.0},
    "vision": {"rank": 2, "alpha": 1.0, "parameters": ["layers.attention.*"]},
}
FROZEN = {"freeze": True}
TRAINED = {"adapter.language", "adapter.vision", "projector.audio", "projector.vision"}


def adapted(data, **changes):
    """The config of a run with frozen towers and decoder; projectors and adapters are trained."""
    tree = tiny_config(data, model__adapters=ADAPTERS, data__batch_size=12)
    tree["components"] = {name: dict(FROZEN) for name in ("vision", "audio", "language")}
    for key, value in changes.items():
        *parents, leaf_key = key.split("__")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf_key] = value
    return tree


def shifted(params):
    """The same parameters with factors that are not zero, so that both factors have gradients."""

    def leaf(path, value):
        return value + 0.05 if path[-1].key == "b" else value

    factors = {name: tree for name, tree in params.items() if name.startswith("adapter.")}
    return params | jax.tree.map_with_path(leaf, factors)


def gradients(setup) -> Result:
    return setup.gradients(setup.step(EXAMPLES), shifted(setup.params))


@pytest.fixture(scope="module")
def alone(data):
    return assemble(adapted(data), 1)


@pytest.fixture(scope="module")
def whole(alone) -> Result:
    return gradients(alone)


@pytest.mark.slow
def test_packed_equals_unpacked_and_nothing_is_compiled_again(alone, whole):
    assert whole.grads.keys() == TRAINED
    params = shifted(alone.params)
    alone.gradients(alone.step(EXAMPLES[:1]), params)
    single_grads = []
    targets = []
    with closing(CompilationCounter()) as counter:
        for example in EXAMPLES:
            step = alone.step([example])
            single_grads.append(scaled(alone.gradients(step, params).grads, step.targets))
            targets.append(step.targets)
        assert counter.names == []
    assert_close(scaled(whole.grads, sum(targets)), added(single_grads), 1e-5)


ENCODERS = {f"components__{name}__layout": ENCODER_LAYOUT for name in ("vision", "audio")}
CASES = {
    "data": [8, {"mesh": {"data": 8}}],
    "fsdp": [8, {"mesh": {"fsdp": 8}, "components__language__reduce": "step"}],
    "tensor": [
        8,
        {
            "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
            "components__language__remat": ["projections", "mlp"],
            "phases__vision__kept_residuals": 1,
            **ENCODERS,
        },
    ],
    "context": [8, {"mesh": {"context": 2, "fsdp": 4}, "components__vision__remat": "none"}],
    "spans": [
        4,
        {"mesh": {"data": 4}, "phases__language__spans": [2], "phases__vision__spans": [2]},
    ],
    "two stages": [4, {"mesh": {"data": 2}, "pipeline": {"stages": 2, "layout": "chain"}}],
    "four stages": [
        8,
        {
            "mesh": {"fsdp": 2},
            "model__language__layers": 4,
            "pipeline": {"stages": 4, "split_backward": True},
        },
    ],
    "choices": [
        4,
        {"mesh": {"data": 1, "fsdp": 2, "tensor": 2}, **DECODER_CHOICES, **ENCODERS},
    ],
}


@pytest.mark.parametrize("devices, changes", slow_cases(CASES, always=("two stages",)))
def test_mesh_and_stages_leave_the_mathematics_alone(data, alone, whole, devices, changes):
    expected = whole
    model = {key: value for key, value in changes.items() if key.startswith("model__")}
    if model:
        expected = gradients(assemble(adapted(data, **model), 1))
    setup = assemble(adapted(data, **changes), devices)
    # Staged programs keep gradients by stage, others as the model has them
    actual = gradients(setup)
    joined = getattr(setup.programs, "joined", lambda tree: tree)
    assert_same(Result(joined(actual.grads), actual.loss, actual.targets, 0), expected, 1e-5)


@pytest.mark.slow
def test_only_adapters_and_projectors_change_and_a_run_goes_on(data, tmp_path):
    """Three steps at once end with the loss of two steps, a pause and a third."""
    common = {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "checkpoint": {"every": 1, "keep": 3}}
    losses = {}
    for name, steps in (("at_once", (3,)), ("paused", (2, 3))):
        for total_steps in steps:
            tree = adapted(
                data, run={"directory": str(tmp_path / name), "steps": total_steps}, **common
            )
            (tmp_path / "config.yaml").write_text(write_text(tree))
            resume = ["--resume"] if total_steps != steps[0] else []
            assert train(["--config", str(tmp_path / "config.yaml"), *resume]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        records = map(json.loads, lines)
        losses[name] = [record["loss"] for record in records if "loss" in record]
    assert len(losses["at_once"]) == 3
    assert losses["at_once"] == losses["paused"]
    checkpoints = tmp_path / "at_once" / "checkpoints"
    saved = saved_specs(checkpoints / "3")
    assert {path[1] for path in saved if path[0] == "optimizer" and len(path) > 1} == TRAINED
    before, after = (saved_parameters(checkpoints / step) for step in "13")
    for path, values in after.items():
        assert np.array_equal(values, before[path]) == (path[0] not in TRAINED), path


def saved_parameters(location):
    """The parameters of a checkpoint by path, on one device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = {
        path: jax.ShapeDtypeStruct(*spec, sharding=sharding)
        for path, spec in saved_specs(location).items()
        if path[0] == "params"
    }
    return flatten_dict(read_arrays(location, unflatten_dict(leaves))["params"])
