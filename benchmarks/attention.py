"""Attention over packed rows against the dense masked form, in one run.

    python -m benchmarks.attention [--json PATH]

One causal float32 row of 8 query and 4 key heads of size 64 holds ragged segments of about 273 tokens (15 in 4,096).
The dense form is jax.nn.dot_product_attention with the whole mask; it is left out where its logits do not fit.
`of peak` is the rate over the visited tiles as a share of a large matmul's, `visible` the share of the visited
query-key pairs that the mask lets through, `difference` the largest one from the dense output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import arguments, median_seconds, print_table, write_json
from jaxmllm.balance.plan import Ints
from jaxmllm.balance.tiles import tile_ranges
from jaxmllm.models.attention import attention

HEADS, KEY_HEADS, SIZE = 8, 4, 64
SEGMENT = 4096 / 15  # mean tokens of a segment
DENSE_BYTES = 2**30  # largest array of logits for which the dense form is run
MATMUL = 2048
FORWARD_FLOPS = 4 * HEADS * SIZE  # a query-key pair: logits and weighted sum
TRAINING_FLOPS = FORWARD_FLOPS + 10 * HEADS * SIZE  # backward: logits again, and four products
TIMES = ["x faster", "of peak"]
COLUMNS = ["slots", "segments", "block", "forward ms", *TIMES, "training ms", *TIMES, "visible", "difference"]
GENERATOR = "numpy default_rng(seed): Dirichlet(2) segment lengths over 31/32 of the row, normal q, k, v"


def ragged_segments(rng: np.random.Generator, slots: int) -> Ints:
    """[C] segments of Dirichlet(2) lengths; the last 32nd of the row, and what rounding leaves, is padding."""
    count = round(slots / SEGMENT)
    lengths = (rng.dirichlet(np.full(count, 2.0)) * slots * 31 / 32).astype(int)
    segments = np.repeat(np.arange(1, count + 1, dtype=np.int32), lengths)
    return np.pad(segments, (0, slots - len(segments)))


def visible_pairs(segments: Ints) -> np.ndarray:
    """[C, C] bool, the causal mask of a row."""
    same = (segments[:, None] == segments) & (segments > 0)
    return same & np.tri(len(segments), dtype=bool)


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    slots = jnp.arange(q.shape[1])
    mask = (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0) & (slots[:, None] >= slots)
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


def programs(function: Callable[..., jax.Array], *inputs: Any) -> dict[str, Callable[[], Any]]:
    """The compiled forward pass, and the forward and backward pass for q, k and v."""

    def loss(*inputs: Any) -> tuple[jax.Array, jax.Array]:
        out = function(*inputs)
        return out.sum(), out

    gradients = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    return {"forward": partial(jax.jit(function), *inputs), "training": partial(jax.jit(gradients), *inputs)}


def measure(rng: np.random.Generator, slots: int, blocks: list[int], repeats: int) -> list[dict[str, Any]]:
    """One record for each block size, and one for the dense form where it fits; all timed in the same rounds."""
    segments = ragged_segments(rng, slots)
    visible = visible_pairs(segments)
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, slots, heads, SIZE), dtype=np.float32))
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    row = jnp.asarray(segments[None])
    square = jnp.asarray(rng.standard_normal((MATMUL, MATMUL), dtype=np.float32))
    functions: dict[tuple[str, int], Callable[[], Any]] = {("matmul", 0): partial(jax.jit(jnp.matmul), square, square)}
    forms: dict[int, dict[str, Callable[[], Any]]] = {}
    pairs: dict[int, int] = {}
    for block in blocks:
        ranges = tile_ranges(segments, block, causal=True)
        tiles = jnp.asarray(ranges.queries[None]), jnp.asarray(ranges.keys[None])
        pairs[block] = int((ranges.queries[:, 1] - ranges.queries[:, 0]).sum()) * block**2
        forms[block] = programs(partial(attention, causal=True), q, k, v, row, *tiles)
    if HEADS * slots**2 * 4 <= DENSE_BYTES:  # float32 logits
        forms[0] = programs(dense_attention, q, k, v, row)
        pairs[0] = slots**2
    functions |= {(name, block): run for block, both in forms.items() for name, run in both.items()}
    seconds = median_seconds(functions, repeats)
    peak = 2 * MATMUL**3 / seconds["matmul", 0]

    real = segments > 0
    expected = np.asarray(forms[0]["forward"]())[0, real] if 0 in forms else None
    records = []
    for block, both in forms.items():
        record: dict[str, Any] = {"slots": slots, "segments": int(segments.max()), "block": block}
        for name, flops in (("forward", FORWARD_FLOPS), ("training", TRAINING_FLOPS)):
            record[f"{name}_ms"] = 1e3 * seconds[name, block]
            record[f"{name}_ratio"] = seconds[name, 0] / seconds[name, block] if 0 in forms else None
            record[f"{name}_peak"] = pairs[block] * flops / seconds[name, block] / peak
        record["visible"] = visible.sum() / pairs[block]
        out = np.asarray(both["forward"]())[0, real]
        record["difference"] = float(abs(out - expected).max()) if expected is not None else None
        records.append(record)
    return records


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    records = [row for slots in options.slots for row in measure(rng, slots, options.blocks, options.repeats)]
    print_table(
        "attention of one row: forward, and forward + backward (training), against the dense masked form",
        COLUMNS,
        [[value if name != "block" else value or "dense" for name, value in record.items()] for record in records],
    )
    write_json(options.json, "attention", options.seed, GENERATOR, results=records)


if __name__ == "__main__":
    main()
