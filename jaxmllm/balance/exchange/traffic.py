"""What has to go where in a step, whichever backend carries it.

Media tokens by example, by language row, and between exchange ranks.

Letters: B examples, N items of a phase, R language ranks, M language microbatches, and A, E, L, X
of `ExchangeGrid`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from jaxmllm.arrays import Ints, Longs
from jaxmllm.balance.records import BatchItems, ExchangeGrid, PhaseItems, PhasePlan
from jaxmllm.phases import LANGUAGE


def media_of_examples(items: BatchItems) -> Longs:
    """Tokens that the media of each example become, all encoder phases together: [B]."""
    tokens = np.zeros(len(items.examples), np.int64)
    for media in items.phases.values():
        np.add.at(tokens, media.example, media.tokens)
    return tokens


def sequence_of_example(items: BatchItems) -> Longs:
    """Number of the language item of each example of the batch: [B]."""
    sequence = np.full(len(items.examples), -1, np.int64)
    sequence[items.phases[LANGUAGE].example] = np.arange(len(items.phases[LANGUAGE].example))
    return sequence


def media_tokens(
    items: BatchItems, language: PhasePlan, encoders: tuple[str, ...], ranks: int
) -> Longs:
    """Tokens of all encoder phases that each language row takes in: [M, R]."""
    sequence = sequence_of_example(items)
    arriving = np.zeros((language.microbatches, ranks), np.int64)
    for phase in encoders:
        reader = sequence[items.phases[phase].example]
        row = language.microbatch[reader], language.rank[reader]
        np.add.at(arriving, row, items.phases[phase].tokens)
    return arriving


@dataclass(frozen=True)
class Goals:
    """Where the language phase reads the tokens of an encoder phase's items: all [N]."""

    microbatch: Ints
    rank: Ints
    slot: Longs  # of the language row, where the item's first token stands

    @classmethod
    def of(cls, items: PhaseItems, language: PhasePlan, sequence: Longs) -> Goals:
        """Of items whose examples have the given language items [B]."""
        reader = sequence[items.example]
        slot = language.offset[reader].astype(np.int64) + items.slot
        return cls(language.microbatch[reader], language.rank[reader], slot)

    def row(self, ranks: int) -> Longs:
        return self.microbatch.astype(np.int64) * ranks + self.rank


@dataclass(frozen=True)
class Traffic:
    """The tokens of N items, from encoder pools to language pools: all [N]."""

    tokens: Longs
    pool: Longs  # number of the encoder pool ..
    start: Longs  # .. the first slot there ..
    sender: Longs  # .. and the exchange rank that sends from it
    goal: Longs  # number of the language pool ..
    arrival: Longs  # .. the first slot there ..
    receiver: Longs  # .. and the exchange rank that delivers to it

    def chosen(self, which: Longs) -> Traffic:
        """The items with the given numbers."""
        columns = {column.name: getattr(self, column.name)[which] for column in fields(self)}
        return Traffic(**columns)

    @classmethod
    def joined(cls, parts: list[Traffic]) -> Traffic:
        """The items of several phases."""
        return cls(
            **{
                column.name: np.concatenate([getattr(part, column.name) for part in parts])
                for column in fields(cls)
            }
        )


def moving_tokens(
    encoders: Mapping[str, PhasePlan], language: PhasePlan, items: BatchItems, grid: ExchangeGrid
) -> tuple[Longs, Longs, Longs]:
    """(sender, receiver, tokens) of the items of some phases that leave their exchange rank, in
    ascending order."""
    sequence = sequence_of_example(items)
    senders = []
    receivers = []
    amounts = []
    for phase, plan in encoders.items():
        goal = language.rank[sequence[items.phases[phase].example]]
        sender, receiver = exchange_ranks(grid, plan.rank, goal)
        senders.append(sender)
        receivers.append(receiver)
        amounts.append(items.phases[phase].tokens.astype(np.int64))
    sender = np.concatenate(senders)
    receiver = np.concatenate(receivers)
    tokens = np.concatenate(amounts)
    moves = np.flatnonzero((sender != receiver) & (tokens > 0))
    moves = moves[np.lexsort((receiver[moves], sender[moves]))]
    return sender[moves], receiver[moves], tokens[moves]


def exchange_ranks(
    grid: ExchangeGrid, encoder_rank: Ints, language_rank: Ints
) -> tuple[Longs, Longs]:
    """(sender, receiver) for each pair of an encoder and a language rank: two peers of a group."""
    language_only = grid.language.shape[1]
    sending_peer, encoder_column = _row_and_column(grid.encoder, encoder_rank)
    receiving_peer, language_column = _row_and_column(grid.language, language_rank)
    group = encoder_column * language_only + language_column
    return sending_peer * grid.groups + group, receiving_peer * grid.groups + group


def _row_and_column(table: Ints, wanted: Ints) -> tuple[Longs, Longs]:
    """Where each wanted rank number stands in a table that holds every number once."""
    position = np.empty(table.size, np.int64)
    position[table.reshape(-1)] = np.arange(table.size)
    return np.divmod(position[wanted], table.shape[1])
