"""Records of conversations: contents in both forms, defaults, refusals, videos and documents."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxmllm.data.media.reference import Clip, File
from jaxmllm.data.sources.jsonl import JsonLines
from jaxmllm.data.text.conversation import (
    Conversation,
    ConversationError,
    MediaPart,
    TextPart,
    Turn,
    parse_conversation,
    parse_json,
)

ANSWER = {"role": "assistant", "content": "A cat."}


def resolver(root: Path) -> Callable[[str], File]:
    return JsonLines(root / "train.jsonl", root).resolve


def parse(record: object, root: Path) -> Conversation:
    return parse_conversation(record, resolver(root), default_id="s:1", default_source="s")


def refusal(record: object, root: Path) -> ConversationError:
    with pytest.raises(ConversationError) as caught:
        parse(record, root)
    return caught.value


def test_content_parts(tmp_path: Path) -> None:
    content = [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "What "},
        {"type": "text", "text": ""},
        {"type": "text", "text": "<image>?"},
        {"type": "audio", "audio": "sub/b.flac"},
    ]
    talk = parse(
        {"id": 7, "source": "cats", "messages": [{"role": "user", "content": content}, ANSWER]},
        tmp_path,
    )
    image = MediaPart("image", File(tmp_path / "a.png", "a.png"))
    sound = MediaPart("audio", File(tmp_path / "sub/b.flac", "sub/b.flac"))
    assert talk == Conversation(
        "7",
        "cats",
        (
            Turn("user", (image, TextPart("What "), TextPart("<image>?"), sound)),
            Turn("assistant", (TextPart("A cat."),)),
        ),
    )
    assert talk.media == (image, sound)


def test_both_forms_give_the_same_conversation(tmp_path: Path) -> None:
    """Contents may be lists of parts, or strings with placeholders and lists of paths beside them."""
    content_parts = [
        {"type": "text", "text": "See "},
        {"type": "image", "image": "a.png"},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": " hear "},
        {"type": "audio", "audio": "c.wav"},
    ]
    second_parts = [{"type": "image", "image": "d.png"}]
    by_parts = {
        "messages": [
            {"role": "user", "content": content_parts},
            ANSWER,
            {"role": "user", "content": second_parts},
            ANSWER,
        ]
    }
    by_lists = {
        "images": ["a.png", "b.png", "d.png"],
        "audios": ["c.wav"],
        "messages": [
            {"role": "user", "content": "See <image><image> hear <audio>"},
            ANSWER,
            {"role": "user", "content": "<image>"},
            ANSWER,
        ],
    }
    assert parse(by_parts, tmp_path) == parse(by_lists, tmp_path)


def test_defaults(tmp_path: Path) -> None:
    talk = parse({"messages": [ANSWER]}, tmp_path)
    assert (talk.id, talk.source) == ("s:1", "s")


@pytest.mark.parametrize(
    ("record", "reason", "words"),
    [
        ([], "wrong_type", "a JSON object, not a list"),
        ({}, "missing_field", "no 'messages'"),
        ({"messages": "hello"}, "wrong_type", "messages must be a list"),
        ({"messages": ["hello"]}, "wrong_type", "messages[0] must be an object"),
        (
            {"messages": [ANSWER | {"reasoning_content": ["a"]}]},
            "wrong_type",
            "messages[0].reasoning_content must be a string",
        ),
        (
            {"messages": [ANSWER | {"reasoning_content": "\ud800"}]},
            "invalid_text",
            "messages[0].reasoning_content",
        ),
        (
            {"messages": [{"role": "robot", "content": ""}]},
            "unknown_role",
            "'robot'; roles are system, user, assistant, tool",
        ),
        ({"messages": [{"role": "user"}]}, "missing_field", "messages[0] has no 'content'"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "wrong_type",
            "a string or a list, not a number",
        ),
        (
            {"messages": [{"role": "user", "content": ["hi"]}]},
            "wrong_type",
            "content[0] must be an object",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "film"}]}]}, "unknown_part", "'film'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "missing_field",
            "no 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": "hi"}]},
            "no_assistant_turn",
            "nothing to learn",
        ),
        ({"messages": []}, "no_assistant_turn", "nothing to learn"),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "invalid_text", "not Unicode"),
        ({"messages": [ANSWER], "id": ["x"]}, "wrong_type", "'id'"),
        ({"messages": [{"role": "document", "content": "hi"}]}, "unknown_role", "'document'"),
        ({"messages": [ANSWER], "id": "x" * 300}, "wrong_type", "256"),
        ({"messages": [ANSWER], "id": "x\0"}, "invalid_text", "'id' holds a NUL"),
        ({"messages": [ANSWER], "source": "x\0"}, "invalid_text", "'source' holds a NUL"),
        ({"messages": [ANSWER], "id": float("inf")}, "wrong_type", "'id'"),
        ({"messages": [ANSWER], "id": 10**300}, "wrong_type", "256"),
        ({"text": "A page."}, "no_assistant_turn", "targets: all"),
        ({"messages": [ANSWER], "images": "a.png"}, "wrong_type", "'images' must be a list"),
    ],
)
def test_refusals(record: object, reason: str, words: str, tmp_path: Path) -> None:
    error = refusal(record, tmp_path)
    assert error.reason == reason
    assert words in str(error)


def learn_all(record: object, root: Path) -> Conversation:
    return parse_conversation(
        record, resolver(root), default_id="s:1", default_source="s", targets="all"
    )


def test_a_video_is_a_clip_of_frames(tmp_path: Path) -> None:
    """The same file may also be an image."""
    answer = {"role": "assistant", "content": "<image> moves: <video>"}
    record = {"messages": [answer], "images": ["a.gif"], "videos": ["a.gif"]}
    image, video = parse(record, tmp_path).media
    file = File(tmp_path / "a.gif", "a.gif")
    assert image == MediaPart("image", file, answered=True)
    assert video == MediaPart("video", Clip(file), answered=True)


def test_documents(tmp_path: Path) -> None:
    """Placeholders and parts give the same page, a text alone is a page, and null counts as absent."""
    image = MediaPart("image", File(tmp_path / "a.png", "a.png"))
    page = Conversation(
        "s:1",
        "s",
        (Turn("document", (TextPart("A cat. "), image, TextPart(" It sleeps."))),),
        "all",
    )
    words = [{"type": "text", "text": "A cat. "}, {"type": "text", "text": " It sleeps."}]
    content_parts = [words[0], {"type": "image", "image": "a.png"}, words[1]]
    text = "A cat. <image> It sleeps."
    assert learn_all({"content": content_parts}, tmp_path) == page
    for key in ("text", "content"):
        assert learn_all({key: text, "images": ["a.png"], "messages": None}, tmp_path) == page
    assert learn_all({"text": "Words."}, tmp_path).turns == (
        Turn("document", (TextPart("Words."),)),
    )
    assert learn_all({"content": content_parts[1:2]}, tmp_path).turns == (
        Turn("document", (image,)),
    )


def test_with_targets_all_any_roles_do(tmp_path: Path) -> None:
    messages = [{"role": role, "content": role} for role in ("system", "tool", "user")]
    talk = learn_all({"messages": messages, "text": "what the turns make together"}, tmp_path)
    assert [turn.role for turn in talk.turns] == [
        "system",
        "tool",
        "user",
    ] and talk.targets == "all"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": ""}, "nothing_to_learn"),
        ({"content": []}, "nothing_to_learn"),
        ({"messages": []}, "nothing_to_learn"),
        ({"text": "a", "content": "b"}, "wrong_type"),
        ({"text": ["a"]}, "wrong_type"),
        ({"text": None}, "missing_field"),
        ({"text": "<image>"}, "placeholder_mismatch"),
        ({"content": [{"type": "image", "image": "../a.png"}]}, "path_escapes_root"),
    ],
)
def test_refused_documents(record: object, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConversationError) as caught:
        learn_all(record, tmp_path)
    assert caught.value.reason == reason


def test_messages_are_one_printable_line(tmp_path: Path) -> None:
    # Line breaks, terminal commands and a right-to-left override could forge other messages.
    hostile = "a\n\x1b[31m\u202e\u2028error: b"
    for record in (
        picture(f"../{hostile}"),
        {"messages": [{"role": hostile, "content": ""}]},
        {hostile: 1},
    ):
        assert str(refusal(record, tmp_path)).isprintable()
    # A long value is shortened in the message.
    assert (
        len(str(refusal({"messages": [{"role": "x" * 100_000, "content": ""}]}, tmp_path))) < 3000
    )


@pytest.mark.parametrize("images", [["a.png"], ["a.png", "b.png", "c.png"], []])
def test_placeholder_count_names_both_counts(images: list[str], tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "<image> or <image>?"}, ANSWER]
    error = refusal({"images": images, "messages": messages}, tmp_path)
    assert error.reason == "placeholder_mismatch"
    assert f"2 <image> placeholders in string contents but {len(images)} paths" in str(error)


def picture(path: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [{"type": "image", "image": path}]}, ANSWER]}


# Cut JSON, bytes that are no UTF-8, too deep nesting, and a number of too many digits.
@pytest.mark.parametrize(
    "line", [b'{"a": ', b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_malformed_json(line: bytes) -> None:
    with pytest.raises(ConversationError) as caught:
        parse_json(line)
    assert caught.value.reason == "malformed_json"


def test_byte_order_mark_is_ignored() -> None:
    assert parse_json(b"\xef\xbb\xbf" + json.dumps({"a": "é"}).encode()) == {"a": "é"}
