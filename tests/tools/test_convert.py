"""Published folders converted in and out.

Without training they are equal bit for bit, and logits, losses and gradients are those of the
reference implementation (transformers), whose results for small models lie in `goldens`.
"""

import dataclasses
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.resolved import resolved
from jaxmllm.families.weight_files import WeightFile, write_tensors
from jaxmllm.models.compose import build_model
from jaxmllm.runtime.checkpoint import Checkpoints
from jaxmllm.tools.convert import SavedComponent, _beside, _origin, main
from jaxmllm.tools.prepared_inputs import PreparedRun, PreparedTexts, differences
from jaxmllm.training.folder_parameters import read_folder
from jaxmllm.training.run_folder import write_config
from sharding.mesh import make_mesh
from tests.support import EXHAUSTIVE, added, assert_close, needs, scaled, slow_cases

GOLDENS = Path(__file__).parents[1] / "families" / "goldens"
NAMES = sorted(path.name for path in GOLDENS.iterdir())
QUICK = "qwen3"
# One folder per kind of rotary positions, windows and biases; the others are exhaustive
MARKS = {
    QUICK: (),
    "qwen2-windows": pytest.mark.slow,
    "gemma3": pytest.mark.slow,
    "gemma3-tower": pytest.mark.slow,
    "internvl": pytest.mark.slow,
    "qwen3_omni_moe": pytest.mark.slow,
}
BY_COMMAND = "llama"  # compared in the test of `jaxmllm convert verify`
ROWS = {"block": 32, "row_classes": 1, "spans": [1]}


def check(run: PreparedRun, folder: Path) -> None:
    """Assert that the run's logits, loss and gradients are those of the folder's reference."""
    check_numbers(differences(run, folder / "reference.npz", folder / "gradients.npz"), folder)


def check_numbers(found: dict[str, Any], folder: Path) -> None:
    """Assert small differences, for every gradient of the reference."""
    assert found["logits"] < 1e-4 and found["loss_difference"] < 1e-4
    with np.load(folder / "gradients.npz") as gradients:
        assert found["gradients"].keys() == {*gradients}
    assert max(found["gradients"].values()) < 1e-4, found["gradients"]


# ---------------------------------------------------------------------------- bit for bit


