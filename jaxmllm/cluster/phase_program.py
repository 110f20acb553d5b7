"""One program of a phase and row class: the bytes that are in memory at once while it runs, at
named moments.

Counts of values are those of programs that XLA compiles for GPUs. Letters, on one device: t tokens
of attention, D width, F MLP width, Q width of all query heads, G width of all key heads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jaxmllm.balance.costs.kept_values import further_widths, named_values
from jaxmllm.cluster.mixtures import Mixture, mixture_of
from jaxmllm.cluster.sends import BACKWARD, FROM_RESIDUALS, SUM_BYTES, WIDE_PARTS
from jaxmllm.config.schema import ADAPTER, PROJECTOR, AudioConfig
from jaxmllm.phases import LANGUAGE

if TYPE_CHECKING:
    from jaxmllm.models.mllm import MLLM
    from jaxmllm.models.model_component import Component
    from jaxmllm.training.programs.base import ProgramName

FORWARD: Final = ("encode", "evaluate", "language_states")
# Programs whose code is that of one device along the axes of rows
BY_DEVICE: Final = (*BACKWARD, "language_states")
WIDE: Final = 4  # bytes of float32, in which gradients are scattered and logits made
# Values of a slot that a layer's backward pass has in memory at once, in addition to what was kept:
# multiples of (D, F, Q). Towers have one product before their activation, decoders two.
RUNNING: Final = {
    ("decoder", "full"): (6.0, 6.0, 2.25),
    ("decoder", "dots"): (8.0, 4.0, 2.5),
    ("decoder", "none"): (4.0, 2.0, 1.0),
    ("tower", "full"): (7.0, 3.0, 4.0),
    ("tower", "dots"): (4.0, 4.0, 4.25),
    ("tower", "none"): (4.0, 2.0, 1.0),
}
# Additional multiples of D that a layer with experts keeps where nothing is computed again
EXPERTS_KEPT: Final = 2
# The same as `RUNNING` for a forward pass: of decoders (True) and of towers
FORWARD_RUNNING: Final = {True: (2.0, 2.0, 2.25), False: (2.0, 1.0, 0.0)}
STATES: Final = 2  # additional multiples of D where states go into a pool
# Share of a layer's gradients that is in memory at once: they are scattered as they are computed
WAITING: Final = 0.5
HEAD_ROWS: Final = 3  # [t, D] arrays in memory during the head's loop
# [t, D] arrays that a stem of convolutions keeps; the first one has two positions per token
STEM_KEPT: Final = 18
# Arrays in memory at once, forward and backward, as multiples of all that convolutions along time
# and mels yield
PLANES = 1.7
PLANES_BACKWARD = 4.45
IN_FLIGHT: Final = 4  # microbatches per stage; see `PipelineConfig.microbatches_in_flight`
PROJECTOR_KEPT: Final = 6  # kept arrays of a projector's tokens, each as wide as its MLP
GAPS: Final = 1.03  # factor for gaps in the heap, between values that come and go


@dataclass(frozen=True)
class Temporaries:
    """Bytes of one device besides a program's arguments and results, at each of its moments."""

    moments: Mapping[str, int]

    @property
    def moment(self) -> str:
        """The moment that takes most; empty where nothing is taken."""
        return max(self.moments, key=lambda moment: self.moments[moment], default="")

    @property
    def total(self) -> int:
        return max(self.moments.values(), default=0)


@dataclass(frozen=True)
class Weight:
    """A parameter on one device."""

    layers: int  # that are stacked in it; 0 outside of the stack
    numbers: float  # of one layer, once gathered
    parts: int  # shards that are gathered
    turned: bool  # gathered along another axis than its first one
    trained: bool
    wide: bool  # computed in float32 whatever the compute dtype

    @property
    def shards(self) -> float:
        """Bytes of the device's shards of all layers."""
        return WIDE * max(self.layers, 1) * self.numbers / self.parts


