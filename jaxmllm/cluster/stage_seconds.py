"""Seconds of the runs of a pipeline, tick by tick.

    table, rows --_Operations--> seconds of every stage in every tick
                --slowest--> seconds of ticks, and of what is sent after each

In a tick every stage does one operation and waits for the slowest; then everything on an edge moves
one place along the ring (sharding/pipeline/table.py). Operations compute what the planner's chain
costs say. Gathers of sharded weights, and sums over devices that split layers, are parts of
operations: once per layer and pass.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Floats, Ints
from jaxmllm.balance.costs.flops import phase_layers
from jaxmllm.balance.records import BatchItems, PipelineRun, RowClass, StepPlan
from jaxmllm.cluster.clusters import ALL_REDUCE
from jaxmllm.cluster.collectives import devices_along
from jaxmllm.cluster.device_seconds import ACCUMULATED_BYTES, Device, stored_bytes
from jaxmllm.cluster.drawing import drawing_of
from jaxmllm.cluster.mixtures import Mixture, mixture_of
from jaxmllm.cluster.network import Network
from jaxmllm.cluster.phase_seconds import Worked, resolved_model, row_squares
from jaxmllm.cluster.sends import (
    GATHER,
    SCATTER,
    SUM_BYTES,
    Leaf,
    Send,
    expert_sends,
    leaves,
)
from jaxmllm.phases import LANGUAGE
from sharding.pipeline.graph import Kind, Pool
from sharding.pipeline.ring import STAGE, Chain
from sharding.pipeline.table_spec import action_of

if TYPE_CHECKING:
    from jaxmllm.config.schema import PipelineConfig
    from jaxmllm.models.mllm import MLLM
    from jaxmllm.training.programs.staged import StagedPrograms

PERMUTE: Final = "collective-permute"
# Parts of operations, in the order of `ChainCosts`; AGAIN is the recomputation of a forward pass
FORWARD, INPUT, WEIGHT, AGAIN = range(4)
GRADIENTS: Final = {
    Kind.FORWARD: (),
    Kind.BACKWARD: (INPUT, WEIGHT),
    Kind.INPUT_GRADIENT: (INPUT,),
    Kind.WEIGHT_GRADIENT: (WEIGHT,),
}


def staged_work(
    programs: StagedPrograms, plan: StepPlan, items: BatchItems, device: Device, network: Network
) -> Worked:
    """Seconds and FLOPs of all runs of a step, without the update."""
    operations = [
        _Operations(programs, chain, device, network)
        for chain in range(len(programs.sizes.training.tables.ring.chains))
    ]
    squares = {}
    for phase, spec in programs.spec.phases.items():
        placed = plan.phases[phase]
        of_rows = np.array(row_squares(placed, spec, items.phases[phase], device))
        # [kinds, M]: the share of each of the ranks that hold a row together
        squares[phase] = of_rows / placed.span
    once = _work_once_per_run(programs, network)
    total = Worked({})
    for run in plan.runs:
        ticks = _run(programs, plan, run, operations, squares, device, network)
        total = total.plus(ticks).plus(once)
    return total


def _run(
    programs: StagedPrograms,
    plan: StepPlan,
    run: PipelineRun,
    operations: list[_Operations],
    squares: dict[str, Floats],
    device: Device,
    network: Network,
) -> Worked:
    """Seconds and FLOPs of the ticks of a run."""
    tables = programs.sizes.training.tables
    columns = {name: run.table[:, :, column] for name, column in tables.columns.items()}
    # [4, T, S]: seconds of computing, of collectives inside of layers, of weights; FLOPs
    totals = np.zeros((4, *run.table.shape[:2]))
    part_seconds: dict[str, float] = {}
    for of_chain in operations:
        first_row, row_count = run.microbatches[of_chain.phase]
        rows = slice(first_row, first_row + row_count)
        phase = plan.phases[of_chain.phase]
        shapes = map(RowClass, phase.capacity[rows].tolist(), phase.span[rows].tolist())
        # A stage does one operation in a tick, so only one chain has more than 0 there, and the
        # seconds of the single chains add up to `busy` below.
        done = of_chain.ticks(columns, squares[of_chain.phase][:, rows], list(shapes))
        totals += done
        exposed = _overlapped(device, done[0] + done[1], done[2]) - done[0] - done[1]
        for name, seconds in zip(
            ("compute", "inside", "weights"), (*done[:2], exposed), strict=True
        ):
            part_seconds[f"{of_chain.phase}/{name}"] = float(seconds.mean(axis=1).sum())
    compute, inside, weights, flops = totals
    layers = compute + inside
    busy = _overlapped(device, layers, weights)
    ticks = _slowest(device, busy)
    sent = np.zeros(len(ticks))
    for wire, sends in enumerate(_edge_sends(programs)):
        # `wire_active` is 0 where nothing moves, else one more than the class of the largest row
        seconds = np.array([0.0, *(network.seconds([send]) for send in sends)])
        sent += seconds[run.wire_active[:, wire]]
    config = programs.sizes.training.config
    overhead = len(ticks) * seconds_besides(config, programs.functions.model, device)
    part_seconds |= {
        "bubble": float((ticks - busy.mean(axis=1)).sum()),
        "sends": float(sent.sum()),
        "ticks": overhead,
    }
    least_together = np.vectorize(device.least_together, otypes=[float])
    least_ticks = _slowest(device, least_together(layers, weights))
    most_ticks = _slowest(device, layers + weights)
    return Worked(
        part_seconds,
        low=float(least_together(least_ticks, sent).sum()) + overhead,
        high=float((most_ticks + sent).sum()) + overhead,
        flops=float(flops.mean(axis=1).sum()),
    )


def seconds_besides(config: PipelineConfig, model: MLLM, device: Device) -> float:
    """Seconds of a tick in addition to its operations: the cluster's `tick_seconds`, unless the
    config has `pipeline.flops_per_tick`: FLOPs that a stage's devices could do meanwhile. Like
    costs, these are FLOPs of one replica."""
    if not config.flops_per_tick:
        return device.cluster.tick_seconds
    layout = model.layout(LANGUAGE)
    devices = layout.mesh.size // (config.stages * layout.ranks)
    return config.flops_per_tick / (devices * device.peak * device.efficiency)


def _overlapped(device: Device, compute: Floats, sent: Floats) -> Floats:
    return np.vectorize(device.together, otypes=[float])(compute, sent)


def _slowest(device: Device, seconds: Floats) -> Floats:
    """Seconds of every tick, [T], in which all stages wait for the slowest."""
    return np.array([device.slowest(tick.tolist()) for tick in seconds])


class _Operations:
    """The operations of one chain, and what they take."""

    def __init__(self, programs: StagedPrograms, number: int, device: Device, network: Network):
        pipeline = programs.sizes.training
        model = programs.functions.model
        self.number = number
        self.chain: Chain = pipeline.tables.ring.chains[number]
        self.phase = self.chain.name
        self.costs = pipeline.costs[self.phase]
        self.shapes = getattr(model.config, self.phase)
        self.device = device
        self.network = network
        self.layout = model.layout(self.phase)
        self.itemsize = model.components[self.phase].dtype.itemsize
        # Devices that split each layer, and those that split the slots of a rank
        self.inner = devices_along(self.layout, self.layout.mesh_axes("mlp"))
        self.parts = devices_along(self.layout, self.layout.part_axes)
        self.classes = programs.spec.phases[self.phase].classes
        self.model = model
        self.resolved = resolved_model(programs)
        self.key_values = model.key_value_bytes(self.phase) / self.shapes.layers
        self.drawing = drawing_of(model.config, self.phase)
        self.segments = programs.spec.phases[self.phase].max_segments
        parameters = model.abstract(programs.param_dtype)
        self.leaves = {
            component: list(leaves(parameters[component], model.components[component]))
            for component in model.phases[self.phase].components
        }

    def ticks(
        self, columns: Mapping[str, Ints], squares: Floats, shapes: Sequence[RowClass]
    ) -> Floats:
        """Seconds of computing, of collectives inside of layers and of weights, and FLOPs, of every
        stage in every tick: [4, T, S].

        Args:
          columns: of the run's table by name, [T, S] each.
          squares: sums of attention's squares in the rows of the run, [kinds, M].
          shapes: capacity and span of these rows, [M].
        """
        row_class = np.array([self.classes.index(shape) for shape in shapes], np.intp)
        of_parts = np.stack(self._operation_parts(squares, row_class))  # [4, part, D, M]
        done = np.zeros((4, *columns["action"].shape))
        for kind, gradients in GRADIENTS.items():
            # Each pair (tick, stage) occurs once, or `+=` at these places would add only the last.
            tick, stage = np.nonzero(columns["action"] == action_of(self.number, kind))
            chunk, row, residual, loss = (
                columns[name][tick, stage]
                for name in ("chunk", "microbatch", "read_residual", "count_loss")
            )
            depth = self._chunk_depths[stage, chunk]
            for part in gradients:
                done[:, tick, stage] += of_parts[:, part, depth, row]
            # A backward operation that counts the loss contains its forward operation. Any other
            # input gradient runs its chunk forward again unless it reads a kept residual.
            forward = (loss > 0) | (kind == Kind.FORWARD)
            again = (residual < 0) & ~forward & (kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT))
            done[:, tick, stage] += of_parts[:, FORWARD, depth, row] * forward
            done[:, tick, stage] += of_parts[:, AGAIN, depth, row] * again
        return done

    @cached_property
    def _chunk_depths(self) -> Ints:
        """Place of each chunk in the chain, by stage and number of the chunk there."""
        depths = np.zeros((max(self.chain.stages) + 1, self.chain.chunks_per_rank), np.int32)
        for depth, stage in enumerate(self.chain.stages):
            depths[stage, self.chain.local(depth)] = depth
        return depths

    def _operation_parts(
        self, squares: Floats, row_class: NDArray[np.intp]
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Seconds of computing, of collectives inside of layers and of weights, and FLOPs, of the
        parts of operations: what `ticks` adds up."""
        # Arrays are [4, D, M], by part, chunk of the chain and row, or broadcast to that.
        shares = self.parts * self.inner
        products = np.moveaxis(self.costs.linear[row_class], 0, -1) / shares
        filled = squares / self.costs.capacity**2
        pairs = np.tensordot(self.costs.attention, filled, (0, 0)) / shares
        happens = (products + pairs) > 0  # frozen chunks lack some parts
        layers = np.array(self.chain.layers)[None, :, None]
        width = self.shapes.width / self.inner
        rates = np.array([self._product_rate(row_class, width) for row_class in self.classes])
        traffic = np.stack([self._traffic(row_class) for row_class in self.classes], axis=1)
        moved = self.device.memory_seconds(1.0) * traffic[:, None, row_class] * layers
        compute = products / rates[row_class] + pairs / self.device.attention_rate + moved
        for part, passes in ((FORWARD, (1, 0)), (INPUT, (0, 1)), (AGAIN, (1, 0))):
            modulated = np.array([self._modulation(shape, *passes) for shape in self.classes])
            compute[part] += modulated[row_class] * layers[0]
        inside = np.array([self._inside_seconds(part) for part in range(4)])
        return (
            compute * happens,
            inside[:, None, row_class] * layers * happens,
            self._weight_seconds(layers) * happens,
            products + pairs,
        )

    def _inside_seconds(self, part: int) -> list[float]:
        """Seconds of the collectives inside of one layer, by row class."""
        return [self.network.seconds(self._layer_sends(part, shape)) for shape in self.classes]

    def _row_tokens(self, row_class: RowClass) -> float:
        """Attention tokens of a row on a device."""
        return self._row_slots(row_class) / self.shapes.stem_stride

    def _row_slots(self, row_class: RowClass) -> float:
        return row_class.capacity / self.parts

    def _modulation(self, row_class: RowClass, forward: int, backward: int) -> float:
        """Seconds that the modulation of one layer of a generator takes in so many passes.
        Conditions are few and not counted."""
        if self.drawing is None:
            return 0.0
        of_row = self._row_slots(row_class), self.segments, 0.0
        flops = self.drawing.modulation(*of_row, forward, backward)
        return flops / self.shapes.layers / (self.device.wide_peak * self.device.efficiency)

    def _row_mixture(self, row_class: RowClass) -> Mixture | None:
        """The experts of a layer; none where its MLP has none."""
        tokens = self._row_tokens(row_class)
        return mixture_of(self.model.spanned(self.phase, row_class.span), self.phase, tokens)

    def _product_rate(self, row_class: RowClass, width: float) -> float:
        """FLOP/s of the products of a layer."""
        slots = self._row_slots(row_class)
        mixture = self._row_mixture(row_class)
        if mixture is None:
            return self.device.product_rate(slots, width)
        layers = phase_layers(self.resolved, self.phase)
        layer_flops = max(layer.linear(1) for layer in layers if any(layer.attention_squares))
        return mixture.product_rate(self.device, slots, width, mixture.forward_flops / layer_flops)

    def _traffic(self, row_class: RowClass) -> Floats:
        """Bytes that one layer moves through memory, by part: [4]."""
        tokens = self._row_tokens(row_class)
        mixture = self._row_mixture(row_class)
        mlp_widths = self.shapes.mlp_matrices * self.shapes.mlp_width if mixture is None else 0
        stored = stored_bytes(self.shapes.width, mlp_widths, self.inner)
        vector_bytes = 0.0
        if self.drawing is not None:
            stored += self.drawing.stored(self.inner)
            vector_bytes = self.drawing.stored_backward
        moved = tokens * stored * self.device.rates.traffic
        backward = moved + tokens * vector_bytes * self.device.rates.traffic
        summed = [
            leaf.size / leaf.stacked / leaf.split / devices_along(self.layout, leaf.gathered)
            for leaf in self.leaves[self.phase]
            if leaf.layer and self._is_trained(self.phase, leaf)
        ]
        part_bytes = np.array([moved, backward, moved + ACCUMULATED_BYTES * sum(summed), moved])
        if mixture is not None:
            # Gradients of matrices are computed with those of tokens; blocks do not run again
            trained = bool(summed)
            forward, backward = (mixture.block_traffic(*n, trained) for n in ((1, 0), (0, 1)))
            part_bytes += [forward, backward, 0, 0]
        return part_bytes

    def _weight_seconds(self, layers: Ints) -> Floats:
        """Seconds of gathering weights and scattering their gradients, [4, D, 1]: of layers, and of
        the parameters before and after them in the first and the last chunk. Tables that are looked
        up are not gathered."""
        seconds = np.zeros((4, layers.shape[1], 1))
        # Components of a phase are in the order of computation: a generator's projector comes
        # before its layers, all others after them.
        own = list(self.leaves).index(self.phase)
        for place, (component, held) in enumerate(self.leaves.items()):
            for leaf in held:
                sends = [self._send(component, leaf, part) for part in range(4)]
                of_leaf = np.array([self.network.seconds([send]) for send in sends])
                if leaf.layer:
                    seconds += of_leaf[:, None, None] * layers
                elif "embedding" not in leaf.path:
                    follows = place > own or "head" in leaf.path
                    seconds[:, -1 if follows else 0, 0] += of_leaf
        return seconds

    def _is_trained(self, component: str, leaf: Leaf) -> bool:
        return ".".join((component, *leaf.path)) in self.model.trainable.paths

    def _send(self, component: str, leaf: Leaf, part: int) -> Send:
        numbers = leaf.size / leaf.split / leaf.stacked
        devices = devices_along(self.layout, leaf.gathered)
        if part != WEIGHT:
            return Send(GATHER, leaf.gathered, devices, self.itemsize * numbers, 1)
        times = int(self._is_trained(component, leaf))
        return Send(SCATTER, leaf.gathered, devices, SUM_BYTES * numbers, times)

    def _layer_sends(self, part: int, row_class: RowClass) -> list[Send]:
        """Collectives that a layer waits for: keys and values of the other parts of a row, sums
        over devices that split the layer, and tokens that go to experts."""
        tokens = self._row_tokens(row_class)
        mixture = self._row_mixture(row_class)
        axes = self.layout.spanned(row_class.span).mesh_axes("sequence")
        holders = devices_along(self.layout, axes)
        keys = tokens * holders * self.key_values / self.layout.size("kv_heads")
        split = self.layout.mesh_axes("mlp")
        sums = {FORWARD: 2, AGAIN: 2, INPUT: 5 if self.phase == LANGUAGE else 3, WEIGHT: 0}[part]
        if part != WEIGHT:
            sums += getattr(self.shapes, "attentions", 1) - 1
        if mixture is not None:  # sums of attention alone; experts have their own
            sums = {FORWARD: 1, AGAIN: 1, INPUT: 3, WEIGHT: 0}[part]
        activations = tokens * self.shapes.width * self.itemsize
        sends = [Send(ALL_REDUCE, split, self.inner, activations, sums)]
        if part != WEIGHT:
            operation = SCATTER if part == INPUT else GATHER
            sends.append(Send(operation, axes, holders, keys, 1))
        if mixture is not None:
            sends += expert_sends(mixture, part == FORWARD, part == INPUT)
        return sends


