"""Programs of single microbatches that the host calls: a generator's, and what all phases share.

    language pools --language_states x M--> the same pools with states
        --(hop x hops; deliver) x rounds--> generator pools
        --draw_loss_and_grad x M--> each state replaced by its gradient
        --(hop_back x hops; deliver_back) x rounds--> gradients for language_loss_and_grad

The decoder runs forward to compute the states, and backward once their gradients have arrived: from
kept residuals for as many microbatches as memory allows; the others run forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np

from jaxmllm.balance.records import RowClass
from jaxmllm.data.rows.fill import HostStep
from jaxmllm.models.rows import GeneratorRows, TokenPool, abstract_generator_rows
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat
from jaxmllm.training.generator_functions import GeneratorFunctions
from jaxmllm.training.objectives.flow import FlowSums
from jaxmllm.training.programs.base import Job, Jobs, ProgramName, Programs, zeros_job
from jaxmllm.training.programs.exchange_programs import DeviceTables, ExchangePrograms
from jaxmllm.training.programs.phase_functions import PhaseFunctions, phase_functions
from jaxmllm.training.step_functions import (
    KeptFeatures,
    KeptResiduals,
    Start,
    StepFunctions,
    sum_of_counts,
)
from sharding.parameters import map_rows
from sharding.rules import Layout

COUNT_FAILED: Final = "count_failed"  # the program that adds the counts of all ranks
Failed = dict[str, Any]  # counts [R] of items that could not be decoded, by phase and rank


@dataclass(frozen=True)
class DeviceStep:
    """A `HostStep` whose arrays are on the devices."""

    host: HostStep
    rows: dict[str, list[Any]]  # EncoderRows, LanguageRows, GeneratorRows: by phase and microbatch
    tables: dict[str, list[DeviceTables]]  # by phase that owns an exchange, and round


class GeneratorPrograms(Programs):
    """Programs whose steps consist of microbatches, pools and exchange rounds: the part for
    generators, and what all phases share."""

    pools: dict[str, TokenPool]  # shapes, by owner of an exchange, and the decoder's
    accumulators: Any  # shapes of the sums of gradients
    _exchange_programs: dict[str, ExchangePrograms]  # by owner

    def _draw(
        self,
        params: Any,
        batch: DeviceStep,
        language_pools: list[TokenPool],
        gradients: Any,
        drawn: FlowSums | None,
        failed: Failed,
    ) -> tuple[Any, FlowSums | None, list[Start], list[jax.Array]]:
        """Run the decoder forward, then all generators forward and backward.

        Returns `gradients` and `drawn` plus those of generators; the start of the decoder's
        backward pass, by microbatch; and gradients of the states that generators read, by language
        pool, or none if they would train nothing. Adds the undecodable items to `failed`.
        """
        host = batch.host
        states, starts = self._states(params, batch, language_pools, backward=True)
        scale = self._loss_scale(self.functions.objective.diffusion.weight, host.patches)
        for phase in self.generators:
            pools = states[self.exchange_owner[phase]]
            phase_params = self._params_of(params, phase)
            phase_grads = self._grads_of(gradients, phase)
            for m, rows in enumerate(batch.rows[phase]):
                pool = host.pools[phase][m]
                pool_offset = np.int32(host.pool_offsets[phase][m])
                program = self._microbatch_program("draw_loss_and_grad", phase, host, m)
                # If states have gradients, each replaces its state, which no other microbatch
                # reads. So the rounds below carry gradients.
                pools[pool], phase_grads, drawn, failed[phase] = program(
                    *(phase_params, rows, pools[pool], pool_offset),
                    *(scale, phase_grads, drawn, failed[phase]),
                )
            gradients |= phase_grads
        if not self.functions.trains_states:
            return gradients, drawn, starts, []
        d_states = [self._zeros(f"d_{LANGUAGE}") for _ in language_pools]
        # Rounds name pools from the encoders' side, see `_states`. After `pop`, only `pools` refers
        # to the pools of an owner, so they are freed once its rounds are delivered.
        for owner in list(states):
            pools = states.pop(owner)
            exchange = self._exchange_programs[owner]
            for round_, tables in zip(host.rounds[owner], batch.tables[owner], strict=True):
                d_states[round_.target] = exchange.deliver_back(
                    self._call, pools[round_.source].tokens, d_states[round_.target], tables
                )
        return gradients, drawn, starts, d_states

    def _evaluate_drawn(
        self,
        params: Any,
        batch: DeviceStep,
        language_pools: list[TokenPool],
        drawn: FlowSums | None,
        failed: Failed,
    ) -> FlowSums | None:
        """`drawn` plus the sums of generators. Adds the undecodable items to `failed`."""
        host = batch.host
        states, _ = self._states(params, batch, language_pools, backward=False)
        for phase in self.generators:
            pools = states[self.exchange_owner[phase]]
            phase_params = self._params_of(params, phase)
            for m, rows in enumerate(batch.rows[phase]):
                pool = pools[host.pools[phase][m]]
                pool_offset = np.int32(host.pool_offsets[phase][m])
                program = self._microbatch_program("evaluate", phase, host, m)
                drawn, failed[phase] = program(
                    phase_params, rows, pool, pool_offset, drawn, failed[phase]
                )
        return drawn

    def _states(
        self, params: Any, batch: DeviceStep, language_pools: list[TokenPool], backward: bool
    ) -> tuple[dict[str, list[TokenPool]], list[Start]]:
        """Run the decoder forward, which writes states into the language pools; deliver them.

        Returns the generators' pools with the states, by owner of an exchange; and the start of the
        decoder's backward pass, by microbatch (the rows, if there is no `backward`).
        """
        host = batch.host
        phase_params = self._params_of(params, LANGUAGE)
        starts: list[Start] = []
        for m, rows in enumerate(batch.rows[LANGUAGE]):
            pool = host.pools[LANGUAGE][m]
            program = self._microbatch_program("language_states", LANGUAGE, host, m)
            language_pools[pool], kept = program(phase_params, rows, language_pools[pool])
            starts.append(self.start_of(LANGUAGE, m, rows, kept) if backward else rows)
        states = self._empty_pools(batch, self._exchange_owners(self.generators), "")
        # Rounds name pools from the encoders' side: here the target is read, the source filled.
        for owner, pools in states.items():
            exchange = self._exchange_programs[owner]
            for round_, tables in zip(host.rounds[owner], batch.tables[owner], strict=True):
                pools[round_.source] = exchange.deliver(
                    self._call, language_pools[round_.target], pools[round_.source], tables
                )
        return states, starts

    def _generator_jobs(self, phase: str, row_format: RowFormat) -> Jobs:
        params = self._params_of(self.params, phase)
        grads = self._grads_of(self.accumulators, phase)
        pool = self.pools[self.exchange_owner[phase]]
        drawn = self._abstract_sums().drawn
        pool_offset = self._scalar_shape(np.int32)
        failed = self._abstract_failed[phase]
        spec = self.spec.phases[phase]
        jobs: Jobs = {}
        for row_class in spec.classes:
            functions = self.functions.spanned(phase, row_class.span)
            layout = functions.model.layout(phase)
            rows = self._abstract_generator_rows(phase, layout, row_class, row_format)
            arguments = (params, rows, pool, pool_offset, self._scalar_shape(), grads, drawn)
            results = (pool, grads, drawn)
            # Code of one device does not sum gradients over replicas in every microbatch.
            # Evaluation has no gradients, so it leaves the collectives to XLA.
            by_device = GeneratorFunctions(functions.by_device(phase), phase)
            jobs[ProgramName("draw_loss_and_grad", phase, *row_class)] = Job(
                _with_failed_count(
                    functions,
                    phase,
                    map_rows(layout, by_device.draw_loss_and_grad, arguments, results),
                ),
                (*arguments, failed),
                (*results, failed),
                (2, 5, 6),
            )
            given = (params, rows, pool, pool_offset, drawn)
            evaluate = GeneratorFunctions(functions, phase).evaluate
            jobs[ProgramName("evaluate", phase, *row_class)] = Job(
                # The default binds this class's `evaluate`: jobs are traced after the loop.
                _with_failed_count(
                    functions, phase, lambda *given, evaluate=evaluate: (evaluate(*given),)
                ),
                (*given, failed),
                (drawn, failed),
                (4,),
            )
        return jobs

    def _abstract_generator_rows(
        self,
        phase: str,
        layout: Layout,
        row_class: RowClass,
        row_format: RowFormat,
        guided: bool = False,
    ) -> GeneratorRows:
        """Shapes, types and shardings of a generator's rows of one class."""
        return abstract_generator_rows(
            layout,
            row_class.capacity,
            self.spec.phases[phase].max_segments,
            row_format,
            self.attention.block(phase, row_class),
            guided,
            crossed=phase in self.attention.crossed,
        )

    # ------------------------------------------------------------------ undecodable items

    # Counts stay by rank until a step's microbatches are done, so that in none of them replicas
    # wait for one another.

    @property
    def _abstract_failed(self) -> Failed:
        """Shapes of the counts of undecodable items."""
        layouts = {phase: self.layouts[phase] for phase in (*self.encoders, *self.generators)}
        return {
            phase: jax.ShapeDtypeStruct((layout.ranks,), np.int32, sharding=layout.rows)
            for phase, layout in layouts.items()
        }

    def _none_failed(self) -> Failed:
        """Zeroed counts, which microbatches replace by their own."""
        return dict(self._zeros("failed")) if self._abstract_failed else {}

    def _failed_jobs(self) -> Jobs:
        """Zeroed counts, if there are any; and the program that adds all of them to a number."""
        counts = self._abstract_failed
        number = self._scalar_shape(np.int32)
        jobs: Jobs = {
            ProgramName(COUNT_FAILED): Job(
                lambda number, counts: number + sum_of_counts(counts), (number, counts), number
            )
        }
        return jobs | ({ProgramName("zero", "failed"): zeros_job(counts)} if counts else {})

    # ------------------------------------------------------------------ of all phases

    def functions_of(self, phase: str) -> PhaseFunctions:
        """Names of the functions that a phase's programs compute."""
        return phase_functions(self.functions, phase, bool(self.kept_residuals.get(phase)))

    def start_of(self, phase: str, microbatch: int, rows: Any, kept: Any) -> Start:
        """The start of the backward pass of the step's microbatch of this number, given what its
        forward pass kept."""
        start = start_from(rows, kept)
        # One forward program serves all microbatches of a class, so what it keeps for those past
        # the number to keep is dropped here.
        within = microbatch < self.kept_residuals.get(phase, 0)
        return rows if isinstance(start, KeptResiduals) and not within else start

    def _microbatch_program(
        self, function: str, phase: str, host: HostStep, microbatch: int
    ) -> Callable[..., Any]:
        """The program for the rows of one microbatch."""
        capacity = host.capacities[phase][microbatch]
        span = host.spans[phase][microbatch]
        return self._call(function, phase, capacity, span)

    def _empty_pools(
        self, batch: DeviceStep, owners: Iterable[str], prefix: str
    ) -> dict[str, list[Any]]:
        """Zeroed pools of encoders or generators, as many as the step needs, by owner of an
        exchange; with the prefix "d_" those of their gradients."""
        # Number of the last pool; -1, so no pool, where no microbatch of the step needs one.
        last_pool: dict[str, int] = dict.fromkeys(owners, -1)
        for phase, owner in self.exchange_owner.items():
            if owner in last_pool:
                last_pool[owner] = max(last_pool[owner], *batch.host.pools[phase], -1)
        return {
            owner: [self._zeros(prefix + owner) for _ in range(n + 1)]
            for owner, n in last_pool.items()
        }

    def _exchange_owners(self, phases: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.exchange_owner[phase] for phase in phases))

    def _params_of(self, params: Any, phase: str) -> Any:
        return {name: params[name] for name in self.functions.model.phases[phase].components}

    def _grads_of(self, grads: Any, phase: str) -> Any:
        return {name: grads[name] for name in self.functions.trainable_of(phase)}


def start_from(rows: Any, kept: Any) -> Start:
    """The start of a backward pass, given what was kept: nothing (None), features or residuals."""
    if kept is None:
        return rows
    return kept if isinstance(kept, KeptFeatures) else KeptResiduals(rows, kept)


def _with_failed_count(
    functions: StepFunctions, phase: str, function: Callable[..., tuple[Any, ...]]
) -> Callable[..., tuple[Any, ...]]:
    """`function` (params, rows, ...) with one more argument and result, the numbers of items by
    rank that could not be decoded, to which it adds those of the rows."""

    def counting(params: Any, rows: GeneratorRows, *rest: Any) -> tuple[Any, ...]:
        *arguments, failed = rest
        counted = functions.added(phase, failed, rows.failed)
        return *function(params, rows, *arguments), counted

    return counting
