"""Pictures that are asked for: what an entry may be, and what its conversation is."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxmllm.data.media.blanks import Blank
from jaxmllm.data.sources.requests import Requests
from jaxmllm.data.sources.source import DataError

ASKED = [{"role": "user", "content": "a circle"}]


def requests_of(folder: Path, *entries: Any, seed: int = 0) -> Requests:
    path = folder / "asked.jsonl"
    path.write_text("\n\n".join(map(json.dumps, entries)))
    return Requests.of_file(path, seed)


def records_of(requests: Requests) -> list[dict[str, Any]]:
    """The records of requests, each read in order and again by its offset."""
    records = list(requests.records())
    assert [requests.record(raw.offset) for raw in records] == [raw.text for raw in records]
    return [json.loads(raw.text) for raw in records]


def test_conversations_end_with_the_picture(tmp_path: Path) -> None:
    partial_answer = {"role": "assistant", "content": "here:"}
    requests = requests_of(
        tmp_path,
        {"prompt": "a circle", "size": "4x8"},
        {"messages": [*ASKED, partial_answer], "size": "4x8", "name": "begun", "seed": 2},
        {"messages": [{"role": "user", "content": "<image>"}], "images": ["a.png"], "size": "8x4"},
        {"prompt": "a circle", "size": "4x8", "frames": 3},
    )
    picture = {"type": "image", "image": "blank:1x4x8"}
    plain_record, begun_record, image_record, clip_record = records_of(requests)
    video = {"type": "video", "video": "blank:3x4x8"}
    assert clip_record["messages"][-1]["content"] == [video]
    assert plain_record["messages"][-1] == {"role": "assistant", "content": [picture]}
    answer_parts = [{"type": "text", "text": "here:"}, picture]
    assert begun_record["messages"] == [*ASKED, {"role": "assistant", "content": answer_parts}]
    assert image_record["images"] == ["a.png"]
    assert [entry.name for entry in requests.entries] == ["0001", "begun", "0003", "0004"]
    assert [raw.line for raw in requests.records()] == [1, 3, 5, 7]
    assert requests.resolve("blank:1x4x8") == requests.media("blank:1x4x8") == Blank(1, 4, 8)
    assert requests.resolve("a.png").path == tmp_path / "a.png"


def test_noise_is_a_function_of_seed_and_messages(tmp_path: Path) -> None:
    prompt = {"prompt": "a circle", "size": "4x8"}
    user_messages = [{"role": "user", "content": [{"type": "text", "text": "a circle"}]}]
    other_entries = (
        {"messages": user_messages, "size": "8x8"},
        prompt | {"seed": 5},
        prompt | {"prompt": "a dot"},
    )
    ids = [record["id"] for record in records_of(requests_of(tmp_path, prompt, *other_entries))]
    # Words in parts, and the size, leave the noise as it is. Seed and words change it.
    assert ids[0] == ids[1] and len(set(ids)) == 3
    (prompt_record,) = records_of(Requests.of_prompt("a circle", "4x8", None, 5))
    (seeded_record,) = records_of(requests_of(tmp_path, prompt, seed=5))
    assert prompt_record["id"] == seeded_record["id"] == ids[2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": " "}, "the prompt must be a text that is not empty"),
        ({"messages": ASKED}, "either 'prompt' or 'messages'"),
        ({"prompt": None, "messages": []}, "messages must be a list that is not empty"),
        ({"size": "4"}, "size must be HEIGHTxWIDTH in pixels"),
        ({"size": "0x4"}, "size must be HEIGHTxWIDTH in pixels"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"name": "../x"}, "name must be a file name without folders"),
        ({"name": "ü" * 101}, "of at most 200 bytes"),
        ({"name": "\ud800"}, "name must be a file name without folders"),
        ({"frames": 0}, "frames must be a positive number"),
        ({"depth": 8}, "unknown key 'depth'"),
    ],
)
def test_entries_that_cannot_be_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    requests = requests_of(tmp_path, {"prompt": "a circle", "size": "4x8"} | change)
    (raw,) = requests.records()
    assert raw.refusal is not None and words in raw.refusal[1]


def test_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    entry = {"prompt": "a", "size": "4x4", "name": "twice"}
    with pytest.raises(DataError, match="lines 1 and 3 have the name 'twice'"):
        requests_of(tmp_path, entry, entry)
    with pytest.raises(DataError, match="holds no line"):
        requests_of(tmp_path)
    with pytest.raises(DataError, match="absent cannot be read"):
        Requests.of_file(tmp_path / "absent", 0)
