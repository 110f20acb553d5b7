"""Checkpoints: complete or absent, readable on any mesh, and refused when they do not fit."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import tracemalloc
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmllm.runtime import checkpoint_files, hosts
from jaxmllm.runtime.checkpoint import Checkpoints, check_space, state_bytes
from jaxmllm.runtime.checkpoint_files import CheckpointError, DamagedError, check_files
from jaxmllm.runtime.hosts import Hosts
from sharding.mesh import make_mesh
from sharding.rules import make_layout
from tests.runtime.test_signals import MemoryBoard

ROOT = Path(__file__).parents[2]


def host_params(width: int = 16) -> dict[str, Any]:
    """Parameters in numpy, in bfloat16 and float32."""
    rng = np.random.default_rng(0)
    return {
        "language": {
            "w": rng.normal(size=(8, width)).astype(jnp.bfloat16),
            "scale": rng.normal(size=8).astype("f4"),
        },
        "projector": {"vision": {"w": rng.normal(size=(16, 8)).astype(np.float32)}},
    }


def make_state(shape: tuple[int, int], params: dict[str, Any], step: int = 0) -> dict[str, Any]:
    """A state on a mesh: matrices are sharded over both axes, vectors and scalars replicated."""
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def place(leaf: Any) -> jax.Array:
        return jax.device_put(
            leaf, NamedSharding(mesh, P("fsdp", "tensor") if leaf.ndim == 2 else P())
        )

    placed = jax.tree.map(place, params)
    moments = optax.adamw(1e-3).init(jax.tree.map(lambda leaf: leaf + 1, placed))
    return {
        "params": placed,
        "optimizer": jax.tree.map(place, moments),
        "step": place(np.asarray(step, np.int32)),
        "skipped": place(np.asarray(0, np.int32)),
    }


def abstract(state: Any) -> Any:
    """The shapes, dtypes and shardings of a state."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def assert_same(restored: Any, expected: Any) -> None:
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for restored_leaf, expected_leaf in zip(
        jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True
    ):
        assert restored_leaf.dtype == expected_leaf.dtype
        np.testing.assert_array_equal(np.asarray(restored_leaf), np.asarray(expected_leaf))


@pytest.mark.parametrize("shape", [(8, 1), (2, 4), (1, 1)])
def test_restores_on_another_mesh(tmp_path: Path, shape: tuple[int, int]) -> None:
    saved = make_state((4, 2), host_params(), step=7)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step is None
        assert checkpoints.save(7, saved)
        assert not checkpoints.save(7, saved), "the same step is not written twice"
    target = make_state(shape, jax.tree.map(np.zeros_like, host_params()))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step == 7
        restored = checkpoints.restore(abstract(target))
    assert_same(restored, saved)
    for restored_leaf, target_leaf in zip(
        jax.tree.leaves(restored), jax.tree.leaves(target), strict=True
    ):
        assert restored_leaf.sharding.is_equivalent_to(target_leaf.sharding, restored_leaf.ndim)


@pytest.mark.parametrize("spans", [((1, 2, 4), ()), ((), (1, 2, 4))])
def test_restores_on_a_mesh_that_is_cut_otherwise(tmp_path: Path, spans: Any) -> None:
    saved, target = (
        jax.device_put(
            {"w": np.arange(64.0).reshape(16, 4) + offset},
            make_layout(make_mesh({"data": 2, "fsdp": 4}, spans=cut)).sharding(("embed", None)),
        )
        for offset, cut in zip((0, 1), spans, strict=True)
    )
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, saved)
        restored = checkpoints.restore(abstract(target))
    assert_same(restored, saved)
    assert restored["w"].sharding == target["w"].sharding