def _edge_sends(programs: StagedPrograms) -> Iterator[list[Send]]:
    """The send that moves a row one place along the ring: for each wire, by row class."""
    tables = programs.sizes.training.tables
    model = programs.functions.model
    for wire in tables.wires:
        phase = tables.ring.chains[wire.chain].name
        spec = programs.spec.phases[phase]
        shapes = getattr(model.config, phase)
        # Tokens, states for a generator and their gradients travel as their reader takes them: in
        # the dtype of the decoder, and whole to every part of a row. All else travels as layers
        # carry it. A capacity is in slots, so either width is divided by the slots of a token.
        if wire.pool in (Pool.TOKENS, Pool.TOKEN_GRADIENT):
            slots = spec.slots_per_token
            width = shapes.width if phase == LANGUAGE else model.config.token_width
            itemsize = model.components[LANGUAGE].dtype.itemsize
        else:
            slots = shapes.stem_stride * model.layout(phase).parts
            width = shapes.width + model.config.carried_beside(phase)
            itemsize = model.components[phase].dtype.itemsize
        of_slot = width / slots * itemsize
        yield [
            Send(PERMUTE, (STAGE,), tables.ring.stages, capacity * of_slot, 1)
            for capacity in spec.capacities
        ]


def _work_once_per_run(programs: StagedPrograms, network: Network) -> Worked:
    """Seconds of what a run sends once."""
    stages = programs.sizes.training.tables.ring.stages
    seconds = once_seconds(
        programs.functions.model, programs.param_dtype, programs.trained, stages, network
    )
    return Worked({"replicas": seconds}, low=seconds, high=seconds)


