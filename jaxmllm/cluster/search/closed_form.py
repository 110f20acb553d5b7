"""The second sieve: the time of legal layouts in closed form (even_step.py, staged_step.py), with
remat by phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.cluster.search.cluster_mesh import cluster_mesh
from jaxmllm.cluster.search.even_step import EvenRows, even_rows, even_spec, even_step
from jaxmllm.cluster.search.layouts import Estimate, LegalLayout
from jaxmllm.cluster.search.legal_layouts import REMATS, least_capacity
from jaxmllm.cluster.search.mesh_choices import MeshChoice
from jaxmllm.cluster.search.request import Request
from jaxmllm.cluster.search.staged_step import in_stages
from jaxmllm.cluster.search.step_bytes import with_kept, with_remat
from jaxmllm.config.schema import Config, Remat
from jaxmllm.models.compose import laid_out, with_settings
from jaxmllm.models.mllm import MLLM
from jaxmllm.setup.build import phased_programs
from jaxmllm.setup.exchange_layout import exchange_backend

WAVES: Final = 4  # microbatches per stage, of rows in closed form
ROOMY_ITEMS: Final = 2  # longest items that rows should hold before layers keep more for backward


class ClosedForm:
    """The closed-form estimates of a request's layouts."""

    def __init__(self, request: Request):
        self._request = request

    def estimate(self, layout: LegalLayout) -> Estimate:
        """The estimate of a layout, with the remat that memory suggests for each phase."""
        remats = {sizing.name: self._roomy(sizing, layout.options) for sizing in layout.inputs}
        return self._remat_estimate(layout, remats)

    def refined(self, estimate: Estimate) -> Estimate:
        """The estimate with the remat for each phase that is fastest in closed form."""
        options = estimate.layout.options
        best = {phase: getattr(estimate.config.components, phase).remat for phase in options}
        fastest = {phase: estimate.phase_seconds(phase) for phase in options}
        # Phases follow one another, so each one's fastest is found by itself: a trial gives
        # one remat to all phases that can have it.
        for remat in REMATS:
            trial = best | {phase: remat for phase in options if remat in options[phase]}
            if trial == best:
                continue
            tried = self._remat_estimate(estimate.layout, trial)
            for phase in options:
                if tried.phase_seconds(phase) < fastest[phase]:
                    fastest[phase] = tried.phase_seconds(phase)
                    best[phase] = trial[phase]
        return self._remat_estimate(estimate.layout, best)

    def _roomy(self, inputs: SizingInputs, options: Mapping[str, Mapping[Remat, int]]) -> Remat:
        """The remat that computes least again, of those that leave room for rows of a few items or
        of all that a rank has."""
        of_phase = options[inputs.name]
        load = math.ceil(self._request.loads[inputs.name].slots / inputs.ranks)
        enough = max(least_capacity(inputs), min(load, ROOMY_ITEMS * inputs.longest))
        roomy = [remat for remat, slots in of_phase.items() if slots >= enough]
        return roomy[-1] if roomy else next(iter(of_phase))

    def _remat_estimate(self, layout: LegalLayout, remats: Mapping[str, Remat]) -> Estimate:
        """The estimate of a layout with these remats, by phase."""
        config = with_remat(layout.config, remats)
        model = with_settings(layout.model, config.components)
        fitting = {phase: layout.options[phase][remat] for phase, remat in remats.items()}
        rows = {
            sizing.name: even_rows(
                self._request.loads[sizing.name],
                sizing,
                self._most_slots(sizing, fitting, layout.choice),
            )
            for sizing in layout.inputs
        }
        part_seconds = self._even_part_seconds(layout.choice, config, model, layout.inputs, rows)
        seconds = self._request.device.straggled(sum(part_seconds.values()), layout.choice.devices)
        return Estimate(
            replace(layout, config=config, model=model), fitting, rows, part_seconds, seconds
        )

    def _most_slots(
        self, inputs: SizingInputs, fitting: Mapping[str, int], choice: MeshChoice
    ) -> int:
        """Most slots of a rank's row: as many as fit, or with stages so few that there are
        microbatches to keep the stages busy."""
        room = fitting[inputs.name]
        if choice.stages == 1:
            return room
        share = self._request.loads[inputs.name].slots / inputs.ranks / (WAVES * choice.stages)
        return min(room, max(least_capacity(inputs), math.ceil(share)))

    def _even_part_seconds(
        self,
        choice: MeshChoice,
        config: Config,
        model: MLLM,
        inputs: Sequence[SizingInputs],
        rows: Mapping[str, EvenRows],
    ) -> dict[str, float]:
        """Seconds of a step in closed form, by part."""
        # With stages, a step is first timed without them, on the devices of one stage.
        of_stage = model
        if choice.stages > 1:
            mesh = cluster_mesh(config, choice.sizes, self._request.cluster)
            of_stage = laid_out(model, config.components, mesh)
        backend = exchange_backend(config, of_stage)
        spec = even_spec(of_stage, inputs, rows, config.balance, backend)
        nothing_kept = with_kept(config, dict.fromkeys(config.model.two_passes, 0))
        sampled = self._request.sampled
        programs = phased_programs(nothing_kept, of_stage, sampled.formats, spec, sampled.sources)
        part_seconds = even_step(programs, self._request.loads, rows, self._request.device)
        if choice.stages == 1:
            return part_seconds
        return in_stages(part_seconds, rows, config, model, self._request.device)
