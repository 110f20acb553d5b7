"""The operations of a pipelined step: a layout, the work of one batch, and the dependency graph of both.

Letters: S stage ranks, D chunks of a component (its depth), M microbatches of a component. Encoders have
microbatches of their own, the sub-microbatches; each feeds one or more microbatches of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]


class PipelineError(ValueError):
    """A layout, workload, schedule or table that cannot be."""


class Kind(IntEnum):
    """What an operation does. BACKWARD is INPUT_GRADIENT and WEIGHT_GRADIENT in one."""

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3


@dataclass(frozen=True)
class Chain:
    """The chunks of one component, by depth: chunk d has layers[d] layers and lies on rank stages[d].

    Consecutive chunks lie on the same rank or on the next one of the ring, (s + 1) % S.
    """

    name: str
    stages: tuple[int, ...]
    layers: tuple[int, ...]

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
class Layout:
    """Where the chunks of every component lie: encoders in model order, then the language model, on S ranks.

    The last chunk of an encoder delivers its tokens to the first language chunk, over as many ring hops as lie
    between them. Raises `PipelineError` when chains cannot be laid on the ring.
    """

    stages: int
    chains: tuple[Chain, ...]

    def __post_init__(self) -> None:
        names = [chain.name for chain in self.chains]
        if not names or len(set(names)) < len(names):
            raise PipelineError(f"a layout needs components of distinct names, not {names}")
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

    `forward` > 0. Nothing is done backward where `input_gradient` and `weight_gradient` are both zero;
    zero `input_gradient` with some weight gradient means that nothing upstream needs a gradient, so that none is
    sent to the chunk before. `recompute` is paid by the backward operation unless the forward kept its residuals.
    """

    forward: Longs
    recompute: Longs
    input_gradient: Longs
    weight_gradient: Longs

    @property
    def shape(self) -> tuple[int, int]:
        return self.forward.shape[0], self.forward.shape[1]

    @property
    def total(self) -> Longs:
        """[D] work of each chunk over all microbatches."""
        parts = self.forward + self.recompute + self.input_gradient + self.weight_gradient
        return parts.sum(axis=1)


@dataclass(frozen=True)
class Workload:
    """The work of one batch on a layout: `chains` as in the layout, the last one the language model's.

    `inputs[m]` lists what language microbatch m consumes, as (encoder, sub-microbatch) pairs. With deferral a
    sub-microbatch feeds two language microbatches, and its backward waits for the gradients of both.
    """

    chains: tuple[ChainWork, ...]
    inputs: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Graph:
    """Operations of one batch, numbered 0 .. N-1, with everything a scheduler asks about them. See `build_graph`.

    Arrays have length N. `successors[n]` lists (operation, ticks): it may start that many ticks after n at the
    earliest, because an edge takes a tick a hop. `returns[n]` (first language chunk, backward) lists the
    (encoder, operation) pairs that wait for a share of n's token gradients; the last share of a sub-microbatch
    is sent on, one of an encoder's per tick, `layout.delivery_hops(encoder)` ticks away.
    """

    layout: Layout
    workload: Workload
    kind: Longs
    chain: Longs
    depth: Longs
    microbatch: Longs
    stage: Longs
    duration: Longs
    waits: Longs  # predecessors, each entry of `successors` or `returns` that names the operation being one
    successors: tuple[tuple[tuple[int, int], ...], ...]
    returns: tuple[tuple[tuple[int, int], ...], ...]
    split: bool = False
    fused: bool = False

    @cached_property
    def number(self) -> dict[tuple[int, int, int, int], int]:
        """Number of an operation by (kind, chain, depth, microbatch)."""
        keys = zip(*(column.tolist() for column in (self.kind, self.chain, self.depth, self.microbatch)), strict=True)
        return {key: n for n, key in enumerate(keys)}

    @property
    def size(self) -> int:
        return len(self.kind)

    @cached_property
    def rank_work(self) -> Longs:
        """[S] summed durations of each rank's operations."""
        return np.bincount(self.stage, self.duration, self.layout.stages).astype(np.int64)

    def name(self, operation: int) -> str:
        """An operation in words, for messages."""
        kind = Kind(int(self.kind[operation])).name.lower().replace("_", " ")
        chain = self.layout.chains[int(self.chain[operation])].name
        return f"{kind} of {chain} chunk {self.depth[operation]}, microbatch {self.microbatch[operation]}"


def build_graph(layout: Layout, workload: Workload, *, split: bool = False, fused: bool = True) -> Graph:
    """The operations of a workload on a layout, and what each waits for.

    split: backward operations that compute both gradients become an INPUT_GRADIENT operation (recompute and input
    gradient) and a WEIGHT_GRADIENT operation on the same rank, which nothing waits for.
    fused: the last language chunk has no forward operation where it has a backward: that one recomputes the
    forward anyway and yields the loss.
    Raises `PipelineError` when workload and layout do not fit, or when a gradient would have nowhere to come from.
    """
    raise NotImplementedError
