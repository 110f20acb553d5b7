"""Chips and their links, by name or from a YAML file.

    --cluster h100          a record of `CLUSTERS`
    --cluster mine.yaml     the same keys; `like: h100` fills in the missing ones from a record,
                            `like: other.yaml` from a file, by its path from this one

Every number is a vendor's or names how it was measured. The chips' FLOP/s are in
runtime/hardware.py alone.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, Final

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from jaxmllm.config import strict_yaml
from jaxmllm.config.schema import Section
from jaxmllm.runtime.gpu_memory import TAKEN_SHARE

GB: Final = 1e9
ALL_REDUCE: Final = "all-reduce"
SUFFIXES: Final = (".yaml", ".yml")  # of a cluster's file


class ClusterError(ValueError):
    """A cluster that is unknown or badly described; the message is one line with the remedy."""


class Link(Section):
    """The link of one device to others while all devices send: bytes/s in one direction, and
    seconds per hop.

    `bytes_per_second` holds for rings and single transfers, `reduced_per_second` for an all-reduce,
    in bytes that a ring would send (NCCL's bus bandwidth): with a switch that adds up, devices send
    fewer.
    """

    bytes_per_second: PositiveFloat
    reduced_per_second: PositiveFloat
    hop_seconds: float = Field(ge=0)

    def rate(self, operation: str) -> float:
        """Bytes/s of a collective, in bytes that a ring would send."""
        return self.reduced_per_second if operation == ALL_REDUCE else self.bytes_per_second


class Efficiency(Section):
    """The share of the peak that a device's large matrix products reach in training: the mean over
    systems, and the half width of the interval that holds most of them, as a share of the mean."""

    share: float = Field(gt=0, le=1)
    uncertainty: float = Field(ge=0, lt=1)


class Cluster(Section):
    """One kind of chip and what connects its devices."""

    name: str
    # The chip's name in JAX, by which runtime/hardware.py lists its peaks
    device_kind: str = ""
    # FLOP/s in bfloat16, in place of the figure in that table. Other types keep the ratio that the
    # table gives them; those of a chip that it does not list are as fast as bfloat16
    peak_flops: PositiveFloat | None = None
    memory: PositiveFloat  # bytes
    taken_share: float = Field(default=TAKEN_SHARE, gt=0, le=1)  # share of memory that a run takes
    memory_bandwidth: PositiveFloat  # bytes/s
    node_devices: PositiveInt  # devices that `in_node` connects
    in_node: Link
    between_nodes: Link
    efficiency: Efficiency
    # Seconds that a tick of pipeline stages takes in addition to its operations, unless
    # `pipeline.flops_per_tick` gives them
    tick_seconds: float = Field(default=0.0, ge=0)
    # Whether devices are threads of one processor: peak, bandwidths and links are then those of all
    # devices together
    shared_cores: bool = False
    price_per_hour: PositiveFloat | None = None  # per device, in any currency
    source: str

    @property
    def budget(self) -> float:
        """Bytes that a run may take."""
        return self.memory * self.taken_share

    def peak(self, dtype: str = "bfloat16") -> float:
        """FLOP/s of matrix products whose operands are computed in `dtype`.

        Raises:
          ClusterError: neither the table nor the record has a figure.
        """
        # Imported here because hardware.py imports jax
        from jaxmllm.runtime.hardware import table_flops

        flops, bfloat16 = (table_flops(self.device_kind, name) for name in (dtype, "bfloat16"))
        if self.peak_flops is not None:
            return self.peak_flops * (flops / bfloat16 if flops and bfloat16 else 1)
        if flops is None:
            raise ClusterError(
                f"cluster {self.name}: no peak for {dtype} on {self.device_kind or 'it'}; give peak_flops"
            )
        return flops


# ---------------------------------------------------------------------------- records

# A ring loses about 20 % of NVLink's line rate to the protocol (github.com/NVIDIA/nccl-tests, issue
# 212: 450 GB/s give 370, and 480 where the switch adds up). What networks lose is one of the fitted
# constants.
RING_SHARE: Final = 0.8
# Seconds of a ring's step with NCCL's simple protocol, from NCCL's own model: src/graph/tuning.cc
NVLINK_HOP: Final = 3.4e-6
NETWORK_HOP: Final = 14e-6
TORUS_HOP: Final = 1e-6  # per hop of TPUs' links, jax-ml.github.io/scaling-book


def _nvlink(line_rate: float, reduced: float | None = None) -> Link:
    ring = RING_SHARE * line_rate
    return Link(bytes_per_second=ring, reduced_per_second=reduced or ring, hop_seconds=NVLINK_HOP)


def _network(bytes_per_second: float) -> Link:
    return Link(
        bytes_per_second=bytes_per_second,
        reduced_per_second=bytes_per_second,
        hop_seconds=NETWORK_HOP,
    )


def _torus(bytes_per_second: float) -> Link:
    return Link(
        bytes_per_second=bytes_per_second,
        reduced_per_second=bytes_per_second,
        hop_seconds=TORUS_HOP,
    )


# Fitted by `python -m benchmarks.planner`, which prints them, to published runs of several systems
# on the chip
ON_H100: Final = Efficiency(share=0.83, uncertainty=0.25)
ON_A100: Final = Efficiency(share=0.82, uncertainty=0.25)
# For chips without a published run that we know of: the median over systems on all chips
UNKNOWN: Final = Efficiency(share=0.81, uncertainty=0.35)

H100: Final = Cluster(
    name="h100",
    device_kind="NVIDIA H100 80GB HBM3",
    memory=80 * GB,
    memory_bandwidth=3350 * GB,
    node_devices=8,
    in_node=_nvlink(450 * GB, reduced=480 * GB),
    between_nodes=_network(50 * GB),
    efficiency=ON_H100,
    source="NVIDIA H100 SXM datasheet; DGX H100 user guide: 18 NVLinks, 8 adapters of 400 Gb/s",
)
A100: Final = Cluster(
    name="a100",
    device_kind="NVIDIA A100-SXM4-80GB",
    memory=80 * GB,
    memory_bandwidth=2039 * GB,
    node_devices=8,
    in_node=_nvlink(300 * GB),
    between_nodes=_network(25 * GB),
    efficiency=ON_A100,
    source="NVIDIA A100 SXM datasheet; DGX A100 user guide: 12 NVLinks, 8 adapters of 200 Gb/s",
)
CLUSTERS: Final = {
    cluster.name: cluster
    for cluster in (
        H100,
        H100.model_copy(
            update={
                "name": "h100-500w",
                "efficiency": Efficiency(share=0.69, uncertainty=0.25),
                "source": f"as h100, held at 500 W (github.com/pytorch/torchtitan benchmarks); {H100.source}",
            }
        ),
        H100.model_copy(
            update={
                "name": "h200",
                "device_kind": "NVIDIA H200",
                "memory": 141 * GB,
                "memory_bandwidth": 4800 * GB,
                "source": f"NVIDIA H200 SXM datasheet; links of h100: {H100.source}",
            }
        ),
        A100,
        A100.model_copy(
            update={
                "name": "a100-40",
                "device_kind": "NVIDIA A100-SXM4-40GB",
                "memory": 40 * GB,
                "memory_bandwidth": 1555 * GB,
                "efficiency": Efficiency(share=0.81, uncertainty=0.25),
            }
        ),
        Cluster(
            name="b200",
            device_kind="NVIDIA B200",
            memory=180 * GB,
            memory_bandwidth=8000 * GB,
            node_devices=8,
            in_node=_nvlink(900 * GB),
            between_nodes=_network(50 * GB),
            efficiency=UNKNOWN,
            source="NVIDIA HGX B200 datasheet, a board's figures / 8; DGX B200: 8 adapters of 400 Gb/s",
        ),
        # A TPU's node is a slice. A ring runs both ways over one dimension of the torus at a time.
        Cluster(
            name="v5e",
            device_kind="TPU v5 lite",
            memory=16 * GB,
            memory_bandwidth=819 * GB,
            node_devices=256,
            in_node=_torus(100 * GB),
            between_nodes=_network(3.1 * GB),
            efficiency=UNKNOWN,
            source="Cloud TPU v5e: 400 GB/s a chip both ways over two dimensions, 6.4 Tb/s a pod of 256 chips",
        ),
        Cluster(
            name="v5p",
            device_kind="TPU v5",
            memory=95 * GB,
            memory_bandwidth=2765 * GB,
            node_devices=8960,
            in_node=_torus(200 * GB),
            between_nodes=_network(6.25 * GB),
            efficiency=UNKNOWN,
            source="Cloud TPU v5p: 1,200 GB/s a chip both ways over three dimensions, 50 Gb/s a chip between pods",
        ),
        Cluster(
            name="v6e",
            device_kind="TPU v6 lite",
            memory=32 * GB,
            memory_bandwidth=1640 * GB,
            node_devices=256,
            in_node=_torus(200 * GB),
            between_nodes=_network(12.5 * GB),
            efficiency=UNKNOWN,
            source="Cloud TPU v6e: 800 GB/s a chip both ways over two dimensions, 25.6 Tb/s a pod of 256 chips",
        ),
        # Forced devices of a host with two cores of an AMD EPYC. Only measured steps give better
        # numbers (fitting.py).
        Cluster(
            name="cpu",
            peak_flops=200e9,
            memory=8 * GB,  # per device
            memory_bandwidth=10 * GB,
            node_devices=1 << 20,
            in_node=Link(bytes_per_second=5 * GB, reduced_per_second=5 * GB, hop_seconds=500e-6),
            between_nodes=Link(
                bytes_per_second=0.1 * GB, reduced_per_second=0.1 * GB, hop_seconds=500e-6
            ),
            efficiency=Efficiency(share=0.5, uncertainty=0.9),
            shared_cores=True,
            source="orders of magnitude, for tests of the planner: fit them to measured steps (fitting.py)",
        ),
    )
}


# ---------------------------------------------------------------------------- finding one


def cluster_of(name_or_file: str) -> Cluster:
    """The record of a name, or of a YAML file if the name ends in .yaml or .yml.

    Raises:
      ClusterError: there is no such record, or the file does not describe one.
    """
    return _resolve(name_or_file, ())


def _resolve(name_or_file: str, readers: tuple[Path, ...]) -> Cluster:
    """`cluster_of`, for a name in `like` of the last of `readers` (resolved paths), if any."""
    if name_or_file.endswith(SUFFIXES):
        return _read_cluster(Path(name_or_file), readers)
    if name_or_file not in CLUSTERS:
        matches = difflib.get_close_matches(name_or_file, CLUSTERS, 1)
        suggestion = f"; did you mean {matches[0]}?" if matches else "."
        raise ClusterError(
            f"there is no cluster {name_or_file!r}{suggestion} Clusters: {', '.join(CLUSTERS)}, or a .yaml file"
        )
    return CLUSTERS[name_or_file]


def _read_cluster(path: Path, readers: tuple[Path, ...]) -> Cluster:
    """The record of a YAML file, completed from the record or file in its `like`."""
    readers = (*readers, path.resolve())
    if readers[-1] in readers[:-1]:
        raise ClusterError(
            f"cluster file {path}: like: it would take from itself; name one of {', '.join(CLUSTERS)}, or another file"
        )
    try:
        tree = strict_yaml.read_file(path)
    except strict_yaml.YamlError as error:
        raise ClusterError(f"cluster file {path} {error}") from error
    if not isinstance(tree, dict):
        raise ClusterError(f"cluster file {path} must hold a mapping of the keys of a cluster")
    like = tree.pop("like", None)
    base: dict[str, Any] = {}
    if like is not None:
        beside = path.parent / str(like)
        base = _resolve(str(beside if beside.suffix in SUFFIXES else like), readers).model_dump()
    try:
        # JSON mode is strict about types, but takes a whole number for a float
        return Cluster.model_validate_json(json.dumps(_merge(base, {"name": path.stem} | tree)))
    except ValidationError as error:
        first_error = error.errors()[0]
        key = ".".join(map(str, first_error["loc"]))
        raise ClusterError(f"cluster file {path}: {key}: {first_error['msg']}") from error


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `changes` replaced, in nested mappings one by one."""
    merged = dict(base)
    for key, value in changes.items():
        replaced = base.get(key)
        if isinstance(value, dict) and isinstance(replaced, dict):
            merged[key] = _merge(replaced, value)
        else:
            merged[key] = value
    return merged
