"""The comparison with diffusers: the files and records that it writes.

Where torch is installed, a tiny model runs in both systems.
"""

import json
from argparse import Namespace

import numpy as np
import pytest

from benchmarks import peer_diffusers
from benchmarks.peer_diffusers import OWN, PEER
from jaxmllm.data.media.latents import GeneratedLatents
from jaxmllm.data.media.reference import Clip, File
from tests.support import needs


def told(seconds, **others):
    """Records of steps that took these seconds."""
    common = {"loss": 2.0, "peak_bytes": 7} | others
    return [
        {"seconds": step_seconds, "cpu_seconds": 2 * step_seconds, **common}
        for step_seconds in seconds
    ]


MEASURED = {
    "told": {
        PEER: told([3.0, 8.0, 3.0, 4.0, 5.0], batches=4),
        OWN: told([1.0, 2.0, 3.0, 4.0, 5.0], slots=40),
    },
    "tokens": [20, 40, 60, 80, 100],
    "compile_seconds": 9.0,
    "parameters": {PEER: 8, OWN: 8},
}


def test_without_torch_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(peer_diffusers, "has_modules", lambda *names: False)
    assert peer_diffusers.main(["--python", "/some/python"]) == 2
    error = capsys.readouterr().err
    assert "/some/python has no torch and diffusers" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    ["--smaller 0", "--smaller nan", "--items 0", "--threads 4096"],
)
def test_bad_arguments_are_refused_at_once(arguments, monkeypatch, capsys):
    """Before it looks for the other system."""
    monkeypatch.setattr(peer_diffusers, "has_modules", None)
    with pytest.raises(SystemExit) as exit_info:
        peer_diffusers.main(arguments.split())
    assert exit_info.value.code == 2
    assert arguments.split()[0] in capsys.readouterr().err.splitlines()[-1]


def test_ratios_are_over_the_same_batch():
    ratio = peer_diffusers.ratio(MEASURED, "seconds")
    assert list(ratio.values()) == [1, 1, 3], "the median of each batch's ratio, and its quartiles"
    peer_row, own_row = peer_diffusers.rows_of(MEASURED, items=6)
    assert own_row["tokens_per_second"] == 20 and own_row["tokens_per_cpu_second"] == 10
    assert own_row["items_per_second"] == 2 and peer_row["items_per_second"] == 1.5
    assert (peer_row["batches"], own_row["slots"], own_row["compile_seconds"]) == (4, 40, 9)


def test_latents_and_captions_are_of_the_workloads_sizes(tmp_path):
    """Half of the items are pictures, whose patches are counted by the reader that runs use."""
    peer_diffusers.write_items(tmp_path, 0, clips=0.5, smaller=8.0, channels=4)
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    reader = GeneratedLatents(4, 1, 2, (0.0,), (1.0,), max_frames=128, shorten=False)
    shapes = [
        reader.measure(Clip(File(tmp_path / line["messages"][1]["content"][0]["video"])))
        for line in lines
    ]
    assert len(shapes) == peer_diffusers.WRITTEN
    assert sum(shape[0] == 1 for shape in shapes) == len(shapes) // 2
    assert len(set(shapes)) > len(shapes) // 3, "ragged"
    texts = [len(line["messages"][0]["content"]) for line in lines]
    assert 16 <= min(texts) < np.median(texts) < 90 < max(texts) <= 512


def test_batches_hold_what_another_process_needs(tmp_path):
    latents = np.ones((4, 3, 2, 6), np.float32)
    item = {"latents": latents, "noise": latents, "states": np.ones((5, 7), np.float32)}
    item["time"] = np.array(0.25, np.float32)
    peer_diffusers.write_batch(tmp_path / "batch.npz", [item, item])
    arrays = np.load(tmp_path / "batch.npz")
    assert arrays["count"] == 2 and arrays["time_1"] == 0.25
    assert arrays["noise_1"].shape == (4, 3, 2, 6) and arrays["states_0"].shape == (5, 7)
    assert peer_diffusers.tokens_of([item, item], (1, 2)) == 2 * (3 * 1 * 3 + 5)


def test_the_run_has_the_folders_keys(tmp_path, monkeypatch):
    """Texts are padded as in the family, and the decoder is frozen and small."""
    folder = tmp_path / "wan"
    folder.mkdir()
    kind = {"_class_name": "WanTransformer3DModel", "qk_norm": "rms_norm_across_heads"}
    (folder / "config.json").write_text(json.dumps(kind | peer_diffusers.wan("tiny")))
    monkeypatch.setattr(peer_diffusers, "WRITTEN", 4)
    options = Namespace(
        size="tiny",
        seed=0,
        mix="clips",
        smaller=8.0,
        items=2,
        overrides=["model.language.layers=2"],
    )
    config = peer_diffusers.config_of(folder, tmp_path, options)
    generator = config.model.diffusion
    assert (generator.padded_conditions, generator.layers, generator.channels) == (512, 1, 4)
    assert (config.model.language.width, config.model.language.layers) == (
        16,
        2,
    ) and config.components.language.freeze


@pytest.mark.slow
@pytest.mark.exhaustive
@needs("torch", "diffusers")
def test_a_tiny_model_begins_with_the_same_loss(tmp_path):
    path = tmp_path / "found.json"
    arguments = ["--size", "tiny", "--steps", "1", "--items", "4", "--smaller", "16"]
    assert peer_diffusers.main([*arguments, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert [row["system"] for row in record["rows"]] == [PEER, OWN]
    assert record["first_losses"][OWN] == pytest.approx(record["first_losses"][PEER], abs=1e-4)
