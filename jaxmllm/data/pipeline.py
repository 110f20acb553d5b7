"""The steps of a run: element k is this host's share of step k, a pure function of (config, seed, step).

    sources --shuffle, repeat, mix--> order --batch--> examples of step k --gather--> lengths
        --plan_step--> plan (the same on every host) --fill--> HostStep (rows of the local ranks)

Nothing is kept between steps, so the state of the data is the step number: a run resumes at any step, with any number
of hosts, workers or devices. The order is grain's; `StepFiller` does the rest, in worker processes where there are any
(reader.py), which import neither grain nor jax for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grain
import numpy as np

from jaxmllm.balance.plan import BatchItems, Longs
from jaxmllm.data.fill import HostStep, Lengths, StepFiller
from jaxmllm.data.index import DataError

Member = tuple[str, float, Longs]  # name, weight, example numbers of one configured source


def example_order(members: Sequence[Member], seed: int) -> grain.MapDataset[int]:
    """Endless weighted mixture of the sources, each reshuffled every epoch: random access to example numbers.

    Raises `DataError` when a source has no examples.
    """
    sources = []
    for number, (name, _, examples) in enumerate(members):
        if not len(examples):
            raise DataError(f"source {name!r} of data.sources has no usable example; remove it, or see its refusals")
        sources.append(grain.MapDataset.source(examples).shuffle(seed=_source_seed(seed, number)).repeat())
    return grain.MapDataset.mix(sources, [weight for _, weight, _ in members])


def evaluation_order(members: Sequence[Member], limit: int | None = None) -> grain.MapDataset[int]:
    """Every example once, source by source; with `limit`, that many spread evenly over all of them."""
    examples = np.concatenate([np.zeros(0, np.int64), *(examples for _, _, examples in members)])
    if limit is not None and limit < len(examples):
        examples = examples[np.arange(limit) * len(examples) // limit]
    return grain.MapDataset.source(examples)


@dataclass(frozen=True)
class Steps:
    """This host's share of every step: a `Source` of a reader, and a sequence. Raises `IndexError` beyond the end."""

    order: grain.MapDataset[int]
    batch_size: int
    filler: Callable[[int, Longs], HostStep]
    name: str = "step"

    def examples(self, k: int) -> Longs:
        """Example numbers of step k over all hosts, without planning or loading."""
        return batch_examples(self.order, self.batch_size, k)

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def __getitem__(self, k: int) -> HostStep:
        return self.filler(k, self.examples(k))


def steps(filler: StepFiller, batch_size: int, seed: int) -> Steps:
    """Endless training steps of `batch_size` examples over all hosts."""
    return Steps(example_order(filler.corpus.members, seed), batch_size, filler)


def evaluation_steps(filler: StepFiller, batch_size: int, limit: int | None = None) -> Steps:
    """Every example (or `limit` of them) once, in a fixed order; the last step may be short."""
    return Steps(evaluation_order(filler.corpus.members, limit), batch_size, filler, "held-out batch")


def batch_examples(order: grain.MapDataset[int], batch_size: int, step: int) -> Longs:
    """Example numbers [B] of any step, without planning or loading; the last batch of a finite order may be short.

    Raises `IndexError` beyond the end of the order.
    """
    first = step * batch_size
    if not 0 <= first < len(order):
        raise IndexError(f"step {step} of {batch_size} examples is outside an order of {len(order)}")
    return _numbers([order[i] for i in range(first, min(first + batch_size, len(order)))])


def sample_batches(order: grain.MapDataset[int], corpus: Lengths, batch_size: int, count: int) -> list[BatchItems]:
    """Lengths of the first `count` batches (fewer if the order ends), for capacity statistics."""
    available = -(-len(order) // batch_size)
    return [corpus.gather(batch_examples(order, batch_size, step)) for step in range(min(count, available))]


def _source_seed(seed: int, number: int) -> int:
    # grain seeds epoch e with seed + e: neighbouring seeds would replay one another's epochs.
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def _numbers(examples: Sequence[int]) -> Longs:
    return np.asarray(examples, np.int64)
