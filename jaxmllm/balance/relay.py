"""Spreading uneven traffic over the equal chunks of a padded all-to-all.

One all-to-all (a hop) moves `pair_slots` tokens between every two ranks, wanted or not. The tokens of an image all go
to one rank, so a few pairs need many slots and most none. What exceeds the slots of a pair takes a second leg:

    direct     sender ----------------------> receiver      any hop
    relayed    sender --first hops--> relay --later hops--> receiver

Relays are chosen so that chunks without tokens of their own carry those of others. Both legs are part of the plan: on
the device a hop is nothing but two gathers around an all-to-all.

Letters: X exchange ranks, of which the A of one plane exchange with each other; P pairs with traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxmllm.balance.plan import Longs

FILLS = (0.35, 0.6, 1.0)  # share of a chunk's room that one pair may take, pass by pass: late pairs find room, too


@dataclass(frozen=True)
class Legs:
    """Consecutive tokens of one pair that travel alike, all [K], grouped by pair in the order of its tokens.

    A lane numbers the slots between two ranks through all hops of a round: lane n is slot n % pair_slots of hop
    n // pair_slots. Tokens take lanes lane .. lane + tokens to `relay` and, if that is not the receiver, lanes
    onward .. onward + tokens from there, in later hops.
    """

    pair: Longs  # sender * A + receiver's place
    relay: Longs  # place along A; the receiver's for direct tokens
    tokens: Longs
    round: Longs
    lane: Longs
    onward: Longs


def spread(volume: Longs, pair_slots: int, most_hops: int) -> tuple[Legs, list[int]]:
    """Find legs for all tokens.

    Args:
      volume: [X, A] tokens from each exchange rank to each place along A; X is a multiple of A, and exchange rank x
        has place x // (X / A) and sends to ranks of the same x % (X / A). Those for its own place need no legs.
      pair_slots: tokens from one rank to another in one hop.
      most_hops: hops of one round.

    Returns:
      (legs, hops of each round).
    """
    planes = len(volume) // volume.shape[1]
    place = np.arange(len(volume)) // planes
    left = volume.copy()
    left[np.arange(len(left)), place] = 0
    found: list[Longs] = []
    hops: list[int] = []
    while left.any():
        spreading = _Round(left, place, planes, pair_slots, most_hops)
        while not spreading.finished and spreading.hops < most_hops:
            spreading.add_hop()
        left = spreading.left
        found.append(spreading.legs(len(hops)))
        hops.append(spreading.hops)
    columns = np.concatenate([np.zeros((6, 0), np.int64), *found], axis=1)
    return Legs(*columns[:, np.argsort(columns[0], kind="stable")]), hops


class _Round:
    """Fills the lanes of one round. `early` and `late` count the lanes taken of the first and of the later hops."""

    def __init__(self, volume: Longs, place: Longs, planes: int, pair_slots: int, most_hops: int):
        self.left, self.place, self.planes, self.pair_slots = volume, place, planes, pair_slots
        self.first, self.later = 0, 0
        self.early, self.late = np.zeros_like(volume), np.zeros_like(volume)
        self.direct, self.relayed = [np.zeros((6, 0), np.int64)], [np.zeros((6, 0), np.int64)]
        self.enough = min(self._fewest(), most_hops)

    @property
    def hops(self) -> int:
        return self.first + self.later

    @property
    def finished(self) -> bool:
        return not self.left.any()

    def _fewest(self) -> int:
        """Hops that no choice of relays can do without: tokens beyond the slots of their pair travel twice."""
        others = max(self.left.shape[1] - 1, 1)
        low, high = 1, -(-int(self.left.max()) // self.pair_slots)
        while low < high:
            hops = (low + high) // 2
            legs = self.left + np.maximum(self.left - hops * self.pair_slots, 0)
            busiest = max(legs.sum(axis=1).max(), legs.reshape(-1, self.planes, legs.shape[1]).sum(axis=0).max())
            low, high = (low, hops) if busiest <= others * hops * self.pair_slots else (hops + 1, high)
        return low

    def add_hop(self) -> None:
        """Add a hop on the shorter side and, once there might be enough, move what now fits."""
        if self.first < self.later:
            self.first += 1
        else:
            self.later += 1
        if self.hops >= self.enough:
            self._send_direct()
            self._send_relayed()

    def _room(self) -> tuple[Longs, Longs]:
        early, late = self.first * self.pair_slots - self.early, self.later * self.pair_slots - self.late
        own = np.arange(len(early)), self.place
        early[own], late[own] = 0, 0
        return early, late

    def _send_direct(self) -> None:
        """Fill the pair's own lanes: early ones where relayed tokens will mostly arrive, late ones where they start."""
        early, late = self._room()
        sent = np.minimum(self.left, early + late)
        excess = self.left - sent
        leaving = excess.sum(axis=1)[:, None]
        arriving = excess.reshape(-1, self.planes, excess.shape[1]).sum(axis=0)[np.arange(len(excess)) % self.planes]
        share = sent * arriving // np.maximum(leaving + arriving, 1)
        soon = np.clip(share, sent - late, early)
        sender, receiver = np.nonzero(sent)
        pair = sender * sent.shape[1] + receiver
        for tokens, taken, late_lane in ((soon, self.early, 0), (sent - soon, self.late, 1)):
            amount = tokens[sender, receiver]
            columns = [pair, receiver, amount, taken[sender, receiver], np.full_like(pair, late_lane), pair * 0]
            self.direct.append(np.stack(columns)[:, amount > 0])
            taken += tokens
        self.left = excess

    def _send_relayed(self) -> None:
        """Offer every pair each relay in turn, at growing distance from the sender."""
        places = self.left.shape[1]
        early, late = self._room()
        sender, receiver = np.nonzero(self.left)
        excess = self.left[sender, receiver]
        for fill in FILLS:
            for distance in range(1, places):
                waiting = excess > 0
                if not waiting.all():
                    sender, receiver, excess = sender[waiting], receiver[waiting], excess[waiting]
                if not len(sender):
                    return
                relay = (self.place[sender] + distance) % places
                at = relay * self.planes + sender % self.planes
                tokens = np.minimum(excess, _part(late[at, receiver], fill))
                before = _sum_before(sender, tokens)
                tokens = np.clip(_part(early[sender, relay], fill) - before, 0, tokens)
                used = np.flatnonzero(tokens)
                if not len(used):
                    continue
                of, to, by, amount = sender[used], receiver[used], relay[used], tokens[used]
                pair = of * places + to
                lane, onward = self.early[of, by] + before[used], self.late[at[used], to]
                self.relayed.append(np.stack([pair, by, amount, lane, np.zeros_like(pair), onward]))
                self.late[at[used], to] += amount
                late[at[used], to] -= amount
                np.add.at(self.early, (of, by), amount)
                np.subtract.at(early, (of, by), amount)
                self.left[of, to] -= amount
                excess = excess - tokens

    def legs(self, number: int) -> Longs:
        """The fields of `Legs`, as rows."""
        later = self.first * self.pair_slots
        pair, relay, tokens, lane, late, _ = np.concatenate(self.direct, axis=1)
        direct = np.stack([pair, relay, tokens, np.full_like(pair, number), lane + late * later, np.zeros_like(pair)])
        pair, relay, tokens, lane, _, onward = np.concatenate(self.relayed, axis=1)
        relayed = np.stack([pair, relay, tokens, np.full_like(pair, number), lane, onward + later])
        return np.concatenate([direct, relayed], axis=1)


def _part(room: Longs, fill: float) -> Longs:
    return -(-room * int(100 * fill) // 100)


def _sum_before(group: Longs, amount: Longs) -> Longs:
    """Sum of `amount` over the earlier members of the same group; groups ascend."""
    before = np.cumsum(amount) - amount
    return before - before[np.searchsorted(group, group)]
