"""The search for a static configuration: what a config leaves open is chosen by the step time of
real batches.

    meshes, component layouts                   mesh_choices.py
        --legal, and its bytes fit-->           rejections, counted by reason     legal_layouts.py
        --closed-form time, remat by phase-->   the fastest                       closed_form.py
        --whole plans of sampled batches-->     bytes of programs, rejections     whole_plans.py
                                                ranked layouts, the first wins    layouts.py

Times within `EQUAL` count as equal: then the mesh with fewer axes is preferred. The same input
gives the same result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from jaxmllm.cluster.search.closed_form import ClosedForm
from jaxmllm.cluster.search.layouts import (
    Estimate,
    LengthsError,
    PlannedLayout,
    SearchResult,
    by_time,
    ranked,
)
from jaxmllm.cluster.search.legal_layouts import LegalLayouts
from jaxmllm.cluster.search.mesh_choices import MeshChoice, mesh_choices
from jaxmllm.cluster.search.no_layout import why_none
from jaxmllm.cluster.search.request import Request
from jaxmllm.cluster.search.whole_plans import WholePlans
from jaxmllm.config.schema import ConfigError
from sharding.pipeline.ring import PipelineError

# A layout may be the fastest if its closed form exceeds the fastest plan by at most this share
NEAR: Final = 0.02
# Layouts whose batches are planned: the fastest in closed form, until so many items are planned,
# and at least and at most so many layouts
PLANNED_ITEMS: Final = 200_000
FEWEST_PLANNED = 4
MOST_PLANNED = 12
STAGED_PLANNED: Final = 4  # planned layouts in stages: finding sizes by trial takes seconds
STAGED_BESIDE: Final = 2  # the same, where layouts without stages fit
REFINED: Final = 24  # layouts of which every remat is tried
REFINED_STAGED: Final = 8  # the same, of those in stages


@dataclass(frozen=True)
class Planner(Request):
    """Plans a config on devices of a cluster."""

    @cached_property
    def legal(self) -> LegalLayouts:
        return LegalLayouts(self)

    @cached_property
    def closed_form(self) -> ClosedForm:
        return ClosedForm(self)

    @cached_property
    def whole(self) -> WholePlans:
        return WholePlans(self)

    def search(self, devices: int) -> SearchResult:
        """The layouts of so many devices that fit, the best first.

        Raises:
          ConfigError: there is none; the message says why and what to change.
        """
        result = self.estimates(devices)
        if not result.estimates:
            raise ConfigError(why_none(self, result, devices))
        plain = self._sorted_estimates(result, False, REFINED)
        staged = self._sorted_estimates(result, True, REFINED_STAGED)
        result.estimates = sorted([*plain, *staged], key=by_time)
        fitting = self._planned_whole(plain, self._finalist_count(), result)
        if fitting:
            # In addition to layouts without stages, only those in stages that may be faster
            quicker = [estimate for estimate in staged if estimate.seconds < _least_time(fitting)]
            staged = quicker[:STAGED_BESIDE]
        fitting += self._planned_whole(staged, STAGED_PLANNED, result)
        if not fitting:
            raise ConfigError(why_none(self, result, devices))
        result.ranked = ranked(fitting)
        return result

    def _sorted_estimates(self, result: SearchResult, staged: bool, refined: int) -> list[Estimate]:
        """Layouts with stages, or those without, by time; the first ones with every remat tried."""
        ordered = sorted(
            (estimate for estimate in result.estimates if (estimate.choice.stages > 1) == staged),
            key=by_time,
        )
        leaders = [self.closed_form.refined(estimate) for estimate in ordered[:refined]]
        return sorted([*leaders, *ordered[refined:]], key=by_time)

    def _planned_whole(
        self, estimates: Sequence[Estimate], number: int, result: SearchResult
    ) -> list[PlannedLayout]:
        """The first `number` layouts, planned whole, as far as they fit; where none fits, the next
        one that does. After `FEWEST_PLANNED`, only layouts are planned that may be as fast as the
        others (`NEAR`), because in closed form nothing waits."""
        fitting: list[PlannedLayout] = []
        for index, estimate in enumerate(estimates):
            slower = estimate.seconds > _least_time(fitting) * (1 + NEAR)
            if fitting and (index >= number or (slower and index >= FEWEST_PLANNED)):
                break
            planned = self._planned(estimate, result)
            if planned is not None and self.fits(planned, result):
                fitting.append(planned)
        return fitting

    def _planned(self, estimate: Estimate, result: SearchResult) -> PlannedLayout | None:
        """The layout planned whole; none where its stages cannot be planned, or its ranks cannot
        share rows widely enough, which `result` counts.

        Raises:
          ConfigError: without stages, an error that no other layout would avoid.
        """
        try:
            return self.whole.planned(estimate)
        except LengthsError as error:
            result.refuses(error)
            return None
        except (PipelineError, ConfigError) as error:
            if estimate.choice.stages == 1:
                raise
            result.fails(error)
            return None

    def fits(self, layout: PlannedLayout, result: SearchResult) -> bool:
        """Whether a planned layout fits in memory; one that does not is counted and struck out."""
        if layout.peak.bytes <= self.budget:
            return True
        over = layout.over(self.budget)
        result.lacks(over)
        result.struck.append((layout, over.words))
        return False

    def alone(self, choice: MeshChoice) -> PlannedLayout:
        """The config planned on one mesh.

        Raises:
          ConfigError: the mesh is not legal, or the config does not fit.
        """
        result = SearchResult(considered=1, meshes=1)
        estimate = self._estimate(choice, result)
        if estimate is None:
            raise ConfigError(why_none(self, result, choice.devices, may_open=False))
        return self.whole.planned(estimate)

    def estimates(self, devices: int) -> SearchResult:
        """The first two sieves: layouts that are legal and fit, with their time in closed form."""
        choices = mesh_choices(self.config, devices)
        result = SearchResult(len(choices), len({choice.sizes_key for choice in choices}))
        for choice in choices:
            estimate = self._estimate(choice, result)
            if estimate is not None:
                result.estimates.append(estimate)
        return result

    def _finalist_count(self) -> int:
        """How many layouts are planned whole."""
        items = max(1, sum(len(items.length) for items in self.sampled.steps[0].phases.values()))
        steps = len(self.sampled.steps)
        layouts = PLANNED_ITEMS // (items * steps)
        return min(max(layouts, FEWEST_PLANNED), MOST_PLANNED)

    def _estimate(self, choice: MeshChoice, result: SearchResult) -> Estimate | None:
        layout = self.legal.of(choice, result)
        return None if layout is None else self.closed_form.estimate(layout)


def _least_time(planned: Sequence[PlannedLayout]) -> float:
    """Seconds of the fastest; infinite where there is none."""
    return min((layout.seconds for layout in planned), default=math.inf)
