"""Sums of an evaluation over its batches, with programs that only add."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxmllm.training.evaluate import SUMMED_TARGETS, evaluate
from jaxmllm.training.objectives.tokens import Sums
from jaxmllm.training.programs.base import Evaluated, _sum_ranks

RANKS = 2
MICROBATCHES = 16
LOSS = 2.3  # of each target


class AddingPrograms:
    """Programs whose batches have LOSS at every target, added up as devices do: losses in float32,
    counts in int32."""

    functions = SimpleNamespace(learns_text=True)
    generators = ()
    totals_taken = 0

    def put(self, batch):
        return batch

    def evaluate(self, params, batch, evaluated):
        zeros = np.zeros((RANKS, 1), np.int32)
        if evaluated is None:
            nothing = Sums(zeros.astype(np.float32), zeros, zeros, zeros)
            evaluated = Evaluated(nothing, np.int32(0))
        loss, targets, exact, examples = evaluated.sums[:4]
        counts = batch.targets // RANKS
        for _ in range(MICROBATCHES):
            loss = loss + np.float32(LOSS * counts / MICROBATCHES)
        sums = Sums(loss, targets + counts, exact, examples + counts)
        return Evaluated(sums, np.int32(evaluated.failed + 1))

    def totals(self, sums):
        self.totals_taken += 1
        return jax.jit(_sum_ranks)(sums)


def evaluated(targets: int, batches: int) -> tuple[dict, int]:
    """Results of equal batches, and how often totals were taken."""
    batch = SimpleNamespace(targets=targets, patches=0, failures=(), examples=[0])
    programs = AddingPrograms()
    results = evaluate(programs, None, [batch] * batches, ["source"], lambda i: 0)
    return results, programs.totals_taken


def test_sums_over_many_batches_are_exact():
    """Losses and counts of an evaluation do not depend on how long it is."""
    targets = 2**16 + 2
    batches = 1001
    results, totals_taken = evaluated(targets, batches)
    assert results["examples"] == {"source": targets * batches}
    assert results["loss"] == pytest.approx(LOSS, rel=1e-6)
    assert results["loss_by_source"] == {"source": results["loss"]}
    assert results["failed_media"] == batches
    assert totals_taken == -(-batches // (SUMMED_TARGETS // targets))


def test_short_evaluations_take_totals_once():
    assert evaluated(1000, 20)[1] == 1
    assert evaluated(2 * SUMMED_TARGETS, 1)[1] == 1
