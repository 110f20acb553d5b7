"""A tiny setup of three modalities for tests of whole steps: its config, corpus and programs.

tiny_config(data) --assemble(config, devices)--> Setup --.step(examples)-->
HostStep --.gradients--> Result
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxmllm.balance.records import PlanSpec
from jaxmllm.balance.stages.sizes import PipelineSizes
from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import Config
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.rows.fill import HostStep, LocalRanks, StepFiller
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.build import draw_rule, make_programs
from jaxmllm.setup.prepare import prepare
from jaxmllm.setup.spans import mesh_spans
from jaxmllm.training.programs.base import Programs
from sharding.mesh import make_mesh

# Encoders are data-parallel over tensor as well
ENCODER_LAYOUT = {"batch": ["data", "fsdp", "tensor"]}

# Choices of a decoder other than the defaults, as changes of `tiny_config`
DECODER_CHOICES = {
    "model__language__activation": "gelu_tanh",
    "model__language__attention_scale": 0.3,
    "model__language__norm": "zero_centred_rms",
    "model__language__post_norms": True,
    "model__language__qk_norm": True,
    "model__language__scale_embedding": True,
}


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test where a package is not installed."""
    missing = any(importlib.util.find_spec(package) is None for package in packages)
    return pytest.mark.skipif(missing, reason=f"needs {' and '.join(packages)}")


def tiny_config(data: Path, **changes: Any) -> dict[str, Any]:
    """The config of a run that takes seconds, as a tree.

    `changes` replace values by dotted key, "." written as "__".
    """
    tree: dict[str, Any] = {
        "run": {"directory": str(data / "run"), "steps": 4},
        "model": {
            "vision": {"width": 16, "layers": 1, "heads": 2, "mlp_width": 32, "patch_size": 14},
            "audio": {
                "width": 16,
                "layers": 1,
                "heads": 2,
                "mlp_width": 32,
                "mel_bins": 8,
                "chunk_frames": 32,
            },
            "language": {
                "width": 32,
                "layers": 2,
                "heads": 4,
                "kv_heads": 2,
                "head_size": 8,
                "mlp_width": 48,
                "rope_sections": [2, 1, 1],
            },
        },
        "data": {
            "sources": [{"name": "sample", "path": str(data / "train.jsonl")}],
            "evaluation": [{"name": "sample", "path": str(data / "test.jsonl")}],
            "batch_size": 16,
            "images": {"max_pixels": 20000},
            "audio": {"max_seconds": 5},
        },
        "mesh": {"data": -1},
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        # One class of rows, each on one rank, so that few programs are compiled
        "phases": {
            name: {"block": 32, "spans": [1], "row_classes": 1, "kept_residuals": 0}
            for name in ("vision", "audio", "language")
        },
        "logging": {"tensorboard": False},
    }
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        section = tree
        for name in parents:
            section = section.setdefault(name, {})
        section[leaf] = value
    return tree


def one_source_per_example(path: Path) -> Path:
    """Copy a JSONL file, in its folder, with the source of every record set to its id.

    Sums by source are then sums by example.
    """
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    copy = path.with_name(f"each-{path.name}")
    lines = [json.dumps(record | {"source": record["id"]}) + "\n" for record in records]
    copy.write_text("".join(lines))
    return copy


@dataclass(frozen=True)
class Result:
    """What a step computes, on the host: gradients by component, losses and targets by source."""

    grads: dict[str, Any]
    loss: np.ndarray  # [N]
    targets: np.ndarray  # [N]
    failed: int

    @property
    def mean_loss(self) -> float:
        return float(self.loss.sum() / self.targets.sum())


