"""Seconds of the programs of a phase, from its planned rows.

Ranks meet at every microbatch, so a microbatch takes as long as its slowest rank: rows count by
their capacity, whatever they hold, and attention by the items of the costliest row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from jaxmllm.arrays import Floats
from jaxmllm.balance.costs.flops import phase_layers
from jaxmllm.balance.records import PhaseItems, PhasePlan, PhaseSpec
from jaxmllm.balance.stages.chain_costs import computed_again
from jaxmllm.cluster.collectives import devices_along
from jaxmllm.cluster.device_seconds import (
    ACCUMULATED_BYTES,
    BACKWARD,
    FLASH_BACKWARD,
    Device,
    stored_bytes,
)
from jaxmllm.cluster.drawing import drawing_of
from jaxmllm.cluster.drawing_program import phase_program
from jaxmllm.cluster.held import device_bytes
from jaxmllm.cluster.mixtures import AGAIN, Mixture, mixture_of
from jaxmllm.cluster.sends import GATHER, SCATTER, Send, program_sends
from jaxmllm.config.schema import ModelConfig
from jaxmllm.phases import LANGUAGE

if TYPE_CHECKING:
    from jaxmllm.training.programs.base import ProgramName, Programs
    from jaxmllm.training.programs.phased import PhasedPrograms

OWN_BYTES: Final = 4  # of a number in a gradient accumulator
# How often what a layer keeps for its backward pass goes through memory in addition: XLA copies it
# to the arrays of all layers, a read and a write. That is 4 % of a step on an H100
# (docs/performance.md)
KEPT_COPIES: Final = 2


class Passes(NamedTuple):
    """How often a program runs the layers, and which shares its backward pass computes again."""

    forward: int
    backward: int
    linear_again: float = 0.0
    attention_again: float = 0.0
    stem_again: int = 0  # runs of convolutions along time and mels, whatever `remat` says
    head: bool = True  # whether a decoder computes logits, which are never kept


@dataclass(frozen=True)
class Worked:
    """The work of devices before the update: seconds by part, seconds `low` and `high` (see
    `StepTime`), and FLOPs of a device."""

    parts: Mapping[str, float]
    low: float = 0.0
    high: float = 0.0
    flops: float = 0.0

    def plus(self, other: Worked) -> Worked:
        """The work of both, one after the other."""
        names = dict.fromkeys([*self.parts, *other.parts])
        parts = {name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names}
        return Worked(
            parts,
            self.low + other.low,
            self.high + other.high,
            self.flops + other.flops,
        )


@dataclass(frozen=True)
class Microbatch:
    """One program call on the slowest device: seconds and FLOPs of computing, and what it sends
    inside of layers and for weights."""

    seconds: float
    flops: float
    inside: tuple[Send, ...]
    weights: tuple[Send, ...]


class PhaseSeconds:
    """The predicted program calls of a phase's microbatches."""

    def __init__(self, programs: PhasedPrograms, phase: str, device: Device):
        model = programs.functions.model
        self.programs = programs
        self.phase = phase
        self.device = device
        self.component = model.components[phase]
        self.shapes = getattr(model.config, phase)
        self.spec = programs.spec.phases[phase]
        self.functions = programs.functions_of(phase)
        flops = _forward_flops(model.config, model.vocab_size, phase)
        self.forward = [flops.linear, *flops.squares]
        self.head = flops.last if phase == LANGUAGE else 0.0
        self.again = flops.stack
        self.drawing = drawing_of(model.config, phase)
        # Per slot: numbers that convolutions along time and mels yield, and FLOPs of their products
        self.planes = getattr(self.shapes, "stem_numbers", 0)
        self.stem = flops.first if self.planes else 0.0
        self.mixture = mixture_of(model, phase, 1.0)
        # Forward FLOPs of a slot in the experts of all layers, a part of which is computed again
        # whatever `remat` says
        self.of_experts = 0.0
        if self.mixture is not None:
            self.of_experts = self.shapes.layers * self.mixture.forward_flops
        self.whole = self.spec.flops
        self._known_sends: dict[ProgramName, tuple[tuple[Send, ...], tuple[Send, ...]]] = {}
        self._known_kept: dict[tuple[int, int], float] = {}

    def microbatches(self, plan: PhasePlan, items: PhaseItems) -> Iterator[Microbatch]:
        """All program calls of the phase in a step."""
        squares = row_squares(plan, self.spec, items, self.device)
        beside = None if self.drawing is None else self.drawing.shares(plan, self.spec, items)
        for microbatch, (capacity, span) in enumerate(zip(plan.capacity, plan.span, strict=True)):
            costliest = tuple(float(of_kind[microbatch]) / int(span) for of_kind in squares)
            share = 0.0 if beside is None else float(beside[microbatch])
            for function, passes in self._calls(microbatch):
                yield self._call(function, passes, int(capacity), int(span), costliest, share)

    def _calls(self, number: int) -> list[tuple[str, Passes]]:
        """Programs that microbatch `number` runs, and their passes."""
        again: dict[str, Any] = {
            name: float(share)
            for name, share in computed_again(self.component.settings.remat).items()
        }
        names = self.functions
        kept = number < self.programs.kept_residuals.get(self.phase, 0)
        if self.phase == LANGUAGE:
            return self._decoder_calls(kept, again)
        if self.drawing is not None:
            return [(names.backward, Passes(1, 1, **again))]
        if not names.backward:
            return [(names.forward, Passes(1, 0))]
        features = self.programs.functions.keeps_features(self.phase)
        backward = names.backward_kept if kept else names.backward
        # Kept residuals, or kept features of a tower that is frozen below a projector, replace the
        # forward pass
        forward_again = 0 if kept or features else 1
        shares_again = {} if features else again | {"stem_again": 1}
        return [
            (names.forward, Passes(1, 0)),
            (backward, Passes(forward_again, 1, **shares_again)),
        ]

    def _decoder_calls(self, kept: bool, again: Mapping[str, Any]) -> list[tuple[str, Passes]]:
        """The decoder's programs: its states are computed first where a generator reads them, and
        again with the backward pass where nothing of that was kept."""
        names = self.functions
        # Where no gradient passes through the decoder, its forward pass is all that runs.
        has_backward = self.whole.linear > self.forward[0]
        passes = Passes(0 if kept else 1, 1, **again) if has_backward else Passes(1, 0)
        calls = [
            (names.forward, Passes(1, 0, head=False)),
            (
                names.backward_kept if kept else names.backward,
                passes._replace(head=bool(names.evaluate)),
            ),
        ]
        return [(name, call_passes) for name, call_passes in calls if name]

    def _call(
        self,
        function: str,
        passes: Passes,
        capacity: int,
        span: int,
        squares: tuple[float, ...],
        beside: float,
    ) -> Microbatch:
        """One call of a program.

        Args:
          squares: of the costliest row, by kind (see `row_squares`).
          beside: share of the row that also runs through the weights of conditions.
        """
        device = self.device
        layout = self.component.layout
        inner = devices_along(layout, layout.mesh_axes("mlp"))
        row_parts = devices_along(layout, layout.part_axes)
        slots = capacity / row_parts
        # FLOPs of a slot, forward and backward; the latter are 0 where nothing has a gradient.
        linear, *per_square = self.forward
        backward_linear = self.whole.linear - linear
        if not passes.head:  # the head's share of FLOPs is the same backward as forward
            backward_linear -= backward_linear / linear * self.head
            linear -= self.head
        products = passes.forward * linear + passes.backward * backward_linear
        # From residuals of the layers, the head alone runs forward.
        if passes.head and not passes.forward:
            products += self.head
        products += passes.linear_again * (self.again - self.of_experts)
        products += passes.backward * AGAIN * self.of_experts
        products += passes.stem_again * self.stem
        if self.drawing is not None:  # conditions run forward again in any case
            all_products = products + passes.backward * (1 - passes.linear_again) * self.again
            of_conditions = self.drawing.flops_of_conditions(self.again)
            products += beside * of_conditions / linear * all_products
        products *= slots / inner
        pairs = self._attention_flops(per_square, squares, passes) / row_parts / inner
        width = self.shapes.width / inner
        rate = device.product_rate(slots, width)
        if self.mixture is not None:
            mixture = self._row_mixture(slots, span)
            rate = mixture.product_rate(device, slots, width, self.of_experts / linear)
        seconds = products / rate + pairs / device.attention_rate
        if self.drawing is not None:
            forward = passes.forward + passes.linear_again
            of_row = slots, self.spec.max_segments, beside
            modulation_flops = self.drawing.modulation(*of_row, forward, passes.backward)
            seconds += modulation_flops / (device.wide_peak * device.efficiency)
        seconds += device.memory_seconds(self._traffic(slots, inner, capacity, span, passes))
        inside, weights = self._split_sends(function, capacity, span)
        return Microbatch(seconds, products + pairs, inside, weights)

    def _kept(self, capacity: int, span: int) -> float:
        """Bytes that all layers keep of a row, whichever program runs forward."""
        from jaxmllm.training.programs.base import ProgramName

        row_class = capacity, span
        if row_class not in self._known_kept:
            name = ProgramName(self.functions.backward, self.phase, *row_class)
            model = self.programs.functions.model
            self._known_kept[row_class] = phase_program(model, name).kept
        return self._known_kept[row_class]

    def _split_sends(
        self, function: str, capacity: int, span: int
    ) -> tuple[tuple[Send, ...], tuple[Send, ...]]:
        """What a program sends: what layers wait for, and weights and their gradients."""
        from jaxmllm.training.programs.base import ProgramName

        name = ProgramName(function, self.phase, capacity, span)
        if name not in self._known_sends:
            sends = program_sends(self.programs, name) or []
            batch = set(self.component.layout.mesh_axes("embed"))
            weights = tuple(
                send
                for send in sends
                if send.operation in (GATHER, SCATTER)
                and set(send.axes) <= batch
                and not send.of_experts
            )
            inside = tuple(send for send in sends if send not in weights)
            self._known_sends[name] = inside, weights
        return self._known_sends[name]

    def _attention_flops(
        self,
        per_square: list[float],
        squares: tuple[float, ...],
        passes: Passes,
    ) -> float:
        """FLOPs of attention, whose backward pass computes the scores again."""
        forward = sum(per * square for per, square in zip(per_square, squares, strict=True))
        with_backward = sum(
            per * square for per, square in zip(self.whole.per_square, squares, strict=True)
        )
        backward = (with_backward - forward) * FLASH_BACKWARD / BACKWARD
        return (passes.forward + passes.attention_again) * forward + passes.backward * backward

    def _row_mixture(self, slots: float, span: int) -> Mixture:
        """The experts of a layer, for rows of so many slots on a device."""
        assert self.mixture is not None
        layout = self.component.layout.spanned(span)
        return replace(self.mixture, layout=layout, tokens=slots)

    def _traffic(self, slots: float, inner: int, capacity: int, span: int, passes: Passes) -> float:
        """Bytes that a call moves through memory."""
        stride = self.shapes.stem_stride
        mlp_widths = self.shapes.mlp_matrices * self.shapes.mlp_width
        if self.mixture is not None:  # blocks of experts store nothing
            mlp_widths = 0
        stored = stored_bytes(self.shapes.width, mlp_widths, inner)
        runs = passes.forward + BACKWARD * passes.backward + passes.linear_again
        vector_bytes = 0.0
        if self.drawing is not None:
            stored += self.drawing.stored(inner)
            vector_bytes = passes.backward * self.drawing.stored_backward
        stored = stored * runs + vector_bytes
        activations = slots / stride * stored * self.shapes.layers * self.device.rates.traffic
        if self.planes:  # written and read
            runs = passes.forward + passes.stem_again + BACKWARD * bool(passes.stem_again)
            activations += 2 * slots * self.planes * self.component.dtype.itemsize * runs
        copy_bytes = gradient_bytes = 0.0
        if passes.backward:
            copy_bytes = KEPT_COPIES * self._kept(capacity, span)
            names = self.programs.functions.trainable_of(self.phase)
            shards = device_bytes([self.programs.trained[name] for name in names]) / OWN_BYTES
            gradient_bytes = shards * ACCUMULATED_BYTES
        blocks = 0.0
        if self.mixture is not None:
            mixture = self._row_mixture(slots, span)
            trained = self.phase in self.programs.functions.trainable_of(self.phase)
            blocks = mixture.block_traffic(passes.forward, passes.backward, trained)
        return activations + copy_bytes + gradient_bytes + self.shapes.layers * blocks


