"""The programs of a run whose layers are cut into pipeline stages; the loop uses them as all kinds.

    HostStep --put--> rows [M, R, ...] of each class, and schedule table, of every run
    state    --gradients: the executor, once per run--> gradients, sums --update--> state

Layers are stored as [S, K, L, ...]: K chunks of up to L layers on each stage. Other parameters
(embedding, head, projectors) and their optimizer states are split over the stages where they can
be; a run of the executor gathers them once and adds their gradients once. (A hand-written
psum_scatter over the stages would gather what the automatic axes split.) A schedule is data
(docs/pipelines.md), so the executor is compiled once for training and once for evaluation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey

from jaxmllm.balance.records import PipelineRun
from jaxmllm.balance.stages.plan import PipelineSpec
from jaxmllm.balance.stages.sizes import PipelineSizes
from jaxmllm.config.schema import ADAPTER
from jaxmllm.data.rows.fill import HostStep
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.models.model_component import LAYERS
from jaxmllm.models.rows import (
    EncoderRows,
    GeneratorRows,
    LanguageRows,
    abstract_encoder_rows,
    abstract_generator_rows,
    abstract_language_rows,
)
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat
from jaxmllm.trainable import Trainable
from jaxmllm.training.objectives.tokens import Sums
from jaxmllm.training.programs.base import Evaluated, Job, Jobs, ProgramName, Programs
from jaxmllm.training.programs.stage_functions import LossConstants, StageFunctions
from jaxmllm.training.programs.stage_layers import StageLayers
from jaxmllm.training.programs.transfer import local_ranks, put_ranks
from jaxmllm.training.step_functions import StepFunctions, TrainState
from sharding.parameters import kept_spec, row_axes
from sharding.pipeline.executor.carry import Held
from sharding.pipeline.executor.component import Inputs, ManualAxes, TableArrays
from sharding.pipeline.executor.executor import held_bytes, make_executor
from sharding.pipeline.graph import Pool
from sharding.pipeline.ring import STAGE
from sharding.pipeline.table_file import save_tables

NOTHING_TRAINED = Trainable(frozenset(), {})


@dataclass(frozen=True)
class StagedStep:
    """A `HostStep` on the devices: rows by phase, and the table, of each run of the executor."""

    host: HostStep
    runs: list[tuple[dict[str, Any], TableArrays]]


class StagedPrograms(Programs):
    """The programs of a model in pipeline stages."""

    def __init__(
        self,
        functions: StepFunctions,
        sizes: PipelineSizes,
        formats: Mapping[str, RowFormat],
        attention: AttentionSpec,
        param_dtype: str,
    ):
        self.sizes = sizes
        self.stage_layers = {
            chain.name: StageLayers.of(sizes.training.tables.ring.stages, chain)
            for chain in sizes.training.tables.ring.chains
        }
        super().__init__(functions, sizes.spec, formats, attention, param_dtype)

    # ------------------------------------------------------------------ running

    def init(self, seed: int) -> TrainState:
        """A fresh state on the mesh."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.saved_state.params)
        params = self._call("stage_params")(
            self.functions.model.init(seed, self.param_dtype, shardings),
        )
        return self._call("init")(params)

    def put(self, batch: HostStep) -> StagedStep:
        """Start the transfer of this host's rows and of the tables."""
        return StagedStep(
            batch,
            [(self._put_rows(batch, run), self._put_table(run)) for run in batch.runs],
        )

    def save_schedule(self, batch: HostStep, path: Path) -> None:
        """Write the tables of a step's runs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [run.table for run in batch.runs]
        save_tables(path, self.sizes.training.tables, rows, [run.wire_active for run in batch.runs])

    def gradients(
        self, params: Any, batch: StagedStep, expert_counts: Any = None
    ) -> tuple[Any, Sums, jax.Array]:
        """Gradients of the mean loss over the batch's planned targets, by trainable component; the
        sums by rank and source; and the number of media items that could not be decoded."""
        results = None
        for rows, table in batch.runs:
            run_results = self._call("gradients")(
                params,
                rows,
                table,
                self._loss_constants(batch.host, expert_counts),
            )
            results = run_results if results is None else self._call("add")(results, run_results)
        assert results is not None, "a batch has at least one run"
        return results

    def _loss_constants(self, host: HostStep, expert_counts: Any) -> LossConstants:
        objective = self.functions.objective
        drawn = None
        if self.generators:
            drawn = self._loss_scale(objective.diffusion.weight, host.patches)
        return LossConstants(
            self._loss_scale(objective.language.weight, host.targets),
            self._routing_inputs(host.statistics, expert_counts),
            drawn,
        )

    def evaluate(
        self,
        params: Any,
        batch: StagedStep,
        evaluated: Evaluated | None = None,
    ) -> Evaluated:
        """Add the totals of a batch to those of earlier batches (None: zeros)."""
        evaluated = evaluated or self._nothing_evaluated()
        for rows, table in batch.runs:
            evaluated = self._call("evaluate")(params, rows, table, evaluated)
        return evaluated

    # ------------------------------------------------------------------ memory

    @property
    def held(self) -> Held:
        """Bytes that a device holds from tick to tick while it runs a table of training, without
        the sums of gradients."""
        held: list[Held] = []
        rows = self.rows

        def record(params: Any, constants: LossConstants) -> None:
            stage_functions = self._stage_functions
            inputs = stage_functions.inputs(params, rows, constants, self.functions.model.trainable)
            held.append(
                held_bytes(
                    self.sizes.training.tables,
                    stage_functions.components(),
                    self.mesh,
                    inputs,
                    STAGE,
                    self._manual_axes(self.functions.model.trainable, self._abstract_constants()),
                )
            )

        # `inputs` computes with parameters, which are only shapes here, so `record` is traced. Its
        # result is not an array, and leaves through the list.
        jax.eval_shape(record, self.params, self._abstract_constants())
        return held[-1]

    @property
    def held_sums(self) -> int:
        """Bytes of the sums of gradients on a device, in at least float32."""
        trained, _ = self.functions.model.trainable.split(self._gathered_params())
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape))
            * jnp.promote_types(leaf.dtype, jnp.float32).itemsize
            for leaf in jax.tree.leaves(trained)
        )

    def describe_memory(self) -> list[str]:
        """Lines about the slots that this run's tables may fill, and the memory that they take."""
        held = self.held
        slots = sum(held.pools.values())
        boxes = sum(held.boxes.values()) + held.media
        lines = [
            f"stages: a device holds {_size_text(held.total + self.held_sums)} while it runs a table: "
            f"slots {_size_text(slots)}, boxes {_size_text(boxes)}, sums of gradients {_size_text(self.held_sums)}"
        ]
        for c, phase in enumerate(self.functions.model.phases):
            of_phase = []
            for (pool, chain), slot_count in held.slots.items():
                if chain == c:
                    # Both the count and the bytes include the slot unknown to tables.
                    slot_bytes = held.pools[pool, c] / slot_count
                    of_phase.append(f"{pool.words} {slot_count} x {_size_text(slot_bytes)}")
            backward = held.boxes.get((Pool.RESIDUAL, c))
            if backward is not None:
                of_phase.append(f"backward of a chunk {_size_text(backward)}")
            lines.append(f"stages, {phase}: {', '.join(of_phase)}")
        return lines

    # ------------------------------------------------------------------ checkpoints

    @property
    def saved_state(self) -> TrainState:
        """The state as without stages, each array also split over the stages where it can be."""
        params = self.functions.model.abstract(self.param_dtype)
        return self._abstract_state(jax.tree.map(self._split_over_stages, params))

    def to_saved(self, state: TrainState) -> TrainState:
        """The state with the layers of each component in one sequence, [layers, ...]."""
        return self._call("to_saved")(state)

    def from_saved(self, saved: TrainState) -> TrainState:
        """The state with the layers on their stages, [S, K, L, ...]."""
        return self._call("from_saved")(saved)

    def _map_layers(
        self,
        tree: Any,
        change: Callable[[StageLayers, Any], Any],
        change_other: Callable[[Any], Any] = lambda leaf: leaf,
    ) -> Any:
        """Apply `change` to the leaves of all stacked layers, anywhere in the tree, and
        `change_other` to all other leaves."""

        def visit(path: tuple[Any, ...], leaf: Any) -> Any:
            keys = [key.key for key in path if isinstance(key, DictKey)]
            for component, key in itertools.pairwise(
                keys,
            ):  # adjacent here, since an optimizer's own levels in between are no dicts
                phase = component.removeprefix(ADAPTER)
                if key == LAYERS and phase in self.stage_layers:
                    return change(self.stage_layers[phase], leaf)
            return change_other(leaf)

        return jax.tree.map_with_path(visit, tree)

    def staged(self, tree: Any) -> Any:
        """A tree like parameters, its layers moved to stages: [layers, ...] -> [S, K, L, ...]."""
        return self._map_layers(tree, lambda layers, leaf: layers.staged(leaf))

    def joined(self, tree: Any) -> Any:
        """The inverse of `staged`: [S, K, L, ...] -> [layers, ...]."""
        return self._map_layers(tree, lambda layers, leaf: layers.joined(leaf))

    def _split_over_stages(self, leaf: Any) -> Any:
        """The shape of an array, split also over the stages along an axis that allows it, if there
        is one: preferably an axis that nothing else splits."""
        spec: list[Any] = [*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec))]
        shard_shape = leaf.sharding.shard_shape(leaf.shape)
        stages = self.mesh.shape[STAGE]
        divisible = [axis for axis, size in enumerate(shard_shape) if size % stages == 0]
        if not divisible:
            return leaf
        axis = min(divisible, key=lambda axis: spec[axis] is not None)
        names = spec[axis] or ()
        # Innermost, so that a device's part is within its shard of the gathered array
        spec[axis] = (*((names,) if isinstance(names, str) else names), STAGE)
        sharding = NamedSharding(self.mesh, P(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    # ------------------------------------------------------------------ compiling

    def _set_shapes(self) -> None:
        self.rows = self._abstract_rows(self.formats)

    def _jobs(self, formats: Mapping[str, RowFormat]) -> Jobs:
        saved = self.saved_state
        sums = self._abstract_sums()
        failed: Any = self._scalar_shape(np.int32)
        results: Any = (self.trained, sums, failed)
        rows = self.rows
        evaluated: Any = Evaluated(sums, failed)
        table = self._abstract_table(self.sizes.training)
        return self._common_jobs(self.trained) | {
            ProgramName("gradients"): Job(
                self._gradients,
                (self.params, rows, table, self._abstract_constants()),
                results,
            ),
            ProgramName("add"): Job(
                partial(jax.tree.map, jnp.add),
                (results, results),
                results,
                (0,),
            ),
            ProgramName("evaluate"): Job(
                self._evaluate,
                (self.params, rows, table, evaluated),
                evaluated,
                (3,),
            ),
            ProgramName("init"): Job(self.functions.init, (self.params,), self.state, (0,)),
            ProgramName("stage_params"): Job(self.staged, (saved.params,), self.params),
            ProgramName("to_saved"): Job(self.joined, (self.state,), saved),
            ProgramName("from_saved"): Job(self.staged, (saved,), self.state),
        }

    def _gradients(
        self,
        params: Any,
        rows: Any,
        table: TableArrays,
        constants: LossConstants,
    ) -> tuple[Any, Sums, jax.Array]:
        stage_functions = self._stage_functions
        trainable = self.functions.model.trainable
        manual_axes = self._manual_axes(trainable, self._abstract_constants())
        executor = self._executor(self.sizes.training, stage_functions, manual_axes)
        out = executor(table, stage_functions.inputs(params, rows, constants, trainable))
        grads = stage_functions.gradients(out.layers, out.outer)
        trained, _ = self.functions.model.trainable.split(params)
        grads = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, trained)
        return grads, self._sums_by_rank(out.sums), _count_failed(rows, stage_functions)

    def _evaluate(
        self,
        params: Any,
        rows: Any,
        table: TableArrays,
        evaluated: Evaluated,
    ) -> Evaluated:
        stage_functions = self._stage_functions
        scale = jnp.ones((), evaluated.sums.loss.dtype)
        constants = LossConstants(scale, drawn_scale=scale if self.generators else None)
        manual_axes = self._manual_axes(
            NOTHING_TRAINED, self._abstract_constants()._replace(routing=None)
        )
        executor = self._executor(self.sizes.evaluation, stage_functions, manual_axes)
        out = executor(table, stage_functions.inputs(params, rows, constants, NOTHING_TRAINED))
        return jax.tree.map(
            jnp.add,
            evaluated,
            Evaluated(self._sums_by_rank(out.sums), _count_failed(rows, stage_functions)),
        )

    def _executor(
        self,
        pipeline: PipelineSpec,
        stage_functions: StageFunctions,
        manual: ManualAxes,
    ) -> Callable[[TableArrays, Inputs], Any]:
        return make_executor(
            pipeline.tables,
            stage_functions.components(),
            self.mesh,
            STAGE,
            manual,
        )

    @property
    def _stage_functions(self) -> StageFunctions:
        classes = {name: phase.classes for name, phase in self.spec.phases.items()}
        return StageFunctions(self.functions, self._row_axes, self.stage_layers, classes)

    def _sums_by_rank(self, by_component: tuple[Any, ...]) -> Sums:
        """Sums [N] over all ranks, by component, as `Sums` [R, N] with all on the first rank."""
        sums_by_phase = dict(zip(self.spec.phases, by_component, strict=True))
        ranks = self.layouts[LANGUAGE].ranks

        def by_rank(sums: Any) -> Any:
            return jax.tree.map(
                lambda total: jnp.zeros((ranks, *total.shape), total.dtype).at[0].set(total),
                sums,
            )

        if self.functions.learns_text:
            sums: Sums = by_rank(sums_by_phase[LANGUAGE])
        else:
            sums = jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._abstract_sums()
            )
        for phase in self.generators:
            sums = sums._replace(drawn=by_rank(sums_by_phase[phase]))
        return sums

    @property
    def _row_axes(self) -> tuple[str, ...]:
        """Mesh axes whose devices have different slots of the rows of some phase."""
        used = {axis for layout in self.layouts.values() for axis in row_axes(layout)}
        return tuple(axis for axis in self.mesh.axis_names if axis in used and axis != STAGE)

    def _manual_axes(self, trainable: Trainable, constants: LossConstants) -> ManualAxes:
        """How the executor's inputs are split over stages and axes of rows; `constants`: shapes."""
        axes = {STAGE, *self._row_axes}
        params = self._gathered_params()
        inputs = self._stage_functions.inputs(params, self.rows, constants, trainable)

        def spec(leaf: Any) -> P:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return kept_spec(leaf.sharding.spec, axes)
            return P(STAGE)  # arrays: layer numbers, and flags of windows

        specs: Any = jax.tree.map(spec, inputs)
        summed = [
            tuple(axis for axis in row_axes(self.layouts[phase]) if axis in axes)
            for phase in self.functions.model.phases
        ]
        return ManualAxes(self._row_axes, specs, tuple(summed))

    # ------------------------------------------------------------------ shapes

    def _abstract_params(self) -> Any:
        return self._map_layers(
            self._gathered_params(), lambda _, leaf: leaf, self._split_over_stages
        )

    def _gathered_params(self) -> Any:
        """Shapes of parameters as the executor uses them: on all stages, if outside the layers."""

        def staged(layers: StageLayers, leaf: Any) -> Any:
            spec = P(STAGE, None, None, *leaf.sharding.spec[1:])
            shape = (*layers.index.shape, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))

        return self._map_layers(self.functions.model.abstract(self.param_dtype), staged)

    def _abstract_constants(self) -> LossConstants:
        """Shapes of the constants of training."""
        drawn = self._scalar_shape() if self.generators else None
        return LossConstants(self._scalar_shape(), self._abstract_routing(), drawn)

    def _abstract_rows(self, formats: Mapping[str, RowFormat]) -> dict[str, Any]:
        rows: dict[str, Any] = {}
        for phase, spec in self.spec.phases.items():
            windows = phase in self.attention.windows
            row_counts = self.sizes.training.rows[phase]
            of_classes = []
            for row_class, row_count in zip(spec.classes, row_counts, strict=True):
                capacity, span = row_class
                layout = self.layouts[phase].spanned(span)
                block = self.attention.block(phase, row_class)
                row: Any
                max_segments = spec.max_segments
                if phase in self.generators:
                    crossed = phase in self.attention.crossed
                    of_media = formats[phase], block
                    row = abstract_generator_rows(
                        layout, capacity, max_segments, *of_media, crossed=crossed
                    )
                elif spec.has_loss:
                    row = abstract_language_rows(layout, capacity, max_segments, block, windows)
                else:
                    row = abstract_encoder_rows(layout, capacity, formats[phase], block, windows)
                # A program takes all rows of a run at once, stacked: as many as a run may have.
                of_classes.append(jax.tree.map(partial(_stacked_shape, row_count), row))
            rows[phase] = tuple(of_classes)
        return rows

    def _abstract_table(self, pipeline: PipelineSpec) -> TableArrays:
        tables = pipeline.tables
        shape: Any = (tables.ticks, tables.ring.stages, len(tables.columns))
        wire_active = self._replicated_shape((tables.ticks, len(tables.wires)), np.int32)
        arrays: Any = (
            self._replicated_shape(shape, np.int32),
            wire_active,
            self._scalar_shape(np.int32),
        )
        return TableArrays(*arrays)

    # ------------------------------------------------------------------ transfer

    def _put_rows(self, batch: HostStep, run: PipelineRun) -> dict[str, Any]:
        rows: dict[str, Any] = {}
        for phase, layout in self.layouts.items():
            kind: Any = EncoderRows if phase in self.encoders else LanguageRows
            if phase in self.generators:
                kind = GeneratorRows
            begin, microbatches = run.microbatches[phase]
            held = list(zip(batch.capacities[phase], batch.spans[phase], strict=True))
            of_classes = []
            classes = self.spec.phases[phase].classes
            for row_class, shapes in zip(classes, self.rows[phase], strict=True):
                spanned = layout.spanned(row_class.span)
                local = len(local_ranks(spanned.rows, spanned.groups))
                # The schedule numbers rows within their class, so they keep their order.
                filled = [
                    kind.of(dict(batch.rows[phase][m]))
                    for m in range(begin, begin + microbatches)
                    if held[m] == row_class
                ]
                put = partial(_put_stacked, local)
                of_classes.append(jax.tree.map(put, shapes, *filled))
            rows[phase] = tuple(of_classes)
        return rows

    def _put_table(self, run: PipelineRun) -> TableArrays:
        tables = self.sizes.training.tables
        everywhere = NamedSharding(self.mesh, P())

        def put(values: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(
                values.shape,
                everywhere,
                lambda index: values[index],
            )

        ticks = len(run.table)
        # The program takes tables with the shape of the longest one, and runs the first `ticks`.
        padding = ((0, tables.ticks - ticks), (0, 0))
        rows = np.pad(run.table, (*padding, (0, 0)))
        return TableArrays(
            put(rows),
            put(np.pad(run.wire_active, padding)),
            put(np.array(ticks, np.int32)),
        )


def _count_failed(rows: Mapping[str, Any], stage_functions: StageFunctions) -> jax.Array:
    """Media items of all rows that could not be decoded."""
    return sum(
        (
            of_class.failed.sum(dtype=jnp.int32)
            for phase in stage_functions.media
            for of_class in rows[phase]
        ),
        jnp.int32(0),
    )


def _put_stacked(local: int, leaf: Any, *microbatches: np.ndarray) -> jax.Array:
    """This host's microbatches [local, ...] as an array [M, R, ...], with zeros after the last."""
    max_microbatches, ranks, *row_shape = leaf.shape
    stack = np.zeros((max_microbatches, local, *row_shape), leaf.dtype)
    for index, microbatch in enumerate(microbatches):
        stack[index] = microbatch
    return put_ranks(stack, leaf.sharding, ranks, axis=1)


def _stacked_shape(count: int, leaf: Any) -> Any:
    """The shape of `count` arrays like `leaf`, stacked along a new first axis."""
    sharding = NamedSharding(leaf.sharding.mesh, P(None, *leaf.sharding.spec))
    return jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype, sharding=sharding)


def _size_text(count: float) -> str:
    """A number of bytes as text, in GB or MB."""
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
