"""Steps of tiny Omni thinkers on text, pictures, clips and videos.

One device is the reference for every mesh and for stages. Other batches compile nothing, and
transformers loads what a step makes of a published folder.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import soundfile
from PIL import Image

from jaxmllm.config.strict_yaml import write_text
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.resolved import resolved
from jaxmllm.runtime.compilations import CompilationCounter
from jaxmllm.tools.convert import main as convert
from jaxmllm.tools.prepared_inputs import differences
from jaxmllm.train import main as train
from jaxmllm.training.initial import initial_state
from jaxmllm.training.programs.staged import StagedPrograms
from tests.support import EXHAUSTIVE, assert_close, needs, slow_cases
from tests.tools.test_convert import STRICT, in_float32, on_one_device
from tests.training.test_heard_run import SPECIAL
from tests.training.test_published_run import WORDS, published

THINKERS = ("qwen2_5_omni", "qwen3_omni_moe")
RECORDS = 48
BATCH = 12
ROWS = {"row_classes": 1, "spans": [1], "kept_residuals": 0}  # few programs to compile
# A block of audio holds complete chunks of clips, even where two devices share it
AUDIO_BLOCKS = {"qwen2": 160, "qwen3": 416}
# The media that records hold beside text, in turn
KINDS = ((), ("image",), ("audio",), ("video",), ("image", "audio"), ("audio", "video", "image"))


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    """A golden of the family with a tokenizer, in float32."""
    base = tmp_path_factory.mktemp("thinker")
    return in_float32(published(base, request.param, [*SPECIAL, "<|VIDEO|>"]), base / "float32")


@pytest.fixture(scope="module")
def tree(folder) -> dict:
    """The config of a run that trains every component, on records of every kind."""
    base = folder.parent
    family = json.loads((folder / "config.json").read_text())["model_type"].partition("_")[0]
    blocks = {"vision": 32, "audio": AUDIO_BLOCKS[family], "language": 32}
    rng = np.random.default_rng(0)
    lines = []
    for index in range(RECORDS):
        kinds = KINDS[index % len(KINDS)]
        content = [made_part(kind, base / f"{index}", rng) for kind in kinds]
        content.insert(rng.integers(len(content) + 1), {"type": "text", "text": "what is it"})
        answer = " ".join(rng.choice(WORDS, rng.integers(2, 9)))
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}) + "\n")
    (base / "train.jsonl").write_text("".join(lines))
    return {
        "run": {"directory": str(base / "run"), "steps": 1},
        "model": {"from": str(folder), "vision": {"videos": True}},
        "data": {
            "sources": [{"name": "a", "path": str(base / "train.jsonl")}],
            "videos": {"min_pixels": 256},
            "batch_size": BATCH,
        },
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        "phases": {name: ROWS | {"block": block} for name, block in blocks.items()},
        "mesh": {"data": 1},
        "logging": {"tensorboard": False},
    }


def made_part(kind: str, stem: Path, random: np.random.Generator) -> dict[str, str]:
    """A part of a message, whose file is written."""
    if kind == "audio":
        path = stem.with_suffix(".wav")
        soundfile.write(path, random.uniform(-0.5, 0.5, random.integers(800, 20_000)), 16_000)
        return {"type": kind, kind: path.name}
    size = (*random.integers(8, 40, 2), 3)
    frames = [
        Image.fromarray(random.integers(0, 256, size, np.uint8))
        for _ in range(random.integers(2, 6))
    ]
    if kind == "image":
        path = stem.with_suffix(".png")
        frames[0].save(path)
    else:
        path = stem.with_suffix(".webp")
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=400)
    return {"type": kind, kind: path.name}


def computed(setup, examples):
    """(mean loss, gradients) of these examples with the folder's parameters."""
    params = initial_state(setup.config, setup.programs, lambda line: None).params
    gradients, sums, failed = setup.programs.gradients(params, setup.put(setup.step(examples)))
    if isinstance(setup.programs, StagedPrograms):
        gradients = setup.programs.joined(gradients)
    gradients, sums, failed = jax.device_get((gradients, sums, failed))
    assert int(failed) == 0
    # Softmax ignores what all keys share, so the gradient of the keys' bias is rounding noise
    gradients["audio"]["layers"]["attention"].pop("key_bias", None)
    return float(sums.loss.sum() / sums.targets.sum()), gradients


