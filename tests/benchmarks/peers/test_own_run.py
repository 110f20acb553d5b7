"""What of our programs stands on the clock in comparisons, and what does not."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np

from benchmarks import peer_torch
from benchmarks.peers.own_run import OwnRun

FIRST_RUN = 0.2  # seconds


class Programs:
    """Those of rows of two sizes, each of which takes long when it runs first."""

    def __init__(self):
        self.run = set()

    def put(self, host):
        return host

    def gradients(self, _, host):
        slots = host.capacities["language"][0]
        if slots not in self.run:
            time.sleep(FIRST_RUN)
        self.run.add(slots)

    def train(self, state, host):
        self.gradients(state.params, host)
        return state, {"loss": 1.0}


def fill(_, slots):
    rows = {"language": [{"segments": np.ones(slots)}]}
    return SimpleNamespace(
        rows=rows, capacities={"language": [slots]}, spans={"language": [1]}, targets=3
    )


def of_kind(kind):
    """A run of such programs; its parts are made here."""
    run = object.__new__(kind)
    run.programs, run.filler, run.programs_run = Programs(), fill, set()
    run.state, run.step, run.phase = SimpleNamespace(params=None), 0, "language"
    return run


def test_first_runs_of_programs_do_not_count_in_any_comparison():
    own, ours = of_kind(OwnRun), of_kind(peer_torch.Ours)
    for slots in (64, 128, 64):
        assert own(0, slots)["seconds"] < FIRST_RUN / 2
        assert ours(slots)["seconds"] < FIRST_RUN / 2
    assert own.programs.run == {64, 128}
