"""Join the processes of one run, which launchers describe in environment variables.

process 0 starts the coordinator --> all meet at its board, compare config and versions --> jax.distributed
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import jax

from jaxmllm.config.read import config_tree, dotted_values
from jaxmllm.config.schema import Config, DistributedConfig
from jaxmllm.runtime import coordinator, hosts
from jaxmllm.runtime.board import Board, HostsError, RemoteBoard, gather
from jaxmllm.runtime.compilation_cache import keep_programs
from jaxmllm.runtime.gpu_memory import take_gpu_memory

COORDINATOR = "JAXMLLM_COORDINATOR"  # host:port of process 0, or "auto"
PROCESSES = "JAXMLLM_PROCESSES"
PROCESS_ID = "JAXMLLM_PROCESS_ID"
BIND = "JAXMLLM_BIND"  # address that process 0 listens on
# Exit code after a signal; 0 tells some schedulers that the run is complete
STOPPED_CODE = "JAXMLLM_STOPPED_CODE"
AUTO = "auto"
LOOPBACK = ("localhost", "127.0.0.1", "::1")

COORDINATOR_SECONDS = 60.0  # time limit for the start of the coordinator
# Added to JAX's own time limits, because JAX ends processes with pages of text when a peer is
# silent for that long: the watchdog must come first.
JAX_SLACK_SECONDS = 120
PACKAGES = ("jax", "jaxlib", "numpy", "numba", "flax", "optax", "orbax-checkpoint", "grain")
# Keys that may differ between hosts: where each keeps its data, and how fast it reads them
HOST_KEYS = (
    "data.root",
    "data.index_cache",
    "data.workers",
    "data.prefetch",
    "run.compilation_cache",
)


CPU_THREADS_PER_DEVICE = 4


def reserve_cpu_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give XLA's CPU client enough threads for the forced devices; call it before anything asks JAX
    for devices.

    A collective on CPU holds a thread until every device has joined it. The client has as many
    threads as cores or devices, so with more devices than cores all threads can end up waiting in
    different collectives, for ever. The client reads the number of its threads from NPROC, which is
    left as it is if set.
    """
    forced = re.search(
        r"xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", "")
    )
    if forced:
        environment.setdefault("NPROC", str(CPU_THREADS_PER_DEVICE * int(forced[1])))


def start_jax(config: Config) -> None:
    """Set up JAX before anything asks it for devices: threads, memory, 64 bits, the processes of
    the run, and where it keeps compiled programs.

    Raises `LaunchError` and `HostsError` as `initialize_distributed` does.
    """
    reserve_cpu_threads()
    take_gpu_memory()
    jax.config.update("jax_enable_x64", config.run.param_dtype == "float64")
    initialize_distributed(limits=config.distributed, facts=facts_of(config))
    keep_programs(config)


class LaunchError(ValueError):
    """Environment variables describe no process of a run, or one that cannot be started."""


