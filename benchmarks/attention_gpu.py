"""The kernels of attention against one another, where there is an NVIDIA GPU.

    python -m benchmarks.attention_gpu [--slots 8192 16384 32768 65536] [--json PATH]

One bfloat16 row of 32 query and 8 key heads of size 128 holds causal documents of equal length.
As `packed`, cuDNN is told where they lie (`attention: cudnn`); as `cudnn` it gets each as a row of its own, so that it
sees the same pairs. `TFLOP/s` counts the tiles that
hold a visible pair, with two matrix products per tile forward and five backward, whatever else a
kernel computes. `error` is the norm of the difference from float32 over the norm of what float32
gives, the largest of dq, dk and dv in `backward`. Without a GPU it says so and exits with 2.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmllm.attention.attention import attention
from jaxmllm.attention.kernel_cudnn import Documents
from jaxmllm.attention.mask import Mask, causal_ids, document_runs
from jaxmllm.attention.tiles import tile_lists, visible_tiles
from jaxmllm.tools.output import measuring_parser, print_table, write_json


@dataclass(frozen=True)
class Shape:
    """Of the heads that are measured, and of the attention's blocks."""

    heads: int = 32
    key_heads: int = 8
    size: int = 128
    block: int = 128


SHAPE = Shape()
SLOTS = (8192, 16384, 32768, 65536)
DOCUMENTS = (1, 8)
CALLS = 5  # one after another per time taken, so that the host's share of a call is hidden
REPEATS = {
    "gpu": 7,
    "packed": 7,
    "cudnn": 7,
    "jax": 1,
}  # times, of which the median counts; the JAX kernel takes seconds
FLOPS = {"forward": 4, "backward": 10}  # per visible pair and number of a head
COLUMNS = ["slots", "documents", "tiles", "kernel"]
COLUMNS += [f"{direction} {column}" for direction in FLOPS for column in ("ms", "TFLOP/s", "error")]
GENERATOR = "numpy default_rng([seed, slots]): normal q, k, v and gradient of the output"

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def equal_documents(slots: int, documents: int, block: int) -> tuple[Mask, int]:
    """The mask of one row of causal documents, and its number of visible tiles."""
    ids = causal_ids(np.repeat(np.arange(1, documents + 1, dtype=np.int32), slots // documents))
    tiles = visible_tiles(ids, block)
    lists = tile_lists(tiles, slots // block, slots // block)
    runs = document_runs(ids.document[None], documents)[0]
    mask = Mask(ids, ids, lists.queries, lists.keys, Documents(runs, causal=True))
    return jax.tree.map(lambda array: jnp.asarray(array[None]), mask), len(tiles)


def attends(mask: Mask, documents: int) -> dict[str, Attend]:
    """What is measured, by name."""

    def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        rows = (x.reshape(documents, -1, *x.shape[2:]) for x in (q, k, v))
        return jax.nn.dot_product_attention(*rows, is_causal=True, implementation="cudnn").reshape(
            q.shape
        )

    return {
        "gpu": lambda q, k, v: attention(q, k, v, mask, kernel="gpu"),
        "packed": lambda q, k, v: attention(q, k, v, mask, kernel="cudnn"),
        "cudnn": cudnn,
        "jax": lambda q, k, v: attention(q, k, v, mask, kernel="jax"),
    }


def measure(
    attend: Attend, inputs: tuple[jax.Array, ...], repeats: int
) -> tuple[dict[str, float], list[np.ndarray]]:
    """Median seconds of the forward and the backward pass, and out, dq, dk and dv."""
    *qkv, d_out = inputs
    forward = jax.jit(attend)
    out, pullback = jax.jit(lambda *qkv: jax.vjp(attend, *qkv))(*qkv)
    backward = jax.jit(lambda pullback, d_out: pullback(d_out))
    seconds = {
        "forward": _median_seconds(lambda: forward(*qkv), repeats),
        "backward": _median_seconds(lambda: backward(pullback, d_out), repeats),
    }
    return seconds, [np.asarray(x, np.float32) for x in (out, *backward(pullback, d_out))]


def _median_seconds(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(CALLS):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times[1:])  # the first compiles


def in_float32(mask: Mask, inputs: tuple[jax.Array, ...]) -> list[np.ndarray]:
    """Out, dq, dk and dv of the JAX kernel; by default a GPU would round products of float32 to tf32."""
    *qkv, d_out = (x.astype(jnp.float32) for x in inputs)
    with jax.default_matmul_precision("highest"):
        out, pullback = jax.vjp(
            jax.jit(lambda q, k, v: attention(q, k, v, mask, kernel="jax")), *qkv
        )
        return [np.asarray(x) for x in (out, *pullback(d_out))]


def errors(results: list[np.ndarray], wants: list[np.ndarray]) -> dict[str, float]:
    """Relative error of the forward and of the backward pass."""
    out, *gradients = (
        float(np.linalg.norm(got - want) / np.linalg.norm(want))
        for got, want in zip(results, wants, strict=True)
    )
    return {"forward": out, "backward": max(gradients)}


def random_inputs(
    random: np.random.Generator, slots: int, heads: int, key_heads: int, size: int
) -> tuple[jax.Array, ...]:
    """q, k, v and the gradient of the output, in bfloat16."""
    return tuple(
        jnp.asarray(
            random.standard_normal((1, slots, heads_, size), dtype=np.float32), jnp.bfloat16
        )
        for heads_ in (heads, key_heads, key_heads, heads)
    )


def record(
    name: str,
    slots: int,
    documents: int,
    tiles: int,
    seconds: dict[str, float],
    error: dict[str, float],
    shape: Shape = SHAPE,
) -> dict[str, Any]:
    """One row of the table, whose columns are `COLUMNS`; an error that was not taken is none."""
    cells: dict[str, Any] = {"slots": slots, "documents": documents, "tiles": tiles, "kernel": name}
    for direction, flops in FLOPS.items():
        cells[f"{direction} ms"] = 1e3 * seconds[direction]
        cells[f"{direction} TFLOP/s"] = (
            flops * shape.heads * shape.size * shape.block**2 * tiles / seconds[direction] / 1e12
        )
        cells[f"{direction} error"] = error.get(direction)
    return cells


def main() -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument(
        "--slots",
        type=int,
        nargs="+",
        default=SLOTS,
        help=f"multiples of {SHAPE.block * max(DOCUMENTS)}",
    )
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(
            f"benchmarks.attention_gpu needs a GPU; jax finds only {jax.default_backend()}",
            file=sys.stderr,
        )
        return 2
    rows = []
    for slots in options.slots:
        inputs = random_inputs(
            np.random.default_rng([options.seed, slots]),
            slots,
            SHAPE.heads,
            SHAPE.key_heads,
            SHAPE.size,
        )
        for documents in DOCUMENTS:
            mask, tiles = equal_documents(slots, documents, SHAPE.block)
            wants = in_float32(mask, inputs)
            for name, attend in attends(mask, documents).items():
                seconds, results = measure(attend, inputs, REPEATS[name])
                rows.append(record(name, slots, documents, tiles, seconds, errors(results, wants)))
    title = f"bfloat16, heads {SHAPE.heads}/{SHAPE.key_heads} x {SHAPE.size}, blocks of {SHAPE.block}, on "
    title += jax.devices()[0].device_kind
    print_table(title, COLUMNS, [[row[column] for column in COLUMNS] for row in rows])
    write_json(options.json, "attention_gpu", options.seed, GENERATOR, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
