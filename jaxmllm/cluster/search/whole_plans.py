"""The third sieve: sizes for a layout, and its sampled batches planned and simulated whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from jaxmllm.balance.records import PlanSpec
from jaxmllm.balance.sizes.choose import PhaseRows, choose_sizes
from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.cluster.device_peak import programs_peak
from jaxmllm.cluster.search.layouts import Estimate, PlannedLayout, Plans, Sampled
from jaxmllm.cluster.search.request import Request
from jaxmllm.cluster.search.row_choice import RowChoice
from jaxmllm.cluster.search.staged_step import planned_in_stages
from jaxmllm.cluster.search.step_bytes import with_kept
from jaxmllm.cluster.simulate import simulate
from jaxmllm.cluster.temporaries import largest_residuals
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.models.mllm import MLLM
from jaxmllm.setup.build import phased_programs
from jaxmllm.setup.exchange_layout import exchange_backend, exchange_grids, nodes_of_ranks
from jaxmllm.setup.sizing import sizing_inputs

SAMPLED_EXAMPLES: Final = 1 << 16  # most examples that pools and segments are chosen from
KEPT_SHARE: Final = 0.8  # of memory that is left, for residuals of encoders between their passes


class WholePlans:
    """Planned layouts of a request. Layouts of the same ranks and rows share their plans."""

    def __init__(self, request: Request):
        self._request = request
        # Keys hold id(sampled): `Request.lengths` must keep what it returns, or ids would be reused
        self._known_plans: dict[str, Plans] = {}
        self._known_choices: dict[int, RowChoice] = {}
        self._known_rows: dict[int, PhaseRows] = {}
        self._known_stage_rows: dict[str, PlanSpec] = {}

    def planned(self, estimate: Estimate) -> PlannedLayout:
        """A layout with its sizes chosen, and its steps planned and simulated. Where memory has no
        room to keep residuals of a phase, rows of half the size are planned as well, and the faster
        layout is taken.

        Raises:
          PipelineError: its layers cannot be cut into so many stages.
        """
        layout = self._planned(estimate)
        halves = self._halved_slots(estimate, layout)
        if not halves:
            return layout
        try:
            halved = self._planned(replace(estimate, fitting={**estimate.fitting, **halves}))
        except ConfigError:  # the longest item needs larger rows
            return layout
        return min(
            layout, halved, key=lambda one: (one.peak.bytes > self._request.budget, one.seconds)
        )

    def _halved_slots(self, estimate: Estimate, layout: PlannedLayout) -> dict[str, int]:
        """Half the largest row's slots by phase, where rows are open and no residuals have room."""
        if self._request.as_run or estimate.choice.stages > 1:
            return {}
        spans = estimate.layout.spans
        longest = self._request.lengths(estimate.config, estimate.model, spans).longest
        may_keep = layout.programs.functions.may_keep_residuals
        halves = {}
        for phase in layout.config.model.two_passes:
            rows = getattr(estimate.config.phases, phase)
            # `estimate.config` is as asked for, `layout.config` has numbers in place of `auto`.
            is_open = rows.capacities == rows.max_capacity == rows.kept_residuals == "auto"
            has_room = getattr(layout.config.phases, phase).kept_residuals
            half_slots = max(layout.spec.phases[phase].capacities) // 2
            holds_longest = half_slots * max(spans[phase]) >= longest[phase]
            tight = may_keep(phase) and layout.microbatches[phase] and not has_room
            if is_open and tight and holds_longest:
                halves[phase] = half_slots
        return halves

    def _planned(self, estimate: Estimate) -> PlannedLayout:
        """A layout with its sizes chosen for rows that fit, and its steps planned and simulated."""
        sampled = self._request.lengths(estimate.config, estimate.model, estimate.layout.spans)
        inputs = self._size_inputs(estimate, sampled)
        if estimate.choice.stages > 1:
            request = self._request
            return planned_in_stages(
                estimate, sampled, inputs, request.device, request.as_run, self._known_stage_rows
            )
        planned = self._plans(estimate, sampled, inputs)
        spec = planned.spec
        plans = planned.plans
        # Clips may have been measured again for the chosen spans, so lengths may differ.
        sampled = planned.sampled
        config = estimate.config
        model = estimate.model
        used = {
            phase: max(plan.phases[phase].microbatches for plan in plans) for phase in spec.phases
        }
        config = with_kept(config, self._kept_residuals(config, model, planned, used))
        programs = phased_programs(config, model, sampled.formats, spec, sampled.sources)
        times = tuple(
            simulate(programs, plan, items, self._request.device)
            for plan, items in zip(plans, sampled.steps, strict=True)
        )
        return PlannedLayout(
            choice=estimate.choice,
            config=config,
            spec=spec,
            programs=programs,
            plans=plans,
            times=times,
            peak=programs_peak(programs, microbatches=used),
            even_seconds=estimate.seconds,
        )

    def _size_inputs(self, estimate: Estimate, sampled: Sampled) -> list[SizingInputs]:
        """Inputs to choosing sizes, with the memory of the cluster; a microbatch costs at least its
        wait for weights."""
        inputs = sizing_inputs(
            estimate.config, estimate.model, sampled.formats, sampled.longest, estimate.layout.spans
        )
        if self._request.as_run:
            return inputs
        rate = self._request.device.peak * self._request.device.efficiency
        return [
            replace(
                sizing,
                fitting=estimate.fitting[sizing.name],
                microbatch_cost=max(
                    sizing.microbatch_cost, _rounded(estimate.gather_seconds(sizing.name) * rate)
                ),
            )
            for sizing in inputs
        ]

    def _plans(self, estimate: Estimate, sampled: Sampled, inputs: Sequence[SizingInputs]) -> Plans:
        """The plans that all layouts with the same ranks and rows share."""
        config = estimate.config
        model = estimate.model
        grids = exchange_grids(model)
        nodes = nodes_of_ranks(config, model)
        backend = exchange_backend(config, model)
        arrays = [array.tobytes() for array in nodes.values()]
        arrays += [
            side.tobytes() for grid in grids.values() for side in (grid.encoder, grid.language)
        ]
        key = repr((id(sampled), _key_parts(inputs), config.balance, backend, [*map(hash, arrays)]))
        if key not in self._known_plans:
            if not self._request.as_run:
                inputs = self._row_choice(sampled).chosen(inputs, grids, config.balance)
                # Clips are measured differently where several ranks hold a row
                sampled = self._request.lengths(
                    config, model, {sizing.name: sizing.spans for sizing in inputs}
                )
                inputs = [
                    replace(sizing, longest=sampled.longest[sizing.name]) for sizing in inputs
                ]
            rows = self._phase_rows(sampled)
            spec = choose_sizes(
                rows.samples, inputs, grids, config.balance, nodes, backend, sampled.others, rows
            )
            plans = tuple(plan_step(items, spec) for items in sampled.steps)
            self._known_plans[key] = Plans(spec, plans, sampled)
        return self._known_plans[key]

    def _row_choice(self, sampled: Sampled) -> RowChoice:
        return self._known_choices.setdefault(id(sampled), RowChoice(sampled.samples))

    def _phase_rows(self, sampled: Sampled) -> PhaseRows:
        """The rows of the batches that segments and pools are chosen from."""
        batches = max(SAMPLED_EXAMPLES // self._request.config.data.batch_size, 1)
        samples = sampled.samples if self._request.as_run else sampled.samples[:batches]
        return self._known_rows.setdefault(id(sampled), PhaseRows(samples))

    def _kept_residuals(
        self, config: Config, model: MLLM, planned: Plans, used: Mapping[str, int]
    ) -> dict[str, int]:
        """Microbatches whose residuals are kept between a phase's two passes, by phase: as many as
        the config says or, where it leaves that open, as have room, and at most those of a step."""
        spec = planned.spec
        sampled = planned.sampled
        phases = config.model.two_passes
        nothing_kept = with_kept(config, dict.fromkeys(phases, 0))
        programs = phased_programs(nothing_kept, model, sampled.formats, spec, sampled.sources)
        # Features of frozen towers are in this peak already; residuals are not.
        room = self._request.budget - programs_peak(programs, microbatches=used).bytes
        room *= KEPT_SHARE
        microbatches = {}
        for phase in phases:
            if not programs.functions.may_keep_residuals(phase):
                microbatches[phase] = 0
                continue
            residuals = largest_residuals(programs, phase)
            # A number in the config is taken even if it does not fit. The room may be below 0 then,
            # and later phases with `auto` keep nothing.
            limit = getattr(config.phases, phase).kept_residuals
            if limit == "auto":
                limit = max(int(room // residuals), 0)
            microbatches[phase] = min(limit, used[phase])
            room -= microbatches[phase] * residuals
        return microbatches


def _rounded(amount: float) -> int:
    """An amount rounded to a power of two, so that layouts that differ little share their rows."""
    return 1 << round(math.log2(amount)) if amount >= 1 else 0


def _key_parts(inputs: Sequence[SizingInputs]) -> list[tuple[object, ...]]:
    """The fields of the inputs that differ between layouts."""
    return [
        (
            sizing.name,
            sizing.ranks,
            sizing.alignment,
            sizing.spans,
            sizing.largest_capacity,
            sizing.microbatch_cost,
        )
        for sizing in inputs
    ]
