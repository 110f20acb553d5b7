"""The operations of a pipelined step: a ring of stages, the work of one batch, and the dependency graph of both.

Letters: S stage ranks, D chunks of a component (its depth), M microbatches of a component. Encoders have
microbatches of their own, the sub-microbatches; each feeds one or more microbatches of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]


class PipelineError(ValueError):
    """A ring, workload, schedule or table that cannot be."""


class Kind(IntEnum):
    """What an operation does. BACKWARD is INPUT_GRADIENT and WEIGHT_GRADIENT in one."""

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3


@dataclass(frozen=True)
class Chain:
    """The chunks of one component, by depth: chunk d has layers[d] layers and lies on rank stages[d].

    Consecutive chunks lie on the same rank or on the next one of the ring, (s + 1) % S. The first chunk also holds
    what comes before the layers (stem, embedding), the last one what comes after (projector, head and loss).
    head_only: of a whole component, nothing but what comes after the layers may have a gradient.
    """

    name: str
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    head_only: bool = False

    @property
    def depth(self) -> int:
        return len(self.stages)

    def local(self, depth: int) -> int:
        """Number of a chunk among the chunks of this component on its rank."""
        return self.stages[:depth].count(self.stages[depth])

    @property
    def chunks_per_rank(self) -> int:
        """Most chunks of this component on one rank."""
        return max(self.stages.count(stage) for stage in set(self.stages))


@dataclass(frozen=True)
class Ring:
    """Where the chunks of every component lie: encoders in model order, then the language model, on S ranks.

    The last chunk of an encoder delivers its tokens to the first language chunk, over as many ring hops as lie
    between them. Raises `PipelineError` when chains cannot be laid on the ring.
    """

    stages: int
    chains: tuple[Chain, ...]

    def __post_init__(self) -> None:
        names = [chain.name for chain in self.chains]
        if not names or len(set(names)) < len(names):
            raise PipelineError(f"a ring needs components of distinct names, not {names}")
        for chain in self.chains:
            if not chain.stages or len(chain.layers) != len(chain.stages):
                raise PipelineError(
                    f"{chain.name} has {len(chain.layers)} layer counts for {len(chain.stages)} chunks; "
                    f"every chunk needs a stage rank and a number of layers"
                )
            if not all(0 <= stage < self.stages for stage in chain.stages):
                raise PipelineError(f"{chain.name} lies on ranks {chain.stages} of a pipeline of {self.stages} stages")
            if min(chain.layers) < 0:
                raise PipelineError(f"{chain.name} has a chunk of {min(chain.layers)} layers")
            for depth in range(1, chain.depth):
                if self.hops(chain.stages[depth - 1], chain.stages[depth]) > 1:
                    raise PipelineError(
                        f"chunk {depth} of {chain.name} lies on rank {chain.stages[depth]}, after rank "
                        f"{chain.stages[depth - 1]}: consecutive chunks must lie on the same or the next rank"
                    )

    @property
    def encoders(self) -> tuple[Chain, ...]:
        return self.chains[:-1]

    @property
    def language(self) -> Chain:
        return self.chains[-1]

    def hops(self, source: int, target: int) -> int:
        """Places of the ring from one rank to another, going up."""
        return (target - source) % self.stages

    def delivery_hops(self, encoder: int) -> int:
        """Ring hops from the last chunk of an encoder to the first language chunk."""
        return self.hops(self.chains[encoder].stages[-1], self.language.stages[0])


@dataclass(frozen=True)
class ChainWork:
    """How long the parts of one component's operations take in a batch: integers [D, M] of any one unit.

    `forward` is positive. Nothing is done backward where `input_gradient` and `weight_gradient` are both zero. A
    chunk sends a gradient to the chunk before if that one does anything backward. The backward operation pays
    `recompute` unless the forward kept its residuals.
    """

    forward: Longs
    recompute: Longs
    input_gradient: Longs
    weight_gradient: Longs

    @property
    def shape(self) -> tuple[int, int]:
        return self.forward.shape[0], self.forward.shape[1]


@dataclass(frozen=True)
class Workload:
    """The work of one batch on a ring: `chains` as in the ring, the last one the language model's.

    `inputs[m]` lists what language microbatch m consumes, as (encoder, sub-microbatch) pairs. With deferral a
    sub-microbatch feeds two language microbatches, and its backward waits for the gradients of both.
    """

    chains: tuple[ChainWork, ...]
    inputs: tuple[tuple[tuple[int, int], ...], ...]


class Pool(IntEnum):
    """What kind of thing a slot holds. Every component has pools of its own, but the language model none of tokens.

    INPUT: activations that wait for a chunk's forward and stay for its backward. GRADIENT: of a chunk's output.
    TOKENS: encoder outputs on their way to, or at, the first language chunk, until its last backward.
    TOKEN_GRADIENT: the same way back, summed over the microbatches that used the tokens. RESIDUAL: what a forward
    kept for its backward. PENDING: what an input gradient left for its weight gradient.
    """

    INPUT = 0
    GRADIENT = 1
    TOKENS = 2
    TOKEN_GRADIENT = 3
    RESIDUAL = 4
    PENDING = 5


Slots = dict[tuple[Pool, int], int]  # slots of each rank by pool and component; pools that are left out have none


@dataclass(frozen=True)
class Buffer:
    """Something that occupies a slot of `rank` from the first of its writers to the last of its readers.

    Writers and readers are operations; `depth` is that of the chunk whose input, output gradient or residuals these
    are. `hops` is how far the buffer lies from where its writer computed it, for tokens and their gradients. A token
    gradient that leaves its rank has no readers: it goes when it is sent.
    """

    pool: Pool
    chain: int
    depth: int
    microbatch: int
    rank: int
    writers: tuple[int, ...]
    readers: tuple[int, ...]
    hops: int = 0


@dataclass(frozen=True)
class Graph:
    """Operations of one batch, numbered 0 .. N-1, with everything a scheduler asks about them. See `build_graph`.

    Columns have length N. `successors[n]` lists (operation, ticks): it may start that many ticks after n at the
    earliest, because an edge takes a tick a hop. `returns[n]` (backward of the first language chunk) lists the
    (encoder, sub-microbatch, operation) that wait for a share of n's token gradients. The last share of a
    sub-microbatch sends the sum, one of an encoder in a tick, over `ring.delivery_hops` places.
    """

    ring: Ring
    workload: Workload
    kind: tuple[int, ...]
    chain: tuple[int, ...]
    depth: tuple[int, ...]
    microbatch: tuple[int, ...]
    stage: tuple[int, ...]
    duration: tuple[int, ...]
    waits: tuple[int, ...]  # entries of `successors` and `returns` that name the operation
    group: tuple[int, ...]  # language microbatch it belongs to: first that needs a forward, last that holds a backward
    successors: tuple[tuple[tuple[int, int], ...], ...]
    returns: tuple[tuple[tuple[int, int, int], ...], ...]
    buffers: tuple[Buffer, ...]

    @property
    def size(self) -> int:
        return len(self.kind)

    @cached_property
    def number(self) -> dict[tuple[int, int, int, int], int]:
        """Number of an operation by (kind, chain, depth, microbatch)."""
        keys = zip(self.kind, self.chain, self.depth, self.microbatch, strict=True)
        return {key: n for n, key in enumerate(keys)}

    @cached_property
    def rank_work(self) -> Longs:
        """[S] summed durations of each rank's operations."""
        return np.bincount(self.stage, self.duration, self.ring.stages).astype(np.int64)

    def backward_of(self, forward: int) -> int | None:
        """The operation that computes the input gradient of what a forward computed, if there is one."""
        key = self.chain[forward], self.depth[forward], self.microbatch[forward]
        return self.number.get((Kind.BACKWARD, *key), self.number.get((Kind.INPUT_GRADIENT, *key)))

    def name(self, operation: int) -> str:
        """An operation in words, for messages."""
        kind = Kind(self.kind[operation]).name.lower().replace("_", " ")
        chain = self.ring.chains[self.chain[operation]].name
        return f"{kind} of {chain} chunk {self.depth[operation]}, microbatch {self.microbatch[operation]}"


