"""The search for a static configuration: what a config leaves open is chosen by the step time of real batches.

    meshes, component layouts                    mesh_choices.py
        --legal, and its bytes fit-->            rejections, counted by reason
        --time in closed form, remat by phase--> the fastest                              even_step.py
        --whole plans of sampled batches-->      their programs' bytes, rejections        device_peak.py
                                                 ranked layouts, the first is chosen      simulate.py

Times within `EQUAL` count as equal: then the mesh with fewer axes is preferred. The same input gives the same result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from jax.sharding import AbstractMesh

from jaxmllm.arrays import ceil_divide, round_up
from jaxmllm.balance.records import PlanSpec
from jaxmllm.balance.sizes.capacities import checked_capacities
from jaxmllm.balance.sizes.choose import PhaseRows, choose_sizes
from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.cluster.clusters import Cluster
from jaxmllm.cluster.device_peak import programs_peak
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.cluster.search.cluster_mesh import cluster_mesh
from jaxmllm.cluster.search.even_step import (
    EvenRows,
    PhaseLoad,
    even_rows,
    even_spec,
    even_step,
    mean_loads,
)
from jaxmllm.cluster.search.layouts import (
    Closest,
    Estimate,
    Found,
    LegalLayout,
    LengthsOf,
    PlannedLayout,
    Plans,
    Sampled,
    by_time,
    ranked,
)
from jaxmllm.cluster.search.mesh_choices import MeshChoice, mesh_choices, open_remat
from jaxmllm.cluster.search.no_layout import why_none
from jaxmllm.cluster.search.row_choice import RowChoice
from jaxmllm.cluster.search.staged_step import in_stages, planned_in_stages
from jaxmllm.cluster.search.step_bytes import (
    KnownPrograms,
    Numbers,
    StepBytes,
    parameter_numbers,
    with_remat,
)
from jaxmllm.cluster.simulate import simulate
from jaxmllm.cluster.temporaries import residual_bytes
from jaxmllm.config.schema import Config, ConfigError, Remat
from jaxmllm.models.mllm import MLLM, laid_out, with_settings
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.build import phased_programs
from jaxmllm.setup.exchange_layout import exchange_backend, exchange_grids, nodes_of_ranks
from jaxmllm.setup.row_shapes import alignment
from jaxmllm.setup.sizing import model_flops, sizing_inputs
from jaxmllm.setup.spans import Spans, spans_of_phases
from jaxmllm.training.programs.base import ProgramName
from jaxmllm.training.programs.phased import PhasedPrograms
from sharding.mesh import MeshError
from sharding.pipeline.ring import PipelineError

REMATS: Final[tuple[Remat, ...]] = ("full", "dots", "none")
# Layouts whose batches are planned: the fastest in closed form, as many as plan so many items, within bounds
PLANNED_ITEMS: Final = 200_000
FEWEST_PLANNED, MOST_PLANNED = 4, 12
STAGED_PLANNED: Final = 4  # of those in stages, whose sizes are found by trial, in seconds
WAVES: Final = 4  # microbatches per stage, of rows in closed form
SAMPLED_EXAMPLES: Final = 1 << 16  # of which pools and segments are chosen, at most
REFINED: Final = 24  # layouts of which every remat is tried
ROOMY_ITEMS: Final = 2  # of the longest, that rows should hold before layers keep more for backward
KEPT_SHARE: Final = 0.5  # of memory that is left, for residuals of encoders between their passes
UNEVEN: Final = "an axis of parameters not divisible"
IDLE: Final = "more ranks than examples"
_AXIS = re.compile(r"^([\w.]+).*: axis '(\w+)' of length (\d+)")


@dataclass(frozen=True)
class Planner:
    """Plans a config on devices of a cluster.

    Attributes:
      config: as the user gave it: what is set there stays.
      model: on any mesh.
      as_run: rows are chosen as a run of the config does; else in view of the cluster, as a config can say them.
    """

    config: Config
    model: MLLM
    device: Device
    lengths: LengthsOf
    as_run: bool = False
    _known_plans: dict[str, Plans] = field(default_factory=dict)
    _known_choices: dict[int, RowChoice] = field(default_factory=dict)
    _known_rows: dict[int, PhaseRows] = field(default_factory=dict)
    _known_bytes: KnownPrograms = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster:
        return self.device.cluster

    @property
    def budget(self) -> float:
        return self.cluster.budget

    # ------------------------------------------------------------------ the sieves

    def search(self, devices: int) -> Found:
        """The layouts of so many devices that fit, the best first.

        Raises:
          ConfigError: there is none; the message says why and what to change.
        """
        found = self.estimates(devices)
        if not found.estimates:
            raise ConfigError(why_none(self, found, devices))
        found.estimates.sort(key=by_time)
        for index, estimate in enumerate(found.estimates[:REFINED]):
            found.estimates[index] = self._refined(estimate)
        found.estimates.sort(key=by_time)
        fitting: list[PlannedLayout] = []
        number = self._finalists()
        for index, estimate in enumerate(found.estimates):
            if index >= number and fitting:
                break
            try:
                planned = self.planned(estimate)
            except PipelineError as error:
                found.reject(f"pipeline.stages: {str(error).partition(';')[0]}")
                continue
            if self.fits(planned, found):
                fitting.append(planned)
        if not fitting:
            raise ConfigError(why_none(self, found, devices))
        found.ranked = ranked(fitting)
        return found

    def fits(self, layout: PlannedLayout, found: Found) -> bool:
        """Whether a planned layout stays in memory; one that does not is counted and struck out."""
        if layout.peak.bytes <= self.budget:
            return True
        over = layout.over(self.budget)
        found.lacks(over)
        found.struck.append((layout, over.words))
        return False

    def alone(self, choice: MeshChoice) -> PlannedLayout:
        """The config on one mesh.

        Raises:
          ConfigError: the mesh is not legal, or the config does not fit.
        """
        found = Found(considered=1, meshes=1)
        estimate = self._estimate(choice, found)
        if estimate is None:
            raise ConfigError(why_none(self, found, choice.devices))
        return self.planned(estimate)

    def estimates(self, devices: int) -> Found:
        """The first two sieves: layouts that are legal and fit, with their time in closed form."""
        choices = mesh_choices(self.config, devices)
        found = Found(len(choices), len({choice.sizes_key for choice in choices}))
        for choice in choices:
            estimate = self._estimate(choice, found)
            if estimate is not None:
                found.estimates.append(estimate)
        return found

    def _finalists(self) -> int:
        """How many layouts are planned whole."""
        items = max(1, sum(len(items.length) for items in self.sampled.steps[0].phases.values()))
        steps = len(self.sampled.steps)
        number = PLANNED_ITEMS // (items * steps)
        most = MOST_PLANNED if self.config.pipeline.stages == 1 else STAGED_PLANNED
        return min(max(number, FEWEST_PLANNED), most)

    def _estimate(self, choice: MeshChoice, found: Found) -> Estimate | None:
        config = choice.of(self.config)
        try:
            model = laid_out(self.model, config.components, self.mesh(config, choice))
            if model.layout(LANGUAGE).ranks > self.config.data.batch_size:
                found.reject(IDLE)
                ranks = model.layout(LANGUAGE).ranks
                found.fewest_ranks = min(found.fewest_ranks or ranks, ranks)
                return None
            spans = spans_of_phases(config, model)
            inputs = self._even_inputs(config, model, spans)
            _check_given(inputs)
        except MeshError as error:
            found.reject(_uneven(error))
            return None
        except ConfigError as error:
            found.reject(str(error).partition(";")[0])
            return None
        size = self.step_bytes(config, model)
        options = self._options(size, inputs)
        lacking = self._lacking(choice, size, inputs, options)
        if lacking is not None:
            found.lacks(lacking)
            return None
        chosen = {one.name: self._roomy(one, options) for one in inputs}
        return self._estimated(LegalLayout(choice, config, model, spans, inputs, options), chosen)

    def _options(
        self, size: StepBytes, inputs: Sequence[SizingInputs]
    ) -> dict[str, dict[Remat, int]]:
        """Slots of rows for which there is room, by phase and remat, where they hold the longest item. What takes least
        memory stands first."""
        free = open_remat(self.config)
        options: dict[str, dict[Remat, int]] = {}
        for one in inputs:
            given = getattr(size.config.components, one.name).remat
            options[one.name] = {}
            for remat in REMATS if one.name in free else (given,):
                slots = size.fitting(one.name, self.budget, remat)
                if slots >= _least_capacity(one):
                    options[one.name][remat] = slots
        return options

    def _lacking(
        self,
        choice: MeshChoice,
        size: StepBytes,
        inputs: Sequence[SizingInputs],
        options: Mapping[str, Mapping[Remat, int]],
    ) -> Closest | None:
        """The phase without any option that lacks most; none where all have one."""
        free = open_remat(self.config)
        closest = None
        for one in inputs:
            if options[one.name]:
                continue
            given = getattr(size.config.components, one.name).remat
            least = REMATS[0] if one.name in free else given
            peak = size.peak(one.name, _least_capacity(one), least)
            # Rows that fit are a power of two: the longest item may lack less than a byte
            lacking = Closest(choice, one.name, max(peak - self.budget, 1.0))
            if closest is None or lacking.lacking > closest.lacking:
                closest = lacking
        return closest

    def _roomy(self, inputs: SizingInputs, options: Mapping[str, Mapping[Remat, int]]) -> Remat:
        """What is computed again least and still leaves room for rows of a few items or of all that a rank has."""
        of_phase = options[inputs.name]
        load = math.ceil(self.loads[inputs.name].slots / inputs.ranks)
        enough = max(_least_capacity(inputs), min(load, ROOMY_ITEMS * inputs.longest))
        roomy = [remat for remat, slots in of_phase.items() if slots >= enough]
        return roomy[-1] if roomy else next(iter(of_phase))

    def _estimated(self, layout: LegalLayout, remats: Mapping[str, Remat]) -> Estimate:
        """A layout with what is computed again."""
        config = with_remat(layout.config, remats)
        model = with_settings(layout.model, config.components)
        fitting = {phase: layout.options[phase][remat] for phase, remat in remats.items()}
        rows = {
            one.name: even_rows(
                self.loads[one.name], one, self._most_slots(one, fitting, layout.choice)
            )
            for one in layout.inputs
        }
        parts = self._even_parts(layout.choice, config, model, layout.inputs, rows)
        seconds = self.device.straggled(sum(parts.values()), layout.choice.devices)
        return Estimate(replace(layout, config=config, model=model), fitting, rows, parts, seconds)

    def _most_slots(
        self, inputs: SizingInputs, fitting: Mapping[str, int], choice: MeshChoice
    ) -> int:
        """Of a rank's row: what fits, or in stages so few that microbatches keep them busy."""
        most = fitting[inputs.name]
        if choice.stages == 1:
            return most
        share = self.loads[inputs.name].slots / inputs.ranks / (WAVES * choice.stages)
        return min(most, max(_least_capacity(inputs), math.ceil(share)))

    def _even_parts(
        self,
        choice: MeshChoice,
        config: Config,
        model: MLLM,
        inputs: Sequence[SizingInputs],
        rows: Mapping[str, EvenRows],
    ) -> dict[str, float]:
        """Seconds of a step in closed form, by part."""
        of_stage = model
        if choice.stages > 1:
            mesh = cluster_mesh(config, choice.sizes, self.cluster)
            of_stage = laid_out(model, config.components, mesh)
        backend = exchange_backend(config, of_stage)
        spec = even_spec(of_stage, inputs, rows, config.balance, backend)
        nothing_kept = dict.fromkeys(config.model.encoders, 0)
        programs = self.programs(config, of_stage, spec, nothing_kept)
        parts = even_step(programs, self.loads, rows, self.device)
        if choice.stages == 1:
            return parts
        return in_stages(parts, rows, choice.stages, model, self.device)

    def _refined(self, estimate: Estimate) -> Estimate:
        """With the remat of each phase that is fastest in closed form."""
        options = estimate.layout.options
        best = {phase: getattr(estimate.config.components, phase).remat for phase in options}
        fastest = {phase: estimate.phase_seconds(phase) for phase in options}
        for remat in REMATS:
            trial = {phase: remat if remat in options[phase] else best[phase] for phase in options}
            if trial == best:
                continue
            tried = self._estimated(estimate.layout, trial)
            for phase in options:
                if tried.phase_seconds(phase) < fastest[phase]:
                    fastest[phase] = tried.phase_seconds(phase)
                    best[phase] = trial[phase]
        return self._estimated(estimate.layout, best)

    # ------------------------------------------------------------------ whole plans

    def planned(self, estimate: Estimate) -> PlannedLayout:
        """Sizes for a layout, and its steps planned and simulated.

        Raises:
          PipelineError: its layers cannot be cut into so many stages.
        """
        sampled = self.lengths(estimate.config, estimate.model, estimate.layout.spans)
        inputs = self._inputs(estimate, sampled)
        if estimate.choice.stages > 1:
            return planned_in_stages(estimate, sampled, inputs, self.device, self.as_run)
        planned = self._plans(estimate, sampled, inputs)
        spec, plans, sampled = planned.spec, planned.plans, planned.sampled
        config, model = estimate.config, estimate.model
        used = {
            phase: max(plan.phases[phase].microbatches for plan in plans) for phase in spec.phases
        }
        config = _with_kept(config, self._kept_residuals(config, model, planned, used))
        programs = phased_programs(config, model, sampled.formats, spec, sampled.sources)
        times = tuple(
            simulate(programs, plan, items, self.device)
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

    def _inputs(self, estimate: Estimate, sampled: Sampled) -> list[SizingInputs]:
        """What sizes are chosen by: memory is that of the cluster, and a microbatch takes what it waits for weights."""
        inputs = sizing_inputs(
            estimate.config, estimate.model, sampled.formats, sampled.longest, estimate.layout.spans
        )
        if self.as_run:
            return inputs
        rate = self.device.peak * self.device.efficiency
        return [
            replace(
                one,
                fitting=estimate.fitting[one.name],
                microbatch_cost=max(
                    one.microbatch_cost, _rounded(estimate.gather_seconds(one.name) * rate)
                ),
            )
            for one in inputs
        ]

    def _plans(self, estimate: Estimate, sampled: Sampled, inputs: Sequence[SizingInputs]) -> Plans:
        """Shared by layouts of the same ranks and rows."""
        config, model = estimate.config, estimate.model
        grids = exchange_grids(model)
        nodes = nodes_of_ranks(config, model)
        backend = exchange_backend(config, model)
        arrays = [array.tobytes() for array in nodes.values()]
        arrays += [
            part.tobytes() for grid in grids.values() for part in (grid.encoder, grid.language)
        ]
        key = repr((id(sampled), _deciding(inputs), config.balance, backend, [*map(hash, arrays)]))
        if key not in self._known_plans:
            if not self.as_run:
                inputs = self._row_choice(sampled).chosen(inputs, grids, config.balance)
                # Clips are measured otherwise where several ranks hold a row
                sampled = self.lengths(config, model, {one.name: one.spans for one in inputs})
                inputs = [replace(one, longest=sampled.longest[one.name]) for one in inputs]
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
        """Of as many batches as segments and pools are chosen from."""
        number = max(SAMPLED_EXAMPLES // self.config.data.batch_size, 1)
        few = sampled.samples if self.as_run else sampled.samples[:number]
        return self._known_rows.setdefault(id(sampled), PhaseRows(few))

    def _kept_residuals(
        self, config: Config, model: MLLM, planned: Plans, used: Mapping[str, int]
    ) -> dict[str, int]:
        """Microbatches of encoders whose residuals stay between their passes, where the config leaves it open: at most
        those of a step."""
        spec, sampled = planned.spec, planned.sampled
        nothing = _with_kept(config, dict.fromkeys(config.model.encoders, 0))
        programs = phased_programs(nothing, model, sampled.formats, spec, sampled.sources)
        left = self.budget - programs_peak(programs, microbatches=used).bytes
        left *= KEPT_SHARE / max(len(config.model.encoders), 1)
        kept = {}
        for phase in config.model.encoders:
            given = getattr(config.phases, phase).kept_residuals
            if given == "auto":
                names = (ProgramName("encode", phase, *one) for one in spec.phases[phase].classes)
                one = max(residual_bytes(model, name) for name in names)
                given = 1 << int(math.log2(left / one)) if left >= one else 0
            kept[phase] = min(given, used[phase])
        return kept

    # ------------------------------------------------------------------ pieces

    def mesh(self, config: Config, choice: MeshChoice) -> AbstractMesh:
        """Devices of the cluster that need not exist."""
        return cluster_mesh(config, choice.mesh_sizes, self.cluster)

    def step_bytes(self, config: Config, model: MLLM) -> StepBytes:
        """What a step takes of a device."""
        media = sum(self.loads[phase].tokens for phase in model.config.encoders)
        tokens = media / model.layout(LANGUAGE).ranks
        return StepBytes(config, model, tokens, self._numbers, self._known_bytes)

    def programs(
        self, config: Config, model: MLLM, spec: PlanSpec, kept: Mapping[str, int]
    ) -> PhasedPrograms:
        """Of a run, not compiled."""
        config = _with_kept(config, kept)
        return phased_programs(config, model, self.sampled.formats, spec, self.sampled.sources)

    @cached_property
    def sampled(self) -> Sampled:
        """Lengths where every rank holds its rows alone, but for spans that the config names."""
        return self.lengths(self.config, self.model, self._named_spans)

    @cached_property
    def loads(self) -> dict[str, PhaseLoad]:
        """Of a batch, by phase."""
        return mean_loads(self.sampled.steps, model_flops(self.config, self.model))

    @cached_property
    def _numbers(self) -> Numbers:
        return parameter_numbers(self.model)

    @cached_property
    def _inputs_anywhere(self) -> list[SizingInputs]:
        """What sizes are chosen by, on any mesh."""
        sampled = self.sampled
        return sizing_inputs(
            self.config, self.model, sampled.formats, sampled.longest, self._named_spans
        )

    @property
    def _named_spans(self) -> Spans:
        spans = {phase: getattr(self.config.phases, phase).spans for phase in self.model.phases}
        return {phase: (1,) if named == "auto" else named for phase, named in spans.items()}

    def _even_inputs(self, config: Config, model: MLLM, spans: Spans) -> list[SizingInputs]:
        """The same on a mesh."""
        formats = self.sampled.formats
        layouts = {one.name: model.layout(one.name) for one in self._inputs_anywhere}
        return [
            replace(
                one,
                ranks=layouts[one.name].ranks,
                alignment=alignment(config, one.name, formats, layouts[one.name].parts),
                spans=spans[one.name] if config.may_share_rows else (1,),
            )
            for one in self._inputs_anywhere
        ]


# ---------------------------------------------------------------------------- configs


def _check_given(inputs: Sequence[SizingInputs]) -> None:
    """Raise `ConfigError` for capacities of the config that rows on a mesh cannot have."""
    for one in inputs:
        given = one.config.capacities
        if given != "auto":
            checked_capacities(given, one, max(one.spans))


def _least_capacity(inputs: SizingInputs) -> int:
    """Slots of a rank's row that holds the longest item, shared by as many ranks as may."""
    given = inputs.config.capacities
    if given != "auto":
        return max(given)
    return round_up(max(ceil_divide(inputs.longest, max(inputs.spans)), 1), inputs.alignment)


def _with_kept(config: Config, kept: Mapping[str, int]) -> Config:
    phases = {
        phase: getattr(config.phases, phase).model_copy(update={"kept_residuals": microbatches})
        for phase, microbatches in kept.items()
    }
    return config.model_copy(update={"phases": config.phases.model_copy(update=phases)})


def _rounded(amount: float) -> int:
    """To a power of two: layouts that differ little then share their rows."""
    return 1 << round(math.log2(amount)) if amount >= 1 else 0


def _deciding(inputs: Sequence[SizingInputs]) -> list[tuple[object, ...]]:
    """What of the inputs differs between layouts."""
    return [
        (one.name, one.ranks, one.alignment, one.spans, one.largest_capacity, one.microbatch_cost)
        for one in inputs
    ]


def _uneven(error: MeshError) -> str:
    """What no axis divides, without the sizes of the mesh."""
    match = _AXIS.match(str(error))
    return (
        f"{UNEVEN}: {match[2]} of {match[1]}, {match[3]}" if match else str(error).partition(";")[0]
    )