MESHES = {
    "data8": ({"data": 8}, {}),
    "fsdp8": ({"data": 1, "fsdp": 8}, {}),
    "data2-fsdp2-tensor2": ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "context2-fsdp4": ({"data": 1, "context": 2, "fsdp": 4}, {}),
    "stages2": ({"data": 4}, {"stages": 2}),
    "stages4": ({"data": 1, "fsdp": 2}, {"stages": 4}),
}
# One mark for all tests groups them by folder, so that the reference is computed once per folder
BOTH = pytest.mark.parametrize(
    "folder", [THINKERS[0], pytest.param(THINKERS[1], marks=EXHAUSTIVE)], indirect=True
)
EXAMPLES = np.random.default_rng(1).permutation(RECORDS)[:BATCH]


@pytest.fixture(scope="module")
def whole(setups, tree):
    """Loss and gradients on one device."""
    return computed(setups(resolved(tree), 1), EXAMPLES)


@pytest.mark.parametrize(("mesh", "pipeline"), slow_cases(MESHES, {"data8"}))
@BOTH
def test_no_mesh_changes_loss_or_gradients(setups, tree, whole, mesh, pipeline):
    setup = setups(resolved(tree | {"mesh": mesh, "pipeline": pipeline}), 8)
    loss, gradients = computed(setup, EXAMPLES)
    assert loss == pytest.approx(whole[0], rel=1e-5)
    assert_close(gradients, whole[1], 1e-5)


@pytest.mark.slow
@BOTH
def test_twenty_batches_compile_nothing(setups, tree):
    """Batches have records with and without media of each kind."""
    setup = setups(resolved(tree), 1)
    state = initial_state(setup.config, setup.programs, lambda line: None)
    rng = np.random.default_rng(2)
    batches = [rng.choice(RECORDS, BATCH, replace=False) for _ in range(20)]
    batches[7] = np.repeat(np.arange(0, RECORDS, len(KINDS)), 2)[:BATCH]  # records of text alone
    state, _ = setup.programs.train(state, setup.put(setup.step(batches[0])))
    counter = CompilationCounter()
    for batch in batches:
        state, metrics = setup.programs.train(state, setup.put(setup.step(batch)))
        assert np.isfinite(jax.device_get(metrics["loss"]))
    assert counter.names == []
    counter.close()


@pytest.mark.slow
@needs("torch", "transformers")
@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("qwen2_5_omni-thinker", "Qwen2_5OmniThinkerForConditionalGeneration"),
        pytest.param(
            "qwen2_5_omni",
            "Qwen2_5OmniThinkerForConditionalGeneration",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "qwen3_omni_moe",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            marks=pytest.mark.exhaustive,
        ),
    ],
    indirect=["folder"],
)
def test_the_reference_loads_what_a_step_has_made(folder, kind, tree, tmp_path):
    """A step changes every tensor of the thinker that it reaches; transformers loads all of them.

    Its logits are ours, and differ from the logits before the step.
    """
    config = tree | {"run": {"directory": str(tmp_path / "run"), "steps": 1}, "mesh": {"data": 8}}
    (tmp_path / "config.yaml").write_text(write_text(config))
    assert train(["--config", str(tmp_path / "config.yaml")]) == 0
    out = tmp_path / "out"
    inputs = folder / "inputs.npz"
    assert convert(["to-hf", str(tmp_path / "run"), str(out)]) == 0
    before = ModelFolder.open(folder).tensors
    after = ModelFolder.open(out).tensors
    unchanged = [key for key in before if np.array_equal(before[key].array(), after[key].array())]
    speech_prefixes = ("talker.", "token2wav.", "code2wav.")
    unchanged_thinker = [
        k for k in unchanged if not k.startswith(speech_prefixes) and "audio_bos_eos_token" not in k
    ]
    # An expert without tokens in this step has no gradient
    assert all(".experts." in key for key in unchanged_thinker), unchanged_thinker
    assert len(unchanged_thinker) <= 0.2 * sum(".experts." in key for key in before), (
        unchanged_thinker
    )
    subprocess.run([sys.executable, "-c", STRICT, str(out), str(inputs), kind], check=True)
    distances = differences(on_one_device(out, inputs), out / "theirs.npz")
    assert distances["logits"] < 1e-4
    # Without the step's changes, the logits are far from those of the trained folder
    assert differences(on_one_device(folder, inputs), out / "theirs.npz")["logits"] > 1e-2
