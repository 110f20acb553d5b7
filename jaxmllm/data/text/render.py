"""Conversation -> token ids, next-token targets and three-axis positions.

    <header: user> A dog? <begin> pad pad <end> <turn end> <header: assistant> A cat. <turn end>
    targets:                                                                A cat. <turn end>  -

A document has neither header nor separator, only its content and <turn end>. With targets `all`,
the texts and ends of all turns are learned.

The `ChatLayout` of a tokenizer holds the ids that open and close turns and media (their frame
tokens). If the tokenizer has a chat template, the template writes the turns (answer_marks.py), and
the layout only frames media and documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jaxmllm.data.media.modality import ClipShape, Modality, Shape
from jaxmllm.data.media.reference import Clip, FrameGroup, MediaReference
from jaxmllm.data.text.answer_marks import Piece, written_pieces
from jaxmllm.data.text.conversation import (
    CALLS,
    DOCUMENT,
    TOOLS,
    Conversation,
    ConversationError,
    MediaPart,
    TextPart,
)
from jaxmllm.data.text.sequence_positions import SequencePositions
from jaxmllm.data.text.template_tokenizer import TemplateTokenizer
from jaxmllm.data.text.tokenizers import Tokenizer

Item = tuple[MediaReference, Modality, Shape]  # of a conversation, as it is added to a sequence


@dataclass(frozen=True)
class MediaSpan:
    """A media item of a rendered conversation: its `tokens` language tokens start at `slot`.

    For a generated item, these are the tokens that it is made from, and its own rows hold a
    condition for each of them, `conditions` in all.
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
    targets: NDArray[np.int32]  # [L] the next token if it is learned, else -1
    positions: NDArray[np.float32]  # [L, 3] time, height, width
    media: tuple[MediaSpan, ...]


def render(
    conversation: Conversation,
    tokenizer: Tokenizer,
    modalities: Mapping[str, Modality],
    shapes: Sequence[Shape],
) -> Rendered:
    """Lay out a conversation. `shapes` are the shapes of its media in reading order; `modalities`
    is keyed by phase.

    Raises `ConversationError`: no_encoder for a media part that no modality takes, nothing_to_draw
    for an item that would be made from nothing, no_place for content that the layout cannot hold,
    and any reason of the tokenizer. Raises `ValueError` if the number of shapes is not the number
    of media.
    """
    media = conversation.media
    if len(shapes) != len(media):
        raise ValueError(
            f"conversation {conversation.id!r} has {len(media)} media items, but {len(shapes)} shapes"
        )
    _check_drawable(conversation, modalities)
    if isinstance(tokenizer, TemplateTokenizer):
        pieces = _conversation_pieces(conversation, tokenizer)
        return _render_pieces(pieces, media, tokenizer, modalities, shapes)
    if conversation.tools or any(turn.calls for turn in conversation.turns):
        raise ConversationError(
            "no_place",
            f"holds {TOOLS} or {CALLS}, for which the layout chatml has no place; set data.chat_template to the "
            "template of a model, or remove them",
        )
    return _render_turns(conversation, tokenizer, modalities, shapes)


def _render_turns(
    conversation: Conversation,
    tokenizer: Tokenizer,
    modalities: Mapping[str, Modality],
    shapes: Sequence[Shape],
) -> Rendered:
    """Render turn by turn, each framed by the tokenizer's layout."""
    layout = tokenizer.layout
    remaining = iter(shapes)
    sequence = _SequenceBuilder()
    for turn in conversation.turns:
        learned = turn.role == "assistant" or conversation.targets == "all"
        spoken = turn.role != DOCUMENT
        if spoken:
            sequence.add_text(layout.headers[turn.role])
        for part in _join_texts(turn.parts):
            if isinstance(part, MediaPart):
                modality = modality_of(part, modalities)
                frame = layout.media[part.part]
                # The assistant makes a generated item, and so writes its frame; other items are
                # shown to it.
                frame_learned = learned and modality.generated
                for caption, reference, shape in _framed_units(part, modality, next(remaining)):
                    sequence.add_text(tokenizer.encode(caption))
                    sequence.add_text(
                        (*tokenizer.encode(frame.before), *frame.begin), frame_learned
                    )
                    sequence.add_item(reference, modality, shape, frame.pad)
                    sequence.add_text((*frame.end, *tokenizer.encode(frame.after)), frame_learned)
            else:
                sequence.add_text(tokenizer.encode(part.text), learned)
        # The end is learned with the answer, because it stops generation; the separator is not.
        sequence.add_text((layout.turn_end,), learned)
        if spoken:
            sequence.add_text(layout.separator)
    return sequence.finish()