@pytest.mark.parametrize(
    "name",
    [
        "mistral-wide",
        "qwen2_5_vl-flat",
        "qwen3_vl_moe",
        pytest.param("gemma3-tower", marks=EXHAUSTIVE),
        pytest.param("internvl-normed", marks=EXHAUSTIVE),
        pytest.param("qwen2_audio-untied", marks=EXHAUSTIVE),
        pytest.param("qwen2_5_omni", marks=pytest.mark.slow),
        pytest.param("qwen2_5_omni-thinker", marks=EXHAUSTIVE),
        pytest.param("qwen3_omni_moe", marks=EXHAUSTIVE),
    ],
)
def test_a_folder_through_a_checkpoint_is_what_it_was(name, tmp_path, capsys):
    """The checkpoint is float32. Most folders are bfloat16, and all but the
    first have towers or speech."""
    source = GOLDENS / name
    assert main(["to-orbax", str(source), str(tmp_path / "run")]) == 0
    arguments = ["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "name one by --source" in capsys.readouterr().err
    assert main([*arguments, "--source", str(source)]) == 0
    files = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes(), name
    assert main([*arguments, "--source", str(source)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_folder_in_float64_loses_nothing(tmp_path, capsys):
    """Thirds need all bits of float64, so a pass through float32 would show."""
    source = Path(shutil.copytree(GOLDENS / QUICK, tmp_path / "source"))
    for path in source.glob("*.safetensors"):
        tensors = WeightFile.open(path).tensors
        thirds = {key: tensor.array().astype(np.float64) / 3 for key, tensor in tensors.items()}
        write_tensors(path, thirds)
    assert main(["to-orbax", str(source), str(tmp_path / "run"), "--dtype", "float64"]) == 0
    arguments = ["to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--source", str(source)]
    assert main(arguments) == 0
    for path in source.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    arguments[2] = str(source / "config.json" / "out")
    assert main(arguments) == 2
    assert "error: [Errno 20] Not a directory" in capsys.readouterr().err


def begun_run(run: Path, model: dict[str, Any], **data: Any) -> dict[str, Any]:
    """Write the config of a run, and return its model section."""
    tree = resolved(
        {
            "run": {"directory": str(run), "steps": 1},
            "model": model,
            "data": {"sources": [{"name": "a", "path": "a.jsonl"}], "tokenizer": "bytes"}
            | {"batch_size": 1, **data},
            "optimizer": {"learning_rate": 1.0},
        }
    )
    run.mkdir()
    write_config(run, parse_config(tree))
    return tree["model"]


@pytest.mark.parametrize(
    ("model", "named", "data", "further", "beside"),
    [
        (
            {"from": GOLDENS / "qwen2_5_vl", "vision": {"merge": 2}},
            ("vision", GOLDENS.with_name("tower_goldens") / "siglip"),
            {},
            {"images": {"resize": "square", "min_pixels": 784, "max_pixels": 784}},
            {"language": [], "vision": []},
        ),
        (
            {"from": GOLDENS / QUICK, "diffusion": {"projector": "folder"}},
            ("diffusion", GOLDENS.with_name("generator_goldens") / "wan"),
            {"latents": {}},
            {},
            {"language": [], "diffusion": ["projector.language"]},
        ),
    ],
    ids=["tower", "generator"],
)
def test_parts_of_other_folders_are_known_through_runs(
    model, named, data, further, beside, tmp_path
):
    """Through a run, a run that continues from its checkpoint, and a checkpoint of the latter."""
    component, folder = named
    first_run = tmp_path / "first"
    second_run = tmp_path / "second"
    model_section = model | {
        "from": str(model["from"]),
        component: model[component] | {"from": str(folder)},
    }
    model_section = begun_run(first_run, model_section, **data)
    component_section = {
        k: v for k, v in model_section[component].items() if k not in ("from", "projector")
    }
    continued_model = model_section | {
        "from": str(first_run / "checkpoints" / "1"),
        component: component_section,
    }
    begun_run(second_run, continued_model, **data, **further)
    names = ("language", "projector.language", "diffusion", "vision", "projector.vision")
    parameters = {(name, "path"): ((), np.float32) for name in names}
    for run in (first_run, second_run, second_run / "checkpoints" / "1"):
        for name, projectors in beside.items():
            origin = folder if name == component else model["from"]
            assert _origin(run, name) == origin
            saved = SavedComponent(run, name, parameters, None)
            assert _beside(run, ModelFolder.open(origin, name), saved) == projectors


def test_components_that_cannot_be_written(tmp_path, capsys):
    folder = GOLDENS / QUICK
    assert main(["to-orbax", str(folder), str(tmp_path / "run")]) == 0
    projector = ["--component", "projector.vision"]
    vision = ["--component", "vision"]
    for words, message in (
        ([*projector, "--source", str(folder)], "--source: a projector has no published folder"),
        (projector, "has no projector.vision; it has language"),
        (vision, "does not say which published folder its parameters of vision began from"),
        ([*vision, "--source", str(folder)], "and so no vision; name the folder in model.from"),
    ):
        assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out"), *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


IDS = {"input_ids": np.ones((1, 3), int)}


def test_inputs_that_are_none(tmp_path, capsys):
    folder = GOLDENS / QUICK
    for arrays, message in (
        ({"pixel_values": np.zeros(3)}, "holds pixel_values; it must hold input_ids"),
        ({"pixel_values_videos": np.zeros(3)}, "holds pixel_values_videos; it must hold input"),
        ({"input_ids": np.zeros(3, int)}, "of one shape [texts, tokens]"),
        ({"input_ids": np.full((1, 3), 48)}, "must be 0 .. 47 (got 48)"),
        ({"input_ids": np.array([[3, -1]])}, "must be 0 .. 47 (got -1)"),
        ({"input_ids": np.ones((0, 3), int)}, "input_ids: without an entry; leave out"),
        ({"input_ids": np.full((1, 3), 1.5)}, "must be whole numbers (got float64, float64)"),
        (IDS | {"labels": IDS["input_ids"] + 47}, "labels must be 0 .. 47, or -100 (got 48)"),
        (IDS | {"labels": IDS["input_ids"] - 2}, "labels must be 0 .. 47, or -100 (got -1)"),
        (IDS | {"labels": IDS["input_ids"] - 101}, "no token is a target, and so there is no loss"),
    ):
        np.savez(tmp_path / "inputs.npz", **arrays)
        assert main(["verify", str(folder), str(tmp_path / "inputs.npz")]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "inputs.npz").write_text("none")
    assert main(["verify", str(folder), str(tmp_path / "inputs.npz")]) == 2
    assert "is no .npz file" in capsys.readouterr().err


def test_pictures_that_are_none(tmp_path, capsys):
    folder = GOLDENS / "qwen2_5_vl"
    inputs = dict(np.load(folder / "inputs.npz"))
    names = ("image_grid_thw", "mm_token_type_ids", "pixel_values")
    grids, types, pixels = (inputs[name] for name in names)
    for changes, message in (
        ({"mm_token_type_ids": None}, "has media, but not mm_token_type_ids; without it the ref"),
        ({"pixel_values": None}, "has pictures, but not pixel_values"),
        ({"mm_token_type_ids": types[:, 1:]}, "must be of the shape of input_ids, [3, 24] (got"),
        ({"mm_token_type_ids": 0 * types}, "have [6, 1, 10] tokens, and mm_token_type_ids []"),
        ({"image_grid_thw": 2 * grids}, "has [2, 12, 8]; pictures have one frame, and whole cel"),
        ({"image_grid_thw": grids[:, :2]}, "must be whole numbers, [items, 3]: frames, rows and"),
        ({"image_grid_thw": grids[0]}, "must be whole numbers, [items, 3]: frames, rows and colu"),
        ({"image_grid_thw": grids[:0], "pixel_values": pixels[:0]}, "image_grid_thw: without an"),
        ({"image_grid_thw": grids[:2]}, "pixel_values has 68 patches, and image_grid_thw 28"),
        ({"pixel_values": pixels[:, 1:]}, "pixel_values must be [patches, 96] (got [68, 95])"),
        ({"pixel_values": pixels + 0.01}, "are not colors of 8 bits, equal in all 2 frames"),
        ({"pixel_values": 4 * pixels}, "are not colors of 8 bits, equal in all 2 frames"),
        ({"pixel_values_videos": pixels}, "has videos, but not video_grid_thw"),
        ({"input_features": pixels}, "it must hold input_ids, and may hold attention_mask, lab"),
    ):
        arrays = {name: value for name, value in (inputs | changes).items() if value is not None}
        np.savez(tmp_path / "inputs.npz", **arrays)
        assert main(["verify", str(folder), str(tmp_path / "inputs.npz")]) == 2
        assert message in capsys.readouterr().err


def test_squares_that_are_none(tmp_path, capsys):
    folder = GOLDENS / "gemma3-tower"
    inputs = dict(np.load(folder / "inputs.npz"))
    pixels = inputs["pixel_values"]
    for changes, message in (
        ({"pixel_values": pixels[:, :, 1:]}, "pixel_values must be [pictures, 3, 16, 16] (got [3"),
        ({"pixel_values": pixels[1:]}, "the pictures of pixel_values have [4, 4] tokens, and mm_"),
        ({"image_grid_thw": np.ones((3, 3))}, "has image_grid_thw, and pictures of this model ar"),
        ({"image_grid_thw": np.ones((3, 3))}, "squares; leave it out"),
    ):
        np.savez(tmp_path / "inputs.npz", **inputs | changes)
        assert main(["verify", str(folder), str(tmp_path / "inputs.npz")]) == 2
        assert message in capsys.readouterr().err


def test_clips_that_are_none(tmp_path, capsys):
    folder = GOLDENS / "qwen2_audio"
    inputs = dict(np.load(folder / "inputs.npz"))
    features = inputs["input_features"]
    mask = inputs["feature_attention_mask"]
    for changes, message in (
        ({"feature_attention_mask": None}, "has clips, but not feature_attention_mask"),
        ({"feature_attention_mask": mask[:, 1:]}, "feature_attention_mask [clips, frames] (got"),
        ({"input_features": features[:, 1:]}, "have 11 mel bins, and the tower 12"),
        ({"feature_attention_mask": mask[:, ::-1]}, "must be ones, and then zeros, in each clip"),
        (
            {"input_features": features[..., :99], "feature_attention_mask": mask[:, :99]},
            "have 99 frames, and the tower hears 100 of a clip of 99; fill clips up with silence",
        ),
        ({"input_ids": inputs["input_ids"] * 0}, "have [12, 1, 25, 5] tokens, and input_ids []"),
        ({"pixel_values": features}, "it must hold input_ids, and may hold attention_mask, lab"),
    ):
        arrays = {name: value for name, value in (inputs | changes).items() if value is not None}
        np.savez(tmp_path / "inputs.npz", **arrays)
        assert main(["verify", str(folder), str(tmp_path / "inputs.npz")]) == 2
        assert message in capsys.readouterr().err


def test_what_is_compared_has_one_shape_and_keeps_nan(tmp_path):
    """With a stand-in for a run, whose logits and gradients are zeros."""
    np.savez(tmp_path / "inputs.npz", input_ids=[[5, 6, 7, 0]], attention_mask=[[1, 1, 1, 0]])
    run = SimpleNamespace(
        folders={"language": SimpleNamespace(family=SimpleNamespace(name="none"))},
        config=SimpleNamespace(model=SimpleNamespace(language=SimpleNamespace(vocab_size=10))),
        texts=PreparedTexts.read(tmp_path / "inputs.npz", 10),
        loss_and_gradients=lambda: (0.0, iter([("key", np.zeros((2, 3)))])),
        logits=lambda: iter([(0, np.zeros((3, 10)))]),
    )
    logits = np.zeros((1, 4, 10))
    gradient = np.zeros((2, 3))
    path = tmp_path / "wanted.npz"

    def found(*kinds: str, **arrays: Any) -> dict[str, Any]:
        np.savez(path, **arrays)
        return differences(run, **dict.fromkeys(kinds, path))

    assert found("reference", logits=logits + 2, loss=1.0)["logits"] == 2
    assert found("gradients", key=gradient + 2)["gradients"] == {"key": 1}
    # A difference that is NaN must not pass as small
    logits[0, 1, 2] = gradient[1, 1] = np.nan
    assert np.isnan(found("reference", logits=logits)["logits"])
    assert np.isnan(found("gradients", key=gradient)["gradients"]["key"])
    for kind, arrays, message in (
        ("reference", {"loss": 1.0}, "holds loss; it must hold logits"),
        ("reference", {"logits": logits[:, :2]}, "logits must be numbers of shape [1, 3, 10] (got"),
        ("reference", {"logits": logits[..., :9]}, "of shape [1, 4, 10] (got float64 [1, 4, 9])"),
        ("reference", {"logits": logits[0]}, "logits must be numbers of shape [1, 10, 10] (got"),
        ("reference", {"logits": logits.astype(str)}, "logits must be numbers of shape [1, 4, 10]"),
        ("reference", {"logits": logits, "valid": [1]}, "valid must be numbers of shape [1, 4] (g"),
        ("reference", {"logits": logits, "loss": [1]}, "loss must be numbers of shape [] (got"),
        ("gradients", {"key": gradient[:1, :1]}, "key must be numbers of shape [2, 3] (got float6"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            found(kind, **arrays)


def test_labels_and_masks_are_read_as_the_reference_reads_them(tmp_path):
    np.savez(
        tmp_path / "inputs.npz",
        input_ids=[[5, 6, 7, 0], [0, 8, 9, 4]],
        attention_mask=[[1, 1, 1, 0], [0, 1, 1, 1]],
        labels=[[5, -100, 7, -100], [-100, 8, 9, 4]],
    )
    texts = PreparedTexts.read(tmp_path / "inputs.npz", 10)
    assert [tokens.tolist() for tokens in texts.tokens] == [[5, 6, 7], [8, 9, 4]]
    assert [targets.tolist() for targets in texts.targets] == [[-1, 7, -1], [9, 4, -1]]
    assert texts.gather(np.array([1, 0])).targets == 3


# ---------------------------------------------------------------------------- adapters

ADAPTER = {"rank": 3, "alpha": 6.0, "parameters": ["layers.attention.*", "*.down"]}


def adapted_run(source: Path, run: Path, **changed: Any) -> dict[str, Any]:
    """Save a checkpoint of a run from a folder with random adapters.

    Args:
      changed: offsets to add to other parameters of the decoder, by name.

    Returns:
      The parameters.
    """
    language = ModelFolder.open(source).family.section(FolderConfig.read(source))
    config = parse_config(
        {
            "run": {"directory": str(run), "steps": 1},
            "model": {
                "from": str(source),
                "language": language,
                "adapters": {"language": ADAPTER},
            },
            "components": {"language": {"freeze": True}},
            "data": {"sources": [{"name": "a", "path": "a.jsonl"}], "batch_size": 1},
            "optimizer": {"learning_rate": 1.0},
        }
    )
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    model = build_model(config.model, language["vocab_size"], config.components, mesh)
    abstract = model.abstract("float32")
    random = np.random.default_rng(0)
    factors = jax.tree.map(
        lambda leaf: 0.1 * random.standard_normal(leaf.shape, np.float32),
        abstract["adapter.language"],
    )
    params = {
        "language": read_folder(str(source), abstract["language"]),
        "adapter.language": factors,
    }
    for name, offset in changed.items():
        params["language"][name] = params["language"][name] + offset
    run.mkdir()
    write_config(run, config)
    with Checkpoints(run / "checkpoints", 1) as checkpoints:
        checkpoints.save(1, {"params": params})
    return params


@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl"])
def test_adapters_are_merged_or_written_alone(name, tmp_path, capsys):
    """Merged minus original weights are alpha / rank, which is 2, times B A of the adapter file."""
    source = GOLDENS / name
    run = tmp_path / "run"
    adapted_run(source, run)
    assert main(["to-hf", str(run), str(tmp_path / "merged")]) == 0
    assert ": language + adapter.language of" in capsys.readouterr().out
    assert main(["to-hf", str(run), str(tmp_path / "alone"), "--adapters"]) == 0
    config = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6)
    assert config["base_model_name_or_path"] == str(source)
    original, merged = (ModelFolder.open(path).tensors for path in (source, tmp_path / "merged"))
    factors = WeightFile.open(tmp_path / "alone" / "adapter_model.safetensors").tensors
    adapted = set()
    for key in original:
        module = key.removesuffix(".weight")
        if name == "qwen2_5_vl":  # its modules have other names in memory than in files
            module = module.replace("model.", "model.language_model.", 1)
        original_matrix = original[key].array()
        merged_matrix = merged[key].array()
        if not re.fullmatch(config["target_modules"], module):
            np.testing.assert_array_equal(original_matrix, merged_matrix)
            continue
        adapted.add(module.split(".")[-1])
        a, b = (factors.pop(f"base_model.model.{module}.lora_{name}.weight") for name in "AB")
        np.testing.assert_allclose(
            merged_matrix - original_matrix, 2.0 * b.array() @ a.array(), atol=1e-6
        )
    assert not factors
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}


def test_adapters_that_cannot_be_written(tmp_path, capsys):
    source = GOLDENS / "qwen2"
    run = tmp_path / "run"
    adapted_run(source, run, embedding=0.5)
    assert main(["to-hf", str(run), str(tmp_path / "out"), "--adapters"]) == 2
    assert "language.embedding of" in (error := capsys.readouterr().err)
    assert "without --adapters" in error
    (run / "config.yaml").unlink()
    arguments = ["to-hf", str(run), str(tmp_path / "out"), "--source", str(source)]
    assert main(arguments) == 2
    assert "has adapter.language, but no config.yaml that says its alpha" in capsys.readouterr().err
    assert main(["to-orbax", str(source), str(tmp_path / "plain")]) == 0
    arguments[1] = str(tmp_path / "plain")
    assert main([*arguments, "--adapters"]) == 2
    assert "has no adapter.language to write" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def logits_of(run: PreparedRun) -> list[np.ndarray]:
    """Logits of each text, in order."""
    return [values for _, values in sorted(run.logits(), key=lambda text: text[0])]


TEXT_MODELS = ("llama-biased", "mistral", "qwen2-windows", "gemma3", QUICK)
ADAPTED = {name: (name, "AutoModelForCausalLM") for name in TEXT_MODELS}
ADAPTED |= {
    name: (name, "AutoModelForImageTextToText")
    for name in ("qwen2_5_vl", "qwen3_vl-biased", "gemma3-tower", "internvl")
}


def in_float32(source: Path, folder: Path) -> Path:
    """A copy of a folder in float32, so that merging rounds no matrix."""
    shutil.copytree(source, folder)
    for path in folder.glob("*.safetensors"):
        tensors = WeightFile.open(path).tensors
        float32_tensors = {
            key: tensor.array().astype(np.float32) for key, tensor in tensors.items()
        }
        write_tensors(path, float32_tensors)
    return folder


@pytest.mark.parametrize(("name", "kind"), slow_cases(ADAPTED, always=(QUICK,)))
def test_merged_and_unmerged_logits_are_those_of_peft(name, kind, tmp_path):
    """With adapters beside their matrices, with merged matrices, and,
    where it is installed, in peft."""
    source = in_float32(GOLDENS / name, tmp_path / "source")
    run = tmp_path / "run"
    inputs = source / "inputs.npz"
    params = adapted_run(source, run)
    unmerged = on_one_device(
        source,
        inputs,
        model=resolved({"model": {"from": str(source)}})["model"]
        | {"adapters": {"language": ADAPTER}},
        components={"language": {"freeze": True}},
    )
    unmerged_logits = logits_of(dataclasses.replace(unmerged, params=unmerged.params | params))
    assert main(["to-hf", str(run), str(tmp_path / "merged")]) == 0
    merged_logits = logits_of(on_one_device(tmp_path / "merged", inputs))
    base_logits = logits_of(on_one_device(source, inputs))
    assert (
        max(np.abs(a - b).max() for a, b in zip(unmerged_logits, merged_logits, strict=True)) < 1e-5
    )
    assert (
        max(np.abs(a - b).max() for a, b in zip(unmerged_logits, base_logits, strict=True)) > 1e-1
    )
    # What follows needs peft, which not every environment has
    if importlib.util.find_spec("peft") is None:
        return
    out = tmp_path / "alone"
    assert main(["to-hf", str(run), str(out), "--adapters"]) == 0
    arguments = map(str, (source, out, inputs, kind))
    subprocess.run([sys.executable, "-c", PEFT, *arguments], check=True)
    with np.load(out / "theirs.npz") as reference:
        for text, logits in enumerate(unmerged_logits):
            slots = reference["valid"][text].astype(bool)
            assert np.abs(logits - reference["logits"][text, slots]).max() < 1e-5


PEFT = """
import sys
import numpy as np, torch, transformers
from peft import PeftModel
base, adapter, inputs, kind = sys.argv[1:]
model = getattr(transformers, kind).from_pretrained(base, dtype=torch.float32)
model = PeftModel.from_pretrained(model, adapter)
inputs = {name: torch.tensor(array) for name, array in np.load(inputs).items()}
with torch.no_grad():
    logits = model(**inputs).logits.numpy()
np.savez(adapter + "/theirs.npz", logits=logits, valid=inputs["attention_mask"].numpy())
"""


# ---------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=MARKS.get(name, EXHAUSTIVE), id=name)
        for name in NAMES
        if name != BY_COMMAND
    ],
)
def test_logits_loss_and_gradients_are_those_of_the_reference(name):
    """Three texts are packed into one row here, and computed separately by the reference."""
    run = on_one_device(GOLDENS / name, GOLDENS / name / "inputs.npz")
    assert len(run.step.rows["language"]) == 1, "all texts in one row"
    check(run, GOLDENS / name)
    check_alone(run)


def check_alone(run: PreparedRun) -> None:
    """Assert that packed texts have the losses and gradients of each text in a row of its own."""

    def computed(texts: range) -> tuple[Any, np.ndarray, np.ndarray]:
        step = run.programs.put(run.step_of(np.array(texts)))
        gradients, sums, _ = jax.device_get(run.programs.gradients(run.params, step))
        return gradients, sums.loss.sum(0), sums.targets.sum(0)

    size = len(run.texts.tokens)
    gradients, losses, targets = computed(range(size))
    singles = [computed(range(text, text + 1)) for text in range(size)]
    np.testing.assert_allclose(sum(loss for _, loss, _ in singles), losses, rtol=1e-5)
    weighted = [
        scaled(tree, text_targets.sum() / targets.sum()) for tree, _, text_targets in singles
    ]
    for encoder in run.config.model.encoders:
        # A bias that all keys share cancels in softmax: without rotations, its gradient is noise
        if "rotary" not in getattr(run.config.model, encoder).positions:
            for tree in (gradients, *weighted):
                tree[encoder]["layers"]["attention"].pop("key_bias", None)
    assert_close(added(weighted), gradients, 1e-5)


@pytest.mark.slow
def test_the_command_prints_one_object(capsys):
    """On all devices, with sharded parameters."""
    folder = GOLDENS / BY_COMMAND
    arguments = [folder, folder / "inputs.npz", "--reference", folder / "reference.npz"]
    arguments += ["--gradients", folder / "gradients.npz"]
    assert main(["verify", *map(str, arguments)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["family"] == "Llama" and record["seconds"] > 0 and record["loss"] > 1
    check_numbers(record, folder)


SPLIT = {"data": 2, "fsdp": 2, "tensor": 2}
# Folder, mesh, and `phases.audio`, whose blocks keep chunks of clips whole when rows are split
MESHES = {
    "windows-split": ("qwen2-windows", SPLIT, {}),
    "windows-parts": ("qwen2-windows", {"context": 2, "fsdp": 4}, {}),
    "pictures-split": ("qwen2_5_vl", SPLIT, {}),
    "pictures-parts": ("qwen2_5_vl", {"context": 2, "fsdp": 2, "data": 2}, {}),
    "clips-split": ("qwen2_audio", SPLIT, {}),
    "clips-parts": ("qwen2_audio", {"context": 2, "fsdp": 2, "data": 2}, {"block": 400}),
    "omni-data": ("qwen2_5_omni", {"data": 8}, {}),
    "omni-fsdp": ("qwen2_5_omni", {"data": 1, "fsdp": 8}, {}),
    "omni-split": ("qwen2_5_omni", SPLIT, {}),
    "omni-parts": ("qwen2_5_omni", {"data": 1, "context": 2, "fsdp": 4}, {"block": 160}),
    "thinker-data": ("qwen3_omni_moe", {"data": 8}, {}),
    "thinker-fsdp": ("qwen3_omni_moe", {"data": 1, "fsdp": 8}, {}),
    "thinker-split": ("qwen3_omni_moe", SPLIT, {}),
    "thinker-parts": ("qwen3_omni_moe", {"data": 1, "context": 2, "fsdp": 4}, {"block": 416}),
    "squares-split": ("gemma3-tower", SPLIT, {}),
    "squares-parts": ("gemma3-tower", {"context": 2, "fsdp": 2, "data": 2}, {}),
    "tiles-split": ("internvl", SPLIT, {}),
    "tiles-parts": ("internvl-normed", {"context": 2, "fsdp": 2, "data": 2}, {}),
    "deepstack-split": ("qwen3_vl_moe", SPLIT, {}),
    "deepstack-parts": ("qwen3_vl", {"context": 2, "fsdp": 2, "data": 2}, {}),
}


@pytest.mark.parametrize(
    ("name", "mesh", "audio"),
    slow_cases(MESHES, always=("windows-split", "pictures-split", "deepstack-split")),
)
def test_the_mesh_changes_nothing(name, mesh, audio):
    folder = GOLDENS / name
    phases = {"audio": audio}
    check(PreparedRun.of(folder, folder / "inputs.npz", mesh=mesh, phases=phases), folder)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_projectors_of_a_frozen_tower_have_the_gradients_that_they_always_have():
    """The backward pass starts from kept features: of the last layer, and of
    layers that deepstack reads."""
    folder = GOLDENS / "qwen3_vl"
    frozen = {"vision": {"freeze": True}, "language": {"freeze": True}}
    run = on_one_device(folder, folder / "inputs.npz", components=frozen)
    _, gradients = run.loss_and_gradients()
    projector_gradients = dict(gradients)
    with np.load(folder / "gradients.npz") as reference:
        projectors = {key for key in reference if "merger" in key and ".merger.norm" not in key}
        assert projector_gradients.keys() == projectors
        for key, gradient in projector_gradients.items():
            assert np.abs(gradient - reference[key]).max() < 1e-4 * np.abs(reference[key]).max(), (
                key
            )


@pytest.mark.slow
@needs("torch", "transformers")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen2", "AutoModelForCausalLM"),
        pytest.param("qwen2_5_vl", "AutoModelForImageTextToText", marks=EXHAUSTIVE),
        pytest.param("qwen2_5_vl-flat", "AutoModelForImageTextToText", marks=EXHAUSTIVE),
        pytest.param("gemma3-tower", "AutoModelForImageTextToText", marks=EXHAUSTIVE),
        pytest.param("internvl", "AutoModelForImageTextToText", marks=EXHAUSTIVE),
        pytest.param("qwen2_audio", "Qwen2AudioForConditionalGeneration", marks=EXHAUSTIVE),
        pytest.param("qwen3_vl-biased", "AutoModelForImageTextToText", marks=EXHAUSTIVE),
        pytest.param("qwen3_vl_moe", "AutoModelForImageTextToText", marks=EXHAUSTIVE),
        pytest.param(
            "qwen2_5_omni-thinker", "Qwen2_5OmniThinkerForConditionalGeneration", marks=EXHAUSTIVE
        ),
        pytest.param(
            "qwen3_omni_moe-thinker",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            marks=EXHAUSTIVE,
        ),
    ],
)
def test_the_reference_loads_what_is_written(name, kind, tmp_path):
    """With a new seed and other sizes, the reference strictly
    loads a written folder with changed parameters."""
    from tests.families.make_goldens import main as make

    make(tmp_path, (name,), seed=3, num_hidden_layers=3, hidden_size=32)
    folder = tmp_path / name
    inputs = tmp_path / name / "inputs.npz"
    run = on_one_device(folder, inputs)
    check(run, folder)
    with Checkpoints(tmp_path / "run" / "checkpoints", 1) as checkpoints:
        checkpoints.save(1, {"params": jax.tree.map(lambda leaf: leaf * 1.01, run.params)})
    out = tmp_path / "out"
    assert main(["to-hf", str(tmp_path / "run"), str(out), "--source", str(folder)]) == 0
    subprocess.run([sys.executable, "-c", STRICT, str(out), str(inputs), kind], check=True)
    compared = differences(on_one_device(out, inputs), out / "theirs.npz")
    assert compared["logits"] < 1e-4
    assert differences(run, out / "theirs.npz")["logits"] > 1e-2, "the parameters have changed"


STRICT = """
import sys
import numpy as np, torch, transformers
model_class = getattr(transformers, sys.argv[3])
model, info = model_class.from_pretrained(sys.argv[1], dtype=torch.float32, output_loading_info=True)
assert not any(keys for name, keys in info.items() if name.endswith("keys")), info
inputs = {name: torch.tensor(array) for name, array in np.load(sys.argv[2]).items()}
with torch.no_grad():
    logits = model(**inputs).logits.numpy()
np.savez(sys.argv[1] + "/theirs.npz", logits=logits, valid=inputs["attention_mask"].numpy())
"""


def on_one_device(folder: Path, inputs: Path, **sections: Any) -> PreparedRun:
    """A run on one device, whose texts share one row."""
    return PreparedRun.of(
        folder, inputs, jax.devices()[:1], mesh={"data": 1}, phases={"language": ROWS}, **sections
    )
