"""The record of a cluster, fitted to measured steps.

    cluster, measured steps --fitted--> Cluster    efficiency, bandwidth of links, seconds of a hop

Links of devices that share cores are copies in their memory, whose bandwidth then changes with theirs.

Least squares of the logarithm of predicted over measured seconds. What the steps do not tell apart stays near the
record, within its uncertainty: one step moves the efficiency above all; three that compute, gather and reduce in
different shares tell all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxmllm.arrays import Floats
from jaxmllm.cluster.clusters import Cluster, Link

SPREAD: Final = 0.03  # of predictions around measured steps, in logarithms
LINKS: Final = 2.0  # how much less is known of links than of products, by the record
# Half width of the interval of what is predicted from a fit, as a share: what is left where settings differ from those
# that were measured (docs/planning.md)
CALIBRATED: Final = 0.2


@dataclass(frozen=True)
class MeasuredStep:
    """A step that ran: its seconds, and what is predicted of it on a cluster."""

    seconds: float
    predicted: Callable[[Cluster], float]


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
    spreads = known * np.array([1.0, LINKS, LINKS])

    def residuals(x: Floats) -> Floats:
        changed = _changed(cluster, *np.exp(x).tolist())
        errors = [math.log(step.predicted(changed) / step.seconds) for step in steps]
        return np.concatenate([np.array(errors) / SPREAD, x / spreads])

    # No more than the peak
    most = np.array([-math.log(cluster.efficiency.share) + 1e-9, np.inf, np.inf])
    solution = least_squares(residuals, np.zeros(3), bounds=(-np.inf, most)).x
    found = _changed(cluster, *np.exp(solution).tolist())
    missed = float(np.abs(residuals(solution)[: len(steps)]).max()) * SPREAD
    uncertainty = min(cluster.efficiency.uncertainty, max(CALIBRATED, missed))
    efficiency = found.efficiency.model_copy(update={"uncertainty": uncertainty})
    source = f"fitted to {len(steps)} measured steps; {cluster.source}"
    return found.model_copy(update={"efficiency": efficiency, "source": source})


def _changed(cluster: Cluster, share: float, rate: float, hop: float) -> Cluster:
    """With other efficiency, rates of links, and seconds of hops, by these factors."""

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
        }
    )
