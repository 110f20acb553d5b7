"""The base of all kinds of programs: how they are compiled, their shapes, update and state.

    shapes --jobs--> Job by ProgramName --compile_jobs--> programs          once, before the first step
    state, batch --gradients (of each kind)--> gradients, sums --update--> state, metrics

Everything is compiled ahead of the first step, so that no step waits for a compiler and a program
that does not fit the devices is known at once. The jobs need only a mesh; its devices may be those
of a machine that is not present.
"""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jaxmllm.balance.exchange.tables import backend_of
from jaxmllm.balance.records import PlanSpec, shared_exchange
from jaxmllm.data.rows.fill import HostStep, LocalRanks
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.models.mixture import RouterSums
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat
from jaxmllm.runtime.compiler_options import compiler_options
from jaxmllm.training.averages import with_averages
from jaxmllm.training.objectives.flow import TIME_BANDS, FlowSums
from jaxmllm.training.objectives.routing import Routing
from jaxmllm.training.objectives.tokens import Sums
from jaxmllm.training.optimizer import make_optimizer
from jaxmllm.training.programs.transfer import local_ranks
from jaxmllm.training.step_functions import StepFunctions, TrainState
from sharding.by_platform import traced_for
from sharding.exchange import Exchange
from sharding.rules import Layout

COMPILE_THREADS = os.cpu_count()
NOTHING_KEPT: Mapping[str, int] = {}
TOKENS = f"{LANGUAGE}/tokens"  # key in a step's statistics


class ProgramName(NamedTuple):
    """The name of one compiled program of a run."""

    function: str  # what it computes: a method of `StepFunctions` or `Exchange`, or "zero"
    subject: str = ""  # phase that it computes for, or what it makes zeros of
    # Row class that it is compiled for, if there is one program for each class
    capacity: int = 0  # slots on each rank
    span: int = 1  # ranks that hold a row together


@dataclass(frozen=True)
class Job:
    """A program to compile: shapes and shardings of its arguments and result, and the numbers of
    the arguments that it may overwrite."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    result: Any  # tree of ShapeDtypeStruct
    donated: tuple[int, ...] = ()

    def lower(self) -> jax.stages.Lowered:
        """Trace the function."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.result)
        jitted = jax.jit(self.function, donate_argnums=self.donated, out_shardings=shardings)
        with traced_for(jax.tree.leaves(shardings)[0].mesh):
            return jitted.lower(*self.arguments)


Jobs = dict[ProgramName, Job]


def zeros_job(tree: Any) -> Job:
    """A program that makes zeros of these shapes, types and shardings."""
    return Job(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree), (), tree)


def compile_jobs(jobs: Jobs) -> dict[ProgramName, Compiled]:
    """The compiled programs, by name; compiled in threads."""
    # Tracing holds Python's lock, so it is done here, one job after another; compiling releases it.
    lowered = [job.lower() for job in jobs.values()]
    options = compiler_options(jax.default_backend())
    compile_lowered = partial(jax.stages.Lowered.compile, compiler_options=options)
    with ThreadPoolExecutor(COMPILE_THREADS) as threads:
        compiled = threads.map(compile_lowered, lowered)
        return dict(zip(jobs, compiled, strict=True))


class Evaluated(NamedTuple):
    """Totals over evaluation batches."""

    sums: Sums  # by rank and source
    failed: jax.Array  # media items that could not be decoded


