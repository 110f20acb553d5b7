"""Tokenizers of the `tokenizers` library that treat all text as text, even where it spells a
control token."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import tokenizers

_PLAIN_TOKEN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)


@dataclass(frozen=True)
class Speller:
    """A tokenizer whose control tokens are renamed to names that no text contains, so that text
    which spells a control token is encoded with other tokens. All ids stay the same."""

    tokenizer: tokenizers.Tokenizer
    nonce: str

    @classmethod
    def of(cls, text: str, control: frozenset[int]) -> Speller:
        """The speller of a tokenizer file, whose content is `text`."""
        nonce = secrets.token_hex(16)  # random, because a record could contain a known name
        return cls(_renamed_tokenizer(json.loads(text), control, nonce), nonce)

    def name(self, control: int) -> str:
        """The name that stands for a control token in text to be encoded."""
        return _control_name(self.nonce, control)


def literal_tokenizer(text: str) -> tokenizers.Tokenizer:
    """A tokenizer that does not turn the spelling of a special token into that token. (Pickling
    loses this setting of the library.)"""
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def unknown_id(model: Mapping[str, Any], tokenizer: tokenizers.Tokenizer) -> int | None:
    """The token for text that is not in the vocabulary, if the model has one."""
    token: int | None = model.get("unk_id")
    name = model.get("unk_token")
    return tokenizer.token_to_id(name) if token is None and name else token


def _control_name(nonce: str, token: int) -> str:
    return f"\ufdd0{nonce}{token}\ufdd1"


def _renamed_tokenizer(
    file: dict[str, Any], control: frozenset[int], nonce: str
) -> tokenizers.Tokenizer:
    """The tokenizer of a file, with control tokens renamed, and without merges that yield them."""

    def renamed(name: str, token_id: int) -> str:
        return _control_name(nonce, token_id) if token_id in control else name

    for token in file["added_tokens"]:
        token["content"] = renamed(token["content"], token["id"])
        # With `encode_special_tokens`, a token that is marked special would be read as text even by
        # its new name
        token["special"] = token["special"] and token["id"] not in control
    # Control tokens that are only words of the model are added, so that names are found whole
    known = {token["id"] for token in file["added_tokens"]}
    file["added_tokens"] += [
        {"id": token_id, "content": _control_name(nonce, token_id), **_PLAIN_TOKEN}
        for token_id in sorted(control - known)
    ]
    # Removed because it would trim the offsets of tokens; it adds no tokens here
    file["post_processor"] = None
    model = file["model"]
    removed = _rename_words(model, control, renamed)
    if model.get("merges"):
        model["merges"] = _merges_without(removed, model)
    return literal_tokenizer(json.dumps(file))


def _rename_words(
    model: dict[str, Any], control: frozenset[int], renamed: Callable[[str, int], str]
) -> set[str]:
    """Rename control tokens in a model's vocabulary; return the names that they had.

    A vocabulary is a mapping from names to ids, or a list of (name, score) whose places are ids.
    """
    vocabulary = model["vocab"]
    if not isinstance(vocabulary, dict):
        model["vocab"] = [
            [renamed(name, token_id), score] for token_id, (name, score) in enumerate(vocabulary)
        ]
        return {name for token_id, (name, _) in enumerate(vocabulary) if token_id in control}
    unknown = vocabulary.get(model.get("unk_token"))
    if unknown in control:
        model["unk_token"] = renamed("", unknown)
    model["vocab"] = {renamed(name, token_id): token_id for name, token_id in vocabulary.items()}
    return {name for name, token_id in vocabulary.items() if token_id in control}


def _merges_without(removed: Set[str], model: Mapping[str, Any]) -> list[list[str]]:
    """The model's merges that neither read nor yield a removed name."""
    prefix = model.get("continuing_subword_prefix") or ""
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    return [
        [left, right]
        for left, right in pairs
        if removed.isdisjoint((left, right, left + right.removeprefix(prefix)))
    ]