def build_graph(ring: Ring, workload: Workload, *, split: bool = False, fused: bool = True) -> Graph:
    """The operations of a workload on a ring, and what each waits for.

    split: backward operations with both gradients become an INPUT_GRADIENT operation (recompute and input
    gradient) and a WEIGHT_GRADIENT operation on the same rank, which nothing waits for.
    fused: the last language chunk has no forward operation where it has a backward: that one computes the
    forward anyway and yields the loss.
    Raises `PipelineError` when workload and ring do not fit, or when a gradient would have nowhere to come from.
    """
    _check(ring, workload)
    return _Builder(ring, workload, split, fused).build()


def _check(ring: Ring, workload: Workload) -> None:
    if len(workload.chains) != len(ring.chains):
        raise PipelineError(f"work of {len(workload.chains)} components for a ring of {len(ring.chains)}")
    for chain, work in zip(ring.chains, workload.chains, strict=True):
        if work.shape[0] != chain.depth:
            raise PipelineError(f"work of {work.shape[0]} chunks for {chain.name}, which has {chain.depth}")
        if work.shape[1] and work.forward.min() < 1:
            raise PipelineError(f"{chain.name} has a forward operation of duration {work.forward.min()}; at least 1")
        backward = (work.input_gradient + work.weight_gradient) > 0
        if (backward[:-1] & ~backward[1:]).any():
            depth, microbatch = np.argwhere(backward[:-1] & ~backward[1:])[0]
            raise PipelineError(
                f"chunk {depth} of {chain.name} has a backward for microbatch {microbatch}, but chunk {depth + 1}, "
                f"where its gradient comes from, has none"
            )
        if chain.head_only and backward[:-1].any():
            raise PipelineError(f"{chain.name} is trained behind its last layer only, but earlier chunks go backward")
    language = workload.chains[-1]
    if len(workload.inputs) != language.shape[1]:
        raise PipelineError(
            f"inputs of {len(workload.inputs)} language microbatches, of which there are {language.shape[1]}"
        )
    used: set[tuple[int, int]] = set()
    for microbatch, inputs in enumerate(workload.inputs):
        if len(set(inputs)) < len(inputs):
            raise PipelineError(f"language microbatch {microbatch} names a sub-microbatch twice: {inputs}")
        for encoder, sub in inputs:
            if not (0 <= encoder < len(ring.encoders) and 0 <= sub < workload.chains[encoder].shape[1]):
                raise PipelineError(
                    f"language microbatch {microbatch} consumes sub-microbatch {sub} of encoder {encoder}, "
                    f"which does not exist"
                )
            if _backward(workload.chains[encoder], -1, sub) and not _backward(language, 0, microbatch):
                raise PipelineError(
                    f"sub-microbatch {sub} of {ring.chains[encoder].name} waits for a gradient from language "
                    f"microbatch {microbatch}, which has no backward"
                )
        used.update(inputs)
    for encoder, chain in enumerate(ring.encoders):
        for sub in range(workload.chains[encoder].shape[1]):
            if (encoder, sub) not in used:
                raise PipelineError(f"no language microbatch consumes sub-microbatch {sub} of {chain.name}")


