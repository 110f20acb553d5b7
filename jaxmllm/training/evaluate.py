"""Held-out loss and exact match, by source.

An answer matches exactly when every one of its tokens is the argmax given the true tokens before it. That is the
same as greedy decoding writing the answer, so one forward pass measures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxmllm.data.fill import HostStep
from jaxmllm.training.loss import Sums
from jaxmllm.training.programs import Programs


def evaluate(programs: Programs, params: Any, batches: Iterable[HostStep], sources: Sequence[str]) -> dict[str, Any]:
    """Mean loss over target tokens and share of exactly answered examples, over all batches and by source.

    {"loss": float, "loss_by_source": {...}, "exact_match": {source: float}, "examples": {source: int}}; sources
    without an example are left out.
    """
    sums: Sums | None = None
    for batch in batches:
        sums = programs.evaluate(params, programs.put(batch), sums)
    if sums is None:
        return {"loss": None, "loss_by_source": {}, "exact_match": {}, "examples": {}}
    total = jax.device_get(programs.totals(sums))
    present = [i for i in range(len(sources)) if total.examples[i]]
    return {
        "loss": float(total.loss.sum() / total.targets.sum()),
        "loss_by_source": {sources[i]: float(total.loss[i] / total.targets[i]) for i in present},
        "exact_match": {sources[i]: float(total.exact[i] / total.examples[i]) for i in present},
        "examples": {sources[i]: int(total.examples[i]) for i in present},
    }
