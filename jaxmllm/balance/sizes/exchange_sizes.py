"""Sizes of the exchange, such that nearly every step needs one pool and one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxmllm.arrays import Ints
from jaxmllm.balance.exchange import padded
from jaxmllm.balance.exchange.traffic import media_tokens, moving_tokens
from jaxmllm.balance.records import (
    BatchItems,
    ExchangeGrid,
    PhasePlan,
    PhaseSpec,
    RouteSpec,
    shared_exchange,
)
from jaxmllm.balance.sizes.inputs import with_head_room
from jaxmllm.balance.step_plan import place_items
from jaxmllm.config.schema import BalanceConfig, ConfigError
from jaxmllm.phases import LANGUAGE

POOL_ALIGNMENT = 8  # tokens
# Limit on pair slots for batches unlike the samples, in multiples of what usual steps need: with
# four times the slots a usual step takes a quarter of the hops and sends hardly more; with even
# more slots it would send empty ones.
MOST_OVER_USUAL = 4


def choose_routes(
    samples: Sequence[BatchItems],
    specs: Mapping[str, PhaseSpec],
    longest: Mapping[str, int],
    grids: Mapping[str, ExchangeGrid],
    balance: BalanceConfig,
    nodes: Mapping[str, Ints] | None,
    others: Sequence[BatchItems] = (),
) -> dict[str, RouteSpec]:
    """The exchange of every encoder and generator phase.

    Args:
      specs: all phases by name, with their rows chosen.
      longest: by phase, slots of the largest item of the whole data.
      grids: by encoder or generator phase.
      nodes: by phase, node of each rank; None: not known.
      others: batches that are unlike the samples; pools hold them as well as the samples, pair
        slots as far as that does not slow down the samples' own steps (`MOST_OVER_USUAL`).

    Raises:
      ConfigError: `balance.pool_slots` does not hold one row.
    """
    if not grids:
        return {}
    batches = [*samples, *others]
    plans = [place_items(batch, specs, grids, balance.mode, nodes) for batch in batches]
    language = specs[LANGUAGE]
    arriving = [
        # Tokens of all microbatches of a rank together, because one pool should hold them.
        media_tokens(batch, plan[LANGUAGE], tuple(grids), language.ranks).sum(axis=0).max(initial=0)
        for batch, plan in zip(batches, plans, strict=True)
    ]
    generators = [phase for phase in grids if specs[phase].phase.generates]
    # With a generator a token may arrive and also leave, and then takes two slots
    row_tokens = max(language.capacities) * (2 if generators else 1)
    language_pool = _pool_slots(LANGUAGE, arriving, row_tokens, balance)
    # Which phases share an exchange depends on grids and directions alone, so sizes may be 0 here.
    unsized = {
        phase: RouteSpec(grid, 0, language_pool, 0, padded.MAX_HOPS, outward=phase in generators)
        for phase, grid in grids.items()
    }
    owner_of = shared_exchange(unsized)
    routes = {}
    for phase, route in unsized.items():
        sharing = [encoder for encoder in grids if owner_of[encoder] == owner_of[phase]]
        encoder_pool = _encoder_pool(sharing, plans, specs, balance)
        pair_slots = balance.pair_slots
        if pair_slots == "auto":
            pair_slots = _pair_slots(
                sharing, batches, plans, specs, longest, route.grid, samples=len(samples)
            )
        routes[phase] = replace(route, encoder_pool=encoder_pool, pair_slots=pair_slots)
    return routes


def _encoder_pool(
    phases: Sequence[str],
    plans: Sequence[Mapping[str, PhasePlan]],
    specs: Mapping[str, PhaseSpec],
    balance: BalanceConfig,
) -> int:
    """Tokens of the encoder pool that these phases share."""
    row_tokens = {
        phase: max(specs[phase].capacities) // specs[phase].slots_per_token for phase in phases
    }
    largest = max(phases, key=lambda phase: row_tokens[phase])
    leaving = [
        sum(_tokens_of_rows(plan[phase], specs[phase]) for phase in phases) for plan in plans
    ]
    return _pool_slots(largest, leaving, row_tokens[largest], balance)


def _tokens_of_rows(plan: PhasePlan, spec: PhaseSpec) -> int:
    """Tokens that a rank's parts of all rows can hold."""
    return int(plan.capacity.sum(dtype=np.int64)) // spec.slots_per_token


def _pair_slots(
    phases: Sequence[str],
    batches: Sequence[BatchItems],
    plans: Sequence[Mapping[str, PhasePlan]],
    specs: Mapping[str, PhaseSpec],
    longest: Mapping[str, int],
    grid: ExchangeGrid,
    samples: int,
) -> int:
    """Pair slots of the padded exchange that these phases share. They are chosen whatever the
    backend is, so that a spec serves every backend.

    Args:
      samples: number of first `batches` that show what is usual; the others may occur.
    """
    slots_per_token = {phase: specs[phase].slots_per_token for phase in phases}
    moves = []
    for batch, plan in zip(batches, plans, strict=True):
        encoders = {phase: plan[phase] for phase in phases}
        moves.append(moving_tokens(encoders, plan[LANGUAGE], batch, grid, slots_per_token))
    longest_tokens = max(longest[phase] // specs[phase].slots_per_token for phase in phases)
    usual = padded.choose_pair_slots(moves[:samples], grid, longest_tokens)
    unusual = max(
        (padded.choose_pair_slots([move], grid, longest_tokens) for move in moves[samples:]),
        default=usual,
    )
    return max(usual, min(unusual, MOST_OVER_USUAL * usual))


def _pool_slots(phase: str, used: Sequence[int], row_tokens: int, balance: BalanceConfig) -> int:
    """Tokens of a rank's pool: what the samples used with some head room, and at least one row."""
    if balance.pool_slots == "auto":
        return max(with_head_room(int(max(used, default=0)), POOL_ALIGNMENT), row_tokens)
    if balance.pool_slots < row_tokens:
        raise ConfigError(
            f"balance.pool_slots = {balance.pool_slots} is too small: a row of phase {phase!r} can "
            f"hold {row_tokens} media tokens; raise it to {row_tokens} or lower "
            f"phases.{phase}.capacities"
        )
    return balance.pool_slots
