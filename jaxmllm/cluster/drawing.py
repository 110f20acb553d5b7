"""What the layers of a generator do in addition to products and attention of patches: vectors of
the time modulate every slot, and conditions may have weights of their own, a stream or keys and
values (models/diffusion.py).

None of this was measured on a GPU: it is counted from shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxmllm.arrays import Floats
from jaxmllm.balance.records import PhaseItems, PhasePlan, PhaseSpec
from jaxmllm.cluster.device_seconds import STORED_INSIDE
from jaxmllm.config.schema import DiffusionConfig, ModelConfig

VECTORS: Final = 6  # per layer and segment: shift, scale and gate, of attention and of the MLP
VECTOR_BYTES: Final = 4  # they are in float32


@dataclass(frozen=True)
class Drawing:
    """What a generator's layers cost in addition to those of a tower."""

    shapes: DiffusionConfig

    def shares(self, plan: PhasePlan, spec: PhaseSpec, items: PhaseItems) -> Floats:
        """Share of the row of each microbatch, [M], that also runs through the weights of
        conditions: the smallest share that holds the conditions of every rank."""
        from jaxmllm.models.streams import SHARES

        if self.shapes.streams == self.shapes.attentions == 1:
            return np.zeros(plan.microbatches)
        conditions = np.zeros((plan.microbatches, spec.ranks))
        np.add.at(conditions, (plan.microbatch, plan.rank), items.tokens)
        filled = conditions.max(axis=1) / (plan.capacity * plan.span)
        # Ascending, so a search finds the smallest share that is at least as large.
        shares = np.array([1 / share for share in SHARES])
        return shares[np.minimum(np.searchsorted(shares, filled), len(shares) - 1)]

    def flops_of_conditions(self, layers: float) -> float:
        """FLOPs of one slot in the weights of conditions, in one pass of all layers.

        Args:
          layers: FLOPs of one slot in the weights of patches.
        """
        if self.shapes.streams == 2:
            return layers
        return 4.0 * self.shapes.width**2 * self.shapes.layers  # keys and values

    def modulation(
        self, slots: float, segments: int, beside: float, forward: float, backward: float
    ) -> float:
        """FLOPs of modulation in all layers: vectors are computed from the time once per segment,
        and each slot looks them up; gradients of slots are summed by products with zeros and ones.

        Args:
          slots: of a device.
          segments: most segments of a row.
          beside: share of the row that runs through the weights of conditions.
          forward, backward: numbers of passes.
        """
        width = self.shapes.width
        sums = backward * slots * (1 + beside * (self.shapes.streams - 1))
        products = width * self.shapes.streams * (self.shapes.modulation == "layer")
        of_number = sums + (forward + backward) * products
        return 2.0 * VECTORS * segments * width * of_number * self.shapes.layers

    def stored(self, inner: int) -> float:
        """Bytes per slot that a layer stores in each pass in addition to `stored_bytes`: those of a
        second attention.

        Args:
          inner: devices that split a layer.
        """
        return self.shapes.width * (self.shapes.attentions - 1) * STORED_INSIDE / inner

    @property
    def stored_backward(self) -> float:
        """Bytes per slot that a layer's backward pass also stores: gradients of the vectors."""
        return float(self.shapes.width * VECTORS * VECTOR_BYTES)


def mean_share() -> float:
    """Share of a row that conditions take, the mean over a program's branches for them."""
    from jaxmllm.models.streams import SHARES

    return sum(1 / share for share in SHARES) / len(SHARES)


def drawing_of(model: ModelConfig, phase: str) -> Drawing | None:
    """The `Drawing` of a phase; none where the phase draws nothing."""
    return Drawing(getattr(model, phase)) if phase in model.generators else None
