"""Devices of machines that are not there, as XLA's compilers describe them: for compiling only.

The compiler of a chip comes in a package: a GPU's in that of JAX's CUDA plugin, without CUDA
itself, a TPU's in libtpu. `cpu` is this machine's own processor, with as many devices as are asked
for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import jax
import jaxlib
from jax.experimental import topologies

INSTALL = "pip install 'jaxmllm[ahead]'"
# Near the limit of a device's memory XLA silently computes again what it could keep, which hides
# how much a program needs. So programs are compiled as if a device had this much memory.
UNLIMITED_BYTES = 1 << 46
CPU_DEVICES = "--xla_force_host_platform_device_count"
MEMORY_SIZE = re.compile(r"(device_memory_size:) \d+")

# An H100 with 80 GB, as XLA's GPU compiler needs it described (its GpuTargetConfigProto as text)
H100 = """\
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class ChipError(ValueError):
    """A chip that is not known, or whose compiler is not installed."""


@dataclass(frozen=True)
class Chip:
    """A kind of device that programs are compiled for."""

    name: str
    platform: str  # of JAX: cuda, tpu, cpu
    device_kind: str = ""  # as JAX names it
    devices_per_host: int = 0  # 0: all devices are on this host
    packages: tuple[str, ...] = ()  # any one of them holds the compiler
    target: str = ""  # text that describes a GPU to its compiler
    dimensions: int = 0  # of a TPU's torus
    compiler_options: Mapping[str, str | bool] = field(default_factory=dict)


# What libtpu would otherwise look up on a TPU machine, and complain because it is not on one
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "true",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
}
# The wheel that brings each package
CUDA_PLUGINS = {
    "jax_plugins.xla_cuda12": "jax-cuda12-pjrt",
    "jax_plugins.xla_cuda13": "jax-cuda13-pjrt",
}
NUMBERS = re.compile(r"\d+(?:\.\d+)*")  # of a version, before any suffix that marks a build
# Kernels are not timed, because there is no device to time them on. Products are cuBLAS's, because
# since jax 0.11 XLA has no tiles for products of its own that it has not timed
UNTIMED: dict[str, str | bool] = {
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": False,
}
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "h100",
            "cuda",
            "NVIDIA H100 80GB HBM3",
            8,
            tuple(CUDA_PLUGINS),
            target=H100,
            compiler_options=UNTIMED,
        ),
        Chip("v5p", "tpu", "TPU v5", 4, ("libtpu",), dimensions=3),
        Chip("v6e", "tpu", "TPU v6 lite", 4, ("libtpu",), dimensions=2),
        Chip("cpu", "cpu"),
    )
}


def chip_of(name: str) -> Chip:
    """The chip of a name.

    Raises:
      ChipError: there is none.
    """
    if name not in CHIPS:
        raise ChipError(f"there is no chip {name!r}; chips: {', '.join(CHIPS)}")
    return CHIPS[name]


def chip_devices(chip: Chip, count: int) -> Sequence[jax.Device]:
    """`count` devices of a chip, to compile for; only those of `cpu` can run anything.

    Call it before anything else makes JAX look for devices: `cpu` sets how many JAX will find.

    Raises:
      ChipError: its compiler is not installed or is of another version, or there are no machines of
        so many devices.
    """
    if chip.platform == "cpu":
        return _cpu_devices(count)
    if not any(map(_installed, chip.packages)):
        raise ChipError(
            f"compiling for {chip.name} needs {' or '.join(chip.packages)}: {_install_command(chip)}"
        )
    options: dict[str, str] = {}
    name = chip.name
    if chip.platform == "cuda":
        _check_version(chip)
        target = MEMORY_SIZE.sub(rf"\1 {UNLIMITED_BYTES}", chip.target)
        options = {"target_config": target, "topology": _gpu_topology(chip, count)}
    else:
        name = f"{chip.name}:{_torus(chip, count)}"
        for variable, value in NO_TPU.items():
            os.environ.setdefault(variable, value)
    try:
        # The topology's name comes before the platform; TPUs have no other options
        topology = topologies.get_topology_desc(name, chip.platform, **options)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ChipError(
            f"compiling for {count} devices of {chip.name} with jax {jax.__version__}: {reason}; "
            f"install its compiler anew: {_install_command(chip)}"
        ) from error
    return topology.devices


def _install_command(chip: Chip) -> str:
    return INSTALL if chip.platform == "cuda" else "pip install 'jaxmllm[tpu]'"


def _check_version(chip: Chip) -> None:
    """Raise `ChipError` where a plugin's version is not jaxlib's: JAX would only warn, and leave
    out parts of the plugin."""
    for package in filter(_installed, chip.packages):
        wheel = CUDA_PLUGINS[package]
        version = _version(wheel)
        if version is not None and _release(version) != _release(jaxlib.__version__):
            raise ChipError(
                f"compiling for {chip.name} needs {wheel} of jaxlib's version, {jaxlib.__version__}, not {version}: "
                f"{_install_command(chip)}"
            )


def _version(wheel: str) -> str | None:
    """Version of an installed wheel; none for a package that was built from source."""
    try:
        return importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> str:
    match = NUMBERS.match(version)
    return match[0] if match else version


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def _cpu_devices(count: int) -> Sequence[jax.Device]:
    if CPU_DEVICES not in os.environ.get("XLA_FLAGS", ""):  # JAX takes either, not both
        with suppress(RuntimeError):  # JAX has its devices already
            jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ChipError(
            f"this process has {len(devices)} CPU devices, not {count}; raise {CPU_DEVICES} of "
            "XLA_FLAGS, or leave it out"
        )
    return devices[:count]


def _gpu_topology(chip: Chip, count: int) -> str:
    """SLICES x HOSTS x DEVICES per host: one slice, because all hosts are in one network."""
    if count <= chip.devices_per_host:
        return f"1x1x{count}"
    hosts, remainder = divmod(count, chip.devices_per_host)
    if remainder:
        raise ChipError(
            f"{count} devices of {chip.name} are no whole hosts of {chip.devices_per_host}; say {count - remainder} or "
            f"{count - remainder + chip.devices_per_host}"
        )
    return f"1x{hosts}x{chip.devices_per_host}"


def _torus(chip: Chip, count: int) -> str:
    """Sides of a TPU slice, as equal as powers of two allow: 2x2x4 for 16 chips of a v5p."""
    power = count.bit_length() - 1
    if count < chip.devices_per_host or count != 1 << power:
        raise ChipError(
            f"{count} devices of {chip.name}: a slice has a power of two, {chip.devices_per_host} or more"
        )
    sides = sorted(
        1 << (power + dimension) // chip.dimensions for dimension in range(chip.dimensions)
    )
    # One host of four chips is 2x2x1
    return "x".join(map(str, sides if count > 4 else reversed(sides)))
