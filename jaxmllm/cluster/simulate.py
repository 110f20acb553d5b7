"""Step time of a planned batch, from the programs of its run and without compiling them.

    programs, plan, lengths, Device --simulate--> StepTime        seconds, by phase and by what they go to

Ranks meet at every microbatch, so a microbatch takes what its slowest rank does: rows by their capacity, whatever is in
them, and attention by the items of the costliest row. Weights travel while layers compute; what layers wait for inside
(tensor, context) does not. Runs with pipeline stages are not simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from jaxmllm.arrays import Floats
from jaxmllm.balance.costs.flops import head_flops, phase_flops, phase_layers
from jaxmllm.balance.records import BatchItems, PhaseItems, PhasePlan, StepPlan
from jaxmllm.cluster.collectives import Group, collective_seconds
from jaxmllm.cluster.device_seconds import (
    ACCUMULATED_BYTES,
    BACKWARD,
    FLASH_BACKWARD,
    UPDATED_BYTES,
    Device,
    stored_bytes,
)
from jaxmllm.cluster.held import device_bytes
from jaxmllm.cluster.sends import GATHER, SCATTER, Send, devices_along, program_sends
from jaxmllm.phases import LANGUAGE

if TYPE_CHECKING:
    from jaxmllm.training.programs.phased import PhasedPrograms

EXCHANGE: Final = "exchange"
OWN_BYTES: Final = 4  # of a number of an accumulator


@dataclass(frozen=True)
class StepTime:
    """What a step takes. `parts` sum up to `seconds`.

    Attributes:
      parts: seconds: `<phase>/compute`, `<phase>/inside` (what layers wait for: tensor, context, lookups),
        `<phase>/weights` (gathers and scatters that compute does not hide), `exchange`, `replicas`, `update`,
        `straggling`.
      low: everything that can overlap does.
      high: nothing does.
      mfu: FLOPs of real lengths, the head on targets alone, over what the devices could do, as a run logs it.
      hfu: FLOPs that devices do, padding and what is made again included, over the same.
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
        """Where the step lies that nothing was calibrated for."""
        uncertainty = device.cluster.efficiency.uncertainty
        return self.seconds * (1 - uncertainty), self.seconds * (1 + uncertainty)


def simulate(
    programs: PhasedPrograms, plan: StepPlan, items: BatchItems, device: Device
) -> StepTime:
    """What a step takes on devices of a cluster.

    Args:
      programs: of the run, not compiled.
      plan: of the batch.
      items: the batch's lengths.
      device: one of those that the programs' mesh stands for.
    """
    from jaxmllm.training.programs.base import ProgramName

    network = _Network(programs, device)
    parts: dict[str, float] = {}
    low = high = done = 0.0
    for phase in programs.spec.phases:
        total = _Passes(0.0, 0.0, 0.0, 0.0)
        for of_microbatch in _PhaseTime(programs, phase, device).microbatches(
            plan.phases[phase], items.phases[phase]
        ):
            seconds = of_microbatch.seconds
            inside = network.seconds(of_microbatch.inside)
            weights = network.seconds(of_microbatch.weights)
            layers = seconds + inside
            exposed = device.together(layers, weights) - layers
            total = total.plus(seconds, inside, exposed, of_microbatch.flops)
            low += max(layers, weights)
            high += layers + weights
        parts |= {
            f"{phase}/compute": total.compute,
            f"{phase}/inside": total.inside,
            f"{phase}/weights": total.weights,
        }
        done += total.flops
    exchange = _exchange_seconds(programs, plan, network)
    replicas = network.seconds(program_sends(programs, ProgramName("add_replicas")) or [])
    trained = device_bytes(programs.trained) / OWN_BYTES
    update = device.memory_seconds(trained * UPDATED_BYTES)
    parts |= {EXCHANGE: exchange, "replicas": replicas, "update": update}
    devices = programs.mesh.size
    step = sum(parts.values())
    parts["straggling"] = device.straggled(step, devices) - step
    could = (step + parts["straggling"]) * device.peak
    return StepTime(
        parts=parts,
        low=device.straggled(low + exchange + replicas + update, devices),
        high=device.straggled(high + exchange + replicas + update, devices),
        mfu=_real_flops(programs, items) / devices / could,
        hfu=done / could,
    )


@dataclass(frozen=True)
class _Passes:
    """Sums over microbatches."""

    compute: float
    inside: float
    weights: float
    flops: float

    def plus(self, compute: float, inside: float, weights: float, flops: float) -> _Passes:
        return _Passes(
            self.compute + compute, self.inside + inside, self.weights + weights, self.flops + flops
        )


