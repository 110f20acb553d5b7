"""The padded exchange between two processes: every token crosses, and every gradient comes back."""

from __future__ import annotations

import os
import subprocess
import sys

import jax

from jaxmllm.runtime.distributed import initialize_distributed
from tests.balance.exchange.on_devices import LAYOUTS, check, layout_pairs


def test_two_processes_exchange_tokens():
    """The module runs itself in the processes; `check` compares with the expected tokens there."""
    launcher = [sys.executable, "-m", "launch.local", "--processes", "2", "--devices", "2", "--"]
    completed = subprocess.run(
        [*launcher, sys.executable, "-m", "tests.training.test_exchange_processes"],
        env=os.environ | {"NPROC": "8"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
    # Each of the two processes prints one line per layout
    assert completed.stdout.count("exchanged") == 2 * len(LAYOUTS)


def main() -> None:
    """What each of the processes runs."""
    initialize_distributed()
    assert jax.process_count() == 2 and jax.local_device_count() == 2
    for pair in layout_pairs():
        hops, crossing = check(pair, "padded")
        assert crossing > 0
        print(f"exchanged in {hops} hops, {crossing} tokens between processes")


if __name__ == "__main__":
    main()
