"""What each program of a run sends: which collective, along which axes, how many bytes, how often.

    programs, name --program_sends--> Sends

It follows from the shapes and shardings of the parameters, which of them are trained, and what the
backward pass computes again; nothing is compiled. Tests compare it with compiled text
(setup/hlo.py): in loops with a known number of trips it predicts everything except index arrays,
whose bytes are those of activations divided by the width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from jaxmllm.cluster.clusters import ALL_REDUCE
from jaxmllm.cluster.collectives import devices_along
from jaxmllm.cluster.drawing import mean_share
from jaxmllm.cluster.held import device_bytes
from jaxmllm.cluster.mixtures import Mixture, mixture_of
from jaxmllm.config.schema import ADAPTER, PROJECTOR
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.hlo import SENT

if TYPE_CHECKING:
    from jaxmllm.config.schema import Kept
    from jaxmllm.models.model_component import Component
    from jaxmllm.training.programs.base import ProgramName
    from jaxmllm.training.programs.phased import PhasedPrograms
    from sharding.rules import Layout

GATHER: Final = "all-gather"
SCATTER: Final = "reduce-scatter"
EXCHANGE: Final = "all-to-all"
# Backward programs that start from residuals, without a forward pass of their own
FROM_RESIDUALS: Final = ("encode_grad_kept", "language_loss_and_grad_kept")
BACKWARD: Final = (
    *FROM_RESIDUALS,
    "language_loss_and_grad",
    "encode_grad",
    "draw_loss_and_grad",
)
# Programs that run the layers forward, alone or before their backward pass
FORWARD: Final = (
    "encode",
    "evaluate",
    "language_states",
    "language_loss_and_grad",
    "encode_grad",
    "draw_loss_and_grad",
)
# Programs whose code is that of one device: tokens are looked up on the devices with the vectors
LOOKS_UP: Final = (
    "language_loss_and_grad",
    "language_loss_and_grad_kept",
    "language_states",
)
# Path names of parameters, of experts and of a generator, that compute in float32 whatever the
# compute dtype
WIDE_PARTS: Final = {"router", "time", "pooled", "modulation", "output_modulation"}
# Path name of the convolutions along time and mels, which every backward pass computes again
PLANES: Final = "stem"
# Path names in a generator: the stream of conditions, and the attention to conditions, which are
# its keys and values. Both run in a branch that is chosen by the number of conditions
STREAM: Final = "conditions"
CROSS: Final = "cross_attention"
KEYS: Final = ("key", "value")
# Weights of conditions that a backward pass gathers twice where `remat` runs layers again: for
# that, and for their gradients
READ_AGAIN: Final = {"query", *KEYS}
# Matrices that read the rows themselves: a backward pass without a forward pass has no use for them
READS_ROWS: Final = ("patch", "stem_mels")
# Path endings of matrices whose inputs are split inside a layer; all others have split outputs
SPLIT_INPUTS: Final = (".out", ".down")
SUM_BYTES: Final = 4  # gradients are summed in float32


@dataclass(frozen=True)
class Send:
    """A collective that a program starts `times` times; `array_bytes`: see `collective_seconds`."""

    operation: str
    axes: tuple[str, ...]
    devices: int  # along the axes
    array_bytes: float
    times: float
    # Whether the data decide how often it runs, or which of several branches does; `times` is then
    # for rows whose every slot has a target, or for any one branch
    by_data: bool = False
    # Whether it carries tokens to experts or back, for which a layer waits
    of_experts: bool = False

    @property
    def ring_bytes(self) -> float:
        """Bytes that a device sends in a ring, all `times` together."""
        return SENT[self.operation](self.devices) * self.array_bytes * self.times


@dataclass(frozen=True)
class Leaf:
    """A parameter and its layout on the mesh."""

    path: tuple[str, ...]
    size: int  # numbers of the whole parameter
    gathered: tuple[str, ...]  # mesh axes that split it only between uses
    split: int  # parts that it stays split into while it is used
    replicas: tuple[str, ...]  # mesh axes whose devices have other tokens but the same shard
    stacked: int  # layers that it holds; 1 outside of the stack
    # Whether devices with other rows hold other parts of it while it is used
    apart: bool = False

    @property
    def layer(self) -> bool:
        """Whether it belongs to the stack of layers."""
        return "layers" in self.path


def leaves(tree: Any, component: Component) -> Iterator[Leaf]:
    """The parameters of a component, or those of them that `tree` holds."""
    import jax

    from sharding.parameters import replica_axes
    from sharding.rules import KEPT_AXES

    layout = component.layout
    row_axes = {*layout.mesh_axes("batch"), *layout.mesh_axes("sequence")}
    axes_of_leaves = jax.tree.leaves(component.axes_of(tree))
    for (keys, leaf), axes in zip(jax.tree.leaves_with_path(tree), axes_of_leaves, strict=True):
        path = tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
        kept_axes: list[str] = []
        gathered_axes: list[str] = []
        # Not strict: a spec may end before its axes do, where nothing splits the last ones.
        for name, entry in zip(axes.names, leaf.sharding.spec, strict=False):
            entry_axes = _axis_tuple(entry) if entry else ()
            if name in KEPT_AXES:
                kept_axes += entry_axes
            else:
                gathered_axes += entry_axes
        # Among kept axes, only that of experts may also split rows.
        shared_axes = row_axes.intersection(kept_axes)
        yield Leaf(
            path=path,
            size=math.prod(leaf.shape),
            gathered=tuple(gathered_axes),
            split=devices_along(layout, kept_axes),
            replicas=replica_axes(layout, leaf.sharding),
            stacked=leaf.shape[0] if "layers" in path else 1,
            apart=any(layout.mesh.shape[axis] > 1 for axis in shared_axes),
        )


def _axis_tuple(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


def program_sends(programs: PhasedPrograms, name: ProgramName) -> list[Send] | None:
    """The collectives of a program. None for the hops of an exchange, which depend on the routes of
    a step, and for `encode` and `language_states` where they keep residuals that tensor parallelism
    splits, because XLA moves those as it likes."""
    if name.function in ("hop", "hop_back"):
        return None
    if name.function == "add_replicas":
        return list(_moving_sends(_replica_sums(programs)))
    if name.function not in (*FORWARD, *BACKWARD):
        return []
    program = _ProgramSends(programs, name)
    if program.moves_residuals:
        return None
    return list(_moving_sends(program.sends()))


def ring_bytes(sends: Iterable[Send]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Bytes that a device sends in a ring, by operation and axes."""
    total: dict[tuple[str, tuple[str, ...]], float] = {}
    for send in sends:
        key = (send.operation, send.axes)
        total[key] = total.get(key, 0.0) + send.ring_bytes
    return total


