"""Seconds of what one device computes, and the constants that all predictions share.

    products      FLOPs / (peak * efficiency * fill), fill by the sides of the matrices
    attention     FLOPs at a share of that rate; scores that are written out go through memory as well
    traffic       what norms, activations and residuals read and write, through memory

The constants of `Rates` are fitted to published runs of eleven systems (`python -m benchmarks.planner`), with the
priors that stand beside them there; none of them belongs to a model, system or chip.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from jaxmllm.cluster.clusters import Cluster, ClusterError

# FLOPs for a byte of memory at the peak: of an A100, to which `half_side` refers
RIDGE: Final = 153.0
# Of the passes of a layer: backward takes twice the products of forward; attention without stored scores two and a
# half times, for it makes the scores again
BACKWARD: Final = 2.0
FLASH_BACKWARD: Final = 2.5
# Bytes of a parameter that is trained: its gradient is read and written in float32 when microbatches add up; the
# update reads and writes gradient, moments, weight and its copy
ACCUMULATED_BYTES: Final = 8
UPDATED_BYTES: Final = 30
# Bytes of a slot that a layer stores for its backward pass, in widths: beside norms and residuals, which tensor
# parallelism alone does not split, and inside attention; of the MLP in its own widths for each of its matrices
# (arXiv 2205.05198, section 4.1: 34 s b h)
STORED_BESIDE: Final = 10
STORED_INSIDE: Final = 8
STORED_MLP: Final = 2


@dataclass(frozen=True)
class Rates:
    """What chips and systems have in common."""

    attention: float  # rate of attention over that of large products
    score_bytes: float  # of a head's pair of slots in forward and backward, where scores are stored
    traffic: float  # times that what a layer stores goes through memory, in one pass
    half_side: float  # of a matrix at which products run at half their rate, at `RIDGE`
    overlap: (
        float  # 1: compute and weights take turns; the larger, the more of the lesser is hidden
    )
    network: float  # share of the network's line rate that collectives get
    reduced: float  # share of the gradients' sum over replicas that is waited for
    straggling: float  # share of a step that every doubling of the nodes adds
    tensor: float  # share of tensor collectives that is waited for where a system overlaps them


RATES: Final = Rates(
    attention=0.3482,
    score_bytes=31.80,
    traffic=2.017,
    half_side=176.9,
    overlap=1.6283,
    network=0.8676,
    reduced=0.5216,
    straggling=0.002592,
    tensor=0.2211,
)


@dataclass(frozen=True)
class Device:
    """A device of a cluster at work."""

    cluster: Cluster
    efficiency: float  # share of the peak of large products
    rates: Rates = RATES
    dtype: str = "bfloat16"
    sharing: int = 1  # devices of one processor that have its rates together
    said_peak: float | None = None  # FLOP/s by which MFU is told; none: as a run finds them

    def among(self, devices: int) -> Device:
        """The same as one of so many. Where devices share cores, each has its share of their rates, and leaves it to
        the others while it waits for them."""
        return replace(self, sharing=devices) if self.cluster.shared_cores else self

    @cached_property
    def peak(self) -> float:
        """FLOP/s that its vendor names; of a type without a figure, that of what its products are computed in."""
        try:
            return self.cluster.peak(self.dtype) / self.sharing
        except ClusterError:
            return self._operand_peak

    @cached_property
    def logged_peak(self) -> float:
        """FLOP/s by which a run tells MFU: of float32 on NVIDIA those of tensor cores, while `peak` is that of plain
        units."""
        return self._operand_peak if self.said_peak is None else self.said_peak

    @property
    def _operand_peak(self) -> float:
        """FLOP/s of the type that products of `dtype` are computed in."""
        # Here, for the table is in a file that imports jax
        from jaxmllm.runtime.hardware import operand_dtype

        return self.cluster.peak(operand_dtype(self.cluster.device_kind, self.dtype)) / self.sharing

    @cached_property
    def wide_peak(self) -> float:
        """FLOP/s in float32 by plain units, where a vendor names them; else as of other products."""
        try:
            return self.cluster.peak("float32") / self.sharing
        except ClusterError:
            return self.peak

    def slowest(self, seconds: Iterable[float]) -> float:
        """Until devices that wait for each other are done: the slowest, or the mean where they share cores."""
        return (statistics.fmean if self.cluster.shared_cores else max)(seconds)

    def product_rate(self, tokens: float, width: float) -> float:
        """FLOP/s of products of [tokens, width] matrices."""
        side = 1 / (1 / tokens + 1 / width)
        # A chip with more FLOPs for a byte of memory needs larger matrices to be as busy.
        ridge = self.peak * self.sharing / self.cluster.memory_bandwidth
        half_side = self.rates.half_side * ridge / RIDGE
        return self.peak * self.efficiency * side / (side + half_side)

    @property
    def attention_rate(self) -> float:
        """FLOP/s of attention whose scores are not stored."""
        return self.peak * self.efficiency * self.rates.attention

    def memory_seconds(self, moved: float) -> float:
        """Seconds of reading and writing so many bytes."""
        return moved * self.sharing / self.cluster.memory_bandwidth

    def together(self, compute: float, sent: float) -> float:
        """Seconds of computing while something else is sent: between their sum and the larger of both.

        `overlap` p makes it (compute^p + sent^p)^(1/p). Shared cores do one after the other.
        """
        if not sent or self.cluster.shared_cores:  # exactly
            return compute + sent
        p = self.rates.overlap
        return (compute**p + sent**p) ** (1 / p)

    def least_together(self, compute: float, sent: float) -> float:
        """The same where everything that can overlap does."""
        return compute + sent if self.cluster.shared_cores else max(compute, sent)

    def interval(self, seconds: float) -> tuple[float, float]:
        """Where a step lies that nothing was calibrated for."""
        uncertainty = self.cluster.efficiency.uncertainty
        return seconds * (1 - uncertainty), seconds * (1 + uncertainty)

    def straggled(self, seconds: float, devices: int) -> float:
        """A step of so many devices, of which the slowest decides."""
        nodes = max(devices / self.cluster.node_devices, 1.0)
        return seconds * (1 + self.rates.straggling * math.log2(nodes))


def stored_bytes(width: int, mlp_widths: int, tensor: int, beside: int = 1) -> float:
    """Bytes of a slot that a layer stores on a device, attention's pairs apart.

    Args:
      mlp_widths: of all of its matrices together.
      tensor: devices that split the layer inside.
      beside: devices that split what lies beside its products.
    """
    inside = STORED_INSIDE * width + STORED_MLP * mlp_widths
    return STORED_BESIDE * width / beside + inside / tensor
