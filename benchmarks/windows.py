"""A vision tower with windowed attention, its patches in the order of the image and in that of
windows.

    python -m benchmarks.windows [--json PATH]

Rows of images of equal size on one device, in float32; three of four layers attend inside windows
of 8 x 8 patches. `pairs` is the number of pairs that layers with windows compute over the number
that they see. `tower ms` is the forward and backward pass of the tower, the median of interleaved
rounds. Blocks have 128 patches in the order of the image, the default of phases.vision.block, and
64 in that of windows, as in a run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import median_seconds
from jaxmllm.config.schema import ComponentsConfig, LanguageConfig, ModelConfig, VisionConfig
from jaxmllm.data.media.images import Images
from jaxmllm.data.rows.masks import AttentionSpec, Row, finish_encoder_row, window_numbers
from jaxmllm.models.compose import build_model
from jaxmllm.models.mllm import MLLM
from jaxmllm.models.rows import EncoderRows
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.output import print_table, write_json
from sharding.mesh import make_mesh

WINDOW: Final = 8
BLOCKS: Final = {"image": 128, "windows": 64}
ALIGNMENT: Final = 128  # rows are a multiple of this many slots
# (height, width) of an image in patches, number of images, merge
ROWS: Final = [((37, 37), 1, 1), ((74, 74), 1, 1), ((74, 74), 1, 2), ((36, 36), 4, 2)]
GENERATOR: Final = "numpy default_rng(seed): uniform pixels; parameters of jax.random.key(0)"
COLUMNS: Final = ["patches", "images", "merge", "order", "block", "pairs", "tower ms", "x faster"]


def image_row(grid: tuple[int, int], images: int, merge: int, seed: int) -> tuple[Images, Row]:
    """A row of images one after another, as the filler leaves it; and their modality."""
    modality = Images(patch_size=2, merge=merge, min_pixels=1, max_pixels=10**9)
    size = grid[0] * grid[1]
    slots = -(-images * size // ALIGNMENT) * ALIGNMENT
    pixels = np.random.default_rng(seed).integers(0, 256, (1, slots, modality.format.features))
    segments = np.zeros((1, slots), np.int32)
    segments[0, : images * size] = np.repeat(np.arange(1, images + 1), size)
    positions = np.zeros((1, slots, 2), np.int32)
    positions[0, : images * size] = np.tile(modality.positions((1, *grid))[:, 1:], (images, 1))
    row: Row = {
        "features": pixels.astype(np.uint8),
        "segments": segments,
        "positions": positions,
        "valid": np.ones((1, slots // merge**2), np.bool_),
        "failed": np.zeros(1, np.int32),
    }
    return modality, row


def tower_config(merge: int) -> ModelConfig:
    """A model of a small tower with windows and a tiny decoder."""
    vision = VisionConfig(
        patch_size=2,
        merge=merge,
        width=256,
        layers=4,
        heads=4,
        mlp_width=1024,
        window=WINDOW,
        full_layers=(3,),
    )
    sizes = {"width": 8, "layers": 1, "heads": 1, "kv_heads": 1, "head_size": 8, "mlp_width": 8}
    return ModelConfig(language=LanguageConfig.model_validate(sizes), vision=vision)


def in_order_of_windows(modality: Images, row: Row, model: ModelConfig) -> EncoderRows:
    """The row as in a run: finishing it sorts the patches by window."""
    finish_encoder_row(
        row,
        AttentionSpec({"vision": BLOCKS["windows"]}, windows=model.windows),
        "vision",
        modality.format,
    )
    return EncoderRows.of(row)


def in_order_of_image(modality: Images, row: Row, model: ModelConfig) -> EncoderRows:
    """The row with its patches in the order of the image, and lists of tiles for that order."""
    ids = row["segments"].copy()
    spec = partial(AttentionSpec, {"vision": BLOCKS["image"]})
    finish_encoder_row(row, spec(), "vision", modality.format)
    windows = window_numbers(ids, row["positions"], WINDOW)
    # The row is finished once more with windows in place of images; only the tiles of windowed
    # layers come from this copy
    window_row = dict(row) | {"segments": windows}
    finish_encoder_row(window_row, spec(), "vision", modality.format)
    return EncoderRows.of(row | {"windows": windows, "window_tiles": window_row["tiles"]})


def pairs_ratio(rows: EncoderRows) -> float:
    """Pairs that layers with windows compute, over the pairs that they see."""
    windows = np.asarray(rows.windows)
    assert rows.window_tiles is not None
    spans = rows.window_tiles.query_spans
    block = windows.shape[1] // spans.shape[2]
    visible_pairs = (np.bincount(windows[0])[1:].astype(np.int64) ** 2).sum()
    return float(spans[..., 1:].sum() * block**2 / visible_pairs)


def training_pass(model: MLLM, rows: EncoderRows) -> Callable[[], Any]:
    """A compiled call of the forward and backward pass of tower and projector."""

    def loss(params: Any, rows: EncoderRows) -> jax.Array:
        features = model.features(params, "vision", rows)
        return jnp.square(model.project(params, "vision", features, rows.places)).sum()

    params = model.init(0, "float32")
    rows = jax.device_put(rows)
    program = jax.jit(jax.grad(loss)).lower(params, rows).compile()
    return lambda: program(params, rows)


def measure(
    grid: tuple[int, int], images: int, merge: int, seed: int, repeats: int
) -> list[dict[str, Any]]:
    """One record for each order of the patches."""
    config = tower_config(merge)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    model = build_model(config, 8, ComponentsConfig(), mesh)
    orders = {"image": in_order_of_image, "windows": in_order_of_windows}
    rows = {
        name: order(*image_row(grid, images, merge, seed), config) for name, order in orders.items()
    }
    seconds = median_seconds(
        {name: training_pass(model, order_rows) for name, order_rows in rows.items()}, repeats
    )
    return [
        {
            "grid": list(grid),
            "images": images,
            "merge": merge,
            "order": name,
            "block": BLOCKS[name],
            "pairs": pairs_ratio(order_rows),
            "seconds": seconds[name],
            "ratio": seconds["image"] / seconds[name],
        }
        for name, order_rows in rows.items()
    ]


def main() -> None:
    parser = measuring_parser(__doc__)
    parser.add_argument("--repeats", type=positive_int, default=5)
    options = parser.parse_args()
    records = [record for row in ROWS for record in measure(*row, options.seed, options.repeats)]
    print_table(
        "A tower with windows",
        COLUMNS,
        [
            [
                " x ".join(map(str, record["grid"])),
                record["images"],
                record["merge"],
                record["order"],
                record["block"],
                f"{record['pairs']:.2f}",
                f"{1e3 * record['seconds']:.0f}",
                f"{record['ratio']:.2f}",
            ]
            for record in records
        ],
    )
    write_json(
        options.json,
        "windows",
        options.seed,
        GENERATOR,
        repeats=options.repeats,
        rows=records,
    )


if __name__ == "__main__":
    main()
