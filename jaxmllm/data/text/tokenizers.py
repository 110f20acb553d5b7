"""Text <-> token ids, and the ids that frame a conversation. `data.tokenizer` names a file; without
one, bytes are tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from jaxmllm.data.printable import shown
from jaxmllm.data.text.conversation import ROLES, ConversationError
from jaxmllm.data.text.speller import Speller, literal_tokenizer, unknown_id

Ids = tuple[int, ...]


class TokenizerError(ValueError):
    """A tokenizer file that cannot be used; the message names the file and what it lacks."""


@dataclass(frozen=True)
class MediaTokens:
    """Ids around a media item (`begin`, `end`), texts around these (`before`, `after`), and the id
    that stands in for each of its tokens (`pad`)."""

    begin: Ids
    end: Ids
    pad: int
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class ChatLayout:
    """The ids that frame a conversation. Each turn is: header, content, `turn_end`, `separator`."""

    headers: Mapping[str, Ids]  # by role
    turn_end: int
    separator: Ids
    media: Mapping[str, MediaTokens]  # by part
    pad: int


class Tokenizer(Protocol):
    """Text <-> ids. `encode` never yields an id of the layout, whatever the text is: text that
    spells a control token is encoded with other tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def layout(self) -> ChatLayout: ...

    @property
    def fingerprint(self) -> str:
        """A text that changes whenever the same conversation could get different ids."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, without control tokens."""
        ...


