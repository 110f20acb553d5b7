"""Which folders a run may use, and what is refused before anything is compiled."""

import errno
import os
from pathlib import Path

import jax
import pytest

from jaxmllm.config.schema import ConfigError
from jaxmllm.runtime import hosts, lock
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.runtime.resume import begun_config
from jaxmllm.training.run_folder import (
    check_folder,
    config_of,
    named_config,
    open_folder,
    read_config,
    write_config,
)
from tests.training.test_resume_rules import make_config


def test_config_survives_the_run_folder(tmp_path: Path) -> None:
    config = make_config(
        components__vision__layout={"batch": ["data", "tensor"]}, optimizer__epsilon=1e-12
    )
    assert read_config(tmp_path) is None
    write_config(tmp_path / "run", config)
    assert read_config(tmp_path / "run") == config
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_an_option_names_the_folder_of_a_run(tmp_path: Path) -> None:
    config = make_config()
    write_config(tmp_path, config)
    assert named_config("--run", tmp_path) == config
    with pytest.raises(ConfigError, match=r"--run .*absent: the folder holds no run: there is no"):
        named_config("--run", tmp_path / "absent")


@pytest.mark.parametrize("resume", [False, True, "auto"])
def test_a_new_or_empty_folder_begins_a_run(tmp_path: Path, resume: bool | str) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new", tmp_path / "empty"):
        config = make_config(str(folder))
        assert check_folder(config, resume) == begun_config(config)
        with open_folder(config, resume) as checked:
            assert checked == begun_config(config)
        assert list(folder.iterdir()) == []


def test_a_folder_that_holds_a_run_is_resumed_when_that_is_meant(tmp_path: Path) -> None:
    config = begun_config(make_config(str(tmp_path)))
    write_config(tmp_path, config)
    with pytest.raises(CheckpointError, match="already holds a run; pass --resume"):
        check_folder(config, False)
    for resume in (True, "auto"):
        longer = check_folder(make_config(str(tmp_path), run__steps=20), resume)
        assert (longer.run.steps, longer.decay_steps) == (20, 10)
        with pytest.raises(CheckpointError, match=r"run\.seed: 0 in the run, 3 now"):
            check_folder(make_config(str(tmp_path), run__seed=3), resume)


def test_what_a_refused_resume_advises_depends_on_what_is_there(tmp_path: Path) -> None:
    write_config(tmp_path, begun_config(make_config(str(tmp_path))))
    other_seed = make_config(str(tmp_path), run__seed=3)
    with pytest.raises(CheckpointError, match="it has no checkpoint: delete") as caught:
        check_folder(other_seed, True)
    assert "model.from" not in str(caught.value)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"model.from to {tmp_path}"):
        check_folder(other_seed, True)


def test_room_that_killed_saves_took_is_free_when_a_run_is_resumed(tmp_path: Path) -> None:
    config = begun_config(make_config(str(tmp_path)))
    write_config(tmp_path, config)
    for name in ("4", "8.orbax-checkpoint-tmp", "2.deleted"):
        (tmp_path / "checkpoints" / name / "d").mkdir(parents=True)

    def left() -> list[str]:
        return sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())

    with pytest.raises(CheckpointError), open_folder(config, False):
        pass
    assert len(left()) == 3, "nothing is touched of a run that is not to be resumed"
    with open_folder(config, True):
        assert left() == ["4"]


def test_a_folder_without_config_does_not_resume_silently(tmp_path: Path) -> None:
    config = make_config(str(tmp_path))
    (tmp_path / "slurm-17.out").touch()
    with pytest.raises(
        CheckpointError,
        match=r"holds no run to resume: there is no config\.yaml beside slurm-17\.out",
    ):
        check_folder(config, True)
    check_folder(config, "auto")
    check_folder(config, False)
    (tmp_path / "checkpoints").mkdir()
    for resume in (False, True, "auto"):
        with pytest.raises(
            CheckpointError, match=r"holds checkpoints but no config\.yaml"
        ) as caught:
            check_folder(config, resume)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"run: [1,\n", b"run: {}\n", b""])
def test_a_damaged_config_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.yaml is damaged: .*model\.from=") as caught:
        check_folder(make_config(str(tmp_path)), True)
    assert "\n" not in str(caught.value)


