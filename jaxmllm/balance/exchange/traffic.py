"""The traffic of a step, whichever backend carries it: media tokens by example, by language rank
and microbatch, and between exchange ranks.

Letters: B examples, K runs of tokens, R language ranks, M language microbatches, and A, E, L, X of
`ExchangeGrid`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from jaxmllm.arrays import Ints, Longs, sums_by
from jaxmllm.balance.exchange.pieces import Pieces, Runs
from jaxmllm.balance.records import BatchItems, ExchangeGrid, PhasePlan
from jaxmllm.phases import LANGUAGE


def media_of_examples(items: BatchItems) -> Longs:
    """Tokens of each example that its media become, or that its drawn items read, summed over all
    phases: [B]."""
    tokens = np.zeros(len(items.examples), np.int64)
    for media in items.phases.values():
        tokens += sums_by(media.example, media.tokens.astype(np.int64), len(tokens))
    return tokens


def sequence_of_example(items: BatchItems) -> Longs:
    """Number of the language item of each example of the batch: [B]."""
    sequence = np.full(len(items.examples), -1, np.int64)
    sequence[items.phases[LANGUAGE].example] = np.arange(len(items.phases[LANGUAGE].example))
    return sequence


def media_tokens(
    items: BatchItems, language: PhasePlan, encoders: tuple[str, ...], ranks: int
) -> Longs:
    """Tokens of all encoder phases that each language rank takes in for each microbatch: [M, R]."""
    sequence = sequence_of_example(items)
    pieces = (Pieces.of(items.phases[phase], language, sequence) for phase in encoders)
    return arriving_tokens(pieces, language.microbatches, ranks)


def arriving_tokens(pieces: Iterable[Pieces], microbatches: int, ranks: int) -> Longs:
    """Tokens of the given pieces that each language rank takes in for each microbatch: [M, R]."""
    arriving = np.zeros(microbatches * ranks, np.int64)
    for phase_pieces in pieces:
        arriving += sums_by(phase_pieces.row(ranks), phase_pieces.tokens, microbatches * ranks)
    return arriving.reshape(microbatches, ranks)


@dataclass(frozen=True)
class Traffic:
    """Runs of tokens from encoder pools to language pools: all [K]."""

    tokens: Longs
    pool: Longs  # number of the encoder pool
    start: Longs  # first slot there
    sender: Longs  # exchange rank that sends from it
    goal: Longs  # number of the language pool
    arrival: Longs  # first slot there
    receiver: Longs  # exchange rank that delivers to it

    def chosen(self, which: Longs) -> Traffic:
        """The runs with the given numbers."""
        columns = {column.name: getattr(self, column.name)[which] for column in fields(self)}
        return Traffic(**columns)

    @classmethod
    def joined(cls, traffic: list[Traffic]) -> Traffic:
        """The runs of several phases."""
        columns = {}
        for column in fields(cls):
            of_phases = [getattr(runs, column.name) for runs in traffic]
            columns[column.name] = np.concatenate(of_phases)
        return cls(**columns)


def moving_tokens(
    encoders: Mapping[str, PhasePlan],
    language: PhasePlan,
    items: BatchItems,
    grid: ExchangeGrid,
    slots_per_token: Mapping[str, int],
) -> tuple[Longs, Longs, Longs]:
    """(sender, receiver, tokens) of the runs of some phases' items that leave their exchange rank,
    in ascending order of sender and receiver.

    Args:
      slots_per_token: by encoder or generator phase.
    """
    sequence = sequence_of_example(items)
    senders = []
    receivers = []
    amounts = []
    for phase, plan in encoders.items():
        pieces = Pieces.of(items.phases[phase], language, sequence)
        runs = Runs.of(pieces, plan, slots_per_token[phase])
        sender, receiver = exchange_ranks(grid, runs.rank, pieces.rank[runs.piece])
        senders.append(sender)
        receivers.append(receiver)
        amounts.append(runs.tokens)
    sender = np.concatenate(senders)
    receiver = np.concatenate(receivers)
    tokens = np.concatenate(amounts)
    # No hop carries what stays on its exchange rank. Even an item without tokens has a run.
    moves = np.flatnonzero((sender != receiver) & (tokens > 0))
    moves = moves[np.lexsort((receiver[moves], sender[moves]))]
    return sender[moves], receiver[moves], tokens[moves]


def exchange_ranks(
    grid: ExchangeGrid, encoder_rank: Ints | Longs, language_rank: Ints | Longs
) -> tuple[Longs, Longs]:
    """(sender, receiver) for each pair of an encoder and a language rank: two peers of a group."""
    language_only = grid.language.shape[1]
    sending_peer, encoder_column = _row_and_column(grid.encoder, encoder_rank)
    receiving_peer, language_column = _row_and_column(grid.language, language_rank)
    group = encoder_column * language_only + language_column
    return sending_peer * grid.groups + group, receiving_peer * grid.groups + group


def _row_and_column(table: Ints, numbers: Ints | Longs) -> tuple[Longs, Longs]:
    """(row, column) of each given number in a table that holds every number once."""
    position = np.empty(table.size, np.int64)
    position[table.reshape(-1)] = np.arange(table.size)
    return np.divmod(position[numbers], table.shape[1])