def _join_texts(parts: Sequence[TextPart | MediaPart]) -> Iterator[TextPart | MediaPart]:
    """The parts of a turn, with neighbouring texts joined, because they are encoded as one text."""
    for is_text, group in itertools.groupby(parts, lambda part: isinstance(part, TextPart)):
        if is_text:
            yield TextPart("".join(part.text for part in group if isinstance(part, TextPart)))
        else:
            yield from group


def _conversation_pieces(conversation: Conversation, tokenizer: TemplateTokenizer) -> list[Piece]:
    """The pieces of a conversation, as the tokenizer's template writes it. Documents are not
    written by the template."""
    turn = conversation.turns[0]
    if turn.role != DOCUMENT:
        return written_pieces(conversation, tokenizer.template, tokenizer.control)
    # All of a document is learned: with targets `assistant` its record has been refused.
    media_numbers = itertools.count()
    pieces = [Piece(token) for token in tokenizer.document_begin]
    for part in turn.parts:
        if isinstance(part, TextPart):
            pieces.append(Piece(part.text, learned=True))
        else:
            pieces.append(Piece("", media=next(media_numbers)))
    pieces.append(Piece(tokenizer.layout.turn_end, learned=True))
    return pieces


def _render_pieces(
    pieces: Sequence[Piece],
    media: Sequence[MediaPart],
    tokenizer: TemplateTokenizer,
    modalities: Mapping[str, Modality],
    shapes: Sequence[Shape],
) -> Rendered:
    """Render pieces. All text is encoded together, and only control tokens and media split it."""
    framed, items = _frame_media(pieces, media, tokenizer, modalities, shapes)
    encoded = tokenizer.encode_pieces([piece.content for piece in framed])
    if not encoded.ids:
        raise ConversationError("answers_unclear", "the chat template writes nothing of it")
    # A token is learned if any of its characters is: the sum of `learned` rises between its first
    # and last piece
    learned_before = np.cumsum([0, *(piece.learned for piece in framed)])
    learned = learned_before[encoded.last + 1] > learned_before[encoded.first]
    piece_items = np.array([-1 if piece.media is None else piece.media for piece in framed])
    token_items = piece_items[encoded.first]
    # Runs of tokens that are all learned or all not, and that belong to one item or to none
    changes = (learned[1:] != learned[:-1]) | (token_items[1:] != token_items[:-1])
    cuts = [0, *(1 + np.flatnonzero(changes)).tolist(), len(token_items)]
    sequence = _SequenceBuilder()
    for start, end in itertools.pairwise(cuts):
        ids = encoded.ids[start:end]
        if token_items[start] < 0:
            sequence.add_text(ids, bool(learned[start]))
        else:
            sequence.add_item(*items[token_items[start]], *ids)
    return sequence.finish()


def _frame_media(
    pieces: Sequence[Piece],
    media: Sequence[MediaPart],
    tokenizer: TemplateTokenizer,
    modalities: Mapping[str, Modality],
    shapes: Sequence[Shape],
) -> tuple[list[Piece], list[Item]]:
    """The pieces with frames around the items of media, and these items, which are numbered in
    `Piece.media` of the pieces that stand for their tokens."""
    framed: list[Piece] = []
    items: list[Item] = []
    for piece in pieces:
        if piece.media is None:
            framed.append(piece)
            continue
        part = media[piece.media]
        shape = shapes[piece.media]
        modality = modality_of(part, modalities)
        frame = tokenizer.layout.media[part.part]
        frame_learned = modality.generated  # the assistant makes the item, and so writes its frame
        before: list[str | int] = [frame.before, *frame.begin]
        after: list[str | int] = [*frame.end, frame.after]
        for caption, reference, of_item in _framed_units(part, modality, shape):
            framed += [Piece(caption)] if caption else []
            framed += [Piece(content, learned=frame_learned) for content in before if content != ""]
            # One piece stands for all tokens of the item.
            framed.append(replace(piece, content=frame.pad, media=len(items)))
            framed += [Piece(content, learned=frame_learned) for content in after if content != ""]
            items.append((reference, modality, of_item))
    return framed, items


