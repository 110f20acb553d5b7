"""The time that a device takes to compute, at the limits of the model of its rates."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxmllm.cluster.clusters import CLUSTERS
from jaxmllm.cluster.device_seconds import RATES, Device
from jaxmllm.runtime.hardware import peak_flops

DEVICE = Device(CLUSTERS["a100"], efficiency=0.8)


def test_small_products_run_slower_and_large_ones_at_the_efficiency():
    rates = [DEVICE.product_rate(size, size) for size in (64, 512, 4096, 1 << 20)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.8 * 312e12, rel=1e-3)
    # Losses of both sides add up, like springs in series: half of the rate is left at this size
    assert DEVICE.product_rate(2 * RATES.half_side, 2 * RATES.half_side) == pytest.approx(
        0.4 * 312e12, rel=1e-3
    )


@pytest.mark.parametrize(
    ("name", "teraflops"), [("a100", 19.5), ("h100", 67.0), ("v5p", 459.0), ("v5e", 197.0)]
)
def test_float32_has_a_peak_on_every_chip(name, teraflops):
    """TPUs compute float32 in passes of bfloat16."""
    assert Device(CLUSTERS[name], 0.8, dtype="float32").peak == teraflops * 1e12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["a100", "h100", "v5p"])
def test_mfu_is_told_by_the_peak_of_a_run(name, dtype):
    device = Device(CLUSTERS[name], 0.8, dtype=dtype)
    chip = SimpleNamespace(platform="", device_kind=CLUSTERS[name].device_kind)
    assert device.logged_peak == peak_flops(chip, dtype)
    assert replace(device, said_peak=1e12).logged_peak == 1e12


def test_what_overlaps_lies_between_both_ends():
    for compute, sent in ((1.0, 0.0), (1.0, 0.2), (1.0, 1.0), (0.1, 2.0)):
        # Perfect overlap takes the longer of both, and none takes their sum
        assert max(compute, sent) <= DEVICE.together(compute, sent) <= compute + sent
    serial = Device(DEVICE.cluster, 0.8, replace(RATES, overlap=1.0))
    assert serial.together(1.0, 0.5) == 1.5


def test_a_node_does_not_wait_for_others():
    assert DEVICE.straggled(2.0, 8) == DEVICE.straggled(2.0, 1) == 2.0
    assert DEVICE.straggled(2.0, 32) == pytest.approx(2 * (1 + 2 * RATES.straggling))


def test_devices_that_share_cores_add_up():
    whole_cpu = Device(CLUSTERS["cpu"], 0.5, dtype="float32")
    eighth = whole_cpu.among(8)
    assert DEVICE.among(8) == DEVICE
    assert eighth.peak == whole_cpu.peak / 8
    assert eighth.product_rate(64, 64) == pytest.approx(whole_cpu.product_rate(64, 64) / 8)
    assert eighth.memory_seconds(1e9) == pytest.approx(8 * whole_cpu.memory_seconds(1e9))
    assert eighth.slowest([1.0, 3.0]) == 2.0 and DEVICE.slowest([1.0, 3.0]) == 3.0
    assert eighth.together(1.0, 0.5) == eighth.least_together(1.0, 0.5) == 1.5
    assert DEVICE.least_together(1.0, 0.5) == 1.0