@dataclass(frozen=True)
class _Microbatch:
    """One program call of the slowest device: seconds and FLOPs of its own, and what it sends."""

    seconds: float
    flops: float
    inside: tuple[Send, ...]
    weights: tuple[Send, ...]


class _Network:
    """The mesh on a cluster."""

    def __init__(self, programs: PhasedPrograms, device: Device):
        from jaxmllm.setup.ahead import whole_axes

        mesh: Any = programs.mesh
        self._device = device
        strides: dict[str, int] = {}
        inner = 1
        for axis, size in reversed(mesh.shape.items()):
            strides[axis] = inner
            inner *= size
        # Of an axis that spans have cut, its innermost part
        for axis in mesh.shape:
            (whole,) = whole_axes((axis,), mesh)
            strides[whole] = min(strides.get(whole, inner), strides[axis])
        self._strides = strides

    def seconds(self, sends: Iterable[Send]) -> float:
        """Of all, one after another."""
        return sum(
            send.times
            * collective_seconds(
                self._device.cluster,
                send.operation,
                send.array_bytes,
                Group(send.devices, min(self._strides[axis] for axis in send.axes)),
                self._device.rates.network,
            )
            for send in sends
        )


class _PhaseTime:
    """Microbatches of a phase."""

    def __init__(self, programs: PhasedPrograms, phase: str, device: Device):
        model = programs.functions.model
        self.programs = programs
        self.phase = phase
        self.device = device
        self.component = model.components[phase]
        self.shapes = getattr(model.config, phase)
        self.spec = programs.spec.phases[phase]
        self.trained = bool(programs.functions.trainable_of(phase))
        config = _resolved(programs)
        layers = phase_layers(config, phase)
        stack = [layer for layer in layers if any(layer.attention_squares)]
        self.forward = _forward_flops(layers)
        self.again = sum(layer.linear(1) for layer in stack)
        self.whole = phase_flops(config, phase, model.trainable.shares)

    def microbatches(self, plan: PhasePlan, items: PhaseItems) -> Iterator[_Microbatch]:
        """All calls of all programs of the phase in a step."""
        squares = [_row_squares(plan, self.spec.ranks, kind) for kind in self._squares(items)]
        for number, (capacity, span) in enumerate(zip(plan.capacity, plan.span, strict=True)):
            costliest = max(
                range(self.spec.ranks),
                key=lambda rank: sum(
                    per * of_kind[number, rank]
                    for per, of_kind in zip(self.whole.per_square, squares, strict=True)
                ),
            )
            own = tuple(float(of_kind[number, costliest]) / int(span) for of_kind in squares)
            for function, passes in self._calls(number):
                yield self._call(function, passes, int(capacity), int(span), own)

    def _squares(self, items: PhaseItems) -> tuple[Floats, ...]:
        return self.whole.squares(items.length.astype(float), items.extra)

    def _calls(self, number: int) -> list[tuple[str, tuple[int, int, int]]]:
        """Programs that a microbatch runs, and of each how often it goes forward, backward, and makes layers again."""
        again = int(self.component.settings.remat == "full")
        returns = self.whole.linear > self.forward[0]
        if self.phase == LANGUAGE:
            return [("language_loss_and_grad", (1, int(returns), again * returns))]
        if not self.trained:
            return [("encode", (1, 0, 0))]
        features = self.programs.functions.keeps_features(self.phase)
        kept = features or number < self.programs.kept_residuals.get(self.phase, 0)
        backward = "encode_grad_kept" if kept and not features else "encode_grad"
        # A tower that is frozen below a projector is not run again
        once_more = 0 if kept else 1
        return [
            ("encode", (1, 0, 0)),
            (backward, (once_more, 1, 0 if features else again)),
        ]

    def _call(
        self,
        function: str,
        passes: tuple[int, int, int],
        capacity: int,
        span: int,
        squares: tuple[float, ...],
    ) -> _Microbatch:
        from jaxmllm.training.programs.base import ProgramName

        device, layout = self.device, self.component.layout
        forward, backward, again = passes
        inner = devices_along(layout, layout.mesh_axes("mlp"))
        parts = devices_along(layout, layout.part_axes)
        slots = capacity / parts
        linear, *per_square = self.forward
        of_backward = self.whole.linear - linear
        products = (forward * linear + backward * of_backward + again * self.again) * slots / inner
        pairs = self._pairs(per_square, squares, forward, backward, again) / parts / inner
        rate = device.product_rate(slots, self.shapes.width / inner)
        seconds = products / rate + pairs / device.attention_rate
        seconds += device.memory_seconds(self._traffic(slots, inner, passes))
        sends = (
            program_sends(self.programs, ProgramName(function, self.phase, capacity, span)) or []
        )
        batch = set(layout.mesh_axes("embed"))
        weights = tuple(
            send
            for send in sends
            if send.operation in (GATHER, SCATTER) and set(send.axes) <= batch
        )
        inside = tuple(send for send in sends if send not in weights)
        return _Microbatch(seconds, products + pairs, inside, weights)

    def _pairs(
        self,
        per_square: list[float],
        squares: tuple[float, ...],
        forward: int,
        backward: int,
        again: int,
    ) -> float:
        """FLOPs of attention, which makes its scores again in the backward pass."""
        once = sum(per * square for per, square in zip(per_square, squares, strict=True))
        whole = sum(
            per * square for per, square in zip(self.whole.per_square, squares, strict=True)
        )
        returned = (whole - once) * FLASH_BACKWARD / BACKWARD
        return forward * once + backward * returned + again * once

    def _traffic(self, slots: float, inner: int, passes: tuple[int, int, int]) -> float:
        """Bytes that go through memory."""
        forward, backward, again = passes
        matrices = 3 if self.phase == LANGUAGE else 2
        stride = getattr(self.shapes, "stem_stride", 1)
        stored = stored_bytes(self.shapes.width, matrices * self.shapes.mlp_width, inner)
        often = forward + BACKWARD * backward + again
        activations = (
            slots / stride * stored * often * self.shapes.layers * self.device.rates.traffic
        )
        summed = 0.0
        if backward:
            names = self.programs.functions.trainable_of(self.phase)
            shards = device_bytes([self.programs.trained[name] for name in names]) / OWN_BYTES
            summed = shards * ACCUMULATED_BYTES
        return activations + summed


