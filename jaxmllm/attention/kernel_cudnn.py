"""Attention by cuDNN, on NVIDIA GPUs since Hopper, over rows whose documents are runs of slots.

    runs of documents --_packing--> lengths and offsets of sequences --one call for all rows--> out, logsumexp
                                                                                      -> dq, dk, dv

Only masks that cuDNN knows are possible: a token sees its whole document, the part of it that is
not later (`causal`), or the last `window` tokens of that part. Images within text that are seen in
both directions are not possible, nor are rows in parts.

XLA's custom calls for cuDNN are made here directly. JAX's own functions for them query the GPU of
this process, but there is none where programs are compiled ahead; and they assume that a token has
as many heads of keys as of queries. The calls read XLA's CudnnfMHABackendConfig, as JSON.

On other platforms the loops of kernel_jax.py run, under masks that are made of the same runs.

The backward pass adds gradients of queries in any order, except with
`XLA_FLAGS=--xla_gpu_deterministic_ops=true`.

Letters: B rows, C slots, T = B * C, H query heads, G key heads, K head size, M documents that all
rows together have room for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxmllm.attention import kernel_jax
from jaxmllm.attention.mask import Mask, TokenIds

FORWARD = "__cudnn$fmhaSoftmax"
BACKWARD = "__cudnn$fmhaSoftmaxBackward"
MULTIPLE = 8  # divides the numbers of a head
LARGEST_HEAD = 256
DTYPES = {"bfloat16": "BF16", "float16": "F16"}  # as XLA calls them
LARGEST_OFFSET = 2**31  # bound on the numbers of all rows, because offsets are int32
BY_SLOTS = (0, 2, 1, 3)  # layout of arrays [1, H, T, K] that are stored as [1, T, H, K]

# Axes of the six products of arrays [B, T, N, K] and logits [B, N, T, S]: (contracted left,
# contracted right, batch axes left, batch axes right). Names are fields of CudnnfMHABackendConfig.
PRODUCTS = {
    FORWARD: {
        "bmm1_dot_dimension_numbers": (3, 3, (0, 2), (0, 2)),
        "bmm2_dot_dimension_numbers": (3, 1, (0, 1), (0, 2)),
    },
    BACKWARD: {
        "bmm1_grad_gemm1_dot_dimension_numbers": (2, 1, (0, 1), (0, 2)),
        "bmm1_grad_gemm2_dot_dimension_numbers": (3, 1, (0, 1), (0, 2)),
        "bmm2_grad_gemm1_dot_dimension_numbers": (2, 1, (0, 1), (0, 2)),
        "bmm2_grad_gemm2_dot_dimension_numbers": (3, 3, (0, 2), (0, 2)),
    },
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Documents:
    """The documents of rows as runs of slots, and what tokens see of their own document."""

    runs: Array  # int32 [B, M / B, 2]: first slot and slots of each; 0 slots: no document
    causal: bool = field(metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})

    def ids(self, slots: int) -> TokenIds:
        """Ids [B, C] that give the same mask by the rule of attention/mask.py."""

        def of_row(runs: Array) -> tuple[Array, Array]:
            run, inside, real = _runs_of_slots(runs, slots)
            return jnp.where(real, run + 1, 0), jnp.where(real, inside, 0)

        document, position = jax.vmap(of_row)(self.runs)
        group = 0 * document if self.causal else document
        ids = TokenIds(document, group, position)
        return ids if self.window is None else ids.within(self.window)


def unsupported_reason(dtype: Any, head: int) -> str | None:
    """What cuDNN needs instead of these inputs; None if it takes them."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"bfloat16 or float16, not {jnp.dtype(dtype)}"
    if head % MULTIPLE or head > LARGEST_HEAD:
        return f"heads of a multiple of {MULTIPLE} numbers up to {LARGEST_HEAD}, not {head}"
    return None