def _framed_units(
    part: MediaPart, modality: Modality, shape: Shape
) -> list[tuple[str, MediaReference, Shape]]:
    """(text before it, reference, shape) of each unit that has frame tokens of its own: the whole
    media item, or each group of frames of a video with captions."""
    captions = modality.captions(shape)
    if not captions:
        return [("", part.reference, shape)]
    items = items_of(part.reference, shape)
    return [(caption, *item) for caption, item in zip(captions, items, strict=True)]


def items_of(reference: MediaReference, shape: Shape) -> tuple[tuple[MediaReference, Shape], ...]:
    """(reference, shape) of each item that a media item of a conversation becomes: itself, or its
    groups of frames."""
    if not isinstance(shape, ClipShape):
        return ((reference, shape),)
    assert isinstance(reference, Clip)
    return tuple((FrameGroup(reference, number), shape.group) for number in range(shape[0]))


def _check_drawable(conversation: Conversation, modalities: Mapping[str, Modality]) -> None:
    """Raise `ConversationError` for a generated item that has nothing before it to be made from."""
    something_said = False  # whether text or media came after the last generated item
    for turn in conversation.turns:
        for part in turn.parts:
            if isinstance(part, TextPart) or not modality_of(part, modalities).generated:
                something_said = True
                continue
            if not something_said:
                raise ConversationError(
                    "nothing_to_draw",
                    f"the assistant answers with {_with_article(part.part)}, but no text or media stand before it that "
                    "it could be made from",
                )
            something_said = False


def modality_of(part: MediaPart, modalities: Mapping[str, Modality]) -> Modality:
    """The modality that takes a media part. For a part of an assistant's answer, it is the modality
    that generates such parts, if there is one. Raises `ConversationError("no_encoder")`."""
    taking = [modality for modality in modalities.values() if part.part in modality.parts]
    generating = [modality for modality in taking if modality.generated]
    if part.answered and generating:
        return generating[0]
    # Without a generator, an encoder reads the media of answers like all others.
    for modality in taking:
        if not modality.generated:
            return modality
    encoders = ", ".join(name for name, modality in modalities.items() if not modality.generated)
    has_tower = part.part == "video" and "vision" in modalities
    cure = "; set model.vision.videos, and see data.videos" if has_tower else ""
    raise ConversationError(
        "no_encoder",
        f"holds {_with_article(part.part)}, but no encoder of the model takes it "
        f"(encoders: {encoders or 'none'}){cure}",
    )


def _with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


class _SequenceBuilder:
    """A `Rendered` that is built item by item."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.learned: list[bool] = []
        self.positions = SequencePositions()
        self.media: list[MediaSpan] = []
        self.drawn = 0  # number of tokens up to the last generated item

    def add_text(self, ids: Sequence[int], learned: bool = False) -> None:
        if not ids:
            return
        self.tokens += ids
        self.learned += [learned] * len(ids)
        self.positions.add_text(len(ids))

    def add_item(
        self, reference: MediaReference, modality: Modality, shape: Shape, pad: int
    ) -> None:
        if modality.generated:
            self._add_generated(reference, modality, shape)
            return
        for item, of_item in items_of(reference, shape):
            tokens = modality.tokens(of_item)
            self.media.append(MediaSpan(modality.name, item, of_item, len(self.tokens), tokens))
            self.tokens += [pad] * tokens
            self.learned += [False] * tokens
        self.positions.add_item(modality, shape)

    def _add_generated(self, reference: MediaReference, modality: Modality, shape: Shape) -> None:
        """Add a generated item. It has no tokens of its own, and is made from all tokens since the
        generated item before it."""
        tokens = len(self.tokens) - self.drawn
        self.media.append(
            MediaSpan(modality.name, reference, shape, self.drawn, tokens, conditions=tokens)
        )
        self.drawn = len(self.tokens)

    def finish(self) -> Rendered:
        tokens = np.array(self.tokens, np.int32)
        targets = np.full_like(tokens, -1)
        targets[:-1] = np.where(self.learned[1:], tokens[1:], -1)
        return Rendered(tokens, targets, self.positions.finish(), tuple(self.media))
