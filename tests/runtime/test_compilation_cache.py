"""The cache of compiled programs: its place, and that a second process reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.config.strict_yaml import write_text
from jaxmllm.runtime.compilation_cache import FOLDER, check_kept, describe, keep_programs
from jaxmllm.tools.sample_data import make_sample
from tests.support import tiny_config

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def settings():
    """Start with JAX's defaults of a new process, and put the original settings back."""
    original = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in original.items():
        jax.config.update(name, value)


def config_of(tmp_path, **changes):
    return parse_config(tiny_config(tmp_path, run__directory=str(tmp_path / "runs/one"), **changes))


def kept(config):
    """The folder of the cache for a config, or a false value where programs are not kept."""
    keep_programs(config)
    return jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir


def test_programs_are_kept_where_they_shall_be(tmp_path):
    config = config_of(tmp_path)
    assert kept(config) == str(tmp_path / "runs" / FOLDER)
    assert describe(config) == f"compiled programs: kept in {tmp_path / 'runs' / FOLDER}"
    configured = config_of(tmp_path, run__compilation_cache="/somewhere")
    assert kept(configured) == "/somewhere"


def test_what_the_environment_says_stands_unless_the_config_names_another(tmp_path):
    jax.config.update("jax_compilation_cache_dir", "/of/the/environment")
    assert kept(config_of(tmp_path)) == "/of/the/environment"
    assert kept(config_of(tmp_path, run__compilation_cache="/mine")) == "/mine"


def test_none_keeps_nothing(tmp_path):
    config = config_of(tmp_path, run__compilation_cache=None)
    assert not kept(config)
    assert describe(config) == "compiled programs: not kept"


def test_pipelines_on_cpu_are_compiled_anew_and_the_log_says_why(tmp_path):
    stages = {"pipeline": {"stages": 2, "layout": "chain"}, "mesh": {"data": 4}}
    config = config_of(tmp_path, run__compilation_cache="/mine", **stages)
    assert not kept(config)
    assert "not kept: on CPU, programs of pipelines" in describe(config)


def test_compiling_alone_is_refused_where_nothing_would_be_kept(tmp_path):
    config = config_of(tmp_path)
    keep_programs(config)
    check_kept(config)
    config = config_of(tmp_path, run__compilation_cache=None)
    keep_programs(config)
    with pytest.raises(ConfigError, match=r"would not be kept: set run.compilation_cache"):
        check_kept(config)
    config = config_of(tmp_path, pipeline={"stages": 2, "layout": "chain"}, mesh={"data": 4})
    with pytest.raises(ConfigError, match="would not be kept: on CPU, programs of pipelines"):
        check_kept(config)


class Start(NamedTuple):
    """What a start of the command did."""

    losses: list[float]
    read: int  # programs from disk
    compiled: int


def start(folder, step, *options):
    """Train a tiny model on sample data, or only compile it, in a process of its own."""
    code = (
        "import sys; from jaxmllm.train import main; import jax; events = []\n"
        "jax.monitoring.register_event_listener(lambda event, **_: events.append(event))\n"
        "code = main(sys.argv[1:]); hits = events.count('/jax/compilation_cache/cache_hits')\n"
        "print('read', hits, 'compiled', events.count('/jax/compilation_cache/cache_misses'))\n"
        "sys.exit(code)"
    )
    path = folder / f"{step}.yaml"
    run = folder / f"runs/{step}"
    path.write_text(write_text(tiny_config(folder / "sample", run__directory=str(run))))
    environment = {
        name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name
    }
    process = subprocess.run(
        [sys.executable, "-c", code, "--config", str(path), *options],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    losses = [json.loads(line).get("loss") for line in lines]
    _, read, _, compiled = process.stdout.splitlines()[-1].split()
    return Start(losses, int(read), int(compiled))


@pytest.mark.slow
def test_a_second_start_reads_what_the_first_compiled(tmp_path):
    make_sample(tmp_path / "sample", seed=1, train=64, test=8)
    cold = start(tmp_path, "first")
    warm = start(tmp_path, "second")
    assert cold.losses == warm.losses and len(cold.losses) >= 4
    assert cold.compiled > 10 and warm.read >= cold.compiled and warm.compiled == 0


@pytest.mark.slow
def test_a_run_reads_what_was_compiled_alone(tmp_path):
    """With `--compile-only`, which writes no run folder."""
    make_sample(tmp_path / "sample", seed=1, train=64, test=8)
    compile_only = start(tmp_path, "alone", "--compile-only")
    assert not compile_only.losses and compile_only.compiled > 10
    assert not (tmp_path / "runs/alone").exists()
    run = start(tmp_path, "run")
    assert run.read >= compile_only.compiled
    # Only small programs that a run meets while it trains are compiled
    assert len(run.losses) >= 4 and run.compiled < compile_only.compiled
