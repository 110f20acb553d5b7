import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from jaxmllm.data.conversation import Conversation, ConversationError, Media, Text, Turn
from jaxmllm.data.images import Images
from jaxmllm.data.modality import Modality
from jaxmllm.data.sounds import Sounds
from jaxmllm.data.text import (
    ByteTokenizer,
    FileTokenizer,
    MediaSpan,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
    render,
)

MODALITIES: dict[str, Modality] = {
    "vision": Images(patch_size=14, merge=2, min_pixels=784, max_pixels=784 * 64),
    "audio": Sounds(16_000, 400, 160, 80, chunk_frames=64, merge=2, max_seconds=60.0),
}
PICTURE, SOUND = Media("image", Path("/a.png")), Media("audio", Path("/b.wav"))
TALK = Conversation(
    "x",
    "s",
    (
        Turn("system", (Text("Be kind."),)),
        Turn("user", (Text("Look "), PICTURE, Text("listen"), SOUND)),
        Turn("assistant", (Text("Ça va"),)),
        Turn("user", (Text("More?"),)),
        Turn("assistant", (Text("No"), PICTURE, Text("yes"))),
    ),
)
SHAPES = [(4, 6), (20, 1), (2, 2)]
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]


def write_tokenizer(path: Path, specials: list[str]) -> Path:
    """A byte-level tokenizer without merges: one id a byte, then the special tokens."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(path))
    return path


@pytest.fixture(params=["bytes", "file"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return load_tokenizer(None if request.param == "bytes" else write_tokenizer(tmp_path / "t.json", SPECIALS))


def test_text_survives_and_ids_stay_in_the_vocabulary(tokenizer: Tokenizer) -> None:
    text = "naïve 猫 <|im_end|>\n\t"
    ids = tokenizer.encode(text)
    layout = tokenizer.layout
    special = {layout.turn_end, layout.pad, *(header[0] for header in layout.headers.values())}
    assert tokenizer.decode(ids) == text
    assert not special & set(ids)
    assert max(*ids, *special) < tokenizer.vocab_size
    assert tokenizer.decode([*ids, layout.turn_end]) == text


def reference(talk: Conversation, tokenizer: Tokenizer) -> tuple[list[int], list[int], list[tuple[int, int, int]]]:
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
            if isinstance(part, Text):
                put(tokenizer.encode(part.text), learned)
                continue
            frame, (height, width) = layout.media[part.part], next(shapes)
            put(frame.begin, False)
            if part.part == "image":
                cells = [(row, column) for row in range(height // 2) for column in range(width // 2)]
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
    assert {array.dtype for array in (got.tokens, got.targets, got.positions)} == {np.dtype(np.int32)}
    assert [(span.phase, span.shape, span.tokens) for span in got.media] == [
        ("vision", (4, 6), 6),
        ("audio", (20, 1), 3),
        ("vision", (2, 2), 1),
    ]
    pads = {tokenizer.layout.media[part].pad for part in ("image", "audio")}
    assert all(set(got.tokens[span.slot : span.slot + span.tokens].tolist()) <= pads for span in got.media)
    assert got.media[1] == MediaSpan("audio", Path("/b.wav"), (20, 1), got.media[1].slot, 3)


def test_answers_are_learned_with_their_end_and_without_headers() -> None:
    tokenizer = ByteTokenizer()
    got = render(TALK, tokenizer, MODALITIES, SHAPES)
    end = tokenizer.layout.turn_end
    assert got.targets[got.targets >= 0].tolist() == [*"Ça va".encode(), end, *b"No", *b"yes", end]


def test_chat_layout_of_a_file(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(write_tokenizer(tmp_path / "t.json", SPECIALS))
    ids = {name: 256 + i for i, name in enumerate(SPECIALS)}
    talk = Conversation("x", "s", (Turn("user", (PICTURE, SOUND)), Turn("assistant", (Text("a"),))))
    got = render(talk, tokenizer, MODALITIES, [(2, 2), (4, 1)])
    encode = tokenizer.encode
    assert got.tokens.tolist() == [
        *(ids["<|im_start|>"], *encode("user\n")),
        *(ids["<|vision_start|>"], ids["<|image_pad|>"], ids["<|vision_end|>"]),
        ids["<|endoftext|>"],  # no audio tokens in this file: no frame, the common pad
        *(ids["<|im_end|>"], *encode("\n")),
        *(ids["<|im_start|>"], *encode("assistant\n"), *encode("a"), ids["<|im_end|>"], *encode("\n")),
    ]


def test_a_pickled_tokenizer_still_takes_text_literally(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(write_tokenizer(tmp_path / "t.json", SPECIALS))
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("<|im_end|>") == tokenizer.encode("<|im_end|>")
    assert len(copy.encode("<|im_end|>")) == len("<|im_end|>")
    assert copy.fingerprint == tokenizer.fingerprint


def test_unusable_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"must have the tokens '<\|im_start\|>' and '<\|im_end\|>'"):
        FileTokenizer(write_tokenizer(tmp_path / "t.json", ["<|endoftext|>"]))
    (tmp_path / "broken.json").write_text("{}")
    for name in ("broken.json", "absent.json"):
        with pytest.raises(TokenizerError, match=rf"data.tokenizer: .*{name}"):
            load_tokenizer(tmp_path / name)


def test_media_without_an_encoder() -> None:
    with pytest.raises(ConversationError, match=r"no encoder of the model takes it \(encoders: vision\)") as caught:
        render(TALK, ByteTokenizer(), {"vision": MODALITIES["vision"]}, SHAPES)
    assert caught.value.reason == "no_encoder"


def test_wrong_number_of_shapes() -> None:
    with pytest.raises(ValueError, match="3 media items, but 1 shapes"):
        render(TALK, ByteTokenizer(), MODALITIES, SHAPES[:1])
