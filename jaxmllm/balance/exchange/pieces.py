"""Items of encoder phases where ranks hold them: cut where a rank's share of a row ends.

    language row of a group, C slots each   | t t a a a | a a a t t |      a: tokens of an item
                                     rank        0           1             two pieces: 3 tokens, 3 tokens
    encoder row of a group, T tokens each   | a a | a a | a a | . . |      a piece leaves several ranks
                                     rank      0     1     2     3         in runs: 2, 1 and 1, 2

Rank p of a group owns tokens p * T .. of an encoder row and slots p * C .. of a language row, in the
order of the plan's offsets. In rows of one rank each an item is one piece, and a piece one run.

Letters: B examples, N items, C slots and T tokens that a row has on a rank, K pieces or runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxmllm.arrays import Ints, Longs, running_sums
from jaxmllm.balance.records import PhaseItems, PhasePlan


@dataclass(frozen=True)
class Pieces:
    """The tokens of an encoder phase's items on the language ranks that read them: all [K], by item
    and in its order. An item without tokens is a piece, too."""

    item: Longs
    skipped: Longs  # tokens of the item before the piece
    tokens: Longs
    microbatch: Ints  # of the language phase
    rank: Longs  # language rank
    slot: Longs  # of the whole language row, where the first token stands

    @classmethod
    def of(cls, items: PhaseItems, language: PhasePlan, sequence: Longs) -> Pieces:
        """Of items whose examples have the given language items [B]."""
        reader = sequence[items.example]
        microbatch = language.microbatch[reader]
        slot = language.offset[reader].astype(np.int64) + items.slot
        item, skipped, tokens = cut(slot, items.tokens, language.capacity[microbatch])
        slot = slot[item] + skipped
        rank = owning_rank(language, reader[item], slot)
        return cls(item, skipped, tokens, microbatch[item], rank, slot)

    def row(self, ranks: int) -> Longs:
        """Number of the rank's part of a microbatch, among those of all `ranks`."""
        return self.microbatch.astype(np.int64) * ranks + self.rank


@dataclass(frozen=True)
class Runs:
    """Pieces on the encoder ranks that compute them: all [K], by piece and in its order."""

    piece: Longs
    skipped: Longs  # tokens of the piece before the run
    tokens: Longs
    rank: Longs  # encoder rank
    start: Longs  # token of the rank's part of the row

    @classmethod
    def of(cls, pieces: Pieces, plan: PhasePlan, slots_per_token: int) -> Runs:
        """Of the pieces of the items of an encoder plan."""
        row_token = plan.offset[pieces.item].astype(np.int64) // slots_per_token + pieces.skipped
        held = plan.capacity[plan.microbatch[pieces.item]].astype(np.int64) // slots_per_token
        piece, skipped, tokens = cut(row_token, pieces.tokens, held)
        item = pieces.item[piece]
        slot = (row_token[piece] + skipped) * slots_per_token
        rank = owning_rank(plan, item, slot)
        # Tokens of the row that lie on the ranks of the group before this one.
        passed = (rank - plan.rank[item]) * held[piece]
        return cls(piece, skipped, tokens, rank, row_token[piece] + skipped - passed)


def owning_rank(plan: PhasePlan, item: Longs, slot: Longs) -> Longs:
    """Rank that owns a slot of the row that an item lies in: [K]."""
    microbatch = plan.microbatch[item]
    # An item without tokens may stand at the very end of its row.
    member = np.minimum(slot // plan.capacity[microbatch], plan.span[microbatch] - 1)
    return plan.rank[item] + member


def cut(start: Longs, amount: Ints | Longs, size: Ints | Longs) -> tuple[Longs, Longs, Longs]:
    """Cut N stretches of places start .. start + amount at the multiples of `size` inside them.

    Args:
      start, amount, size: [N] each.

    Returns:
      (stretch that each part is of, places before it in the stretch, its places), by stretch and
      place. A stretch of no places has one part.
    """
    first_cell = start // size
    # From the cell of the first place to that of the last, which is the first of a stretch of none.
    part_counts = np.maximum(start + amount - 1, start) // size - first_cell + 1
    stretch = np.repeat(np.arange(len(start)), part_counts)
    part_index = running_sums(stretch, np.ones_like(stretch))
    size = size[stretch].astype(np.int64)
    # Where the cell of each part begins, counted in the stretch: 0 or below for the first part.
    edge = (first_cell[stretch] + part_index) * size - start[stretch]
    begin = np.maximum(edge, 0)
    end = np.minimum(edge + size, amount[stretch])
    return stretch, begin, end - begin
