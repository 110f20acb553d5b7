"""Joining processes: the environment variables, and a real run of two processes over gloo."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmllm.config.schema import DistributedConfig
from jaxmllm.runtime import distributed
from jaxmllm.runtime.checkpoint import Checkpoints
from jaxmllm.runtime.distributed import (
    JAX_SLACK_SECONDS,
    LaunchError,
    initialize_distributed,
    start_coordinator,
)

ROOT = Path(__file__).parents[2]


def variables(coordinator: str = "", processes: str = "", process_id: str = "") -> dict[str, str]:
    """The variables of a launch; empty ones are left out."""
    values = {
        "JAXMLLM_COORDINATOR": coordinator,
        "JAXMLLM_PROCESSES": processes,
        "JAXMLLM_PROCESS_ID": process_id,
    }
    return {name: value for name, value in values.items() if value}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (variables(processes="2"), "JAXMLLM_COORDINATOR, JAXMLLM_PROCESS_ID not set"),
        (variables("host:1", "2"), "JAXMLLM_PROCESS_ID not set"),
        (variables("host", "2", "0"), "must be host:port"),
        (variables("host:99999", "2", "0"), "must be host:port"),
        (
            variables("host:1", "two", "0"),
            "JAXMLLM_PROCESSES='two' must be an integer of at least 1",
        ),
        (
            variables("host:1", "2", "-1"),
            "JAXMLLM_PROCESS_ID='-1' must be an integer of at least 0",
        ),
        (
            variables("host:1", "2", "2"),
            "JAXMLLM_PROCESS_ID=2 must be less than JAXMLLM_PROCESSES=2",
        ),
        (variables("auto", "2"), "unset JAXMLLM_PROCESSES"),
    ],
)
def test_ill_formed_variables(environment: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        initialize_distributed(environment)


def test_documents_name_the_keys_that_hosts_may_have_for_themselves() -> None:
    for document in ("launch/README.md", "docs/running.md"):
        text = (ROOT / document).read_text()
        assert all(f"`{key}`" in text for key in distributed.HOST_KEYS)


def test_how_processes_join(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *values, **options: calls.append((values, options))
    )
    monkeypatch.setattr(distributed, "_join", lambda *values: calls.append(values[:5]))
    initialize_distributed({})
    assert calls == []
    limits = DistributedConfig(start_timeout=30, peer_timeout=7)
    initialize_distributed(variables("auto"), limits)
    assert calls == [
        ((), {"initialization_timeout": 30, "heartbeat_timeout_seconds": 7 + JAX_SLACK_SECONDS})
    ]
    initialize_distributed(variables("[::1]:4321", "3", "2") | {"JAXMLLM_BIND": "10.0.0.1"})
    assert calls[1] == ("::1", 4321, 3, 2, "10.0.0.1")


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(
            LaunchError,
            match=rf"cannot listen on port {port} of 127.0.0.1 .*: Address already in use",
        ):
            start_coordinator("127.0.0.1", port, 2, 60)


def test_a_name_that_is_no_host_is_one_line() -> None:
    with pytest.raises(
        LaunchError, match=r"cannot listen on port .* of nosuchhost\.invalid"
    ) as caught:
        start_coordinator("nosuchhost.invalid", free_port(), 2, 60)
    assert "Unknown error" not in str(caught.value)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("coordinator.start_jax_service = lambda *_: 1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "it ended with code 3; run `.*` to see why"),
    ],
)
def test_a_coordinator_that_fails_is_not_a_port_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, reason: str
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(f"from jaxmllm.runtime import coordinator\n{broken}\ncoordinator.main()\n")
    monkeypatch.setattr(distributed.coordinator, "__file__", str(script))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(LaunchError, match=rf"did not start on this host \(.*\): {reason}"):
        start_coordinator("127.0.0.1", free_port(), 2, 60)


def test_detection_that_finds_nothing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(**options: Any) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    monkeypatch.setattr(jax.distributed, "initialize", nothing)
    with pytest.raises(LaunchError, match=r"JAXMLLM_COORDINATOR=auto: JAX detects no processes"):
        initialize_distributed(variables("auto"))


def test_the_coordinator_listens_where_asked_alone_and_ends_with_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "_coordinators", [])
    port = free_port()
    child = start_coordinator("127.0.0.1", port, 2, 60)
    try:
        sockets = (
            Path(f"/proc/{child.pid}/net/tcp").read_text()
            + Path(f"/proc/{child.pid}/net/tcp6").read_text()
        )
        inodes = {os.readlink(link) for link in Path(f"/proc/{child.pid}/fd").iterdir()}
        # Sockets in state 0A (listening) that belong to the coordinator, with
        # their addresses in hexadecimal
        listening = [
            line.split()[1].split(":")[0]
            for line in sockets.splitlines()
            if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes
        ]
        assert len(listening) == 2 and all(a.endswith("0100007F") for a in listening), (
            "the board and JAX's service, on 127.0.0.1"
        )
        os.kill(child.pid, signal.SIGTERM)  # as a launcher sends to all processes of a job
        os.kill(child.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.5)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()


PROGRAM = """
    import sys, time
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from orbax.checkpoint import multihost
    from jaxmllm.runtime.checkpoint import Checkpoints
    from jaxmllm.runtime.distributed import initialize_distributed
    from jaxmllm.runtime.signals import StopSignals

    initialize_distributed()
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    shardings = {"w": NamedSharding(mesh, P("fsdp")), "step": NamedSharding(mesh, P())}
    abstract = {
        "w": jax.ShapeDtypeStruct((8, 3), jnp.bfloat16, sharding=shardings["w"]),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=shardings["step"]),
    }

    def step_forward(state):
        return {"w": state["w"] + state["w"].mean() * 0 + 1, "step": state["step"] + 1}

    update = jax.jit(step_forward, out_shardings=shardings, donate_argnums=0)
    with Checkpoints(sys.argv[1], keep=1) as checkpoints, StopSignals() as stop:
        state = checkpoints.restore(abstract)
        stop.begin_training(multihost.get_jax_distributed_client(), jax.process_index(), jax.process_count())
        for step in range(int(state["step"]) + 1, 10_000):
            state = update(state)
            jax.block_until_ready(state)
            if step == 8:
                print("running", flush=True)
            time.sleep(0.01)
            if stop.should_stop():
                break
        checkpoints.save(step, state)
        checkpoints.wait()
        print("stopped", step, checkpoints.latest_step, flush=True)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_processes_resume_stop_together_and_save(tmp_path: Path) -> None:
    """Two processes continue from a checkpoint of this process; a signal to one stops both, and
    this process reads their checkpoint."""
    saved = {"w": jnp.arange(24.0, dtype=jnp.bfloat16).reshape(8, 3), "step": jnp.int32(5)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, saved)
    coordinator = f"127.0.0.1:{free_port()}"
    processes = []
    for index in range(2):
        environment = os.environ | variables(coordinator, "2", str(index))
        environment |= {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        }
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    try:
        for process in processes:
            assert process.stdout is not None
            assert "running\n" in process.stdout, "it ended before it ran"
        time.sleep(0.2)
        processes[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=60)[0].splitlines()[-1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    step = int(outputs[0].split()[1])
    assert outputs[0] == f"stopped {step} {step}" and 8 < step < 9_999

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.steps == [step]
        restored = checkpoints.restore(saved)
    assert int(restored["step"]) == step
    # Each step adds one in bfloat16, with its rounding
    expected = np.asarray(saved["w"])
    for _ in range(step - 5):
        expected = expected + jnp.bfloat16(1)
    np.testing.assert_array_equal(np.asarray(restored["w"]), expected)
