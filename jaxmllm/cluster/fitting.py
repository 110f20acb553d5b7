"""The record of a cluster, fitted to measured steps.

    cluster, measured steps --fitted--> Cluster
                                efficiency, bandwidth of links, seconds of a hop and of a tick

Links of devices that share cores are copies in memory, so their bandwidth and that of the memory
are fitted as one.

The fit takes least squares of the logarithm of predicted over measured seconds. Constants that the
steps cannot tell apart stay near the record, within its uncertainty: one step mostly moves the
efficiency; three steps that compute, gather and reduce in different shares determine all of them. A
step in pipeline stages determines what a tick takes in addition to its operations, which includes
the start and the end of a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxmllm.arrays import Floats
from jaxmllm.cluster.clusters import Cluster, Link

SPREAD: Final = 0.03  # of predictions around measured steps, in logarithms
LINKS: Final = 2.0  # how much more uncertain a record's links are than its products
TICKS: Final = 0.3  # share of a measured tick that its operations may well not account for
# Half width of the interval of predictions from a fit, as a share: the error that remains where
# settings differ from the measured ones (docs/planning.md)
CALIBRATED: Final = 0.2


@dataclass(frozen=True)
class MeasuredStep:
    """A step that ran: its seconds, their prediction on any cluster, and its ticks if any."""

    seconds: float
    predicted: Callable[[Cluster], float]
    ticks: int = 0


def fitted(cluster: Cluster, steps: Sequence[MeasuredStep]) -> Cluster:
    """The cluster's record, fitted to its measured steps.

    Raises:
      ValueError: there is no step, or one took no time.
    """
    from scipy.optimize import least_squares

    if not steps or min(step.seconds for step in steps) <= 0:
        raise ValueError(
            "a cluster is fitted to one measured step or more, each of more than 0 seconds"
        )
    known = cluster.efficiency.uncertainty or SPREAD
    spreads = np.array([known, LINKS * known, LINKS * known, TICKS])
    # Median seconds of a whole tick
    tick = statistics.median([step.seconds / step.ticks for step in steps if step.ticks] or [0.0])

    # x: logarithms of the factors of efficiency, link rates and hop seconds; then the share of a
    # tick that is in addition to its operations.
    def changed_by(x: Floats) -> Cluster:
        share, rate, hop = np.exp(x[:3]).tolist()
        return _rescaled(cluster, share, rate, hop, float(x[3]) * tick)

    def residuals(x: Floats) -> Floats:
        changed = changed_by(x)
        errors = [math.log(step.predicted(changed) / step.seconds) for step in steps]
        # Two kinds of residuals: errors of the steps in units of their spread, and distances from
        # the record in units of its uncertainty.
        return np.concatenate([np.array(errors) / SPREAD, x / spreads])

    # The efficiency stays at most 1, and ticks take at least the record's seconds
    upper = np.array([-math.log(cluster.efficiency.share) + 1e-9, np.inf, np.inf, 1.0])
    lower = np.array([-np.inf, -np.inf, -np.inf, 0.0])
    # Start inside of the bounds: from their edges the solver takes short steps
    start = np.array([0.0, 0.0, 0.0, TICKS])
    solution = least_squares(residuals, start, bounds=(lower, upper)).x
    fitted_cluster = changed_by(solution)
    largest_error = float(np.abs(residuals(solution)[: len(steps)]).max()) * SPREAD
    uncertainty = min(cluster.efficiency.uncertainty, max(CALIBRATED, largest_error))
    efficiency = fitted_cluster.efficiency.model_copy(update={"uncertainty": uncertainty})
    source = f"fitted to {len(steps)} measured steps; {cluster.source}"
    return fitted_cluster.model_copy(update={"efficiency": efficiency, "source": source})


def _rescaled(cluster: Cluster, share: float, rate: float, hop: float, tick: float) -> Cluster:
    """The cluster with efficiency, link rates and hop seconds multiplied by these factors, and
    `tick` seconds added per tick."""

    def link(old: Link) -> Link:
        return Link(
            bytes_per_second=old.bytes_per_second * rate,
            reduced_per_second=old.reduced_per_second * rate,
            hop_seconds=old.hop_seconds * hop,
        )

    of_products = cluster.efficiency.model_copy(
        update={"share": min(cluster.efficiency.share * share, 1.0)}
    )
    memory = cluster.memory_bandwidth * (rate if cluster.shared_cores else 1.0)
    return cluster.model_copy(
        update={
            "memory_bandwidth": memory,
            "efficiency": of_products,
            "in_node": link(cluster.in_node),
            "between_nodes": link(cluster.between_nodes),
            "tick_seconds": cluster.tick_seconds + tick,
        }
    )
