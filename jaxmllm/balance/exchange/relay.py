"""Spreading uneven traffic evenly over the equal chunks of a padded all-to-all.

One all-to-all (a hop) moves `pair_slots` tokens between every two ranks, wanted or not. The tokens
of an image all go to one rank, so few pairs have traffic, and those have much. So every sender
spreads its tokens over all peers in turn, like cards, and those forward them:

    sender --hops of the first leg--> relay --hops of the second leg--> receiver

Token p of those that a sender spreads goes by relay (p + the sender's peer number) % A, which may
be the sender or the receiver itself. So all chunks of the first leg are equally full, and those of
the second leg nearly so, since the tokens of an item were spread in turn, too, and come from all
relays equally. A rank's chunks are as full as it sends or receives much, so hops are as many as the
busiest ranks need: about (most sent + most received) / (A * pair_slots). The plan holds one record
per item, nothing per pair of ranks, and takes linear time; that is what lets it be made for
thousands of ranks.

Where most pairs have traffic, as among few ranks, the first `direct_tokens` of each pair go to
their receiver at once.

Letters: A peers; N items that leave their rank; K stretches; T tokens; X exchange ranks (see
backend.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxmllm.arrays import Longs, ceil_divide, running_sums
from jaxmllm.balance.exchange.backend import Stretches, tokens_of
from jaxmllm.balance.records import RouteRound


@dataclass(frozen=True)
class DirectSearch:
    """How many tokens of each pair go to their receiver at once."""

    # None, unless at least 1/4 of all pairs of ranks have traffic.
    dense_part: int = 4
    # Tried are none, all, and these shares of the mean pair's tokens.
    shares: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0)


DIRECT = DirectSearch()


def split_over_relays(
    sender: Longs,
    receiver: Longs,
    tokens: Longs,
    *,
    peers: int,
    groups: int,
    pair_slots: int,
    max_hops: int,
) -> Stretches:
    """Spread all tokens over relays, in as few rounds as doubling finds.

    Args:
      sender, receiver: [N] different exchange ranks of one group, in ascending order.
      tokens: [N], above 0.
      pair_slots: tokens from one rank to another in one hop.
      max_hops: of one round; at least 2.
    """
    if not len(tokens):
        return Stretches(tokens, tokens, tokens, tokens, tokens > 0, tokens, [(0, 0)], 0)
    rounds = 1
    direct_tokens = _choose_direct_tokens(sender, receiver, tokens, peers=peers, groups=groups)
    while True:
        stretches = _split(
            sender,
            receiver,
            tokens,
            peers=peers,
            groups=groups,
            pair_slots=pair_slots,
            rounds=rounds,
            direct_tokens=direct_tokens,
        )
        if max(send_hops + relay_hops for send_hops, relay_hops in stretches.hops) <= max_hops:
            return stretches
        rounds *= 2
        direct_tokens //= 2


def _split(
    sender: Longs,
    receiver: Longs,
    tokens: Longs,
    *,
    peers: int,
    groups: int,
    pair_slots: int,
    rounds: int,
    direct_tokens: int,
) -> Stretches:
    """The stretches of a number of equal rounds, and the hops that each needs."""
    ranks = peers * groups
    round_, item, start, part_tokens = _cut_into_rounds(tokens, rounds)
    # `running_sums` wants members of a group side by side: in each round items are still in order
    # of sender and receiver.
    pair = (round_ * ranks + sender[item]) * ranks + receiver[item]
    of_pair = running_sums(pair, part_tokens)  # earlier tokens
    direct = np.clip(direct_tokens - of_pair, 0, part_tokens)

    relayed = np.flatnonzero(part_tokens > direct)
    relayed_round = round_[relayed]
    relayed_sender = sender[item[relayed]]
    relayed_receiver = receiver[item[relayed]]
    relayed_tokens = (part_tokens - direct)[relayed]
    of_sender = running_sums(relayed_round * ranks + relayed_sender, relayed_tokens)

    # In turn, so every relay gets as many of a sender's tokens, or one less.
    spread_slots = ceil_divide(of_sender + relayed_tokens, peers)
    # Every pair has slots for `direct_tokens` first, used or not; those of spread tokens follow.
    first_leg = direct_tokens + _max_by(relayed_round, spread_slots, rounds)
    first_relay = (of_sender + relayed_sender // groups) % peers
    goal, goal_tokens = _most_of_one_color(
        relayed_round * ranks + relayed_receiver, first_relay, relayed_tokens, colors=peers
    )
    second_leg = _max_by(goal // ranks, goal_tokens, rounds)

    with_direct = np.flatnonzero(direct)
    return Stretches(
        round=np.concatenate([round_[with_direct], relayed_round]),
        item=np.concatenate([item[with_direct], item[relayed]]),
        start=np.concatenate([start[with_direct], (start + direct)[relayed]]),
        tokens=np.concatenate([direct[with_direct], relayed_tokens]),
        direct=np.arange(len(with_direct) + len(relayed)) < len(with_direct),
        ordinal=np.concatenate([of_pair[with_direct], of_sender]),
        hops=[
            (ceil_divide(int(send_slots), pair_slots), ceil_divide(int(relay_slots), pair_slots))
            for send_slots, relay_slots in zip(first_leg, second_leg, strict=True)
        ],
        direct_tokens=direct_tokens,
    )


def _choose_direct_tokens(
    sender: Longs, receiver: Longs, tokens: Longs, *, peers: int, groups: int
) -> int:
    """How many tokens per pair to send directly, judged by the busiest ranks."""
    ranks = peers * groups
    pairs = ranks * (peers - 1)
    begins = np.flatnonzero(np.diff(sender * ranks + receiver, prepend=-1))
    if len(begins) * DIRECT.dense_part < pairs:
        return 0
    volume = np.add.reduceat(tokens, begins)
    mean = int(volume.sum()) / pairs

    def slots(direct_tokens: int) -> int:
        """Slots of a rank to all peers, in all hops: as many as the busiest ranks need."""
        relayed = np.maximum(volume - direct_tokens, 0)
        most_sent = np.bincount(sender[begins], weights=relayed).max()
        most_received = np.bincount(receiver[begins], weights=relayed).max()
        return direct_tokens * peers + int(most_sent + most_received)

    shares = (int(share * mean) for share in DIRECT.shares)
    return min((0, *shares, int(volume.max())), key=slots)


def _cut_into_rounds(tokens: Longs, rounds: int) -> tuple[Longs, Longs, Longs, Longs]:
    """(round, item, first token, tokens) of items cut into equal parts, one per round.

    Which round takes which part differs from item to item, so that items of a single token are
    spread over the rounds as well.
    """
    item = np.tile(np.arange(len(tokens)), rounds)
    round_ = np.repeat(np.arange(rounds), len(tokens))
    part = (round_ + item) % rounds
    start = tokens[item] * part // rounds
    end = tokens[item] * (part + 1) // rounds
    filled = np.flatnonzero(end > start)
    return round_[filled], item[filled], start[filled], (end - start)[filled]


def _max_by(group: Longs, amount: Longs, groups: int) -> Longs:
    """Largest amount of each group, 0 without any: [groups]."""
    largest = np.zeros(groups, np.int64)
    np.maximum.at(largest, group, amount)
    return largest


def _most_of_one_color(
    group: Longs, color: Longs, tokens: Longs, *, colors: int
) -> tuple[Longs, Longs]:
    """Most tokens of one color in each group, when an item's tokens take the colors in turn.

    Full circles count for every color. What is left over is an arc on the circle of colors, and the
    most arcs over one color are found by one walk around it.

    Args:
      group, tokens: [N] of each item.
      color: [N] of each item's first token.

    Returns:
      (groups that occur, ascending; most tokens of one color in each).
    """
    if not len(tokens):
        return tokens, tokens
    circles, arc = np.divmod(tokens, colors)
    end = color + arc
    wraps = end > colors  # such an arc is two: up to the last color, and from color 0 on
    zero = np.zeros_like(color[wraps])
    position = np.concatenate([color, np.minimum(end, colors), zero, end[wraps] - colors])
    change = np.repeat([1, -1, 1, -1], [len(color), len(color), wraps.sum(), wraps.sum()])
    owner = np.concatenate([group, group, group[wraps], group[wraps]])
    # At one position ends come before beginnings, or an arc would meet the next one.
    key = (owner * (colors + 1) + position) * 2 + (change > 0)
    order = np.argsort(key, kind="stable")
    # An item that only makes full circles adds an end and then a beginning, which raise no maximum.
    arcs = np.cumsum(change[order])  # over the color; 0 at the end of every group
    begins = np.flatnonzero(np.r_[True, np.diff(owner[order]) > 0])
    of_circles = np.zeros(int(group.max()) + 1, np.int64)
    np.add.at(of_circles, group, circles)
    groups = owner[order][begins]
    return groups, of_circles[groups] + np.maximum.reduceat(arcs, begins)


@dataclass(frozen=True)
class TokenPaths:
    """The way of each token: all [T].

    The slots between two ranks are counted through all hops of a round: slot n is slot
    n % pair_slots of hop n // pair_slots.
    """

    start: Longs
    arrival: Longs
    sender: Longs
    receiver: Longs
    relay: Longs  # the receiver, where there is no second leg
    send_slot: Longs  # between sender and relay
    relay_slot: Longs  # between relay and receiver


def token_paths(
    round_: RouteRound, *, peers: int, groups: int, pair_slots: int, local: Longs
) -> TokenPaths:
    """The way of every token that begins, passes or ends at some exchange ranks.

    Args:
      local: [X], negative where an exchange rank is of no interest.
    """
    stretch, step = _passing(round_, peers=peers, groups=groups, local=local)
    sender = round_.sender[stretch].astype(np.int64)
    receiver = round_.receiver[stretch].astype(np.int64)
    ordinal = round_.ordinal[stretch] + step
    direct = round_.direct[stretch]
    spread = (sender != receiver) & ~direct
    relay_peer = (ordinal + sender // groups) % peers  # other senders begin with other relays
    relay = np.where(spread, relay_peer * groups + sender % groups, receiver)

    # A relay slot counts the earlier tokens with the same relay and receiver: if one of the two is
    # local, all are here.
    earlier = np.cumsum(round_.tokens, dtype=np.int64) - round_.tokens
    line = earlier[stretch] + step
    pair = np.where(spread, relay * peers + receiver // groups, -1)
    # Numbers in `line` differ, and so do all keys: any sort will do.
    order = np.argsort(pair * (int(round_.tokens.sum(dtype=np.int64)) + 1) + line)
    relay_slot = np.empty_like(line)
    relay_slot[order] = running_sums(pair[order], np.ones_like(line))
    # Slots from one rank to another, through the hops of a round:
    #
    #     | direct | spread, to a relay | .. empty .. | forwarded, or spread to oneself |
    #     0        direct_tokens                      first_leg * pair_slots
    relay_slot += round_.first_leg * pair_slots

    # A sender that is its own relay takes part in the second leg alone.
    own_relay = spread & (relay == sender)
    send_slot = np.where(direct, ordinal, round_.direct_tokens + ordinal // peers)
    return TokenPaths(
        start=round_.start[stretch] + step,
        arrival=round_.arrival[stretch] + step,
        sender=sender,
        receiver=receiver,
        relay=np.where(own_relay, receiver, relay),
        send_slot=np.where(own_relay, relay_slot, send_slot),
        relay_slot=relay_slot,
    )


def _passing(round_: RouteRound, *, peers: int, groups: int, local: Longs) -> tuple[Longs, Longs]:
    """(stretch, number in the stretch) of every token that begins, passes or ends at a local rank."""
    has_local_end = (local[round_.sender] >= 0) | (local[round_.receiver] >= 0)
    near_stretch, near_step = tokens_of(np.flatnonzero(has_local_end), round_.tokens)

    # Of the other stretches, a local rank of the group relays every A-th token.
    relayed = ~round_.direct & (round_.sender != round_.receiver)
    passing = np.flatnonzero(~has_local_end & relayed)
    ranks = np.flatnonzero(local >= 0)
    stretch = np.repeat(passing, len(ranks))
    rank = np.tile(ranks, len(passing))
    same_group = round_.sender[stretch] % groups == rank % groups
    stretch = stretch[same_group]
    rank = rank[same_group]
    first_relayed = (
        rank // groups - round_.ordinal[stretch] - round_.sender[stretch] // groups
    ) % peers
    relayed_tokens = np.maximum(round_.tokens[stretch] - first_relayed + peers - 1, 0) // peers
    visit = np.repeat(np.arange(len(stretch)), relayed_tokens)
    far_step = first_relayed[visit] + peers * running_sums(visit, np.ones_like(visit))
    return np.concatenate([near_stretch, stretch[visit]]), np.concatenate([near_step, far_step])
