"""Where programs are kept, and that a second process reads what a first one wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.strict_yaml import write_text
from jaxmllm.runtime.compilation_cache import FOLDER, describe, keep_programs
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
    """JAX's own at the start of a process, and as they were afterwards."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def config_of(tmp_path, **changes):
    return parse_config(tiny_config(tmp_path, run__directory=str(tmp_path / "runs/one"), **changes))


def kept(config):
    keep_programs(config)
    return jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir


def test_programs_are_kept_where_they_shall_be(tmp_path):
    config = config_of(tmp_path)
    assert kept(config) == str(tmp_path / "runs" / FOLDER)
    assert describe(config) == f"compiled programs: kept in {tmp_path / 'runs' / FOLDER}"
    there = config_of(tmp_path, run__compilation_cache="/somewhere")
    assert kept(there) == "/somewhere"


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


@pytest.mark.slow
def test_a_second_start_reads_what_the_first_compiled(tmp_path):
    def start(step):
        code = (
            "import sys; from jaxmllm.train import main; import jax; events = []\n"
            "jax.monitoring.register_event_listener(lambda event, **_: events.append(event))\n"
            "code = main(sys.argv[1:]); hits = events.count('/jax/compilation_cache/cache_hits')\n"
            "print('read', hits, 'compiled', events.count('/jax/compilation_cache/cache_misses'))\n"
            "sys.exit(code)"
        )
        path = tmp_path / f"{step}.yaml"
        tree = tiny_config(tmp_path / "sample", run__directory=str(tmp_path / f"runs/{step}"))
        path.write_text(write_text(tree))
        environment = {
            name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name
        }
        done = subprocess.run(
            [sys.executable, "-c", code, "--config", str(path)],
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        metrics = tmp_path / "runs" / step / "metrics.jsonl"
        losses = [json.loads(line).get("loss") for line in metrics.read_text().splitlines()]
        _, read, _, compiled = done.stdout.splitlines()[-1].split()
        return losses, int(read), int(compiled)

    make_sample(tmp_path / "sample", seed=1, train=64, test=8)
    losses, _, compiled = start("first")
    again, read, compiled_again = start("second")
    assert losses == again and len(losses) >= 4
    assert compiled > 10 and read >= compiled and compiled_again == 0
