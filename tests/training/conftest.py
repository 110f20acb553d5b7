"""What tests of complete steps share: sample data, and programs that are compiled once."""

import json
import os
from pathlib import Path

import pytest

from jaxmllm.tools.sample_data import make_sample
from tests.support import Setup, assemble, one_source_per_example, tiny_config

# Compiled programs take memory, so only the latest setups are kept
KEPT_SETUPS = 4


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """A folder for programs, so that subprocesses of tests compile each program only once.

    Set JAX_COMPILATION_CACHE_DIR to keep them from one session to the next.
    """
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or _shared(tmp_path_factory) / "compiled"
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name.upper(), str(value))
        yield folder


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A small sample, and `each-train.jsonl`, in which every example is a source of its own."""
    folder = tmp_path_factory.mktemp("sample")
    make_sample(folder, train=96, test=24)
    one_source_per_example(folder / "train.jsonl")
    return folder


@pytest.fixture(scope="session")
def by_example(data):
    """tiny_config with every example a source of its own, so that losses are told by example."""

    def config(**changes):
        sources = [{"name": "each", "path": str(data / "each-train.jsonl")}]
        return tiny_config(data, data__sources=sources, **changes)

    return config


@pytest.fixture(scope="session")
def setups():
    """(config tree, devices) -> Setup, kept as long as it is one of the last few."""
    built: dict[str, Setup] = {}

    def get(tree, devices) -> Setup:
        key = json.dumps([tree, devices], sort_keys=True)
        built[key] = built.pop(key) if key in built else assemble(tree, devices)
        while len(built) > KEPT_SETUPS:
            del built[next(iter(built))]
        return built[key]

    return get


@pytest.fixture(scope="session")
def alone(setups, by_example) -> Setup:
    """The reference of most tests: the same model on one device."""
    return setups(by_example(), 1)


def _shared(tmp_path_factory) -> Path:
    """A folder that all workers of a parallel test run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
