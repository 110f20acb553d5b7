"""The time and FLOPs of a step's programs, by phase."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import balance_step
from benchmarks.balance_step import (
    REST,
    computed_flops,
    mean_amounts,
    mesh_overrides,
    pairs_computed,
    phase_amounts,
    rows_of,
    train_by_program,
)
from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import PhaseItems, PhaseSpec, PlanSpec, RowClass
from jaxmllm.balance.rows.assign import assign
from jaxmllm.config.read import load_config
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.phases import decoder_phase, encoder_phase
from jaxmllm.training.programs.base import ProgramName

ENCODE = ProgramName("encode", "vision", 256, 4)
DECODE = ProgramName("language_loss_and_grad", "language", 512)
ZERO = ProgramName("zero", "language")  # has no rows, so it does not count for the phase


def host(spans):
    """A step with one microbatch of vision rows, of these spans of tiles, and without language."""
    rows = {"vision": [{"tiles": {"query_spans": np.array(spans)}}], "language": []}
    return SimpleNamespace(rows=rows, statistics={"vision/slots": 2048, "language/slots": 0})


def test_rows_are_told_by_phase_microbatch_and_class():
    step = SimpleNamespace(
        rows={"vision": [{}, {}], "language": []},
        capacities={"vision": (256, 256), "language": ()},
        spans={"vision": (4, 4), "language": ()},
    )
    assert rows_of(step) == {("vision", 0, (256, 4)), ("vision", 1, (256, 4))}


def test_pairs_are_those_of_the_blocks_of_each_class():
    tiles = [
        {"tiles": {"query_spans": np.array([[[0, tiles_of_row, 0]]])}} for tiles_of_row in (3, 5)
    ]
    step = SimpleNamespace(
        rows={"vision": tiles}, capacities={"vision": (64, 2048)}, spans={"vision": (4, 1)}
    )
    attention = AttentionSpec({"vision": 128}, smaller_blocks={("vision", RowClass(64, 4)): 32})
    assert pairs_computed(step, "vision", attention) == 3 * 32**2 + 5 * 128**2


def test_items_lie_end_to_end_or_by_blocks(monkeypatch):
    cost = ItemCost(1, 0)
    rows = PhaseSpec(encoder_phase("vision"), 2, (RowClass(64),), 4, 1, cost, blocks=(32,))
    monkeypatch.setattr(
        balance_step, "plan_spec", lambda config, inputs: PlanSpec({"vision": rows}, {})
    )
    for variant, blocks in (("in blocks", (32,)), ("end to end", None)):
        spec = balance_step.variant_spec(None, None, variant)
        assert spec.phases["vision"].blocks == blocks


def test_every_program_counts_once():
    seconds = {ENCODE: 3.0, ENCODE._replace(function="encode_grad"): 4.0, DECODE: 5.0, ZERO: 0.5}
    amounts_of_phases = phase_amounts(host([[[[0, 2, 1], [3, 0, 4]]]]), seconds)
    assert amounts_of_phases["vision"] == (7.0, 1, 2048, 7)
    assert amounts_of_phases["language"] == (5.0, 0, 0, 0)
    assert amounts_of_phases[REST] == (0.5, None, None, None)
    assert sum(amounts.seconds for amounts in amounts_of_phases.values()) == sum(seconds.values())


def test_means_are_those_of_every_amount():
    steps = [
        phase_amounts(host([[[[0, tiles, 0]]]]), {ENCODE: seconds, ZERO: 1.0})
        for tiles, seconds in ((2, 1.0), (4, 2.0))
    ]
    means = mean_amounts(steps)
    assert means["vision"] == (1.5, 1, 2048, 3) and means[REST] == (1.0, None, None, None)
    assert mean_amounts([]) == {}


def test_a_watched_step_is_the_step():
    class Programs:
        def __init__(self):
            self.compiled = {ENCODE: lambda x: x + 1, DECODE: lambda x: x * 2, ZERO: lambda: 0}

        def train(self, state, batch):
            for name in (ENCODE, ENCODE, DECODE):
                state = self.compiled[name](state)
            return state + batch, {}

    programs = Programs()
    compiled = programs.compiled
    state, seconds = train_by_program(programs, jnp.ones(3), 10)
    np.testing.assert_array_equal(state, [16, 16, 16])
    assert programs.compiled is compiled
    assert seconds[ENCODE] > 0 and seconds[DECODE] > 0 and seconds[ZERO] == 0


def test_a_mesh_of_as_many_devices_is_kept():
    path = "configs/real-small.yaml"  # data 4, fsdp 2
    assert mesh_overrides(path, [], 8) == []
    assert mesh_overrides(path, ["mesh.data=1", "mesh.fsdp=2"], 2) == []
    for overrides, devices in ([], 2), (["mesh.data=2"], 8):
        mesh = load_config(path, [*overrides, *mesh_overrides(path, overrides, devices)]).mesh
        assert (mesh.data, mesh.fsdp, mesh.context, mesh.tensor) == (1, devices, 1, 1)


COST = ItemCost(linear=100, quadratic=3)


def planned(phase, ranks, lengths):
    """The plan of items in rows of 64 slots, the items and the spec of the phase."""
    spec = PhaseSpec(phase, ranks, (RowClass(64),), 4, 1, COST)
    length = np.array(lengths, np.int64)
    zeros = np.zeros(len(length), np.int32)
    items = PhaseItems(length, length, np.arange(len(length), dtype=np.int32), zeros, zeros)
    return assign(spec, items), items, spec


@pytest.mark.parametrize("padded", [1, 2])
def test_computed_flops_are_those_of_tiles_and_slots(padded):
    plan, *items_and_spec = planned(encoder_phase("vision"), 2, [40, 24, 30])
    slots = 2 * 64 * plan.microbatches
    pairs = padded * (40**2 + 24**2 + 30**2)
    assert computed_flops(plan, *items_and_spec, pairs) == pytest.approx(100 * slots + 3 * pairs)


def test_of_text_half_of_a_square_is_seen():
    plan, *items_and_spec = planned(decoder_phase(), 1, [64])
    # A row of one tile computes it whole, the masked half included
    assert computed_flops(plan, *items_and_spec, 64**2) == pytest.approx(100 * 64 + 3 * 2 * 64**2)


def test_a_phase_without_items_computes_nothing():
    assert computed_flops(*planned(encoder_phase("vision"), 2, []), 0) == 0
