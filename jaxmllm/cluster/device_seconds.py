"""Seconds of what one device computes, and the constants that all predictions share.

    products      FLOPs / (peak * efficiency * fill), fill by the sides of the matrices
    attention     FLOPs at a share of that rate; scores that are stored go through memory as well
    traffic       what norms, activations and residuals read and write, through memory

The constants of `Rates` are fitted to published runs of eleven systems (`python -m
benchmarks.planner`), with the priors that are listed there; none of them belongs to a model, system
or chip.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from jaxmllm.cluster.clusters import Cluster, ClusterError

# FLOPs per byte of memory at the peak of an A100, to which `half_side` refers
RIDGE: Final = 153.0
# Cost of a layer's backward pass over its forward pass: twice the products; of attention without
# stored scores two and a half times as much, because it computes the scores again
BACKWARD: Final = 2.0
FLASH_BACKWARD: Final = 2.5
# Bytes of memory traffic per trained parameter: a microbatch reads and writes its gradient in
# float32 to add to it; the update reads and writes gradient, moments, weight and its copy
ACCUMULATED_BYTES: Final = 8
UPDATED_BYTES: Final = 30
# Bytes per slot and width that a layer stores for its backward pass: around norms and residuals,
# which tensor parallelism alone does not split, and inside attention; of the MLP per MLP width of
# each of its matrices (arXiv 2205.05198, section 4.1: 34 s b h)
STORED_BESIDE: Final = 10
STORED_INSIDE: Final = 8
STORED_MLP: Final = 2


@dataclass(frozen=True)
class Rates:
    """Constants that are the same for all chips and systems."""

    attention: float  # rate of attention over that of large products
    score_bytes: float  # per head and pair of slots, both passes together, where scores are stored
    traffic: float  # how often what a layer stores goes through memory, in one pass
    half_side: float  # side of matrices whose products run at half their rate, at `RIDGE`
    overlap: (
        float  # 1: compute and weights take turns; the larger, the more of the lesser is hidden
    )
    network: float  # share of the network's line rate that collectives get
    reduced: float  # share of the sum of gradients over replicas that is waited for
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
    """A device of a cluster that computes at some efficiency."""

    cluster: Cluster
    efficiency: float  # share of the peak that large products reach
    rates: Rates = RATES
    dtype: str = "bfloat16"
    sharing: int = 1  # devices of one processor, which share its rates
    said_peak: float | None = None  # FLOP/s that MFU is relative to; none: as a run finds them

    def among(self, devices: int) -> Device:
        """The same device as one of so many. Where devices share cores, each has its share of their
        rates, and leaves that to the others while it waits for them."""
        return replace(self, sharing=devices) if self.cluster.shared_cores else self

    @cached_property
    def peak(self) -> float:
        """FLOP/s in `dtype` that the vendor names; without a figure, those of the dtype that its
        products are computed in."""
        try:
            return self.cluster.peak(self.dtype) / self.sharing
        except ClusterError:
            return self._operand_peak

    @cached_property
    def logged_peak(self) -> float:
        """FLOP/s that a run's MFU is relative to: for float32 on NVIDIA those of tensor cores,
        while `peak` is that of plain units."""
        return self._operand_peak if self.said_peak is None else self.said_peak

    @property
    def _operand_peak(self) -> float:
        """FLOP/s of the dtype that products of `dtype` are computed in."""
        # Imported here because hardware.py imports jax
        from jaxmllm.runtime.hardware import operand_dtype

        return self.cluster.peak(operand_dtype(self.cluster.device_kind, self.dtype)) / self.sharing

    @cached_property
    def wide_peak(self) -> float:
        """FLOP/s in float32 by plain units, where the vendor names them; otherwise `peak`."""
        try:
            return self.cluster.peak("float32") / self.sharing
        except ClusterError:
            return self.peak

    def slowest(self, seconds: Iterable[float]) -> float:
        """Seconds until devices that wait for each other are done: those of the slowest, or the
        mean where they share cores."""
        return (statistics.fmean if self.cluster.shared_cores else max)(seconds)

    def product_rate(self, tokens: float, width: float) -> float:
        """FLOP/s of products of [tokens, width] matrices."""
        side = 1 / (1 / tokens + 1 / width)
        # A chip with more FLOPs per byte of memory needs larger matrices to be as busy.
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
        """Seconds of computing while something else is sent: between their sum and the larger of
        both.

        With p = `overlap` these are (compute^p + sent^p)^(1/p). Shared cores do one after the
        other.
        """
        if not sent or self.cluster.shared_cores:  # without the rounding of the powers
            return compute + sent
        p = self.rates.overlap
        return (compute**p + sent**p) ** (1 / p)

    def least_together(self, compute: float, sent: float) -> float:
        """Seconds of both where everything that can overlap does."""
        return compute + sent if self.cluster.shared_cores else max(compute, sent)

    def interval(self, seconds: float) -> tuple[float, float]:
        """Bounds of a step's seconds, by the uncertainty of the cluster's efficiency."""
        uncertainty = self.cluster.efficiency.uncertainty
        return seconds * (1 - uncertainty), seconds * (1 + uncertainty)

    def straggled(self, seconds: float, devices: int) -> float:
        """Seconds of a step on so many devices, of which the slowest decides."""
        nodes = max(devices / self.cluster.node_devices, 1.0)
        return seconds * (1 + self.rates.straggling * math.log2(nodes))


def stored_bytes(width: int, mlp_widths: int, tensor: int, beside: int = 1) -> float:
    """Bytes per slot that a layer stores on a device, without the pairs of attention.

    Args:
      mlp_widths: widths of the MLP, of all of its matrices together.
      tensor: devices that split the layer.
      beside: devices that split what is around its products: norms and residuals.
    """
    inside = STORED_INSIDE * width + STORED_MLP * mlp_widths
    return STORED_BESIDE * width / beside + inside / tensor
