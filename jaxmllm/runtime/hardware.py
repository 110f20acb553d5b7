"""Limits of a device: peak FLOP/s of dense matrix products, which is the denominator of MFU, and
its memory."""

from __future__ import annotations

import functools
import os
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

TERA = 1e12

# Dense TFLOP/s (no structured sparsity) of one device by `device_kind`; the first pattern that
# matches counts. float32 is the figure of the plain units, tensorfloat32 that of tensor cores that
# read float32. Sources, by vendor:
#   NVIDIA A100 datasheet (2021), H100 datasheet (SXM, PCIe, NVL), H200 datasheet (SXM, NVL), HGX
#   B200 datasheet (a board's figure / 8; sparse / 2), L40S datasheet, Ada GPU architecture
#   whitepaper (RTX 4090, FP32 accumulate).
#   Google Cloud TPU system architecture pages (v4, v5e, v5p, v6e), peak compute of one chip.
#   AMD Instinct MI300X datasheet.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"A100(?!\d)", {"bfloat16": 312.0, "tensorfloat32": 156.0, "float32": 19.5}),
    (r"H100.*PCIe", {"bfloat16": 756.0, "tensorfloat32": 378.0, "float32": 51.0}),
    (r"H[12]00.*NVL", {"bfloat16": 835.5, "tensorfloat32": 417.5, "float32": 60.0}),
    (r"H[12]00", {"bfloat16": 989.5, "tensorfloat32": 494.5, "float32": 67.0}),
    (r"\bB200", {"bfloat16": 2250.0, "tensorfloat32": 1125.0, "float32": 75.0}),
    (r"L40S", {"bfloat16": 362.0, "tensorfloat32": 183.0, "float32": 91.6}),
    (r"RTX 4090", {"bfloat16": 165.2, "tensorfloat32": 82.6, "float32": 82.6}),
    (r"TPU v6 ?(lite|e)", {"bfloat16": 918.0}),
    (r"TPU v5 ?(lite|e)", {"bfloat16": 197.0}),
    (r"TPU v5", {"bfloat16": 459.0}),
    (r"TPU v4", {"bfloat16": 275.0}),
    (r"MI300X", {"bfloat16": 1307.4, "tensorfloat32": 653.7, "float32": 163.4}),
)


def peak_flops(device: jax.Device, dtype: str) -> float | None:
    """Peak FLOP/s of one device for matrix products in `dtype`; None if the chip is unknown.

    float32 stands for the type in which XLA computes it under `jax_default_matmul_precision`:
    tensorfloat32 on NVIDIA and bfloat16 passes on TPU unless a higher precision is set. The peak of
    a CPU is measured, because no table has it.
    """
    if device.platform == "cpu":
        return measured_cpu_flops(dtype)
    return table_flops(device.device_kind, operand_dtype(device.device_kind, dtype))


def table_flops(device_kind: str, dtype: str) -> float | None:
    """The vendor's dense figure in FLOP/s; `dtype` is bfloat16, float32 or tensorfloat32."""
    for pattern, peaks in _PEAKS:
        if re.search(pattern, device_kind, re.IGNORECASE):
            return peaks[dtype] * TERA if dtype in peaks else None
    return None


def operand_dtype(device_kind: str, dtype: str) -> str:
    """Type in which XLA computes products of `dtype`; peaks are listed by it (see `peak_flops`)."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if dtype != "float32" or precision in ("float32", "highest"):
        return dtype
    if device_kind.startswith("TPU"):
        return "bfloat16"
    return "tensorfloat32" if "NVIDIA" in device_kind.upper() else dtype


@functools.cache
def measured_cpu_flops(dtype: str, size: int = 768, repeats: int = 4) -> float:
    """FLOP/s of one CPU device, measured: the best of a few runs of a square product on every local
    device at once, divided by the number of devices, because forced host devices share the same
    cores. Takes a second and one compilation.
    """
    devices = jax.local_devices(backend="cpu")
    mesh = jax.sharding.Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("device"))
    matrices = jax.make_array_from_callback(
        (len(devices), size, size),
        sharding,
        lambda index: np.full((1, size, size), 1e-3, jnp.dtype(dtype)),
    )
    # Each device multiplies a matrix of its own, and all do so at once: the FLOPs of one product
    # over the time of all are the share of one device.
    product = jax.jit(lambda x: x @ x, out_shardings=sharding)
    product(matrices).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        product(matrices).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds)


def device_memory(device: jax.Device) -> int | None:
    """Bytes of memory that one device may use; None if it does not say. CPU devices share the
    memory of the machine equally."""
    if device.platform == "cpu":
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return machine // len(jax.local_devices(backend="cpu"))
    try:
        statistics = device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # device of another process or of an absent machine
        return None
    limit = statistics.get("bytes_limit")
    return None if limit is None else int(limit)
