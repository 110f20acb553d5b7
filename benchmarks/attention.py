"""Attention of one packed row: its cost against the dense masked form, a large matrix product, and
its visible tiles.

    python -m benchmarks.attention [--json PATH]

Rows are the `packed` ones of benchmarks/context.py: documents of the workload generator, with
images and clips seen in both directions; float32, 8 query and 4 key heads of size 64. The dense
form is jax.nn.dot_product_attention with the whole mask; it is left out where its logits do not
fit. `of peak` is the rate of floating-point operations in visible tiles, as a share of the rate of
a large matrix product in the same run. `pairs` is the share of the query-key pairs in these tiles
that are visible, `difference` the largest difference from the dense output.

The second table has rows of equal length with longer and longer documents, and the line that fits
their cost: seconds = constant + slope * tiles. It is left out where fewer than three lengths of
documents fit into a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import median_seconds
from benchmarks.context import packed
from jaxmllm.attention.attention import attention
from jaxmllm.attention.mask import Mask, TokenIds, causal_ids, visible
from jaxmllm.attention.tiles import tile_lists, visible_tiles
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.output import print_table, write_json

HEADS = 8
KEY_HEADS = 4
SIZE = 64
DENSE_BYTES = 2**30  # the dense form is run only if its logits take at most this many bytes
MATMUL = 2048  # side of the square matrices whose product gives the reference rate
FORWARD_FLOPS = 4 * HEADS * SIZE  # for each query-key pair: logits and weighted sum
BACKWARD_FLOPS = 10 * HEADS * SIZE  # for each pair: logits again, and four products
PASSES = {"forward": FORWARD_FLOPS, "training": FORWARD_FLOPS + BACKWARD_FLOPS}
TIMES = ["x faster", "of peak"]
COLUMNS = [
    "slots",
    "documents",
    "block",
    "tiles",
    "forward ms",
    *TIMES,
    "training ms",
    *TIMES,
    "backward of peak",
]
SLOPE_SLOTS = 16384
SLOPE_DOCUMENTS = (512, 1024, 2048, 4096, 8192, 16384)
LEAST_LENGTHS = 3  # lengths of documents that a line is fitted to: any two points lie on a line
GENERATOR = (
    "numpy default_rng([seed, slots]): `packed` rows of benchmarks/context.py, normal q, k, v"
)


def visible_pairs(ids: TokenIds) -> np.ndarray:
    """[C, C] bool: which key (column) each query (row) sees."""
    pairs: np.ndarray = visible(ids.map(lambda column: column[:, None]), ids)
    return pairs


def make_mask(ids: TokenIds, block: int) -> tuple[Mask, int, int]:
    """The mask of one row, and its numbers of visible tiles and of wholly visible ones."""
    tiles = visible_tiles(ids, block)
    lists = tile_lists(tiles, len(ids.document) // block, len(ids.document) // block)
    mask = Mask(ids, ids, lists.queries, lists.keys)
    return (
        jax.tree.map(lambda array: jnp.asarray(array[None]), mask),
        len(tiles),
        int(tiles.full.sum()),
    )


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, mask=visible[None, None])


def programs(function: Callable[..., jax.Array], *inputs: Any) -> dict[str, Callable[[], Any]]:
    """Jitted calls of the forward pass, and of the forward and backward pass for q, k and v."""

    def loss(*inputs: Any) -> tuple[jax.Array, jax.Array]:
        out = function(*inputs)
        return out.sum(), out

    gradients = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    return {
        "forward": partial(jax.jit(function), *inputs),
        "training": partial(jax.jit(gradients), *inputs),
    }


def random_inputs(random: np.random.Generator, slots: int) -> tuple[jax.Array, ...]:
    """q, k and v of one row."""
    return tuple(
        jnp.asarray(random.standard_normal((1, slots, heads, SIZE), dtype=np.float32))
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )


def matmul(random: np.random.Generator) -> Callable[[], Any]:
    square = jnp.asarray(random.standard_normal((MATMUL, MATMUL), dtype=np.float32))
    return partial(jax.jit(jnp.matmul), square, square)


def measure(seed: int, slots: int, blocks: list[int], repeats: int) -> list[dict[str, Any]]:
    """One record per block size, and one for the dense form where it fits, all timed in the same
    rounds."""
    random = np.random.default_rng([seed, slots])
    ids = packed(random, slots)
    q, k, v = random_inputs(random, slots)
    forms: dict[int, dict[str, Callable[[], Any]]] = {}  # by block size; 0 is the dense form
    tiles: dict[int, int] = {}
    for block in blocks:
        mask, tiles[block], _ = make_mask(ids, block)
        forms[block] = programs(attention, q, k, v, mask)
    dense = HEADS * slots**2 * 4 <= DENSE_BYTES  # float32 logits
    if dense:
        visible_matrix = visible_pairs(ids)
        forms[0] = programs(dense_attention, q, k, v, jnp.asarray(visible_matrix))
        tiles[0] = 1
    functions = {
        (name, block): run for block, passes in forms.items() for name, run in passes.items()
    }
    seconds = median_seconds({("matmul", 0): matmul(random)} | functions, repeats)
    peak = 2 * MATMUL**3 / seconds["matmul", 0]

    real_slots = ids.document > 0
    expected = np.asarray(forms[0]["forward"]())[0, real_slots] if dense else None
    records = []
    for block, passes in forms.items():
        pairs = tiles[block] * (block or slots) ** 2
        record: dict[str, Any] = {
            "slots": slots,
            "documents": len(np.unique(ids.document[real_slots])),
            "block": block,
        }
        record["tiles"] = tiles[block] if block else None
        for name, flops in PASSES.items():
            record[f"{name}_ms"] = 1e3 * seconds[name, block]
            record[f"{name}_ratio"] = seconds[name, 0] / seconds[name, block] if dense else None
            record[f"{name}_peak"] = pairs * flops / seconds[name, block] / peak
        backward = seconds["training", block] - seconds["forward", block]
        record["backward_peak"] = pairs * BACKWARD_FLOPS / backward / peak
        out = np.asarray(passes["forward"]())[0, real_slots]
        record["pairs"] = visible_matrix.sum() / pairs if dense else None
        record["difference"] = float(abs(out - expected).max()) if expected is not None else None
        records.append(record)
    return records


def measure_slope(seed: int, slots: int, block: int, repeats: int) -> dict[str, Any] | None:
    """Seconds of rows of one length against their visible tiles, and the line fitted to these; None
    where too few lengths of documents fit."""
    lengths = [length for length in SLOPE_DOCUMENTS if length <= slots]
    if len(lengths) < LEAST_LENGTHS:
        return None
    random = np.random.default_rng([seed, slots])
    q, k, v = random_inputs(random, slots)
    run = jax.jit(attention)
    functions = {}
    tiles = []
    for length in lengths:
        segments = (np.arange(slots) // length + 1).astype(np.int32)
        mask, tile_count, _ = make_mask(causal_ids(segments), block)
        functions[length] = partial(run, q, k, v, mask)
        tiles.append(tile_count)
    seconds = list(median_seconds(functions, repeats).values())
    slope, constant = np.polyfit(tiles, seconds, 1)
    residual = np.array(seconds) - (constant + slope * np.array(tiles))
    return {
        "slots": slots,
        "block": block,
        "documents_of": lengths,
        "tiles": tiles,
        "seconds": seconds,
        "slope_seconds_per_tile": float(slope),
        "constant_seconds": float(constant),
        "r_squared": float(1 - residual.var() / np.var(seconds)),
    }


def main(command: Sequence[str] | None = None) -> None:
    parser = measuring_parser(__doc__)
    parser.add_argument("--slots", type=positive_int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--blocks", type=positive_int, nargs="+", default=[128, 256])
    parser.add_argument("--repeats", type=positive_int, default=3)
    options = parser.parse_args(command)
    for slots, block in itertools.product(options.slots, options.blocks):
        if slots % block:
            parser.error(f"--slots {slots} must be a multiple of --blocks {block}")
    records = [
        row
        for slots in options.slots
        for row in measure(options.seed, slots, options.blocks, options.repeats)
    ]
    print_table(
        "attention of one packed row: forward, and forward + backward (training), against the dense masked form",
        [*COLUMNS, "pairs", "difference"],
        [
            [value if name != "block" else value or "dense" for name, value in record.items()]
            for record in records
        ],
    )
    slope = measure_slope(
        options.seed, min(SLOPE_SLOTS, max(options.slots)), options.blocks[0], options.repeats
    )
    if slope is not None:
        line = f"{1e6 * slope['slope_seconds_per_tile']:.3g} us per tile + {1e3 * slope['constant_seconds']:.3g} ms"
        print_table(
            f"causal rows of {slope['slots']} slots, blocks of {slope['block']}:\n{line}, R^2 {slope['r_squared']:.4f}",
            ["documents of", "tiles", "forward ms"],
            zip(
                slope["documents_of"],
                slope["tiles"],
                [1e3 * s for s in slope["seconds"]],
                strict=True,
            ),
        )
    write_json(options.json, "attention", options.seed, GENERATOR, results=records, slope=slope)


if __name__ == "__main__":
    main()
