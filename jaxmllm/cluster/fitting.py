"""The record of a cluster, fitted to measured steps.

    cluster, measured steps --fitted--> Cluster    efficiency, bandwidth of links, seconds of a hop and of a tick

Links of devices that share cores are copies in their memory, whose bandwidth then changes with theirs.

Least squares of the logarithm of predicted over measured seconds. What the steps do not tell apart stays near the
record, within its uncertainty: one step moves the efficiency above all; three that compute, gather and reduce in
different shares tell all of it. A step in pipeline stages tells what a tick takes besides its operations, start and
end of the run included.
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
LINKS: Final = 2.0  # how much less is known of links than of products, by the record
TICKS: Final = 0.3  # of a measured tick, what may well be none of its operations
# Half width of the interval of what is predicted from a fit, as a share: what is left where settings differ from those
# that were measured (docs/planning.md)
CALIBRATED: Final = 0.2


@dataclass(frozen=True)
class MeasuredStep:
    """A step that ran: its seconds, what is predicted of it on a cluster, and its ticks, where it has stages."""

    seconds: float
    predicted: Callable[[Cluster], float]
    ticks: int = 0


def fitted(cluster: Cluster, steps: Sequence[MeasuredStep]) -> Cluster:
    """The cluster as its measured steps say.

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
    # Seconds of a whole tick
    tick = statistics.median([step.seconds / step.ticks for step in steps if step.ticks] or [0.0])

    # x: logarithms of the factors of efficiency, rates and hops; share of a tick that is its own.
    def changed_by(x: Floats) -> Cluster:
        share, rate, hop = np.exp(x[:3]).tolist()
        return _changed(cluster, share, rate, hop, float(x[3]) * tick)

    def residuals(x: Floats) -> Floats:
        changed = changed_by(x)
        errors = [math.log(step.predicted(changed) / step.seconds) for step in steps]
        # Least squares of both: misses in units of their spread, and distances from the record
        # in units of what is not known of it.
        return np.concatenate([np.array(errors) / SPREAD, x / spreads])

    # No more than the peak, and no ticks of less than the record's
    upper = np.array([-math.log(cluster.efficiency.share) + 1e-9, np.inf, np.inf, 1.0])
    lower = np.array([-np.inf, -np.inf, -np.inf, 0.0])
    # From inside of the bounds: steps from their edges are short
    start = np.array([0.0, 0.0, 0.0, TICKS])
    solution = least_squares(residuals, start, bounds=(lower, upper)).x
    fitted_cluster = changed_by(solution)
    missed = float(np.abs(residuals(solution)[: len(steps)]).max()) * SPREAD
    uncertainty = min(cluster.efficiency.uncertainty, max(CALIBRATED, missed))
    efficiency = fitted_cluster.efficiency.model_copy(update={"uncertainty": uncertainty})
    source = f"fitted to {len(steps)} measured steps; {cluster.source}"
    return fitted_cluster.model_copy(update={"efficiency": efficiency, "source": source})


def _changed(cluster: Cluster, share: float, rate: float, hop: float, tick: float) -> Cluster:
    """With other efficiency, rates of links, and seconds of hops, by these factors, and so many more of a tick."""

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
