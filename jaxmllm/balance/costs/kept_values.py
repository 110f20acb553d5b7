"""How many numbers a layer keeps of each slot for its backward pass: those that `remat` names, and
those of norms, scales and GELU.

setup/row_memory.py chooses capacities by them, cluster/phase_program.py predicts memory by them.
"""

from __future__ import annotations

from typing import Final

from jaxmllm.config.schema import DiffusionConfig, LanguageConfig, TowerConfig

# Widths that are kept in addition, by `remat` that is not a list: of the layer, if it norms the
# outputs of attention and MLP, and if it scales them; of the MLP, if it has GELU
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
    """Numbers per slot that attention, its projections and the MLP keep, by their names in a
    `remat` list.

    Args:
      queries, keys, mlp: numbers of a slot on a device, which may have only a part of them.
      logsumexp: numbers that the log-sum-exp of one head takes.
    """
    # Outputs that are normed or scaled are kept, too
    added = getattr(shapes, "post_norms", False) + getattr(shapes, "layer_scale", False)
    return {
        "attention": queries + logsumexp * queries / shapes.head_size,
        "projections": queries + 2 * keys + shapes.width,
        "mlp": (shapes.mlp_matrices - 1) * mlp + added * shapes.width,
    }


def further_widths(
    shapes: TowerConfig | DiffusionConfig | LanguageConfig, remat: str
) -> tuple[int, int]:
    """(widths of the layer, widths of its MLP) that norms, scales and GELU keep in addition, for a
    `remat` that is not a list."""
    widths = getattr(shapes, "post_norms", False) * POST_NORM_WIDTHS[remat]
    widths += getattr(shapes, "layer_scale", False) * SCALED_WIDTHS[remat]
    is_gelu = getattr(shapes, "activation", "silu") == "gelu_tanh"
    return widths, is_gelu * GELU_WIDTHS[remat]
