"""Training a thinker of Qwen2.5-Omni on CPU next to transformers, from one folder and on the same
examples.

    python -m benchmarks.peer_hf --python PATH [--steps 7] [--examples 24] [--micro-batch 4] [--json PATH]

PATH is an interpreter that has torch 2.13 and transformers 5.23, by default this one; without them
the command says so in a line and exits with 2. The model is random, about 40 million parameters:
text 8 layers of 512, pictures 6 of 320, sounds 6 of 384, a vocabulary of 4,096. Examples have the
sizes of jaxmllm/tools/workload.py, made smaller; pictures and clips are noise.

    padded     transformers and fused AdamW, each micro-batch padded as its processor does
    grouped    the same with the examples of a step sorted by length first
    jaxmllm    the programs of a run on one CPU device: plan, rows, step. The programs are compiled
               beforehand in another process, and each has run once before a timed step needs it

Losses before the first step must be equal to 1e-4, or nothing is measured. Media are decoded before
the clock starts; padding, normalising, planning and filling rows are `host`, everything else is
`compute`. Systems take turns on each batch, so that a slow moment of the machine affects all; two
steps of each are not counted. `tokens/s` counts real tokens, of each phase. `CPU s` has a meaning
on a machine under other load, too. `peak` is the most memory of the process; ours includes the
data.
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

import numpy as np
import tokenizers

from benchmarks.balance_step import quartiles
from benchmarks.peer_torch import add_threads, tell, use_cores
from benchmarks.peers import processes
from benchmarks.peers.examples import Example, KeptCorpus, write_generated
from benchmarks.peers.own_run import OwnRun, compile_alone, compiled_programs
from benchmarks.peers.processes import (
    Peer,
    add_peer_options,
    check_losses,
    has_modules,
    parse_peer_options,
)
from jaxmllm.config import strict_yaml
from jaxmllm.config.schema import Config, ModelConfig
from jaxmllm.data.batches import batch_examples
from jaxmllm.families.resolved import load_run_config, resolved
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.training.run import USER_ERRORS

PEERS: Final = ("padded", "grouped")
MODULE: Final = "benchmarks.peers.hf_thinker"
WARM_UP: Final = 2  # first steps, not counted
WRITTEN: Final = 512  # examples that are generated
LEARNING_RATE: Final = 1e-4
GENERATOR: Final = "benchmarks.peers.examples.write_generated, and batches of the run"
SPECIAL: Final = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"),
    *("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "<|VIDEO|>"),
)
VOCABULARY: Final = 4096
SIZES: Final[Mapping[str, dict[str, Any]]] = {
    "40m": {
        "text": (512, 8, 8, 4, 1024),  # width, layers, heads, key-value heads, MLP
        "vision": (320, 6, 5, 640),  # width, layers, heads, MLP
        "audio": (384, 6, 6, 768),
        "mels": 128,
    },
    "tiny": {  # for trying out the code itself
        "text": (64, 2, 4, 2, 64),
        "vision": (32, 2, 2, 32),
        "audio": (32, 1, 2, 32),
        "mels": 16,
    },
}


def thinker(size: str, ids: Mapping[str, int]) -> dict[str, Any]:
    """Sections of config.json of a size, with the keys of transformers.

    Args:
      ids: ids of the special tokens.
    """
    shapes = SIZES[size]
    width, layers, heads, kv_heads, mlp = shapes["text"]
    pairs = width // heads // 2
    sections = [pairs - 2 * (3 * pairs // 8), 3 * pairs // 8, 3 * pairs // 8]
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32_768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": sections,
        },
    }
    vision_width, vision_layers, vision_heads, vision_mlp = shapes["vision"]
    vision = {
        "depth": vision_layers,
        "hidden_size": vision_width,
        "intermediate_size": vision_mlp,
        "num_heads": vision_heads,
        "out_hidden_size": width,
        "fullatt_block_indexes": [vision_layers // 2 - 1, vision_layers - 1],
    }
    audio_width, audio_layers, audio_heads, audio_mlp = shapes["audio"]
    audio = {
        "d_model": audio_width,
        "encoder_layers": audio_layers,
        "encoder_attention_heads": audio_heads,
        "encoder_ffn_dim": audio_mlp,
        "num_mel_bins": shapes["mels"],
        "output_dim": width,
    }
    return {
        "text_config": text,
        "vision_config": vision,
        "audio_config": audio,
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
        "image_token_index": ids["<|IMAGE|>"],
        "video_token_index": ids["<|VIDEO|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "audio_token_index": ids["<|AUDIO|>"],
    }


def make_folder(python: str, folder: Path, size: str, seed: int) -> None:
    """Write a random model with a tokenizer of bytes, in the form of a published folder."""
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=len(alphabet), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: token_id for name, token_id in tokenizer.get_vocab().items() if name in SPECIAL}
    pixels = {"patch_size": 14, "min_pixels": 56 * 56, "max_pixels": 1280 * 28 * 28}
    sounds = {"feature_size": SIZES[size]["mels"], "chunk_length": 300}
    sizes = {"model": thinker(size, ids), "images": pixels, "sounds": sounds, "seed": seed}
    processes.make_folder(python, MODULE, folder, sizes)


def config_of(folder: Path, place: Path, seed: int, examples: int, smaller: float) -> Config:
    """The config of a run of the folder's model on one device; writes generated data into
    `place`."""
    model = ModelConfig.model_validate_json(
        json.dumps(resolved({"model": {"from": str(folder)}})["model"])
    )
    write_generated(place / "data", seed, WRITTEN, model, smaller)
    component_settings = {"remat": ["attention", "projections", "mlp"]}
    tree = {
        "run": {"directory": str(place / "run"), "steps": 1000, "seed": seed},
        "model": {"from": str(folder)},
        "data": {
            "root": str(place / "data"),
            "sources": [{"name": "train", "path": "train.jsonl"}],
            "index_cache": str(place / "indexes"),
            "batch_size": examples,
            "chat_template": "chatml",
            "max_rejected": 0.05,
        },
        "components": dict.fromkeys(("vision", "audio", "language"), component_settings),
        "phases": {"vision": {"block": 64}, "audio": {"block": 200}, "language": {"block": 64}},
        "optimizer": {"learning_rate": LEARNING_RATE, "schedule": "constant", "warmup_steps": 0},
        "mesh": {"data": 1},
    }
    path = place / "config.yaml"
    path.write_text(strict_yaml.write_text(tree), encoding="utf-8")
    return load_run_config(path)


# ---------------------------------------------------------------------------- batches for the others


def write_batch(path: Path, examples: Sequence[Example]) -> None:
    """Write examples as arrays of texts, patches and frames, for another process."""
    arrays: dict[str, Any] = {}
    counts = []
    for i, example in enumerate(examples):
        arrays |= {f"tokens_{i}": example.tokens, f"targets_{i}": example.targets}
        images = [item for item in example.items if item.phase == "vision"]
        clips = [item for item in example.items if item.phase == "audio"]
        counts.append((len(images), len(clips)))
        for j, item in enumerate(images):
            arrays |= {f"image_{i}_{j}": item.features, f"grid_{i}_{j}": np.array(item.shape)}
        for j, item in enumerate(clips):
            arrays[f"clip_{i}_{j}"] = item.features[: item.shape[0]]
    np.savez(path, counts=np.array(counts), **arrays)


def tokens_of(examples: Sequence[Example]) -> dict[str, int]:
    """Real tokens of each phase: tokens of texts with their media, patches, and frames."""
    token_counts = {"language": sum(len(example.tokens) for example in examples)}
    for phase in ("vision", "audio"):
        items = (item for example in examples for item in example.items if item.phase == phase)
        token_counts[phase] = sum(item.real for item in items)
    return token_counts


# ---------------------------------------------------------------------------- measuring


def measure(options: Any, place: Path) -> dict[str, Any]:
    """Measurements of every step, by system, and facts about the systems."""
    folder = place / "thinker"
    make_folder(options.python, folder, options.size, options.seed)
    config = config_of(folder, place, options.seed, options.examples, options.smaller)
    tell("compiles ours")
    compile_seconds = compile_alone(config)
    tell("reads lengths and the programs of ours")
    inputs, programs = compiled_programs(config)
    corpus = KeptCorpus(inputs.corpus)
    own_run = OwnRun(folder, config, programs, corpus)
    vision = config.model.vision
    optimizer = config.optimizer
    assert vision is not None
    settings = {
        "threads": options.threads,
        "micro_batch": options.micro_batch,
        "learning_rate": LEARNING_RATE,
        "betas": [optimizer.beta1, optimizer.beta2],
        "weight_decay": optimizer.weight_decay,
        "clip": optimizer.clip_norm,
        "pixel_mean": vision.pixel_mean,
        "pixel_std": vision.pixel_std,
        "patch_size": vision.patch_size,
        "patch_frames": vision.patch_frames,
    }
    with ExitStack() as stack:
        peers = {
            name: Peer(
                *(options.python, MODULE, folder, name),
                *(settings | {"grouped": name == "grouped"}, stack),
            )
            for name in PEERS
        }
        results_by_system: dict[str, list[dict[str, Any]]] = {
            name: [] for name in (*PEERS, "jaxmllm")
        }
        batches = []
        for step in range(WARM_UP + options.steps):
            numbers = batch_examples(inputs.order, options.examples, len(inputs.samples) + step)
            examples = corpus.read(numbers)
            path = place / "batch.npz"
            write_batch(path, examples)
            if not step:
                own_loss = own_run.loss(numbers)
                losses = {name: peer(path, step=False)["loss"] for name, peer in peers.items()}
                check_losses(losses | {"jaxmllm": own_loss})
                tell(f"losses are equal: {own_loss:.6f}; measures")
            names = [*results_by_system]
            for name in names[step % len(names) :] + names[: step % len(names)]:
                result = own_run(step, numbers) if name == "jaxmllm" else peers[name](path)
                if step >= WARM_UP:
                    results_by_system[name].append(result)
            if step >= WARM_UP:
                batches.append(tokens_of(examples))
    return {
        "told": results_by_system,
        "batches": batches,
        "first_losses": losses | {"jaxmllm": own_loss},
        "compile_seconds": compile_seconds,
        "parameters": {name: peer.facts["parameters"] for name, peer in peers.items()}
        | {"jaxmllm": own_run.parameters},
        "versions": peers["padded"].facts["versions"],
    }


def rows_of(measured: Mapping[str, Any], examples: int) -> list[dict[str, Any]]:
    """One record for every system, with medians over the steps."""
    own_seconds, own_cpu = (
        np.array([result[key] for result in measured["told"]["jaxmllm"]])
        for key in ("seconds", "cpu_seconds")
    )
    real_tokens = {
        phase: np.array([batch[phase] for batch in measured["batches"]])
        for phase in ("language", "vision", "audio")
    }
    rows = []
    for name, results in measured["told"].items():
        seconds, host = (np.array([r[key] for r in results]) for key in ("seconds", "host"))
        cpu = np.array([r["cpu_seconds"] for r in results])
        compute = seconds - host
        rows.append(
            {
                "system": name,
                "seconds": quartiles(seconds.tolist()),
                "host_seconds": float(np.median(host)),
                "compute_seconds": float(np.median(compute)),
                "over_jaxmllm": float(np.median(seconds / own_seconds)),
                "cpu_seconds": float(np.median(cpu)),
                "cpu_over_jaxmllm": float(np.median(cpu / own_cpu)),
                "examples_per_second": float(np.median(examples / seconds)),
                "examples_per_compute_second": float(np.median(examples / compute)),
                "tokens_per_second": {
                    phase: float(np.median(count / seconds)) for phase, count in real_tokens.items()
                },
                "padding": float(
                    np.median(np.array([r["slots"] for r in results]) / real_tokens["language"])
                ),
                "peak_bytes": results[-1]["peak_bytes"],
                "compile_seconds": measured["compile_seconds"] if name == "jaxmllm" else 0.0,
                "loss": results[-1]["loss"],
                "parameters": measured["parameters"][name],
                "all_seconds": seconds.tolist(),
            }
        )
    return rows


def show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print two tables with one line per system: speed, then real tokens, memory, compilation."""
    columns = ["system", "examples/s", "compute alone", "s/step", "over jaxmllm", "CPU s"]
    lines = [
        [
            *(row["system"], row["examples_per_second"], row["examples_per_compute_second"]),
            *(row["seconds"]["median"], row["over_jaxmllm"]),
            *(row["cpu_seconds"], row["cpu_over_jaxmllm"]),
        ]
        for row in rows
    ]
    print_table(title, [*columns, "over jaxmllm"], lines, left_aligned=1)
    columns = ["system", "text tokens/s", "patches/s", "frames/s", "slots/text token", "host s"]
    lines = [
        [
            *(row["system"], *row["tokens_per_second"].values(), row["padding"]),
            *(row["host_seconds"], row["peak_bytes"] / 1e9, row["compile_seconds"], row["loss"]),
        ]
        for row in rows
    ]
    columns += ["peak GB", "compile s", "last loss"]
    print_table("real tokens, memory, compilation", columns, lines, left_aligned=1)


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add_peer_options(parser, smaller=8.0, scaled="examples")
    parser.add_argument("--size", choices=[*SIZES], default="40m")
    parser.add_argument(
        "--examples", type=positive_int, default=24, help="examples per step (default: %(default)s)"
    )
    parser.add_argument(
        "--micro-batch",
        type=positive_int,
        default=4,
        help="examples per micro-batch of transformers (default: %(default)s)",
    )
    add_threads(parser, 2)
    options = parse_peer_options(parser, command)
    if not has_modules(options.python, "torch", "transformers"):
        print(
            f"benchmarks.peer_hf measures nothing: {options.python} has no torch and transformers; name an interpreter "
            "that has them in --python",
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
    rows = rows_of(measurements, options.examples)
    million = measurements["parameters"]["jaxmllm"] / 1e6
    show(rows, f"{million:.1f}M parameters, {options.examples} examples, {options.threads} threads")
    write_json(
        options.json,
        "peer_hf",
        options.seed,
        GENERATOR,
        size=options.size,
        examples=options.examples,
        micro_batch=options.micro_batch,
        smaller=options.smaller,
        threads=options.threads,
        first_losses=measurements["first_losses"],
        batches=measurements["batches"],
        peers=measurements["versions"],
        rows=rows,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
