"""What layers of experts send, compute and hold, against counts by hand."""

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
    """16 experts of 256 x 128, two per token, on a mesh of the given sizes."""
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
    replicated = mixture({"data": 2, "fsdp": 4}, experts=[])
    assert replicated.token_axes == replicated.other_axes == ()
    assert (replicated.all_tokens, replicated.held) == (1024, 16)


def test_blocks_read_the_matrices_of_their_experts():
    """2,048 pairs of token and expert are 128 per expert, which is also the size of a block."""
    single = mixture({"fsdp": 1})
    assert single.block_rows == 128
    # Each expert adds half a block on average, since its last block is partly filled
    blocks = 2048 / 128 + 16 / 2
    numbers = 3 * 256 * 128
    assert single.block_traffic(1, 0, True) == blocks * numbers * 2 + 2048 * 256 * (2 + 8)
    backward = single.block_traffic(0, 1, True)
    assert backward == blocks * numbers * (2 + 8) + 2048 * 256 * (4 + 8)
    assert single.block_traffic(0, 1, False) == backward - blocks * numbers * 8


def test_devices_that_share_experts_have_the_blocks_of_one_device():
    """A device with an eighth of the experts has an eighth of the blocks for the same tokens."""
    single = mixture({"fsdp": 1})
    shared = mixture({"fsdp": 8}, tokens=128.0)
    assert shared.all_tokens == single.all_tokens
    assert shared.block_rows == single.block_rows
    assert shared.block_traffic(1, 1, True) == single.block_traffic(1, 1, True) / 8


def test_products_of_blocks_are_slower_than_others():
    single = mixture({"fsdp": 1}, tokens=8192.0)
    rates = [single.product_rate(DEVICE, 8192, 256, share) for share in (1, 0.5, 0)]
    assert rates == sorted(rates)
    assert rates[2] == DEVICE.product_rate(8192, 256)
    assert rates[0] == DEVICE.product_rate(single.block_rows, 128)


def test_more_tokens_and_trained_experts_hold_more():
    base = mixture({"fsdp": 4})
    doubled = replace(base, tokens=2048.0)
    assert doubled.held_forward() == 2 * base.held_forward()
    gradients = 4 * 4 * 3 * 256 * 128  # float32 gradients of the four experts of a device
    assert base.held_backward(True) - base.held_backward(False) == pytest.approx(gradients)