@dataclass(frozen=True)
class Setup:
    """Compiled programs over some devices, and the corpus they are fed from."""

    config: Config
    corpus: Corpus
    held_out: Corpus | None
    programs: Programs
    pipeline: PipelineSizes | None = None

    @property
    def spec(self) -> PlanSpec:
        return self.programs.spec

    @property
    def attention(self) -> AttentionSpec:
        return self.programs.attention

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        return self.programs.init(self.config.run.seed).params

    def step(self, examples: Sequence[int], corpus: Corpus | None = None, **spec: Any) -> HostStep:
        """The rows of these examples on all ranks; `spec` replaces fields of
        the plan's spec, such as mode."""
        local = LocalRanks(
            phases={phase: tuple(range(rows.ranks)) for phase, rows in self.spec.phases.items()},
            exchange={
                phase: tuple(range(math.prod(route.grid.shape)))
                for phase, route in self.spec.routes.items()
            },
        )
        plan = dataclasses.replace(self.spec, **spec)
        pipeline = self.pipeline and self.pipeline.training
        draws = draw_rule(self.config)
        filler = StepFiller(
            corpus or self.corpus, plan, local, self.attention, pipeline, draws=draws
        )
        return filler(0, np.asarray(examples, np.int64))

    def gradients(self, step: HostStep, params: Any = None) -> Result:
        params = self.params if params is None else params
        grads, sums, failed = jax.device_get(self.programs.gradients(params, self.put(step)))
        return Result(grads, sums.loss.sum(0), sums.targets.sum(0), int(failed))

    def put(self, step: HostStep) -> Any:
        return self.programs.put(step)

    def of_kind(self, kinds: Iterable[str]) -> list[int]:
        """Examples that hold media of exactly these phases."""
        phases = set(kinds)

        def phases_of(example: int) -> set[str]:
            return {media.phase for media in self.corpus.example(example).media}

        return [example for example in range(len(self.corpus)) if phases_of(example) == phases]


def assemble(tree: dict[str, Any], devices: int) -> Setup:
    """Build a config's programs over the first `devices` devices, as
    `build_run` does over all of them."""
    config = parse_config(tree)
    inputs = prepare(
        config, make_mesh(config.mesh_sizes, jax.devices()[:devices], spans=mesh_spans(config))
    )
    return Setup(config, inputs.corpus, inputs.held_out, *make_programs(config, inputs))


def without_targets(step: HostStep, sources: Sequence[int], keep: bool = False) -> HostStep:
    """The step with the targets of these sources masked or, with `keep`, of all others."""
    rows = []
    for row in step.rows[LANGUAGE]:
        padding = np.full((len(row["sources"]), 1), -1)  # segment 0
        source_of_segment = np.concatenate([padding, row["sources"]], axis=1)
        source_of_token = np.take_along_axis(source_of_segment, row["segments"], axis=1)
        learned = np.isin(source_of_token, sources) == keep
        rows.append(row | {"targets": np.where(learned, row["targets"], np.int32(-1))})
    return dataclasses.replace(step, rows=step.rows | {LANGUAGE: rows})


def scaled(grads: Any, factor: float) -> Any:
    """A tree times a factor."""
    return jax.tree.map(lambda g: g * factor, grads)


def added(trees: Sequence[Any]) -> Any:
    """The sum of trees."""
    return jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *trees)


def assert_close(actual: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Every entry of every leaf differs by at most `tolerance` of the leaf's largest entry.

    A component's norm would hide all leaves but the largest: leaves of a tower differ by
    factors of ten thousand. Leaves that are zero must be zero exactly, but not all
    leaves of a component may be zero.
    """
    assert actual.keys() == expected.keys()
    for name, tree in expected.items():
        assert any(np.any(leaf) for leaf in jax.tree.leaves(tree)), f"{name}: nothing to compare"
        leaves = jax.tree.leaves_with_path(tree)
        for (path, leaf), actual_leaf in zip(leaves, jax.tree.leaves(actual[name]), strict=True):
            parameter = name + jax.tree_util.keystr(path)
            assert actual_leaf.shape == leaf.shape, parameter
            largest = float(np.max(np.abs(np.float64(leaf))))
            difference = float(np.max(np.abs(np.float64(actual_leaf) - np.float64(leaf))))
            message = f"{parameter}: off by {difference:.2e}, largest entry {largest:.2e}"
            assert difference <= tolerance * largest, message


def assert_same(actual: Result, expected: Result, tolerance: float) -> None:
    """Assert that gradients, and targets and losses by source, agree."""
    np.testing.assert_array_equal(actual.targets, expected.targets)
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=tolerance)
    assert_close(actual.grads, expected.grads, tolerance)


EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)


def slow_cases(cases: Mapping[str, Sequence[Any]], always: Collection[str]) -> list[Any]:
    """Parameters of a slow test, by name; cases that are not in `always` are also exhaustive."""
    assert cases.keys() >= set(always)
    return [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name in always else EXHAUSTIVE)
        for name, case in cases.items()
    ]


def train_command(config: Path, *arguments: str) -> list[str]:
    """The command that trains a config in a process of its own."""
    return [sys.executable, "-m", "jaxmllm.train", "--config", str(config), *arguments]
