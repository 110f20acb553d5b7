"""What the clock of comparisons counts of our programs: neither first runs nor preparation."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np

from benchmarks import peer_torch
from benchmarks.peers import own_run
from benchmarks.peers.own_run import OwnRun
from sharding.pipeline.ring import PipelineError

FIRST_RUN = 0.2  # seconds


class Programs:
    """Programs of rows of two sizes, each of which is slow when it first runs."""

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
    """A row of one segment, with as many slots as asked for."""
    rows = {"language": [{"segments": np.ones(slots)}]}
    return SimpleNamespace(
        rows=rows, capacities={"language": [slots]}, spans={"language": [1]}, targets=3
    )


def of_kind(kind):
    """A run of such programs, without the preparation of a real one."""
    run = object.__new__(kind)
    run.programs, run.filler, run.programs_run = Programs(), fill, set()
    run.state, run.step, run.phase = SimpleNamespace(params=None), 0, "language"
    return run


def test_first_runs_of_programs_do_not_count_in_any_comparison():
    own_run_ = of_kind(OwnRun)
    torch_run = of_kind(peer_torch.Ours)
    for slots in (64, 128, 64):
        assert own_run_(0, slots)["seconds"] < FIRST_RUN
        assert torch_run(slots)["seconds"] < FIRST_RUN
    assert own_run_.programs.run == {64, 128}


def test_seconds_of_compilation_are_those_alone(monkeypatch):
    seconds = SimpleNamespace(value=0.0)
    programs = SimpleNamespace(compile=lambda: time.sleep(0.05))

    def index(_):
        time.sleep(FIRST_RUN)
        return None, programs

    monkeypatch.setattr(own_run, "_programs", index)
    own_run._compile(None, seconds)
    assert 0.05 <= seconds.value < FIRST_RUN

    def refuse(_):
        raise PipelineError("too many stages")

    monkeypatch.setattr(own_run, "_programs", refuse)
    own_run._compile(None, SimpleNamespace())  # the process that measures reports the reason
