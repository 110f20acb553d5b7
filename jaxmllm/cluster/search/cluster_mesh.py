"""A config on devices of a cluster that need not exist."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jax.sharding import AbstractDevice, AbstractMesh

from jaxmllm.balance.costs.gather import flops_per_byte
from jaxmllm.cluster.clusters import CLUSTERS, Cluster
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.config.schema import Config
from jaxmllm.setup.spans import node_spans
from sharding.mesh import abstract_mesh


def cluster_mesh(config: Config, sizes: Mapping[str, int], cluster: Cluster) -> AbstractMesh:
    """A mesh of devices of a cluster."""
    devices = math.prod(sizes.values())
    kind = AbstractDevice(
        device_kind=cluster.device_kind, num_cores=None, platform=platform(cluster)
    )
    return abstract_mesh(sizes, devices, node_spans(config, sizes), kind)


def platform(cluster: Cluster) -> str:
    """JAX's name for the platform of a cluster's devices."""
    if cluster.shared_cores:
        return "cpu"
    return "tpu" if cluster.device_kind.startswith("TPU") else "gpu"


def with_nodes(config: Config, cluster: Cluster, devices: int) -> Config:
    """The config with the cluster's ranks per node, where it leaves them open and there are several
    nodes."""
    if config.balance.ranks_per_node != "auto" or devices <= cluster.node_devices:
        return config
    balance = config.balance.model_copy(update={"ranks_per_node": cluster.node_devices})
    return config.model_copy(update={"balance": balance})


def with_gather_price(config: Config, device: Device) -> Config:
    """The config with a price of rows that ranks share, to three digits, where it leaves that open:
    the price of a run on an H100, times the FLOPs that this device could do while a byte arrives in
    its node over those of an H100. Devices that share cores keep the price that was measured for
    them.

    Raises:
      ClusterError: the cluster has no peak.
    """
    balance = config.balance
    if (
        balance.flops_per_gathered_byte != "auto"
        or not config.may_share_rows
        or device.cluster.shared_cores
    ):
        return config
    reference = CLUSTERS["h100"]
    price = (
        flops_per_byte("gpu")
        * (device.peak * device.efficiency / device.cluster.in_node.bytes_per_second)
        / (reference.peak() * reference.efficiency.share / reference.in_node.bytes_per_second)
    )
    priced = balance.model_copy(update={"flops_per_gathered_byte": float(f"{price:.3g}")})
    return config.model_copy(update={"balance": priced})
