"""Spreading uneven traffic evenly over the equal chunks of a padded all-to-all.

One all-to-all (a hop) moves `pair_slots` slots between every two ranks, used or not. The tokens of
an image all go to one rank, so few pairs have traffic, and those have much. Therefore every sender
spreads its tokens over all peers in turn, like cards, and the peers forward them:

    sender --hops of the first leg--> relay --hops of the second leg--> receiver

Token p of those that a sender spreads is sent through relay (p + the sender's peer number) % A,
which may be the sender or the receiver itself. So all chunks that a rank sends in the first leg are
equally full, and those that it receives in the second leg nearly so, because the tokens of each
item come from all relays in equal numbers. The busiest ranks decide the number of hops: about (most
tokens sent + most tokens received) / (A * pair_slots). The plan has one record per item and none
per pair of ranks, and takes linear time, so it can be made for thousands of ranks.

Where many pairs have traffic, as among few ranks, the first `direct_tokens` tokens of each pair are
sent straight to their receiver.

Letters: A peers; N items (or runs of an item's tokens) that leave their rank; K stretches; T
tokens; X exchange ranks (see backend.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxmllm.arrays import Longs, ceil_divide, running_sums
from jaxmllm.balance.exchange.backend import Stretches, tokens_of
from jaxmllm.balance.records import RouteRound


@dataclass(frozen=True)
class DirectSearch:
    """Constants of the choice of how many tokens of each pair are sent directly."""

    # No tokens are sent directly unless at least 1/4 of all pairs of ranks have traffic.
    dense_part: int = 4
    # The candidates are none, all, and these multiples of the mean pair's tokens.
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
    """Spread all tokens over relays, in the first of 1, 2, 4, .. rounds that `max_hops` allows.

    Args:
      sender, receiver: [N] exchange ranks of each item, two different ones of a group; pairs
        (sender, receiver) are in ascending order.
      tokens: [N] tokens of each item, above 0.
      pair_slots: tokens from one rank to another in one hop.
      max_hops: most hops of one round; at least 2.
    """
    if not len(tokens):
        return Stretches(tokens, tokens, tokens, tokens, tokens > 0, tokens, [(0, 0)], 0)
    rounds = 1
    direct_tokens = _choose_direct_tokens(sender, receiver, tokens, peers=peers, groups=groups)
    while True:
        stretches = _stretches_in_rounds(
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


def _stretches_in_rounds(
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
    """The stretches of all traffic in `rounds` equal rounds, and the hops that each round needs."""
    ranks = peers * groups
    round_, item, start, part_tokens = _cut_into_rounds(tokens, rounds)
    # `running_sums` needs members of a group to be neighbours, and they are: in each round items
    # are still ordered by sender and receiver.
    pair = (round_ * ranks + sender[item]) * ranks + receiver[item]
    pair_ordinal = running_sums(pair, part_tokens)  # earlier tokens of the pair
    direct = np.clip(direct_tokens - pair_ordinal, 0, part_tokens)

    relayed = np.flatnonzero(part_tokens > direct)
    relayed_round = round_[relayed]
    relayed_sender = sender[item[relayed]]
    relayed_receiver = receiver[item[relayed]]
    relayed_tokens = (part_tokens - direct)[relayed]
    sender_ordinal = running_sums(relayed_round * ranks + relayed_sender, relayed_tokens)

    # Spread in turn, so every relay gets as many of a sender's tokens as any other, or one less.
    spread_slots = ceil_divide(sender_ordinal + relayed_tokens, peers)
    # Every pair has slots for `direct_tokens` first, used or not; those of spread tokens follow.
    first_leg = direct_tokens + _max_by(relayed_round, spread_slots, rounds)
    first_relay = (sender_ordinal + relayed_sender // groups) % peers
    goal, goal_tokens = _most_of_one_color(
        relayed_round * ranks + relayed_receiver, first_relay, relayed_tokens, colors=peers
    )
    second_leg = _max_by(goal // ranks, goal_tokens, rounds)

    hops = []
    for send_slots, relay_slots in zip(first_leg, second_leg, strict=True):
        send_hops = ceil_divide(int(send_slots), pair_slots)
        relay_hops = ceil_divide(int(relay_slots), pair_slots)
        hops.append((send_hops, relay_hops))

    with_direct = np.flatnonzero(direct)
    is_direct = np.arange(len(with_direct) + len(relayed)) < len(with_direct)
    return Stretches(
        round=np.concatenate([round_[with_direct], relayed_round]),
        item=np.concatenate([item[with_direct], item[relayed]]),
        start=np.concatenate([start[with_direct], (start + direct)[relayed]]),
        tokens=np.concatenate([direct[with_direct], relayed_tokens]),
        direct=is_direct,
        ordinal=np.concatenate([pair_ordinal[with_direct], sender_ordinal]),
        hops=hops,
        direct_tokens=direct_tokens,
    )


def _choose_direct_tokens(
    sender: Longs, receiver: Longs, tokens: Longs, *, peers: int, groups: int
) -> int:
    """How many tokens per pair to send directly, judged by the busiest ranks."""
    ranks = peers * groups
    # Pairs (sender, receiver) that may have traffic: every rank with each other peer of its group.
    pairs = ranks * (peers - 1)
    # Items are ordered by sender and receiver, so a pair begins where these change.
    begins = np.flatnonzero(np.diff(sender * ranks + receiver, prepend=-1))
    if len(begins) * DIRECT.dense_part < pairs:
        return 0
    volume = np.add.reduceat(tokens, begins)
    mean = int(volume.sum()) / pairs

    def slots(direct_tokens: int) -> int:
        """Slots from a rank to all peers, in all hops: as many as the busiest ranks need."""
        relayed = np.maximum(volume - direct_tokens, 0)
        most_sent = np.bincount(sender[begins], weights=relayed).max()
        most_received = np.bincount(receiver[begins], weights=relayed).max()
        return direct_tokens * peers + int(most_sent + most_received)

    # From nothing sent directly, which wins ties, up to everything.
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
    """Largest amount in each group, 0 for an empty group: [groups]."""
    largest = np.zeros(groups, np.int64)
    np.maximum.at(largest, group, amount)
    return largest


def _most_of_one_color(
    group: Longs, color: Longs, tokens: Longs, *, colors: int
) -> tuple[Longs, Longs]:
    """Tokens of the most frequent color in each group, when an item's tokens take colors in turn.

    Colors stand for relays, and a group for the tokens to one receiver in one round. Each full
    circle of an item adds a token to every color. The rest of the item is an arc on the circle of
    colors; one walk around the circle finds the most arcs that cover one color.

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
    wraps = end > colors  # such an arc is cut in two: up to the last color, and from color 0 on
    zero = np.zeros_like(color[wraps])
    position = np.concatenate([color, np.minimum(end, colors), zero, end[wraps] - colors])
    change = np.repeat([1, -1, 1, -1], [len(color), len(color), wraps.sum(), wraps.sum()])
    owner = np.concatenate([group, group, group[wraps], group[wraps]])
    # At one position ends sort before beginnings: an arc does not overlap one that begins there.
    key = (owner * (colors + 1) + position) * 2 + (change > 0)
    order = np.argsort(key, kind="stable")
    # An item of full circles only adds an end and then a beginning, which do not raise the maximum.
    arcs = np.cumsum(change[order])  # arcs that cover the color; 0 at the end of every group
    begins = np.flatnonzero(np.r_[True, np.diff(owner[order]) > 0])
    circle_tokens = np.zeros(int(group.max()) + 1, np.int64)
    np.add.at(circle_tokens, group, circles)
    groups = owner[order][begins]
    return groups, circle_tokens[groups] + np.maximum.reduceat(arcs, begins)