def backward_bytes(slots: int, heads: int, key_heads: int, size: int, documents: int) -> int:
    """Working memory of the backward pass on a device: float32 numbers of every document for every
    slot, as measured on an H100 (docs/performance.md). Compiling ahead, without cuDNN, does not
    count it.

    Args:
      slots: of all rows of a call.
      documents: M.
    """
    # Sums of the gradients of queries; as much again for those of keys and values where heads of
    # keys are shared; and two sums of the softmax
    arrays = 1 if heads == key_heads else 2
    return 4 * documents * slots * heads * (arrays * size + 2)


def forward(scale: float, q: Array, k: Array, v: Array, mask: Mask) -> tuple[Array, Array]:
    """As `kernel_jax.forward`, for rows with `mask.documents`; for CUDA."""
    rows, slots, heads, size = q.shape
    packing = _packing(mask, q, k)
    results = (
        jax.ShapeDtypeStruct((1, heads, rows * slots, size), q.dtype),
        jax.ShapeDtypeStruct((packing.most, heads, rows * slots), jnp.float32),
    )
    inputs = (*map(_rows_end_to_end, (q, k, v)), *packing.operands)
    out, sums = _call(FORWARD, scale, q, mask, packing, inputs, results)
    real = packing.real[:, None]
    # In `sums` [M, H, T], slots are counted from a sequence's own first token on. Two index arrays
    # with a slice between them put their axis first: [T, H].
    logsumexp = sums[packing.run, :, packing.inside]
    return (
        _zero_unless(real[..., None], out[0].swapaxes(0, 1)).reshape(q.shape),
        jnp.where(real, logsumexp, jnp.inf).reshape(q.shape[:3]),
    )


