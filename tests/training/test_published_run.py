"""A run in stages from a published folder and back: what is not trained stays bit for bit."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jaxmllm.config.strict_yaml import write_text
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.tools.convert import main as convert
from jaxmllm.train import main as train
from tests.data.text.dialects import DIALECTS, Dialect
from tests.support import EXHAUSTIVE

GOLDENS = Path(__file__).parents[1] / "families" / "goldens"
CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
WORDS = ["what", "is", "a", "cat", "dog", "it", "red", "blue", "green", "one", "two", "three"]


@pytest.fixture
def folder(tmp_path) -> Path:
    return published(tmp_path, "qwen2-windows", CHATML)


def published(tmp_path: Path, golden: str, special: list[str]) -> Path:
    """A published folder with a tokenizer of a few words."""
    folder = Path(shutil.copytree(GOLDENS / golden, tmp_path / "published"))
    words = {word: index for index, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_config(tmp_path: Path, folder: Path, **sections) -> Path:
    """The config of a run that trains the MLPs of a published decoder, and its data."""
    rng = np.random.default_rng(0)
    records = []
    for _ in range(16):
        question, answer = (" ".join(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(2))
        conversation = [("user", question), ("assistant", answer)]
        turns = [{"role": role, "content": text} for role, text in conversation]
        records.append(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "train.jsonl").write_text("".join(records))
    tree = {
        "run": {"directory": str(tmp_path / "run"), "steps": 1},
        "model": {"from": str(folder)},
        "components": {"language": {"train": ["layers.mlp.*"]}},
        "data": {
            "sources": [{"name": "a", "path": str(tmp_path / "train.jsonl")}],
            "batch_size": 8,
        },
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        "phases": {"language": {"block": 32, "row_classes": 1, "spans": [1]}},
        "mesh": {"data": 4},
        "pipeline": {"stages": 2},
        "logging": {"tensorboard": False},
    }
    (tmp_path / "config.yaml").write_text(write_text(tree | sections))
    return tmp_path / "config.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("golden", ["qwen2-windows", pytest.param("gemma3", marks=EXHAUSTIVE)])
def test_a_run_in_stages_and_back(golden, tmp_path, capsys):
    folder = published(tmp_path, golden, CHATML)
    config = write_config(tmp_path, folder)
    assert train(["--config", str(config)]) == 0, capsys.readouterr().err
    assert f"model.from: language from {folder}" in capsys.readouterr().out
    assert "window: 5" in (tmp_path / "run" / "config.yaml").read_text()
    assert convert(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before = ModelFolder.open(folder)
    after = ModelFolder.open(tmp_path / "out")
    for key, tensor in before.tensors.items():
        changed = not np.array_equal(tensor.array(), after.tensors[key].array())
        assert changed == (".mlp." in key), key
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_a_folder_that_cannot_be_is_told_in_a_line(folder, tmp_path, capsys):
    """A truncated weight file is reported before anything is indexed or built."""
    config = write_config(tmp_path, folder)
    path = next(iter(ModelFolder.open(folder).files)).path
    path.write_bytes(path.read_bytes()[:-4])
    assert train(["--config", str(config)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and f"{path} is truncated" in error
    assert not (tmp_path / "run" / "config.yaml").exists()


def give_template(folder: Path, dialect: Dialect, template: str) -> None:
    values = dialect.names | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_a_template_that_reaches_out_is_told_in_a_line(tmp_path, capsys):
    dialect = DIALECTS["mistral"]
    folder = published(tmp_path, "mistral", list(dialect.special))
    give_template(folder, dialect, "{{ messages.__class__ }}")
    config = write_config(tmp_path, folder, pipeline={}, mesh={"data": -1})
    assert train(["--config", str(config)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(
        f"error: data.chat_template: {folder}/tokenizer_config.json reaches out of its sandbox"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "golden", ["mistral", *(pytest.param(name, marks=EXHAUSTIVE) for name in ("llama", "gemma3"))]
)
def test_a_folder_trains_with_its_own_template(golden, tmp_path, capsys):
    """The tokenizer has no ChatML, so the folder's template applies; a resumed run must keep it."""
    dialect = DIALECTS[{"llama": "llama3.1"}.get(golden, golden)]
    folder = published(tmp_path, golden, list(dialect.special))
    give_template(folder, dialect, dialect.template)
    config = write_config(tmp_path, folder, pipeline={}, mesh={"data": -1})
    date = ["data.chat_date=2024-07-26"] if golden == "llama" else []
    assert train(["--config", str(config), *date]) == 0, capsys.readouterr().err
    stored = (tmp_path / "run" / "config.yaml").read_text()
    assert f"chat_template: {folder}/tokenizer_config.json" in stored
    give_template(folder, dialect, dialect.template.replace("| trim", "| trim | upper"))
    assert train(["--config", str(config), *date, "--resume", "run.steps=2"]) == 1
    assert "was trained on other data" in capsys.readouterr().err
