"""A generous budget of slots for a pipeline, until its schedules are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxmllm.balance.stages.chain_costs import ChainCosts
from jaxmllm.balance.stages.trial_choice import CHOICE
from jaxmllm.config.schema import PipelineConfig
from jaxmllm.phases import LANGUAGE
from sharding.pipeline.graph import Pool, Slots
from sharding.pipeline.ring import Chain, Ring
from sharding.pipeline.schedules.by_name import scheduler_of

# (phase, its capacity, layers of a chunk) -> such forwards whose residuals a rank can keep
Keeps = Callable[[str, int, int], int]


def keeps_none(phase: str, capacity: int, layers: int) -> int:
    """A `Keeps` that keeps nothing, for when nothing is known about memory."""
    return 0


def slot_budget(
    ring: Ring,
    costs: Mapping[str, ChainCosts],
    rows_read: Sequence[int],
    config: PipelineConfig,
    rows: Mapping[str, tuple[int, ...]],
    keeps: Keeps,
) -> Slots:
    """The most slots of every pool: enough for `pipeline.microbatches_in_flight` microbatches with
    all the rows that they read."""
    in_flight = config.microbatches_in_flight
    if in_flight == "auto":
        all_at_once = scheduler_of(config.schedule).all_in_flight
        # All rows of the last reader; if that is a generator, also all language rows, because it
        # may leave some unread
        language_rows = sum(rows[LANGUAGE])
        reader_rows = sum(rows[ring.reader.name])
        most = reader_rows if ring.reader.name == LANGUAGE else reader_rows + language_rows
        in_flight = most if all_at_once else CHOICE.per_stage * config.stages
    # Rows of every chain for one microbatch of the last chain
    rows_each = [1] * len(ring.chains)
    for chain_number, reader in reversed(list(enumerate(ring.readers))):
        rows_each[chain_number] = rows_each[reader] * rows_read[chain_number]
    slots: Slots = {}
    for chain_number, chain in enumerate(ring.chains):
        encoder = chain_number < len(rows_read)
        rows_in_flight = in_flight * rows_each[chain_number]
        if chain.depth > 1 or chain.head_only:
            slots[Pool.INPUT, chain_number] = rows_in_flight * chain.chunks_per_rank
        if encoder:
            slots[Pool.TOKENS, chain_number] = rows_in_flight
        linear = costs[chain.name].linear
        goes_back = bool(linear[:, 1:].any())
        if goes_back:
            has_weight_gradients = bool(linear[:, 2].any())
            splits = config.split_backward is True and has_weight_gradients
            slots |= _backward_slots(chain_number, chain, rows_in_flight, encoder, splits)
            most = rows_in_flight * chain.chunks_per_rank
            if config.kept_residuals == "auto":
                capacity = costs[chain.name].capacity
                residuals = min(most, keeps(chain.name, capacity, max(chain.layers)))
            else:
                residuals = config.kept_residuals
            if residuals and not chain.head_only:  # in such a chain features wait instead
                slots[Pool.RESIDUAL, chain_number] = residuals
    return slots


def _backward_slots(
    number: int,
    chain: Chain,
    rows_in_flight: int,
    encoder: bool,
    splits: bool,
) -> Slots:
    slots: Slots = {}
    if chain.depth > 1 and not chain.head_only:
        slots[Pool.GRADIENT, number] = rows_in_flight * chain.chunks_per_rank
    if encoder:
        slots[Pool.TOKEN_GRADIENT, number] = rows_in_flight
    if splits:
        slots[Pool.PENDING, number] = CHOICE.pending
    return slots
