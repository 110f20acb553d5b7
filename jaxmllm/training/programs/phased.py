"""The step's functions compiled ahead of the first step, and driven by the host, phase by phase.

The numbers of microbatches, pools and exchange rounds differ from step to step. Here they are loop
counts, so no program is ever compiled again:

    zero pools; encode x M; (hop x hops; deliver) x rounds; language_loss_and_grad x M;
    (hop_back x hops; deliver_back) x rounds; encode_grad x M; add_replicas; update

Pools are a step's largest buffers after the state. Without a generator, at most two kinds of them
are in memory at a time, each for all media tokens of the step (E of encoders, L of the language
model, d of gradients); an exchange adds the buffer of a round:

    encode                  E
    hop, deliver            E, L                  E is freed when its rounds are delivered
    language_loss_and_grad     L                  each gradient replaces its token: one row reads it
    hop_back, deliver_back  dE, L                 L is freed when its rounds are delivered
    encode_grad             dE                    is freed before `add_replicas`

Where memory allows, `encode` returns residuals. Those of a step's first microbatches are kept for
`encode_grad_kept`; the other microbatches run forward again in `encode_grad`. `language_states` and
`language_loss_and_grad_kept` do the same where a generator reads the decoder's states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmllm.balance.records import RowClass
from jaxmllm.data.rows.fill import HostStep
from jaxmllm.models.rows import (
    EncoderRows,
    GeneratorRows,
    LanguageRows,
    TokenPool,
    abstract_encoder_rows,
    abstract_language_rows,
    abstract_pool,
)
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat
from jaxmllm.training.objectives.flow import FlowSums
from jaxmllm.training.objectives.routing import Routing
from jaxmllm.training.objectives.tokens import Sums
from jaxmllm.training.programs.base import TOKENS, Evaluated, Job, Jobs, ProgramName, zeros_job
from jaxmllm.training.programs.exchange_programs import ExchangePrograms
from jaxmllm.training.programs.generator_programs import (
    COUNT_FAILED,
    DeviceStep,
    Failed,
    GeneratorPrograms,
    start_from,
)
from jaxmllm.training.programs.gradient_sums import GradientSums
from jaxmllm.training.programs.transfer import put_ranks
from jaxmllm.training.step_functions import (
    KeptFeatures,
    KeptResiduals,
    Start,
    StepFunctions,
    TrainState,
)
from sharding.parameters import map_rows, results_of_devices


class PhaseBuffers(NamedTuple):
    """Buffers that the programs of one phase read and overwrite, in addition to parameters and
    rows; see `PhasedPrograms.forward`."""

    # Written by encoders; read by the language model, and overwritten with gradients
    pool: TokenPool
    # Gradients of the tokens or states that another phase read; None where they would train nothing
    d_pool: jax.Array | None
    gradients: Any  # of the phase's trainable components
    sums: Sums | FlowSums | None  # of the decoder, or of a generator
    failed: Failed
    # Start of the backward pass, for a phase whose result another phase reads
    saved: Any = None


class PhasedPrograms(GeneratorPrograms):
    """Programs of single microbatches, which the host calls phase after phase.

    In a phase with separate forward and backward programs, the first `kept_residuals` microbatches
    of a step run forward only once: their residuals stay in memory until their backward pass.
    """

    # ------------------------------------------------------------------ running

    def init(self, seed: int) -> TrainState:
        """A fresh state on the mesh."""
        params = self.functions.model.init(seed, self.param_dtype)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        return jax.jit(self.functions.init, out_shardings=shardings)(params)

    def put(self, batch: HostStep) -> DeviceStep:
        """Start the transfer of this host's rows and tables."""
        rows = {}
        for phase, phase_rows in batch.rows.items():
            spans = batch.spans[phase]
            rows[phase] = [
                self._put_row(phase, row, span) for row, span in zip(phase_rows, spans, strict=True)
            ]
        tables = {
            phase: [self._exchange_programs[phase].put(round_) for round_ in rounds]
            for phase, rounds in batch.rounds.items()
        }
        return DeviceStep(batch, rows, tables)

    def gradients(
        self, params: Any, batch: DeviceStep, expert_counts: Any = None
    ) -> tuple[Any, Sums, jax.Array]:
        """Gradients of the mean loss over the batch's planned targets, by trainable component; the
        sums by rank and source; and the number of media items that could not be decoded.

        Args:
          expert_counts: with experts, `TrainState.expert_counts`; None stands for zeros.
        """
        gradients, sums, failed = self._uncounted_gradients(params, batch, expert_counts)
        return gradients, sums, self._call(COUNT_FAILED)(np.int32(0), failed)

    def _uncounted_gradients(
        self, params: Any, batch: DeviceStep, expert_counts: Any
    ) -> tuple[Any, Sums, Failed]:
        host = batch.host
        pools, saved_for_backward, failed = self._encode(
            params, batch, self._none_failed(), backward=True
        )
        gradients = self._zeros("gradients")
        # The decoder's programs take sums without `drawn`, to which only generators' programs add.
        sums = self._zeros("sums")
        sums, drawn = sums._replace(drawn=None), sums.drawn
        d_states: list[jax.Array] = []
        starts: list[Start] = list(batch.rows[LANGUAGE])
        if self.generators:
            gradients, drawn, starts, d_states = self._draw(
                params, batch, pools, gradients, drawn, failed
            )
        if self.functions_of(LANGUAGE).backward:
            of_language, sums = self._language_grads(
                params,
                batch,
                starts,
                pools,
                d_states,
                self._grads_of(gradients, LANGUAGE),
                sums,
                self._routing_inputs(host.statistics, expert_counts),
            )
            gradients |= of_language
        del d_states, starts
        d_pools = self._return_gradients(batch, pools)
        for phase in self.encoders:
            if self.functions_of(phase).backward:
                gradients |= self._encoder_grads(
                    phase,
                    params,
                    batch,
                    saved_for_backward[phase],
                    d_pools[self.exchange_owner[phase]],
                    self._grads_of(gradients, phase),
                )
        del d_pools
        sums = sums._replace(drawn=drawn)
        return self._gradient_sums.finish(self._call, gradients), sums, failed

    def evaluate(
        self, params: Any, batch: DeviceStep, evaluated: Evaluated | None = None
    ) -> Evaluated:
        """Add the totals of a batch to those of earlier batches (None: zeros)."""
        host = batch.host
        sums, number = evaluated or self._nothing_evaluated()
        # The decoder's programs take sums without `drawn`, to which only generators' programs add.
        sums, drawn = sums._replace(drawn=None), sums.drawn
        pools, _, failed = self._encode(params, batch, self._none_failed(), backward=False)
        phase_params = self._params_of(params, LANGUAGE)
        for m, rows in enumerate(batch.rows[LANGUAGE] if self.functions.learns_text else ()):
            pool = pools[host.pools[LANGUAGE][m]]
            program = self._microbatch_program("evaluate", LANGUAGE, host, m)
            sums = program(phase_params, rows, pool, sums)
        if self.generators:
            drawn = self._evaluate_drawn(params, batch, pools, drawn, failed)
        return Evaluated(sums._replace(drawn=drawn), self._call(COUNT_FAILED)(number, failed))

    def _nothing_evaluated(self) -> Evaluated:
        number = self._call(COUNT_FAILED)(np.int32(0), self._none_failed())
        return Evaluated(self._zeros("sums"), number)

    @property
    def _failed_shapes(self) -> Failed:
        return self._abstract_failed

    def media_pools(self, params: Any, batch: DeviceStep) -> list[TokenPool]:
        """The language pools of a batch, with all media tokens."""
        return self._encode(params, batch, self._none_failed(), backward=False)[0]

    def _encode(
        self,
        params: Any,
        batch: DeviceStep,
        failed: Failed,
        backward: bool,
    ) -> tuple[list[TokenPool], dict[str, list[Start]], Failed]:
        """Encode all media and deliver their tokens.

        Returns the language pools with all media tokens; the start of every microbatch's backward
        pass, by encoder (the rows, if there is no `backward`); and `failed` plus the items that
        could not be decoded.
        """
        host = batch.host
        encoder_pools = self._empty_pools(batch, self._exchange_owners(self.encoders), "")
        saved_for_backward: dict[str, list[Start]] = {}
        for phase in self.encoders:
            pools = encoder_pools[self.exchange_owner[phase]]
            phase_params = self._params_of(params, phase)
            saved_for_backward[phase] = []
            for m, rows in enumerate(batch.rows[phase]):
                pool = host.pools[phase][m]
                pool_offset = np.int32(host.pool_offsets[phase][m])
                program = self._microbatch_program("encode", phase, host, m)
                pools[pool], kept, failed[phase] = program(
                    phase_params, rows, pools[pool], pool_offset, failed[phase]
                )
                start = self.start_of(phase, m, rows, kept) if backward else rows
                saved_for_backward[phase].append(start)
        pool_count = max(host.pools[LANGUAGE], default=0) + 1
        language_pools = [self._zeros(LANGUAGE) for _ in range(pool_count)]
        for owner in list(encoder_pools):
            pools = encoder_pools.pop(owner)  # the only reference: freed after these rounds
            exchange = self._exchange_programs[owner]
            for round_, tables in zip(host.rounds[owner], batch.tables[owner], strict=True):
                language_pools[round_.target] = exchange.deliver(
                    self._call, pools[round_.source], language_pools[round_.target], tables
                )
        return language_pools, saved_for_backward, failed

    def _return_gradients(
        self, batch: DeviceStep, language_pools: list[TokenPool]
    ) -> dict[str, list[jax.Array]]:
        """Gradients of the encoder pools, by owner of an exchange that carries gradients. They come
        from `language_pools`, whose tokens have been replaced by gradients; the list is emptied."""
        trained = [owner for owner in self.trained_exchanges if owner in self.encoders]
        d_encoder = self._empty_pools(batch, trained, "d_")
        for owner, d_pools in d_encoder.items():
            exchange = self._exchange_programs[owner]
            for round_, tables in zip(batch.host.rounds[owner], batch.tables[owner], strict=True):
                d_pools[round_.source] = exchange.deliver_back(
                    self._call, language_pools[round_.target].tokens, d_pools[round_.source], tables
                )
        language_pools.clear()
        return d_encoder

    def _language_grads(
        self,
        params: Any,
        batch: DeviceStep,
        starts: list[Start],
        pools: list[TokenPool],
        d_states: list[jax.Array],
        grads: Any,
        sums: Sums,
        routing: Routing | None,
    ) -> tuple[Any, Sums]:
        """`grads` and `sums` plus those of the decoder. In `pools`, gradients replace the tokens
        that its rows have read.

        Args:
          d_states: gradients of the states that generators read, by pool; empty if none flow back.
        """
        host = batch.host
        phase_params = self._params_of(params, LANGUAGE)
        names = self.functions_of(LANGUAGE)
        scale = self._loss_scale(self.functions.objective.language.weight, host.targets)
        for m in range(len(starts)):
            start = starts.pop(0)  # the only reference: its memory is free after the program
            pool = host.pools[LANGUAGE][m]
            program = self._microbatch_program(names.backward_from(start), LANGUAGE, host, m)
            pools[pool], grads, sums = program(
                *(phase_params, start, pools[pool], scale, grads, sums, routing),
                # Left out where there are none: the program was compiled without this argument.
                *d_states[pool : pool + 1],
            )
        return grads, sums

    def _encoder_grads(
        self,
        phase: str,
        params: Any,
        batch: DeviceStep,
        saved: list[Start],
        d_pools: list[jax.Array],
        grads: Any,
    ) -> Any:
        host = batch.host
        phase_params = self._params_of(params, phase)
        names = self.functions_of(phase)
        for m in range(len(saved)):
            start = saved.pop(0)  # the only reference: its memory is free after the program
            d_pool = d_pools[host.pools[phase][m]]
            pool_offset = np.int32(host.pool_offsets[phase][m])
            program = self._microbatch_program(names.backward_from(start), phase, host, m)
            grads = program(phase_params, start, d_pool, pool_offset, grads)
        return grads

    def route_metrics(self, statistics: Mapping[str, float]) -> dict[str, float]:
        """Bytes that a step moves between ranks in one direction, from its plan statistics.

        `route/<owner>/bytes_moved`: from rank to rank in the exchanges, padding and second legs
        included. `route/<owner>/node_bytes`: tokens that change node. `<phase>/gathered_bytes`:
        keys and values that ranks receive from one another in shared rows, in the forward pass
        only; their gradients return the same way, and recomputation gathers again.
        """
        metrics: dict[str, float] = {}
        for owner in self._exchange_programs:
            leaves = jax.tree.leaves(self.pools[owner])
            # Pools are [R, W, ...]: the other axes are those of a slot's token and validity.
            token_bytes = sum(math.prod(leaf.shape[2:]) * leaf.dtype.itemsize for leaf in leaves)
            for name, statistic in (("bytes_moved", "slots_moved"), ("node_bytes", "node_tokens")):
                if (key := f"route/{owner}/{statistic}") in statistics:
                    metrics[f"route/{owner}/{name}"] = statistics[key] * token_bytes
        for phase in self.spec.phases:
            if (key := f"{phase}/gathered_slots") in statistics:
                # Statistics count slots, but keys and values are counted by token of attention.
                slot_bytes = self.functions.model.key_value_bytes(phase) / self._strides[phase]
                metrics[f"{phase}/gathered_bytes"] = statistics[key] * slot_bytes
        return metrics

    @property
    def whole_gradient_bytes(self) -> Mapping[str, int]:
        return self._gradient_sums.whole_bytes

    # ------------------------------------------------------------------ one microbatch, for timing

    def buffers(self, phase: str) -> PhaseBuffers:
        """Zeros for `forward` and `backward` of single microbatches."""
        owner = self.exchange_owner.get(phase, LANGUAGE)
        returns = phase in self.encoders and bool(self.functions.trainable_of(phase))
        if phase == LANGUAGE:
            returns = self.functions.trains_states
        sums = self._zeros("sums")
        phase_sums = sums.drawn if phase in self.generators else sums._replace(drawn=None)
        return PhaseBuffers(
            pool=self._zeros(owner),
            d_pool=self._zeros(f"d_{owner}") if returns else None,
            gradients=self._grads_of(self._zeros("gradients"), phase),
            sums=phase_sums,
            failed=self._none_failed(),
        )

    def forward(
        self,
        phase: str,
        params: Any,
        rows: Any,
        row_class: RowClass,
        buffers: PhaseBuffers,
        microbatch: int = 0,
    ) -> PhaseBuffers:
        """Run one microbatch of a phase forward. `buffers` are overwritten: use those returned.

        Args:
          microbatch: its number in the step, which decides whether its residuals are kept.
        """
        names = self.functions_of(phase)
        program = self._call(names.forward or names.evaluate, phase, *row_class)
        # The pool serves this microbatch alone, so pool offsets are 0.
        inputs = self._params_of(params, phase), rows, buffers.pool
        if phase in self.encoders:
            pool, kept, counts = program(*inputs, np.int32(0), buffers.failed[phase])
            failed = buffers.failed | {phase: counts}
            saved = self.start_of(phase, microbatch, rows, kept)
            return buffers._replace(pool=pool, failed=failed, saved=saved)
        if phase in self.generators:
            drawn, counts = program(*inputs, np.int32(0), buffers.sums, buffers.failed[phase])
            return buffers._replace(sums=drawn, failed=buffers.failed | {phase: counts})
        if names.forward:
            pool, kept = program(*inputs)
            return buffers._replace(pool=pool, saved=self.start_of(phase, microbatch, rows, kept))
        return buffers._replace(sums=program(*inputs, buffers.sums))

    def backward(
        self, phase: str, params: Any, rows: Any, row_class: RowClass, buffers: PhaseBuffers
    ) -> PhaseBuffers:
        """Run the same microbatch backward, after `forward`. Where no other phase reads a phase's
        result, one program computes its loss and gradients, and runs the forward pass again."""
        names = self.functions_of(phase)
        start = buffers.saved if names.forward else rows
        program = self._call(names.backward_from(start), phase, *row_class)
        inputs = self._params_of(params, phase), start
        first_slot = np.int32(0)
        gradients = buffers.gradients
        sums = buffers.sums
        if phase in self.encoders:
            gradients = program(*inputs, buffers.d_pool, first_slot, gradients)
            return buffers._replace(gradients=gradients)
        scale = np.asarray(1e-6, self._real_dtype)  # any value: these passes are only timed
        if phase in self.generators:
            pool, gradients, sums, counts = program(
                *(*inputs, buffers.pool, first_slot, scale, gradients, sums, buffers.failed[phase])
            )
            failed = buffers.failed | {phase: counts}
            return buffers._replace(pool=pool, gradients=gradients, sums=sums, failed=failed)
        d_states = [] if buffers.d_pool is None else [buffers.d_pool]
        routing = self._routing_inputs({TOKENS: 1})
        pool, gradients, sums = program(
            *(*inputs, buffers.pool, scale, gradients, sums, routing, *d_states)
        )
        return buffers._replace(pool=pool, gradients=gradients, sums=sums)

    # ------------------------------------------------------------------ compiling

    def _set_shapes(self) -> None:
        self.pools = self._abstract_pools()
        # Slots of a row for each token of attention
        self._strides = {
            phase: self.formats[phase].stride if phase in self.formats else 1
            for phase in self.spec.phases
        }
        self._exchange_programs = {
            owner: ExchangePrograms(
                owner=owner,
                exchange=self.exchanges[owner],
                route=self.spec.routes[owner],
                pool=self.pools[owner],
                language_pool=self.pools[LANGUAGE],
                trained=owner in self.trained_exchanges,
            )
            for owner in dict.fromkeys(self.exchange_owner.values())
        }
        self._gradient_sums = GradientSums(self.functions.model, self.trained, self._real_dtype)
        self.accumulators = self._gradient_sums.abstract

    def _jobs(self, formats: Mapping[str, RowFormat]) -> Jobs:
        jobs = self._common_jobs(self.trained) | self._gradient_sums.jobs() | self._failed_jobs()
        jobs |= self._language_jobs()
        for exchange in self._exchange_programs.values():
            jobs |= exchange.jobs()
        for phase in self.encoders:
            jobs |= self._encoder_jobs(phase, formats[phase])
        for phase in self.generators:
            jobs |= self._generator_jobs(phase, formats[phase])
        return jobs

    def _language_jobs(self) -> Jobs:
        spec = self.spec.phases[LANGUAGE]
        params = self._params_of(self.params, LANGUAGE)
        grads = self._grads_of(self.accumulators, LANGUAGE)
        pool = self.pools[LANGUAGE]
        sums = self._abstract_sums()._replace(drawn=None)
        names = self.functions_of(LANGUAGE)
        d_states = (pool.tokens,) if self.functions.trains_states else ()
        routing = self._abstract_routing()
        windows = LANGUAGE in self.functions.model.config.windows
        jobs = {
            ProgramName("zero", LANGUAGE): zeros_job(pool),
        }

        for row_class in spec.classes:
            functions = self.functions.spanned(LANGUAGE, row_class.span)
            layout = functions.model.layout(LANGUAGE)
            by_device = functions.by_device(LANGUAGE)
            block = self.attention.block(LANGUAGE, row_class)
            rows = abstract_language_rows(
                layout,
                row_class.capacity,
                spec.max_segments,
                block,
                windows,
                bool(self.generators),
                self.attention.runs.get(LANGUAGE),
            )
            # One program for microbatches that start from rows, one for those with residuals.
            starts: list[Start] = [rows] if names.backward else []
            if names.forward:
                inputs = (params, rows, pool)
                states, kept = _decoder_forward(functions, inputs, bool(names.backward_kept))
                starts += [KeptResiduals(rows, kept)] if kept is not None else []
                jobs[ProgramName(names.forward, LANGUAGE, *row_class)] = Job(
                    map_rows(layout, states, inputs, (pool, kept)), inputs, (pool, kept), (2,)
                )
            for start in starts:
                scalar = self._scalar_shape()
                # Pool, gradients and sums are overwritten: numbers 2, 4 and 5 of these.
                arguments = (params, start, pool, scalar, grads, sums, routing, *d_states)
                results = (pool, grads, sums)
                jobs[ProgramName(names.backward_from(start), LANGUAGE, *row_class)] = Job(
                    map_rows(layout, by_device.language_loss_and_grad, arguments, results),
                    arguments,
                    results,
                    (2, 4, 5),
                )
            if names.evaluate:
                jobs[ProgramName(names.evaluate, LANGUAGE, *row_class)] = Job(
                    functions.evaluate, (params, rows, pool, sums), sums, donated=(3,)
                )
        return jobs

    def _encoder_jobs(self, phase: str, row_format: RowFormat) -> Jobs:
        params = self._params_of(self.params, phase)
        grads = self._grads_of(self.accumulators, phase)
        pool = self.pools[self.exchange_owner[phase]]
        pool_offset = self._scalar_shape(np.int32)
        failed = self._abstract_failed[phase]
        windows = phase in self.functions.model.config.windows
        names = self.functions_of(phase)
        jobs: Jobs = {}
        for row_class in self.spec.phases[phase].classes:
            functions = self.functions.spanned(phase, row_class.span)
            layout = functions.model.layout(phase)
            runs = self.attention.runs.get(phase)
            block = self.attention.block(phase, row_class)
            rows = abstract_encoder_rows(
                layout, row_class.capacity, row_format, block, windows, runs
            )
            arguments = (params, rows, pool, pool_offset, failed)
            # Only the first microbatches of a step keep residuals; others start backward from rows.
            # Frozen towers keep features for all; with nothing trained there is no backward.
            starts: list[Start] = []
            if names.backward_kept:
                encode, kept = _encoder_keeping_residuals(functions, phase, params, rows, pool)
                starts = [rows, KeptResiduals(rows, kept)]
            else:
                encode, kept = _encoder_forward(functions, phase, arguments)
                if names.backward:
                    starts = [start_from(rows, kept)]
            jobs[ProgramName(names.forward, phase, *row_class)] = Job(
                _counting_by_rank(functions, phase, encode),
                arguments,
                (pool, kept, failed),
                donated=(2,),
            )
            for start in starts:
                # `pool.tokens` gives the shape of the pool of gradients. In code of one device,
                # gradients are not summed over replicas in every microbatch.
                inputs = (params, start, pool.tokens, pool_offset, grads)
                on_device = partial(functions.by_device(phase).encode_grad, phase)
                jobs[ProgramName(names.backward_from(start), phase, *row_class)] = Job(
                    map_rows(layout, on_device, inputs, grads), inputs, grads, (4,)
                )
        return jobs

    # ------------------------------------------------------------------ shapes and transfer

    def _abstract_pools(self) -> dict[str, TokenPool]:
        language = self.functions.model.components[LANGUAGE]
        width = self.functions.model.config.token_width
        slots = {phase: route.encoder_pool for phase, route in self.spec.routes.items()}
        slots[LANGUAGE] = max(
            (route.language_pool for route in self.spec.routes.values()), default=1
        )
        return {
            phase: abstract_pool(self.layouts[phase], slots[phase], width, language.dtype)
            for phase in slots
        }

    @property
    def trained_exchanges(self) -> tuple[str, ...]:
        """Owners of the exchanges that carry gradients back."""
        owners = []
        for phase, owner in self.exchange_owner.items():
            if phase in self.generators:
                goes_back = self.functions.trains_states
            else:
                goes_back = bool(self.functions.trainable_of(phase))
            if goes_back:
                owners.append(owner)
        return tuple(dict.fromkeys(owners))

    def _put_row(
        self, phase: str, row: Mapping[str, Any], span: int
    ) -> LanguageRows | EncoderRows | GeneratorRows:
        layout = self.layouts[phase].spanned(span)
        kind: Any = EncoderRows
        if phase == LANGUAGE:
            kind = LanguageRows
        elif phase in self.generators:
            kind = GeneratorRows
        local = kind.of(dict(row))
        return jax.tree.map(
            lambda array, sharding: put_ranks(array, sharding, layout.groups),
            local,
            local.shardings(layout),
        )


