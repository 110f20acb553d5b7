"""The operations of one pipelined step, as records: the work of a batch, and what waits for what.

    Ring, Workload --build_graph--> Graph          build_graph.py

Letters: S stage ranks, D chunks of a component (its depth), M microbatches of a component, N
operations. Encoders have microbatches of their own, the encoder rows; each feeds one or more
microbatches of the language model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sharding.pipeline.ring import Ring

Longs = NDArray[np.int64]


class Kind(IntEnum):
    """What an operation does. BACKWARD is INPUT_GRADIENT and WEIGHT_GRADIENT in one operation."""

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3


class Pool(IntEnum):
    """The kind of value that a slot holds. Every component has pools of its own; only the last
    chain has none of tokens.

    INPUT: activations that wait for a chunk's forward and stay for its backward.
    GRADIENT: gradients of a chunk's output.
    TOKENS: encoder outputs on their way to, or at, the first language chunk, until their last use.
    TOKEN_GRADIENT: gradients of these on the way back, summed over the microbatches that used them.
    RESIDUAL: what a forward keeps for its backward.
    PENDING: what an input gradient leaves for its weight gradient.
    """

    INPUT = 0
    GRADIENT = 1
    TOKENS = 2
    TOKEN_GRADIENT = 3
    RESIDUAL = 4
    PENDING = 5

    @property
    def words(self) -> str:
        """The name as it appears in messages."""
        return self.name.lower().replace("_", " ")


PoolKey = tuple[Pool, int]  # a pool of one component, by the number of its chain
RankPool = tuple[Pool, int, int]  # a pool on one rank: pool, chain, rank
Slots = dict[PoolKey, int]  # number of slots on each rank; pools that are left out have none


@dataclass(frozen=True)
class ChainWork:
    """Durations of the parts of one component's operations in a batch: integers [D, M] in any unit,
    the same for all.

    `forward` is positive. Where `input_gradient` and `weight_gradient` are both zero there is no
    backward operation. A chunk sends a gradient to the chunk before if that one has a backward
    operation. A backward operation takes `recompute` in addition, unless the forward kept its
    residuals. `row_class` [M] are the classes of the microbatches' rows, 0 the largest; None: all
    are of one class.
    """

    forward: Longs
    recompute: Longs
    input_gradient: Longs
    weight_gradient: Longs
    row_class: Longs | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(D, M)."""
        return self.forward.shape[0], self.forward.shape[1]

    @cached_property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """The row of each microbatch: its class, and its number among the rows of that class."""
        if self.row_class is None:
            return tuple((0, row) for row in range(self.shape[1]))
        class_sizes: Counter[int] = Counter()
        rows = []
        for row_class in self.row_class.tolist():
            rows.append((row_class, class_sizes[row_class]))
            class_sizes[row_class] += 1
        return tuple(rows)


# For each microbatch of a reader, the rows that it consumes: (number of their chain, row)
Consumed = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Workload:
    """The work of one batch on a ring: `chains` as in the ring, the last one the language model's.

    `inputs[m]` lists what language microbatch m consumes, as (encoder, encoder row) pairs. With
    deferral an encoder row feeds two language microbatches, and its backward waits for the
    gradients of both. `before` holds the inputs of readers that are themselves read, by number of
    their chain.
    """

    chains: tuple[ChainWork, ...]
    inputs: Consumed
    before: Mapping[int, Consumed] = field(default_factory=dict)

    def inputs_of(self, chain: int) -> Consumed:
        """The rows that each microbatch of a chain consumes; none where the chain is no reader."""
        if chain == len(self.chains) - 1:
            return self.inputs
        return self.before.get(chain, ((),) * self.chains[chain].shape[1])


@dataclass(frozen=True)
class Buffer:
    """A value that occupies a slot of `rank` from its first writer to its last reader.

    Writers and readers are operations; `depth` is that of the chunk whose input, output gradient or
    residuals the buffer holds. `hops` is the distance on the ring from the rank where the value was
    computed, for tokens and their gradients. A token gradient that leaves its rank has no readers:
    its slot is free once it is sent.
    """

    pool: Pool
    chain: int
    depth: int
    microbatch: int
    rank: int
    writers: tuple[int, ...]
    readers: tuple[int, ...]
    hops: int = 0

    @property
    def pool_key(self) -> PoolKey:
        """The pool of the component that the buffer belongs to."""
        return self.pool, self.chain

    @property
    def rank_pool(self) -> RankPool:
        """The pool on the buffer's rank."""
        return self.pool, self.chain, self.rank


@dataclass(frozen=True)
class Graph:
    """Operations of one batch, numbered 0 .. N-1, with everything a scheduler needs to know of
    them. See `build_graph`.

    Columns have length N. `successors[n]` lists (operation, ticks): the operation may start that
    many ticks after n at the earliest, because an edge takes a tick for each hop. `returns[n]`, for
    the backward of a first language chunk, lists (encoder, encoder row, operation): the operation
    waits for a share of n's token gradients. With its last share, the sum of an encoder row is sent
    over `ring.delivery_hops` hops; an encoder sends one sum a tick.
    """

    ring: Ring
    workload: Workload
    kind: tuple[int, ...]
    chain: tuple[int, ...]
    depth: tuple[int, ...]
    microbatch: tuple[int, ...]
    stage: tuple[int, ...]
    duration: tuple[int, ...]
    waits: tuple[int, ...]  # number of entries of `successors` and `returns` that name it
    group: tuple[
        int,
        ...,
    ]  # of a forward, the first language microbatch that needs its row; of a backward, the last
    successors: tuple[tuple[tuple[int, int], ...], ...]
    returns: tuple[tuple[tuple[int, int, int], ...], ...]
    buffers: tuple[Buffer, ...]

    @property
    def size(self) -> int:
        """N, the number of operations."""
        return len(self.kind)

    @property
    def groups(self) -> int:
        """Number of groups: language microbatches, and rows that no microbatch reads."""
        return max(self.group, default=-1) + 1

    @cached_property
    def number(self) -> dict[tuple[int, int, int, int], int]:
        """Operation numbers by (kind, chain, depth, microbatch)."""
        keys = zip(self.kind, self.chain, self.depth, self.microbatch, strict=True)
        return {key: n for n, key in enumerate(keys)}

    @cached_property
    def rank_work(self) -> Longs:
        """[S] summed durations of each rank's operations."""
        return np.bincount(self.stage, self.duration, self.ring.stages).astype(np.int64)

    def row_of(self, chain: int, microbatch: int) -> tuple[int, int]:
        """Class of a microbatch's row, and the row's number among those of its class."""
        return self.workload.chains[chain].rows[microbatch]

    def followers(self, operation: int) -> Iterator[int]:
        """The operations that wait directly for `operation`."""
        for follower, _ in self.successors[operation]:
            yield follower
        for _, _, follower in self.returns[operation]:
            yield follower

    def backward_of(self, forward: int) -> int | None:
        """The BACKWARD or INPUT_GRADIENT operation of a forward's chunk and microbatch, if any."""
        key = (self.chain[forward], self.depth[forward], self.microbatch[forward])
        return self.number.get((Kind.BACKWARD, *key), self.number.get((Kind.INPUT_GRADIENT, *key)))

    def name(self, operation: int) -> str:
        """Description of an operation, for messages."""
        kind = Kind(self.kind[operation]).name.lower().replace("_", " ")
        chain = self.ring.chains[self.chain[operation]].name
        return f"{kind} of {chain} chunk {self.depth[operation]}, microbatch {self.microbatch[operation]}"
