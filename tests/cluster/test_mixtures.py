"""What experts send, compute and hold, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxmllm.cluster.clusters import CLUSTERS
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.cluster.mixtures import Mixture
from sharding.mesh import abstract_mesh
from sharding.rules import make_layout

DEVICE = Device(CLUSTERS["h100"], 0.8)


def mixture(sizes, tokens=1024.0, **layout):
    devices = 1
    for size in sizes.values():
        devices *= size
    sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | sizes
    mesh = abstract_mesh(sizes, devices)
    return Mixture(
        count=16,
        per_token=2,
        width=256,
        mlp_width=128,
        layout=make_layout(mesh, layout),
        tokens=tokens,
        itemsize=2,
    )


def test_devices_that_share_experts_gather_their_tokens():
    shared = mixture({"data": 2, "fsdp": 4, "tensor": 2})
    assert (shared.token_axes, shared.other_axes) == (("fsdp",), ("tensor",))
    assert (shared.all_tokens, shared.held) == (4096, 4)
    tokens = 4096 * 256 * 2
    weights = 4096 * 2 * 4
    assert shared.forward == ((tokens, weights), 4096 * 2 * 4, (tokens,))
    assert shared.backward == ((tokens, tokens, weights), 4096 * 2 * 4, (tokens, weights))


def test_experts_that_every_device_has_send_nothing():
    alone = mixture({"data": 2, "fsdp": 4}, experts=[])
    assert alone.token_axes == alone.other_axes == ()
    assert (alone.all_tokens, alone.held) == (1024, 16)


def test_blocks_read_the_matrices_of_their_experts():
    """2,048 pairs are 128 of each of 16 experts; and so has a block."""
    alone = mixture({"fsdp": 1})
    assert alone.block_rows == 128
    blocks = 2048 / 128 + 16 / 2
    numbers = 3 * 256 * 128
    assert alone.block_traffic(1, 0, True) == blocks * numbers * 2 + 2048 * 256 * (2 + 8)
    backward = alone.block_traffic(0, 1, True)
    assert backward == blocks * numbers * (2 + 8) + 2048 * 256 * (4 + 8)
    assert alone.block_traffic(0, 1, False) == backward - blocks * numbers * 8


def test_products_of_blocks_are_slower_than_others():
    alone = mixture({"fsdp": 1}, tokens=8192.0)
    rates = [alone.product_rate(DEVICE, 8192, 256, share) for share in (1, 0.5, 0)]
    assert rates == sorted(rates)
    assert rates[2] == DEVICE.product_rate(8192, 256)
    assert rates[0] == DEVICE.product_rate(alone.block_rows, 128)


def test_more_tokens_and_trained_experts_hold_more():
    few = mixture({"fsdp": 4})
    many = replace(few, tokens=2048.0)
    assert many.held_forward() == 2 * few.held_forward()
    gradients = 4 * 4 * 3 * 256 * 128  # of four own experts in float32
    assert few.held_backward(True) - few.held_backward(False) == pytest.approx(gradients)