def _decoder_forward(
    functions: StepFunctions, arguments: tuple[Any, ...], keeps: bool
) -> tuple[Callable[..., Any], Any]:
    """`language_states`, and shapes of what it keeps on all devices; None if it keeps nothing."""
    states = partial(functions.by_device(LANGUAGE).language_states, keeps=keeps)
    if not keeps:
        return states, None
    layout = functions.model.layout(LANGUAGE)
    return states, results_of_devices(layout, lambda *given: states(*given)[1], arguments)


def _encoder_forward(
    functions: StepFunctions, phase: str, arguments: tuple[Any, ...]
) -> tuple[Callable[..., Any], KeptFeatures | None]:
    """`encode`, and shapes of what it keeps: the features of a frozen tower, or None."""
    encode = partial(functions.encode, phase)
    _, kept, _ = jax.eval_shape(encode, *arguments)
    if kept is not None:
        rows = arguments[1]
        features: Any = kept.features
        sharding = functions.model.layout(phase).sharding(("batch", "sequence"))
        features = jax.ShapeDtypeStruct(features.shape, features.dtype, sharding=sharding)
        kept = KeptFeatures(features, rows.places)
    return encode, kept


def _counting_by_rank(
    functions: StepFunctions, phase: str, encode: Callable[..., tuple[TokenPool, Any, Any]]
) -> Callable[..., tuple[TokenPool, Any, Any]]:
    """`encode` with counts by rank [R] of items that could not be decoded, in place of one count of
    all ranks, for which all devices would wait for one another in every microbatch."""

    def counting(
        params: Any, rows: EncoderRows, pool: TokenPool, pool_offset: Any, failed: Any
    ) -> tuple[TokenPool, Any, Any]:
        # Nothing reads the count of all ranks, so XLA leaves it out.
        pool, kept, _ = encode(params, rows, pool, pool_offset, np.int32(0))
        return pool, kept, functions.added(phase, failed, rows.failed)

    return counting


def _encoder_keeping_residuals(
    functions: StepFunctions, phase: str, params: Any, rows: Any, pool: Any
) -> tuple[Callable[..., Any], Any]:
    """An `encode` that keeps residuals, and the shapes of those on all devices."""
    layout = functions.model.layout(phase)
    on_device = partial(functions.by_device(phase).tokens_and_residuals, phase)
    tokens = jax.eval_shape(partial(functions.tokens, phase), params, rows)
    # Tokens are laid out by rank, like the pool. Only a trace tells which residuals there are.
    tokens = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=pool.tokens.sharding)
    kept = results_of_devices(layout, lambda *given: on_device(*given)[1], (params, rows))
    forward = map_rows(layout, on_device, (params, rows), (tokens, kept))

    def encode(
        params: Any, rows: EncoderRows, pool: TokenPool, pool_offset: Any, failed: Any
    ) -> tuple[TokenPool, tuple[jax.Array, ...], Any]:
        tokens, residuals = forward(params, rows)
        pool, failed = functions.written(phase, rows, tokens, pool, pool_offset, failed)
        return pool, residuals, failed

    return encode, kept
