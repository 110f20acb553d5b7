"""Training a transformer of Wan 2.1 on CPU next to diffusers, from one folder and on the same clips
and captions.

    python -m benchmarks.peer_diffusers --python PATH [--mix clips] [--steps 7] [--items 16] [--threads 1] [--json PATH]
        [key=value ...]

PATH is an interpreter that has torch 2.13 and diffusers 0.42, by default this one; without them the
command says so in a line and exits with 2. The model is random, in Wan's form with 6 layers of 256.
Latents are noise of the sizes of benchmarks/diffusion.py, with sides `--smaller` times smaller, and
captions have the lengths of that file; few items have the same shape.

    by shape   diffusers and fused AdamW: items of one shape are a batch, texts are padded with
               zeros to 512 states
    jaxmllm    the programs of a run on one CPU device: plan, packed rows, step. The programs are
               compiled beforehand in another process, and each has run once before a timed step
               needs it

Texts are states of the same frozen decoder of one layer. diffusers gets them computed before the
clock starts; jaxmllm, which keeps no states, computes them again in every step. Both attend to 512
states (`padded_conditions`), and both train all parameters of the folder in float32. Losses of the
first batch, with the same noise and times, must be equal to 1e-4, or nothing is measured. Latents
are decoded before the clock starts; noise, planning and filling rows are timed. Systems take turns
on each batch; two steps of each are not counted. `ratio` is the median over steps of the seconds of
diffusers over ours, on the same batch; tokens are those of texts and patches, without padding.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks.balance_step import quartiles
from benchmarks.diffusion import MIXES, draw
from benchmarks.diffusion_buckets import FRAMES, MOST_TEXT, SIDE
from benchmarks.peer_torch import add_threads, tell, use_cores
from benchmarks.peers.examples import KeptCorpus
from benchmarks.peers.own_run import OwnRun, compile_alone, compiled_programs
from benchmarks.peers.processes import (
    Peer,
    add_peer_options,
    check_losses,
    has_modules,
    make_folder,
    parse_peer_options,
)
from jaxmllm.arrays import Longs, ceil_divide
from jaxmllm.config import strict_yaml
from jaxmllm.config.schema import Config
from jaxmllm.data.batches import batch_examples
from jaxmllm.data.media.generated import frames_of
from jaxmllm.data.rows.draws import DrawRule
from jaxmllm.families.resolved import load_run_config
from jaxmllm.models.rows import LanguageRows
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.training.objectives.flow import patch_noise
from jaxmllm.training.run import USER_ERRORS

MODULE: Final = "benchmarks.peers.diffusers_wan"
PEER = "by shape"
OWN = "jaxmllm"
DIFFUSION = "diffusion"
COMPONENTS: Final = (DIFFUSION, "projector.language")
WARM_UP: Final = 2  # first steps, not counted
WRITTEN: Final = 256  # items that are generated; `GENERATOR` names the number
LEARNING_RATE: Final = 1e-4
GENERATOR: Final = "benchmarks.diffusion.draw([seed], 256, share of clips), and batches of the run"
SIZES: Final[Mapping[str, dict[str, int]]] = {  # of the transformer
    "6m": {"layers": 6, "heads": 4, "head": 64, "mlp": 1024, "text": 256, "channels": 16},
    # For trying out the code itself
    "tiny": {"layers": 1, "heads": 2, "head": 12, "mlp": 32, "text": 16, "channels": 4},
}

Arrays = dict[str, NDArray[Any]]


def wan(size: str) -> dict[str, Any]:
    """The shapes of a size, with the keys of diffusers."""
    shape = SIZES[size]
    return {
        "num_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "attention_head_dim": shape["head"],
        "ffn_dim": shape["mlp"],
        "text_dim": shape["text"],
        "in_channels": shape["channels"],
        "out_channels": shape["channels"],
        "freq_dim": 256,
        "patch_size": [1, 2, 2],
    }


def write_items(folder: Path, seed: int, clips: float, smaller: float, channels: int) -> None:
    """Write latents of pictures and clips, and a JSONL file of captions with one letter per token.

    Args:
      clips: share of clips.
      smaller: how many times smaller sides are than in benchmarks/diffusion.py.
    """
    (folder / "latents").mkdir(parents=True)
    media = draw([seed], WRITTEN, clips)
    random = np.random.default_rng([seed, WRITTEN])
    lines = []
    for index in range(WRITTEN):
        height, width = (
            2 * max(1, round(side / SIDE / smaller))
            for side in (int(media.height[index]), int(media.width[index]))
        )
        frames = ceil_divide(int(media.frames[index]), FRAMES)
        latents = random.standard_normal((channels, frames, height, width), np.float32)
        path = f"latents/{index:04d}.npy"
        np.save(folder / path, latents.astype(np.float16))
        letters = random.integers(ord("a"), ord("z") + 1, int(media.text[index]))
        messages = [
            {"role": "user", "content": bytes(letters.astype(np.uint8)).decode()},
            {"role": "assistant", "content": [{"type": "video", "video": path}]},
        ]
        lines.append(json.dumps({"id": f"{index:04d}", "messages": messages}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")


def config_of(folder: Path, place: Path, options: Any) -> Config:
    """The config of a run of the folder's model on one device; writes its data into `place`."""
    shape = SIZES[options.size]
    write_items(
        place / "data", options.seed, MIXES[options.mix], options.smaller, shape["channels"]
    )
    component_settings = {"remat": ["attention", "projections", "mlp"]}
    phase_settings: dict[str, Any] = {"block": 64} | (
        {"row_classes": 1} if options.size == "tiny" else {}
    )
    width = shape["text"]
    tree = {
        "run": {"directory": str(place / "run"), "steps": 1000, "seed": options.seed},
        "model": {
            "language": {
                **{"width": width, "layers": 1, "heads": 2, "kv_heads": 1},
                **{"head_size": width // 2, "mlp_width": width},
            },
            DIFFUSION: {"from": str(folder), "projector": "folder"},
        },
        "objective": {"language": {"weight": 0.0}, DIFFUSION: {"condition_drop": 0.0}},
        "components": {"language": {"freeze": True}, DIFFUSION: component_settings},
        "data": {
            "root": str(place / "data"),
            "sources": [{"name": "train", "path": "train.jsonl"}],
            "index_cache": str(place / "indexes"),
            "batch_size": options.items,
        },
        "phases": {"language": {"block": 64, "row_classes": 1}, DIFFUSION: phase_settings},
        "optimizer": {"learning_rate": LEARNING_RATE, "schedule": "constant", "warmup_steps": 0},
        "mesh": {"data": 1},
    }
    path = place / "config.yaml"
    path.write_text(strict_yaml.write_text(tree), encoding="utf-8")
    return load_run_config(path, options.overrides)


# ---------------------------------------------------------------------------- batches for diffusers


class Batches:
    """The items of a step as arrays for another system: latents, noise, states of texts, and times.
    States are computed once for each item."""

    def __init__(self, config: Config, own: OwnRun, corpus: KeptCorpus):
        self.corpus = corpus
        self.own = own
        self.rule = DrawRule(config.run.seed, config.objective.diffusion)
        assert config.model.diffusion is not None
        self.patch = config.model.diffusion.patch_frames, config.model.diffusion.patch_size
        model = own.programs.functions.model
        width = config.model.language.width

        def hidden(params: Any, rows: LanguageRows) -> Any:
            media = jnp.zeros((*rows.tokens.shape, width))
            return model.hidden(params, rows, media)[0]

        self.hidden = jax.jit(hidden)
        self.kept: dict[int, NDArray[Any]] = {}

    def __call__(self, step: int, numbers: Longs) -> list[Arrays]:
        """The items of some examples, with the noise and times that our run draws in this step."""
        return [self._item(step, example) for example in numbers.tolist()]

    def _item(self, step: int, number: int) -> Arrays:
        """Latents and noise [C, F, H, W], states [L, D] and time [] of the item of one example."""
        (item,) = self.corpus.read(np.array([number]))[0].items
        count, features = item.features.shape
        noise_draw = self.rule.of(step, self.corpus.id(number), 0, count)
        keys = jnp.tile(jnp.array(noise_draw.noise, jnp.uint32), (count, 1))
        noise = patch_noise(keys, jnp.arange(count), features)
        latents, noise_of_latents = (
            np.moveaxis(frames_of(np.asarray(patches), item.shape, *self.patch), -1, 0)
            for patches in (item.features, noise)
        )
        return {
            "latents": np.ascontiguousarray(latents),
            "noise": np.ascontiguousarray(noise_of_latents),
            "states": self._states(number),
            "time": np.array(noise_draw.time, np.float32),
        }

    def _states(self, number: int) -> NDArray[Any]:
        """States of the tokens that the item of an example is drawn from: [L, D]."""
        if number not in self.kept:
            host = self.own.filler(0, np.array([number]))
            # The example is alone in its step, so just one row has tokens
            (row,) = (row for row in host.rows["language"] if row["segments"].any())
            states = np.asarray(self.hidden(self.own.state.params, LanguageRows.of(row)))
            (span,) = self.corpus.example(number).media
            self.kept[number] = states[0, span.slot : span.slot + span.conditions]
        return self.kept[number]


def write_batch(path: Path, items: Sequence[Arrays]) -> None:
    """Write items as arrays, for another process."""
    arrays: dict[str, Any] = {"count": np.array(len(items))}
    for i, item in enumerate(items):
        arrays |= {f"{name}_{i}": array for name, array in item.items()}
    np.savez(path, **arrays)


def tokens_of(items: Sequence[Arrays], patch: tuple[int, int]) -> int:
    """Number of all tokens: states of texts, and patches."""
    frames, side = patch
    patches = sum(item["latents"][0].size // (frames * side**2) for item in items)
    return patches + sum(len(item["states"]) for item in items)


# ---------------------------------------------------------------------------- measuring


def measure(options: Any, place: Path) -> dict[str, Any]:
    """Measurements of every step, by system, and facts about the systems."""
    folder = place / "wan"
    make_folder(options.python, MODULE, folder, {"model": wan(options.size), "seed": options.seed})
    config = config_of(folder, place, options)
    tell("compiles ours")
    compile_seconds = compile_alone(config)
    tell("reads lengths and the programs of ours")
    inputs, programs = compiled_programs(config)
    corpus = KeptCorpus(inputs.corpus)
    own_run = OwnRun(folder, config, programs, corpus, COMPONENTS, DIFFUSION)
    batches = Batches(config, own_run, corpus)
    optimizer = config.optimizer
    settings = {
        "threads": options.threads,
        "padded_text": MOST_TEXT,
        "learning_rate": LEARNING_RATE,
        "betas": [optimizer.beta1, optimizer.beta2],
        "weight_decay": optimizer.weight_decay,
        "clip": optimizer.clip_norm,
    }
    results_by_system: dict[str, list[dict[str, Any]]] = {PEER: [], OWN: []}
    tokens = []
    path = place / "batch.npz"
    with ExitStack() as stack:
        peer = Peer(options.python, MODULE, folder, "peer", settings, stack)
        for step in range(WARM_UP + options.steps):
            numbers = batch_examples(inputs.order, options.items, len(inputs.samples) + step)
            items = batches(step, numbers)
            write_batch(path, items)
            if not step:
                losses = {PEER: peer(path, step=False)["loss"], OWN: own_run.loss(numbers)}
                check_losses(losses)
                tell(f"losses are equal: {losses[OWN]:.6f}; measures")
            for name in (PEER, OWN) if step % 2 else (OWN, PEER):
                result = own_run(step, numbers) if name == OWN else peer(path)
                if step >= WARM_UP:
                    results_by_system[name].append(result)
            if step >= WARM_UP:
                tokens.append(tokens_of(items, batches.patch))
    return {
        "told": results_by_system,
        "tokens": tokens,
        "first_losses": losses,
        "compile_seconds": compile_seconds,
        "parameters": {PEER: peer.facts["parameters"], OWN: own_run.parameters},
        "versions": peer.facts["versions"],
    }


def ratio(measured: Mapping[str, Any], clock: str) -> dict[str, float]:
    """Median and quartiles over steps of the peer's time over ours, on the same batch."""
    peer_times, own_times = (
        [result[clock] for result in measured["told"][name]] for name in (PEER, OWN)
    )
    return quartiles((np.array(peer_times) / np.array(own_times)).tolist())


def rows_of(measured: Mapping[str, Any], items: int) -> list[dict[str, Any]]:
    """One record for every system, with medians over the steps."""
    rows = []
    for name, results in measured["told"].items():
        seconds, cpu = (
            np.array([result[clock] for result in results]) for clock in ("seconds", "cpu_seconds")
        )
        rows.append(
            {
                "system": name,
                "seconds": quartiles(seconds.tolist()),
                "cpu_seconds": quartiles(cpu.tolist()),
                "items_per_second": float(np.median(items / seconds)),
                "tokens_per_second": float(np.median(np.array(measured["tokens"]) / seconds)),
                "items_per_cpu_second": float(np.median(items / cpu)),
                "tokens_per_cpu_second": float(np.median(np.array(measured["tokens"]) / cpu)),
                "peak_bytes": results[-1]["peak_bytes"],
                "parameters": measured["parameters"][name],
                "loss": results[-1]["loss"],
                "all_seconds": seconds.tolist(),
            }
        )
    results_by_system = measured["told"]
    rows[0]["batches"] = float(np.median([result["batches"] for result in results_by_system[PEER]]))
    rows[1]["slots"] = float(np.median([result["slots"] for result in results_by_system[OWN]]))
    rows[1]["compile_seconds"] = measured["compile_seconds"]
    return rows


def show(rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, Any], title: str) -> None:
    """Print one line per system, then the ratio of the two by wall and by CPU clock."""
    names = ("items_per_second", "tokens_per_second", "items_per_cpu_second")
    lines = [
        [
            *(row["system"], *row["seconds"].values(), row["cpu_seconds"]["median"]),
            *(row[name] for name in names),
            *(row["peak_bytes"] / 1e9, row["loss"]),
        ]
        for row in rows
    ]
    columns = ["system", "s/step", "quarter below", "quarter above", "CPU s", "items/s", "tokens/s"]
    columns += ["items/CPU s", "peak GB", "last loss"]
    print_table(title, columns, lines, left_aligned=1)
    lines = [[clock, *ratio_quartiles.values()] for clock, ratio_quartiles in ratios.items()]
    columns = ["clock", "diffusers over jaxmllm", "quarter below", "quarter above"]
    print_table("ratio", columns, lines, left_aligned=1)


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add_peer_options(parser, smaller=4.0, scaled="sides")
    parser.add_argument("--size", choices=[*SIZES], default="6m")
    parser.add_argument("--mix", choices=[*MIXES], default="clips")
    parser.add_argument(
        "--items", type=positive_int, default=16, help="items per step (default: %(default)s)"
    )
    add_threads(parser, 1)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="replace values of our config"
    )
    options = parse_peer_options(parser, command)
    if not has_modules(options.python, "torch", "diffusers"):
        print(
            f"benchmarks.peer_diffusers measures nothing: {options.python} has no torch and diffusers; name an "
            "interpreter that has them in --python",
            file=sys.stderr,
        )
        return 2
    use_cores(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            measurements = measure(options, Path(scratch))
        except (*USER_ERRORS, ValueError, subprocess.CalledProcessError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    rows = rows_of(measurements, options.items)
    ratios = {clock: ratio(measurements, clock) for clock in ("seconds", "cpu_seconds")}
    million = measurements["parameters"][OWN] / 1e6
    title = f"{options.mix}: {million:.1f}M parameters, {options.items} items, {options.threads} threads"
    show(rows, ratios, title)
    write_json(
        options.json,
        "peer_diffusers",
        options.seed,
        GENERATOR,
        size=options.size,
        mix=options.mix,
        items=options.items,
        smaller=options.smaller,
        threads=options.threads,
        overrides=options.overrides,
        first_losses=measurements["first_losses"],
        tokens=measurements["tokens"],
        peers=measurements["versions"],
        ratio=ratios["seconds"],
        cpu_ratio=ratios["cpu_seconds"],
        rows=rows,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
