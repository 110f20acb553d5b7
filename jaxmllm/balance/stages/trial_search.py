"""The search for rows and stages of a pipeline among trials.

Coordinate by coordinate: layout and chunks; then, up to twice, the capacities of the language model
and of each encoder or generator, and again layout and chunks. All of that is done first for rows
that most ranks hold together (they must hold the longest item, too, but are full with fewer
examples), and then for rows of fewer ranks.
"""

from __future__ import annotations

import math

from jaxmllm.arrays import ceil_divide
from jaxmllm.balance.stages.trial_choice import CHOICE
from jaxmllm.balance.stages.trials import Cut, Sampled, Trials
from jaxmllm.config.schema import MOST_ROW_CLASSES
from jaxmllm.phases import LANGUAGE
from sharding.pipeline.ring import PipelineError


def choose_sampled(trials: Trials) -> tuple[Trials, Sampled]:
    """The samples in rows and stages of least predicted step time. Rows of most ranks are tried
    first, then rows of fewer ranks as long as these cost less.

    Raises:
      ConfigError: encoder rows are given that do not hold one of the largest examples.
      PipelineError: more stages than layers.
    """
    some = trials.with_some()
    best: _Best | None = None
    for span in some.spans_to_try:
        best_of_span = _choose_rows_and_cut(some.of_span(span), best)
        if best is not None and best_of_span.cost_or_infinite >= best.cost_or_infinite:
            break
        best = best_of_span
    assert best is not None
    chosen = trials.of_span(best.trials.widest)
    try:
        return chosen, chosen.sampled(best.capacities, best.cut)
    except PipelineError:
        if trials.config.layout != "auto":
            raise
    # No layout can be cut so finely. A chain needs the fewest layers, so its error is raised.
    return chosen, chosen.sampled(best.capacities, Cut("chain"))


def _choose_rows_and_cut(tried: Trials, similar: _Best | None = None) -> _Best:
    """Capacities and stages of least predicted step time with rows of one span. If the number of
    microbatches is given, capacities are not searched: an average one fills a row of every phase.

    Args:
      similar: the best of another span, from which the search continues for one round.

    Raises:
      PipelineError: more stages than layers.
    """
    capacities = _first_capacities(tried)
    rounds = CHOICE.rounds
    if similar is not None and tried.microbatches is None:
        # Rows of fewer ranks have fewer slots, so the largest capacity may have to grow for the
        # longest item. Smaller classes are searched again.
        capacities = {
            name: tried.given(name) or (max(tried.least(name), largest),)
            for name, (largest, *_) in similar.capacities.items()
        }
        rounds = 1
    best = _Best(tried, capacities, _first_cut(tried) if similar is None else similar.cut)
    # A given number of microbatches decides the capacities (`_first_capacities`).
    to_choose = [] if tried.microbatches else [LANGUAGE, *tried.media]
    to_choose = [name for name in to_choose if tried.given(name) is None]
    # The cut is chosen first, because costs of capacities depend on it; `similar` brings its own.
    if similar is None:
        best.choose_cut()
    for _ in range(rounds if to_choose else 0):
        before = best.cost
        for name in to_choose:
            best.choose_capacity(name)
            best.add_classes(name, tried.added_class_worth)
        best.choose_cut()
        if best.cost == before:
            break
    return best


def _first_capacities(trials: Trials) -> dict[str, tuple[int, ...]]:
    """Capacities that an average microbatch fills, with as many microbatches as the config gives or
    the longest example allows."""
    microbatches = trials.microbatches
    if microbatches is None:
        most_microbatches = CHOICE.per_stage * trials.config.stages
        (*_, language) = trials.given(LANGUAGE) or (
            trials.capacity(LANGUAGE, most_microbatches, 1 / CHOICE.fill),
        )
        microbatches = max(1, ceil_divide(trials.load(LANGUAGE), language))
    return {
        name: trials.given(name) or (trials.capacity(name, microbatches, 1 / CHOICE.fill),)
        for name in trials.inputs
    }


def _first_cut(trials: Trials) -> Cut:
    layout = trials.config.layout
    return Cut("segments" if layout == "auto" else layout)


