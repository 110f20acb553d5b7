"""A ring of pipeline ranks, and the chunks of every component on them.

The last chain is the reader of all chains that name no other reader: it consumes what they deliver,
and has a loss. It is the language model, fed by encoders, or a generator, fed by the language
model. Where encoders feed a language model that feeds a generator, they name the language model as
their reader:

    vision   --tokens-->
                          language   --states-->   diffusion        language names none, or diffusion
    audio    --tokens-->

Files of this room say language and encoders for any reader and the chains that feed it.

Letters: S stage ranks, D chunks of a component (its depth), M microbatches of a component.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

STAGE: Final = "stage"  # the mesh axis of the pipeline's ranks; no row is split over it


class PipelineError(ValueError):
    """A ring, workload, schedule or table that is not possible."""


@dataclass(frozen=True)
class Chain:
    """The chunks of one component, by depth: chunk d has layers[d] layers and is on rank stages[d].

    Consecutive chunks are on the same rank or on the next one of the ring, (s + 1) % S. The first
    chunk also holds what comes before the layers (stem, embedding), the last one what comes after
    (projector, head and loss).
    head_only: in the whole component, only what comes after the layers may have a gradient.
    reader: name of the chain that reads what the last chunk delivers; empty: the ring's last chain.
    has_loss: whether the last chunk has a loss although it is read; the ring's last chain always
    has one.
    optional: whether some rows may have no reader, such as text from which nothing is drawn.
    """

    name: str
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    head_only: bool = False
    reader: str = ""
    has_loss: bool = False
    optional: bool = False

    @property
    def depth(self) -> int:
        """D, the number of chunks."""
        return len(self.stages)

    def local(self, depth: int) -> int:
        """Number of chunk `depth` among the chunks of this component on the same rank."""
        return self.stages[:depth].count(self.stages[depth])

    @property
    def chunks_per_rank(self) -> int:
        """Number of chunks of this component on the rank that has most of them."""
        return max(self.stages.count(stage) for stage in set(self.stages))


@dataclass(frozen=True)
class Ring:
    """The chunks of every component on S ranks: encoders in model order, then their reader, then
    the reader of that one, if it has one.

    The last chunk of a chain delivers its tokens to the first chunk of its reader, over the ring
    hops between the two. Raises `PipelineError` when the ring cannot hold the chains.
    """

    stages: int
    chains: tuple[Chain, ...]

    def __post_init__(self) -> None:
        names = [chain.name for chain in self.chains]
        if not names or len(set(names)) < len(names):
            raise PipelineError(f"a ring needs components of distinct names, not {names}")
        for chain_number, chain in enumerate(self.chains):
            self._check_chain(chain)
            if chain.reader and chain.reader not in names[chain_number + 1 :]:
                raise PipelineError(
                    f"{chain.name} is read by {chain.reader!r}, which is none of the chains after it: "
                    f"{names[chain_number + 1 :]}"
                )

    def _check_chain(self, chain: Chain) -> None:
        if not chain.stages or len(chain.layers) != len(chain.stages):
            raise PipelineError(
                f"{chain.name} has {len(chain.layers)} layer counts for {len(chain.stages)} chunks; "
                f"every chunk needs a stage rank and a number of layers",
            )
        if not all(0 <= stage < self.stages for stage in chain.stages):
            raise PipelineError(
                f"{chain.name} lies on ranks {chain.stages} of a pipeline of {self.stages} stages",
            )
        if min(chain.layers) < 0:
            raise PipelineError(f"{chain.name} has a chunk of {min(chain.layers)} layers")
        for depth in range(1, chain.depth):
            if self.hops(chain.stages[depth - 1], chain.stages[depth]) > 1:
                raise PipelineError(
                    f"chunk {depth} of {chain.name} lies on rank {chain.stages[depth]}, after rank "
                    f"{chain.stages[depth - 1]}: consecutive chunks must lie on the same or the next rank",
                )

    @property
    def encoders(self) -> tuple[Chain, ...]:
        """The chains that deliver tokens to a reader: all but the last."""
        return self.chains[:-1]

    @property
    def reader(self) -> Chain:
        """The last chain, which delivers to no other."""
        return self.chains[-1]

    @cached_property
    def readers(self) -> tuple[int, ...]:
        """For every chain but the last, the number of the chain that reads what it delivers."""
        chain_number = {chain.name: chain_number for chain_number, chain in enumerate(self.chains)}
        return tuple(chain_number[chain.reader or self.reader.name] for chain in self.encoders)

    def feeding(self, reader: int) -> tuple[int, ...]:
        """Numbers of the chains that a chain reads."""
        return tuple(chain for chain, by in enumerate(self.readers) if by == reader)

    def has_loss(self, chain: int) -> bool:
        """Whether the last chunk of a chain has a loss."""
        return chain == len(self.chains) - 1 or self.chains[chain].has_loss

    def hops(self, source: int, target: int) -> int:
        """Number of ring hops from one rank up to another."""
        return (target - source) % self.stages

    def delivery_hops(self, encoder: int) -> int:
        """Ring hops from the last chunk of an encoder to the first chunk of its reader."""
        target = self.chains[self.readers[encoder]].stages[0]
        return self.hops(self.chains[encoder].stages[-1], target)
