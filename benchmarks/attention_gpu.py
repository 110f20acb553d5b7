"""The kernels of attention against one another, where there is an NVIDIA GPU.

    python -m benchmarks.attention_gpu [--slots 8192 16384 32768 65536] [--room 144] [--json PATH]

One bfloat16 row holds documents of equal length: causal ones with the heads of a decoder (32 of
queries and 8 of keys, size 128), or images, seen in both directions, with those of a tower (16,
size 64). The kernel `packed` is cuDNN reading the row with the places of its documents (`attention:
cudnn`); `cudnn` gets each document as a row of its own, so that it sees the same pairs. `TFLOP/s`
counts the tiles that hold a visible pair, with two matrix products per tile forward and five
backward, whatever else a kernel computes. `error` is the norm of the difference from the float32
result over the norm of that result, in `backward` the largest of dq, dk and dv. `same bits` says
whether a second call gives exactly the same numbers. Without a GPU the command says so and exits
with 2.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmllm.attention.attention import attention
from jaxmllm.attention.kernel_cudnn import Documents
from jaxmllm.attention.mask import Mask, causal_ids, document_runs, item_ids
from jaxmllm.attention.tiles import tile_lists, visible_tiles
from jaxmllm.tools.arguments import measuring_parser
from jaxmllm.tools.output import print_table, write_json


@dataclass(frozen=True)
class Shape:
    """Heads and attention blocks that are measured."""

    heads: int = 32
    key_heads: int = 8
    size: int = 128
    block: int = 128
    causal: bool = True

    def __str__(self) -> str:
        return f"{self.heads}/{self.key_heads} x {self.size}"


SHAPES = {"decoder": Shape(), "tower": Shape(heads=16, key_heads=16, size=64, causal=False)}
SLOTS = (8192, 16384, 32768, 65536)
DOCUMENTS = {"decoder": (1, 8), "tower": (8,)}
# Calls per measured time: they are queued one after another, which hides the host's share of a call
CALLS = 5
# Measured times per kernel, whose median is reported; the JAX kernel takes seconds per call
REPEATS = {"gpu": 7, "packed": 7, "cudnn": 7, "jax": 1}
# Per visible pair and element of a head: two matrix products forward, five backward
FLOPS = {"forward": 4, "backward": 10}
COLUMNS = ["heads", "slots", "documents", "tiles", "kernel"]
OF_DIRECTION = ("ms", "TFLOP/s", "error", "same bits")
COLUMNS += [f"{direction} {column}" for direction in FLOPS for column in OF_DIRECTION]
GENERATOR = "jax.random, of seed and slots: normal q, k, v and gradient of the output"

Inputs = tuple[jax.Array, ...]  # q, k, v and the gradient of the output
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def equal_documents(
    slots: int, documents: int, block: int, causal: bool = True, room: int = 0
) -> tuple[Mask, int]:
    """The mask of one row of equal documents, and its number of visible tiles.

    Args:
      room: documents that the mask has room for, if more than there are.
    """
    segments = np.repeat(np.arange(1, documents + 1, dtype=np.int32), slots // documents)
    ids = causal_ids(segments) if causal else item_ids(segments)
    tiles = visible_tiles(ids, block)
    lists = tile_lists(tiles, slots // block, slots // block)
    runs = document_runs(ids.document[None], max(documents, room))[0]
    mask = Mask(ids, ids, lists.queries, lists.keys, Documents(runs, causal))
    return jax.tree.map(lambda array: jnp.asarray(array[None]), mask), len(tiles)


def attends(mask: Mask, documents: int) -> dict[str, Attend]:
    """The measured kernels by name, for a row of this mask."""

    def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        rows = (x.reshape(documents, -1, *x.shape[2:]) for x in (q, k, v))
        causal = mask.documents.causal
        return jax.nn.dot_product_attention(
            *rows, is_causal=causal, implementation="cudnn"
        ).reshape(q.shape)

    return {
        "gpu": lambda q, k, v: attention(q, k, v, mask, kernel="gpu"),
        "packed": lambda q, k, v: attention(q, k, v, mask, kernel="cudnn"),
        "cudnn": cudnn,
        "jax": lambda q, k, v: attention(q, k, v, mask, kernel="jax"),
    }


class Passes(NamedTuple):
    """A kernel's compiled passes for inputs of some shapes."""

    forward: Callable[..., Any]
    vjp: Callable[..., Any]
    backward: Callable[..., Any]


@dataclass(frozen=True)
class Measured:
    """Times and results of one kernel."""

    seconds: dict[str, float]  # medians of the forward and the backward pass
    same_bits: dict[str, bool]  # whether two calls agree in every bit, by pass
    results: list[np.ndarray]  # out, dq, dk and dv


def compile_all(cells: Sequence[tuple[Attend, Inputs]]) -> list[Passes | Exception]:
    """The compiled passes of each kernel, or the error that kept it from compiling. All kernels are
    compiled concurrently."""

    def of_cell(cell: tuple[Attend, Inputs]) -> Passes | Exception:
        """The compiled passes of one kernel, or the error that kept it from compiling."""
        attend, (*qkv, d_out) = cell
        try:
            forward = jax.jit(attend).lower(*qkv).compile()
            vjp = jax.jit(lambda *qkv: jax.vjp(attend, *qkv)).lower(*qkv).compile()
            # The pullback comes from a call: tracing the vjp again would give another pytree type
            _, pullback = vjp(*qkv)
            backward = jax.jit(lambda pullback, d_out: pullback(d_out)).lower(pullback, d_out)
            return Passes(forward, vjp, backward.compile())
        except Exception as error:  # a kernel that this machine does not have
            return error

    with ThreadPoolExecutor() as pool:
        return list(pool.map(of_cell, cells))


