"""Layouts on their way through the search: legal, estimated in closed form, planned whole; and the
result of the search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np

from jaxmllm.balance.records import BatchItems, PlanSpec, StepPlan
from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.cluster.clusters import GB
from jaxmllm.cluster.device_peak import Peak
from jaxmllm.cluster.search.even_step import EvenRows
from jaxmllm.cluster.search.mesh_choices import MeshChoice
from jaxmllm.cluster.simulate import StepTime
from jaxmllm.config.schema import Config, ConfigError, Remat
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat
from jaxmllm.setup.spans import Spans
from jaxmllm.training.programs.base import ProgramName, Programs

EQUAL: Final = 0.01  # times that differ by less than this share count as equal
OVER_MEMORY: Final = "over memory"


@dataclass(frozen=True)
class Sampled:
    """Lengths of batches as training will draw them."""

    samples: Sequence[BatchItems]  # batches that sizes are chosen from
    others: Sequence[BatchItems]  # other batches that may come: of each source alone
    steps: Sequence[BatchItems]  # batches that are planned: the next ones
    longest: Mapping[str, int]  # slots of the largest item, by phase
    formats: Mapping[str, RowFormat]  # by encoder phase
    sources: int  # number of sources, whose losses are reported one by one
    largest: Sequence[
        BatchItems
    ] = ()  # examples that a run in stages shall hold, where there are stages


class LengthsError(ConfigError):
    """Batches that cannot be drawn: the data are damaged, or rows of a layout are too small for
    some of them."""


# Takes spans, too: the examples that are refused depend on how many ranks hold a row together.
# Raises `LengthsError`.
LengthsOf = Callable[[Config, MLLM, Spans], Sampled]


@dataclass(frozen=True)
class Plans:
    """Sizes, and the planned batches."""

    spec: PlanSpec
    plans: tuple[StepPlan, ...]
    sampled: Sampled  # of which `steps` were planned


@dataclass(frozen=True)
class LegalLayout:
    """A legal layout, and the rows that fit its memory."""

    choice: MeshChoice
    config: Config  # on this mesh
    model: MLLM
    spans: Spans
    inputs: Sequence[SizingInputs]
    options: Mapping[str, Mapping[Remat, int]]  # slots of a rank's row that fit, by phase and remat


@dataclass(frozen=True)
class Estimate:
    """The step time of a layout in closed form, with remat chosen."""

    layout: LegalLayout
    fitting: Mapping[str, int]  # slots of a rank's row for which there is room, by phase
    rows: Mapping[str, EvenRows]
    parts: Mapping[str, float]  # seconds, named as in `StepTime`, without `straggling`
    seconds: float

    @property
    def choice(self) -> MeshChoice:
        return self.layout.choice

    @property
    def config(self) -> Config:
        return self.layout.config

    @property
    def model(self) -> MLLM:
        return self.layout.model

    def phase_seconds(self, phase: str) -> float:
        """Seconds of the phase's programs."""
        return sum(seconds for name, seconds in self.parts.items() if name.startswith(f"{phase}/"))

    def gather_seconds(self, phase: str) -> float:
        """Seconds that a microbatch of the phase waits for weights and their gradients."""
        return self.parts[f"{phase}/weights"] / self.rows[phase].microbatches


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with sizes, and steps of sampled batches that were planned for it."""

    choice: MeshChoice
    config: Config
    spec: PlanSpec
    programs: Programs
    plans: tuple[StepPlan, ...]
    times: tuple[StepTime, ...]
    peak: Peak  # of a device
    even_seconds: float  # in closed form

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by part, the mean over the batches."""
        names = self.times[0].parts
        return {name: self._mean([time.parts[name] for time in self.times]) for name in names}

    @property
    def seconds(self) -> float:
        """Seconds of a step, the mean over the batches."""
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        return self._mean([time.mfu for time in self.times])

    @property
    def hfu(self) -> float:
        return self._mean([time.hfu for time in self.times])

    @property
    def ends(self) -> tuple[float, float]:
        """Seconds if everything overlaps that can, and if nothing does."""
        return self._mean([time.low for time in self.times]), self._mean(
            [time.high for time in self.times]
        )

    @property
    def microbatches(self) -> dict[str, int]:
        """Most microbatches of a planned step, by phase."""
        return {
            phase: max(plan.phases[phase].microbatches for plan in self.plans)
            for phase in self.spec.phases
        }

    def over(self, budget: float) -> Closest:
        """What the layout lacks, for a peak above the budget."""
        return Closest(self.choice, program_words(self.peak.program), self.peak.bytes - budget)

    def statistic(self, name: str) -> float:
        """Mean of a statistic over the plans, which counts as 0 in a plan without it."""
        return self._mean([plan.statistics.get(name, 0.0) for plan in self.plans])

    @staticmethod
    def _mean(values: Sequence[float]) -> float:
        return float(np.mean(values))


@dataclass(frozen=True)
class Closest:
    """A layout over memory, and how much it lacks. A search reports the one that lacks least."""

    choice: MeshChoice
    place: str  # the phase whose programs need most, or the program
    lacking: float  # bytes

    @property
    def words(self) -> str:
        """Why the layout is not chosen."""
        return f"{OVER_MEMORY} by {self.lacking / GB:.1f} GB in {self.place}"


@dataclass
class SearchResult:
    """What a search decided about all layouts that it considered."""

    considered: int = 0
    meshes: int = 0  # different meshes of these layouts
    rejected: Counter[str] = field(default_factory=Counter)
    closest: Closest | None = None
    # Fewest ranks of a layout that was rejected because it has more ranks than examples
    fewest_ranks: int | None = None
    # Message of the last layout whose stages could not be planned
    failure: str | None = None
    # Message of the first layout whose mesh does not allow the config's rows or data
    refusal: str | None = None
    estimates: list[Estimate] = field(default_factory=list)
    ranked: list[PlannedLayout] = field(default_factory=list)
    # Layouts that were planned and then rejected, each with the reason in words
    struck: list[tuple[PlannedLayout, str]] = field(default_factory=list)

    def reject(self, reason: str) -> None:
        self.rejected[reason] += 1

    def lacks(self, closest: Closest) -> None:
        """Count a layout that is over memory."""
        self.reject(f"{OVER_MEMORY} in {closest.place}")
        if self.closest is None or closest.lacking < self.closest.lacking:
            self.closest = closest

    def refuses(self, error: ConfigError) -> None:
        """Count a layout whose mesh does not allow the config's rows or data."""
        self.refusal = self.refusal or str(error)
        self.reject(str(error).partition(";")[0])

    def fails(self, error: Exception) -> None:
        """Count a layout in stages that cannot be planned."""
        self.failure = str(error)
        self.reject(f"in stages: {self.failure.partition(';')[0]}")


def program_words(name: ProgramName) -> str:
    """The function of a program and, except for the language phase, its phase."""
    return f"{name.function} {name.subject}".strip() if name.subject != LANGUAGE else name.function


def ranked(planned: Sequence[PlannedLayout]) -> list[PlannedLayout]:
    """Layouts by time; of those within `EQUAL` of the fastest, the ones with fewer axes first."""
    fastest = min(layout.seconds for layout in planned)

    def key(layout: PlannedLayout) -> tuple[float, ...]:
        if layout.seconds <= fastest * (1 + EQUAL):
            return (0, layout.choice.axes, layout.seconds)
        return (1, layout.seconds, layout.choice.axes)

    return sorted(planned, key=lambda layout: (key(layout), layout.choice))


def by_time(estimate: Estimate) -> tuple[Any, ...]:
    return estimate.seconds, estimate.choice.axes, estimate.choice
