"""What the sections of several components share: attention windows, and matrices of layers."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from jaxmllm.config.section import Section

Gelu = Literal["tanh", "exact"]  # tanh: the approximation by tanh
Activation = Literal["silu", "gelu_tanh"]  # of a gated MLP
# The bound, which no model reaches, refuses huge numbers before one record is made for each layer
LayerCount = Annotated[int, Field(ge=1, le=10_000)]


class Layered(Section):
    """A component whose layers run over the slots of rows."""

    @property
    def stem_stride(self) -> int:
        """Slots that make one token of the layers."""
        return 1


class LayerWindows(Layered):
    """With `window`, all layers but `full_layers` attend in windows."""

    layers: LayerCount
    # Tokens, or patches of a side; its square must fit into 64 bits
    window: int | None = Field(None, ge=1, le=1 << 30)
    full_layers: tuple[int, ...] = ()  # numbers of layers, from 0

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Whether each layer attends in windows."""
        if self.window is None:
            return (False,) * self.layers
        return tuple(layer not in self.full_layers for layer in range(self.layers))

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        if self.window is None and self.full_layers:
            raise ValueError(
                f"full_layers {list(self.full_layers)} need a window; without one, all layers are full"
            )
        if outside := [layer for layer in self.full_layers if not 0 <= layer < self.layers]:
            raise ValueError(f"full_layers names {outside}, but layers are 0 .. {self.layers - 1}")
        if self.window is not None and not any(self.windowed):
            raise ValueError(
                f"full_layers names all layers, so that window ({self.window}) changes nothing; unset both"
            )
        return self


def attention_matrices(
    width: int, heads: int, kv_heads: int, part: str = "attention"
) -> dict[str, tuple[int, int]]:
    """Matrices of attention as (inputs, outputs), by path.

    Args:
      heads, kv_heads: widths of all heads together.
    """
    matrices = {
        "query": (width, heads),
        "key": (width, kv_heads),
        "value": (width, kv_heads),
        "out": (heads, width),
    }
    return in_layers(part, matrices)


def matrices_of_mlp(
    width: int, mlp_width: int, gated: bool, part: str = "mlp"
) -> dict[str, tuple[int, int]]:
    """Matrices of an MLP as (inputs, outputs), by path."""
    inner = ("gate", "up") if gated else ("up",)
    mlp = dict.fromkeys(inner, (width, mlp_width)) | {"down": (mlp_width, width)}
    return in_layers(part, mlp)


def tower_matrices(width: int, mlp_width: int, gated: bool = False) -> dict[str, tuple[int, int]]:
    """Matrices of a tower's layers by path. All heads together are as wide as the tower."""
    return attention_matrices(width, width, width) | matrices_of_mlp(width, mlp_width, gated)


def in_layers(part: str, matrices: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """`matrices` by the paths that they have as parameters of `part` in every layer."""
    return {f"layers.{part}.{name}": size for name, size in matrices.items()}
