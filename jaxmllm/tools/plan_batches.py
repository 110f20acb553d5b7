"""How large a batch must be for every batch to split devices between phases the same way.

This is the command `jaxmllm plan --profile`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxmllm.arrays import Floats
from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import BatchItems
from jaxmllm.cluster.profile import CHEAP, Profile, enough, smallest_batch
from jaxmllm.config.schema import ConfigError


def example_loads(batches: Sequence[BatchItems], flops: Mapping[str, ItemCost]) -> Floats:
    """FLOPs of every example in each phase: [examples, phases]."""
    return np.concatenate([_batch_loads(batch, flops) for batch in batches])


def _batch_loads(batch: BatchItems, flops: Mapping[str, ItemCost]) -> Floats:
    loads = np.zeros((len(batch.examples), len(flops)))
    for column, (phase, cost) in enumerate(flops.items()):
        items = batch.phases[phase]
        np.add.at(loads[:, column], items.example, cost.of(items.length.astype(float), items.extra))
    return loads


def profiles(loads: Floats, devices: int, seed: int) -> list[Profile]:
    """Profiles of growing batches, whose examples are drawn with replacement from `loads`.

    Raises:
      ConfigError: there are fewer devices than phases.
    """
    if devices < loads.shape[1]:
        raise ConfigError(
            f"--profile: {loads.shape[1]} phases cannot share {devices} devices; say more --devices"
        )
    random = np.random.default_rng(seed)

    def draw(samples: int) -> Floats:
        return np.asarray(loads[random.integers(len(loads), size=samples)].sum(axis=0))

    return smallest_batch(draw, devices)


def conclusions(found: Sequence[Profile], phases: Sequence[str], batch_size: int) -> list[str]:
    """Conclusions from the profiles, in lines; the last one warns if `batch_size` is too small."""
    lines = [f"devices of {' : '.join(phases)}", *(profile.line for profile in found)]
    cheap = enough(found)
    if found[-1].settled:
        lines.append(f"b_min is {found[-1].samples} examples: from there on all batches agree")
    elif cheap is not None:
        lines.append(
            f"the split does not settle by {found[-1].samples} examples, and need not: from {cheap.samples} on, the "
            f"worst that was drawn costs at most {100 * CHEAP:.0f} %"
        )
    if cheap is None:
        lines.append(f"no batch up to {found[-1].samples} examples makes a fixed split cheap")
    elif batch_size < cheap.samples:
        lines.append(
            f"warning: data.batch_size ({batch_size}) is below {cheap.samples}, from which on a fixed split costs at "
            f"most {100 * CHEAP:.0f} %; raise it, or let phases share devices"
        )
    return lines
