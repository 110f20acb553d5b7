"""JSONL sources: paths of media stay below the root, lines have a bound, and other files are
refused."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from jaxmllm.config.schema import SourceConfig
from jaxmllm.data.sources import jsonl
from jaxmllm.data.sources.jsonl import JsonLines
from jaxmllm.data.sources.source import MISSING, DataError
from jaxmllm.data.text.conversation import ConversationError
from tests.data.index.examples import ask, index_of, text, write


def test_media_must_stay_below_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    outside = tmp_path / "root-beside"
    (root / "sub").mkdir(parents=True)
    outside.mkdir()
    (outside / "a.png").write_bytes(b"")
    os.symlink(outside, root / "link")
    source = JsonLines(root / "train.jsonl", root)

    def refusal(name: str) -> str:
        with pytest.raises(ConversationError) as caught:
            source.resolve(name)
        return caught.value.reason

    # Paths that leave the root, an absolute one even into it, and the root itself.
    escapes = (
        "../root-beside/a.png",
        "sub/../../x.png",
        str(root / "a.png"),
        "link/a.png",
        "/etc/passwd",
        ".",
    )
    assert [refusal(name) for name in escapes] == ["path_escapes_root"] * len(escapes)
    assert refusal("a\0.png") == refusal("") == "wrong_type"
    resolved = source.resolve("sub/../a.png")
    assert resolved.path == root / "a.png"
    assert source.media(resolved.address) == resolved


def test_a_step_up_from_a_link_is_one_from_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "far/away").mkdir(parents=True)
    os.symlink("far/away", tmp_path / "link")
    source = JsonLines(tmp_path / "train.jsonl", tmp_path)
    # The step up begins at far/away, where the link leads, and not at the link.
    assert source.resolve("link/../a.png").path == tmp_path / "far/a.png"
    assert source.resolve("./link//a.png").path == tmp_path / "link/a.png"


def test_a_root_may_be_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "root")
    source = JsonLines.of(
        SourceConfig(name="s", path=str(tmp_path / "x.jsonl"), root=str(tmp_path / "root"))
    )
    resolved = source.resolve("a.png")
    assert resolved.path == tmp_path / "real/a.png"
    assert source.media(resolved.address) == resolved


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero"), tmp_path):
        with pytest.raises(
            DataError, match=r"source 'x': .* is no regular file; see data\.sources"
        ):
            index_of(SourceConfig(name="x", path=str(path)))


def test_a_line_without_end_is_refused_without_being_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE", 10_000)
    # The line has 50 MB, and at most 10 MB may be held while it is read.
    long = json.dumps({"id": "long", "text": "x" * 50_000_000})
    source = write(
        tmp_path / "train.jsonl", ask(text("a"), id="first"), long, ask(text("b"), id="last")
    )
    tracemalloc.start()
    index = index_of(source)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    assert index.id.tolist() == ["first", "last"] and index.line.tolist() == [1, 3]
    (rejected,) = index.rejected
    assert (rejected.reason, rejected.line, rejected.id) == ("line_too_long", 2, "animals:2")
    assert f"a line of {len(long) + 1} bytes; a record has at most 10000" in rejected.message
    with (tmp_path / "train.jsonl").open("rb") as file:
        file.seek(int(index.offset[1]))
        assert json.loads(file.readline())["id"] == "last"


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_of_just_the_bound_is_read(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.dumps(ask(text("a"), id="first"))
    for bound, read_count in ((len(record + end), 1), (len(record + end) - 1, 0)):
        monkeypatch.setattr(jsonl, "MAX_LINE", bound)
        (tmp_path / "train.jsonl").write_text(record + end)
        index = index_of(
            SourceConfig(name="s", path=str(tmp_path / "train.jsonl")), tmp_path / str(bound)
        )
        assert len(index) == read_count and len(index.rejected) == 1 - read_count


def test_the_record_after_a_line_of_the_bound_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its newline such a line is one byte too long, which only its last byte shows."""
    records = [ask(text("a" * n), id=f"{n}") for n in (9, 50, 9)]
    monkeypatch.setattr(jsonl, "MAX_LINE", len(json.dumps(records[1])))
    index = index_of(write(tmp_path / "train.jsonl", *records))
    assert index.line.tolist() == [1, 3] and [refusal.line for refusal in index.rejected] == [2]


def test_a_link_to_itself_is_told(tmp_path: Path) -> None:
    os.symlink("loop.jsonl", tmp_path / "loop.jsonl")
    with pytest.raises(DataError, match=r"source 'x': .*loop\.jsonl cannot be read"):
        index_of(SourceConfig(name="x", path=str(tmp_path / "loop.jsonl")))


def test_the_stamp_of_a_folder_sees_its_files_beside_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    for name in ("0.png", "1.png"):
        (tmp_path / "clip" / name).write_bytes(b"0")
    # A dangling link, such as the lock of an editor, must not hide changes of other files.
    os.symlink("user@host.1", tmp_path / "clip" / ".#0.png")
    source = JsonLines(tmp_path / "train.jsonl", tmp_path)
    stamp_before = source.media_stamp("clip")
    (tmp_path / "clip" / "1.png").write_bytes(b"longer")
    assert MISSING != stamp_before != source.media_stamp("clip") != MISSING