def _weights_of(model: MLLM, name: str) -> list[Weight]:
    """Records of a component's parameters."""
    import jax

    from sharding.parameters import kept_axes
    from sharding.rules import KEPT_AXES

    component = model.components[name]
    layout = component.layout
    weights = []
    for (keys, leaf), axes in zip(
        jax.tree.leaves_with_path(component.shapes), jax.tree.leaves(component.axes), strict=True
    ):
        path = ".".join((name, *(jax.tree_util.keystr((key,), simple=True) for key in keys)))
        # Axes of a single layer: where layers are stacked, the first axis counts them.
        weight_axes = axes.names[axes.stacked :]
        layers = leaf.shape[0] if axes.stacked else 0
        split = math.prod(layout.size(axis) for axis in kept_axes(axes.names) if axis)
        gathered = [axis for axis in weight_axes if axis and axis not in KEPT_AXES]
        parts = math.prod(map(layout.size, gathered))
        weights.append(
            Weight(
                layers=layers,
                numbers=leaf.size / max(layers, 1) / split,
                parts=parts,
                turned=parts > 1 and weight_axes[0] not in gathered,
                trained=path in model.trainable.paths,
                wide=not WIDE_PARTS.isdisjoint(path.split(".")),
            )
        )
    return weights


class PhaseProgram:
    """One program of a phase and row class, of `FORWARD` or `BACKWARD`."""

    def __init__(self, model: MLLM, name: ProgramName):
        self.name = name
        self.phase = name.subject
        self.model = model.spanned(self.phase, name.span)
        self.component: Component = self.model.components[self.phase]
        self.layout = self.component.layout
        self.shapes: Any = getattr(model.config, self.phase)
        self.itemsize = self.component.dtype.itemsize
        self.decoder = self.phase == LANGUAGE
        self._slots_per_token = self.shapes.stem_stride * self.layout.parts / name.span
        self.tokens = name.capacity / self._slots_per_token
        phase = model.phases[self.phase]
        projectors = [name for name in phase.components if name.startswith(PROJECTOR)]
        self.projector = projectors[0] if projectors else None
        trained = model.trainable.components
        self.given = name.function in FROM_RESIDUALS
        self.tower = [self.phase]  # and its adapter
        self.tower += [name for name in (f"{ADAPTER}{self.phase}",) if name in model.components]
        self.features_kept = not phase.has_loss and trained.isdisjoint(self.tower)
        self.features = name.function in BACKWARD and self.features_kept
        shapes = self.shapes
        layout = self.layout
        kv_heads = getattr(shapes, "kv_heads", shapes.heads)
        self.width = shapes.width
        # Hidden values of experts exist within a block only
        mlp_width = 0 if getattr(shapes, "experts", None) else shapes.mlp_width
        self.mlp = mlp_width / layout.size("mlp")
        self.queries = shapes.heads * shapes.head_size / layout.size("heads")
        self.keys = kv_heads * shapes.head_size / layout.size("kv_heads")
        self.weights = [weight for name in self.tower for weight in _weights_of(self.model, name)]
        self.projector_weights = _weights_of(self.model, self.projector) if self.projector else []

    def with_rows(self, capacity: int) -> PhaseProgram:
        """The same program for rows of `capacity` slots per rank."""
        program = copy.copy(self)
        program.tokens = capacity / self._slots_per_token
        return program

    def temporaries(self, keeps: bool = False) -> Temporaries:
        """Bytes that the program takes for itself; see `program_temporaries`."""
        moments = self.backward() if self.name.function in BACKWARD else self.forward(keeps)
        return Temporaries({moment: round(size) for moment, size in moments.items()})

    @property
    def mixture(self) -> Mixture | None:
        """The experts of a layer; none where its MLP has none."""
        return mixture_of(self.model, self.phase, self.tokens)

    @property
    def slots(self) -> float:
        """Bytes of one value in every token of a row."""
        return self.tokens * self.itemsize

    # ------------------------------------------------------------------ in memory all the time

    @property
    def kept(self) -> float:
        """Bytes that the forward pass of all layers leaves for their backward pass; 0 where another
        program ran forward, because they are arguments then."""
        if self.given:
            return 0.0
        return self.shapes.layers * self.slots * self.kept_values

    @property
    def kept_values(self) -> float:
        """Values that one layer keeps of a slot."""
        remat = self.component.settings.remat
        of_name = named_values(
            self.shapes, self.queries, self.keys, self.mlp, logsumexp=WIDE / self.itemsize
        )
        if remat == "full":
            names: Iterable[str] = ()
        elif remat == "dots":
            names = ("projections", "mlp")
        elif remat == "none":  # also keeps the inputs of norms and activations
            more, more_of_mlp = further_widths(self.shapes, remat)
            widths = 10 + more + EXPERTS_KEPT * (self.mixture is not None)
            return (
                (6 + more_of_mlp) * self.mlp + widths * self.width + 2 * (self.queries + self.keys)
            )
        else:
            names = remat
        return self.width + sum(of_name[name] for name in names)

    @property
    def turned(self) -> float:
        """Bytes of a second copy of all layers' turned shards, in the order in which they are
        gathered, where XLA splits layers over devices; elsewhere one layer at a time is turned
        (`run_layers`)."""
        layout = self.model.by_device(self.phase).layout(self.phase)
        if self.name.function in BY_DEVICE and not layout.is_partitioned:
            return 0.0
        return sum(weight.shards for weight in self.weights if weight.layers and weight.turned)

    # ------------------------------------------------------------------ moments

    def backward(self) -> dict[str, float]:
        projected = self._bytes_outside_layers()
        if self.features:
            return {"projector": projected}
        moments = {"layer backward": self.kept + self.turned + self._layer() + projected}
        if self.planes:
            moments["stem backward"] = PLANES_BACKWARD * self.planes + self.turned
        if self.decoder:
            moments["layer backward"] += self.stays * self._head_gradient_bytes()
            moments["head"] = self.kept + self.turned + self._head_bytes()
        return moments

    def staged(self) -> dict[str, float]:
        """Bytes of one backward operation of a pipeline at its moments, without what the loop over
        the schedule carries."""
        moments = {"layer backward": self._layer() + self._bytes_outside_layers()}
        if self.decoder:
            moments["head"] = self._head_bytes()
        return moments

    def in_stages(self, stages: int) -> int:
        """Bytes that a pipeline takes, before there is a schedule: its largest operation, what a
        chunk keeps, both in its box and outside of it, and the inputs of microbatches in flight.
        What is carried with the input of a layer is kept with it."""
        beside = self.slots * self.model.config.carried_beside(self.phase)
        kept = self.kept + self.shapes.layers * beside
        in_flight = IN_FLIGHT * stages * (self.slots * self.width + beside)
        return round(max(self.staged().values()) + 2 * kept / stages + in_flight)

    @property
    def stays(self) -> bool:
        """Whether gradients are not scattered, so that the head's stays whole."""
        return self.layout.size("embed") == 1

    def _layer(self) -> float:
        """Bytes of a layer's backward pass, and of the gradients that are being scattered."""
        remat = self.component.settings.remat
        kind = ("decoder" if self.decoder else "tower", remat if isinstance(remat, str) else "full")
        width, mlp, queries = RUNNING[kind]
        values = width * self.width + mlp * self.mlp + queries * self.queries
        layer = [
            weight.numbers
            for weight in self.weights
            if weight.layers and weight.trained and weight.parts > 1
        ]
        gradients = SUM_BYTES * WAITING * sum(layer)
        experts = 0.0
        if self.mixture is not None:
            experts = self.mixture.held_backward(any(weight.trained for weight in self.weights))
        return GAPS * (self.slots * values + gradients) + experts

    def _head_bytes(self) -> float:
        """Bytes of the loop over chunks of logits, with the head and its gradient whole."""
        from jaxmllm.training.objectives.tokens import chunk_size

        chunk = chunk_size(int(self.tokens), self.shapes.loss_chunk)
        logits = chunk * self.model.vocab_size / self.layout.size("vocab")
        return (
            self._head_gradient_bytes()
            + self.itemsize * self._table_numbers()
            + (WIDE + self.itemsize) * logits
            + HEAD_ROWS * self.slots * self.width
        )

    def _head_gradient_bytes(self) -> float:
        """Bytes of the head's whole gradient, in float32; 0 where only layers are trained."""
        trained = any(weight.trained and not weight.layers for weight in self.weights)
        return SUM_BYTES * trained * self._table_numbers()

    def residuals(self) -> float:
        """Bytes that a forward pass leaves for another program: values of trained layers, of a
        stem, of the last norm (in float32), and of a tower's projector or a decoder's output; of a
        frozen tower its features alone."""
        if self.features_kept:
            return self.slots * self.width * self.shapes.projectors
        norm = self.tokens * 2 * WIDE * (self.width + 1)
        if self.decoder:
            return self.kept + norm + self.slots * self.width
        # `slots` and `_merged_slots` are bytes of one value in every token; `tokens` is a count.
        shapes = self.shapes.projector
        read = shapes.inputs(self.width, self.shapes.merged)
        of_slot = read + PROJECTOR_KEPT * self._projector_width
        projector = self._merged_slots * self.shapes.projectors * of_slot
        norm += (shapes.norm is not None) * self.tokens / self.shapes.merged * 2 * WIDE * (read + 1)
        stem = STEM_KEPT * self.slots * self.width if self._has_stem else 0.0
        return self.kept + stem + norm + projector

    def _table_numbers(self) -> float:
        """Numbers of the head, or of the embedding, on one device."""
        return self.model.vocab_size * self.width / self.layout.size("vocab")

    def _bytes_outside_layers(self) -> float:
        """Bytes of a tower's projector: gradients that wait to be scattered, and tokens."""
        if self.projector is None:
            return 0.0
        weights = [weight.numbers for weight in self.projector_weights if weight.trained]
        gradients = SUM_BYTES * sum(weights)
        if self.features:  # the first one is converted while the second one is in memory
            gradients += self.itemsize * max(weights, default=0.0)
        return gradients + 2 * self._merged_slots * self.shapes.projectors * self._language_width

    @property
    def planes(self) -> float:
        """Bytes of all that convolutions along time and mels yield."""
        if not self._has_stem:
            return 0.0
        return self.slots * self.shapes.stem_stride * self.shapes.stem_numbers

    @property
    def _has_stem(self) -> bool:
        return isinstance(self.shapes, AudioConfig)

    @property
    def _merged_slots(self) -> float:
        """Bytes of one value in every token that a projector yields."""
        return self.slots / self.shapes.merged

    @property
    def _language_width(self) -> int:
        return int(self.model.config.language.width)

    @property
    def _projector_width(self) -> int:
        """Width of the projector's MLP; 0 where the projector is linear."""
        shapes = self.shapes.projector
        return 0 if shapes.linear else shapes.mlp_width or self._language_width

    def forward(self, keeps: bool) -> dict[str, float]:
        width, mlp, queries = FORWARD_RUNNING[self.decoder]
        # `language_states` computes no logits, and its table of tokens stays in shards
        states = self.name.function == "language_states"
        queries *= not states
        width += STATES * states
        values = (not keeps) * width * self.width + mlp * self.mlp + queries * self.queries
        gathered = [weight.numbers for weight in self.weights if weight.layers and weight.parts > 1]
        gathered = [] if keeps else sorted(gathered)[-self.shapes.mlp_matrices :]  # of the MLP
        if self.projector:
            outer = sorted(weight.numbers for weight in self.projector_weights)
            gathered.append(
                outer[max(len(outer) - 2, 0)]
            )  # the second largest, or the one there is
        layer = self.slots * values + self.itemsize * sum(gathered)
        if self.mixture is not None:
            layer += self.mixture.held_forward()
        moments = {"layer forward": self.turned + layer}
        if self.planes:
            moments["stem forward"] = PLANES * self.planes
        if self.decoder and not states:
            moments["embedding"] = self.turned + (not self.stays) * WIDE * self._table_numbers()
            moments["embedding"] += self.slots * self.width
        return moments
