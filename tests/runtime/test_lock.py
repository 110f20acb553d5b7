"""One run per folder: who holds it, and when a holder counts as dead."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.runtime.lock import Holder, RunLock
from jaxmllm.training.run_folder import open_folder
from tests.training.test_resume_rules import make_config

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from jaxmllm.runtime.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def write(folder: Path, holder: Holder) -> None:
    (folder / "run.lock").write_text(json.dumps(asdict(holder)))


@pytest.fixture
def elsewhere() -> Holder:
    """A holder on another machine, known to live only by its heart beats."""
    return replace(Holder.here(), host="far-away", token="theirs")


def test_a_folder_has_one_holder_at_a_time(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        for _ in range(2):
            with pytest.raises(CheckpointError) as caught, RunLock(tmp_path):
                pass
            text = str(caught.value)
            assert (
                text.startswith(f"{tmp_path} is held by process {os.getpid()} on ")
                and "(since 2" in text
            )
            assert "choose another run.directory" in text and "\n" not in text
        assert [entry.name for entry in tmp_path.iterdir()] == ["run.lock"]
    with RunLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_released_on_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_holder_gives_way_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with (
            pytest.raises(CheckpointError, match=f"is held by process {process.pid} on "),
            RunLock(tmp_path),
        ):
            pass
        # WNOWAIT leaves the killed process a zombie, which still has its number
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        lines: list[str] = []
        with RunLock(tmp_path, lines.append, silence_seconds=600):
            (line,) = lines
            assert f"the lock of process {process.pid} on " in line and "is taken over" in line
    finally:
        process.kill()
        process.communicate()


def test_a_number_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    write(tmp_path, replace(Holder.here(), process="an earlier start", token="theirs"))
    with RunLock(tmp_path, lambda _: None):
        pass


def test_a_silent_holder_elsewhere_is_waited_for_and_taken_over(
    tmp_path: Path, elsewhere: Holder
) -> None:
    write(tmp_path, elsewhere)
    lines: list[str] = []
    with RunLock(tmp_path, lines.append, silence_seconds=0.3):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert "waiting up to 0 s for a sign of life" in lines[0] and "is taken over" in lines[1]


def test_machines_of_one_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_text

    def on_another(path: Path, **options: Any) -> str:
        return "another boot" if path.name == "boot_id" else read(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", on_another)
        write(tmp_path, replace(Holder.here(), pid=2**22 + 1, token="theirs"))
    lines: list[str] = []
    with RunLock(tmp_path, lines.append, silence_seconds=0.3):
        assert "waiting up to 0 s for a sign of life" in lines[0]


def test_a_holder_elsewhere_whose_heart_beats_keeps_the_folder(
    tmp_path: Path, elsewhere: Holder
) -> None:
    write(tmp_path, elsewhere)
    # A heart beat while the lock is waited for
    timer = threading.Timer(0.5, write, (tmp_path, replace(elsewhere, beat=1)))
    timer.start()
    with pytest.raises(CheckpointError, match="is held by process"):
        RunLock(tmp_path, lambda _: None, silence_seconds=60).__enter__()
    timer.join()
    assert json.loads((tmp_path / "run.lock").read_text())["token"] == "theirs"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 3}'])
def test_a_lock_that_cannot_be_read_is_stale_when_nobody_rewrites_it(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "run.lock").write_text(content)
    with RunLock(tmp_path, lambda _: None, silence_seconds=0.2):
        pass


def test_the_heart_beats_and_a_holder_that_lost_the_folder_learns_it(
    tmp_path: Path, elsewhere: Holder
) -> None:
    lost = threading.Event()
    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        lost.set()

    with RunLock(tmp_path, lost=stop, beat_seconds=0.05):
        for _ in range(200):
            if json.loads((tmp_path / "run.lock").read_text())["beat"] >= 2:
                break
            threading.Event().wait(0.05)
        else:
            raise AssertionError("no heart beat")
        write(tmp_path, elsewhere)
        if not lost.wait(10):  # a beat may have overwritten the lock
            write(tmp_path, elsewhere)
            assert lost.wait(10)
    assert "was taken over by process" in lines[0]
    assert json.loads((tmp_path / "run.lock").read_text())["token"] == "theirs", (
        "what is not ours stays"
    )


def test_a_holder_whose_folder_is_removed_learns_it_and_makes_no_other(tmp_path: Path) -> None:
    lost = threading.Event()
    lines: list[str] = []
    folder = tmp_path / "run"
    folder.mkdir()
    with RunLock(folder, lost=lambda line: lines.append(line) or lost.set(), beat_seconds=0.05):
        shutil.rmtree(folder)
        assert lost.wait(10)
    assert "run.lock was removed, or its folder, under the run" in lines[0]
    assert not folder.exists()


@pytest.mark.parametrize("alive", [False, True])
def test_a_copy_of_a_held_folder_is_held_by_nobody(tmp_path: Path, alive: bool) -> None:
    """Unless its heart beats, since a file system may give a folder the same number twice."""
    original = tmp_path / "held"
    copy = tmp_path / "copy"
    original.mkdir()
    with RunLock(original):
        shutil.copytree(original, copy)
        lines: list[str] = []
        if alive:
            holder = Holder(**json.loads((copy / "run.lock").read_text()))
            timer = threading.Timer(0.5, write, (copy, replace(holder, beat=1)))
            timer.start()
            with pytest.raises(CheckpointError, match="is held by process"):
                RunLock(copy, lines.append, silence_seconds=60).__enter__()
            timer.join()
        else:
            with RunLock(copy, lines.append, silence_seconds=0.3):
                assert "is taken over" in lines[1]
        assert "for a sign of life" in lines[0]


def test_a_second_run_is_refused_before_it_reads_anything(tmp_path: Path) -> None:
    config = make_config(str(tmp_path / "run"))
    with open_folder(config, False) as checked:
        assert checked.optimizer.decay_steps == 10
        for resume in (False, True, "auto"):
            with (
                pytest.raises(CheckpointError, match="is held by process"),
                open_folder(config, resume),
            ):
                pass
    with open_folder(config, True):
        pass
    assert list((tmp_path / "run").iterdir()) == []