def measure(passes: Passes | Exception, inputs: Inputs, repeats: int) -> Measured:
    """Times and results of both passes. Raises the error that kept them from compiling."""
    if isinstance(passes, Exception):
        raise passes
    *qkv, d_out = inputs
    _, pullback = passes.vjp(*qkv)
    seconds = {
        "forward": _median_seconds(lambda: passes.forward(*qkv), repeats),
        "backward": _median_seconds(lambda: passes.backward(pullback, d_out), repeats),
    }
    results, repeated_results = (
        [
            np.asarray(x, np.float32)
            for x in (passes.forward(*qkv), *passes.backward(pullback, d_out))
        ]
        for _ in range(2)
    )
    out_is_same, *gradients_are = (
        np.array_equal(result, repeated)
        for result, repeated in zip(results, repeated_results, strict=True)
    )
    return Measured(seconds, {"forward": out_is_same, "backward": all(gradients_are)}, results)


def _median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds per call over `repeats` measurements, each of `CALLS` calls in a row."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(CALLS):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times[1:])  # the first one warms up


def in_float32(mask: Mask, inputs: Inputs) -> list[np.ndarray]:
    """Out, dq, dk and dv of the JAX kernel in float32, at the highest precision: by default a GPU
    rounds float32 products to tf32."""
    *qkv, d_out = (x.astype(jnp.float32) for x in inputs)
    with jax.default_matmul_precision("highest"):
        out, pullback = jax.vjp(
            jax.jit(lambda q, k, v: attention(q, k, v, mask, kernel="jax")), *qkv
        )
        return [np.asarray(x) for x in (out, *pullback(d_out))]


def errors(results: list[np.ndarray], wants: list[np.ndarray]) -> dict[str, float]:
    """Relative error of the forward and of the backward pass."""
    out, *gradients = (
        float(np.linalg.norm(result - reference) / np.linalg.norm(reference))
        for result, reference in zip(results, wants, strict=True)
    )
    return {"forward": out, "backward": max(gradients)}


def random_inputs(
    seeds: Sequence[int], slots: int, shape: Shape, keys: int | None = None
) -> Inputs:
    """q, k, v and the gradient of the output, in bfloat16.

    Args:
      keys: slots of k and v; by default as many as q has.
    """
    heads = (shape.heads, shape.key_heads, shape.key_heads, shape.heads)
    counts = (slots, keys or slots, keys or slots, slots)
    key = functools.reduce(jax.random.fold_in, seeds, jax.random.key(0))
    return tuple(
        jax.random.normal(subkey, (1, count, head_count, shape.size), jnp.bfloat16)
        for subkey, count, head_count in zip(jax.random.split(key, 4), counts, heads, strict=True)
    )


def record(
    name: str,
    slots: int,
    documents: int,
    tiles: int,
    measured: Measured,
    error: dict[str, float],
    shape: Shape,
) -> dict[str, Any]:
    """One row of the table, with the columns `COLUMNS`; an error that was not measured is None."""
    cells: dict[str, Any] = {
        "heads": str(shape),
        "slots": slots,
        "documents": documents,
        "tiles": tiles,
        "kernel": name,
    }
    for direction, flops in FLOPS.items():
        seconds = measured.seconds[direction]
        cells[f"{direction} ms"] = 1e3 * seconds
        cells[f"{direction} TFLOP/s"] = (
            flops * shape.heads * shape.size * shape.block**2 * tiles / seconds / 1e12
        )
        cells[f"{direction} error"] = error.get(direction)
        cells[f"{direction} same bits"] = measured.same_bits[direction]
    return cells


def main() -> int:
    parser = measuring_parser(__doc__)
    slot_multiple = max(SHAPES[name].block * max(counts) for name, counts in DOCUMENTS.items())
    parser.add_argument(
        "--slots",
        type=int,
        nargs="+",
        default=SLOTS,
        help=f"slots of the rows, multiples of {slot_multiple}",
    )
    parser.add_argument(
        "--room",
        type=int,
        default=0,
        help="room for documents of a row, as max_segments (default: as many as it has)",
    )
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(
            f"benchmarks.attention_gpu needs a GPU; jax finds only {jax.default_backend()}",
            file=sys.stderr,
        )
        return 2
    rows = []
    for slots, (name, shape) in itertools.product(options.slots, SHAPES.items()):
        inputs = random_inputs((options.seed, slots), slots, shape)
        for documents in DOCUMENTS[name]:
            mask, tiles = equal_documents(slots, documents, shape.block, shape.causal, options.room)
            references = in_float32(mask, inputs)
            kernels = attends(mask, documents)
            compiled = compile_all([(attend, inputs) for attend in kernels.values()])
            for kernel, passes in zip(kernels, compiled, strict=True):
                try:
                    measurement = measure(passes, inputs, REPEATS[kernel])
                except Exception as reason:  # the machine lacks the kernel, or memory for it
                    print(f"could not run {kernel}, {slots} slots, {documents} documents: {reason}")
                    continue
                relative_errors = errors(measurement.results, references)
                rows.append(
                    record(kernel, slots, documents, tiles, measurement, relative_errors, shape)
                )
    title = f"bfloat16, on {jax.devices()[0].device_kind}"
    print_table(title, COLUMNS, [[row[column] for column in COLUMNS] for row in rows])
    write_json(options.json, "attention_gpu", options.seed, GENERATOR, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
