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
    """The obvious layout, token by token: ids, targets (-1 where nothing is learned), and
    positions."""
    layout = tokenizer.layout
    shapes = iter(SHAPES)
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
        for content in turn.parts:
            if isinstance(content, TextPart):
                put(tokenizer.encode(content.text), learned)
                continue
            frame, (_, height, width) = layout.media[content.part], next(shapes)
            put(frame.begin, False)
            # A picture's rows and columns advance from one position, and what follows starts behind
            # the larger side.
            if content.part == "image":
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
    rendered = render(TALK, tokenizer, MODALITIES, SHAPES)
    tokens, targets, positions = reference(TALK, tokenizer)
    assert rendered.tokens.tolist() == tokens
    assert rendered.targets.tolist() == targets
    assert rendered.positions.tolist() == [list(position) for position in positions]
    assert (
        rendered.tokens.dtype == rendered.targets.dtype == np.int32
        and rendered.positions.dtype == np.float32
    )
    assert [(span.phase, span.shape, span.tokens) for span in rendered.media] == [
        ("vision", (1, 4, 6), 6),
        ("audio", (20, 1, 1), 3),
        ("vision", (1, 2, 2), 1),
    ]
    pads = {tokenizer.layout.media[part].pad for part in ("image", "audio")}
    assert all(
        set(rendered.tokens[span.slot : span.slot + span.tokens].tolist()) <= pads
        for span in rendered.media
    )
    assert rendered.media[1] == MediaSpan(
        "audio", File(Path("/b.wav")), (20, 1, 1), rendered.media[1].slot, 3
    )


def test_answers_are_learned_with_their_end_and_without_headers() -> None:
    tokenizer = ByteTokenizer()
    rendered = render(TALK, tokenizer, MODALITIES, SHAPES)
    end = tokenizer.layout.turn_end
    assert rendered.targets[rendered.targets >= 0].tolist() == [
        *"Ça va".encode(),
        end,
        *b"No",
        *b"yes",
        end,
    ]


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
    rendered = render(talk, tokenizer, MODALITIES, [(20, 1, 1)])
    end = tokenizer.layout.turn_end
    texts = [[*tokenizer.encode(text), end] for text in ("Hear ", "a bell", "Yes")]
    assert rendered.targets[rendered.targets >= 0].tolist() == [i for ids in texts for i in ids]
    tokens, _, positions = reference(talk, tokenizer)
    assert rendered.tokens.tolist() == tokens and rendered.positions.tolist() == [
        list(position) for position in positions
    ]


def test_a_document_is_its_content_and_an_end(tokenizer: Tokenizer) -> None:
    page = Conversation(
        "x", "s", (Turn(DOCUMENT, (TextPart("A cat."), PICTURE, TextPart("It sleeps."))),), "all"
    )
    rendered = render(page, tokenizer, MODALITIES, [(1, 2, 4)])
    frame = tokenizer.layout.media["image"]
    end = tokenizer.layout.turn_end
    encode = tokenizer.encode
    text_before = encode("A cat.")
    text_after = encode("It sleeps.")
    assert rendered.tokens.tolist() == [
        *text_before,
        *frame.begin,
        frame.pad,
        frame.pad,
        *frame.end,
        *text_after,
        end,
    ]
    # The first token has nothing before it that could predict it, so it is not learned.
    assert rendered.targets[rendered.targets >= 0].tolist() == [*text_before[1:], *text_after, end]
    (span,) = rendered.media
    assert (rendered.targets[span.slot - 1 : span.slot + span.tokens - 1] == -1).all()


DRAWING = {"vision": MODALITIES["vision"], "diffusion": GeneratedPixels(14, 1, 1, 1 << 20)}
DRAWN = replace(PICTURE, answered=True)


def drawing(*turns: Turn) -> Rendered:
    conversation = Conversation("id", "source", turns)
    return render(conversation, ByteTokenizer(), DRAWING, [(1, 2, 2)] * len(conversation.media))


def test_generated_items_read_what_is_said_before_them_and_have_no_tokens() -> None:
    rendered = drawing(
        Turn("user", (PICTURE, TextPart("in blue"))),
        Turn("assistant", (DRAWN, TextPart("or"), DRAWN, TextPart("!"))),
    )
    shown_image, first_item, second_item = rendered.media
    assert (shown_image.phase, shown_image.tokens, shown_image.conditions) == ("vision", 1, 0)
    frame = ByteTokenizer().layout.media["image"]
    ids = rendered.tokens.tolist()
    assert first_item.phase == second_item.phase == "diffusion" and first_item.slot == 0
    assert first_item.tokens == first_item.conditions and second_item.slot == first_item.tokens
    assert ids[: first_item.tokens][-len(frame.begin) :] == list(frame.begin)
    end = second_item.slot + second_item.tokens
    assert ids[second_item.slot : end] == [*frame.end, *b"or", *frame.begin]
    assert ids.count(frame.pad) == 1
    # The model learns to begin a drawing, and where it ends.
    learned = rendered.targets[rendered.targets >= 0].tolist()
    drawing_frame = [*frame.begin, *frame.end]
    assert learned == [
        *drawing_frame,
        *b"or",
        *drawing_frame,
        *b"!",
        ByteTokenizer().layout.turn_end,
    ]


def test_a_video_is_framed_as_such_and_only_drawn() -> None:
    video = replace(DRAWN, part="video")
    rendered = drawing(Turn("user", (TextPart("spin"),)), Turn("assistant", (video,)))
    (span,) = rendered.media
    frame = ByteTokenizer().layout.media["video"]
    assert (span.phase, rendered.tokens[span.tokens - 1]) == ("diffusion", frame.begin[0])
    with pytest.raises(
        ConversationError, match="holds a video, but no encoder of the model takes it"
    ):
        drawing(Turn("user", (replace(video, answered=False),)))


def test_nothing_is_drawn_from_nothing() -> None:
    two_drawings = Turn("user", (TextPart("two"),)), Turn("assistant", (DRAWN, DRAWN))
    for turns in ((Turn("assistant", (DRAWN,)),), two_drawings):
        with pytest.raises(ConversationError, match="no text or media stand before it") as caught:
            drawing(*turns)
        assert caught.value.reason == "nothing_to_draw"


def test_two_answers_without_a_generator_are_seen_or_refused() -> None:
    two_answers = Conversation("id", "source", (Turn("assistant", (DRAWN, DRAWN)),))
    shapes = [(1, 4, 4), (1, 2, 2)]
    rendered = render(two_answers, ByteTokenizer(), MODALITIES, shapes)
    assert [(span.phase, span.shape) for span in rendered.media] == [
        ("vision", shape) for shape in shapes
    ]
    with pytest.raises(ConversationError, match="no encoder of the model takes it") as caught:
        render(two_answers, ByteTokenizer(), {"audio": MODALITIES["audio"]}, shapes)
    assert caught.value.reason == "no_encoder"


def test_what_nobody_answers_or_no_generator_makes_is_seen() -> None:
    assert [span.phase for span in drawing(Turn("user", (PICTURE,))).media] == ["vision"]
    rendered = render(
        Conversation("id", "source", (Turn("assistant", (DRAWN,)),)),
        ByteTokenizer(),
        MODALITIES,
        [(1, 4, 4)],
    )
    assert [span.phase for span in rendered.media] == ["vision"]
    with pytest.raises(
        ConversationError, match=r"no encoder of the model takes it \(encoders: none\)"
    ):
        render(
            Conversation("id", "source", (Turn("user", (PICTURE,)),)),
            ByteTokenizer(),
            {"diffusion": DRAWING["diffusion"]},
            [(1, 4, 4)],
        )