def once_seconds(
    model: MLLM, param_dtype: str, trained: Container[str], stages: int, network: Network
) -> float:
    """Seconds of what a run sends once: parameters outside of the layers to all stages, and sums of
    gradients over stages and replicas.

    Args:
      trained: components with at least one trained parameter.
      network: of the mesh with stages.
    """
    number_bytes = np.dtype(param_dtype).itemsize
    gathers = []
    sums = []
    for component, tree in model.abstract(param_dtype).items():
        layout = model.layout(component)
        times = int(component in trained)
        for leaf in leaves(tree, model.components[component]):
            replicas = leaf.replicas
            copies = devices_along(layout, leaf.replicas)
            held = leaf.size / leaf.split / devices_along(layout, leaf.gathered)
            # Each stage has a share of the layers. Other parameters are split over the stages
            # between uses, and each stage has a gradient of the whole.
            if leaf.layer:
                sums.append(Send(ALL_REDUCE, replicas, copies, SUM_BYTES * held / stages, times))
            else:
                axes = (STAGE, *replicas)
                gathers.append(Send(GATHER, (STAGE,), stages, number_bytes * held, 1))
                sums.append(Send(ALL_REDUCE, axes, stages * copies, SUM_BYTES * held, times))
    return network.seconds(gathers) + network.seconds(sums)
