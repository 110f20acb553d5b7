"""A tokenizer file with the chat template of its model. Each text between two control tokens is
encoded as a whole."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxmllm.arrays import Longs
from jaxmllm.data.printable import shown
from jaxmllm.data.text.answer_marks import ControlNames
from jaxmllm.data.text.chat_template import ChatTemplate
from jaxmllm.data.text.conversation import ConversationError
from jaxmllm.data.text.tokenizers import ChatLayout, ChatNames, FileTokenizer, TokenizerError

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Files next to the tokenizer file that name special tokens; the later one takes precedence
NAMED_IN = ("special_tokens_map.json", "tokenizer_config.json")
# Text in a template that can only be meant as one token
_TOKEN_SPELLING = re.compile(r"<\|[^\s|<>]+\|>|<(?:start|end)_of_\w+>")


@dataclass(frozen=True)
class Encoded:
    """T tokens, and the pieces of text that each of them covers."""

    ids: list[int]
    first: Longs  # [T] number of the piece with the first character of the token
    last: Longs  # [T] number of the piece with its last character


class TemplateTokenizer(FileTokenizer):
    """A `FileTokenizer` of any model with a chat template, which writes the frames of turns.

    Its layout only frames media and documents. Raises `TokenizerError` if the tokenizer lacks a
    token that the template writes, or if no file names the token that ends a text.
    """

    def __init__(self, path: str | Path, template: str | Path, today: date | None = None):
        self._special = _special_names(Path(path))
        self.template = ChatTemplate.read(template, self._special, today)
        super().__init__(path)
        _check_written_tokens(self.template, self._special, self._tokenizer.token_to_id, str(path))
        self.fingerprint = hashlib.blake2b(
            (self.fingerprint + self.template.fingerprint).encode(), digest_size=16
        ).hexdigest()

    @cached_property
    def control(self) -> ControlNames:
        """The control tokens that a template can write."""
        return ControlNames({str(self._tokenizer.id_to_token(i)): i for i in sorted(self._control)})

    @cached_property
    def document_begin(self) -> tuple[int, ...]:
        """Ids that the tokenizer puts before any text: its bos_token, or nothing."""
        begin = self._special_id("bos_token")
        ids = self._tokenizer.encode("", add_special_tokens=True).ids
        return () if begin is None or begin not in ids[:1] else (begin,)

    def encode_pieces(self, pieces: Sequence[str | int]) -> Encoded:
        """The ids of literal texts and control tokens, joined and encoded as one text.

        Raises `ConversationError("control_token")` if a text needs a control token to be written.
        """
        texts = [self.speller.name(p) if isinstance(p, int) else p for p in pieces]
        starts = np.cumsum([0, *map(len, texts)])[:-1]
        encoding = self.speller.tokenizer.encode("".join(texts), add_special_tokens=False)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        last_characters = np.maximum(spans[:, 1] - 1, spans[:, 0])
        first_piece = np.searchsorted(starts, spans[:, 0], "right") - 1
        last_piece = np.searchsorted(starts, last_characters, "right") - 1
        # A control token may absorb white space around it that belongs to other pieces, so its own
        # piece is set from the order of control tokens
        ids = encoding.ids
        control = np.flatnonzero(np.isin(ids, [*self._control])).tolist()
        meant = [index for index, piece in enumerate(pieces) if isinstance(piece, int)]
        if [ids[position] for position in control] != [pieces[index] for index in meant]:
            raise ConversationError(
                "control_token", "holds text that the tokenizer can only write as control tokens"
            )
        first_piece[control] = last_piece[control] = meant
        return Encoded(ids, first_piece, last_piece)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key != "control"}

    def _layout(self, names: ChatNames, path: str) -> tuple[ChatLayout, set[int]]:
        end = self._special_id("eos_token")
        pads = (self._special_id("pad_token"), *map(self._tokenizer.token_to_id, names.pad), end)
        pad = next((i for i in pads if i is not None), None)
        if pad is None or end is None:
            raise TokenizerError(
                f"data.tokenizer: {shown(path)} has no eos_token: name one of its tokens in the "
                f"{NAMED_IN[-1]} beside it"
            )
        media = self._media_frames(names, pad)
        frames = {i for tokens in media.values() for i in (*tokens.begin, *tokens.end, tokens.pad)}
        named = {
            i for name in NAMES if name != "unk_token" if (i := self._special_id(name)) is not None
        }
        return ChatLayout({}, end, (), media, pad), {pad, end, *frames, *named}

    def _special_id(self, name: str) -> int | None:
        token = self._special.get(name)
        token_id: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return token_id


def _special_names(path: Path) -> dict[str, str]:
    """Special tokens by name, from the files next to a tokenizer file."""
    named: dict[str, str] = {}
    for name in NAMED_IN:
        file = path.parent / name
        if not file.is_file():
            continue
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise TokenizerError(
                f"data.tokenizer: {shown(file)} cannot be read: {shown(error)}; copy it again"
            ) from error
        named |= dict(_named_tokens(values))
    return named


def _named_tokens(values: Any) -> Iterator[tuple[str, str]]:
    """(name, token) pairs of a JSON object; a token is a text, or an object with its `content`."""
    for name in NAMES if isinstance(values, Mapping) else ():
        token = values.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            yield name, token


def _check_written_tokens(
    template: ChatTemplate, special: Mapping[str, str], find: Any, path: str
) -> None:
    """Raise `TokenizerError` for a token that the template writes and the tokenizer lacks."""
    written = {token for text in template.literals for token in _TOKEN_SPELLING.findall(text)}
    written |= {token for name, token in special.items() if name in template.variables}
    if absent := sorted(token for token in written if find(token) is None):
        raise TokenizerError(
            f"data.tokenizer: {shown(path)} has no token {shown(', '.join(absent))}, which {shown(template.path)} "
            "writes; name the tokenizer and the template of one model in data.tokenizer and data.chat_template"
        )