def test_double_precision(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        saved = {"params": {"language": {"w": jnp.linspace(0, 1, 9, dtype=jnp.float64) / 3}}}
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            checkpoints.save(1, saved)
            assert_same(checkpoints.restore(abstract(saved)), saved)


def test_a_saved_state_may_be_donated(tmp_path: Path) -> None:
    state = make_state((4, 2), {"language": {"w": np.zeros((512, 512), np.float32)}})
    update = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    expected = jax.tree.map(np.array, state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(0, state)
        # Updates write into the donated buffers, which the save must have copied
        for _ in range(5):
            state = update(state)
        restored = checkpoints.restore(abstract(state))
    assert_same(restored, expected)


def test_keeps_the_latest(tmp_path: Path) -> None:
    state = make_state((8, 1), host_params())
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (3, 6, 9, 12):
            checkpoints.save(step, state | {"step": jnp.int32(step)})
        checkpoints.wait()
        assert checkpoints.steps == [9, 12]
        assert int(checkpoints.restore(abstract(state), step=9)["step"]) == 9
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["12", "9"]


def test_a_save_does_not_wait_until_old_checkpoints_are_deleted(
    tmp_path: Path, monkeypatch: Any
) -> None:
    state = {"w": jnp.ones((4, 4))}
    saved = threading.Event()
    rmtree = shutil.rmtree

    def slow(folder: Path) -> None:
        assert saved.wait(5), "the save waits"
        rmtree(folder)

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
        monkeypatch.setattr(shutil, "rmtree", slow)
        checkpoints.save(3, state)
        assert [folder.name for folder in tmp_path.glob("*.deleted")] == ["1.deleted"]
        saved.set()
        checkpoints.save(4, state)
    assert [entry.name for entry in tmp_path.iterdir()] == ["4"], "the end waits"


def test_a_complete_save_makes_room_before_the_next(tmp_path: Path) -> None:
    state = {"w": jnp.ones((4, 4))}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.look()
        for step in (1, 2):
            checkpoints.save(step, state)
            checkpoints._writer._async_manager._thread.join(60)
        assert checkpoints.steps == [1, 2]
        checkpoints.look()
        assert checkpoints.steps == [2]


@pytest.mark.parametrize(("free", "left"), [(99, []), (100, ["1.deleted"])])
def test_a_save_waits_for_a_deletion_where_it_needs_the_room(
    tmp_path: Path, monkeypatch: Any, free: int, left: list[str]
) -> None:
    state = {"w": jnp.ones((4, 4))}
    saved = threading.Event()
    rmtree = shutil.rmtree

    def slow(folder: Path) -> None:
        saved.wait(0.5 if free < 100 else 5)
        rmtree(folder)

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with Checkpoints(tmp_path, keep=1, expected_bytes=100) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
        monkeypatch.setattr(shutil, "rmtree", slow)
        checkpoints.save(3, state)
        assert [folder.name for folder in tmp_path.glob("*.deleted")] == left
        saved.set()


def test_a_deletion_that_fails_is_one_line_of_the_next_save(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    def forbidden(_: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    state = {"w": jnp.ones((4, 4))}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state)
    checkpoints.save(2, state)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", forbidden)
        checkpoints.save(3, state)
        with pytest.raises(
            CheckpointError, match="Permission denied; the latest complete one is 3"
        ) as caught:
            checkpoints.save(4, state)
        assert str(caught.value).startswith(f"an old checkpoint cannot be deleted from {tmp_path}")
    checkpoints.close()
    assert checkpoints.steps == [3] and caplog.records == []


def test_a_killed_save_leaves_the_last_complete_one(tmp_path: Path) -> None:
    program = """
        import os, signal, sys
        import jax.numpy as jnp
        import orbax.checkpoint as ocp
        from jaxmllm.runtime.checkpoint import Checkpoints
        checkpoints = Checkpoints(sys.argv[1], keep=3)
        checkpoints.save(1, {"w": jnp.full((4096, 4096), 1.0)})
        checkpoints.wait()
        # Arrays are on disk then, checksums and the final name are not; a kill at once may come before the first byte.
        ocp.StandardCheckpointHandler.finalize = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(2, {"w": jnp.full((4096, 4096), 2.0)})
        checkpoints.wait()
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], env=environment
    )
    assert killed.returncode == -signal.SIGKILL
    leftovers = [entry.name for entry in tmp_path.iterdir() if entry.name != "1"]
    assert len(leftovers) == 1 and leftovers[0].startswith("2."), (
        "the kill came in the middle of a save"
    )
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        assert checkpoints.steps == [1]
        template = {
            "w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=jnp.zeros(()).sharding)
        }
        assert float(checkpoints.restore(template)["w"].min()) == 1.0
        checkpoints.save(2, {"w": jnp.full((4096, 4096), 3.0)})
        assert float(checkpoints.restore(template)["w"].min()) == 3.0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2"], (
        "leftovers are swept away"
    )


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, make_state((8, 1), host_params()))
        wide_params = host_params(width=32)
        del wide_params["projector"]
        wide_params["language"]["scale"] = wide_params["language"]["scale"].astype(jnp.bfloat16)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(abstract(make_state((8, 1), wide_params)))
    text = str(caught.value)
    assert (
        f"checkpoint {tmp_path / '5'} does not fit the model of this config (9 arrays differ)"
        in text
    )
    assert (
        "optimizer.0.mu.language.w: saved bfloat16[8, 16], this model has bfloat16[8, 32]" in text
    )
    assert "optimizer.0.mu.language.scale: saved float32[8], this model has bfloat16[8]" in text
    assert "optimizer.0.mu.projector.vision.w: saved float32[16, 8], this model has nothing" in text
    assert "... and 4 more" in text
    assert "set run.directory to a new folder" in text


def test_missing_checkpoints_are_named(tmp_path: Path) -> None:
    state = {"w": jnp.ones((4, 4))}
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        with pytest.raises(
            CheckpointError, match=r"does not hold a checkpoint \(steps there: none\)"
        ):
            checkpoints.restore(abstract(state))
        checkpoints.save(1, state)
        checkpoints.save(2, state)
        with pytest.raises(
            CheckpointError, match=r"does not hold checkpoint 3 \(steps there: \[1, 2\]\)"
        ):
            checkpoints.restore(abstract(state), step=3)


# ---------------------------------------------------------------------------- damage


def three_checkpoints(folder: Path) -> tuple[Any, Any]:
    """Save a state as steps 1, 2 and 3; return its shapes and its arrays."""
    state = {"params": make_state((4, 2), host_params())["params"], "step": jnp.int32(0)}
    with Checkpoints(folder, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state | {"step": jnp.int32(step)})
    return abstract(state), state


def files_of(location: Path) -> list[Path]:
    """Files of a checkpoint that are read."""
    # Orbax adds these at the very end, and nothing reads them
    stamps = ("_CHECKPOINT_METADATA", "commit_success.txt")
    return [
        path for path in sorted(location.rglob("*")) if path.is_file() and path.name not in stamps
    ]


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Four random bits per file."""
    three_checkpoints(tmp_path)
    rng = np.random.default_rng(0)
    location = tmp_path / "3"
    check_files(location)
    for path in files_of(location):
        size = path.stat().st_size
        for bit in [int(rng.integers(8 * size)) for _ in range(4 if size else 0)]:
            flip(path, bit)
            try:
                check_files(location)
                # A flip can be harmless only in the white space of the list of checksums
                assert path.name == "checksums.json"
            except DamagedError as error:
                assert "\n" not in str(error)
            flip(path, bit)
    check_files(location)


@pytest.mark.parametrize(
    "damage", ["flipped", "truncated", "half missing", "empty", "no checksums"]
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, damage: str, capfd: Any
) -> None:
    target, state = three_checkpoints(tmp_path)
    files = files_of(tmp_path / "3")
    largest = max(
        (path for path in files if "ocdbt" in str(path)), key=lambda path: path.stat().st_size
    )
    if damage == "flipped":
        flip(largest, 8 * largest.stat().st_size // 2)
    elif damage == "truncated":
        largest.write_bytes(largest.read_bytes()[:-3])
    elif damage == "half missing":
        for path in files[::2]:
            path.unlink()
    elif damage == "empty":
        for path in files:
            path.unlink()
    else:
        (tmp_path / "3" / "checksums.json").unlink()
    lines: list[str] = []
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        restored, step = checkpoints.restore_latest(target, lines.append)
        assert (step, int(restored["step"])) == (2, 2)
        assert_same(restored["params"], state["params"])
        assert checkpoints.save(3, state), "the step of the damaged one is free again"
    (line,) = lines
    assert line.startswith(f"checkpoint {tmp_path / '3'} is damaged: ") and "\n" not in line
    assert line.endswith("put aside as 3.damaged, continuing from checkpoint 2")
    reasons = {
        "flipped": largest.name,
        "truncated": f"{largest.name} has",
        "no checksums": "checksums.json is missing",
    }
    assert reasons.get(damage, "missing") in line
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2", "3", "3.damaged"]
    assert "Traceback" not in "".join(capfd.readouterr())


def test_if_no_checkpoint_is_usable_the_error_is_one_line(tmp_path: Path) -> None:
    target, _ = three_checkpoints(tmp_path)
    for step in "123":
        flip(next(path for path in files_of(tmp_path / step) if "ocdbt" in str(path)), 77)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        with pytest.raises(DamagedError, match=r"none of the 3 checkpoints .* is usable") as caught:
            checkpoints.restore_latest(target)
    assert "\n" not in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2", "3"], (
        "nothing is moved then"
    )


def test_a_new_folder_has_nothing_to_restore(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "none", keep=1) as checkpoints:
        assert checkpoints.restore_latest({"w": jnp.ones(3)}) is None


def test_unsound_states_never_evict_sound_ones(tmp_path: Path) -> None:
    state = {"w": jnp.ones((4, 4))}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, state)
        checkpoints.save(6, state, sound=False)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.steps == [3, 6]
        checkpoints.save(7, state, sound=False)
        checkpoints.wait()
        assert checkpoints.steps == [3, 7]
        checkpoints.save(9, state)
        checkpoints.wait()
        assert checkpoints.steps == [9]


def test_a_checkpoint_that_cannot_be_read_is_kept_as_long_as_it_may_be_needed(
    tmp_path: Path,
) -> None:
    three_checkpoints(tmp_path)
    (tmp_path / "2" / "checksums.json").write_text('{"sound": tr')
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.wait()
        assert checkpoints.steps == [1, 2, 3]
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.wait()
        assert checkpoints.steps == [1, 2, 3], "it counts for nothing"
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.wait()
        assert checkpoints.steps == [3]


def test_a_line_about_an_error_names_what_the_disk_said() -> None:
    """Threads of orbax and asyncio raise groups of errors, in which that of the disk lies deep."""
    full = OSError(errno.ENOSPC, "No space left on device")
    chained = ValueError("cannot write")
    chained.__cause__ = full
    group = ExceptionGroup("unhandled", [KeyError("a"), ExceptionGroup("inner", [chained])])
    last = RuntimeError("saving failed")
    last.__context__ = group
    for error in (full, chained, group, last):
        assert checkpoint_files.one_line(error) == str(full)
    without_disk = ExceptionGroup("unhandled", [ExceptionGroup("inner", [ValueError("a\nb")])])
    assert checkpoint_files.one_line(without_disk) == "a b"
    assert checkpoint_files.one_line(ValueError()) == "ValueError"
    folder = "/runs/" + "long/" * 100
    long_line = checkpoint_files.one_line(ValueError(f"Error writing {folder}: No space left"))
    assert long_line.startswith("Error writing /runs/long/") and len(long_line) < 310
    assert long_line.endswith("long/: No space left")


@pytest.mark.parametrize("late", [False, True])
def test_a_full_disk_is_one_line(tmp_path: Path, late: bool, monkeypatch: Any, capfd: Any) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = {"w": jnp.ones((4, 4))}
    with (
        pytest.raises(CheckpointError) as caught,
        Checkpoints(tmp_path / "run", keep=1) as checkpoints,
    ):
        checkpoints.save(1, state)
        checkpoints.wait()
        monkeypatch.setattr(checkpoint_files, "_checksum", full) if late else monkeypatch.setattr(
            Path, "mkdir", full
        )
        checkpoints._swept = False
        checkpoints.save(2, state)
    text = str(caught.value)
    assert "checkpoint 2 cannot be written to" in text and "No space left on device" in text
    assert "the latest complete one is 1" in text and "\n" not in text
    monkeypatch.undo()
    assert "Traceback" not in "".join(capfd.readouterr())
    assert [step for step in Checkpoints(tmp_path / "run", keep=1).steps] == [1]


def test_a_save_that_fails_in_the_background_floods_no_log(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_files, "_checksum", full)
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    checkpoints.save(1, {"w": jnp.ones((4, 4))})
    checkpoints._writer._async_manager._thread.join(60)  # it fails before anyone waits for it
    assert caplog.records == []
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoints.wait()
    checkpoints.close()
    logging.getLogger("absl").error("heard again")
    assert [record.message for record in caplog.records] == ["heard again"]


def test_a_save_that_takes_too_long_is_no_full_disk(tmp_path: Path, monkeypatch: Any) -> None:
    """The time limit grows with the bytes to write, for slow disks."""
    checkpoints = Checkpoints(tmp_path, 1, expected_bytes=5 * 10**12)
    manager = checkpoints._writer._async_manager
    assert manager._timeout_secs == 1200 + 100_000
    with monkeypatch.context() as patch:
        patch.setattr(manager, "_exception", TimeoutError("Timed out while waiting for barrier."))
        with pytest.raises(CheckpointError, match=r"was not complete in .* within 101200 s; there"):
            checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(manager, "_exception", TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
        with pytest.raises(CheckpointError, match=r"cannot be written to .*Connection timed out"):
            checkpoints.wait()
    checkpoints.close()


def test_room_for_a_checkpoint_is_asked_for(tmp_path: Path) -> None:
    target = abstract(make_state((4, 2), host_params()))
    needed = state_bytes(target)
    assert needed == sum(leaf.nbytes for leaf in jax.tree.leaves(make_state((4, 2), host_params())))
    check_space(tmp_path / "not" / "yet", needed)
    with pytest.raises(
        CheckpointError, match=r"GiB free, but a checkpoint of this model takes 1048576\.00 GiB"
    ):
        check_space(tmp_path, 1 << 50)


# ---------------------------------------------------------------------------- components that begin or end to train


def trained_state(components: list[str], step: int) -> dict[str, Any]:
    """A state with optimizer states of some components."""
    params = make_state(
        (4, 2), {"a": {"w": np.ones((8, 8), "f4")}, "b.c": {"w": np.full((8, 4), 2, "f4")}}
    )["params"]
    optimizer = {}
    for name in components:
        moments = optax.scale_by_adam()
        _, state = moments.update(params[name], moments.init(params[name]))
        replicated = NamedSharding(params[name]["w"].sharding.mesh, P())
        optimizer[name] = state._replace(count=jax.device_put(state.count, replicated))
    return {"params": params, "optimizer": optimizer, "step": jnp.int32(step)}


@pytest.mark.parametrize(
    ("before", "after"), [(["a"], ["a", "b.c"]), (["a", "b.c"], ["a"]), (["a"], ["b.c"])]
)
def test_optimizer_states_begin_at_zero_and_others_stay(
    tmp_path: Path, before: list[str], after: list[str]
) -> None:
    saved = trained_state(before, 5)
    target = trained_state(after, 0)
    lines: list[str] = []
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, saved)
        restored = checkpoints.restore(abstract(target), say=lines.append)
    assert jax.tree.structure(restored) == jax.tree.structure(target)
    assert_same(restored["params"], saved["params"])
    for name in after:
        expected = saved["optimizer"].get(
            name, jax.tree.map(jnp.zeros_like, target["optimizer"][name])
        )
        assert_same(restored["optimizer"][name], expected)
    begin_training = sorted({*after} - {*before})
    frozen = sorted({*before} - {*after})
    expected_lines = [
        f"optimizer state of {name}: begins at zero from step 5" for name in begin_training
    ]
    expected_lines += [
        f"optimizer state of {name}: dropped from step 5, the components are frozen"
        for name in frozen
    ]
    assert lines == expected_lines


def test_averages_begin_at_the_parameters_and_others_stay(tmp_path: Path) -> None:
    """A state without averages is written as if there were no such field."""

    class State(NamedTuple):
        params: Any
        averages: Any = None

    params = trained_state([], 0)["params"]
    moved_params = jax.tree.map(lambda leaf: leaf + 1, params)
    average_of_a = {"a": moved_params["a"]}
    cases = [  # saved averages, averages of the state to restore, and restored averages
        (None, moved_params, params),
        (average_of_a, moved_params, average_of_a | {"b.c": params["b.c"]}),
        (moved_params, None, None),
    ]
    lines: list[str] = []
    for case, (saved, target, expected) in enumerate(cases):
        with Checkpoints(tmp_path / str(case), keep=1) as checkpoints:
            checkpoints.save(5, State(params, saved))
            restored = checkpoints.restore(abstract(State(params, target)), say=lines.append)
        assert_same(restored, State(params, expected))
    assert "averages" not in (tmp_path / "0" / "5" / "_METADATA").read_text()
    assert lines == [
        "running average of a, b.c: begins at the parameters from step 5",
        "running average of b.c: begins at the parameters from step 5",
        "running average of a, b.c: dropped from step 5, the components have no ema",
    ]


# ---------------------------------------------------------------------------- checksums of several processes


def test_a_checksum_takes_the_memory_of_one_block(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(checkpoint_files, "READ_BYTES", 1 << 20)
    content = np.random.default_rng(0).bytes(3_500_000)
    (tmp_path / "file").write_bytes(content)
    tracemalloc.start()
    try:
        assert checkpoint_files._checksum(tmp_path / "file") == (3_500_000, zlib.crc32(content))
        assert tracemalloc.get_traced_memory()[1] < 1.2 * 2**20
    finally:
        tracemalloc.stop()


def test_files_to_check_are_dealt_by_size() -> None:
    """Files of 16 processes with names in which every fourth one is large."""
    sizes = {
        f"ocdbt.process_{process:02}/{number}": 10**9 if number == 0 else 10 * number
        for process in range(16)
        for number in range(4)
    }
    for processes in (1, 2, 4, 8):
        hands = checkpoint_files._dealt(sizes, processes)
        assert sorted(name for names in hands for name in names) == sorted(sizes)
        loads = [sum(sizes[name] for name in names) for names in hands]
        assert max(loads) - min(loads) <= 30
        shuffled = dict(sorted(sizes.items(), key=lambda item: item[0][::-1]))
        assert checkpoint_files._dealt(shuffled, processes) == hands, "the same on all processes"
    assert checkpoint_files._dealt({"a": 5, "b": 5}, 3) == [["a"], ["b"], []]


def draft_of_two(folder: Path) -> Path:
    """A folder with the files of a checkpoint that two processes have written."""
    for name in ("_METADATA", "ocdbt.process_0/d/a", "ocdbt.process_1/d/b", "ocdbt.process_1/m"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 1000)
    (folder / "_CHECKPOINT_METADATA").write_text("rewritten later")
    return folder


def test_each_writer_makes_its_checksums_and_the_list_is_the_same(
    tmp_path: Path, monkeypatch: Any
) -> None:
    alone, together = (draft_of_two(tmp_path / name / "7.draft") for name in ("one", "two"))
    checkpoint_files._seal(alone, sound=True)
    board = MemoryBoard()
    read: list[str] = []
    checksum = checkpoint_files._checksum

    def counted(path: Path) -> tuple[int, int]:
        read.append(path.relative_to(together).as_posix())
        return checksum(path)

    monkeypatch.setattr(checkpoint_files, "_checksum", counted)
    runs = [Hosts(process, ("host-a", "host-b"), board, 5.0, 5.0) for process in range(2)]
    runs[1].leave_for_main(
        "checksums.json", '{"draft": "6.draft", "files": {"ocdbt.process_1/m": [1, 2]}}'
    )
    for run, names in zip(
        runs, (["ocdbt.process_0/d/a"], ["ocdbt.process_1/d/b", "ocdbt.process_1/m"]), strict=True
    ):
        checkpoint_files._OwnChecksums(run, together).result()
        assert sorted(read) == names
        read.clear()
    monkeypatch.setattr(hosts, "_current", runs[0])
    checkpoint_files._seal(together, sound=True)
    assert read == ["_METADATA"], "process 0 reads only what no process wrote alone"
    lists = [(folder / "checksums.json").read_bytes() for folder in (alone, together)]
    assert lists[0] == lists[1]

    # Texts of another save are not used
    board.values.clear()
    runs[1].leave_for_main(
        "checksums.json", '{"draft": "6.draft", "files": {"ocdbt.process_1/m": [1, 2]}}'
    )
    checkpoint_files._seal(together, sound=True)
    assert (together / "checksums.json").read_bytes() == lists[0]


def test_what_changes_after_its_writer_is_done_is_damage(tmp_path: Path, monkeypatch: Any) -> None:
    draft = draft_of_two(tmp_path / "7.draft")
    board = MemoryBoard()
    runs = [Hosts(process, ("host-a", "host-b"), board, 5.0, 5.0) for process in range(2)]
    for run in runs:
        checkpoint_files._OwnChecksums(run, draft).result()
    (draft / "ocdbt.process_1" / "d" / "b").write_bytes(b"other")
    (draft / "ocdbt.process_0" / "d" / "a").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(hosts, "_current", runs[0])
        checkpoint_files._seal(draft, sound=True)
    with pytest.raises(DamagedError, match=r"process_1/d/b has 5 bytes, 19000 were"):
        check_files(draft)


TWO_PROCESSES = """
    import errno, os, sys
    import jax, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from jaxmllm.runtime import checkpoint_files
    from jaxmllm.runtime.checkpoint import Checkpoints
    from jaxmllm.runtime.distributed import initialize_distributed
    from jaxmllm.runtime.hosts import ending_together

    initialize_distributed()
    checksum = checkpoint_files._checksum

    def told(path):
        os.write(1, f"process {jax.process_index()} reads {path}\\n".encode())
        return checksum(path)

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("fsdp"))
    rows = np.random.default_rng(0).normal(size=(2, 4096))
    state = {"w": jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])}
    with ending_together((checkpoint_files.CheckpointError,)) as outcome:
        with Checkpoints(sys.argv[1], keep=3) as checkpoints:
            checkpoint_files._checksum = told
            checkpoints.save(1, state)
            checkpoints.wait()
            checkpoint_files._checksum = checksum
            checkpoint_files.check_files(checkpoints.directory / "1")
            if jax.process_index() == 1:
                checkpoint_files._checksum = full
            checkpoints.save(2, state)
    sys.exit(outcome.code)
"""


@pytest.mark.slow
def test_two_processes_share_the_checksums_and_a_failure_ends_both(tmp_path: Path) -> None:
    """Process 1 cannot read what it wrote in the second save."""
    launcher = [sys.executable, "-m", "launch.local", "--processes", "2", "--devices", "1", "--"]
    completed = subprocess.run(
        [*launcher, sys.executable, "-c", textwrap.dedent(TWO_PROCESSES), str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    output = completed.stdout
    for process in range(2):
        files = list((tmp_path / "run" / "1" / f"ocdbt.process_{process}").rglob("*"))
        names = [path.name for path in files if path.is_file() and path.parent.name == "d"]
        assert names
        for name in names:
            readers = [line for line in output.splitlines() if line.endswith(f"/d/{name}")]
            assert len(readers) == 1 and f"process {process} reads" in readers[0], output[-3000:]
    assert completed.returncode != 0 and "Traceback" not in output, output[-3000:]
    line = (
        f"[1] error: checkpoint 2 cannot be written to {tmp_path / 'run'}: [Errno 28] No space left"
    )
    assert line in output and "the latest complete one is 1" in output
    with Checkpoints(tmp_path / "run", keep=3) as checkpoints:
        assert checkpoints.steps == [1]
        check_files(tmp_path / "run" / "1")