def test_what_a_damaged_config_advises_works(tmp_path: Path) -> None:
    begun_folder = tmp_path / "begun"
    config = make_config(str(tmp_path / "new"))
    (begun_folder / "checkpoints" / "3").mkdir(parents=True)
    (begun_folder / "config.yaml").write_bytes(b"")
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"from_": str(begun_folder)})}
    )
    with pytest.raises(CheckpointError, match=r"move it away and begin another run"):
        check_folder(config, False)
    (begun_folder / "config.yaml").unlink()
    assert check_folder(config, False).model.from_ == str(begun_folder)


def test_a_run_from_before_a_key_was_renamed_says_what_to_write(tmp_path: Path) -> None:
    write_config(tmp_path, make_config(str(tmp_path)))
    path = tmp_path / "config.yaml"
    path.write_text(
        path.read_text().replace("  audio:\n    sample_rate", "  sounds:\n    sample_rate")
    )
    with pytest.raises(
        CheckpointError, match=r"'data.sounds' is now called 'data.audio'; rename them in that"
    ) as caught:
        check_folder(make_config(str(tmp_path)), True)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    path.write_text(path.read_text().replace("sounds:", "audio:"))
    check_folder(make_config(str(tmp_path)), True)


def test_an_unwritable_folder_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"run\.directory: .*file/run cannot be written \(Not a directory\)"
    ):
        with open_folder(make_config(str(tmp_path / "file" / "run")), False):
            raise AssertionError("opened")


@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_that_processes_do_not_share_is_refused(
    tmp_path: Path, monkeypatch, shared
) -> None:
    """The test is process 1; process 0 holds the lock of `main_folder`."""
    own_config = make_config(str(tmp_path / "here"))
    main_folder = tmp_path / ("here" if shared else "there")
    main_folder.mkdir()
    monkeypatch.setattr(lock, "SHARED_SECONDS", 0.0)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with lock.RunLock(main_folder) as run_lock:
        # Of process 0: no problem, its lock, no problem
        main_answers = iter(["", run_lock.token, ""])
        monkeypatch.setattr(hosts, "tell_all", lambda text: [next(main_answers), text])
        if shared:
            with open_folder(own_config, False):
                return
        with pytest.raises(CheckpointError, match=r"here on .* \(process 1\) is not the folder"):
            with open_folder(own_config, False):
                raise AssertionError("opened")


def test_a_disk_that_fills_up_during_the_run_is_one_line(tmp_path: Path) -> None:
    disk_full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "metrics.jsonl"))
    with pytest.raises(
        CheckpointError,
        match=r"metrics\.jsonl cannot be written \(No space left on device\): make room",
    ):
        with open_folder(make_config(str(tmp_path)), False):
            raise disk_full
    with pytest.raises(FileNotFoundError), open_folder(make_config(str(tmp_path)), False):
        raise FileNotFoundError
    assert list(tmp_path.iterdir()) == [], "the folder is released"


def test_a_component_comes_with_the_adapter_that_it_was_trained_with(tmp_path: Path) -> None:
    """Saved arrays alone tell neither alpha nor whether there should be an adapter."""
    adapter = {"rank": 2, "alpha": 4.0}
    first_config = make_config(str(tmp_path / "first"), model__adapters={"language": adapter})
    write_config(tmp_path / "first", first_config)
    checkpoint = tmp_path / "first" / "checkpoints" / "1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checksums.json").write_text("{}")
    for source in (checkpoint.parent.parent, checkpoint):
        for own_adapters in ({}, {"language": adapter | {"alpha": 8.0}}):
            config = make_config(
                str(tmp_path / "next"), model__from=str(source), model__adapters=own_adapters
            )
            with pytest.raises(CheckpointError, match=r"model.adapters.language: .* alpha=4.0"):
                check_folder(config, False)
        check_folder(
            make_config(
                str(tmp_path / "next"),
                model__from=str(source),
                model__adapters={"language": adapter},
            ),
            False,
        )


def test_a_run_may_lie_in_a_folder_called_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "checkpoints" / "mine"
    config = make_config(str(run))
    write_config(run, config)
    assert config_of(run) == config_of(run / "checkpoints" / "3") == config
