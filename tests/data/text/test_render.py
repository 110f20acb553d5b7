"""Conversations against a loop that lays them out token by token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmllm.data.media.generated import GeneratedPixels
from jaxmllm.data.media.reference import File
from jaxmllm.data.text.conversation import DOCUMENT, Conversation, ConversationError, TextPart, Turn
from jaxmllm.data.text.render import MediaSpan, Rendered, render
from jaxmllm.data.text.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer
from tests.data.text.test_tokenizers import MODALITIES, PICTURE, SOUND, SPECIALS, write_tokenizer

TALK = Conversation(
    "x",
    "s",
    (
        Turn("system", (TextPart("Be kind."),)),
        Turn("user", (TextPart("Look "), PICTURE, TextPart("listen"), SOUND)),
        Turn("assistant", (TextPart("Ça va"),)),
        Turn("user", (TextPart("More?"),)),
        Turn("assistant", (TextPart("No"), PICTURE, TextPart("yes"))),
    ),
)
SHAPES = [(1, 4, 6), (20, 1, 1), (1, 2, 2)]


@pytest.fixture(params=["bytes", "file"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    return FileTokenizer(write_tokenizer(tmp_path / "t.json", SPECIALS))


def reference(
    talk: Conversation, tokenizer: Tokenizer
) -> tuple[list[int], list[int], list[tuple[int, int, int]]]:
    """Token by token: (id, is it learned, position)."""
    layout, shapes = tokenizer.layout, iter(SHAPES)
    rows: list[tuple[int, bool, tuple[int, int, int]]] = []
    at = 0

    def put(ids: Any, learned: bool) -> None:
        nonlocal at
        for i in ids:
            rows.append((i, learned, (at, at, at)))
            at += 1

    for turn in talk.turns:
        learned = turn.role == "assistant"
        put(layout.headers[turn.role], False)
        for part in turn.parts:
            if isinstance(part, TextPart):
                put(tokenizer.encode(part.text), learned)
                continue
            frame, (_, height, width) = layout.media[part.part], next(shapes)
            put(frame.begin, False)
            if part.part == "image":
                cells = [
                    (row, column) for row in range(height // 2) for column in range(width // 2)
                ]
                rows += [(frame.pad, False, (at, at + row, at + column)) for row, column in cells]
                at += max(height // 2, width // 2)
            else:
                put([frame.pad] * 3, False)  # 20 frames, 5 attention tokens, 3 language tokens
            put(frame.end, False)
        put([layout.turn_end], learned)
        put(layout.separator, False)
    tokens = [i for i, _, _ in rows]
    targets = [i if learned else -1 for i, learned, _ in rows[1:]] + [-1]
    return tokens, targets, [position for _, _, position in rows]


def test_render_against_a_loop(tokenizer: Tokenizer) -> None:
    got = render(TALK, tokenizer, MODALITIES, SHAPES)
    tokens, targets, positions = reference(TALK, tokenizer)
    assert got.tokens.tolist() == tokens
    assert got.targets.tolist() == targets
    assert got.positions.tolist() == [list(position) for position in positions]
    assert got.tokens.dtype == got.targets.dtype == np.int32 and got.positions.dtype == np.float32
    assert [(span.phase, span.shape, span.tokens) for span in got.media] == [
        ("vision", (1, 4, 6), 6),
        ("audio", (20, 1, 1), 3),
        ("vision", (1, 2, 2), 1),
    ]
    pads = {tokenizer.layout.media[part].pad for part in ("image", "audio")}
    assert all(
        set(got.tokens[span.slot : span.slot + span.tokens].tolist()) <= pads for span in got.media
    )
    assert got.media[1] == MediaSpan(
        "audio", File(Path("/b.wav")), (20, 1, 1), got.media[1].slot, 3
    )


def test_answers_are_learned_with_their_end_and_without_headers() -> None:
    tokenizer = ByteTokenizer()
    got = render(TALK, tokenizer, MODALITIES, SHAPES)
    end = tokenizer.layout.turn_end
    assert got.targets[got.targets >= 0].tolist() == [*"Ça va".encode(), end, *b"No", *b"yes", end]


def test_media_without_an_encoder() -> None:
    with pytest.raises(
        ConversationError, match=r"no encoder of the model takes it \(encoders: vision\)"
    ) as caught:
        render(TALK, ByteTokenizer(), {"vision": MODALITIES["vision"]}, SHAPES)
    assert caught.value.reason == "no_encoder"


def test_wrong_number_of_shapes() -> None:
    with pytest.raises(ValueError, match="3 media items, but 1 shapes"):
        render(TALK, ByteTokenizer(), MODALITIES, SHAPES[:1])


def test_with_targets_all_every_text_and_turn_end_is_learned(tokenizer: Tokenizer) -> None:
    turns = (
        Turn("user", (TextPart("Hear "), SOUND)),
        Turn("tool", (TextPart("a bell"),)),
        Turn("assistant", (TextPart("Yes"),)),
    )
    talk = Conversation("x", "s", turns, "all")
    got = render(talk, tokenizer, MODALITIES, [(20, 1, 1)])
    end = tokenizer.layout.turn_end
    texts = [[*tokenizer.encode(text), end] for text in ("Hear ", "a bell", "Yes")]
    assert got.targets[got.targets >= 0].tolist() == [i for ids in texts for i in ids]
    tokens, _, positions = reference(talk, tokenizer)
    assert got.tokens.tolist() == tokens and got.positions.tolist() == [
        list(position) for position in positions
    ]


def test_a_document_is_its_content_and_an_end(tokenizer: Tokenizer) -> None:
    page = Conversation(
        "x", "s", (Turn(DOCUMENT, (TextPart("A cat."), PICTURE, TextPart("It sleeps."))),), "all"
    )
    got = render(page, tokenizer, MODALITIES, [(1, 2, 4)])
    frame, end, encode = (
        tokenizer.layout.media["image"],
        tokenizer.layout.turn_end,
        tokenizer.encode,
    )
    before, after = encode("A cat."), encode("It sleeps.")
    assert got.tokens.tolist() == [
        *before,
        *frame.begin,
        frame.pad,
        frame.pad,
        *frame.end,
        *after,
        end,
    ]
    # Nothing comes before the first token
    assert got.targets[got.targets >= 0].tolist() == [*before[1:], *after, end]
    (span,) = got.media
    assert (got.targets[span.slot - 1 : span.slot + span.tokens - 1] == -1).all()


DRAWING = {"vision": MODALITIES["vision"], "diffusion": GeneratedPixels(14, 1, 1, 1 << 20)}
DRAWN = replace(PICTURE, answered=True)


def drawing(*turns: Turn) -> Rendered:
    conversation = Conversation("id", "source", turns)
    return render(conversation, ByteTokenizer(), DRAWING, [(1, 2, 2)] * len(conversation.media))


def test_generated_items_read_what_is_said_before_them_and_have_no_tokens() -> None:
    got = drawing(
        Turn("user", (PICTURE, TextPart("in blue"))),
        Turn("assistant", (DRAWN, TextPart("or"), DRAWN, TextPart("!"))),
    )
    shown, first, second = got.media
    assert (shown.phase, shown.tokens, shown.conditions) == ("vision", 1, 0)
    frame = ByteTokenizer().layout.media["image"]
    said = got.tokens.tolist()
    assert first.phase == second.phase == "diffusion" and first.slot == 0
    assert first.tokens == first.conditions and second.slot == first.tokens
    assert said[: first.tokens][-len(frame.begin) :] == list(frame.begin)
    end = second.slot + second.tokens
    assert said[second.slot : end] == [*frame.end, *b"or", *frame.begin]
    assert said.count(frame.pad) == 1
    # That something is drawn is learned, with where it ends
    learned = got.targets[got.targets >= 0].tolist()
    drawn = [*frame.begin, *frame.end]
    assert learned == [*drawn, *b"or", *drawn, *b"!", ByteTokenizer().layout.turn_end]


def test_a_video_is_framed_as_such_and_only_drawn() -> None:
    video = replace(DRAWN, part="video")
    got = drawing(Turn("user", (TextPart("spin"),)), Turn("assistant", (video,)))
    (span,) = got.media
    frame = ByteTokenizer().layout.media["video"]
    assert (span.phase, got.tokens[span.tokens - 1]) == ("diffusion", frame.begin[0])
    with pytest.raises(
        ConversationError, match="holds a video, but no encoder of the model takes it"
    ):
        drawing(Turn("user", (replace(video, answered=False),)))


def test_nothing_is_drawn_from_nothing() -> None:
    twice = Turn("user", (TextPart("two"),)), Turn("assistant", (DRAWN, DRAWN))
    for turns in ((Turn("assistant", (DRAWN,)),), twice):
        with pytest.raises(ConversationError, match="no text or media stand before it") as caught:
            drawing(*turns)
        assert caught.value.reason == "nothing_to_draw"


def test_two_answers_without_a_generator_are_seen_or_refused() -> None:
    twice = Conversation("id", "source", (Turn("assistant", (DRAWN, DRAWN)),))
    shapes = [(1, 4, 4), (1, 2, 2)]
    seen = render(twice, ByteTokenizer(), MODALITIES, shapes)
    assert [(span.phase, span.shape) for span in seen.media] == [
        ("vision", shape) for shape in shapes
    ]
    with pytest.raises(ConversationError, match="no encoder of the model takes it") as caught:
        render(twice, ByteTokenizer(), {"audio": MODALITIES["audio"]}, shapes)
    assert caught.value.reason == "no_encoder"


def test_what_nobody_answers_or_no_generator_makes_is_seen() -> None:
    assert [span.phase for span in drawing(Turn("user", (PICTURE,))).media] == ["vision"]
    seen = render(
        Conversation("id", "source", (Turn("assistant", (DRAWN,)),)),
        ByteTokenizer(),
        MODALITIES,
        [(1, 4, 4)],
    )
    assert [span.phase for span in seen.media] == ["vision"]
    with pytest.raises(
        ConversationError, match=r"no encoder of the model takes it \(encoders: none\)"
    ):
        render(
            Conversation("id", "source", (Turn("user", (PICTURE,)),)),
            ByteTokenizer(),
            {"diffusion": DRAWING["diffusion"]},
            [(1, 4, 4)],
        )
