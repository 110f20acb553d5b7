"""Parameters taken from another run: by component, on any mesh, with a fresh optimizer.

The reference is what the checkpoint of the source holds, bit for bit.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jaxmllm.config.read import dump_config, load_config, parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.models.mllm import MLLM
from jaxmllm.runtime.checkpoint import Checkpoints
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.setup.build import build_run
from jaxmllm.setup.prepare import RunInputs, prepare
from jaxmllm.training.initial import initial_state, read_parameters
from jaxmllm.training.loop import train
from jaxmllm.training.run_folder import check_folder
from jaxmllm.training.step_functions import TrainState
from sharding.mesh import make_mesh
from tests.support import tiny_config


def inputs_of(tree: dict, mesh: dict) -> RunInputs:
    """Data and model over a mesh; nothing is compiled."""
    config = parse_config(tree | {"mesh": mesh})
    return prepare(config, make_mesh(config.mesh_sizes))


def abstract_params(tree: dict, mesh: dict) -> dict:
    """Shapes and shardings of a model's parameters."""
    return inputs_of(tree, mesh).model.abstract("float32")


@pytest.fixture(scope="module")
def source(by_example, tmp_path_factory) -> tuple[Path, dict]:
    """A run folder with checkpoints of steps 3 and 4, and the parameters of step 4."""
    folder = tmp_path_factory.mktemp("source")
    model = inputs_of(by_example(), {"data": 8}).model
    with Checkpoints(folder / "checkpoints", 2) as checkpoints:
        for step in (3, 4):
            params = model.init(step, "float32")
            checkpoints.save(step, {"params": params})
    return folder, jax.device_get(params)


@pytest.mark.parametrize("which", ["", "checkpoints/4"])
def test_parameters_are_read_on_any_mesh(source, by_example, which, monkeypatch):
    """The source is a run folder or a checkpoint, by a relative path."""
    folder, expected = source
    abstract = abstract_params(by_example(), {"data": 2, "fsdp": 2, "tensor": 2})
    lines: list[str] = []
    monkeypatch.chdir(folder.parent)
    params = read_parameters(str(Path(folder.name) / which), abstract, lines.append)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), expected)
    for leaf, abstract_leaf in zip(jax.tree.leaves(params), jax.tree.leaves(abstract), strict=True):
        assert leaf.sharding.is_equivalent_to(abstract_leaf.sharding, leaf.ndim)
    (line,) = lines
    assert line.startswith("model.from: audio, language, projector.audio, ") and line.endswith(
        "checkpoints/4"
    )


def test_a_copied_checkpoint_may_have_any_name(source, by_example, tmp_path):
    folder, expected = source
    for name in ("0004", "best"):
        copy = shutil.copytree(folder / "checkpoints" / "4", tmp_path / name)
        lines: list[str] = []
        params = read_parameters(
            str(copy), abstract_params(by_example(), {"data": 8}), lines.append
        )
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), expected)
        assert lines[0].endswith(f"from {copy}")


def programs_of(model: MLLM, ema: bool = False) -> SimpleNamespace:
    """A stand-in for programs on a mesh; with `ema`, the decoder has averages."""
    initial_params = model.init(9, "float32")
    zero = jnp.zeros((), jnp.int32)
    averages = {"language": initial_params["language"]} if ema else None
    state = TrainState(initial_params, {}, zero, zero, zero, zero, averages)
    return SimpleNamespace(
        init=lambda seed: state,
        saved_state=state._replace(params=model.abstract("float32")),
        to_saved=lambda state: state,
        from_saved=lambda state: state,
    )


def test_averages_begin_at_the_parameters_that_are_taken(source, by_example):
    folder, expected = source
    config = parse_config(by_example(model__from=str(folder)))
    model = inputs_of(by_example(components__language__ema=0.9), {"data": 8}).model
    state = initial_state(config, programs_of(model, ema=True), lambda line: None)
    assert state.averages.keys() == {"language"}
    for tree in (state.params["language"], state.averages["language"]):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(tree), expected["language"])


def test_what_is_frozen_and_drawn_at_random_is_named(source, by_example):
    """The warning is due only where no source gives the frozen parameters."""
    frozen = {"components__vision__freeze": True, "components__projector__audio__freeze": True}
    programs = programs_of(inputs_of(by_example(), {"data": 8}).model)
    lines: list[str] = []
    initial_state(parse_config(by_example(**frozen)), programs, lines.append)
    (line,) = lines
    assert line.startswith("warning: projector.audio, vision: frozen, with parameters drawn at")
    lines.clear()
    config_with_source = parse_config(by_example(**frozen, model__from=str(source[0])))
    initial_state(config_with_source, programs, lines.append)
    assert not any("warning" in line for line in lines)


