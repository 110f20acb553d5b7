"""Dealing uneven traffic evenly over the equal chunks of a padded all-to-all.

One all-to-all (a hop) moves `pair_slots` tokens between every two ranks, wanted or not. The tokens of an image all go
to one rank, so few pairs have traffic, and that much. So every sender deals its tokens to all ranks in turn, like
cards, and those pass them on:

    sender --early hops--> relay --late hops--> receiver        a relay may be the sender or the receiver itself

Token p of those that a sender deals goes by relay (p + place of the sender) % A: every chunk of the early hops is
filled alike, and those of the late hops nearly so, since the tokens of an item, dealt in turn, too come from all relays
alike. A rank's chunks are as full as it sends or receives much, so hops are as many as the busiest ranks need:
about (most sent + most received) / (A * pair_slots). The plan holds one record an item, nothing a pair of ranks, and
takes linear time; that is what lets it be made for thousands of ranks.

Where most pairs have traffic, as among few ranks, the first `direct` tokens of each go straight to their receiver.

Letters: A places along which the exchange runs; N items that leave their rank; K runs; T tokens; X exchange ranks, of
which the A of one plane exchange with each other: exchange rank x has place x // planes and plane x % planes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Longs, running_sums
from jaxmllm.balance.records import RouteRound

DENSE = 4  # tokens may go straight where at least one in so many pairs of ranks has traffic
SHARES = (0.5, 1.0, 1.5, 2.0)  # of a pair's mean tokens, tried for those that go straight


@dataclass(frozen=True)
class Dealt:
    """Items, or parts of them, by round: all [K]."""

    round: Longs
    item: Longs
    first: Longs  # token of the item
    tokens: Longs
    direct: NDArray[np.bool_]
    ordinal: Longs  # of the first token in its round, among those of the pair or, if dealt, among those dealt
    hops: list[tuple[int, int]]  # early and late, of each round
    direct_tokens: int  # of each pair and round, which may go to their receiver at once


def deal(
    sender: Longs, receiver: Longs, tokens: Longs, places: int, planes: int, pair_slots: int, most_hops: int
) -> Dealt:
    """Deal all tokens in as few rounds as halving finds.

    Args:
      sender, receiver: [N] different exchange ranks of one plane, ordered by sender and receiver.
      tokens: [N], above 0.
      pair_slots: tokens from one rank to another in one hop.
      most_hops: of one round; at least 2.
    """
    if not len(tokens):
        return Dealt(tokens, tokens, tokens, tokens, tokens > 0, tokens, [(0, 0)], 0)
    rounds, ranks = 1, places * planes
    direct = _direct(sender, receiver, tokens, places, planes)
    while True:
        turn, item, first, amount = _parts(tokens, rounds)
        before = running_sums((turn * ranks + sender[item]) * ranks + receiver[item], amount)  # of the pair
        straight = np.clip(direct - before, 0, amount)
        dealt = np.flatnonzero(amount > straight)
        by_turn, by_sender, rest = turn[dealt], sender[item[dealt]], (amount - straight)[dealt]
        number = running_sums(by_turn * ranks + by_sender, rest)
        early = direct + _most(by_turn, -(-(number + rest) // places), rounds)
        color = (number + by_sender // planes) % places
        goal, most = _most_dealt(by_turn * ranks + receiver[item[dealt]], color, rest, places)
        late = _most(goal // ranks, most, rounds)
        hops = [(-(-int(a) // pair_slots), -(-int(b) // pair_slots)) for a, b in zip(early, late, strict=True)]
        if max(a + b for a, b in hops) <= most_hops:
            break
        rounds, direct = 2 * rounds, direct // 2
    whole = np.flatnonzero(straight)
    return Dealt(
        round=np.concatenate([turn[whole], by_turn]),
        item=np.concatenate([item[whole], item[dealt]]),
        first=np.concatenate([first[whole], (first + straight)[dealt]]),
        tokens=np.concatenate([straight[whole], rest]),
        direct=np.arange(len(whole) + len(dealt)) < len(whole),
        ordinal=np.concatenate([before[whole], number]),
        hops=hops,
        direct_tokens=direct,
    )


def whole_items(sender: Longs, receiver: Longs, tokens: Longs, ranks: int) -> Dealt:
    """All tokens straight to their receivers in one round and one hop of any size; arguments as for `deal`."""
    nothing = np.zeros_like(tokens)
    number = running_sums(sender * ranks + receiver, tokens)
    hops = [(int(len(tokens) > 0), 0)]
    return Dealt(nothing, np.arange(len(tokens)), nothing, tokens, tokens > 0, number, hops, 0)


def _direct(sender: Longs, receiver: Longs, tokens: Longs, places: int, planes: int) -> int:
    """How many tokens of each pair best go straight, judged by the busiest ranks."""
    ranks = places * planes
    begins = np.flatnonzero(np.diff(sender * ranks + receiver, prepend=-1))
    if len(begins) * DENSE < ranks * (places - 1):
        return 0
    volume, sender, receiver = np.add.reduceat(tokens, begins), sender[begins], receiver[begins]
    mean = int(volume.sum()) / (ranks * (places - 1))

    def lanes(direct: int) -> int:
        rest = np.maximum(volume - direct, 0)
        busiest = (np.bincount(rank, weights=rest).max() for rank in (sender, receiver))
        return direct * places + int(sum(busiest))

    return min((0, *(int(share * mean) for share in SHARES), int(volume.max())), key=lanes)


def _parts(tokens: Longs, rounds: int) -> tuple[Longs, Longs, Longs, Longs]:
    """(round, item, first token, tokens) of items cut into equal parts; which round takes which part differs from item
    to item, so that single tokens spread, too."""
    item, turn = np.tile(np.arange(len(tokens)), rounds), np.repeat(np.arange(rounds), len(tokens))
    part = (turn + item) % rounds
    first, end = (tokens[item] * edge // rounds for edge in (part, part + 1))
    kept = np.flatnonzero(end > first)
    return turn[kept], item[kept], first[kept], (end - first)[kept]


def _most(group: Longs, amount: Longs, groups: int) -> Longs:
    most = np.zeros(groups, np.int64)
    np.maximum.at(most, group, amount)
    return most


def _most_dealt(group: Longs, color: Longs, tokens: Longs, colors: int) -> tuple[Longs, Longs]:
    """Most tokens of one color in each group, when every item's tokens take the colors in turn from `color` on.

    Whole turns count for every color; what is left over is an arc on the circle of colors, and the most arcs over one
    color are found by going round it once.

    Returns:
      (groups that occur, ascending; most tokens of one color in each).
    """
    if not len(tokens):
        return tokens, tokens
    turns, rest = np.divmod(tokens, colors)
    end = color + rest
    wraps = end > colors
    at = np.concatenate([color, np.minimum(end, colors), np.zeros_like(color[wraps]), end[wraps] - colors])
    change = np.repeat([1, -1, 1, -1], [len(color), len(color), wraps.sum(), wraps.sum()])
    owner = np.concatenate([group, group, group[wraps], group[wraps]])
    order = np.argsort((owner * (colors + 1) + at) * 2 + (change > 0), kind="stable")  # ends before beginnings
    over = np.cumsum(change[order])  # every group ends with 0
    begins = np.flatnonzero(np.r_[True, np.diff(owner[order]) > 0])
    whole = np.zeros(int(group.max()) + 1, np.int64)
    np.add.at(whole, group, turns)
    found = owner[order][begins]
    return found, whole[found] + np.maximum.reduceat(over, begins)


@dataclass(frozen=True)
class Tokens:
    """Runs token by token, with the legs of each: all [T]. A lane numbers the slots between two ranks through all
    hops: lane n is slot n % pair_slots of hop n // pair_slots."""

    start: Longs
    arrival: Longs
    sender: Longs
    receiver: Longs
    relay: Longs  # the receiver if there is but one leg
    lane: Longs  # from the sender
    onward: Longs  # from the relay


