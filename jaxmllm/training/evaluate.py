"""Held-out loss and exact match, by source, and their record.

    batches --evaluate--> results --evaluation_record--> a line of metrics.jsonl --recorded_evaluation--> results

    eval/loss, eval/loss_by_source/<source>         over the target tokens of the examples below; null without any
    eval/exact_match/<source>                       share of examples that are answered exactly
    eval/examples/<source>                          examples that loss and exact match are over
    eval/masked_examples, eval/masked_by_source/<source>   examples left out of both: a media item did not decode
    eval/failed_media                               media items of this evaluation that did not decode
    eval/drawn_loss, eval/drawn_by_source/<source>  of models that draw: over the patches of generated items
    eval/drawn_by_time/<from>                       the same, for noise with a time in the quarter that begins there
    eval/masked_patches                             patches left out: their item, or media it reads, did not decode
    eval/averaged                                   components whose averages were evaluated, where there are any

An answer matches exactly when every one of its tokens is the argmax given the true tokens before
it. That is the same as greedy decoding writing the answer, so one forward pass measures it.

Examples with a media item that does not decode carry no loss, as in training. They are left out of
loss and exact match, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxmllm.data.rows.fill import HostStep
from jaxmllm.training.objectives.flow import FlowSums, time_bands
from jaxmllm.training.objectives.tokens import Sums
from jaxmllm.training.programs.base import Evaluated, Programs

# Most targets and patches whose sums devices add up in float32, which cannot count single ones from
# 2**24 on, and rounds sums of losses more the longer they are
SUMMED_TARGETS = 2**20

NOTHING: dict[str, Any] = {  # results without a batch
    "loss": None,
    "loss_by_source": {},
    "exact_match": {},
    "examples": {},
    "masked_examples": 0,
    "masked_by_source": {},
    "failed_media": 0,
}
NOTHING_DRAWN: dict[str, Any] = {
    "drawn_loss": None,
    "drawn_by_source": {},
    "drawn_by_time": {},
    "masked_patches": 0,
}


def evaluate(
    programs: Programs,
    params: Any,
    batches: Iterable[HostStep],
    sources: Sequence[str],
    source_of: Callable[[int], int],
    should_stop: Callable[[], bool] = lambda: False,
    tell: Callable[[Sequence[str]], None] = lambda failures: None,
) -> dict[str, Any] | None:
    """Mean loss over target tokens and share of exactly answered examples, over all batches and by
    source.

    Returns {"loss": float, "loss_by_source": {source: float}, "exact_match": {source: float},
    "examples": {source: int}, "masked_examples": int, "masked_by_source": {source: int},
    "failed_media": int}, with a generator also the keys of `NOTHING_DRAWN`. Loss and exact match
    are over `examples`; masked examples are left out of both, because of media items that could not
    be decoded. A source without an example is left out, and in `masked_by_source` one without a
    masked example; `loss` is None if no example is left.

    `source_of` returns the source of an example number. `tell` receives what this host could not
    decode, batch by batch. `should_stop` is called once per batch; if it is true, None is returned.
    """
    evaluated: Evaluated | None = None  # of the batches since the last totals
    groups: list[tuple[Sums, jax.Array]] = []  # totals of batches before
    examples_drawn: Counter[int] = Counter()
    patches = 0
    summed = 0  # planned targets and patches of `evaluated`
    # Sums stay on the devices until the last batch, so the loop does not wait for them.
    for batch in batches:
        if should_stop():
            return None
        tell(batch.failures)
        planned = batch.targets + batch.patches
        # These numbers are the same on all hosts, and so the hosts run the same programs.
        if evaluated is not None and summed + planned > SUMMED_TARGETS:
            groups.append((programs.totals(evaluated.sums), evaluated.failed))
            evaluated = None
            summed = 0
        evaluated = programs.evaluate(params, programs.put(batch), evaluated)
        patches += batch.patches
        summed += planned
        # Where text has no loss, the sums count no example, and all would be reported as masked.
        if programs.functions.learns_text:
            examples_drawn.update(source_of(int(example)) for example in batch.examples)
    if evaluated is None:
        return NOTHING | (NOTHING_DRAWN if programs.generators else {})
    groups.append((programs.totals(evaluated.sums), evaluated.failed))
    total: Sums
    total, failed = jax.tree.map(_exact_sum, *jax.device_get(groups))
    results = _text_results(total, sources, examples_drawn) | {"failed_media": int(failed)}
    if total.drawn is None:
        return results
    return results | _generator_results(total.drawn, sources, patches)


def _text_results(
    total: Sums, sources: Sequence[str], examples_drawn: Counter[int]
) -> dict[str, Any]:
    """Results over text, from its sums over all ranks.

    Args:
      examples_drawn: how many examples there were of each source, by its number.
    """
    present = [i for i in range(len(sources)) if total.examples[i]]
    # Both counts are over all hosts: a batch lists all of its examples, not only this host's.
    masked = {
        sources[i]: examples_drawn[i] - int(total.examples[i]) for i in sorted(examples_drawn)
    }
    return {
        "loss": float(total.loss.sum() / total.targets.sum()) if present else None,
        "loss_by_source": {sources[i]: float(total.loss[i] / total.targets[i]) for i in present},
        "exact_match": {sources[i]: float(total.exact[i] / total.examples[i]) for i in present},
        "examples": {sources[i]: int(total.examples[i]) for i in present},
        "masked_examples": sum(masked.values()),
        "masked_by_source": {source: examples for source, examples in masked.items() if examples},
    }


def _exact_sum(*values: NDArray[Any]) -> NDArray[np.float64]:
    """The sum of a total over all groups of batches, in float64."""
    return np.sum(values, axis=0, dtype=np.float64)


def _generator_results(sums: FlowSums, sources: Sequence[str], planned: int) -> dict[str, Any]:
    """Results of generators, from their sums over all ranks; `planned` patches were to be drawn."""
    by_source = _means(sources, sums.loss, sums.patches)
    return {
        "drawn_loss": float(sums.loss.sum() / sums.patches.sum()) if by_source else None,
        "drawn_by_source": by_source,
        "drawn_by_time": _means(time_bands(), sums.loss_by_time, sums.patches_by_time),
        "masked_patches": planned - int(sums.patches.sum()),
    }


def _means(names: Sequence[str], sums: Any, counts: Any) -> dict[str, float]:
    """The means whose count is not zero, by name."""
    named_sums = zip(names, sums, counts, strict=True)
    return {name: float(total / count) for name, total, count in named_sums if count}


def evaluation_record(results: dict[str, Any]) -> dict[str, Any]:
    """The values that a record has for these results, by name."""
    return {f"eval/{name}": value for name, value in _flatten(results).items()}


def recorded_evaluation(record: dict[str, Any]) -> dict[str, Any]:
    """The results from which a record was made by `evaluation_record`, with its step."""
    evaluation: dict[str, Any] = NOTHING | {"step": record["step"]}
    for name, value in record.items():
        if name.startswith("eval/"):
            # Names of sources may have slashes, too.
            _, key, *source = name.split("/", 2)
            evaluation[key] = evaluation.get(key, {}) | {source[0]: value} if source else value
    return evaluation


def evaluation_text(evaluation: dict[str, Any]) -> str:
    """The results in one line."""
    loss = "none" if evaluation["loss"] is None else f"{evaluation['loss']:.4f}"
    matches = "  ".join(
        f"{source} {share:.1%}" for source, share in evaluation["exact_match"].items()
    )
    left_out = ""
    if evaluation["masked_examples"]:
        left_out = (
            f"  left out: {evaluation['masked_examples']} examples, for {evaluation['failed_media']} media items that "
            f"could not be decoded"
        )
    drawn = evaluation.get("drawn_loss")
    of_patches = "" if drawn is None else f"  of patches {drawn:.4f}"
    averaged = f"  averaged: {evaluation['averaged']}" if "averaged" in evaluation else ""
    return f"loss {loss}{of_patches}  exact match: {matches or 'none'}{left_out}{averaged}"


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= (
            _flatten(value, f"{prefix}{name}/")
            if isinstance(value, dict)
            else {prefix + name: value}
        )
    return flat
