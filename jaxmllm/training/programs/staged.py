"""The programs of a run whose layers are cut into pipeline stages; the loop uses them like any others.

    HostStep --put--> rows [M, R, ...] and schedule table of every run
    state    --gradients: the executor, once a run--> gradients, sums --update--> state

Layers lie as [S, K, L, ...], K chunks of up to L layers on each stage; other parameters are alike on all stages. A
schedule is data (docs/pipelines.md), so the executor is compiled once for training and once for evaluation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey
from jaxtyping import Array, Bool, Float

from jaxmllm.arrays import Ints
from jaxmllm.balance.records import PipelineRun
from jaxmllm.balance.stages.plan import PipelineSpec
from jaxmllm.balance.stages.sizes import PipelineSizes
from jaxmllm.data.rows.fill import HostStep
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.models.mllm import MLLM
from jaxmllm.models.rows import EncoderRows, LanguageRows, TokenPool, abstract_encoder_rows, abstract_language_rows
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat
from jaxmllm.trainable import Trainable, join
from jaxmllm.training.objectives.tokens import Sums
from jaxmllm.training.programs.base import Evaluated, Job, Jobs, ProgramName, Programs
from jaxmllm.training.programs.transfer import local_ranks, put_ranks
from jaxmllm.training.step_functions import StepFunctions, TrainState
from sharding.pipeline.executor.component import Component, Inputs, TableArrays
from sharding.pipeline.executor.executor import make_executor
from sharding.pipeline.executor.gradient import Params
from sharding.pipeline.ring import Chain
from sharding.pools import take_rows

STAGE = "stage"
NOTHING_TRAINED = Trainable(frozenset(), {})
LAYERS = "layers"  # name of the stacked layers among a tower's parameters


@dataclass(frozen=True)
class StagedStep:
    """A `HostStep` on the devices: rows by phase and table of every run of the executor."""

    host: HostStep
    runs: list[tuple[dict[str, Any], TableArrays]]


class StagedPrograms(Programs):
    """`Programs` of a model in stages."""

    def __init__(
        self,
        functions: StepFunctions,
        sizes: PipelineSizes,
        formats: Mapping[str, RowFormat],
        attention: AttentionSpec,
        param_dtype: str,
    ):
        self.sizes = sizes
        self.stages = {
            chain.name: ChainStages.of(sizes.training.tables.ring.stages, chain)
            for chain in sizes.training.tables.ring.chains
        }
        super().__init__(functions, sizes.spec, formats, attention, param_dtype)

    # ------------------------------------------------------------------ running

    def init(self, seed: int) -> TrainState:
        """A fresh state on the mesh."""
        places = jax.tree.map(lambda leaf: leaf.sharding, self.saved_state.params)
        params = self._call("stage_params")(self.functions.model.init(seed, self.param_dtype, places))
        return self._call("init")(params)

    def put(self, batch: HostStep) -> StagedStep:
        """Start the transfer of this host's rows and of the tables."""
        return StagedStep(batch, [(self._put_rows(batch, run), self._put_table(run)) for run in batch.runs])

    def gradients(self, params: Any, batch: StagedStep) -> tuple[Any, Sums, jax.Array]:
        """Gradients of the mean loss over the batch's planned targets, by trainable component; the sums by rank and
        source; and the number of media items that could not be decoded."""
        results = None
        for rows, table in batch.runs:
            found = self._call("gradients")(params, rows, table, 1 / self._planned_targets(batch))
            results = found if results is None else self._call("add")(results, found)
        assert results is not None, "a batch has at least one run"
        return results

    def evaluate(self, params: Any, batch: StagedStep, evaluated: Evaluated | None = None) -> Evaluated:
        """Add what a batch comes to, to what others came to (none: zero)."""
        evaluated = evaluated or self._nothing_evaluated()
        for rows, table in batch.runs:
            evaluated = self._call("evaluate")(params, rows, table, evaluated)
        return evaluated

    # ------------------------------------------------------------------ checkpoints

    @property
    def saved_state(self) -> TrainState:
        """As without stages, each array split over them where it can be."""
        return self._abstract_state(self._over_stages(self.functions.model.abstract(self.param_dtype)))

    def to_saved(self, state: TrainState) -> TrainState:
        """The state with the layers of a component one behind another."""
        return self._call("to_saved")(state)

    def from_saved(self, saved: TrainState) -> TrainState:
        """The state with the layers on their stages."""
        return self._call("from_saved")(saved)

    def _on_layers(self, tree: Any, change: Callable[[ChainStages, Any], Any]) -> Any:
        """Change the leaves of all stacked layers, wherever in the tree these are."""

        def visit(path: tuple[Any, ...], leaf: Any) -> Any:
            keys = [key.key for key in path if isinstance(key, DictKey)]
            for component, key in itertools.pairwise(keys):  # an optimizer's own levels lie between the two
                if key == LAYERS and component in self.stages:
                    return change(self.stages[component], leaf)
            return leaf

        return jax.tree.map_with_path(visit, tree)

    def staged(self, tree: Any) -> Any:
        """A tree like parameters, with layers one behind another -> on their stages."""
        return self._on_layers(tree, lambda stages, leaf: stages.staged(leaf))

    def joined(self, tree: Any) -> Any:
        """A tree like parameters, with layers on their stages -> one behind another."""
        return self._on_layers(tree, lambda stages, leaf: stages.whole(leaf))

    def _over_stages(self, params: Any) -> Any:
        """Shapes of layers one behind another, split over the stages along the first axis that allows it."""

        def split(stages: ChainStages, leaf: Any) -> Any:
            spec = [*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec))]
            free = [
                axis for axis, size in enumerate(leaf.shape) if spec[axis] is None and size % stages.index.shape[0] == 0
            ]
            if free:
                spec[free[0]] = STAGE
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, P(*spec)))

        return self._on_layers(params, split)

    # ------------------------------------------------------------------ compiling

    def _jobs(self, formats: Mapping[str, RowFormat]) -> Jobs:
        saved = self.saved_state
        found: Any = (self.trained, self._abstract_sums(), self._scalar(np.int32))
        rows = self.rows = self._abstract_rows(formats)
        evaluated: Any = Evaluated(found[1], found[2])
        table = self._abstract_table(self.sizes.training)
        return self._common_jobs(self.trained) | {
            ProgramName("gradients"): Job(self._gradients, (self.params, rows, table, self._scalar()), found),
            ProgramName("add"): Job(partial(jax.tree.map, jnp.add), (found, found), found, (0,)),
            ProgramName("evaluate"): Job(self._evaluate, (self.params, rows, table, evaluated), evaluated, (3,)),
            ProgramName("init"): Job(self.functions.init, (self.params,), self.state, (0,)),
            ProgramName("stage_params"): Job(self.staged, (saved.params,), self.params),
            ProgramName("to_saved"): Job(self.joined, (self.state,), saved),
            ProgramName("from_saved"): Job(self.staged, (saved,), self.state),
        }

    def _gradients(self, params: Any, rows: Any, table: TableArrays, scale: jax.Array) -> tuple[Any, Sums, jax.Array]:
        pieces = Pieces(self.functions, self.replicas, self.stages)
        executor = self._executor(self.sizes.training, pieces)
        out = executor(table, pieces.inputs(params, rows, scale, self.functions.model.trainable))
        grads = pieces.gradients(out.layers, out.outer)
        trained, _ = self.functions.model.trainable.split(params)
        grads = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, trained)
        return grads, self._by_rank(out.sums), _failed(rows, pieces)

    def _evaluate(self, params: Any, rows: Any, table: TableArrays, found: Evaluated) -> Evaluated:
        pieces = Pieces(self.functions, self.replicas, self.stages)
        executor = self._executor(self.sizes.evaluation, pieces)
        one = jnp.ones((), found.sums.loss.dtype)
        out = executor(table, pieces.inputs(params, rows, one, NOTHING_TRAINED))
        return jax.tree.map(jnp.add, found, Evaluated(self._by_rank(out.sums), _failed(rows, pieces)))

    def _executor(self, pipeline: PipelineSpec, pieces: Pieces) -> Callable[[TableArrays, Inputs], Any]:
        assert isinstance(self.mesh, Mesh)
        return make_executor(pipeline.tables, pieces.components(), self.mesh, STAGE, self.replicas)

    def _by_rank(self, sums: Sums) -> Sums:
        """Sums [N] of all ranks as those of the first of R."""
        ranks = self.layouts[LANGUAGE].ranks
        return jax.tree.map(lambda total: jnp.zeros((ranks, *total.shape), total.dtype).at[0].set(total), sums)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Axes of replicas that share whole parameters: their gradients are added once a step."""
        model = self.functions.model
        used = {
            axis
            for component in model.components.values()
            for name, axes in component.layout.rules
            for axis in axes
            if name != "batch"
        }
        return tuple(axis for axis in self.layouts[LANGUAGE].batch_axes if axis not in used)

    # ------------------------------------------------------------------ shapes

    def _abstract_params(self) -> Any:
        def staged(stages: ChainStages, leaf: Any) -> Any:
            spec = P(STAGE, None, None, *leaf.sharding.spec[1:])
            shape = (*stages.index.shape, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))

        return self._on_layers(self.functions.model.abstract(self.param_dtype), staged)

    def _abstract_rows(self, formats: Mapping[str, RowFormat]) -> dict[str, Any]:
        rows: dict[str, Any] = {}
        for phase, spec in self.spec.phases.items():
            layout, capacity = self.layouts[phase], spec.capacities[0]
            block = self.attention.blocks[phase]
            windows = phase in self.attention.windows
            one: Any
            if spec.has_loss:
                one = abstract_language_rows(layout, capacity, spec.max_segments, block, windows)
            else:
                one = abstract_encoder_rows(layout, capacity, formats[phase], block, windows)
            rows[phase] = jax.tree.map(partial(self._stacked, phase), one)
        return rows

    def _stacked(self, phase: str, leaf: Any) -> Any:
        shape = (self.sizes.training.rows[phase], *leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=_behind(leaf.sharding))

    def _abstract_table(self, pipeline: PipelineSpec) -> TableArrays:
        tables = pipeline.tables
        shape: Any = (tables.ticks, tables.ring.stages, len(tables.columns))
        wire_active = self._replicated((tables.ticks, len(tables.wires)), np.int32)
        found: Any = (self._replicated(shape, np.int32), wire_active, self._scalar(np.int32))
        return TableArrays(*found)

    # ------------------------------------------------------------------ transfer

    def _put_rows(self, batch: HostStep, run: PipelineRun) -> dict[str, Any]:
        rows: dict[str, Any] = {}
        for phase, layout in self.layouts.items():
            kind: Any = LanguageRows if self.functions.model.phases[phase].has_loss else EncoderRows
            first, count = run.microbatches[phase]
            made = [kind.of(dict(row)) for row in batch.rows[phase][first : first + count]]
            local = len(local_ranks(layout.rows, layout.ranks))
            rows[phase] = jax.tree.map(partial(_put_stacked, local), self.rows[phase], *made)
        return rows

    def _put_table(self, run: PipelineRun) -> TableArrays:
        tables = self.sizes.training.tables
        everywhere = NamedSharding(self.mesh, P())

        def put(values: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(values.shape, everywhere, lambda index: values[index])

        count = len(run.table)
        padding = ((0, tables.ticks - count), (0, 0))
        rows = np.pad(run.table, (*padding, (0, 0)))
        return TableArrays(put(rows), put(np.pad(run.wire_active, padding)), put(np.array(count, np.int32)))


def _failed(rows: Mapping[str, Any], pieces: Pieces) -> jax.Array:
    """Media items of all encoder rows that could not be decoded."""
    return sum((rows[phase].failed.sum(dtype=jnp.int32) for phase in pieces.encoders), jnp.int32(0))


def _put_stacked(local: int, leaf: Any, *parts: np.ndarray) -> jax.Array:
    """Rows [local, ...] of this host as [M, R, ...], zero beyond those given."""
    most, ranks, *rest = leaf.shape
    whole = np.zeros((most, local, *rest), leaf.dtype)
    for number, part in enumerate(parts):
        whole[number] = part
    return put_ranks(whole, leaf.sharding, ranks, axis=1)


def _behind(sharding: NamedSharding) -> NamedSharding:
    """Of such arrays stacked along a new first axis."""
    return NamedSharding(sharding.mesh, P(None, *sharding.spec))


# ---------------------------------------------------------------------------- stages


@dataclass(frozen=True)
class ChainStages:
    """Where the layers of one component lie: `index` [S, K, L] is the number of a layer, -1 where there is none."""

    index: Ints

    @staticmethod
    def of(stages: int, chain: Chain) -> ChainStages:
        index = np.full((stages, chain.chunks_per_rank, max(1, *chain.layers)), -1, np.int32)
        first = 0
        for depth, (stage, count) in enumerate(zip(chain.stages, chain.layers, strict=True)):
            index[stage, chain.local(depth), :count] = np.arange(first, first + count)
            first += count
        return ChainStages(index)

    def staged(self, leaf: jax.Array) -> jax.Array:
        """[layers, ...] -> [S, K, L, ...], zero where there is no layer."""
        taken = jnp.take(leaf, np.maximum(self.index, 0), axis=0)
        there = (self.index >= 0).reshape(*self.index.shape, *(1,) * (leaf.ndim - 1))
        return jnp.where(there, taken, 0)

    def whole(self, leaf: jax.Array) -> jax.Array:
        """[S, K, L, ...] -> [layers, ...]"""
        flat = self.index.reshape(-1)
        places = np.flatnonzero(flat >= 0)[np.argsort(flat[flat >= 0])]
        return jnp.take(leaf.reshape(-1, *leaf.shape[3:]), places, axis=0)


# ---------------------------------------------------------------------------- the model in pieces


class Activation(NamedTuple):
    """What goes from one chunk of the decoder to the next."""

    hidden: Float[Array, "R C D"]
    valid: Float[Array, "R C"]  # 0 where a media token could not be computed


class Pieces:
    """A step's mathematics as components of the executor, for code inside manual axes: stages and `replicas`."""

    def __init__(self, functions: StepFunctions, replicas: tuple[str, ...], stages: Mapping[str, ChainStages]):
        model = functions.model
        self.stages = stages
        parts = {
            name: replace(part, layout=part.layout.inside(STAGE, *replicas)) for name, part in model.components.items()
        }
        self.functions = replace(functions, model=replace(model, components=parts))
        self.encoders = model.config.encoders

    @property
    def model(self) -> MLLM:
        return self.functions.model

    def components(self) -> tuple[Component, ...]:
        """Encoders in model order, then language."""
        return (*map(self._encoder, self.encoders), self._language())

    def inputs(self, params: Any, rows: Mapping[str, Any], scale: jax.Array, trainable: Trainable) -> Inputs:
        """Staged parameters and rows as the executor takes them; `scale` is what losses are multiplied by."""
        layers, outer = [], []
        for phase in self.model.phases:
            trained, frozen = trainable.split({name: params[name] for name in self.model.phases[phase].components})
            layers.append(Params(_layers_of(trained, phase), (_layers_of(frozen, phase), self._windowed(phase))))
            outer.append(Params(_without_layers(trained), (_without_layers(frozen), scale)))
        return Inputs(tuple(layers), tuple(outer), tuple(rows[phase] for phase in self.model.phases))

    def _windowed(self, phase: str) -> Bool[Array, "S K L"] | None:
        """Which layers of a phase attend in windows, where any do: a part of their frozen parameters."""
        windows = self.model.config.windows
        if phase not in windows:
            return None
        return self.stages[phase].staged(jnp.array(windows[phase].windowed)).astype(bool)

    def gradients(self, layers: tuple[Any, ...], outer: tuple[Any, ...]) -> dict[str, Any]:
        """The executor's gradients by trained component."""
        found: dict[str, Any] = {}
        for phase, stack, others in zip(self.model.phases, layers, outer, strict=True):
            for name, part in others.items():
                found[name] = part | ({LAYERS: stack} if name == phase and stack else {})
        return found

    def _encoder(self, phase: str) -> Component:
        layout, dtype = self.model.layout(phase), self.model.components[LANGUAGE].dtype

        def first(outer: Params, rows: EncoderRows, media: Any) -> Array:
            return self.model.stem(_all(outer), phase, rows)

        def layer(params: Params, x: Array, rows: EncoderRows) -> Array:
            frozen, windowed = params.frozen
            return self.model.layer(phase, join(params.trained, frozen), x, rows, windowed)

        def last(outer: Params, x: Array, rows: EncoderRows) -> TokenPool:
            params = _all(outer)
            tokens = self.model.project(params, phase, self.model.normed(params, phase, x), rows.places)
            return TokenPool(tokens.astype(dtype), rows.valid.astype(jnp.float32))

        return Component(first, layer, last, layout.spec(("batch", "sequence")), layout.spec(("batch",)))

    def _language(self) -> Component:
        layout, component = self.model.layout(LANGUAGE), self.model.components[LANGUAGE]

        def first(outer: Params, rows: LanguageRows, media: tuple[TokenPool, ...]) -> Activation:
            if media:
                pools = [jax.tree.map(_end_to_end, each) for each in media]
                pool = TokenPool(*(jnp.concatenate(parts, axis=1) for parts in zip(*pools, strict=True)))
                arrived = TokenPool(*(take_rows(layout, leaf, rows.media) for leaf in pool))
            else:
                ranks, slots = rows.tokens.shape
                width = self.model.config.language.width
                arrived = TokenPool(jnp.zeros((ranks, slots, width), component.dtype), jnp.zeros((ranks, slots)))
            return Activation(self.model.embed(_all(outer), rows, arrived.tokens), arrived.valid)

        def layer(params: Params, x: Activation, rows: LanguageRows) -> Activation:
            frozen, windowed = params.frozen
            hidden = self.model.layer(LANGUAGE, join(params.trained, frozen), x.hidden, rows, windowed)
            return x._replace(hidden=hidden)

        def last(outer: Params, x: Activation, rows: LanguageRows) -> tuple[Array, Sums]:
            params, scale = _all(outer), outer.frozen[1]
            hidden = self.model.normed(params, LANGUAGE, x.hidden)
            total, sums = self.functions.losses(hidden, self.model.head(params), rows, x.valid)
            return (total * scale).astype(jnp.float32), jax.tree.map(lambda of_ranks: of_ranks.sum(0), sums)

        return Component(first, layer, last, layout.spec(("batch", "sequence")))


def _layers_of(params: dict[str, Any], phase: str) -> Any:
    """The stacked layers of a phase, or as much of them as there is."""
    return params.get(phase, {}).get(LAYERS, {})


def _without_layers(params: dict[str, Any]) -> dict[str, Any]:
    return {name: {key: part for key, part in tree.items() if key != LAYERS} for name, tree in params.items()}


def _all(outer: Params) -> dict[str, Any]:
    """Parameters outside the layers, by component."""
    params: dict[str, Any] = join(outer.trained, outer.frozen[0])
    return params


def _end_to_end(tokens: jax.Array) -> jax.Array:
    """[fan, R, T, ...] -> [R, fan * T, ...]"""
    return jnp.moveaxis(tokens, 0, 1).reshape(tokens.shape[1], -1, *tokens.shape[3:])
