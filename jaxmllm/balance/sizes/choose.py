"""Choosing the fixed sizes of a run, once, from sampled batches: row classes, segments, pools, pair
slots.

    sampled batches, and more drawn again from their examples        loads.py
        --candidates, judged--> capacities, max_segments             capacities.py
        --items, placed--> pools and pair slots                      exchange_sizes.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property

from jaxmllm.arrays import Ints, Longs, round_up
from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import BatchItems, ExchangeGrid, PhaseSpec, PlanSpec
from jaxmllm.balance.rows.assign import assign
from jaxmllm.balance.sizes.capacities import (
    choose_classes,
    given_classes,
)
from jaxmllm.balance.sizes.exchange_sizes import choose_routes
from jaxmllm.balance.sizes.inputs import SizingInputs, phase_spec, with_head_room
from jaxmllm.balance.sizes.loads import Load, loads_of, redraw, to_plan
from jaxmllm.balance.step_plan import example_ranks
from jaxmllm.config.schema import BalanceConfig
from jaxmllm.phases import LANGUAGE

SEGMENT_ALIGNMENT = 4  # items per row


def choose_sizes(
    samples: Sequence[BatchItems],
    phases: Sequence[SizingInputs],
    grids: Mapping[str, ExchangeGrid],
    balance: BalanceConfig,
    nodes: Mapping[str, Ints] | None = None,
    backend: str = "padded",
    others: Sequence[BatchItems] = (),
    rows: PhaseRows | None = None,
) -> PlanSpec:
    """Fill in every size that the config leaves to `auto`, and check the others.

    Args:
      samples: global batches drawn as training will draw them; 128 leave little to chance.
      phases: in the order of `make_phases`.
      grids: by encoder or generator phase.
      balance: mode, pool_slots, pair_slots.
      nodes: by phase, node of each rank; None: not known.
      backend: name of the exchange's backend.
      others: batches that may occur though no sample is like them, such as those of one source
        alone: segments, pools and pair slots hold them without many rounds.
      rows: row choices for the same samples, which remember those made before; None: make new ones.

    Raises:
      ConfigError: a size of the config is not a multiple of the alignment, or too small for the
        largest item.
    """
    specs = (rows or PhaseRows(samples)).chosen(phases, grids, balance)
    specs = {
        inputs.name: _with_segments_of(others, specs[inputs.name], inputs) for inputs in phases
    }
    longest = {inputs.name: inputs.longest for inputs in phases}
    routes = choose_routes(to_plan(samples), specs, longest, grids, balance, nodes, others)
    routes = {phase: replace(route, backend=backend) for phase, route in routes.items()}
    return PlanSpec(specs, routes, balance.mode, dict(nodes or {}))


class PhaseRows:
    """Choices of the rows of phases from sampled batches. It remembers them, because meshes that
    are compared have many in common."""

    def __init__(self, samples: Sequence[BatchItems]):
        self.samples = samples
        self._known_specs: dict[tuple[bool, float, SizingInputs], PhaseSpec] = {}
        self._flops_of = cache(self._flops)  # needed again for every mesh

    def chosen(
        self,
        phases: Sequence[SizingInputs],
        grids: Mapping[str, ExchangeGrid],
        balance: BalanceConfig,
        segments: bool = True,
    ) -> dict[str, PhaseSpec]:
        """The rows of every phase, in the order of `phases`.

        Args:
          segments: whether to choose the largest number of items in a row, too; if not, a row may
            have any number.
        """
        batches = self._batches
        flops = {inputs.name: self._flops_of(inputs.name, inputs.flops) for inputs in phases}
        total = max(sum(flops.values()), 1)
        encoders = {inputs.name: inputs for inputs in phases}
        language = encoders.pop(LANGUAGE)
        # For each batch the ranks of its examples, where media stay with their example.
        ranks_of_examples: list[Longs | None] = [None] * len(batches)
        if balance.mode in ("none", "tokens"):
            generators = [inputs.name for inputs in phases if inputs.phase.generates]
            ranks_of_examples = [
                example_ranks(batch, language.ranks, balance.mode, generators=generators)
                for batch in batches
            ]
        specs: dict[str, PhaseSpec] = {}
        # Language first, because encoders may follow its placement of examples.
        for inputs in (language, *encoders.values()):
            share = flops[inputs.name] / total
            specs[inputs.name] = self._spec_of(inputs, share, grids, ranks_of_examples, segments)
            if inputs is language and balance.mode == "language":
                plans = [assign(specs[LANGUAGE], batch.phases[LANGUAGE]) for batch in batches]
                ranks_of_examples = [
                    example_ranks(batch, inputs.ranks, "language", plan)
                    for batch, plan in zip(batches, plans, strict=True)
                ]
        return {inputs.name: specs[inputs.name] for inputs in phases}

    def _flops(self, phase: str, cost: ItemCost) -> float:
        """FLOPs of a phase in all samples."""
        items = [batch.phases[phase] for batch in self.samples]
        return sum(cost.total(phase_items.length, phase_items.extra) for phase_items in items)

    @cached_property
    def _batches(self) -> list[BatchItems]:
        return [*self.samples, *redraw(self.samples)]

    def _spec_of(
        self,
        inputs: SizingInputs,
        share: float,
        grids: Mapping[str, ExchangeGrid],
        ranks_of_examples: Sequence[Longs | None],
        segments: bool,
    ) -> PhaseSpec:
        key = segments, share, _relevant_inputs(inputs)
        # The key does not include the ranks of examples, so rows are chosen again where items stay
        # with their examples.
        if key not in self._known_specs or any(ranks is not None for ranks in ranks_of_examples):
            loads = loads_of(self._batches, inputs, grids, ranks_of_examples)
            self._known_specs[key] = _rows(inputs, share, loads, segments)
        return self._known_specs[key]


def _relevant_inputs(inputs: SizingInputs) -> SizingInputs:
    """The inputs that rows depend on when items move freely; the others are set to defaults."""
    if inputs.config.capacities == "auto":
        return inputs
    return replace(inputs, gather_cost=0, microbatch_cost=0, fitting=None)


def _rows(inputs: SizingInputs, share: float, loads: Sequence[Load], segments: bool) -> PhaseSpec:
    """A phase with its row classes and the largest number of items in a row."""
    config = inputs.config
    capacities = config.capacities
    classes = (
        choose_classes(inputs, loads, share)
        if capacities == "auto"
        else given_classes(capacities, inputs)
    )
    if config.max_segments != "auto":
        return phase_spec(inputs, classes, config.max_segments)
    unlimited = phase_spec(inputs, classes)
    if not segments:
        return unlimited
    most_segments = max((int(load.plan(unlimited).segment.max()) for load in loads), default=0)
    return replace(unlimited, max_segments=with_head_room(most_segments, SEGMENT_ALIGNMENT))


def _with_segments_of(
    others: Sequence[BatchItems], spec: PhaseSpec, inputs: SizingInputs
) -> PhaseSpec:
    """The phase with rows that may also have as many items as the plans of `others` need."""
    if inputs.config.max_segments != "auto":
        return spec
    unlimited = replace(spec, max_segments=spec.longest_row)
    most_segments = max(
        (
            int(assign(unlimited, batch.phases[inputs.name]).segment.max(initial=0))
            for batch in others
        ),
        default=0,
    )
    needed = round_up(most_segments, SEGMENT_ALIGNMENT)
    return replace(spec, max_segments=max(spec.max_segments, needed))
