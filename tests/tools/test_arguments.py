"""Types of command-line arguments: what they accept, and what they refuse before work begins."""

import argparse

import pytest

from jaxmllm.tools.arguments import (
    MOST,
    measuring_parser,
    new_file,
    new_folder,
    positive_int,
    seed_int,
)


def test_numbers(capsys):
    for kind, number in [
        (positive_int, 1),
        (positive_int, MOST),
        (seed_int, 0),
        (seed_int, (1 << 63) - 1),
    ]:
        assert kind(str(number)) == number
    for kind, text in [
        (positive_int, "0"),
        (positive_int, "-1"),
        (positive_int, "1.5"),
        (positive_int, ""),
        (positive_int, "x"),
        (positive_int, str(MOST + 1)),
        (seed_int, "-1"),
        (seed_int, "nan"),
        (seed_int, str(1 << 63)),
    ]:
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a whole number"):
            kind(text)
    with pytest.raises(SystemExit):
        measuring_parser("", "jaxmllm waste").parse_args(["--seed", "-1"])
    assert "waste: error: argument --seed: '-1' is not a whole number" in capsys.readouterr().err


def test_folders_and_files_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in ("", ".", "folder", "new/below", str(tmp_path)):
        new_folder(path)
    for path in ("file", "new", "folder/new/below", "/dev/null"):
        new_file(path)
    for kind, path, reason in [
        (new_folder, "file", "file is not a folder"),
        (new_folder, "file/below", "file is not a folder"),
        (new_file, "folder", "folder is a folder"),
        (new_file, "", r"\. is a folder"),
        (new_file, "file/below", "file is not a folder"),
    ]:
        with pytest.raises(argparse.ArgumentTypeError, match=reason):
            kind(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
