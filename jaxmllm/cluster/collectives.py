"""Seconds of a collective over devices of a cluster.

A ring runs through all devices of a group, those of a node one after another. Where the group has
several devices in a node, as many rings run at once, each over the network adapter of another
device; so what leaves a node is spread over these adapters, and the slower of the two links
decides. Small all-reduces take a tree, whose hops grow with the logarithm of the devices, so an
all-reduce counts the hops of a tree where these are fewer. Devices that share cores are threads:
what all of them copy adds up, and they meet once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmllm.cluster.clusters import ALL_REDUCE, Cluster
from jaxmllm.setup.hlo import SENT

if TYPE_CHECKING:
    from sharding.rules import Layout

PAIRWISE = ("all-to-all", "ragged-all-to-all")
POINT_TO_POINT = ("collective-permute", "collective-broadcast")


@dataclass(frozen=True)
class Group:
    """Devices that exchange something: `devices` of them, `stride` apart in the mesh's order."""

    devices: int
    stride: int = 1

    def in_node(self, cluster: Cluster) -> int:
        """Number of the group's devices in one node."""
        return min(self.devices, max(1, cluster.node_devices // self.stride))


def devices_along(layout: Layout, axes: Sequence[str]) -> int:
    """How many devices some mesh axes have together."""
    return math.prod(layout.mesh.shape[axis] for axis in axes)


def collective_seconds(
    cluster: Cluster,
    operation: str,
    array_bytes: float,
    group: Group,
    network: float = 1.0,
    sharing: int = 1,
) -> float:
    """Seconds of one collective.

    Args:
      operation: as XLA names it, a key of `SENT`.
      array_bytes: of the whole array, once it is gathered or before it is reduced or scattered; of
        one device's array, with its own share, in an exchange; of what it sends to its neighbour.
      network: share of the network's line rate that is reached.
      sharing: devices that share cores, in this group and others that send at the same time.
    """
    if group.devices == 1:
        return 0.0
    inside = group.in_node(cluster)
    crosses = inside < group.devices
    in_node = cluster.in_node
    between_nodes = cluster.between_nodes
    far_rate = between_nodes.rate(operation) * network
    sent = SENT[operation](group.devices) * array_bytes
    if cluster.shared_cores:
        return sent * sharing / in_node.rate(operation) + in_node.hop_seconds
    if operation in POINT_TO_POINT:
        # With neighbours in a node, only its last device sends to another node, but all wait for it
        return (
            sent / far_rate + between_nodes.hop_seconds
            if crosses
            else sent / in_node.rate(operation) + in_node.hop_seconds
        )
    if operation in PAIRWISE:
        # A device keeps its own share of the array, and sends a share to each of the others.
        to_node = array_bytes * (inside - 1) / group.devices / in_node.rate(operation)
        to_others = array_bytes * (group.devices - inside) / group.devices / far_rate
        return max(to_node, to_others) + (between_nodes if crosses else in_node).hop_seconds
    transfer = sent / in_node.rate(operation) if inside > 1 else 0.0
    if crosses:
        transfer = max(transfer, sent / (inside * far_rate))
    return (
        transfer
        + _hop_count(operation, group.devices) * (between_nodes if crosses else in_node).hop_seconds
    )


def _hop_count(operation: str, devices: int) -> float:
    ring = devices - 1
    return min(2 * ring, 4 * math.log2(devices)) if operation == ALL_REDUCE else ring
