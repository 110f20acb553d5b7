"""The steps of a run: element k is this host's share of step k, a pure function of (config, seed,
step, history).

    sources --shuffle, repeat, mix--> order --batch--> examples of step k --gather--> lengths
        --plan_step--> plan (the same on every host) --fill--> HostStep (rows of the local ranks)

Nothing is kept between steps, so the state of the data is the step number: a run resumes at any
step, with any number of hosts, workers or devices. Where batch size or weights changed during the
run, its history says from which step on each value applies. The order then continues from where it
was, so that no example is skipped or repeated. The order is made by grain; `StepFiller` does the
rest, in worker processes if there are any (workers/reader.py), which import neither grain nor jax.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grain
import numpy as np

from jaxmllm.arrays import Longs, ceil_divide
from jaxmllm.balance.records import BatchItems
from jaxmllm.data.rows.fill import HostStep, Lengths, StepFiller
from jaxmllm.data.sources.source import DataError

# Name, weight, and consecutive example numbers of one configured source
Member = tuple[str, float, Longs]


@dataclass(frozen=True)
class Segment:
    """Batch size and source weights of the steps from `step` up to the next segment; the weights
    are in the order of data.sources."""

    step: int
    batch_size: int
    weights: tuple[float, ...]


def example_order(
    members: Sequence[Member], seed: int, skipped: Sequence[int] | None = None
) -> grain.MapDataset[int]:
    """Endless weighted mixture of the sources, each reshuffled every epoch, with random access to
    example numbers.

    The first `skipped[s]` examples of each source s are left out: earlier segments have used them.
    Raises `DataError` when a source has no examples.
    """
    sources = []
    for index, (name, _, examples) in enumerate(members):
        if not len(examples):
            raise DataError(
                f"source {name!r} of data.sources has no usable example; remove it, or see its refusals"
            )
        # Twice as fast as a dataset made from a list: grain measures every access to a list.
        numbers = grain.MapDataset.range(int(examples[0]), int(examples[-1]) + 1)
        source = numbers.shuffle(seed=_source_seed(seed, index)).repeat()
        sources.append(source[skipped[index] :] if skipped else source)
    return grain.MapDataset.mix(sources, [weight for _, weight, _ in members])


def taken_examples(weights: Sequence[float], positions: int) -> list[int]:
    """Number of examples of each source in the first `positions` positions of a mixture.

    Each example of a source has its number, so the last one of each source before the end gives the
    count. The mixture is periodic, so a walk backwards soon finds it.
    """
    sources = len(weights)
    # Numbers n * sources + s: the n-th example of source s.
    numbered = [grain.MapDataset.range(source, sys.maxsize, sources) for source in range(sources)]
    mixture = grain.MapDataset.mix(numbered, list(weights))
    counts: dict[int, int] = {}
    for position in range(positions - 1, -1, -1):
        nth, source = divmod(mixture[position], sources)
        counts.setdefault(source, nth + 1)
        if len(counts) == sources:
            break
    return [counts.get(source, 0) for source in range(sources)]


def evaluation_order(members: Sequence[Member], limit: int | None = None) -> grain.MapDataset[int]:
    """Every example once, source by source; with `limit`, at most that many, spread evenly."""
    examples = np.concatenate([np.zeros(0, np.int64), *(examples for _, _, examples in members)])
    if limit is not None and limit < len(examples):
        examples = examples[np.arange(limit) * len(examples) // limit]
    return grain.MapDataset.source(examples)


@dataclass(frozen=True)
class Steps:
    """This host's share of every step, as a sequence and as `Elements` for a reader.

    The examples of step `start` begin at `start_position` of the order. Raises `IndexError` for
    steps before `start` and beyond the end.
    """

    order: grain.MapDataset[int]
    batch_size: int
    filler: Callable[..., HostStep]  # (step, examples) -> HostStep, as StepFiller
    name: str = "step"
    start: int = 0
    start_position: int = 0

    def examples(self, k: int) -> Longs:
        """Example numbers of step k over all hosts, without planning or loading."""
        return batch_examples(self.order, self.batch_size, k - self.start, self.start_position)

    def __len__(self) -> int:
        return min(
            sys.maxsize,
            self.start + ceil_divide(len(self.order) - self.start_position, self.batch_size),
        )

    def __getitem__(self, k: int) -> HostStep:
        return self.filler(k, self.examples(k))


def steps(filler: StepFiller, batch_size: int, seed: int) -> Steps:
    """Endless training steps of `batch_size` examples over all hosts."""
    return Steps(example_order(filler.corpus.members, seed), batch_size, filler)


def continued_steps(
    filler: Callable[[int, Longs], HostStep],
    members: Sequence[Member],
    seed: int,
    history: Sequence[Segment],
) -> Steps:
    """Endless training steps that begin with the first step of the last segment. The segments
    before it determine where in the order that is.

    A new batch size continues in the same order. New weights begin a new mixture, in which every
    source continues from where it was, in the middle of its epoch.
    """
    order, segment, position = _last_segment_order(members, seed, history)
    return Steps(order, segment.batch_size, filler, "step", segment.step, position)


def continued_examples(
    members: Sequence[Member], seed: int, history: Sequence[Segment], step: int
) -> Longs:
    """Example numbers [B] of a step of the last segment, without planning or loading. Raises
    `IndexError` before that segment."""
    order, segment, position = _last_segment_order(members, seed, history)
    return batch_examples(order, segment.batch_size, step - segment.step, position)


def _last_segment_order(
    members: Sequence[Member], seed: int, history: Sequence[Segment]
) -> tuple[grain.MapDataset[int], Segment, int]:
    """(order of the last segment, the last segment, position in the order where it begins)."""
    segment = history[0]
    weights = segment.weights
    skipped = [0] * len(members)  # examples of each source used before the mixture of these weights
    position = 0  # position in that mixture
    for following in history[1:]:
        position += (following.step - segment.step) * segment.batch_size
        if following.weights != weights:
            skipped = [
                sum(pair) for pair in zip(skipped, taken_examples(weights, position), strict=True)
            ]
            weights = following.weights
            position = 0
        segment = following
    weighted = [
        (name, weight, numbers) for (name, _, numbers), weight in zip(members, weights, strict=True)
    ]
    order = example_order(weighted, seed, skipped if any(skipped) else None)
    return order, segment, position


def evaluation_steps(filler: StepFiller, batch_size: int, limit: int | None = None) -> Steps:
    """Every example (or `limit` of them) once, in a fixed order; the last step may be short."""
    return Steps(
        evaluation_order(filler.corpus.members, limit), batch_size, filler, "held-out batch"
    )


def batch_examples(
    order: grain.MapDataset[int], batch_size: int, step: int, start_position: int = 0
) -> Longs:
    """Example numbers [B] of any step, without planning or loading. The last batch of a finite
    order may be short.

    Step 0 begins at `start_position` of the order. Raises `IndexError` outside the order.
    """
    start = start_position + step * batch_size
    if step < 0 or not start < len(order):
        raise IndexError(
            f"step {step} of {batch_size} examples is outside an order of {len(order)}"
        )
    stop = min(start + batch_size, len(order))
    return np.array([order[position] for position in range(start, stop)], np.int64)


def sample_batches(
    order: grain.MapDataset[int], corpus: Lengths, batch_size: int, max_batches: int
) -> list[BatchItems]:
    """Lengths of the first `max_batches` batches, or fewer if the order ends, to choose sizes."""
    available = ceil_divide(len(order), batch_size)
    return [
        corpus.gather(batch_examples(order, batch_size, step))
        for step in range(min(max_batches, available))
    ]


def source_batches(members: Sequence[Member], corpus: Lengths, batch_size: int) -> list[BatchItems]:
    """Lengths of one batch from each source alone; empty if there is only one source."""
    if len(members) < 2:
        return []
    random = np.random.default_rng(0)  # every host must draw the same
    return [
        corpus.gather(random.choice(examples, batch_size))
        for _, _, examples in members
        if len(examples)
    ]


def _source_seed(seed: int, index: int) -> int:
    # grain seeds epoch e with seed + e: neighbouring seeds would replay one another's epochs.
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
