"""What a user can get wrong is reported in one line that names the cure, without a traceback."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from jaxmllm.config.read import load_config, parse_config
from jaxmllm.train import main
from jaxmllm.training.run_folder import check_folder, write_config
from tests.support import tiny_config, train_command


@pytest.fixture
def config(data, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump(tiny_config(data, run={"directory": str(tmp_path / "run"), "steps": 2}))
    )
    return path


def refusal(capsys, *arguments) -> str:
    """Run the command in this process, in which a bug would raise, and return its stderr."""
    assert main(["--config", *map(str, arguments)]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    return error


def test_config_that_does_not_exist(capsys, tmp_path):
    assert "absent.yaml does not exist" in refusal(capsys, tmp_path / "absent.yaml")


def test_unknown_key(capsys, config):
    error = refusal(capsys, config, "optimizer.learning_rat=1e-3")
    assert error.count("\n") == 1
    assert "unknown key 'optimizer.learning_rat'; did you mean 'optimizer.learning_rate'?" in error


def test_ill_typed_value(capsys, config):
    assert "data.batch_size" in refusal(capsys, config, "data.batch_size=many")


def test_unknown_exchange(capsys, config):
    """The value is checked before any data is read, though the schema knows no backends."""
    error = refusal(capsys, config, "balance.exchange=rugged", "data.root=/absent")
    assert "balance.exchange: must be one of auto, ragged, padded (got 'rugged')" in error


def test_missing_wandb_is_told_before_any_data_is_read(capsys, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    error = refusal(capsys, config, "logging.wandb=p", "data.root=/absent")
    assert error.count("\n") == 1 and "logging.wandb='p' needs the wandb package" in error


@pytest.mark.parametrize(
    "sizes", [["mesh.data=3"], ["mesh.data=-1", "mesh.fsdp=3"], ["mesh.data=16"]]
)
def test_mesh_that_does_not_divide_the_devices(capsys, config, sizes):
    error = refusal(capsys, config, *sizes)
    assert error.count("\n") == 1 and "there are 8" in error and "change the mesh sizes" in error


def test_layout_that_does_not_divide_an_array(capsys, config):
    error = refusal(capsys, config, "mesh.data=1", "mesh.tensor=8")
    assert error.count("\n") == 1 and "cannot be split" in error and "tensor" in error


def test_everything_frozen(capsys, config):
    frozen = [f"components.{name}.freeze=true" for name in ("vision", "audio", "language")]
    frozen += [f"components.projector.{name}.freeze=true" for name in ("vision", "audio")]
    assert "every component is frozen" in refusal(capsys, config, *frozen)


def test_example_longer_than_a_row(capsys, config):
    error = refusal(capsys, config, "phases.language.capacities=[64]")
    assert "tokens long, but the largest language row holds 64" in error
    assert "phases.language.capacities" in error and "data.max_rejected" in error


def test_image_larger_than_a_row(capsys, config):
    error = refusal(capsys, config, "phases.vision.capacities=[64]")
    assert "slots of the vision phase" in error and "data.images.max_pixels" in error


def test_missing_media_file(capsys, config, data, tmp_path):
    record = json.loads((data / "train.jsonl").read_text().splitlines()[0])
    record["messages"][0]["content"].append({"type": "image", "image": "media/absent.png"})
    broken = tmp_path / "broken.jsonl"
    broken.write_text((data / "train.jsonl").read_text() + json.dumps(record) + "\n")
    error = refusal(capsys, config, f"data.sources=[{{name: s, path: {broken}, root: {data}}}]")
    assert "absent.png" in error and f"{broken}:97" in error and "data.max_rejected" in error


def test_all_refusals_are_in_the_run_folder_and_it_begins_as_an_empty_one(capsys, config, tmp_path):
    broken_lines = tmp_path / "bad.jsonl"
    broken_lines.write_text("{\n" * 9)
    error = refusal(capsys, config, f"data.sources=[{{name: s, path: {broken_lines}}}]")
    path = tmp_path / "run" / "rejected.jsonl"
    assert "and 4 more" in error and f"All refusals are in {path}." in error
    assert [json.loads(line)["line"] for line in path.read_text().splitlines()] == [*range(1, 10)]
    for resume in (False, True, "auto"):
        check_folder(load_config(config), resume)


def test_pictures_of_the_assistant_where_nothing_draws_or_sees(capsys, config, data, tmp_path):
    pictures = sorted(data.glob("media/train/*.png"))[:2]
    answer = [{"type": "image", "image": str(path.relative_to(data))} for path in pictures]
    assert len(answer) == 2
    turns = [{"role": "user", "content": "two"}, {"role": "assistant", "content": answer}]
    pictures_path = tmp_path / "drawn.jsonl"
    pictures_path.write_text(json.dumps({"id": "twice", "messages": turns}) + "\n")
    sources = f"data.sources=[{{name: s, path: {pictures_path}, root: {data}}}]"
    error = refusal(capsys, config, sources, "data.evaluation=[]", "model.vision=null")
    (line,) = [line for line in error.splitlines() if f"{pictures_path}:1" in line]
    assert "holds an image, but no encoder of the model takes it (encoders: audio)" in line


def test_malformed_line(capsys, config, data, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text((data / "train.jsonl").read_text() + '{"id": 1, "messages": [\n')
    error = refusal(capsys, config, f"data.sources=[{{name: s, path: {broken}, root: {data}}}]")
    assert f"{broken}:97" in error


def test_source_that_does_not_exist(capsys, config, tmp_path):
    error = refusal(capsys, config, f"data.sources=[{{name: s, path: {tmp_path}/absent.jsonl}}]")
    assert "absent.jsonl" in error


@pytest.fixture
def begun(config):
    """The config of a run that has begun."""
    parsed = parse_config(yaml.safe_load(config.read_text()))
    os.makedirs(parsed.run.directory)
    write_config(parsed.run.directory, parsed)
    return config


def test_run_folder_in_use(capsys, begun):
    error = refusal(capsys, begun)
    assert "already holds a run; pass --resume" in error


@pytest.mark.parametrize(
    "change", ["model.language.width=64", "model.vision.layers=2", "run.seed=3"]
)
def test_resume_with_an_incompatible_config(capsys, begun, change):
    error = refusal(capsys, begun, "--resume", change)
    key = change.split("=")[0]
    assert f"{key}: " in error and "cannot be resumed" in error and "run.directory" in error


def test_the_command_itself_fails_with_one_line(config):
    completed = subprocess.run(
        train_command(config, "mesh.data=3"), capture_output=True, text=True, timeout=120
    )
    assert completed.returncode == 1
    lines = [line for line in completed.stderr.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: mesh {'data': 3")


def test_source_without_a_record(capsys, config, data, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    error = refusal(capsys, config, f"data.sources=[{{name: s, path: {empty}}}]")
    assert error == f"error: source 's': {empty} holds no record; see data.sources\n"
    error = refusal(
        capsys,
        config,
        f"data.sources=[{{name: t, path: {data}/train.jsonl}}, {{name: s, path: {empty}}}]",
    )
    assert error == f"error: source 's': {empty} holds no record; see data.sources\n"


def test_config_that_is_no_text(capsys, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"run: \xff")
    assert refusal(capsys, path) == f"error: config file {path} is not UTF-8: byte 5 is 0xff\n"