def _forward_flops(layers: Iterable[Any]) -> list[float]:
    """Forward FLOPs of a phase: per slot, and for each of `ItemCost.squares`."""
    layers = list(layers)
    linear = float(sum(sum(layer.products) for layer in layers))
    kinds = zip(*(layer.attention_squares for layer in layers), strict=True)
    return [linear, *(float(sum(kind)) for kind in kinds)]


def _row_squares(plan: PhasePlan, ranks: int, squares: Floats) -> Floats:
    """Sums over the items of each row: [M, R]."""
    rows = np.zeros((plan.microbatches, ranks))
    np.add.at(rows, (plan.microbatch, plan.rank), squares)
    return rows


def _exchange_seconds(programs: PhasedPrograms, plan: StepPlan, network: _Network) -> float:
    """Encoder outputs to the language rows and their gradients back, hop by hop, each as long as the slots that a rank
    sends in all of them say."""
    total = 0.0
    for owner in dict.fromkeys(programs.exchange_owner.values()):
        rounds = plan.routes[owner].rounds
        hops = sum(one.hops for one in rounds)
        layout = programs.layouts[owner]
        axes = tuple(axis for axis in layout.mesh_axes("rank") if layout.mesh.shape[axis] > 1)
        if not hops or not axes:
            continue
        devices = devices_along(layout, axes)
        tokens = programs.pools[owner].tokens
        token_bytes = tokens.shape[-1] * tokens.dtype.itemsize
        sent = plan.statistics[f"route/{owner}/slots_moved"] * token_bytes / devices
        # `SENT` counts what stays as well
        array = sent * devices / (devices - 1) / hops
        ways = 1 + (owner in programs.trained_exchanges)
        total += network.seconds([Send("all-to-all", axes, devices, array, hops * ways)])
    return total


def _real_flops(programs: PhasedPrograms, items: BatchItems) -> float:
    """FLOPs of the data, the head on targets alone."""
    specs = programs.spec.phases
    flops = sum(
        spec.flops.total(items.phases[phase].real, items.phases[phase].extra)
        for phase, spec in specs.items()
    )
    head = head_flops(_resolved(programs), programs.functions.model.trainable.shares)
    without_target = int(items.phases[LANGUAGE].real.sum()) - items.targets
    return flops - head * float(without_target)


def _resolved(programs: PhasedPrograms) -> Any:
    """The model's shapes with the size of its vocabulary."""
    model = programs.functions.model
    language = model.config.language.model_copy(update={"vocab_size": model.vocab_size})
    return model.config.model_copy(update={"language": language})
