"""What a layer keeps of a slot for its backward pass, in numbers: of what `remat` names, and of choices that keep more.

Capacities are chosen by them (setup/row_memory.py), and programs are told ahead (cluster/phase_program.py).
"""

from __future__ import annotations

from typing import Final

from jaxmllm.config.schema import DiffusionConfig, LanguageConfig, TowerConfig

# By `remat` that is no list, in widths of the layer: where what attention and MLP add is normed, and where it is
# scaled; and in those of its MLP with GELU
POST_NORM_WIDTHS: Final = {"full": 0, "dots": 1, "none": 8}
SCALED_WIDTHS: Final = {"full": 0, "dots": 1, "none": 2}
GELU_WIDTHS: Final = {"full": 0, "dots": 0, "none": 2}


def named_values(
    shapes: TowerConfig | DiffusionConfig | LanguageConfig,
    queries: float,
    keys: float,
    mlp: float,
    logsumexp: float,
) -> dict[str, float]:
    """By the name that a `remat` list gives it, what attention, its projections and the MLP keep.

    Args:
      queries, keys, mlp: numbers of a slot on a device, of which it may have a part.
      logsumexp: numbers that the one of a head takes.
    """
    # What is normed or scaled is kept, too
    added = getattr(shapes, "post_norms", False) + getattr(shapes, "layer_scale", False)
    return {
        "attention": queries + logsumexp * queries / shapes.head_size,
        "projections": queries + 2 * keys + shapes.width,
        "mlp": (shapes.mlp_matrices - 1) * mlp + added * shapes.width,
    }


def further_widths(
    shapes: TowerConfig | DiffusionConfig | LanguageConfig, remat: str
) -> tuple[int, int]:
    """Widths of the layer, and of its MLP, that norms, scales and GELU keep besides; `remat`: no list."""
    widths = getattr(shapes, "post_norms", False) * POST_NORM_WIDTHS[remat]
    widths += getattr(shapes, "layer_scale", False) * SCALED_WIDTHS[remat]
    is_gelu = getattr(shapes, "activation", "silu") == "gelu_tanh"
    return widths, is_gelu * GELU_WIDTHS[remat]