def _backward(work: ChainWork, depth: int, microbatch: int) -> bool:
    return bool(work.input_gradient[depth, microbatch] + work.weight_gradient[depth, microbatch])


class _Builder:
    """Collects the columns of a graph; `first[c][d][m]` and `back[c][d][m]` number what reads a chunk's input and what
    computes its input gradient (-1: nothing)."""

    def __init__(self, ring: Ring, workload: Workload, split: bool, fused: bool):
        self.ring, self.workload, self.split, self.fused = ring, workload, split, fused
        self.rows: list[tuple[int, int, int, int, int, int]] = []
        self.buffers: list[Buffer] = []
        self.consumers: list[list[list[int]]] = [[[] for _ in range(work.shape[1])] for work in workload.chains]
        for microbatch, inputs in enumerate(workload.inputs):
            for encoder, sub in inputs:
                self.consumers[encoder][sub].append(microbatch)
        self.first: list[list[list[int]]] = []
        self.forward: list[list[list[int]]] = []
        self.back: list[list[list[int]]] = []
        self.weight: list[list[list[int]]] = []

    def build(self) -> Graph:
        for chain in range(len(self.ring.chains)):
            self._number(chain)
        size = len(self.rows)
        self.successors: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self.returns: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
        for chain in range(len(self.ring.chains)):
            self._connect(chain)
        for encoder in range(len(self.ring.encoders)):
            self._deliver(encoder)
        waits = [0] * size
        for edges in self.successors:
            for operation, _ in edges:
                waits[operation] += 1
        for shares in self.returns:
            for _, _, operation in shares:
                waits[operation] += 1
        kind, chain_, depth, microbatch, stage, duration = zip(*self.rows, strict=True)
        return Graph(
            self.ring,
            self.workload,
            kind,
            chain_,
            depth,
            microbatch,
            stage,
            duration,
            tuple(waits),
            tuple(self._group(*row[:4]) for row in self.rows),
            tuple(map(tuple, self.successors)),
            tuple(map(tuple, self.returns)),
            tuple(self.buffers),
        )

    def _number(self, c: int) -> None:
        """Operations of one component."""
        work = self.workload.chains[c]
        forward, recompute = work.forward.tolist(), work.recompute.tolist()
        inputs, weights = work.input_gradient.tolist(), work.weight_gradient.tolist()
        depths, microbatches = work.shape
        tables = [[[-1] * microbatches for _ in range(depths)] for _ in range(4)]
        fused = depths - 1 if self.fused and c == len(self.ring.chains) - 1 else -1
        for d in range(depths):
            for m in range(microbatches):
                x, w, again = inputs[d][m], weights[d][m], recompute[d][m]
                if not (d == fused and x + w):
                    tables[0][d][m] = self._add(Kind.FORWARD, c, d, m, forward[d][m])
                else:
                    again = forward[d][m]
                if self.split and x and w:
                    tables[2][d][m] = self._add(Kind.INPUT_GRADIENT, c, d, m, again + x)
                    tables[3][d][m] = self._add(Kind.WEIGHT_GRADIENT, c, d, m, w)
                elif x + w:
                    tables[2][d][m] = self._add(Kind.BACKWARD, c, d, m, again + x + w)
                tables[1][d][m] = tables[0][d][m] if tables[0][d][m] >= 0 else tables[2][d][m]
        for table, column in zip(tables, (self.forward, self.first, self.back, self.weight), strict=True):
            column.append(table)

    def _add(self, kind: Kind, c: int, d: int, m: int, duration: int) -> int:
        self.rows.append((int(kind), c, d, m, self.ring.chains[c].stages[d], duration))
        return len(self.rows) - 1

    def _group(self, kind: int, c: int, d: int, m: int) -> int:
        if c == len(self.ring.chains) - 1:
            return m
        return (min if kind == Kind.FORWARD else max)(self.consumers[c][m])

    def _connect(self, c: int) -> None:
        """Edges and buffers inside one component."""
        stages = self.ring.chains[c].stages
        kept = len(stages) - 1 if self.ring.chains[c].head_only else -1
        depths, microbatches = self.workload.chains[c].shape
        for d in range(depths):
            for m in range(microbatches):
                forward, first, back = self.forward[c][d][m], self.first[c][d][m], self.back[c][d][m]
                weight = self.weight[c][d][m]
                if forward >= 0 and back >= 0:
                    self.successors[forward].append((back, 1))
                if weight >= 0:
                    self.successors[back].append((weight, 1))
                    self._hold(Pool.PENDING, c, d, m, stages[d], (back,), (weight,))
                if d:
                    before = self.forward[c][d - 1][m]
                    self.successors[before].append((first, max(1, self.ring.hops(stages[d - 1], stages[d]))))
                    self._hold(Pool.INPUT, c, d, m, stages[d], (before,), (max(first, back),))
                elif d == kept and forward >= 0 and back >= 0:
                    self._hold(Pool.INPUT, c, d, m, stages[d], (forward,), (back,))
                if d and self.back[c][d - 1][m] >= 0:
                    after = self.back[c][d - 1][m]
                    self.successors[back].append((after, max(1, self.ring.hops(stages[d - 1], stages[d]))))
                    self._hold(Pool.GRADIENT, c, d - 1, m, stages[d - 1], (back,), (after,))

    def _deliver(self, c: int) -> None:
        """Edges and buffers between an encoder and the first language chunk."""
        hops = self.ring.delivery_hops(c)
        last = self.ring.chains[c].depth - 1
        source, target = self.ring.chains[c].stages[-1], self.ring.language.stages[0]
        for sub, users in enumerate(self.consumers[c]):
            forward, back = self.forward[c][-1][sub], self.back[c][-1][sub]
            firsts = [self.first[-1][0][m] for m in users]
            backs = [self.back[-1][0][m] for m in users]
            for first in firsts:
                self.successors[forward].append((first, max(1, hops)))
            users_end = tuple(max(pair) for pair in zip(firsts, backs, strict=True))
            self._hold(Pool.TOKENS, c, last, sub, target, (forward,), users_end, hops)
            if back < 0:
                continue
            for user in backs:
                self.returns[user].append((c, sub, back))
            self._hold(Pool.TOKEN_GRADIENT, c, last, sub, target, tuple(backs), () if hops else (back,))
            if hops:
                self._hold(Pool.TOKEN_GRADIENT, c, last, sub, source, tuple(backs), (back,), hops)

    def _hold(
        self,
        pool: Pool,
        c: int,
        d: int,
        m: int,
        rank: int,
        writers: tuple[int, ...],
        readers: tuple[int, ...],
        hops: int = 0,
    ) -> None:
        self.buffers.append(Buffer(pool, c, d, m, rank, writers, readers, hops))
