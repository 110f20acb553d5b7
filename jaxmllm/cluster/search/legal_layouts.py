"""The first sieve: layouts that the model can have, and the rows of them that fit in memory.

MeshChoice --axes divide, ranks have examples, bytes fit--> LegalLayout, or why not
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

from jaxmllm.balance.sizes.capacities import checked_capacities, smallest_capacity
from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.cluster.search.layouts import Closest, LegalLayout, SearchResult
from jaxmllm.cluster.search.mesh_choices import MeshChoice, open_remat
from jaxmllm.cluster.search.request import Request
from jaxmllm.cluster.search.step_bytes import (
    KnownPrograms,
    Numbers,
    StepBytes,
    parameter_numbers,
)
from jaxmllm.config.read import config_tree, parse_config
from jaxmllm.config.schema import Config, ConfigError, Remat
from jaxmllm.models.compose import laid_out
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.row_shapes import alignment
from jaxmllm.setup.spans import Spans, spans_of_phases
from sharding.mesh import MeshError

# The remat that takes least memory comes first
REMATS: Final[tuple[Remat, ...]] = ("full", "dots", "none")
UNEVEN: Final = "an axis of parameters not divisible"
FEWER_LAYERS: Final = "in stages: more of them than layers"
IDLE: Final = "more ranks than examples"
# In a `MeshError`'s message: the parameter, its axis that a mesh does not divide, and its length
_UNDIVIDED_AXIS = re.compile(r"^([\w.]+).*: axis '(\w+)' of length (\d+)")


class LegalLayouts:
    """The legal layouts of a request."""

    def __init__(self, request: Request):
        self._request = request
        self._numbers: Numbers = parameter_numbers(request.model)
        self._known_bytes: KnownPrograms = {}

    def of(self, choice: MeshChoice, result: SearchResult) -> LegalLayout | None:
        """The layout of a choice, with what fits its memory; none where it is rejected, which
        `result` counts."""
        if why := self._stage_count_refusal(choice.stages):
            result.reject(why)
            return None
        config = choice.of(self._request.config)
        try:
            model = laid_out(
                self._request.model, config.components, self._request.mesh(config, choice)
            )
            if choice.stages == 1:
                for phase in model.phases:  # raises where ranks would have different layers
                    model.by_device(phase)
            if model.layout(LANGUAGE).ranks > self._request.config.data.batch_size:
                result.reject(IDLE)
                ranks = model.layout(LANGUAGE).ranks
                result.fewest_ranks = min(result.fewest_ranks or ranks, ranks)
                return None
            spans = spans_of_phases(config, model)
            inputs = self._mesh_inputs(config, model, spans)
            _check_capacities(inputs)
        except MeshError as error:
            result.reject(_rejection_reason(error))
            return None
        except ConfigError as error:
            result.refuses(error)
            return None
        size = self.step_bytes(config, model)
        options = self._remat_options(size, inputs)
        lacking = self._tightest_phase(choice, size, inputs, options)
        if lacking is not None:
            result.lacks(lacking)
            return None
        return LegalLayout(choice, config, model, spans, inputs, options)

    def _stage_count_refusal(self, stages: int) -> str:
        """Why the config cannot have so many stages; empty where it can."""
        if stages == 1:
            return ""
        model = self._request.model
        layers = sum(getattr(model.config, phase).layers for phase in model.phases)
        return FEWER_LAYERS if stages > layers else self._stages_refusal

    @cached_property
    def _stages_refusal(self) -> str:
        """Why a config with these keys cannot have stages; empty where it can."""
        tree = config_tree(self._request.config)
        tree["pipeline"]["stages"] = max(self._request.config.pipeline.stages, 2)
        try:
            parse_config(tree, "stages")
        except ConfigError as error:
            return f"in stages: {str(error).partition(';')[0]}"
        return ""

    def step_bytes(self, config: Config, model: MLLM) -> StepBytes:
        """The bytes that a step takes on a device."""
        exchanged = sum(self._request.loads[phase].tokens for phase in model.phases)
        tokens = exchanged / model.layout(LANGUAGE).ranks
        return StepBytes(config, model, tokens, self._numbers, self._known_bytes)

    def _remat_options(
        self, size: StepBytes, inputs: Sequence[SizingInputs]
    ) -> dict[str, dict[Remat, int]]:
        """Slots of a rank's row that fit in memory, by phase and remat, where such rows hold the
        longest item. The remat that takes least memory comes first."""
        free = open_remat(self._request.config)
        # With another number of stages than the config's, only the first remat is tried:
        # microbatches in flight leave no room for layers to keep more
        as_given = size.stages == self._request.config.pipeline.stages
        open_remats = REMATS if as_given else REMATS[:1]
        options: dict[str, dict[Remat, int]] = {}
        budget = self._request.budget
        for sizing in inputs:
            given_remat = getattr(size.config.components, sizing.name).remat
            least_slots = least_capacity(sizing)
            options[sizing.name] = {}
            for remat in open_remats if sizing.name in free else (given_remat,):
                slots = size.fitting(sizing.name, budget, remat)
                # `slots` is a power of two: a longest item of more slots may fit all the same
                if slots >= least_slots or size.peak(sizing.name, least_slots, remat) <= budget:
                    options[sizing.name][remat] = max(slots, least_slots)
        return options

    def _tightest_phase(
        self,
        choice: MeshChoice,
        size: StepBytes,
        inputs: Sequence[SizingInputs],
        options: Mapping[str, Mapping[Remat, int]],
    ) -> Closest | None:
        """Of the phases without any option, the one that lacks most; none where all have one."""
        free = open_remat(self._request.config)
        closest = None
        for sizing in inputs:
            if options[sizing.name]:
                continue
            given_remat = getattr(size.config.components, sizing.name).remat
            # The first remat takes the least memory, so with it the phase lacks least.
            least_remat = REMATS[0] if sizing.name in free else given_remat
            peak = size.peak(sizing.name, least_capacity(sizing), least_remat)
            lacking = Closest(choice, sizing.name, peak - self._request.budget)
            if closest is None or lacking.lacking > closest.lacking:
                closest = lacking
        return closest

    def _mesh_inputs(self, config: Config, model: MLLM, spans: Spans) -> list[SizingInputs]:
        """The request's sizing inputs, with the ranks, alignment and spans of a mesh."""
        formats = self._request.sampled.formats
        mesh_inputs = []
        for sizing in self._request.inputs:
            name = sizing.name
            layout = model.layout(name)
            mesh_inputs.append(
                replace(
                    sizing,
                    ranks=layout.ranks,
                    alignment=alignment(config, name, formats, layout.parts),
                    spans=spans[name] if config.may_share_rows else (1,),
                )
            )
        return mesh_inputs


def _check_capacities(inputs: Sequence[SizingInputs]) -> None:
    """Raise `ConfigError` for capacities in the config that rows on a mesh cannot have."""
    for sizing in inputs:
        capacities = sizing.config.capacities
        if capacities != "auto":
            checked_capacities(capacities, sizing, max(sizing.spans))


def least_capacity(inputs: SizingInputs) -> int:
    """Fewest slots per rank of a row that holds the longest item, shared by as many ranks as
    allowed; the largest capacity where the config gives them."""
    capacities = inputs.config.capacities
    if capacities != "auto":
        return max(capacities)
    return smallest_capacity(inputs, max(inputs.spans))


def _rejection_reason(error: MeshError) -> str:
    """The reason of a rejection: what the mesh does not divide, without the sizes of the mesh."""
    match = _UNDIVIDED_AXIS.match(str(error))
    return (
        f"{UNEVEN}: {match[2]} of {match[1]}, {match[3]}" if match else str(error).partition(";")[0]
    )