def _moving_sends(sends: Iterable[Send]) -> Iterator[Send]:
    """The sends without those that move nothing, such as those of a single device."""
    return (send for send in sends if send.devices > 1 and send.array_bytes and send.times)


def _send(
    layout: Layout,
    operation: str,
    axes: Sequence[str],
    array_bytes: float,
    times: float = 1,
    by_data: bool = False,
) -> Send:
    split = tuple(axis for axis in axes if layout.mesh.shape[axis] > 1)
    return Send(operation, split, devices_along(layout, axes), array_bytes, times, by_data)


def expert_sends(mixture: Mixture, forward: float, backward: float) -> Iterator[Send]:
    """Collectives of a layer's experts in so many passes of each kind, without index arrays."""
    layout = mixture.layout
    for passed, times in ((mixture.forward, forward), (mixture.backward, backward)):
        if not times:
            continue
        collectives = (
            (GATHER, mixture.token_axes, passed.gathered),
            (SCATTER, mixture.token_axes, passed.summed),
            (ALL_REDUCE, mixture.other_axes, passed.summed),
        )
        for operation, axes, sizes in collectives:
            for size in sizes:
                send = _send(layout, operation, axes, size, times)
                yield replace(send, of_experts=True)


def _replica_sums(programs: PhasedPrograms) -> Iterator[Send]:
    """Sums of gradients over the devices that hold the same shard, once per step. Gradients that
    stayed whole until then are first scattered to their shards."""
    for component, trained in programs.trained.items():
        settings = programs.functions.model.components[component]
        layout = settings.layout
        for leaf in leaves(trained, settings):
            if _stays_whole(settings, leaf):
                whole_bytes = SUM_BYTES * leaf.size / leaf.split
                yield _send(layout, SCATTER, leaf.gathered, whole_bytes)
            shard = leaf.size / leaf.split / devices_along(layout, leaf.gathered)
            yield _send(layout, ALL_REDUCE, leaf.replicas, SUM_BYTES * shard)