class _Best:
    """The best sizes so far."""

    def __init__(self, trials: Trials, capacities: dict[str, tuple[int, ...]], cut: Cut):
        self.trials = trials
        self.capacities = capacities
        self.cut = cut
        self.cost = trials.predicted(capacities, cut)

    @property
    def cost_or_infinite(self) -> float:
        return math.inf if self.cost is None else self.cost

    def choose_capacity(self, name: str) -> None:
        """Choose the capacities of a phase: one class, and one more as long as that gains enough.
        For media, then take the fullest rows that take no longer."""
        if len(self.capacities[name]) == 1:
            for capacities in self._candidates_for_smallest(name):
                self._try(self.capacities | {name: capacities}, self.cut, CHOICE.capacity_worth)
        for classes in range(1, self.trials.inputs[name].row_classes):
            further = len(self.capacities[name]) == classes
            worth = CHOICE.class_worth if further else CHOICE.capacity_worth
            before = self.capacities[name][:classes]
            # Next to smaller rows, the largest ones need only hold the longest item.
            self._try_class(name, before, self.trials.least(name), worth)
            if len(self.capacities[name]) > classes:
                continue
            one_more = self.trials.further(name, before, before[0])
            if not self._take_fullest(name, one_more, CHOICE.class_fill):
                break
        if name != LANGUAGE:  # language rows decide which examples run together
            self._take_fullest(name, self._candidates_for_smallest(name), 1.0, CHOICE.chance)

    def add_classes(self, name: str, worth: float = CHOICE.added_class_worth) -> None:
        """Where `row_classes` is `auto` and many slots of a phase are empty, as in batches whose
        longest example is a large part of them, add classes to the usual number as long as each
        costs less than `worth` times what is best without it."""
        inputs = self.trials.inputs[name]
        if inputs.config.row_classes != "auto":
            return
        if self.trials.fill(name, self.capacities) >= CHOICE.full:
            return
        while inputs.row_classes <= len(self.capacities[name]) < MOST_ROW_CLASSES:
            before = self.capacities[name]
            self._try_class(name, before, before[0], worth)
            if self.capacities[name] == before:
                return

    def _try_class(self, name: str, before: tuple[int, ...], largest: int, worth: float) -> None:
        """Try capacities with one more class than `before`, whose first becomes `largest`. Once a
        class is taken, its compile time is paid: other sizes of it need not gain as much."""
        for capacities in self.trials.further(name, before, largest):
            if self._try(self.capacities | {name: capacities}, self.cut, worth):
                worth = CHOICE.capacity_worth

    def _candidates_for_smallest(self, name: str) -> list[tuple[int, ...]]:
        """Candidate capacities that differ from the present ones only in the smallest."""
        *larger, _ = present = self.capacities[name]
        if larger:
            return self.trials.further(name, tuple(larger), present[0])
        runs = self.trials.runs(self.capacities)
        rows = max((run.phases[LANGUAGE].count for run, *_ in runs), default=1)
        return [(capacity,) for capacity in self.trials.candidates(name, rows)]

    def _take_fullest(
        self, name: str, others: list[tuple[int, ...]], share: float, chance: float = 1.0
    ) -> bool:
        """Of the other capacities with less than `share` of the present slots and no more than
        `chance` times the cost, take those with fewest slots; return whether there are any."""
        trials = self.trials
        before = self.capacities
        bound = chance * self.cost_or_infinite + 1  # costs have to be below this
        least_slots = share * trials.slots(name, before)
        for capacities in others:
            tried = before | {name: capacities}
            slots = trials.slots(name, tried)
            if slots >= least_slots:
                continue
            cost = trials.predicted(tried, self.cut, bound)
            if cost is not None:
                self.capacities = tried
                self.cost = cost
                least_slots = slots
        return self.capacities is not before

    def choose_cut(self) -> None:
        """Try layouts, and then numbers of chunks of each component in turn."""
        config = self.trials.config
        if config.layout == "auto":
            for layout in ("chain", "parallel", "segments"):
                self._try(self.capacities, Cut(layout))
        if self.cut.layout != "segments":
            return
        for name in (LANGUAGE, *self.trials.media):
            is_encoder = name in self.trials.encoders
            for chunks in CHOICE.encoder_chunks if is_encoder else CHOICE.chunks:
                self._try(self.capacities, self.cut.with_chunks(name, chunks), CHOICE.worth)

    def _try(self, capacities: dict[str, tuple[int, ...]], cut: Cut, worth: float = 1.0) -> bool:
        """Take these sizes if they cost less than `worth` times the best; return whether so."""
        if (capacities, cut) == (self.capacities, self.cut):
            return False
        bound = worth * self.cost_or_infinite
        cost = self.trials.predicted(capacities, cut, bound)
        if cost is not None and cost < bound:
            self.capacities = capacities
            self.cut = cut
            self.cost = cost
            return True
        return False
