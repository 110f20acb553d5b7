"""Joining the processes of one run, from three environment variables that the launchers set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

import jax

COORDINATOR = "JAXMLLM_COORDINATOR"  # host:port of process 0, or "auto"
PROCESSES = "JAXMLLM_PROCESSES"
PROCESS_ID = "JAXMLLM_PROCESS_ID"
AUTO = "auto"


CPU_THREADS_PER_DEVICE = 4


def reserve_cpu_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give XLA's CPU client enough threads for the forced devices; call it before anything asks JAX for devices.

    A collective on CPU holds a thread until every device has joined it. The client has as many threads as cores or
    devices, so with more devices than cores all of them can end up waiting in different collectives, for ever. The
    client takes the number of its threads from NPROC, which is left alone where it is set.
    """
    forced = re.search(r"xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", ""))
    if forced:
        environment.setdefault("NPROC", str(CPU_THREADS_PER_DEVICE * int(forced[1])))


def start_jax(param_dtype: str) -> None:
    """All that JAX must be told before anything asks it for devices: threads, 64 bits, the processes of the run.

    Raises `LaunchError` as `initialize_distributed` does.
    """
    reserve_cpu_threads()
    jax.config.update("jax_enable_x64", param_dtype == "float64")
    initialize_distributed()


class LaunchError(ValueError):
    """Environment variables that do not describe a process of a run."""


def initialize_distributed(environment: Mapping[str, str] = os.environ) -> None:
    """Join the run that the environment describes; without its variables this is a run of one process.

    A process takes the devices visible to it (CUDA_VISIBLE_DEVICES, JAX_LOCAL_DEVICE_IDS). The coordinator `auto`
    leaves everything to JAX's own detection, which is the way of a TPU pod. Call it before anything asks JAX for
    devices. Raises `LaunchError` on partial or ill-formed variables.
    """
    if not any(environment.get(name) for name in (COORDINATOR, PROCESSES, PROCESS_ID)):
        return
    arguments = _read(environment)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's own service takes SIGTERM alone, and by C; training/signals.py agrees on a step for every signal.
    jax.config.update("jax_enable_preemption_service", False)
    if arguments is None:
        jax.distributed.initialize()
    else:
        coordinator, processes, process_id = arguments
        # Detection would pin a Slurm task to one device, whatever the number of tasks a node.
        jax.distributed.initialize(coordinator, processes, process_id, cluster_detection_method="deactivate")


def _read(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """(coordinator, processes, process id); None for automatic detection."""
    coordinator = environment.get(COORDINATOR, "")
    if coordinator == AUTO:
        extra = [name for name in (PROCESSES, PROCESS_ID) if environment.get(name)]
        if extra:
            raise LaunchError(f"{COORDINATOR}=auto finds the processes itself; unset {' and '.join(extra)}")
        return None
    missing = [name for name in (COORDINATOR, PROCESSES, PROCESS_ID) if not environment.get(name)]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} not set: a run of several processes needs {COORDINATOR} (host:port), {PROCESSES} "
            f"and {PROCESS_ID}; set them all (see launch/), or none for a run of one process"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"{COORDINATOR}={coordinator!r} must be host:port, e.g. 10.0.0.1:1234")
    processes = _integer(environment, PROCESSES, 1)
    process_id = _integer(environment, PROCESS_ID, 0)
    if process_id >= processes:
        raise LaunchError(f"{PROCESS_ID}={process_id} must be less than {PROCESSES}={processes}: ids count from 0")
    return coordinator, processes, process_id


def _integer(environment: Mapping[str, str], name: str, least: int) -> int:
    text = environment[name]
    if not text.isdecimal() or int(text) < least:
        raise LaunchError(f"{name}={text!r} must be an integer of at least {least}")
    return int(text)
