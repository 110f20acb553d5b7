"""The grain pipeline: element k is this host's share of step k, a pure function of (config, seed, step).

    sources --shuffle, repeat, mix--> order --batch--> examples of step k --gather--> lengths
        --plan_step--> plan (the same on every host) --fill--> HostStep (rows of the local ranks)

Nothing is buffered between steps, so the state of the data is the step number: a run resumes by slicing, with any
number of hosts, workers or devices.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import grain
import numpy as np
from absl import flags

from jaxmllm.balance.pipeline_plan import PipelineSpec, plan_pipeline
from jaxmllm.balance.plan import BatchItems, Longs, PlanSpec
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.data.fill import DECODE_THREADS, Examples, HostStep, LocalRanks, fill
from jaxmllm.data.index import DataError
from jaxmllm.data.masks import AttentionSpec
from jaxmllm.data.modality import Modality

# Examples of an order without end. grain counts batches in floating point, where the largest length that it gives a
# repeated dataset, 2**63 - 1, is rounded up beyond what `len` can return.
ENDLESS = 1 << 53

Member = tuple[str, float, Longs]  # name, weight, example numbers of one configured source


class Lengths(Protocol):
    """What planning asks of a corpus."""

    def gather(self, examples: Longs) -> BatchItems: ...


class Corpus(Examples, Lengths, Protocol):
    """What the pipeline asks of a corpus."""

    @property
    def members(self) -> tuple[Member, ...]: ...
    @property
    def modalities(self) -> Mapping[str, Modality]: ...


@dataclass(frozen=True)
class StepFiller:
    """(step, examples) -> HostStep: plan the whole batch, with a pipeline also its schedule; fill the local rows."""

    corpus: Corpus
    spec: PlanSpec
    local: LocalRanks
    attention: AttentionSpec
    pipeline: PipelineSpec | None = None
    threads: int = DECODE_THREADS  # that decode the media of one step

    def __call__(self, step: int, examples: Longs) -> HostStep:
        items = self.corpus.gather(examples)
        plan = plan_pipeline(items, self.spec, self.pipeline) if self.pipeline else plan_step(items, self.spec)
        where = (self.corpus, self.corpus.modalities, self.local, self.attention)
        return fill(step, examples, items, plan, self.spec, *where, threads=self.threads)


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


def steps(filler: StepFiller, batch_size: int, seed: int) -> grain.MapDataset[HostStep]:
    """Endless training steps of `batch_size` examples over all hosts: element k is this host's share of step k."""
    return _steps(example_order(filler.corpus.members, seed)[:ENDLESS], batch_size, filler)


def evaluation_steps(filler: StepFiller, batch_size: int, limit: int | None = None) -> grain.MapDataset[HostStep]:
    """Every example (or `limit` of them) once, in a fixed order; the last step may be short."""
    return _steps(evaluation_order(filler.corpus.members, limit), batch_size, filler)


def train_iterator(
    dataset: grain.MapDataset[HostStep], start: int, stop: int, workers: int = 0, prefetch: int = 2
) -> grain.DatasetIterator[HostStep]:
    """Iterate over steps start .. stop, prepared ahead by `workers` processes, or by a thread when there are none.

    The elements and their order do not depend on `workers`. About `prefetch` steps are held ready, at least one
    a worker. Call `close` to end the workers early.
    """
    window = dataset[start:stop]
    if workers == 0:
        return iter(window.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))
    if not flags.FLAGS.is_parsed():  # grain reads its flags when it starts a worker
        flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=-(-prefetch // workers))
    # Without threads of their own: a worker would otherwise read hundreds of elements ahead.
    unbuffered = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(window.to_iter_dataset(unbuffered).mp_prefetch(options, worker_init_fn=_end_with_parent))


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


def _steps(order: grain.MapDataset[int], batch_size: int, filler: StepFiller) -> grain.MapDataset[HostStep]:
    return order.batch(batch_size, batch_fn=_numbers).map_with_index(filler)


def _end_with_parent(worker: int, workers: int) -> None:
    """End this worker when the process that started it is killed; it would wait for ever to hand over its element."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _source_seed(seed: int, number: int) -> int:
    # grain seeds epoch e with seed + e: neighbouring seeds would replay one another's epochs.
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def _numbers(examples: Sequence[int]) -> Longs:
    return np.asarray(examples, np.int64)
