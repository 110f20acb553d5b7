"""Attention over packed rows: exact, in memory linear in the row, and skipping what no query sees.

Ids of each token say who sees whom (attention/mask.py), and lists that the host makes of them say
which blocks of queries and keys must meet (attention/tiles.py). Both are data: one compilation
serves every mask. The softmax is accumulated online and recomputed for the gradients (arXiv
2205.14135, 2307.08691), so that only the output and one logsumexp per query are kept. These two are
named "attention" for policies of jax.checkpoint: a policy that keeps the name runs the forward
kernel once.

All kernels but the last have deterministic gradients, on every platform: each sum is added up in
the order of a loop, and no two programs write to one place (no atomics). kernel_cudnn.py says when
its gradients are deterministic. Where rows are split over devices, a collective adds the gradients
of keys, in the order of its library.

    attention   checks, chooses a kernel, and owns the gradient rule
    kernels     forward: out, logsumexp        backward: dq, dk, dv        kernel_jax.py   every platform
                                                                           kernel_cpu.py   CPUs, numba and BLAS
                                                                           kernel_gpu.py   NVIDIA GPUs, Pallas
                                                                           kernel_cudnn.py NVIDIA GPUs, cuDNN

Letters: B rows, C query slots, T key slots, H query heads, G key heads, K head size, b slots of a
block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxmllm.attention import kernel_cpu, kernel_cudnn, kernel_gpu, kernel_jax
from jaxmllm.attention.mask import Mask
from jaxmllm.attention.slot_products import slot_dots, times_factors
from jaxmllm.config.schema import Kernel
from sharding.by_platform import by_platform

# JAX's names of NVIDIA's platform: of devices, and of programs that are lowered for them
GPUS = ("gpu", "cuda")


class Choice(NamedTuple):
    """The kernel that the programs of a platform run."""

    kernel: Literal["jax", "cpu", "gpu", "cudnn"]
    # What a kernel that was asked for by name needs instead of these inputs; on GPUs, where "auto"
    # or "cpu" became "jax", what their own kernel needs. None: nothing.
    needs: str | None = None


def unsupported_reason(kernel: Kernel, dtype: Any, head: int, block: int) -> str | None:
    """What a kernel needs instead of heads of this size and dtype in blocks of `block` slots; None
    if it takes them.

    In addition, "cudnn" needs rows that tell where their documents are.
    """
    if kernel == "cpu":
        return kernel_cpu.unsupported_reason(dtype)
    if kernel == "gpu":
        return kernel_gpu.unsupported_reason(dtype, head, block)
    if kernel == "cudnn":
        return kernel_cudnn.unsupported_reason(dtype, head)
    return None


def choice(kernel: Kernel, platform: str, dtype: Any, head: int, block: int) -> Choice:
    """The kernel that runs where a config has `kernel`, for heads of this size and dtype in blocks
    of `block` slots."""
    if kernel != "auto":
        # A kernel asked for by name is kept even if it cannot take these inputs: the caller reports
        # why. Only "cpu", if it could take them, becomes "jax" on other platforms.
        needs = unsupported_reason(kernel, dtype, head, block)
        if needs or kernel != "cpu" or platform == "cpu":
            return Choice(kernel, needs)
        return Choice("jax", "attention: auto or gpu, not cpu" if platform in GPUS else None)
    if platform == "cpu" and not unsupported_reason("cpu", dtype, head, block):
        return Choice("cpu")
    if platform not in GPUS:
        return Choice("jax")
    needs = unsupported_reason("gpu", dtype, head, block)
    return Choice("jax", needs) if needs else Choice("gpu")


def attention(
    q: Float[Array, "B C H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    mask: Mask,
    *,
    scale: float | None = None,
    kernel: Kernel = "auto",
) -> Float[Array, "B C H K"]:
    """Softmax attention of the visible pairs.

    Args:
      q: queries.
      k: keys; each of the G heads serves H / G consecutive heads of queries.
      v: values.
      mask: who sees whom. Queries and keys may be different slots of the row, as under context
        parallelism.
      scale: factor on the logits; K ** -0.5 if None.
      kernel: "jax", "cpu" (for which other platforms run "jax"), "gpu" or "cudnn" (which other
        platforms interpret), or "auto": the platform's own if it takes these inputs, else "jax".
        The platform is the one that is lowered for. "cudnn" reads `mask.documents`.

    Returns:
      The output in the dtype of q; exactly zero for queries that see nothing, where the gradient of
      q is zero too. Sums are kept in float32 (float64 for float64 inputs). Gradients are
      deterministic, except those of "cudnn" (kernel_cudnn.py).

    Raises `ValueError` if the shapes do not fit each other, or a kernel that was asked for by name
    does not take these inputs.
    """
    return _checked_attention(q, k, v, mask, scale, kernel)[0]


def attention_and_logsumexp(
    q: Float[Array, "B C H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    mask: Mask,
    *,
    scale: float | None = None,
    kernel: Kernel = "auto",
) -> tuple[Float[Array, "B C H K"], Float[Array, "B C H"]]:
    """The same, and the logsumexp of the visible logits of each query, infinite for one that sees
    nothing; gradients flow through both. Arguments and errors are those of `attention`, except that
    the kernel "cudnn" is refused: it has no gradient of the logsumexp."""
    if kernel == "cudnn":
        raise ValueError("attention: the cudnn kernel has no gradient of a logsumexp")
    return _checked_attention(q, k, v, mask, scale, kernel)


def _checked_attention(
    q: Array, k: Array, v: Array, mask: Mask, scale: float | None, kernel: Kernel
) -> tuple[Array, Array]:
    _check_shapes(q, k, v, mask)
    needs = unsupported_reason(kernel, q.dtype, q.shape[-1], mask.block)
    if kernel == "cudnn" and mask.documents is None:
        needs = "rows that tell where their documents lie"
    if needs:
        raise ValueError(
            f"attention: the {kernel} kernel needs {needs}; set components.<name>.attention to auto or jax, or change "
            "that component's model or compute_dtype, or phases.<name>.block"
        )
    return _attention(kernel, _default_scale(q) if scale is None else scale, q, k, v, mask)


def with_repeated_key(
    out: Float[Array, "B C H K"],
    logsumexp: Float[Array, "B C H"],
    q: Float[Array, "B C H K"],
    key: Float[Array, "B 1 H K"],
    value: Float[Array, "B 1 H K"],
    count: Int[Array, "B C"],
    *,
    scale: float | None = None,
) -> Float[Array, "B C H K"]:
    """Attention as if each query also saw `key`, the same for all queries of a row, `count` times;
    0: not at all.

    Args:
      out: attention without that key.
      logsumexp: of the logits without that key, infinite for queries that see nothing.
      scale: as in `attention`.
    """
    dtype = out.dtype
    wide = logsumexp.dtype
    out, q, key, value = (x.astype(wide) for x in (out, q, key, value))
    logits = slot_dots(q, key)
    logits = logits * (_default_scale(q) if scale is None else scale)
    times = count[..., None]
    sees = jnp.isfinite(logsumexp)
    # With n = count, the key's share of the softmax is n e^l / (n e^l + e^logsumexp): a sigmoid.
    ahead = logits + jnp.log(times.astype(logits.dtype)) - jnp.where(sees, logsumexp, 0)
    # A query without other keys takes this one alone; if it does not see this one either, nothing
    share = jnp.where(sees, jax.nn.sigmoid(ahead), (times > 0).astype(logits.dtype))
    return (out + times_factors(value - out, share)).astype(dtype)


def _default_scale(q: Array) -> float:
    size: int = q.shape[-1]
    return size**-0.5


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    kernel: Kernel, scale: float, q: Array, k: Array, v: Array, mask: Mask
) -> tuple[Array, Array]:
    return _forward(kernel, scale, q, k, v, mask)[0]


def _forward(
    kernel: Kernel, scale: float, q: Array, k: Array, v: Array, mask: Mask
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    forward = _kernel_function(kernel, scale, q, mask, "forward")
    # The output that is returned must be the named one, too, or the kernel would run again for it
    out, logsumexp = checkpoint_name(forward(q, k, v, mask), "attention")
    return (out, logsumexp), (q, k, v, mask, out, logsumexp)


def _backward(
    kernel: Kernel, scale: float, residuals: tuple[Any, ...], gradients: tuple[Array, Array]
) -> tuple[Array, Array, Array, None]:
    q, k, v, mask, out, logsumexp = residuals
    d_out, d_logsumexp = gradients
    backward = _kernel_function(kernel, scale, q, mask, "backward")
    if kernel == "cudnn":
        return *backward(q, k, v, mask, out, logsumexp, d_out), None
    # The gradient of a logit is its weight times (d_out . value - delta)
    wide = logsumexp.dtype
    delta = slot_dots(d_out.astype(wide), out.astype(wide)) - d_logsumexp
    return *backward(q, k, v, mask, delta, logsumexp, d_out), None


_attention.defvjp(_forward, _backward)


def _kernel_function(
    kernel: Kernel, scale: float, q: Array, mask: Mask, way: str
) -> Callable[..., Any]:
    """The function "forward" or "backward" of a kernel, chosen by platform where it is lowered."""
    if kernel == "cudnn":
        interpreted = partial(getattr(kernel_cudnn, f"interpreted_{way}"), scale)
        cudnn = partial(getattr(kernel_cudnn, way), scale)
        return partial(by_platform, default=interpreted, cuda=cudnn)
    plain, cpu, gpu = (
        partial(getattr(module, way), scale) for module in (kernel_jax, kernel_cpu, kernel_gpu)
    )
    inputs = q.dtype, q.shape[-1], mask.block
    kernels = {}
    # A process for other devices may have no CPU devices, and need not compile the loops
    on_cpu = jax.default_backend() == "cpu"
    if kernel in ("auto", "cpu") and on_cpu and not unsupported_reason("cpu", *inputs):
        kernels["cpu"] = cpu
    if kernel in ("auto", "gpu") and not unsupported_reason("gpu", *inputs):
        kernels["cuda"] = gpu
    elsewhere = partial(gpu, interpret=True) if kernel == "gpu" else plain
    return partial(by_platform, default=elsewhere, **kernels)


def _check_shapes(q: Array, k: Array, v: Array, mask: Mask) -> None:
    (rows, slots, heads, size), keys = q.shape, k.shape[1]
    if k.shape != v.shape or k.shape[0] != rows or k.shape[3] != size or heads % k.shape[2]:
        raise ValueError(
            f"attention: q {q.shape} needs k and v of one shape [{rows}, keys, divisor of {heads}, {size}], "
            f"got k {k.shape} and v {v.shape}"
        )
    for side, ids, expected in (
        ("queries", mask.queries, (rows, slots)),
        ("keys", mask.keys, (rows, keys)),
    ):
        for path, column in jax.tree.leaves_with_path(ids):
            if column.shape != expected:
                name = jax.tree_util.keystr(path)
                raise ValueError(
                    f"attention: mask.{side}{name} must be {expected}, got {column.shape}"
                )
    # Blocks of one size: slots / counts[0] == keys / counts[1], compared as products.
    counts = mask.query_tiles.spans.shape[1], mask.key_tiles.spans.shape[1]
    if not all(counts) or slots % counts[0] or keys * counts[0] != slots * counts[1]:
        raise ValueError(
            f"attention: {slots} query slots and {keys} key slots must be cut into blocks of one size, "
            f"got lists for {counts[0]} and {counts[1]} blocks"
        )
    for name, lists, blocks in zip(
        ("query_tiles", "key_tiles"), (mask.query_tiles, mask.key_tiles), counts, strict=True
    ):
        if (
            lists.spans.shape != (rows, blocks, 3)
            or lists.blocks.ndim != 2
            or lists.blocks.shape[0] != rows
        ):
            raise ValueError(
                f"attention: mask.{name} must be spans [{rows}, blocks, 3] and blocks [{rows}, any], "
                f"got {lists.spans.shape} and {lists.blocks.shape}"
            )
