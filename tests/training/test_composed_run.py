"""Runs of published parts that a config alone composes, and the folders they write.

One run has a decoder and two towers with fresh projectors, the other that decoder and a generator.
Whatever is frozen goes back byte for byte.
"""

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import soundfile
import tokenizers
from PIL import Image

from jaxmllm.config.strict_yaml import write_text
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.weight_files import WeightFile
from jaxmllm.tools.convert import main as convert
from jaxmllm.tools.draw import main as draw
from jaxmllm.train import main as train

FAMILIES = Path(__file__).parents[1] / "families"
WORDS = ["what", "is", "a", "cat", "dog", "it", "red", "blue", "green", "one", "two", "three"]


TOWERS = {
    "vision": FAMILIES / "tower_goldens" / "siglip2",
    "audio": FAMILIES / "tower_goldens" / "whisper",
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    """A published decoder's folder with a tokenizer of a few words."""
    decoder_path = tmp_path_factory.mktemp("composed") / "decoder"
    folder = Path(shutil.copytree(FAMILIES / "goldens" / "qwen3", decoder_path))
    words = {word: index for index, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_data(folder: Path) -> Path:
    """Records with a question about an image and a sound."""
    rng = np.random.default_rng(0)
    records = []
    for index in range(16):
        size = (*rng.integers(10, 60, 2), 3)
        Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(folder / f"{index}.png")
        sound = rng.uniform(-0.5, 0.5, rng.integers(400, 16_000))
        soundfile.write(folder / f"{index}.wav", sound, 16_000)
        question = [
            {"type": "image", "image": f"{index}.png"},
            {"type": "audio", "audio": f"{index}.wav"},
            {"type": "text", "text": "what"},
        ]
        answer = " ".join(rng.choice(WORDS, rng.integers(2, 9)))
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        records.append(json.dumps({"messages": turns}) + "\n")
    (folder / "train.jsonl").write_text("".join(records))
    return folder / "train.jsonl"


@pytest.fixture(scope="module")
def run(decoder) -> tuple[Path, str]:
    """The folder of a run that trains projectors alone, and what it printed."""
    base = decoder.parent
    frozen = {"freeze": True}
    phases = ("vision", "audio", "language")
    tree = {
        "run": {"directory": str(base / "run"), "steps": 1},
        "model": {"from": str(decoder)} | {n: {"from": str(tower)} for n, tower in TOWERS.items()},
        "components": {"language": frozen, "vision": frozen, "audio": frozen},
        "data": {
            "sources": [{"name": "a", "path": str(write_data(base))}],
            "batch_size": 8,
        },
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        "phases": {name: {"block": 32, "row_classes": 1, "spans": [1]} for name in phases},
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "logging": {"tensorboard": False},
    }
    (base / "config.yaml").write_text(write_text(tree))
    output = StringIO()
    with redirect_stdout(output):
        assert train(["--config", str(base / "config.yaml")]) == 0
    return base / "run", output.getvalue()


@pytest.mark.slow
def test_parts_of_three_folders_train_and_go_back(run, decoder, tmp_path):
    """Frozen parts are written byte for byte, and trained projectors as folders of their own."""
    folder, said = run
    for name, tower in TOWERS.items():
        assert f"model.{name}.from: {name} from {tower}" in said
    fresh = "projector.audio, projector.vision"
    assert f"model.from: {fresh} not in {decoder}: initialized at random" in said
    for component, source in ({"language": decoder} | TOWERS).items():
        out = tmp_path / component
        assert convert(["to-hf", str(folder), str(out), "--component", component]) == 0
        for file in source.iterdir():
            assert (out / file.name).read_bytes() == file.read_bytes(), file
    for component, group in (("projector.vision", 4), ("projector.audio", 2)):
        out = tmp_path / component
        assert convert(["to-hf", str(folder), str(out), "--component", component]) == 0
        written = json.loads((out / "config.json").read_text())
        assert written["group"] == group and written["input_size"] == 16 * group
        tensors = WeightFile.open(out / "model.safetensors").tensors
        assert {key: tensor.shape for key, tensor in tensors.items()} == {
            "linear_1.weight": (16, 16 * group),
            "linear_1.bias": (16,),
            "linear_2.weight": (16, 16),
            "linear_2.bias": (16,),
        }
        assert np.array(tensors["linear_1.bias"].array()).any(), "which began at zero"


@pytest.mark.slow
def test_a_generator_of_a_folder_trains_and_draws(decoder, tmp_path):
    """The generator trains its output alone; the projector comes from its folder and trains."""
    source = FAMILIES / "generator_goldens" / "wan"
    rng = np.random.default_rng(0)
    records = []
    for index in range(8):
        sizes = (4, rng.integers(1, 5), *(2 * rng.integers(1, 5, 2)))
        np.save(tmp_path / f"{index}.npy", rng.normal(size=sizes).astype(np.float32))
        clip = [{"type": "video", "video": f"{index}.npy"}]
        said = " ".join(rng.choice(WORDS, rng.integers(2, 9)))
        turns = [{"role": "user", "content": said}, {"role": "assistant", "content": clip}]
        records.append(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "train.jsonl").write_text("".join(records))
    tree = {
        "run": {"directory": str(tmp_path / "run"), "steps": 2},
        "model": {
            "from": str(decoder),
            "diffusion": {"from": str(source), "projector": "folder", "padded_conditions": 40},
        },
        "components": {"language": {"freeze": True}, "diffusion": {"train": ["output*"]}},
        "objective": {"language": {"weight": 0.0}},
        "data": {
            "sources": [{"name": "a", "path": str(tmp_path / "train.jsonl")}],
            "batch_size": 8,
        },
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        "phases": {name: {"block": 32, "row_classes": 1} for name in ("diffusion", "language")},
        "mesh": {"data": 2, "fsdp": 2, "context": 2},
        "logging": {"tensorboard": False},
    }
    (tmp_path / "config.yaml").write_text(write_text(tree))
    said = StringIO()
    with redirect_stdout(said):
        assert train(["--config", str(tmp_path / "config.yaml")]) == 0
    assert f"model.diffusion.from: diffusion from {source}" in said.getvalue()
    assert f"model.diffusion.projector: projector.language from {source}" in said.getvalue()
    run = tmp_path / "run"
    out = tmp_path / "out"
    assert convert(["to-hf", str(run), str(out), "--component", "diffusion"]) == 0
    before, after = (ModelFolder.open(path, "diffusion") for path in (source, out))
    trained = ("proj_out.", "scale_shift_table", "condition_embedder.text_embedder.")
    for key, tensor in before.tensors.items():
        changed = not np.array_equal(tensor.array(), after.tensors[key].array())
        assert changed == key.startswith(trained), key
    projector = tmp_path / "projector"
    command = ["to-hf", str(run), str(projector), "--component", "projector.language"]
    assert convert(command) == 0
    assert json.loads((projector / "config.json").read_text())["group"] == 1
    arguments = ["--run", str(run), "--prompt", "a red cat", "--size", "4x8", "--frames", "3"]
    assert draw([*arguments, "--steps", "2", "--out", str(tmp_path / "drawn")]) == 0
    (drawn,) = (tmp_path / "drawn").glob("*.npy")
    latents = np.load(drawn)
    assert latents.shape == (4, 3, 4, 8) and np.isfinite(latents).all()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_second_run_in_stages_goes_on(run, tmp_path, capsys):
    """The second run trains the towers of the first, whose folders of origin stay known."""
    folder, _ = run
    overrides = [f"run.directory={tmp_path / 'next'}", f"model.from={folder}", "mesh.data=1"]
    overrides += ["pipeline.stages=2", "components.vision.freeze=false"]
    overrides += ["components.audio.freeze=false", "model.audio.from=null"]
    command = ["--config", str(folder / "config.yaml"), *overrides]
    assert train(command) == 1
    error = capsys.readouterr().err
    assert "has vision, which model.vision.from reads from" in error and "\n" not in error.strip()
    shutil.rmtree(tmp_path / "next", ignore_errors=True)
    assert train([*command, "model.vision.from=null"]) == 0, capsys.readouterr().err
    untrained_prefixes = (
        "text_model.",
        "vision_model.head.",
        "logit_",
        "model.decoder.",
        "proj_out.",
    )
    for name, tower in TOWERS.items():
        out = tmp_path / name
        assert convert(["to-hf", str(tmp_path / "next"), str(out), "--component", name]) == 0
        before, after = (ModelFolder.open(path, name) for path in (tower, out))
        for key, tensor in before.tensors.items():
            changed = not np.array_equal(tensor.array(), after.tensors[key].array())
            assert changed != key.startswith(untrained_prefixes), key
