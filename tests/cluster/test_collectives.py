"""Predicted seconds of collectives against counts by hand: bytes per link and hops."""

from __future__ import annotations

import pytest

from jaxmllm.cluster.clusters import CLUSTERS
from jaxmllm.cluster.collectives import SENT, Group, collective_seconds

H100 = CLUSTERS["h100"]
NEAR = H100.in_node
FAR = H100.between_nodes
BYTES = 1e9


def seconds(operation, group, size=BYTES, **more):
    return collective_seconds(H100, operation, size, group, **more)


def test_a_ring_in_a_node():
    # Of N devices each sends (N - 1) / N of the array around the ring; 360 GB/s is the rate of a
    # gather within an H100 node, 480 the one of a sum
    hops = 7 * NEAR.hop_seconds
    assert seconds("all-gather", Group(8)) == pytest.approx(7 / 8 * BYTES / 360e9 + hops)
    reduced = seconds("all-reduce", Group(8))
    # A sum goes up and down a tree
    assert reduced == pytest.approx(2 * 7 / 8 * BYTES / 480e9 + 12 * NEAR.hop_seconds)


def test_what_leaves_a_node_is_spread_over_its_adapters():
    hops = 63 * FAR.hop_seconds
    # Eight devices per node: their adapters carry 400 GB/s, so the 360 of the ring inside are
    # slower
    assert seconds("all-gather", Group(64)) == pytest.approx(63 / 64 * BYTES / 360e9 + hops)
    # One device per node has one adapter
    assert seconds("all-gather", Group(64, 8)) == pytest.approx(63 / 64 * BYTES / 50e9 + hops)
    # Two devices per node have two adapters
    assert seconds("all-gather", Group(64, 4)) == pytest.approx(63 / 64 * BYTES / 100e9 + hops)
    throttled = seconds("all-gather", Group(64, 8), network=0.5)
    assert throttled == pytest.approx(63 / 64 * BYTES / 25e9 + hops)


def test_an_exchange_sends_to_each_device_on_its_own():
    assert seconds("all-to-all", Group(8)) == pytest.approx(
        7 / 8 * BYTES / 360e9 + NEAR.hop_seconds
    )
    assert seconds("all-to-all", Group(16)) == pytest.approx(
        8 / 16 * BYTES / 50e9 + FAR.hop_seconds
    )


def test_a_permute_waits_for_the_neighbour_in_another_node():
    assert seconds("collective-permute", Group(4, 2)) == pytest.approx(
        BYTES / 360e9 + NEAR.hop_seconds
    )
    assert seconds("collective-permute", Group(4, 8)) == pytest.approx(
        BYTES / 50e9 + FAR.hop_seconds
    )


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=lambda cluster: cluster.name)
@pytest.mark.parametrize("operation", SENT)
def test_one_device_sends_nothing_and_more_bytes_take_longer(cluster, operation):
    assert collective_seconds(cluster, operation, BYTES, Group(1)) == 0
    for group in (Group(2), Group(8), Group(16), Group(2, 8), Group(512, 2)):
        times = [collective_seconds(cluster, operation, size, group) for size in (0, 1e6, 1e9)]
        assert times == sorted(times) and times[0] > 0 and times[1] < times[2]


def test_devices_that_share_cores_copy_one_after_another_and_meet_once():
    cpu = CLUSTERS["cpu"]
    link = cpu.in_node
    gathering = collective_seconds(cpu, "all-gather", BYTES, Group(4), sharing=8)
    # Eight devices copy three quarters of the array each, one after another, and pay one hop
    copied = 8 * 3 / 4 * BYTES / link.bytes_per_second
    assert gathering == pytest.approx(copied + link.hop_seconds)
