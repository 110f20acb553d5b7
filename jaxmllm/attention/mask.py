"""Who sees whom in a packed row: masks as data, and the one rule that reads them.

    visible(q, k)    the rule, for tokens in arrays of any kind: numpy on the host, jax in kernels
    seen_spans       the rule as one interval per token, for rows in the order of the planner
    cut_documents    the rule for runs of tokens, in any row

A new rule of masking is added here, as another column of `TokenIds` that these three read. Tiles,
parts and kernels derive from them, and have no rule of their own.

Letters: B rows, C slots of a row, T key slots, b slots of a block, L length of the lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxmllm.arrays import Bools, Ints, Longs


class TokenIds(NamedTuple):
    """What decides who sees whom: int32, [C] for one row on the host, [B, C] on the device."""

    document: Any  # 0: padding, which sees nothing and is not seen
    group: Any  # > 0: image or clip, unique in its document; 0: seen only from later on
    position: Any  # order inside the document
    # The first position it sees, at most its own, but for its group; none: all before it.
    first: Any = None

    def map(self, function: Callable[[Any], Any]) -> TokenIds:
        """The ids with a function applied to every column that there is."""
        return TokenIds(*(None if column is None else function(column) for column in self))

    def within(self, window: int | None) -> TokenIds:
        """The same tokens, which see no more than `window` positions up to their own; none: as many as there are."""
        return self._replace(
            first=0 * self.position if window is None else self.position - (window - 1)
        )

    def at(self, index: Any) -> TokenIds:
        """The ids at an index of every column."""
        return self.map(lambda column: column[index])


class TileLists(NamedTuple):
    """The blocks of the other side that each block of one side meets; with a leading axis B on the
    device.

    With (first, partial, full) = spans[i], block i meets `blocks[first : first + partial]`, in
    which only some pairs are visible, and then the next `full` blocks, in which all pairs are. Both
    parts ascend. If first is negative, the list was too short for the row, and block i meets
    `partial` consecutive blocks from -1 - first on, of which some may hold nothing visible.
    """

    spans: Any  # int32 [C / b, 3]
    blocks: Any  # int32 [L], numbers of blocks within the row


class Mask(NamedTuple):
    """Which keys each query sees. The lists must hold every tile with a visible pair, and as full
    only tiles in which all pairs are visible."""

    queries: TokenIds
    keys: TokenIds
    query_tiles: TileLists  # for each block of queries the blocks of keys
    key_tiles: TileLists  # for each block of keys the blocks of queries
    # `kernel_cudnn.Documents`, for a kernel that reads runs of documents instead of ids
    documents: Any = None

    @property
    def block(self) -> int:
        """b, the slots of a block."""
        size: int = self.queries.document.shape[1] // self.query_tiles.spans.shape[1]
        return size


def visible(query: TokenIds, key: TokenIds) -> Any:
    """Whether query tokens see key tokens: a query sees a key of the same document if the key does not come after it,
    nor before its window, or if both are of the same group. The ids are arrays that broadcast to the result."""
    same_document = (query.document == key.document) & (key.document > 0)
    same_group = (query.group == key.group) & (key.group > 0)
    seen = key.position <= query.position
    if query.first is not None:
        seen = seen & (key.position >= query.first)
    return same_document & (same_group | seen)


def seen_spans(ids: TokenIds) -> tuple[Ints, Ints] | None:
    """Slots [start, stop) that each token of a row sees: [C] each. None if they are not one
    interval for each token.

    They are if documents and groups are runs, and positions ascend in each document; padding may be
    anywhere. A span begins and ends with a token that is seen; the span of padding is [0, 0).
    """
    slots = np.flatnonzero(ids.document > 0)
    real_tokens = len(slots)
    spans = np.zeros((2, len(ids.document)), np.int32)
    if not real_tokens:
        return spans[0], spans[1]
    # With padding only at the end nothing has to be gathered, which would take about half the time.
    # Until the last lines, indices count real tokens only: padding between them is left out.
    ends_padded = slots[-1] + 1 == real_tokens
    document, group, position, window = ids.at(slice(real_tokens) if ends_padded else slots)
    new_document = document[1:] != document[:-1]
    new_group = new_document | (group[1:] != group[:-1])
    rises = position[1:] > position[:-1]
    # Equal positions are fine inside a group, whose tokens see one another whatever their order.
    rises |= (position[1:] == position[:-1]) & ~new_group & (group[1:] > 0)
    if not (new_document | rises).all():
        return None
    document_starts = _run_starts(new_document)
    group_starts = _run_starts(new_group)
    media = group_starts[group[group_starts] > 0]
    # A document, or a group of a document, that occurs as two runs is not one interval.
    if _has_repeats(document[document_starts]) or _has_repeats(
        document[media].astype(np.int64) << 32 | group[media]
    ):
        return None
    tokens = np.arange(1, real_tokens + 1, dtype=np.int32)
    first_seen = np.repeat(document_starts, np.diff(document_starts, append=real_tokens))
    group_ends = np.append(group_starts[1:], real_tokens).astype(np.int32)
    if window is not None:
        # A token whose first position is beyond its own would not see itself.
        if (window > position).any():
            return None
        # One ascending key for all documents: their number in the order of the row, then the
        # position, which ascends in a document.
        document_key = (
            np.repeat(np.arange(len(document_starts)), np.diff(document_starts, append=real_tokens))
            << 32
        )
        first_seen = np.searchsorted(
            document_key | position, document_key | np.maximum(window, 0)
        ).astype(np.int32)
        group_start = np.repeat(group_starts, np.diff(group_starts, append=real_tokens))
        first_seen = np.where(group > 0, np.minimum(first_seen, group_start), first_seen)
    end = np.where(
        group > 0, np.repeat(group_ends, np.diff(group_starts, append=real_tokens)), tokens
    )
    if ends_padded:
        spans[0, :real_tokens] = first_seen
        spans[1, :real_tokens] = end
    else:
        spans[0, slots] = np.take(slots, first_seen)
        # One past the last token seen, not the slot of the next token: padding may be between.
        spans[1, slots] = np.take(slots, end - 1) + 1
    return spans[0], spans[1]


class DocumentPieces(NamedTuple):
    """Runs of tokens, called pieces, whose visibility follows from their two ends: [P] each,
    without padding. `cut_documents` returns them ordered by document."""

    slot: Longs  # of the piece's first token
    size: Longs  # tokens of the piece
    first: TokenIds  # ids of the token with the lowest position
    last: TokenIds  # ids of the token with the highest position

    def see(self, query: Longs, key: Longs) -> tuple[Bools, Bools]:
        """Whether some pair, and whether every pair, of tokens of the pieces `query` and `key` is
        visible; both pieces are of one document."""
        if self.first.first is None:
            return visible(self.last.at(query), self.first.at(key)), visible(
                self.first.at(query), self.last.at(key)
            )
        # The queries together see the positions from their smallest `first` to their last position:
        # those that `widest` sees. Each of them sees the positions that `narrowest` sees. `nearest`
        # is the key closest to the end of what `widest` sees.
        earliest = self.first.at(key)
        latest = self.last.at(key)
        widest = self.last._replace(first=self.first.first).at(query)
        narrowest = self.first._replace(first=self.last.first).at(query)
        nearest = latest._replace(
            position=np.clip(widest.position, earliest.position, latest.position)
        )
        return visible(widest, nearest), visible(narrowest, earliest) & visible(narrowest, latest)


def document_runs(documents: Ints, most: int) -> Ints:
    """First slot and number of slots of each document of each row, in the order of the row:
    [r, most, 2], zeros after the last.

    Args:
      documents: [r, C], 0 at padding.

    Raises `ValueError` if a document is not one run of slots, or a row has more than `most`.
    """
    runs = np.zeros((len(documents), most, 2), np.int32)
    for of_row, row in zip(runs, documents, strict=True):
        starts = _run_starts(row[1:] != row[:-1])
        sizes = np.diff(starts, append=len(row))
        real = row[starts] > 0
        count = int(real.sum())
        if count > most or _has_repeats(row[starts[real]]):
            raise ValueError(
                f"a row has {count} runs of {len(np.unique(row[row > 0]))} documents; the cudnn kernel of attention "
                f"takes up to {most} documents that are one run each"
            )
        of_row[:count] = np.stack([starts[real], sizes[real]], axis=1)
    return runs


def cut_documents(ids: TokenIds, block: int) -> DocumentPieces:
    """The pieces of a row, by document: runs of tokens of one document and group within a block.

    Later queries see more, and earlier keys are seen by more. So some pair of two pieces is visible
    if the last query sees the first key, and every pair if the first query sees the last key. Where
    tokens have windows, positions in a piece are consecutive: what its queries see is one interval.
    """
    alike = np.stack([np.arange(len(ids.document)) // block, ids.document, ids.group])
    changes = (alike[:, 1:] != alike[:, :-1]).any(axis=0)
    if ids.first is not None:
        changes |= (np.diff(ids.position) != 1) | (np.diff(ids.first) != 1)
    cuts = np.flatnonzero(np.append(True, changes))
    # Stable, so the pieces of a document stay in the order of the row. Padding is left out.
    order = np.argsort(ids.document[cuts], kind="stable")
    order = order[ids.document[cuts][order] > 0]
    slot = cuts[order]
    # Column by column, but all minima are from one token, and so are all maxima: a piece has one
    # document and group, and with windows `first` rises with the position.
    first = ids.map(lambda column: np.minimum.reduceat(column, cuts)[order])
    last = ids.map(lambda column: np.maximum.reduceat(column, cuts)[order])
    return DocumentPieces(slot, np.diff(np.append(cuts, len(ids.document)))[order], first, last)


def _run_starts(changes: Bools) -> Ints:
    """First token of each run. `changes` says of every token but the first whether it differs from
    the one before it."""
    return np.flatnonzero(np.append(True, changes)).astype(np.int32)


def _has_repeats(ids: Ints | Longs) -> bool:
    return len(np.unique(ids)) < len(ids)


def item_ids(segments: Any) -> TokenIds:
    """Ids of an encoder's rows, in which every slot sees its whole item.

    Args:
      segments: [C] or [B, C] number of the item in the row, 0 for padding.
    """
    return TokenIds(segments, segments, 0 * segments)


def causal_ids(segments: Ints, groups: Ints | None = None) -> TokenIds:
    """Ids of a row in which a token sees nothing after itself outside its group: [C] each.

    Args:
      segments: [C] number of the item in the row, 0 for padding.
      groups: [C] images and clips that are seen in both directions.
    """
    groups = np.zeros_like(segments) if groups is None else groups
    return TokenIds(segments, groups, np.arange(len(segments), dtype=np.int32))