@dataclass(frozen=True)
class TokenPaths:
    """The path of each token: all [T].

    The slots between two ranks are numbered through all hops of a round: slot n is slot
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
    """The path of every token that one of some exchange ranks sends, relays or receives.

    Args:
      local: [X] negative for exchange ranks that are not among them.
    """
    stretch, step = _local_tokens(round_, peers=peers, groups=groups, local=local)
    sender = round_.sender[stretch].astype(np.int64)
    receiver = round_.receiver[stretch].astype(np.int64)
    ordinal = round_.ordinal[stretch] + step
    direct = round_.direct[stretch]
    spread = (sender != receiver) & ~direct
    relay_peer = (ordinal + sender // groups) % peers  # each sender begins with another relay
    relay = np.where(spread, relay_peer * groups + sender % groups, receiver)

    # A token's relay slot is the number of earlier tokens with the same relay and receiver. It is
    # used only if one of the two is local, and then all these tokens are in the arrays.
    earlier = np.cumsum(round_.tokens, dtype=np.int64) - round_.tokens
    line = earlier[stretch] + step
    pair = np.where(spread, relay * peers + receiver // groups, -1)
    # Numbers in `line` are distinct, hence all keys are: the sort need not be stable.
    order = np.argsort(pair * (int(round_.tokens.sum(dtype=np.int64)) + 1) + line)
    relay_slot = np.empty_like(line)
    relay_slot[order] = running_sums(pair[order], np.ones_like(line))
    # Slots from one rank to another, through the hops of a round:
    #
    #     | direct | spread, to a relay | .. empty .. | forwarded, or spread to oneself |
    #     0        direct_tokens                      first_leg * pair_slots
    relay_slot += round_.first_leg * pair_slots

    # A sender that is its own relay sends in the second leg only.
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


def _local_tokens(
    round_: RouteRound, *, peers: int, groups: int, local: Longs
) -> tuple[Longs, Longs]:
    """(stretch, number in it) of every token that a local rank sends, relays or receives."""
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
    # The first step at which (ordinal + step + peer of the sender) % A is the local rank's peer.
    first_relayed = (
        rank // groups - round_.ordinal[stretch] - round_.sender[stretch] // groups
    ) % peers
    relayed_tokens = np.maximum(round_.tokens[stretch] - first_relayed + peers - 1, 0) // peers
    visit = np.repeat(np.arange(len(stretch)), relayed_tokens)
    far_step = first_relayed[visit] + peers * running_sums(visit, np.ones_like(visit))
    return np.concatenate([near_stretch, stretch[visit]]), np.concatenate([near_step, far_step])
