"""The launcher of processes on one machine: their environment, output, signals and ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.local import main, process_environment, run_local

ROOT = Path(__file__).parents[2]
NAMES = (
    "JAXMLLM_COORDINATOR",
    "JAXMLLM_PROCESSES",
    "JAXMLLM_PROCESS_ID",
    "JAX_PLATFORMS",
    "XLA_FLAGS",
)


def python(code: str, *arguments: object) -> list[str]:
    """The command that runs some Python code."""
    return [sys.executable, "-c", code, *map(str, arguments)]


def wait_for(path: Path) -> str:
    """The text of a file, once it is written."""
    deadline = time.monotonic() + 45
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} was never written"
        time.sleep(0.02)
    return path.read_text()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_environment_keeps_other_flags_and_replaces_the_device_count():
    base = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8", "HOME": "/h"}
    environment = process_environment(base, 1, 2, 4, "127.0.0.1:7")
    assert environment["XLA_FLAGS"].split() == [
        "--xla_a=1",
        "--xla_force_host_platform_device_count=4",
    ]
    assert environment["HOME"] == "/h"
    assert base["XLA_FLAGS"].endswith("=8")


def test_every_process_is_told_who_it_is_and_its_lines_carry_its_number(capfd):
    code = f"import json, os; print(json.dumps([os.environ[n] for n in {NAMES!r}])); print('no newline', end='')"
    assert main(["--processes", "2", "--devices", "3", "--", *python(code)]) == 0
    lines = capfd.readouterr().out.splitlines()
    variables = {line[:3]: json.loads(line[4:]) for line in lines if "no newline" not in line}
    assert sorted(variables) == ["[0]", "[1]"]
    for process, (coordinator, processes, process_id, platform, flags) in enumerate(
        variables[key] for key in sorted(variables)
    ):
        assert (processes, process_id, platform) == ("2", str(process), "cpu")
        assert "--xla_force_host_platform_device_count=3" in flags.split()
        assert coordinator.startswith("127.0.0.1:") and int(coordinator.split(":")[1]) > 0
    assert variables["[0]"][0] == variables["[1]"][0]
    assert sorted(line for line in lines if "no newline" in line) == [
        "[0] no newline",
        "[1] no newline",
    ]


def test_processes_end_where_nobody_reads_what_they_print():
    printing = python("for line in range(20_000): print(line, flush=True)")
    command = [sys.executable, "-m", "launch.local", "--processes", "2", "--", *printing]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert launcher.stdout.readline().endswith("] 0\n")
        launcher.stdout.close()
        try:
            assert launcher.wait(timeout=45) == 0
        finally:
            launcher.kill()
        assert launcher.stderr.read() == ""


def test_a_failure_ends_the_others_and_gives_the_exit_code(tmp_path):
    code = (
        "import os, pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "if os.environ['JAXMLLM_PROCESS_ID'] == '0':\n"
        "    (folder / 'pid').write_text(str(os.getpid())); time.sleep(60); (folder / 'outlived').touch()\n"
        "while not (folder / 'pid').exists(): time.sleep(0.02)\n"
        "sys.exit(7)\n"
    )
    assert run_local(python(code, tmp_path), processes=2, devices=1) == 7
    assert not (tmp_path / "outlived").exists()
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_death_by_signal_counts_as_in_a_shell(capfd):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run_local(python(code), processes=1, devices=1) == 128 + signal.SIGKILL
    assert (
        capfd.readouterr().err == "process 0 was ended by signal 9 (Killed); the others end, too\n"
    )


def test_a_process_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.local.GRACE", 0.3)
    code = (
        "import os, pathlib, signal, sys, time\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "if os.environ['JAXMLLM_PROCESS_ID'] == '0':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    (folder / 'pid').write_text(str(os.getpid())); time.sleep(60); (folder / 'outlived').touch()\n"
        "while not (folder / 'pid').exists(): time.sleep(0.02)\n"
        "sys.exit(3)\n"
    )
    assert run_local(python(code, tmp_path), processes=2, devices=1) == 3
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_process_which_may_end_well(tmp_path, number):
    code = (
        "import os, pathlib, signal, sys, time\n"
        "mine = pathlib.Path(sys.argv[1]) / os.environ['JAXMLLM_PROCESS_ID']\n"
        "def end(number, frame): mine.write_text(f'got {number}'); sys.exit(0)\n"
        "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, end)\n"
        "mine.with_suffix('.ready').write_text('yes')\n"
        # A signal just before a sleep begins is seen when it ends
        "for _ in range(600): time.sleep(0.1)\n"
    )
    command = [
        sys.executable,
        "-m",
        "launch.local",
        "--processes",
        "2",
        "--",
        *python(code, tmp_path),
    ]
    launcher = subprocess.Popen(command, cwd=ROOT)
    try:
        for process in range(2):
            wait_for(tmp_path / f"{process}.ready")
        launcher.send_signal(number)
        assert launcher.wait(timeout=45) == 0
    finally:
        launcher.kill()
    assert [(tmp_path / str(process)).read_text() for process in range(2)] == [
        f"got {number.value}"
    ] * 2


def test_a_killed_launcher_leaves_nothing_behind(tmp_path):
    """Its processes are killed, and so are processes that they started."""
    code = (
        "import os, pathlib, subprocess, sys, time\n"
        "mine = pathlib.Path(sys.argv[1]) / os.environ['JAXMLLM_PROCESS_ID']\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "mine.write_text(f'{os.getpid()} {worker.pid}'); time.sleep(60)\n"
    )
    command = [
        sys.executable,
        "-m",
        "launch.local",
        "--processes",
        "2",
        "--",
        *python(code, tmp_path),
    ]
    launcher = subprocess.Popen(command, cwd=ROOT)
    try:
        pids = [
            int(pid) for process in range(2) for pid in wait_for(tmp_path / str(process)).split()
        ]
    finally:
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.05)


def test_bad_arguments_are_refused(capsys):
    for arguments, message in (
        ([], "no command"),
        (["--processes", "0", "--", "true"], "must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


def test_a_missing_command_raises_and_leaves_nothing_behind(tmp_path):
    with pytest.raises(FileNotFoundError):
        run_local([str(tmp_path / "absent")], processes=2, devices=1)