class Programs(abc.ABC):
    """The programs of a run: `compile` them, then `put` a batch on the devices, `train` on it or
    `evaluate` it.

    `jobs`, the programs to compile by name, can be read before anything is compiled. Each kind of
    programs has its own type of batch, which `put` returns.
    """

    def __init__(
        self,
        functions: StepFunctions,
        spec: PlanSpec,
        formats: Mapping[str, RowFormat],
        attention: AttentionSpec,
        param_dtype: str,
        kept_residuals: Mapping[str, int] = NOTHING_KEPT,
    ):
        self.functions = functions
        self.spec = spec
        self.encoders = tuple(name for name, phase in spec.phases.items() if not phase.has_loss)
        self.generators = tuple(
            name for name, phase in spec.phases.items() if phase.phase.generates
        )
        self.layouts: dict[str, Layout] = {
            phase: functions.model.layout(phase) for phase in spec.phases
        }
        self.mesh = self.layouts[LANGUAGE].mesh
        self.exchange_owner = shared_exchange(spec.routes)  # by encoder or generator phase
        self.exchanges = {
            phase: Exchange(
                self.mesh,
                self.layouts[phase],
                self.layouts[LANGUAGE],
                backend_of(route).hop_on_device,
            )
            for phase, route in spec.routes.items()
        }
        self.attention = attention
        # Microbatches by phase. A frozen tower's features are kept in any case, and a phase without
        # gradients needs nothing.
        self.kept_residuals = {
            phase: microbatches
            for phase, microbatches in kept_residuals.items()
            if functions.may_keep_residuals(phase)
        }
        self.param_dtype = param_dtype
        self.formats = formats
        self.params = self._abstract_params()
        # Shapes of the trained parameters, and of their complete gradients
        self.trained, _ = functions.model.trainable.split(self.params)
        self._set_shapes()
        self.compiled: dict[ProgramName, Compiled] = {}

    @cached_property
    def state(self) -> TrainState:
        """Shapes, types and shardings of the state; made on first use, like the jobs, because that
        traces functions."""
        return self._abstract_state(self.params)

    @cached_property
    def jobs(self) -> Jobs:
        """All programs of the run."""
        return self._jobs(self.formats)

    @property
    def local_share(self) -> LocalRanks:
        """The ranks of every phase and exchange whose rows and tables this host supplies."""
        of_phases = {
            phase: local_ranks(layout.rows, layout.ranks) for phase, layout in self.layouts.items()
        }
        of_exchanges = {}
        for phase, exchange in self.exchanges.items():
            exchange_ranks = math.prod(self.spec.routes[phase].grid.shape)
            of_exchanges[phase] = local_ranks(exchange.tables, exchange_ranks)
        return LocalRanks(phases=of_phases, exchange=of_exchanges)

    # ------------------------------------------------------------------ running

    @abc.abstractmethod
    def init(self, seed: int) -> TrainState:
        """A fresh state on the mesh."""

    @abc.abstractmethod
    def put(self, batch: HostStep) -> Any:
        """Start the transfer of this host's share of a batch."""

    @abc.abstractmethod
    def gradients(
        self, params: Any, batch: Any, expert_counts: Any = None
    ) -> tuple[Any, Sums, jax.Array]:
        """Gradients of the mean loss over the batch's planned targets, by trainable component; the
        sums by rank and source; and the number of media items that could not be decoded.

        Args:
          expert_counts: with experts, `TrainState.expert_counts`; None stands for zeros.
        """

    @abc.abstractmethod
    def evaluate(self, params: Any, batch: Any, evaluated: Evaluated | None = None) -> Evaluated:
        """Add the totals of a batch to those of earlier batches (None: zeros)."""

    def train(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step. Nothing here waits for the devices."""
        gradients, sums, failed = self._uncounted_gradients(
            state.params, batch, state.expert_counts
        )
        return self._call("update")(state, gradients, sums, self._planned_targets(batch), failed)

    def _uncounted_gradients(
        self, params: Any, batch: Any, expert_counts: Any
    ) -> tuple[Any, Sums, Any]:
        """`gradients`, with undecodable items as `update` takes them: counts whose sum is their
        number."""
        return self.gradients(params, batch, expert_counts)

    def averaged(self, state: TrainState) -> Any:
        """Parameters to evaluate: running averages in place of the parameters that have them."""
        if state.averages is None:
            return state.params
        return with_averages(state.params, self._call("averaged")(state.averages))

    def totals(self, sums: Sums) -> Sums:
        """Sums over the ranks: [N], complete on every host."""
        return self._call("totals")(sums)

    @property
    def _failed_shapes(self) -> Any:
        """Shapes of the counts of undecodable items that `_uncounted_gradients` returns."""
        return self._scalar_shape(np.int32)

    @property
    def whole_gradient_bytes(self) -> Mapping[str, int]:
        """Bytes of gradient sums on a device, of each component that reduces them once per step."""
        return {}

    def save_schedule(self, batch: HostStep, path: Path) -> None:
        """Write a step's schedule, tick by tick, for `jaxmllm timeline`; nothing without stages."""
        return

    def describe_memory(self) -> list[str]:
        """Lines that say what devices hold while a step runs, in addition to the state; none
        without stages."""
        return []

    def route_metrics(self, statistics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a step's exchanges, from its plan statistics; none without an exchange."""
        return {}

    def _call(
        self, function: str, subject: str = "", capacity: int = 0, span: int = 1
    ) -> Callable[..., Any]:
        return self.compiled[ProgramName(function, subject, capacity, span)]

    def _zeros(self, subject: str) -> Any:
        return self._call("zero", subject)()

    def _nothing_evaluated(self) -> Evaluated:
        return Evaluated(self._zeros("sums"), self._zeros("failed"))

    def _planned_targets(self, batch: Any) -> np.ndarray:
        return np.asarray(batch.host.targets, self._real_dtype)

    def _loss_scale(self, weight: float, planned: int) -> np.ndarray:
        """Factor of a sum of losses whose mean over `planned` targets or patches has `weight`."""
        return np.asarray(weight, self._real_dtype) / np.asarray(max(planned, 1), self._real_dtype)

    def _routing_inputs(
        self, statistics: Mapping[str, float], counts: Any = None
    ) -> Routing | None:
        """Inputs of the router losses, given a step's plan statistics; None without experts."""
        shape = self.functions.routing_shape
        if shape is None:
            return None
        counts = np.zeros(shape, np.int32) if counts is None else counts
        return Routing(counts, np.asarray(statistics[TOKENS], self._real_dtype))

    # ------------------------------------------------------------------ checkpoints

    @property
    def saved_state(self) -> TrainState:
        """Shapes, types and shardings of the state as checkpoints hold it, on any mesh."""
        return self.state

    def to_saved(self, state: TrainState) -> TrainState:
        """The state as checkpoints hold it."""
        return state

    def from_saved(self, saved: TrainState) -> TrainState:
        """The inverse of `to_saved`."""
        return saved

    # ------------------------------------------------------------------ compiling

    def compile(self) -> Self:
        """Compile all jobs in threads, once, before anything runs. Returns self."""
        self.compiled = compile_jobs(self.jobs)
        return self

    @abc.abstractmethod
    def _jobs(self, formats: Mapping[str, RowFormat]) -> Jobs:
        """All programs of the run."""

    def _common_jobs(self, gradients: Any) -> Jobs:
        """Jobs of all kinds of programs: zeroed sums, their totals, the update by `gradients`, and
        the cast of averages to parameters."""
        sums = self._abstract_sums()
        failed = self._scalar_shape(np.int32)
        arguments = (self.state, gradients, sums, self._scalar_shape(), self._failed_shapes)
        metrics = jax.tree.map(
            lambda leaf: self._replicated_shape(leaf.shape, leaf.dtype),
            jax.eval_shape(self.functions.update, *arguments)[1],
        )
        totals = jax.tree.map(
            lambda leaf: self._replicated_shape(leaf.shape, leaf.dtype),
            jax.eval_shape(_sum_ranks, sums),
        )
        jobs = {
            ProgramName("zero", "sums"): zeros_job(sums),
            ProgramName("zero", "failed"): zeros_job(failed),
            ProgramName("totals"): Job(_sum_ranks, (sums,), totals),
            ProgramName("update"): Job(
                self.functions.update, arguments, (self.state, metrics), (0,)
            ),
        }
        averages = self.state.averages
        if averages is None:
            return jobs
        # Averages are at least float32, while programs are compiled for the type of parameters.
        averaged = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self.param_dtype, sharding=leaf.sharding),
            averages,
        )
        cast = Job(
            lambda tree: jax.tree.map(lambda leaf: leaf.astype(self.param_dtype), tree),
            (averages,),
            averaged,
        )
        return jobs | {ProgramName("averaged"): cast}

    # ------------------------------------------------------------------ shapes

    @abc.abstractmethod
    def _set_shapes(self) -> None:
        """Set the shapes, except those of the state, that jobs are described by."""

    def _abstract_params(self) -> Any:
        return self.functions.model.abstract(self.param_dtype)

    def _abstract_state(self, params: Any) -> TrainState:
        def replicated(leaf: Any) -> jax.ShapeDtypeStruct:
            return self._replicated_shape(leaf.shape, leaf.dtype)

        def placed_as(leaf: Any, like: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding)

        state = jax.eval_shape(self.functions.init, params)
        trained, _ = self.functions.model.trainable.split(params)
        # Moments are like their parameter in shape, type and sharding; counts are on all devices.
        optimizer = {
            name: optax.tree_utils.tree_map_params(
                make_optimizer(self.functions.optimizer),
                lambda _, parameter: parameter,
                component,
                trained[name],
                transform_non_params=replicated,
            )
            for name, component in state.optimizer.items()
        }
        averages = state.averages
        if averages is not None:  # sharded as the parameters are
            averaged = {name: trained[name] for name in averages}
            averages = jax.tree.map(placed_as, averages, averaged)
        counters = jax.tree.map(
            replicated, state._replace(params=None, optimizer=None, averages=None)
        )
        return counters._replace(params=params, optimizer=optimizer, averages=averages)

    def _abstract_sums(self) -> Sums:
        loss, count = self._abstract_loss_and_count(self.functions.sources, LANGUAGE)
        drawn = [self._abstract_drawn(phase) for phase in self.generators]
        return Sums(
            *(loss, count, count, count),
            drawn=drawn[0] if drawn else None,
            routed=self._abstract_routed(),
        )

    def _abstract_drawn(self, phase: str) -> FlowSums:
        return FlowSums(
            *self._abstract_loss_and_count(self.functions.sources, phase),
            *self._abstract_loss_and_count(TIME_BANDS, phase),
        )

    def _abstract_routed(self) -> RouterSums | None:
        if self.functions.routing_shape is None:
            return None
        layers, experts = self.functions.routing_shape
        layout = self.layouts[LANGUAGE]
        make = partial(jax.ShapeDtypeStruct, sharding=layout.rows)
        by_expert = (layout.ranks, layers, experts)
        return RouterSums(
            make(by_expert, np.int32),
            make(by_expert, self._real_dtype),
            make(by_expert[:2], self._real_dtype),
        )

    def _abstract_routing(self) -> Routing | None:
        shape = self.functions.routing_shape
        return shape and Routing(self._replicated_shape(shape, np.int32), self._scalar_shape())

    def _abstract_loss_and_count(self, groups: int, phase: str) -> Any:
        """Shapes of losses and of counts, both [R, groups]."""
        layout = self.layouts[phase]
        make = partial(jax.ShapeDtypeStruct, (layout.ranks, groups), sharding=layout.rows)
        return make(self._real_dtype), make(np.int32)

    @property
    def _real_dtype(self) -> Any:
        """Type of losses and sums: float32, or float64 if the parameters are float64."""
        return jnp.promote_types(self.param_dtype, np.float32)

    def _scalar_shape(self, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return self._replicated_shape((), dtype or self._real_dtype)

    def _replicated_shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, P()))


def _sum_ranks(sums: Sums) -> Sums:
    """Sums over the ranks. Those of text are cast to one type, so that devices communicate once."""
    wide = sums.loss.dtype
    sums = sums._replace(
        targets=sums.targets.astype(wide),
        exact=sums.exact.astype(wide),
        examples=sums.examples.astype(wide),
    )
    totals: Sums = jax.tree.map(lambda x: x.sum(0), sums)
    return totals
