"""What a mixture of experts costs in a decoder's layer: what devices send each other, what blocks
move through memory, and what they hold there. Letters are those of experts/experts.py.

Which experts the tokens of a run will choose is not known in advance: every expert counts as chosen
equally often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jaxmllm.cluster.collectives import devices_along

if TYPE_CHECKING:
    from jaxmllm.cluster.device_seconds import Device
    from jaxmllm.models.mllm import MLLM
    from sharding.rules import Layout

MATRICES: Final = 3  # of an expert: gate, up, down
# Share of an expert's products that precede the activation: every backward pass computes them again
AGAIN: Final = 2 / 3
WIDE: Final = 4  # bytes of float32, in which blocks add up, and routers compute
INDEX: Final = 4  # bytes of the number of an expert
# [T, k] arrays that a device holds next to the tokens: numbers and weights of experts, pairs in
# order, and gradients
PAIRED: Final = 8


class Passed(NamedTuple):
    """Bytes of arrays that devices send each other in one layer and pass, for all their tokens."""

    gathered: tuple[float, ...]
    numbers: float  # index arrays with the numbers of experts, gathered as well
    summed: tuple[float, ...]


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer, as one device has them.

    Attributes:
      tokens: of the device's own rows.
      itemsize: bytes of a number of the compute dtype.
    """

    count: int
    per_token: int
    width: int
    mlp_width: int
    layout: Layout
    tokens: float
    itemsize: int

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes whose devices gather each other's tokens: they split both experts and slots."""
        slots = {*self.layout.mesh_axes("batch"), *self.layout.mesh_axes("sequence")}
        return tuple(axis for axis in self.layout.split_axes("experts") if axis in slots)

    @property
    def other_axes(self) -> tuple[str, ...]:
        """Mesh axes whose devices have partial sums of the same tokens."""
        split = dict.fromkeys(self.layout.split_axes("experts", "mlp"))
        return tuple(axis for axis in split if axis not in self.token_axes)

    @property
    def all_tokens(self) -> float:
        """T, the tokens of all devices that share the experts."""
        return self.tokens * devices_along(self.layout, self.token_axes)

    @property
    def held(self) -> float:
        """Number of experts on the device."""
        return self.count / devices_along(self.layout, self.layout.split_axes("experts"))

    @property
    def block_rows(self) -> int:
        """Rows of a block: pairs (token, expert) that are computed together."""
        from jaxmllm.experts.expert_blocks import block_rows

        return block_rows(int(self.all_tokens * self.per_token), self.count)

    # ------------------------------------------------------------------ what is sent

    @property
    def forward(self) -> Passed:
        """Tokens and weights to the experts; sums back."""
        return Passed(
            (self._token_bytes, self._weight_bytes), self._index_bytes, (self._token_bytes,)
        )

    @property
    def backward(self) -> Passed:
        """Tokens, gradients and weights to the experts; gradients of tokens and weights back."""
        gathered = (self._token_bytes, self._token_bytes, self._weight_bytes)
        return Passed(gathered, self._index_bytes, (self._token_bytes, self._weight_bytes))

    @property
    def _token_bytes(self) -> float:
        return self.all_tokens * self.width * self.itemsize

    @property
    def _weight_bytes(self) -> float:
        return self.all_tokens * self.per_token * WIDE

    @property
    def _index_bytes(self) -> float:
        return self.all_tokens * self.per_token * INDEX

    # ------------------------------------------------------------------ what is computed

    @property
    def forward_flops(self) -> float:
        """FLOPs of a token in the products of its experts in one layer, all devices together."""
        return 2.0 * self.per_token * MATRICES * self.width * self.mlp_width

    def product_rate(self, device: Device, tokens: float, width: float, share: float) -> float:
        """FLOP/s of the products of layers with these experts.

        Args:
          tokens: of the device's rows.
          width: of the matrices of all other products.
          share: of the FLOPs of all products, those of the experts' products.
        """
        inner = self.mlp_width / devices_along(self.layout, self.layout.split_axes("mlp"))
        blocks = device.product_rate(min(self.block_rows, self._pairs_per_expert), inner)
        return 1 / (share / blocks + (1 - share) / device.product_rate(tokens, width))

    @property
    def _pairs_per_expert(self) -> float:
        return max(self.all_tokens * self.per_token / self.count, 1.0)

    # ------------------------------------------------------------------ what memory moves and holds

    def block_traffic(self, forward: float, backward: float, trained: bool) -> float:
        """Bytes that the blocks of a layer move in so many passes: the matrices of their experts,
        the sums of their gradients, and rows of tokens, sums and gradients."""
        pairs = self._pairs_per_expert * self.held
        blocks = pairs / self.block_rows + self.held / 2  # an expert's last block is half empty
        numbers = self._matrix_numbers
        read = self.itemsize
        added = 2 * WIDE
        forward_bytes = blocks * numbers * read + pairs * self.width * (read + added)
        backward_bytes = blocks * numbers * (read + trained * added)
        backward_bytes += pairs * self.width * (2 * read + added)
        return forward * forward_bytes + backward * backward_bytes

    def held_forward(self) -> float:
        """Bytes that a layer holds forward: tokens received from other devices, and their sums."""
        received = self.itemsize * bool(self.token_axes)
        return self.all_tokens * (self.width * (received + WIDE) + self.per_token * PAIRED * WIDE)

    def held_backward(self, trained: bool) -> float:
        """Bytes that a layer holds backward: received tokens and gradients, gradients of tokens,
        the input of the router, and gradients of the device's own matrices."""
        received = 2 * self.itemsize * bool(self.token_axes)
        tokens = self.all_tokens * (self.width * (received + WIDE) + self.per_token * PAIRED * WIDE)
        routed = self.tokens * self.width * WIDE
        return tokens + routed + trained * WIDE * self.held * self._matrix_numbers

    @property
    def _matrix_numbers(self) -> float:
        """Numbers of the matrices of one expert on the device."""
        return (
            MATRICES
            * self.width
            * self.mlp_width
            / devices_along(self.layout, self.layout.split_axes("mlp"))
        )


def mixture_of(model: MLLM, phase: str, tokens: float) -> Mixture | None:
    """The experts of a phase for `tokens` tokens of a device; none where it has no experts."""
    shapes: Any = getattr(model.config, phase)
    experts = getattr(shapes, "experts", None)
    if experts is None:
        return None
    component = model.components[phase]
    return Mixture(
        count=experts.count,
        per_token=experts.per_token,
        width=shapes.width,
        mlp_width=shapes.mlp_width,
        layout=component.layout,
        tokens=tokens,
        itemsize=component.dtype.itemsize,
    )
