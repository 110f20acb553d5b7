"""A simulated step: its parts against sums by hand, bounds, and what holds for any constants."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmllm.balance.costs.flops import head_flops
from jaxmllm.balance.records import BatchItems
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.cluster.clusters import CLUSTERS
from jaxmllm.cluster.device_peak import programs_peak
from jaxmllm.cluster.device_seconds import RATES, Device
from jaxmllm.cluster.held import resident
from jaxmllm.cluster.simulate import simulate
from jaxmllm.setup.sizing import resolved_shapes
from tests.cluster.programs import tiny_lengths
from tests.support import EXHAUSTIVE

DEVICE = Device(CLUSTERS["h100"], 0.8)


class Simulated:
    """A planned batch, simulated on any device."""

    def __init__(self, **sections):
        self.lengths = tiny_lengths(**sections)
        self.programs = self.lengths.programs()
        self.plan = plan_step(self.lengths.items, self.programs.spec)

    def on(self, device, plan=None):
        return simulate(self.programs, plan or self.plan, self.lengths.items, device)


@pytest.fixture(scope="module")
def sharded():
    return Simulated(mesh={"data": 2, "fsdp": 4})


@pytest.fixture(scope="module")
def alone():
    return Simulated(mesh={"data": 1}, devices=1)


def test_parts_lie_between_both_ends(sharded):
    step = sharded.on(DEVICE)
    assert all(part >= 0 for part in step.parts.values())
    assert step.low * (1 - 1e-9) <= step.seconds <= step.high * (1 + 1e-9)
    assert 0 < step.mfu < step.hfu < 1
    low, high = step.interval(DEVICE)
    assert high / step.seconds == pytest.approx(1.25) and low / step.seconds == pytest.approx(0.75)


def test_one_device_sends_nothing(alone):
    parts = alone.on(DEVICE).parts
    computed = {"vision/compute", "audio/compute", "language/compute", "update"}
    assert {name for name, seconds in parts.items() if seconds} == computed


def test_one_device_computes_its_rows_and_the_run_counts_its_data(alone):
    """Against sums over the plan by hand: at rates without loss, compute is FLOPs over the peak.

    What remains is memory traffic of weights, gradients and copied layer inputs.
    """
    ideal = Device(
        DEVICE.cluster, 1.0, replace(RATES, half_side=1e-9, attention=1.0, traffic=1e-12)
    )
    step = alone.on(ideal)
    spec = alone.programs.spec.phases["language"]
    plan = alone.plan.phases["language"]
    items = alone.lengths.items.phases["language"]
    # Full remat runs the products of both layers forward once more
    layer = 64 * (2 * 64 + 2 * 32 + 3 * 128)
    slots = float(plan.capacity.sum())
    products = (spec.flops.linear + 2 * 2 * layer) * slots
    # Attention scores: forward, forward again with the layer, and two and a half times as much
    # backward
    pairs = 2 * (2 * 64) * (1 + 1 + 2.5) * float((items.length.astype(float) ** 2).sum())
    accumulated = step.parts["language/compute"] - (products + pairs) / ideal.peak
    numbers = 2 * layer + 2 * 512 * 64 + 5 * 64
    moved = plan.microbatches * 8 * numbers
    # Inputs of layers are kept in float32 for the backward pass: a copy reads and writes them
    moved += 2 * slots * 2 * 64 * 4
    assert accumulated == pytest.approx(moved / DEVICE.cluster.memory_bandwidth, rel=1e-3)

    flops = sum(
        phase.flops.total(
            alone.lengths.items.phases[name].real, alone.lengths.items.phases[name].extra
        )
        for name, phase in alone.programs.spec.phases.items()
    )
    model = alone.programs.functions.model
    head = head_flops(resolved_shapes(alone.lengths.config, model), model.trainable.shares)
    flops -= head * (items.real.sum() - alone.lengths.items.targets)
    assert step.mfu == pytest.approx(flops / step.seconds / 989.5e12)


def test_mfu_is_what_a_run_of_the_same_seconds_logs(alone):
    """float32 takes the time of plain units here, and its MFU counts what tensor cores could do."""
    plain = alone.on(replace(DEVICE, dtype="float32"))
    configured = alone.on(replace(DEVICE, dtype="float32", said_peak=1e12))
    assert configured.parts == plain.parts
    for share in ("mfu", "hfu"):
        ratio = getattr(plain, share) / getattr(configured, share)
        assert ratio == pytest.approx(1e12 / 494.5e12)


@given(
    factors=st.fixed_dictionaries(
        {key: st.floats(1, 8) for key in ("memory", "memory_bandwidth", "peak_flops", "links")}
    ),
    efficiency=st.floats(0.8, 1),
)
def test_better_hardware_is_never_slower(sharded, factors, efficiency):
    cluster = DEVICE.cluster.model_copy(update={"device_kind": "", "peak_flops": DEVICE.peak})
    baseline = sharded.on(Device(cluster, 0.8)).seconds
    links = factors.pop("links")
    better = {key: getattr(cluster, key) * factor for key, factor in factors.items()}
    for name in ("in_node", "between_nodes"):
        link = getattr(cluster, name)
        rates = {
            "bytes_per_second": link.bytes_per_second * links,
            "reduced_per_second": link.reduced_per_second * links,
        }
        better[name] = link.model_copy(update=rates)
    faster = Device(cluster.model_copy(update=better), efficiency)
    assert sharded.on(faster).seconds <= baseline * (1 + 1e-9)


@given(
    chosen=st.fixed_dictionaries(
        {name: st.integers(0, 1000) for name in ("vision", "audio", "language")}
    ),
    of_rank=st.integers(1, 4),
)
def test_batches_of_equal_examples_make_all_balance_modes_equal(sharded, chosen, of_rank):
    """All examples are equal, with one item per phase, and each rank has as many."""
    examples = np.arange(8 * of_rank)
    phases = {}
    for name, items in sharded.lengths.items.phases.items():
        chosen_items = items.at(np.full(len(examples), chosen[name] % len(items.length)))
        phases[name] = replace(chosen_items, example=examples.astype(np.int32))
    items = BatchItems(examples, int(phases["language"].length.sum()), phases)
    spec = sharded.programs.spec
    roomy = {
        name: replace(route, encoder_pool=1 << 16, language_pool=1 << 16)
        for name, route in spec.routes.items()
    }
    seconds = []
    for mode in ("none", "tokens", "language", "phases"):
        plan = plan_step(items, replace(spec, mode=mode, routes=roomy))
        seconds.append(simulate(sharded.programs, plan, items, DEVICE).seconds)
    assert seconds == pytest.approx([seconds[0]] * 4)


def test_a_step_without_balancing_takes_longer(sharded):
    spec = replace(sharded.programs.spec, mode="none")
    unbalanced = plan_step(sharded.lengths.items, spec)
    assert sharded.on(DEVICE, unbalanced).seconds >= sharded.on(DEVICE).seconds


def test_an_exchange_takes_what_its_hops_send(sharded):
    owner = "vision"
    (round_,) = sharded.plan.routes[owner].rounds
    rounds = (replace(round_, first_leg=1, second_leg=1),)
    routes = sharded.plan.routes | {owner: replace(sharded.plan.routes[owner], rounds=rounds)}
    statistics = sharded.plan.statistics | {f"route/{owner}/slots_moved": 8000}
    step = sharded.on(DEVICE, replace(sharded.plan, routes=routes, statistics=statistics))
    # Each of 8 ranks sends 1,000 tokens of 64 float32 numbers, in two hops forward and two backward
    link = DEVICE.cluster.in_node
    sent = 1000 * 64 * 4 / link.bytes_per_second
    assert step.parts["exchange"] == pytest.approx(2 * sent + 4 * link.hop_seconds)


EXPERTS = {"count": 8, "per_token": 2}


def test_experts_wait_for_the_tokens_of_all_that_share_them(sharded):
    mixed = Simulated(mesh={"data": 2, "fsdp": 4}, experts=EXPERTS)
    step = mixed.on(DEVICE)
    assert step.low * (1 - 1e-9) <= step.seconds <= step.high * (1 + 1e-9)
    assert 0 < step.mfu < step.hfu < 1
    waited = step.parts["language/inside"] - sharded.on(DEVICE).parts["language/inside"]
    # A layer gathers the 4,096 tokens of a row from 4 devices three times and scatters them twice;
    # the routing weights, two per token, are sent three times
    rows = mixed.plan.phases["language"].microbatches
    link = DEVICE.cluster.in_node
    tokens, weights = (4 * 4096 * numbers * 4 * 3 / 4 for numbers in (64, 2))
    sent = (5 * tokens + 3 * weights) / link.bytes_per_second / DEVICE.rates.network
    assert waited / rows / 2 > sent and step.parts["vision/inside"] == 0


def test_experts_of_one_device_send_nothing():
    parts = Simulated(mesh={"data": 1}, devices=1, experts=EXPERTS).on(DEVICE).parts
    assert {name for name, seconds in parts.items() if seconds} == {
        "vision/compute",
        "audio/compute",
        "language/compute",
        "update",
    }


@cache
def with_frozen(*frozen):
    return Simulated(mesh={"data": 2, "fsdp": 4}, frozen=frozen)


@pytest.mark.slow
@given(
    frozen=st.sets(st.sampled_from(("vision", "audio", "language")), min_size=1),
    cluster=st.sampled_from([*CLUSTERS.values()]),
    efficiency=st.floats(0.2, 1),
)
def test_freezing_never_costs_time_or_bytes(frozen, cluster, efficiency):
    """Freezing one more component, whatever else is frozen and on any cluster."""
    *fewer, _ = ordered = sorted(frozen)
    more_frozen = with_frozen(*ordered)
    less_frozen = with_frozen(*fewer)
    device = Device(cluster, efficiency)
    assert more_frozen.on(device).seconds <= less_frozen.on(device).seconds * (1 + 1e-9)
    assert programs_peak(more_frozen.programs).bytes <= programs_peak(less_frozen.programs).bytes
    assert resident(more_frozen.programs).total <= resident(less_frozen.programs).total


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        pytest.param({"data": 4, "context": 2}, marks=EXHAUSTIVE),
    ],
    ids=str,
)
def test_layers_that_are_split_inside_wait_there(mesh):
    step = Simulated(mesh=mesh).on(DEVICE)
    assert step.parts["language/inside"] > 0
    assert step.low * (1 - 1e-9) <= step.seconds <= step.high * (1 + 1e-9)
