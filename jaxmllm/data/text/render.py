"""Conversation -> token ids, next-token targets and three-axis positions.

    <header: user> What is this? <begin> pad pad pad <end> <turn end> <header: assistant> A cat. <turn end>
    targets:                                                                           A cat. <turn end>  -

A document has neither header nor separator, only its content and <turn end>. With targets `all`,
the texts and ends of all turns are learned.

A tokenizer brings its `ChatLayout`: which ids open and close turns and media. Positions follow M-RoPE (arXiv
2409.12191): text advances time, height and width together, media spread over the axes, and the text after them
continues at the maximum + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxmllm.data.media.modality import Modality, Shape
from jaxmllm.data.media.reference import MediaReference
from jaxmllm.data.text.conversation import DOCUMENT, Conversation, ConversationError, MediaPart
from jaxmllm.data.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class MediaSpan:
    """A media item of a rendered conversation: its `tokens` language tokens start at `slot`.

    Of a generated item, these are the tokens that it is made from, and it has `conditions` of them in
    its own rows.
    """

    phase: str
    reference: MediaReference
    shape: Shape
    slot: int
    tokens: int
    conditions: int = 0


@dataclass(frozen=True)
class Rendered:
    """A conversation as a sequence of L tokens."""

    tokens: NDArray[np.int32]  # [L]
    targets: NDArray[np.int32]  # [L] the next token where it is learned, else -1
    positions: NDArray[np.int32]  # [L, 3] time, height, width
    media: tuple[MediaSpan, ...]


def render(
    conversation: Conversation,
    tokenizer: Tokenizer,
    modalities: Mapping[str, Modality],
    shapes: Sequence[Shape],
) -> Rendered:
    """Lay out a conversation; `shapes` are those of its media in reading order, `modalities` go by
    phase name.

    Raises `ConversationError("no_encoder")` for a media part that no modality takes, "nothing_to_draw" for
    one that is made from nothing, or of what the tokenizer raises, and ValueError when the number of shapes
    is not that of the media.
    """
    media = conversation.media
    if len(shapes) != len(media):
        raise ValueError(
            f"conversation {conversation.id!r} has {len(media)} media items, but {len(shapes)} shapes"
        )
    layout = tokenizer.layout
    remaining = iter(shapes)
    sequence = _Sequence()
    something_said = False  # since the last generated item
    for turn in conversation.turns:
        learned = turn.role == "assistant" or conversation.targets == "all"
        spoken = turn.role != DOCUMENT
        if spoken:
            sequence.add_text(layout.headers[turn.role])
        for part in turn.parts:
            if isinstance(part, MediaPart):
                modality = modality_of(part, modalities)
                frame = layout.media[part.part]
                if modality.generated:
                    if not something_said:
                        raise ConversationError(
                            "nothing_to_draw",
                            f"the assistant answers with {_a(part.part)}, but no text or media stand before it that "
                            "it could be made from",
                        )
                    something_said = False
                    sequence.add_text(frame.begin, learned)
                    sequence.add_generated(part.reference, modality, next(remaining))
                    sequence.add_text(frame.end, learned)
                    continue
                something_said = True
                sequence.add_text(frame.begin)
                sequence.add_media(part.reference, modality, next(remaining), frame.pad)
                sequence.add_text(frame.end)
            else:
                something_said = True
                sequence.add_text(tokenizer.encode(part.text), learned)
        sequence.add_text((layout.turn_end,), learned)
        if spoken:
            sequence.add_text(layout.separator)
    return sequence.finish()


def modality_of(part: MediaPart, modalities: Mapping[str, Modality]) -> Modality:
    """The modality that takes a media part: of what the assistant answers, the one that generates such
    parts, if there is one. Raises `ConversationError("no_encoder")`."""
    taking = [modality for modality in modalities.values() if part.part in modality.parts]
    generating = [modality for modality in taking if modality.generated]
    if part.answered and generating:
        return generating[0]
    for modality in taking:
        if not modality.generated:
            return modality
    encoders = ", ".join(name for name, modality in modalities.items() if not modality.generated)
    raise ConversationError(
        "no_encoder",
        f"holds {_a(part.part)}, but no encoder of the model takes it (encoders: {encoders or 'none'})",
    )


def _a(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


class _Sequence:
    """Grows the arrays of a `Rendered`."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.learned: list[bool] = []
        self.positions: list[NDArray[np.int32]] = []
        self.media: list[MediaSpan] = []
        self.next_position = 0
        self.drawn = 0  # tokens up to the end of the last generated item

    def add_text(self, ids: Sequence[int], learned: bool = False) -> None:
        if not ids:
            return
        self.tokens += ids
        self.learned += [learned] * len(ids)
        line = np.arange(self.next_position, self.next_position + len(ids), dtype=np.int32)
        self._advance(np.repeat(line[:, None], 3, axis=1))

    def add_media(
        self, reference: MediaReference, modality: Modality, shape: Shape, pad: int
    ) -> None:
        tokens = modality.tokens(shape)
        self.media.append(MediaSpan(modality.name, reference, shape, len(self.tokens), tokens))
        self.tokens += [pad] * tokens
        self.learned += [False] * tokens
        self._advance(modality.token_positions(shape, self.next_position))

    def add_generated(self, reference: MediaReference, modality: Modality, shape: Shape) -> None:
        """An item without tokens of its own, made from all tokens since the one before it."""
        tokens = len(self.tokens) - self.drawn
        self.media.append(
            MediaSpan(modality.name, reference, shape, self.drawn, tokens, conditions=tokens)
        )
        self.drawn = len(self.tokens)

    def finish(self) -> Rendered:
        tokens = np.array(self.tokens, np.int32)
        targets = np.full_like(tokens, -1)
        targets[:-1] = np.where(self.learned[1:], tokens[1:], -1)
        return Rendered(tokens, targets, np.concatenate(self.positions), tuple(self.media))

    def _advance(self, positions: NDArray[np.int32]) -> None:
        self.positions.append(positions)
        self.next_position = int(positions.max()) + 1