def test_missing_and_extra_components_are_named(source, by_example, tmp_path):
    """What the source lacks is drawn at random, and what the model lacks is left out."""
    folder, expected = source
    tree = by_example(data__max_rejected=1.0)
    del tree["model"]["audio"]
    abstract = abstract_params(tree, {"data": 8})
    lines: list[str] = []
    params = read_parameters(str(folder), abstract, lines.append)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(params),
        {name: expected[name] for name in abstract},
    )
    assert len(lines) == 2
    assert lines[1].startswith("model.from: audio, projector.audio of ") and "left out" in lines[1]
    with Checkpoints(tmp_path / "checkpoints", 1) as checkpoints:
        checkpoints.save(1, {"params": params})
    lines.clear()
    restored = read_parameters(
        str(tmp_path), abstract_params(by_example(), {"data": 8}), lines.append
    )
    assert restored.keys() == params.keys()
    assert len(lines) == 2
    assert (
        lines[1].startswith("model.from: audio, projector.audio not in ")
        and "at random" in lines[1]
    )


def test_another_shape_names_component_array_and_both_shapes(source, by_example):
    tree = by_example()
    tree["model"]["vision"]["mlp_width"] = 64
    with pytest.raises(CheckpointError) as caught:
        read_parameters(str(source[0]), abstract_params(tree, {"data": 8}))
    text = str(caught.value)
    assert text.startswith("model.from: ") and "do not fit this model" in text
    assert (
        "vision.layers." in text and "float32[1, 16, 32], this model has float32[1, 16, 64]" in text
    )


def test_a_damaged_checkpoint_gives_way_to_the_one_before(source, by_example, tmp_path):
    shutil.copytree(source[0], tmp_path / "copy")
    (tmp_path / "copy" / "checkpoints" / "4" / "manifest.ocdbt").write_bytes(b"torn")
    lines: list[str] = []
    read_parameters(
        str(tmp_path / "copy"), abstract_params(by_example(), {"data": 8}), lines.append
    )
    assert "4 is damaged: manifest.ocdbt has 4 bytes" in lines[0] and lines[1].endswith(
        "checkpoints/3"
    )


def test_a_source_that_is_none_is_found_before_anything_is_built(data, tmp_path):
    tree = tiny_config(data, run={"directory": str(tmp_path / "run"), "steps": 1})
    tree["model"]["from"] = str(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"model\.from: .* is neither a run folder with a checkpoint nor"
    ):
        check_folder(parse_config(tree), False)


def test_the_key_reads_back_and_its_neighbours_are_suggested(data, tmp_path):
    tree = tiny_config(data)
    tree["model"]["from"] = "runs/a"
    config = parse_config(tree)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["from"] == "runs/a"
    assert load_config(tmp_path / "config.yaml") == config
    for name in ("from_", "fron"):
        with pytest.raises(
            ConfigError, match=rf"unknown key 'model\.{name}'; did you mean 'model\.from'"
        ):
            parse_config(tree | {"model": tree["model"] | {name: "x"}})


@pytest.mark.slow
def test_two_stages_and_a_resumed_second_one(data, tmp_path, capsys):
    """A run trains projectors alone, and a second run all components from the first.

    The second run is resumed after the folder of the first is gone.
    """
    frozen = {"vision": {"freeze": True}, "audio": {"freeze": True}, "language": {"freeze": True}}
    tree = tiny_config(
        data, run={"directory": str(tmp_path / "align"), "steps": 3}, data__evaluation=[]
    )
    tree["mesh"] = {"data": 8}
    train(build_run(check_folder(parse_config(tree | {"components": frozen}), False)))
    second_tree = tiny_config(
        data, run={"directory": str(tmp_path / "all"), "steps": 2}, data__evaluation=[]
    )
    second_tree |= {
        "mesh": {"data": 4, "fsdp": 2},
        "model": tree["model"] | {"from": str(tmp_path / "align")},
    }
    train(build_run(check_folder(parse_config(second_tree), False)))
    (tmp_path / "align").rename(tmp_path / "gone")
    second_tree["run"]["steps"] = 3
    config = check_folder(parse_config(second_tree), True)
    train(build_run(config))
    output = capsys.readouterr().out
    assert f"from {tmp_path / 'align' / 'checkpoints' / '3'}" in output
    records = [
        json.loads(line) for line in (tmp_path / "all" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["step"] for record in records] == [1, 2, 3]
    first_records = [
        json.loads(line) for line in (tmp_path / "gone" / "metrics.jsonl").read_text().splitlines()
    ]
    assert records[0]["loss"] < first_records[0]["loss"], (
        "the second stage begins where the first one ended"
    )
    second_tree["model"]["from"] = "elsewhere"
    with pytest.raises(
        CheckpointError, match=r"model\.from: '.*align' in the run, 'elsewhere' now"
    ):
        check_folder(parse_config(second_tree), True)
