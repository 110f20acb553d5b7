"""Step time of a planned batch, from the programs of its run and without compiling them.

    programs, plan, lengths, Device --simulate--> StepTime        seconds, by phase and part

Weights are sent while layers compute; collectives that layers wait for inside (tensor, context) are
not hidden. Programs of phases follow one another (phase_seconds.py); with pipeline stages there are
ticks instead (stage_seconds.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jaxmllm.balance.costs.flops import head_flops
from jaxmllm.balance.records import BatchItems, StepPlan
from jaxmllm.cluster.collectives import devices_along
from jaxmllm.cluster.device_seconds import UPDATED_BYTES, Device
from jaxmllm.cluster.held import device_bytes
from jaxmllm.cluster.network import Network
from jaxmllm.cluster.phase_seconds import OWN_BYTES, PhaseSeconds, Worked, resolved_model
from jaxmllm.cluster.sends import Send, program_sends
from jaxmllm.cluster.stage_seconds import staged_work
from jaxmllm.phases import LANGUAGE

if TYPE_CHECKING:
    from jaxmllm.training.programs.base import Programs
    from jaxmllm.training.programs.phased import PhasedPrograms

EXCHANGE: Final = "exchange"


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step. `parts` sum up to `seconds`.

    Attributes:
      parts: seconds: `<phase>/compute`, `<phase>/inside` (what layers wait for: tensor, context,
        lookups), `<phase>/weights` (gathers and scatters that compute does not hide), `exchange`,
        `replicas`, `update`, `straggling`. With stages the first three are means over the stages,
        and in place of `exchange` there are `bubble` (stages wait for each other), `sends` (over
        the edges between stages) and `ticks` (what ticks take in addition to their operations).
      low: seconds if everything that can overlap does.
      high: seconds if nothing does.
      mfu: FLOPs of real lengths, the head on targets alone, over what the devices could do, as a
        run logs it.
      hfu: FLOPs that devices do, including padding and recomputation, over the same.
    """

    parts: Mapping[str, float]
    low: float
    high: float
    mfu: float
    hfu: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def interval(self, device: Device) -> tuple[float, float]:
        """Bounds of the step's seconds, see `Device.interval`."""
        return device.interval(self.seconds)


def simulate(programs: Programs, plan: StepPlan, items: BatchItems, device: Device) -> StepTime:
    """Predict the time of a step on devices of a cluster.

    Args:
      programs: of the run, not compiled.
      plan: of the batch.
      items: the batch's lengths.
      device: one of the devices that the programs' mesh stands for.
    """
    from jaxmllm.training.programs.phased import PhasedPrograms
    from jaxmllm.training.programs.staged import StagedPrograms

    devices = programs.mesh.size
    device = device.among(devices)
    network = Network(programs.mesh, device)
    if isinstance(programs, StagedPrograms):
        worked = staged_work(programs, plan, items, device, network)
    else:
        assert isinstance(programs, PhasedPrograms)
        worked = _phased_work(programs, plan, items, device, network)
    update = device.memory_seconds(device_bytes(programs.trained) / OWN_BYTES * UPDATED_BYTES)
    part_seconds = {**worked.parts, "update": update}
    step = sum(part_seconds.values())
    part_seconds["straggling"] = device.straggled(step, devices) - step
    attainable_flops = (step + part_seconds["straggling"]) * device.logged_peak
    # `real_flops` are those of all devices, `worked.flops` those of one.
    return StepTime(
        parts=part_seconds,
        low=device.straggled(worked.low + update, devices),
        high=device.straggled(worked.high + update, devices),
        mfu=real_flops(programs, items) / devices / attainable_flops,
        hfu=worked.flops / attainable_flops,
    )


def _phased_work(
    programs: PhasedPrograms, plan: StepPlan, items: BatchItems, device: Device, network: Network
) -> Worked:
    """Seconds and FLOPs of all phases of a step, and seconds of what they send each other."""
    from jaxmllm.training.programs.base import ProgramName

    total = Worked({})
    for phase in programs.spec.phases:
        calls = PhaseSeconds(programs, phase, device).microbatches(
            plan.phases[phase], items.phases[phase]
        )
        part_names = [f"{phase}/{part}" for part in ("compute", "inside", "weights")]
        # Phases without a microbatch in this batch are reported with 0 seconds.
        total = total.plus(Worked(dict.fromkeys(part_names, 0.0)))
        for call in calls:
            inside = network.seconds(call.inside)
            weights = network.seconds(call.weights)
            layers = call.seconds + inside
            # Weights are sent while layers compute, so only the time that this adds counts.
            exposed = device.together(layers, weights) - layers
            seconds = dict(zip(part_names, (call.seconds, inside, exposed), strict=True))
            low = device.least_together(layers, weights)
            total = total.plus(Worked(seconds, low, layers + weights, call.flops))
    replicas = program_sends(programs, ProgramName("add_replicas")) or []
    once = {
        EXCHANGE: _exchange_seconds(programs, plan, network),
        "replicas": network.seconds(replicas),
    }
    # Nothing overlaps with these, so both bounds have all of their seconds.
    seconds_once = sum(once.values())
    return total.plus(Worked(once, seconds_once, seconds_once))


def _exchange_seconds(programs: PhasedPrograms, plan: StepPlan, network: Network) -> float:
    """Seconds of the exchange: encoder outputs to the language rows, states from there to
    generators, and their gradients back. All hops are equally long, by the slots that a rank sends
    in all of them."""
    total = 0.0
    for owner in dict.fromkeys(programs.exchange_owner.values()):
        rounds = plan.routes[owner].rounds
        hops = sum(round_.hops for round_ in rounds)
        layout = programs.layouts[owner]
        axes = layout.split_axes("rank")
        if not hops or not axes:
            continue
        devices = devices_along(layout, axes)
        tokens = programs.pools[owner].tokens
        token_bytes = tokens.shape[-1] * tokens.dtype.itemsize
        sent = plan.statistics[f"route/{owner}/slots_moved"] * token_bytes / devices
        # `SENT` takes the bytes of the whole array, with the share that stays on its rank
        array = sent * devices / (devices - 1) / hops
        ways = 1 + (owner in programs.trained_exchanges)
        total += network.seconds([Send("all-to-all", axes, devices, array, hops * ways)])
    return total


def real_flops(programs: Programs, items: BatchItems) -> float:
    """FLOPs of a batch, the head on targets alone: what MFU counts."""
    specs = programs.spec.phases
    flops = sum(
        spec.flops.total(items.phases[phase].real, items.phases[phase].extra)
        for phase, spec in specs.items()
    )
    functions = programs.functions
    shares = functions.model.trainable.shares
    head = head_flops(resolved_model(programs), shares, functions.learns_text)
    without_target = int(items.phases[LANGUAGE].real.sum()) - items.targets
    return flops - head * float(without_target)