def backward(
    scale: float,
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    out: Array,
    logsumexp: Array,
    d_out: Array,
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v from that of `forward`'s first result; for CUDA."""
    packing = _packing(mask, q, k)
    # The sums of every sequence begin at its own first token
    slot_sums = jnp.where(packing.real[:, None], logsumexp.reshape(-1, q.shape[2]), 0)
    slots = packing.starts[:, None] + jnp.arange(len(slot_sums))
    sums = slot_sums.at[slots].get(mode="fill", fill_value=0).swapaxes(1, 2)
    inputs = (*map(_rows_end_to_end, (q, k, v)), sums, *map(_rows_end_to_end, (d_out, out)))
    kv_spec = jax.ShapeDtypeStruct((1, k.shape[2], len(slot_sums), k.shape[3]), k.dtype)
    results = (jax.ShapeDtypeStruct((1, q.shape[2], *kv_spec.shape[2:]), q.dtype), kv_spec, kv_spec)
    gradients = _call(BACKWARD, scale, q, mask, packing, (*inputs, *packing.operands), results)
    real = packing.real[:, None, None]
    dq, dk, dv = (_zero_unless(real, gradient[0].swapaxes(0, 1)) for gradient in gradients)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def interpreted_forward(
    scale: float, q: Array, k: Array, v: Array, mask: Mask
) -> tuple[Array, Array]:
    """`forward` on any platform."""
    return kernel_jax.forward(scale, q, k, v, _mask_of_runs(mask, q.shape[1]))


def interpreted_backward(
    scale: float,
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    out: Array,
    logsumexp: Array,
    d_out: Array,
) -> tuple[Array, Array, Array]:
    """`backward` on any platform."""
    wide = logsumexp.dtype
    delta = (d_out.astype(wide) * out.astype(wide)).sum(axis=-1)
    mask = _mask_of_runs(mask, q.shape[1])
    return kernel_jax.backward(scale, q, k, v, mask, delta, logsumexp, d_out)


# ---------------------------------------------------------------------------- what the calls are given


class _Packing(NamedTuple):
    """The documents of all rows as sequences, those that exist first, and the place of each slot in
    them."""

    starts: Array  # [M]; T where there is none
    operands: tuple[Array, ...]  # lengths of queries and keys [1, M], their offsets [1, M + 1]
    run: Array  # [T] number of each slot's run
    inside: Array  # [T] slots before it in its run
    real: Array  # [T] bool: whether it is in a run

    @property
    def most(self) -> int:
        """M, the number of sequences, empty ones included."""
        size: int = self.starts.shape[0]
        return size


def _packing(mask: Mask, q: Array, k: Array) -> _Packing:
    """The documents of `mask` as sequences of the slots of all rows."""
    rows, slots = q.shape[:2]
    runs = mask.documents.runs
    runs = runs.at[:, :, 0].add(slots * jnp.arange(rows, dtype=runs.dtype)[:, None]).reshape(-1, 2)
    if len(runs) == 1:  # XLA takes a single sequence for rows that are not packed
        runs = jnp.pad(runs, ((0, 1), (0, 0)))
    runs = runs[jnp.argsort(runs[:, 1] == 0, stable=True)]
    lengths = runs[:, 1][None]
    starts = jnp.where(lengths[0] > 0, runs[:, 0], rows * slots)
    # M + 1 offsets: the beginning of each sequence, and the end of all. Padding may be between two
    # sequences, so lengths say where each ends.
    ends = jnp.append(starts, jnp.int32(rows * slots))[None]
    offsets = (ends * (x.shape[2] * x.shape[3]) for x in (q, k))
    return _Packing(starts, (lengths, lengths, *offsets), *_runs_of_slots(runs, rows * slots))


def _runs_of_slots(runs: Array, slots: int) -> tuple[Array, Array, Array]:
    """For each slot: number of its run, slots of the run before it, and whether it is in a run at
    all: [slots] each."""
    before = jnp.arange(slots, dtype=runs.dtype)[:, None] - runs[:, 0]
    holds = (before >= 0) & (before < runs[:, 1])
    run = holds.argmax(axis=1)
    inside = jnp.take_along_axis(before, run[:, None], axis=1)[:, 0]
    return run, jnp.clip(inside, 0, slots - 1), holds.any(axis=1)


def _mask_of_runs(mask: Mask, slots: int) -> Mask:
    """The mask with the ids of its documents' runs, which are all that cuDNN knows of it."""
    ids = mask.documents.ids(slots)
    return mask._replace(queries=ids, keys=ids)


def _rows_end_to_end(x: Array) -> Array:
    """[B, C, H, K] -> [1, T, H, K]"""
    return x.reshape(1, -1, *x.shape[2:])


def _zero_unless(real: Array, x: Array) -> Array:
    """x, with zeros where it is not real: cuDNN does not write slots that no sequence holds, so
    they may hold anything."""
    return jnp.where(real, x, 0)


def _call(
    name: str,
    scale: float,
    q: Array,
    mask: Mask,
    packing: _Packing,
    inputs: tuple[Array, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
) -> list[Array]:
    """The results of XLA's custom call without the last one, its working memory."""
    if q.size >= LARGEST_OFFSET:
        raise ValueError(
            f"attention: the cudnn kernel needs rows of fewer than 2^31 numbers of queries, not {q.shape}"
        )
    layouts = [BY_SLOTS if len(result.shape) == 4 else (0, 1, 2) for result in results]
    call = jax.ffi.ffi_call(
        name,
        (*results, jax.ShapeDtypeStruct((0,), jnp.uint8)),
        output_layouts=(*layouts, (0,)),
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(_config(name, scale, q, mask, packing.most)),
    )
    return list(call(*inputs)[:-1])


def _config(name: str, scale: float, q: Array, mask: Mask, most: int) -> dict[str, Any]:
    """XLA's CudnnfMHABackendConfig of a call, for JSON."""
    rows, slots, heads, _ = q.shape
    documents = mask.documents
    shape = [1, heads, rows * slots, rows * slots]
    products = {
        product: {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(axis) for axis in left_batch],
            "rhs_batch_dimensions": [str(axis) for axis in right_batch],
        }
        for product, (left, right, left_batch, right_batch) in PRODUCTS[name].items()
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": DTYPES[q.dtype.name],
            "dimensions": [str(length) for length in shape],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * len(shape),
        },
        "is_flash_attention": True,
        "mask_type": "PADDING_CAUSAL" if documents.causal else "PADDING",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": documents.window or 0,
        "max_seg_per_batch": most,
        "is_paged_attention": False,
    }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": attention | products}