def initialize_distributed(
    environment: Mapping[str, str] = os.environ,
    limits: DistributedConfig | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Join the run that the environment describes; without its variables, a run of one process.

    A process takes the devices visible to it (CUDA_VISIBLE_DEVICES, JAX_LOCAL_DEVICE_IDS). The
    coordinator `auto` leaves everything to JAX's own detection, which is meant for TPU pods. Call
    this before anything asks JAX for devices. `facts` must be equal on all processes. Raises
    `LaunchError` on partial or ill-formed variables and on a port that is in use, `HostsError` when
    processes are missing after `limits.start_timeout` or have other facts.
    """
    if not any(environment.get(name) for name in (COORDINATOR, PROCESSES, PROCESS_ID)):
        return
    limits = limits or DistributedConfig()
    address = _read_address(environment)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's own service handles only SIGTERM, with a C handler; runtime/signals.py agrees on a step
    # for every signal instead.
    jax.config.update("jax_enable_preemption_service", False)
    if address is None:
        _join_detected(limits, facts or {})
    else:
        _join(*address, environment.get(BIND), limits, facts or {})


def stopped_code(environment: Mapping[str, str] = os.environ) -> int:
    """Exit code of a run that saved a checkpoint because a signal stopped it."""
    if not environment.get(STOPPED_CODE):
        return 0
    code = _read_integer(environment, STOPPED_CODE, 0)
    if code > 255:
        raise LaunchError(f"{STOPPED_CODE}={code} must be at most 255")
    return code


def facts_of(config: Config) -> dict[str, str]:
    """Facts that must be equal on all processes before anything is read: the config by dotted key,
    versions, and the code."""
    facts = {
        key: repr(value)
        for key, value in dotted_values(config_tree(config))
        if key not in HOST_KEYS
    }
    facts["Python's version"] = platform.python_version()
    for package in PACKAGES:
        facts[f"{package}'s version"] = importlib.metadata.version(package)
    facts["the code of jaxmllm and sharding"] = _code_digest()
    return facts


def _code_digest() -> str:
    root = Path(__file__).parents[2]
    files = sorted(
        path for package in ("jaxmllm", "sharding") for path in (root / package).rglob("*.py")
    )
    return hosts.digest_of([(str(path.relative_to(root)), path.read_bytes()) for path in files])


def _join(
    host: str,
    port: int,
    processes: int,
    process: int,
    bind: str | None,
    limits: DistributedConfig,
    facts: Mapping[str, str],
) -> None:
    heartbeat_seconds = int(limits.peer_timeout) + JAX_SLACK_SECONDS
    if process == 0:
        start_coordinator(
            bind or (host if host in LOOPBACK else ""), port, processes, heartbeat_seconds
        )
    board = RemoteBoard((host, port), process, limits.start_timeout)
    titles = _meet(board, process, processes, socket.gethostname(), f"{host}:{port}", limits)
    # From here on the coordinator has been reached, so its silence counts as that of process 0.
    board.patience_seconds = limits.peer_timeout
    hosts.joined(hosts.Hosts(process, titles, board, limits.start_timeout, limits.peer_timeout))
    hosts.compare(
        "config, code and versions",
        lambda: facts,
        "Give all hosts the same config, code and versions",
    )
    jax_port = dict(board.key_value_dir_get("jax/"))["jax/port"]
    jax.distributed.initialize(
        f"[{host}]:{jax_port}" if ":" in host else f"{host}:{jax_port}",
        processes,
        process,
        # Detection would pin a Slurm task to one device, however many tasks a node has.
        cluster_detection_method="deactivate",
        initialization_timeout=int(limits.start_timeout),
        heartbeat_timeout_seconds=heartbeat_seconds,
        shutdown_timeout_seconds=heartbeat_seconds,
        # The service that JAX starts at this address stays idle: processes use the coordinator's
        # service, which outlives process 0.
        coordinator_bind_address="127.0.0.1:0",
    )


def _meet(
    board: Board,
    process: int,
    processes: int,
    name: str,
    coordinator_address: str,
    limits: DistributedConfig,
) -> tuple[str, ...]:
    """Wait for all processes and return their host names."""
    board.key_value_set(f"here/{process}", json.dumps([name, processes]), True)

    def missing(absent: list[int]) -> str:
        several = len(absent) > 1
        noun = "processes" if several else "process"
        verb = "have" if several else "has"
        shown = ", ".join(map(str, absent[: hosts.SHOWN]))
        return (
            f"{noun} {shown} of {processes} {verb} not started within {limits.start_timeout:.0f} s: start all with "
            f"{COORDINATOR}={coordinator_address}, or raise distributed.start_timeout"
        )

    told_by_process = {
        p: json.loads(told)
        for p, told in gather(board, "here", processes, limits.start_timeout, missing).items()
    }
    # Checked before hosts are looked up by number: a process that was told a larger count may have
    # a number beyond this one.
    for told_process, (host, told_processes) in sorted(told_by_process.items()):
        if told_processes != processes:
            raise HostsError(
                f"process {told_process} ({host}) was told {PROCESSES}={told_processes}, process {process} ({name}) "
                f"{processes}: give all the same number"
            )
    return tuple(told_by_process[p][0] for p in range(processes))


def _join_detected(limits: DistributedConfig, facts: Mapping[str, str]) -> None:
    """Join the processes that JAX detects; the key-value store of its coordinator is the board."""
    try:
        jax.distributed.initialize(
            initialization_timeout=int(limits.start_timeout),
            heartbeat_timeout_seconds=int(limits.peer_timeout) + JAX_SLACK_SECONDS,
        )
    except ValueError as error:
        raise LaunchError(
            f"{COORDINATOR}={AUTO}: JAX detects no processes of a run here ({error}); that is for TPU pods and the "
            f"like, elsewhere set {COORDINATOR} (host:port), {PROCESSES} and {PROCESS_ID} (see launch/)"
        ) from error
    from orbax.checkpoint import multihost

    if jax.process_count() == 1:
        return
    board = multihost.get_jax_distributed_client()
    titles = _meet(
        board, jax.process_index(), jax.process_count(), socket.gethostname(), AUTO, limits
    )
    hosts.joined(
        hosts.Hosts(jax.process_index(), titles, board, limits.start_timeout, limits.peer_timeout)
    )
    hosts.compare(
        "config, code and versions",
        lambda: facts,
        "Give all hosts the same config, code and versions",
    )


def start_coordinator(
    bind: str, port: int, processes: int, heartbeat_seconds: int
) -> subprocess.Popen[bytes]:
    """Start the coordinator, which ends by itself after this process. Raises `LaunchError` if it
    cannot listen or fails."""
    command = [
        sys.executable,
        "-P",
        coordinator.__file__,
        bind,
        str(port),
        str(processes),
        str(heartbeat_seconds),
    ]
    # Signals to this process's group must not end the coordinator, so they are blocked while it is
    # started: it inherits the mask.
    blocked = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], COORDINATOR_SECONDS)
    line = child.stdout.readline() if ready else b""
    answer = json.loads(line) if line else {}
    if "jax_port" not in answer:
        if line or not ready:
            child.kill()
        code = child.wait()
        if "error" not in answer:
            silent = (
                f"it ended with code {code}" if ready else f"not within {COORDINATOR_SECONDS:.0f} s"
            )
            reason = answer.get("crash", f"{silent}; run `{shlex.join(command)}` to see why")
            raise LaunchError(
                f"the coordinator did not start on this host ({socket.gethostname()}): {reason}"
            )
        raise LaunchError(
            f"the coordinator cannot listen on port {port} of {bind or 'this host'} ({socket.gethostname()}): "
            f"{answer['error']}; choose a free port in {COORDINATOR}"
            + (f", or another {BIND}" if bind else "")
        )
    _coordinators.append(child)
    return child


_coordinators: list[
    subprocess.Popen[bytes]
] = []  # kept, because a coordinator ends when the pipe to it is closed


def _read_address(environment: Mapping[str, str]) -> tuple[str, int, int, int] | None:
    """(host, port, processes, process id) from the environment; None for automatic detection."""
    address = environment.get(COORDINATOR, "")
    if address == AUTO:
        extra = [name for name in (PROCESSES, PROCESS_ID) if environment.get(name)]
        if extra:
            raise LaunchError(
                f"{COORDINATOR}=auto finds the processes itself; unset {' and '.join(extra)}"
            )
        return None
    missing = [name for name in (COORDINATOR, PROCESSES, PROCESS_ID) if not environment.get(name)]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} not set: a run of several processes needs {COORDINATOR} (host:port), {PROCESSES} "
            f"and {PROCESS_ID}; set them all (see launch/), or none for a run of one process"
        )
    # Split at the last colon, because an IPv6 host, in brackets, has colons, too.
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"{COORDINATOR}={address!r} must be host:port, e.g. 10.0.0.1:1234")
    processes = _read_integer(environment, PROCESSES, 1)
    process_id = _read_integer(environment, PROCESS_ID, 0)
    if process_id >= processes:
        raise LaunchError(
            f"{PROCESS_ID}={process_id} must be less than {PROCESSES}={processes}: ids count from 0"
        )
    return host.strip("[]"), int(port), processes, process_id


def _read_integer(environment: Mapping[str, str], name: str, minimum: int) -> int:
    text = environment[name]
    if not text.isdecimal() or int(text) < minimum:
        raise LaunchError(f"{name}={text!r} must be an integer of at least {minimum}")
    return int(text)
