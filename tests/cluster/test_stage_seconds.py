"""Steps in pipeline stages: against the cost of their schedule, and properties of their parts."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks.ahead import MIX
from benchmarks.omni import omni_config
from jaxmllm.balance.stages.plan import plan_pipeline
from jaxmllm.cluster.clusters import CLUSTERS
from jaxmllm.cluster.device_seconds import RATES, Device
from jaxmllm.cluster.drawing_program import phase_program
from jaxmllm.cluster.network import Network
from jaxmllm.cluster.sends import SCATTER, program_sends
from jaxmllm.cluster.simulate import simulate
from jaxmllm.cluster.stage_seconds import FORWARD, WEIGHT, _edge_sends, _Operations
from jaxmllm.config.read import config_tree, parse_config
from jaxmllm.tools.generated_lengths import generated_lengths
from jaxmllm.training.programs.base import ProgramName
from sharding.mesh import make_mesh
from sharding.pipeline.graph import Pool
from tests.cluster.programs import CAPACITIES, tiny_lengths

DEVICE = Device(CLUSTERS["h100"], 0.8)


class Staged:
    """A planned batch on two stages, simulated on any device."""

    def __init__(self, pipeline=(), **sections):
        self.lengths = tiny_lengths(pipeline={"stages": 2, **dict(pipeline)}, **sections)
        self.programs = self.lengths.programs()
        sizes = self.programs.sizes
        self.plan = plan_pipeline(self.lengths.items, sizes.spec, sizes.training)

    def on(self, device):
        return simulate(self.programs, self.plan, self.lengths.items, device)


@pytest.fixture(scope="module")
def staged():
    return Staged(mesh={"data": 4})


def test_parts_lie_between_both_ends(staged):
    step = staged.on(DEVICE)
    assert all(part >= 0 for part in step.parts.values())
    assert step.low * (1 - 1e-9) <= step.seconds <= step.high * (1 + 1e-9)
    assert 0 < step.mfu < step.hfu < 1
    assert step.parts["bubble"] > 0 and step.parts["sends"] > 0 and step.parts["replicas"] > 0


def test_ticks_take_what_the_schedule_costs(staged):
    check_ticks(staged)


def test_ticks_take_what_the_config_says_besides():
    """With `pipeline.flops_per_tick`, which `jaxmllm calibrate` measures."""
    slow = Staged({"flops_per_tick": 3e8}, mesh={"data": 4})
    check_ticks(slow)
    ticks = slow.plan.statistics["pipeline/ticks"]
    seconds = ticks * 3e8 / (DEVICE.peak * DEVICE.efficiency)
    assert slow.on(DEVICE).parts["ticks"] == pytest.approx(seconds)


def test_ticks_take_what_the_cluster_says_where_the_config_does_not(staged):
    slow = replace(DEVICE, cluster=DEVICE.cluster.model_copy(update={"tick_seconds": 2e-3}))
    ticks = staged.plan.statistics["pipeline/ticks"]
    assert staged.on(slow).parts["ticks"] == pytest.approx(2e-3 * ticks)
    assert staged.on(slow).seconds > staged.on(DEVICE).seconds
    configured = Staged({"flops_per_tick": 3e8}, mesh={"data": 4})
    assert configured.on(slow).parts["ticks"] == configured.on(DEVICE).parts["ticks"]


def test_rows_of_several_classes_take_what_the_schedule_costs():
    several = CAPACITIES | {"language": [4096, 1024]}
    staged = Staged({"microbatches": 3}, mesh={"data": 4}, capacities=several)
    assert set(staged.plan.phases["language"].capacity.tolist()) == {4096, 1024}
    check_ticks(staged)


def check_ticks(staged):
    """Assert that ticks take the schedule's FLOPs over the peak.

    Rates have no loss here, and links and memory take no time.
    """
    cluster = DEVICE.cluster
    link = cluster.in_node.model_copy(
        update={"bytes_per_second": 1e30, "reduced_per_second": 1e30, "hop_seconds": 0}
    )
    fast = cluster.model_copy(
        update={"in_node": link, "between_nodes": link, "memory_bandwidth": 1e30}
    )
    ideal = Device(fast, 1.0, replace(RATES, half_side=1e-9, attention=1.0, straggling=0.0))
    step = staged.on(ideal)
    cost = staged.plan.statistics["pipeline/cost"]
    assert step.seconds == pytest.approx(cost / ideal.peak, rel=2e-3)
    idle = staged.plan.statistics["pipeline/idle_share"]
    assert step.parts["bubble"] / step.seconds == pytest.approx(idle, rel=2e-2)


def test_experts_in_stages_are_waited_for():
    """In layers of both stages, tokens go to their experts and back."""
    mixed = Staged(mesh={"fsdp": 4, "data": 1}, experts={"count": 8, "per_token": 2})
    step = mixed.on(DEVICE)
    assert step.low * (1 - 1e-9) <= step.seconds <= step.high * (1 + 1e-9)
    assert step.parts["language/inside"] > step.parts["vision/inside"] == 0


def test_stages_that_share_cores_leave_them_to_each_other(staged):
    step = staged.on(Device(CLUSTERS["cpu"], 0.5, dtype="float32"))
    assert step.parts["bubble"] == 0
    assert [step.low, step.high] == pytest.approx([step.seconds] * 2)


def test_gradients_are_sent_as_programs_of_phases_send_them():
    """In bfloat16, for a decoder with a trained adapter, and for towers."""
    staged, phased = (_bfloat16(stages) for stages in (2, 1))
    network = Network(staged.mesh, DEVICE)
    checked = 0
    for chain_index, chain in enumerate(staged.sizes.training.tables.ring.chains):
        phase = chain.name
        operations = _Operations(staged, chain_index, DEVICE, network)
        sent = sum(
            send.array_bytes * send.times * leaf.stacked
            for component, parameters in operations.leaves.items()
            for leaf in parameters
            for send in [operations._send(component, leaf, WEIGHT)]
            if send.devices > 1 and "embedding" not in leaf.path
        )
        backward = phased.functions_of(phase).backward
        name = ProgramName(backward, phase, CAPACITIES[phase][0])
        sends = program_sends(phased, name)
        expected = sum(
            program_send.array_bytes * program_send.times
            for program_send in sends
            if program_send.operation == SCATTER
        )
        assert sent == pytest.approx(expected) and sent > 0
        traffic = operations._traffic(operations.classes[0])
        assert (traffic[WEIGHT] > traffic[FORWARD]) == (phase != "language")
        checked += 1
    assert checked == 3


@pytest.mark.parametrize(
    ("tower_dtype", "mesh"),
    [("float32", {"data": 2, "tensor": 2}), ("bfloat16", {"data": 2, "context": 2})],
    ids=["dtype", "parts"],
)
def test_rows_are_sent_as_slots_hold_them(tower_dtype, mesh):
    """Tokens have the dtype of the decoder, and every part of a row gets all of them."""
    config = tiny_lengths(pipeline={"stages": 2}, mesh=mesh).config
    tree = config_tree(config)
    tree["components"]["language"]["compute_dtype"] = "bfloat16"
    for tower in ("vision", "audio"):
        tree["components"][tower] |= {"compute_dtype": tower_dtype, "layout": {}}
    devices = make_mesh(config.mesh_sizes, jax.devices())
    programs = generated_lengths(parse_config(tree), devices, 0, MIX).programs()
    wires = programs.sizes.training.tables.wires
    held = programs.held
    for wire, (send,) in zip(wires, _edge_sends(programs), strict=True):
        slot_bytes = held.pools[wire.pool_key] / held.slots[wire.pool_key]
        # Slots also have a mark of 4 bytes for each token
        assert send.array_bytes == pytest.approx(slot_bytes, rel=0.04), wire.name
    assert Pool.TOKENS in {wire.pool for wire in wires}


@pytest.mark.parametrize("conditioning", ["joint", "cross"])
def test_stages_of_a_generator_carry_what_a_second_attention_reads(conditioning):
    programs = _drawing(conditioning)
    held = programs.held
    chains = programs.sizes.training.tables.ring.chains
    wires = programs.sizes.training.tables.wires
    of_generator = set()
    for wire, (send,) in zip(wires, _edge_sends(programs), strict=True):
        slot_bytes = held.pools[wire.pool_key] / held.slots[wire.pool_key]
        assert send.array_bytes == pytest.approx(slot_bytes, rel=0.04), wire.name
        if chains[wire.chain].name == "diffusion":
            of_generator.add(send.array_bytes)
    (row,) = of_generator
    # Before there is a schedule: a chunk of 6 of the 12 layers twice, and 4 inputs per stage
    name = ProgramName("draw_loss_and_grad", "diffusion", 8192)
    program = phase_program(programs.functions.model, name)
    carried = program.in_stages(2) - max(program.staged().values())
    assert carried == pytest.approx((2 * 6 + 4 * 2) * row, rel=1e-3)


def test_the_projector_of_a_generator_counts_with_the_first_chunk():
    programs = _drawing("joint")
    ring = programs.sizes.training.tables.ring
    (number,) = (n for n, chain in enumerate(ring.chains) if chain.name == "diffusion")
    operations = _Operations(programs, number, DEVICE, Network(programs.mesh, DEVICE))
    assert list(operations.leaves) == ["projector.language", "diffusion"]
    seconds = operations._weight_seconds(np.zeros((1, ring.chains[number].depth, 1), np.int32))
    assert seconds[:, 0].all() and not seconds[:, 1:].any()


def _drawing(conditioning):
    """Programs of an omni model with a generator, on four devices per stage."""
    sections = {"mesh": {"data": 1, "fsdp": 4}, "pipeline": {"stages": 2}}
    tree = config_tree(omni_config("tiny", data={"batch_size": 16}, **sections))
    tree["model"]["diffusion"] = {"width": 128, "layers": 12, "heads": 4, "mlp_width": 512}
    tree["model"]["diffusion"] |= {"channels": 4, "patch_size": 2, "conditioning": conditioning}
    capacities = CAPACITIES | {"diffusion": [8192]}
    tree["phases"] = {phase: {"capacities": of, "spans": [1]} for phase, of in capacities.items()}
    config = parse_config(tree)
    mesh = make_mesh(config.mesh_sizes, jax.devices())
    return generated_lengths(config, mesh, 0, MIX).programs()


def _bfloat16(stages):
    """Programs in bfloat16 of a frozen decoder with an adapter, on four devices per stage."""
    phases = {phase: {"capacities": slots, "spans": [1]} for phase, slots in CAPACITIES.items()}
    sections = {"mesh": {"data": 1, "fsdp": 4}, "pipeline": {"stages": stages}}
    tree = config_tree(omni_config("tiny", phases=phases, data={"batch_size": 16}, **sections))
    tree["model"]["adapters"] = {"language": {"rank": 4, "alpha": 4.0}}
    tree["components"]["language"]["freeze"] = True
    config = parse_config(tree)
    mesh = make_mesh(config.mesh_sizes, jax.devices()[: 4 * stages])
    return generated_lengths(config, mesh, 0, MIX).programs()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 1, "fsdp": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_layers_that_are_split_are_gathered_or_waited_for(mesh, staged):
    parts = Staged(mesh=mesh).on(DEVICE).parts
    assert parts["language/weights"] > 0 if "fsdp" in mesh else parts["language/inside"] > 0
    unsplit_parts = staged.on(DEVICE).parts
    assert unsplit_parts["language/inside"] == unsplit_parts["language/weights"] == 0