class ByteTokenizer:
    """A tokenizer without a file: ids 0-255 are UTF-8 bytes, then come special ids. The vocabulary
    is rounded up to a multiple of 16, so that tensor-parallel ranks can divide it."""

    vocab_size = 272
    fingerprint = "bytes-1"
    layout = ChatLayout(
        headers={"system": (257,), "user": (258,), "assistant": (259,), "tool": (265,)},
        turn_end=260,
        separator=(),
        media={
            "image": MediaTokens((261,), (262,), 256),
            "audio": MediaTokens((263,), (264,), 256),
            "video": MediaTokens((266,), (267,), 256),
        },
        pad=256,
    )

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class ChatNames:
    """Names of the special tokens in a tokenizer file. A turn reads `turn_begin header content
    turn_end separator`.

    For each media part, the first (begin, pad, end) whose tokens all exist is used; if there is
    none, these media have no frame tokens.
    """

    turn_begin: str = "<|im_start|>"
    header: str = "{role}\n"
    turn_end: str = "<|im_end|>"
    separator: str = "\n"
    pad: tuple[str, ...] = ("<|endoftext|>", "<|pad|>", "<pad>", "[PAD]")
    media: Mapping[str, tuple[tuple[str, str, str], ...]] = field(
        default_factory=lambda: {
            "image": (("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),),
            "audio": (
                ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
                ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
            ),
        }
    )


# Pad tokens of videos, the first that exists; if none does, videos use the pad token of images
VIDEO_PADS = ("<|video_pad|>", "<|VIDEO|>")
# Further (begin, pad, end) of media parts for which a file has none of `ChatNames`: the first whose
# tokens all exist
FURTHER = {
    "image": (
        ("<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"),
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        ("<img>", "<IMG_CONTEXT>", "</img>"),
    )
}
# Begin token of a frame -> texts that the model's processor or template writes before and after it
AROUND = {"<start_of_image>": ("\n\n", "\n\n"), "<img>": ("", "\n")}


class FileTokenizer:
    """A JSON file of the `tokenizers` library with ChatML-like special tokens.

    Its control tokens are those of the layout and all added tokens that are marked special, except
    the token for unknown text. Raises `TokenizerError` if the file is unreadable or lacks the
    tokens that frame a turn.
    """

    def __init__(self, path: str | Path, names: ChatNames | None = None):
        names = names or ChatNames()
        try:
            if not Path(path).is_file():  # reading a pipe could wait forever
                raise TokenizerError("no such file, or no regular one")
            self._json = Path(path).read_text(encoding="utf-8")
            self._tokenizer = literal_tokenizer(self._json)
        except Exception as error:  # the library raises bare Exception
            reason = shown(f"{path} is no readable tokenizers JSON file: {error}")
            raise TokenizerError(f"data.tokenizer: {reason}") from error
        # Made when first needed, which is rare
        self._speller: Speller | None = None
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.layout, frame = self._layout(names, str(path))
        self._control = self._control_ids(frame)
        # Files for which these rules change nothing (no control token could come out of encoding,
        # no frame of FURTHER is used) keep the fingerprint that they had before the rules existed.
        spelled = "spelled" if self._may_encode_control() else ""
        further = "further" if self._further_frames(names) else ""
        self.fingerprint = hashlib.blake2b(
            (self._json + repr(names) + spelled + further).encode(), digest_size=16
        ).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Raises `ConversationError("control_token")` if the tokenizer can write
        it only with a control token."""
        ids = self._plain(text)
        if self._control.isdisjoint(ids):
            return ids
        ids = self.speller.tokenizer.encode(text, add_special_tokens=False).ids
        if remaining := self._control.intersection(ids):
            names = ", ".join(str(self._tokenizer.id_to_token(i)) for i in sorted(remaining))
            raise ConversationError(
                "control_token", f"holds text that the tokenizer can only write as {names}"
            )
        return ids

    @property
    def speller(self) -> Speller:
        """The same tokenizer with its control tokens renamed."""
        if self._speller is None:
            self._speller = Speller.of(self._json, self._control)
        return self._speller

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            [i for i in ids if i not in self._control], skip_special_tokens=True
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_tokenizer": None, "_speller": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._tokenizer = literal_tokenizer(self._json)

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _layout(self, names: ChatNames, path: str) -> tuple[ChatLayout, set[int]]:
        """The layout, and the ids of its control tokens."""
        find = self._tokenizer.token_to_id
        turn_begin = find(names.turn_begin)
        turn_end = find(names.turn_end)
        if turn_begin is None or turn_end is None:
            raise TokenizerError(
                f"data.tokenizer: {shown(path)} must have the tokens {names.turn_begin!r} and {names.turn_end!r}, "
                "which frame a turn; use a chat tokenizer, or name the model's own template in data.chat_template"
            )
        pad = next((i for i in map(find, names.pad) if i is not None), turn_end)
        headers = {
            role: (turn_begin, *self._plain(names.header.format(role=role))) for role in ROLES
        }
        media = self._media_frames(names, pad)
        frames = {i for tokens in media.values() for i in (*tokens.begin, *tokens.end, tokens.pad)}
        layout = ChatLayout(headers, turn_end, tuple(self._plain(names.separator)), media, pad)
        return layout, {turn_begin, turn_end, pad, *frames}

    def _media_frames(self, names: ChatNames, pad: int) -> dict[str, MediaTokens]:
        """Frame tokens of each media part."""
        without = MediaTokens((), (), pad)
        media = {
            part: self._existing_frame(triples) or without for part, triples in names.media.items()
        }
        media |= self._further_frames(names)
        frame = media["image"]  # videos have the frame tokens of images
        pads = (self._tokenizer.token_to_id(name) for name in VIDEO_PADS)
        return media | {
            "video": replace(frame, pad=next((i for i in pads if i is not None), frame.pad))
        }

    def _further_frames(self, names: ChatNames) -> dict[str, MediaTokens]:
        """Frame tokens from FURTHER, of media parts for which the file has none of `names`."""
        missing = [
            part for part, triples in names.media.items() if self._existing_frame(triples) is None
        ]
        frames = {part: self._existing_frame(FURTHER[part]) for part in missing if part in FURTHER}
        return {part: frame for part, frame in frames.items() if frame is not None}

    def _existing_frame(self, triples: Sequence[tuple[str, str, str]]) -> MediaTokens | None:
        """The first of these (begin, pad, end) whose tokens all exist."""
        for triple in triples:
            begin, pad, end = map(self._tokenizer.token_to_id, triple)
            if begin is not None and pad is not None and end is not None:
                return MediaTokens((begin,), (end,), pad, *AROUND.get(triple[0], ("", "")))
        return None

    def _control_ids(self, frame: set[int]) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        unknown = unknown_id(json.loads(self._json)["model"], self._tokenizer)
        return frozenset(
            frame | {i for i, token in added.items() if token.special and i != unknown}
        )

    def _may_encode_control(self) -> bool:
        """Whether plain encoding may yield a control token: one that is not marked special, or that
        is a word of the model's own vocabulary."""
        added = self._tokenizer.get_added_tokens_decoder()
        words = set(self._tokenizer.get_vocab(with_added_tokens=False).values())
        return any(i in words or i not in added or not added[i].special for i in self._control)
