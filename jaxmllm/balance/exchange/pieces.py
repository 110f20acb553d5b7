"""Items of encoder phases, cut into the parts that single ranks hold of them.

    language row of a group, C slots each   | t t a a a | a a a t t |      a: tokens of an item
                                     rank        0           1             two pieces: 3 tokens, 3 tokens
    encoder row of a group, T tokens each   | a a | a a | a a | . . |      a piece leaves several ranks
                                     rank      0     1     2     3         in runs: 2, 1 and 1, 2

Rank p of a group owns tokens p * T .. of an encoder row and slots p * C .. of a language row, in
the order of the plan's offsets: items are cut where a rank's share ends. Where every row has one
rank, an item is one piece, and a piece is one run.

Letters: B examples, N items, C slots and T tokens that a row has on a rank, K pieces or runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxmllm.arrays import Ints, Longs, running_sums
from jaxmllm.balance.records import PhaseItems, PhasePlan


@dataclass(frozen=True)
class Pieces:
    """Pieces: consecutive tokens of an encoder phase's item that one language rank reads. All [K],
    ordered by item and by token. An item without tokens is one piece."""

    item: Longs
    skipped: Longs  # tokens of the item before the piece
    tokens: Longs
    microbatch: Ints  # of the language phase
    rank: Longs  # language rank
    slot: Longs  # of the first token, in the whole language row

    @classmethod
    def of(cls, items: PhaseItems, language: PhasePlan, sequence: Longs) -> Pieces:
        """The pieces of a phase's items.

        Args:
          sequence: [B] language item of each example.
        """
        reader = sequence[items.example]
        microbatch = language.microbatch[reader]
        slot = language.offset[reader].astype(np.int64) + items.slot
        item, skipped, tokens = cut(slot, items.tokens, language.capacity[microbatch])
        slot = slot[item] + skipped
        rank = owning_rank(language, reader[item], slot)
        return cls(item, skipped, tokens, microbatch[item], rank, slot)

    def row(self, ranks: int) -> Longs:
        """[K] number of the (microbatch, rank) that reads each piece: microbatch * ranks + rank."""
        return self.microbatch.astype(np.int64) * ranks + self.rank


@dataclass(frozen=True)
class Runs:
    """Runs: consecutive tokens of a piece that one encoder rank computes. All [K], ordered by piece
    and by token."""

    piece: Longs
    skipped: Longs  # tokens of the piece before the run
    tokens: Longs
    rank: Longs  # encoder rank
    start: Longs  # first token, counted in the rank's part of the row

    @classmethod
    def of(cls, pieces: Pieces, plan: PhasePlan, slots_per_token: int) -> Runs:
        """The runs of some pieces, whose items have their rows in `plan`."""
        row_token = plan.offset[pieces.item].astype(np.int64) // slots_per_token + pieces.skipped
        held = plan.capacity[plan.microbatch[pieces.item]].astype(np.int64) // slots_per_token
        piece, skipped, tokens = cut(row_token, pieces.tokens, held)
        item = pieces.item[piece]
        slot = (row_token[piece] + skipped) * slots_per_token
        rank = owning_rank(plan, item, slot)
        # Tokens of the row that earlier ranks of the group hold.
        passed = (rank - plan.rank[item]) * held[piece]
        return cls(piece, skipped, tokens, rank, row_token[piece] + skipped - passed)


def owning_rank(plan: PhasePlan, item: Longs, slot: Longs) -> Longs:
    """Rank that owns the given slot [K] of the given item's row: [K]."""
    microbatch = plan.microbatch[item]
    # An item without tokens may begin one slot past the end of its row.
    member = np.minimum(slot // plan.capacity[microbatch], plan.span[microbatch] - 1)
    return plan.rank[item] + member


def cut(start: Longs, amount: Ints | Longs, size: Ints | Longs) -> tuple[Longs, Longs, Longs]:
    """Cut N stretches of positions start .. start + amount at the multiples of `size` inside them.

    Args:
      start, amount, size: [N] each.

    Returns:
      (stretch of each part, positions of the stretch before the part, positions in the part),
      ordered by stretch and position. An empty stretch has one part.
    """
    first_cell = start // size
    # Cells of `size` positions from the first position's to the last one's; an empty stretch counts
    # as one position.
    part_counts = np.maximum(start + amount - 1, start) // size - first_cell + 1
    stretch = np.repeat(np.arange(len(start)), part_counts)
    part_index = running_sums(stretch, np.ones_like(stretch))
    size = size[stretch].astype(np.int64)
    # Start of each part's cell, counted in the stretch: 0 or below for the first part.
    edge = (first_cell[stretch] + part_index) * size - start[stretch]
    begin = np.maximum(edge, 0)
    end = np.minimum(edge + size, amount[stretch])
    return stretch, begin, end - begin
