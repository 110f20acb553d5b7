"""Eight CPU devices, forced before any test imports jax, and a bound on compiled programs."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

FLAG = "--xla_force_host_platform_device_count"
QUICK = "--xla_backend_optimization_level=0"  # the tests compile far more than they compute
# In jax 0.10, XLA sets up MLIR for every fusion, which takes half the time of compiling a program;
# jax 0.12 takes less, and ignores this
PLAIN = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
# Eight devices share few cores. On a busy machine, one of them may come to a collective more than
# 40 s late, after which XLA would end the process.
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
OWN_FLAGS = QUICK, PLAIN, PATIENT
kept = [
    flag
    for flag in os.environ.get("XLA_FLAGS", "").split()
    if not flag.startswith(f"{FLAG}=") and flag not in OWN_FLAGS
]
os.environ["XLA_FLAGS"] = " ".join([*kept, *OWN_FLAGS, f"{FLAG}=8"])
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

from jaxmllm.runtime.distributed import reserve_cpu_threads  # noqa: E402

reserve_cpu_threads()
# A run makes JAX keep programs on disk for the rest of the process, and a pipeline of
# a later test must not read them (jaxmllm/runtime/compilation_cache.py). Processes
# that tests start have a cache.
jax.config.update("jax_enable_compilation_cache", False)

# Traces allocate many objects that stay, in which Python would look for garbage again and again
gc.set_threshold(20_000, 20, 20)

# No deadline, since compilation makes first examples slow; derandomized, so that failures repeat
settings.register_profile(
    "jaxmllm", deadline=None, derandomize=True, max_examples=40, database=None
)
settings.load_profile("jaxmllm")

MAPPINGS = Path("/proc/self/maps")
MANY_MAPPINGS = 24_000  # Linux allows 65,530 per process, and XLA crashes beyond
LAST_FILE = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", metavar="K/N", help="every Nth of the chosen tests, from the Kth on"
    )


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := config.getoption("--share"):
        start, step = map(int, share.split("/"))
        share_items = items[start - 1 :: step]
        config.hook.pytest_deselected(items=[item for item in items if item not in share_items])
        items[:] = share_items


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what has been imported out of the search for garbage."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget compiled programs that no test holds any more, since each maps memory many times."""
    first_of_file = item.session.stash.get(LAST_FILE, None) != item.path
    item.session.stash[LAST_FILE] = item.path
    if (first_of_file or item.get_closest_marker("slow")) and MAPPINGS.exists():
        with MAPPINGS.open("rb") as mappings:
            crowded = sum(1 for _ in mappings) > MANY_MAPPINGS
        if crowded:
            jax.clear_caches()
            gc.collect()
