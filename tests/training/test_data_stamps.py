"""Data that is edited during a run is noticed and named, even if all lengths stay the same."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import SourceConfig
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.modalities import modalities
from jaxmllm.data.media.sounds import Sounds
from jaxmllm.data.text.tokenizers import ByteTokenizer
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.training.data_stamps import _common_media, check_data, write_data
from tests.support import tiny_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six records; every other one has a picture."""
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    lines = []
    for index in range(6):
        record = {
            "id": f"r{index}",
            "messages": [{"role": "assistant", "content": f"answer {index}"}],
        }
        if index % 2:
            picture = Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8))
            picture.save(folder / f"{index}.bmp")
            user = {"role": "user", "content": "<image>what?"}
            record |= {"images": [f"{index}.bmp"], "messages": [user, *record["messages"]]}
        lines.append(json.dumps(record) + "\n")
    (folder / "a.jsonl").write_text("".join(lines))
    return folder


def opened(folder: Path) -> Corpus:
    """The corpus of the folder, indexed anew."""
    source = SourceConfig(name="s", path=str(folder / "a.jsonl"))
    return Corpus.open(
        [source], ByteTokenizer(), {"vision": Images(14, 2, 28 * 28, 1 << 20)}, progress=False
    )


def refusal(run: Path, corpus: Corpus) -> str:
    """The message, of one line, with which a run refuses to continue on this data."""
    with pytest.raises(CheckpointError) as caught:
        check_data(run, corpus, True)
    assert "\n" not in str(caught.value)
    assert f"model.from={run}" in str(caught.value)
    return str(caught.value)


def train_on(run: Path, corpus: Corpus) -> None:
    """What a run that begins or continues does with its data."""
    check_data(run, corpus, True)
    write_data(run, corpus)


def test_unchanged_data_is_what_it_was(folder, tmp_path, capsys):
    for _ in range(2):
        train_on(tmp_path / "run", opened(folder))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "data.json",
        "data.npz",
        "rejected.jsonl",
    ]
    assert capsys.readouterr().out == ""


def test_stamps_are_written_where_something_changed(folder, tmp_path):
    stamps = tmp_path / "run" / "data.npz"
    train_on(tmp_path / "run", opened(folder))
    file_identity = stamps.stat().st_ino, stamps.stat().st_mtime_ns
    train_on(tmp_path / "run", opened(folder))
    assert (stamps.stat().st_ino, stamps.stat().st_mtime_ns) == file_identity
    # A new modification time alone is worth a new stamp
    os.utime(folder / "1.bmp", (1, 1))
    train_on(tmp_path / "run", opened(folder))
    assert (stamps.stat().st_ino, stamps.stat().st_mtime_ns) != file_identity


@pytest.mark.parametrize("before", ["abc", "cab", "bd", ""])
def test_stamps_are_those_of_the_files_that_were_there_before(before):
    """Stamps of media are paired by name; before, there were more, fewer or no media."""
    current_stamps = {name: [n, 10 * n] for n, name in enumerate("abc")}
    stamps = np.array([[ord(name), 0] for name in before], np.int64).reshape(-1, 2)
    media = SimpleNamespace(
        address=tuple(current_stamps), stamp=np.array(list(current_stamps.values()))
    )
    encoded = np.frombuffer(json.dumps(tuple(before)).encode(), np.uint8)
    names, now_stamps, before_stamps = _common_media(SimpleNamespace(media=media), encoded, stamps)
    assert list(names) == [name for name in current_stamps if name in before]
    assert now_stamps.tolist() == [current_stamps[name] for name in names]
    assert before_stamps.tolist() == [[ord(name), 0] for name in names]


def test_another_answer_of_the_same_length_is_named(folder, tmp_path):
    before = opened(folder)
    train_on(tmp_path / "run", before)
    path = folder / "a.jsonl"
    path.write_text(
        path.read_text().replace("answer 2", "answer 9").replace("answer 4", "answer 8")
    )
    after = opened(folder)
    assert after.fingerprint() == before.fingerprint(), "lengths say nothing"
    text = refusal(tmp_path / "run", after)
    assert text.startswith(
        f"{path}:3: the record 'r2' is not the one that the run was trained on (2 records differ)"
    )


def test_records_that_came_or_went_are_counted(folder, tmp_path):
    train_on(tmp_path / "run", opened(folder))
    path = folder / "a.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    assert "a.jsonl: 5 usable records, 6 when the run was trained on them" in refusal(
        tmp_path / "run", opened(folder)
    )


def test_another_picture_is_named(folder, tmp_path):
    train_on(tmp_path / "run", opened(folder))
    with (folder / "3.bmp").open("ab") as stream:
        stream.write(b"more")
    text = refusal(tmp_path / "run", opened(folder))
    size = (folder / "3.bmp").stat().st_size
    assert text.startswith(
        f"{folder / '3.bmp'} has {size} bytes, {size - 4} when the run was trained on it (1 media"
    )


def test_a_copy_with_new_times_is_a_warning(folder, tmp_path, capsys):
    train_on(tmp_path / "run", opened(folder))
    for path in folder.glob("*.bmp"):
        os.utime(path, (1, 1))
    train_on(tmp_path / "run", opened(folder))
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert "warning: 3 media files of source 's' have another modification time" in output
    assert f"the first is {folder / '1.bmp'}" in output
    train_on(tmp_path / "run", opened(folder))
    assert capsys.readouterr().out == "", "said once"


def test_other_lengths_are_refused_without_stamps_too(folder, tmp_path):
    train_on(tmp_path / "run", opened(folder))
    (tmp_path / "run" / "data.npz").unlink()
    path = folder / "a.jsonl"
    path.write_text(path.read_text().replace("answer 2", "another answer"))
    assert "was trained on other data: 6 examples then, 6 now, or other lengths" in refusal(
        tmp_path / "run", opened(folder)
    )


@pytest.mark.parametrize("name", ["data.json", "data.npz"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xff\xff"])
def test_damaged_files_are_one_line(folder, tmp_path, name, content):
    train_on(tmp_path / "run", opened(folder))
    (tmp_path / "run" / name).write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"{name} is damaged \(.*delete it to continue"
    ) as caught:
        train_on(tmp_path / "run", opened(folder))
    assert "\n" not in str(caught.value)
    shutil.rmtree(tmp_path / "run")


def test_slots_that_depend_on_the_model_are_no_other_data(data):
    """A tower that hears silence takes complete chunks of sound, so clips have more slots."""
    config = parse_config(tiny_config(data))
    media = modalities(config.model, config.data)
    assert isinstance(media["audio"], Sounds)
    heard_media = media | {"audio": replace(media["audio"], silence="heard")}
    corpus, heard_corpus = (
        Corpus.open(config.data.sources, ByteTokenizer(), readers)
        for readers in (media, heard_media)
    )
    assert not np.array_equal(corpus.indexes[0].item_length, heard_corpus.indexes[0].item_length)
    assert corpus.fingerprint() == heard_corpus.fingerprint()