class ForwardFlops(NamedTuple):
    """FLOPs of a phase's forward pass, per slot except for `squares`."""

    linear: float  # of all products
    squares: tuple[float, ...]  # of attention, for each of `ItemCost.squares`
    stack: float  # of the products of layers with attention
    first: float  # of a stem or embedding
    last: float  # of a projector or head


@lru_cache(maxsize=64)  # layouts of a search share their model
def _forward_flops(model: ModelConfig, vocab_size: int, phase: str) -> ForwardFlops:
    layers = phase_layers(with_vocabulary(model, vocab_size), phase)
    layer_products = [sum(layer.products) for layer in layers]
    layer_squares = [layer.attention_squares for layer in layers]
    squares_by_kind = zip(*layer_squares, strict=True)
    attending = [layer for layer in layers if any(layer.attention_squares)]
    return ForwardFlops(
        linear=float(sum(layer_products)),
        squares=tuple(float(sum(of_layers)) for of_layers in squares_by_kind),
        stack=float(sum(layer.linear(1) for layer in attending)),
        first=float(layers[0].linear(1)),
        last=float(layers[-1].linear(1)),
    )


def row_squares(
    plan: PhasePlan, spec: PhaseSpec, items: PhaseItems, device: Device
) -> list[Floats]:
    """Sums of the squares that attention's cost is proportional to, by kind, [M] each: in the
    costliest row of each microbatch, or in the average one where ranks share cores."""
    by_row = []
    for squares in spec.flops.squares(items.length.astype(float), items.extra):
        rows = np.zeros((plan.microbatches, spec.ranks))
        np.add.at(rows, (plan.microbatch, plan.rank), squares)
        by_row.append(rows)
    if device.cluster.shared_cores:
        return [rows.mean(axis=1) for rows in by_row]
    costs = sum(per * rows for per, rows in zip(spec.flops.per_square, by_row, strict=True))
    costliest = np.argmax(costs, axis=1)[:, None]
    return [np.take_along_axis(rows, costliest, 1)[:, 0] for rows in by_row]


def resolved_model(programs: Programs) -> ModelConfig:
    """The model's shapes with the size of its vocabulary."""
    model = programs.functions.model
    return with_vocabulary(model.config, model.vocab_size)


def with_vocabulary(model: ModelConfig, vocab_size: int) -> ModelConfig:
    """The shapes of a model whose vocabulary has this size."""
    language = model.language.model_copy(update={"vocab_size": vocab_size})
    return model.model_copy(update={"language": language})