def _stays_whole(settings: Component, leaf: Leaf) -> bool:
    """Whether a gradient stays whole and is reduced once per step, as `Component.defers` says. The
    gradient of a table that is only looked up is never whole, and neither are those of experts on
    different devices."""
    looked_up = "embedding" in leaf.path and "head" in settings.shapes
    return settings.settings.reduce == "step" and not (looked_up or leaf.apart)


class _ProgramSends:
    """One program of a phase and row class."""

    def __init__(self, programs: PhasedPrograms, name: ProgramName):
        functions = programs.functions.spanned(name.subject, name.span)
        self.programs = programs
        self.function = name.function
        self.phase = name.subject
        self.model = functions.model
        self.settings = self.model.components[self.phase]
        self.layout = self.settings.layout
        self.shapes = getattr(self.model.config, self.phase)
        self.itemsize = self.settings.dtype.itemsize
        # Attention tokens of the whole row
        self.tokens = name.capacity * name.span / self.shapes.stem_stride
        self.backward = self.function in BACKWARD
        self.forward = self.function in FORWARD
        self.mixture = mixture_of(self.model, self.phase, self.tokens / self.layout.parts)
        features = self.backward and functions.keeps_features(self.phase) and self.phase != LANGUAGE
        self.components = [
            component
            for component in self.model.phases[self.phase].components
            if not (features and component in (self.phase, f"{ADAPTER}{self.phase}"))
        ]

    @property
    def moves_residuals(self) -> bool:
        keeps = bool(self.programs.kept_residuals.get(self.phase))
        return self.function in ("encode", "language_states") and keeps and self._tensor_devices > 1

    @property
    def _tensor_devices(self) -> int:
        """Number of devices that split each layer (tensor parallelism)."""
        return devices_along(self.layout, self.layout.mesh_axes("mlp"))

    @property
    def _is_for_cpus(self) -> bool:
        """Whether programs are compiled for CPUs. A mesh without devices counts as GPUs."""
        from jax.sharding import Mesh

        from sharding.mesh import platform_of

        mesh = self.layout.mesh
        return isinstance(mesh, Mesh) and platform_of(mesh) == "cpu"

    def sends(self) -> Iterator[Send]:
        for component in self.components:
            yield from self._weight_sends(component)
        if self.phase in self.components:
            yield from self._shared_row_sends()
            yield from self._activation_sums()
            yield from self._adapter_sums()
            yield from self._mixture_sends()

    def _weight_sends(self, component: str) -> Iterator[Send]:
        settings = self.model.components[component]
        layout = settings.layout
        itemsize = settings.dtype.itemsize
        by_path = {leaf.path: leaf for leaf in leaves(self.programs.params[component], settings)}
        trained = {leaf.path for leaf in leaves(self.programs.trained.get(component, {}), settings)}
        for path, leaf in by_path.items():
            table = "embedding" in path
            # A table has up to two uses: it is looked up, and multiplied where it is also the head.
            if table and self.function in LOOKS_UP:
                yield from self._lookups(leaf, layout, itemsize, path in trained)
            elif table:  # gathered before it is cast
                yield _send(layout, GATHER, leaf.gathered, SUM_BYTES * leaf.size / leaf.split)
            # Another matrix is the head, so this one has no further use.
            if table and ("head",) in by_path:
                continue
            if (table or path == ("head",)) and not self._has_head:
                continue
            numbers = leaf.size / leaf.split / leaf.stacked
            passes = self.forward + self.backward if leaf.layer else 1
            number_bytes = itemsize if WIDE_PARTS.isdisjoint(path) else SUM_BYTES
            # The share of a row that conditions take decides which branch uses these weights
            of_conditions = STREAM in path or (CROSS in path and path[-1] in KEYS)
            by_data = of_conditions and number_bytes == itemsize
            if not self.forward and path[0] in READS_ROWS:
                passes = 0
            if by_data and self.settings.settings.remat != "none" and READ_AGAIN & {*path}:
                passes += self.backward
            if path[0] == PLANES:
                passes = self.forward + self.backward
            gathered = (layout, GATHER, leaf.gathered)
            yield _send(*gathered, number_bytes * numbers, passes * leaf.stacked, by_data)
            if self.backward and path in trained and not _stays_whole(settings, leaf):
                summed = itemsize if layout.narrow_gradients else SUM_BYTES
                scattered = (layout, SCATTER, leaf.gathered)
                yield _send(*scattered, summed * numbers, leaf.stacked, by_data)

    def _lookups(self, leaf: Leaf, layout: Layout, itemsize: int, trained: bool) -> Iterator[Send]:
        """The exchange of looked-up vectors: each device looks up its part of the width for the
        tokens of all devices that share the table."""
        looked_up = itemsize * self.tokens / layout.parts * self.shapes.width
        returned = trained and self.backward
        yield _send(layout, EXCHANGE, leaf.gathered, looked_up, self.forward + returned)

    def _shared_row_sends(self) -> Iterator[Send]:
        """Collectives of rows that several devices hold: keys and values, the pool that the parts
        fill, and media tokens, which outside of the program are in the order of the row."""
        layout = self.layout
        # Where no devices share a row, these axes have one device, and `_moving_sends` drops the
        # sends.
        axes = layout.mesh_axes("sequence")
        layers = self.shapes.layers
        key_values = self.model.key_value_bytes(self.phase) / layers / layout.size("kv_heads")
        keys = self.tokens * key_values
        again = self.backward and self.settings.settings.remat != "none"
        yield _send(layout, GATHER, axes, keys, (self.forward + again) * layers)
        yield _send(layout, SCATTER, axes, keys, self.backward * layers)
        # Each part fills its own slots of the rank's pool; their sum is the whole pool.
        if self._fills_pool:
            owner = self.programs.exchange_owner.get(self.phase, LANGUAGE)
            held = device_bytes(self.programs.pools[owner].tokens)
            yield _send(layout, ALL_REDUCE, layout.part_axes, held)
        if self.phase not in self.programs.encoders:
            return
        width = self.model.config.token_width
        media = self.tokens / self.shapes.merged * width * self.itemsize
        yield _send(layout, GATHER, axes, media, self.function == "encode")
        yield _send(layout, SCATTER, axes, media, self.backward)

    @property
    def _has_head(self) -> bool:
        """Whether a program of the decoder makes logits."""
        return self.function != "language_states" and self.programs.functions.learns_text

    @property
    def _fills_pool(self) -> bool:
        """Whether the parts of rows write into a pool slot by slot: states, or gradients of what
        was read there."""
        functions = self.programs.functions
        if self.phase in self.programs.generators:
            return self.backward and functions.trains_states
        if self.phase == LANGUAGE:
            returns = self.backward and bool(self.programs.encoders)
            return returns or self.function == "language_states"
        return False

    def _computes_again(self, name: Kept) -> bool:
        """Whether `remat` makes the backward pass compute values of this name again."""
        remat = self.settings.settings.remat
        return remat == "full" if isinstance(remat, str) else name not in remat

    def _activation_sums(self) -> Iterator[Send]:
        """Sums over devices that split layers: of what a layer adds to its input, and of the
        gradients of the inputs of its products."""
        layout = self.layout
        axes = layout.mesh_axes("mlp")
        layers = self.shapes.layers
        size = self.tokens / layout.parts * self.shapes.width * self.itemsize
        language = self.phase == LANGUAGE
        # Products that read the same input: queries, keys and values; in a gated MLP the two
        # matrices before the activation. Their gradients are added before they are summed over
        # devices, except by the compiler for CPUs
        whole_mlps = self.mixture is None  # `expert_sends` counts the sums of experts
        of_mlps = (self.shapes.mlp_matrices - 1 if self._is_for_cpus else 1) * whole_mlps
        reading = (3 if self._is_for_cpus else 1) + of_mlps
        attentions = getattr(self.shapes, "attentions", 1)
        generates = self.phase in self.programs.generators
        reading += attentions - 1  # the queries of a second attention
        # Sums that are computed again with the products that they follow: of attention, and of an
        # MLP whose output is read again because it is gated, normed or scaled
        reads_mlp = generates or any(
            getattr(self.shapes, choice, False) for choice in ("post_norms", "layer_scale")
        )
        again = attentions * self._computes_again("projections")
        again += reads_mlp * whole_mlps * self._computes_again("mlp")
        times = self.forward * (attentions + whole_mlps) * layers
        times += self.backward * layers * (reading + again)
        yield _send(layout, ALL_REDUCE, axes, size, times)
        if generates:
            # Gradients of the input of keys and values, or all sums of a second stream
            of_conditions = self.backward * (attentions - 1)
            if self.shapes.streams == 2:
                of_conditions = 2 * self.forward + self.backward * (reading + 2)
            share = mean_share() * size
            yield _send(layout, ALL_REDUCE, axes, share, layers * of_conditions, by_data=True)
            yield from self._projected_state_sums()
            return
        if language:
            lookup = size / self.itemsize * SUM_BYTES  # in the dtype of the table
            yield _send(layout, ALL_REDUCE, axes, lookup, self.forward)
            head = self.backward and self._has_head
            yield _send(layout, ALL_REDUCE, axes, size, head, by_data=True)
            return
        if self.shapes.projector.linear:  # no devices split its matrix
            return
        media = self.tokens / layout.parts / self.shapes.merged
        projectors = self.shapes.projectors
        projected = projectors * media * self.model.config.language.width * self.itemsize
        projector = self.model.components[f"{PROJECTOR}{self.phase}"].layout.mesh_axes("mlp")
        yield _send(layout, ALL_REDUCE, projector, projected)
        read = self.shapes.projector.inputs(1, self.shapes.merged) / self.shapes.merged
        yield _send(layout, ALL_REDUCE, projector, read * projectors * size, self.backward)

    def _projected_state_sums(self) -> Iterator[Send]:
        """Sums of a generator's projected states, and of the gradients of the states it reads."""
        config = self.model.config
        if self.shapes.projector_shapes.linear:
            return
        axes = self.model.components[f"{PROJECTOR}{LANGUAGE}"].layout.mesh_axes("mlp")
        slots = self.tokens / self.layout.parts * self.itemsize
        yield _send(self.layout, ALL_REDUCE, axes, slots * self.shapes.width)
        returned = self.backward and self.programs.functions.trains_states
        yield _send(self.layout, ALL_REDUCE, axes, slots * config.language.width, returned)

    def _mixture_sends(self) -> Iterator[Send]:
        """Tokens of all devices that share experts, and their sums; recomputation sends nothing."""
        if self.mixture is not None:
            layers = self.shapes.layers
            yield from expert_sends(self.mixture, self.forward * layers, self.backward * layers)

    def _adapter_sums(self) -> Iterator[Send]:
        """Sums of the values between an adapter's two factors, over the devices that split one of
        the factors. Where the adapted matrix reads a split input, the values are summed forward and
        in recomputation; for the other matrices their gradients are."""
        adapter = self.model.config.adapters.by_component.get(self.phase)
        if adapter is None:
            return
        paths = adapter.adapted(self.shapes.matrices)
        reading = sum(path.endswith(SPLIT_INPUTS) for path in paths)
        again = self.backward and self.settings.settings.remat not in ("none", "dots")
        times = (self.forward + again) * reading + self.backward * (len(paths) - reading)
        size = self.tokens / self.layout.parts * adapter.rank * self.itemsize
        axes = self.layout.mesh_axes("mlp")
        yield _send(self.layout, ALL_REDUCE, axes, size, times * self.shapes.layers)