def whole_runs(round_: RouteRound, which: NDArray[np.bool_]) -> Tokens:
    """The tokens of some runs, all straight to their receivers, in lanes by number."""
    run = np.repeat(np.flatnonzero(which), round_.tokens[which])
    step = running_sums(run, np.ones_like(run))
    sender, receiver = round_.sender[run].astype(np.int64), round_.receiver[run].astype(np.int64)
    lane = round_.ordinal[run] + step
    return Tokens(
        round_.start[run] + step, round_.arrival[run] + step, sender, receiver, receiver, lane, np.zeros_like(run)
    )


def ways(round_: RouteRound, places: int, planes: int, pair_slots: int, local: Longs) -> Tokens:
    """The way of every token that begins, passes or ends at some exchange ranks.

    Args:
      local: [X], negative where an exchange rank is of no interest.
    """
    run, step = _passing(round_, places, planes, local)
    sender, receiver = round_.sender[run].astype(np.int64), round_.receiver[run].astype(np.int64)
    number, straight = round_.ordinal[run] + step, round_.direct[run]
    dealt = (sender != receiver) & ~straight
    relay = np.where(dealt, (number + sender // planes) % places * planes + sender % planes, receiver)
    # A late lane counts the earlier tokens with the same relay and receiver: if one of the two is local, all are here.
    line = (np.cumsum(round_.tokens, dtype=np.int64) - round_.tokens)[run] + step
    pair = np.where(dealt, relay * places + receiver // planes, -1)
    order = np.argsort(pair * (int(round_.tokens.sum(dtype=np.int64)) + 1) + line)
    onward = np.empty_like(line)
    onward[order] = running_sums(pair[order], np.ones_like(line))
    onward += round_.first_leg * pair_slots
    lane = np.where(straight, number, round_.direct_tokens + number // places)
    own = dealt & (relay == sender)
    lane, relay = np.where(own, onward, lane), np.where(own, receiver, relay)
    return Tokens(round_.start[run] + step, round_.arrival[run] + step, sender, receiver, relay, lane, onward)


def _passing(round_: RouteRound, places: int, planes: int, local: Longs) -> tuple[Longs, Longs]:
    """(run, number in the run) of every token that begins, passes or ends at a local rank."""
    near = (local[round_.sender] >= 0) | (local[round_.receiver] >= 0)
    whole = np.repeat(np.flatnonzero(near), round_.tokens[near])
    far, ranks = np.flatnonzero(~near & ~round_.direct), np.flatnonzero(local >= 0)
    far, rank = np.repeat(far, len(ranks)), np.tile(ranks, len(far))
    alike = round_.sender[far] % planes == rank % planes
    far, rank = far[alike], rank[alike]
    first = (rank // planes - round_.ordinal[far] - round_.sender[far] // planes) % places
    count = np.maximum(round_.tokens[far] - first + places - 1, 0) // places
    each = np.repeat(np.arange(len(far)), count)
    passing = first[each] + places * running_sums(each, np.ones_like(each))
    return (
        np.concatenate([whole, far[each]]),
        np.concatenate([running_sums(whole, np.ones_like(whole)), passing]),
    )
