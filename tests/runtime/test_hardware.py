"""Peak FLOP/s from the table and by measurement on CPU, and the memory of devices."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxmllm.runtime.hardware import device_memory, measured_cpu_flops, peak_flops, table_flops


def chip(kind: str) -> Any:
    return SimpleNamespace(platform="tpu" if kind.startswith("TPU") else "gpu", device_kind=kind)


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("TPU v4", 275.0),
        ("TPU v5 lite", 197.0),
        ("TPU v5e", 197.0),
        ("TPU v5", 459.0),
        ("TPU v5p", 459.0),
        ("TPU v6 lite", 918.0),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_bfloat16_peaks(kind: str, teraflops: float) -> None:
    assert peak_flops(chip(kind), "bfloat16") == pytest.approx(teraflops * 1e12)


def test_unknown_chips_and_types_have_no_peak() -> None:
    assert peak_flops(chip("NVIDIA GeForce GTX 1080"), "bfloat16") is None
    assert peak_flops(chip("NVIDIA RTX A1000 Laptop GPU"), "bfloat16") is None
    assert peak_flops(chip("NVIDIA A100X"), "bfloat16") == 312e12
    assert table_flops("TPU v4", "float32") is None
    assert peak_flops(chip("NVIDIA H200"), "float64") is None


def test_float32_is_what_the_precision_makes_of_it() -> None:
    assert peak_flops(chip("NVIDIA H200"), "float32") == 494.5e12
    assert peak_flops(chip("TPU v4"), "float32") == 275e12
    assert peak_flops(chip("AMD Instinct MI300X"), "float32") == 163.4e12
    with jax.default_matmul_precision("highest"):
        assert peak_flops(chip("NVIDIA H200"), "float32") == 67e12
        assert peak_flops(chip("TPU v4"), "float32") is None


def test_cpu_is_measured_once() -> None:
    peak = peak_flops(jax.devices("cpu")[0], "float32")
    assert peak is not None and 1e7 < peak < 1e13
    assert peak_flops(jax.devices("cpu")[-1], "float32") == peak
    # A bound that any machine reaches: all devices together do one GFLOP/s
    assert peak * jax.device_count("cpu") > 1e9
    assert np.isfinite(measured_cpu_flops("bfloat16", size=64, repeats=1))


def test_memory_of_devices_that_do_not_tell_it_is_not_known():
    """Devices of other processes, and devices that programs are only compiled for."""

    class Elsewhere:
        platform = "gpu"

        def memory_stats(self):
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: only for addressable devices")

    class Here(Elsewhere):
        def memory_stats(self):
            return {"bytes_limit": 5}

    assert device_memory(Elsewhere()) is None
    assert device_memory(Here()) == 5
