"""Tokenizers of the `tokenizers` library that take text for text, whatever it spells."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

_PLAIN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)


@dataclass(frozen=True)
class Speller:
    """A tokenizer whose control tokens have names that no text says: what merely spells one is put together from other
    tokens. All ids stay."""

    tokenizer: tokenizers.Tokenizer
    nonce: str

    @classmethod
    def of(cls, text: str, control: frozenset[int]) -> Speller:
        """That of a tokenizer file, read as text."""
        nonce = secrets.token_hex(16)  # a name that was known could be written in a text
        return cls(_respelled(json.loads(text), control, nonce), nonce)

    def name(self, control: int) -> str:
        """What stands for a control token in the text to be encoded."""
        return _name(self.nonce, control)


def literal_tokenizer(text: str) -> tokenizers.Tokenizer:
    """A tokenizer that does not take what spells a special token for one. (The library forgets this
    setting when it is pickled.)"""
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def unknown_id(model: Mapping[str, Any], tokenizer: tokenizers.Tokenizer) -> int | None:
    """The token that the model writes for text that it does not know, if there is one."""
    token: int | None = model.get("unk_id")
    name = model.get("unk_token")
    return tokenizer.token_to_id(name) if token is None and name else token


def _name(nonce: str, token: int) -> str:
    return f"\ufdd0{nonce}{token}\ufdd1"


def _respelled(file: dict[str, Any], control: frozenset[int], nonce: str) -> tokenizers.Tokenizer:
    def renamed(name: str, token_id: int) -> str:
        return _name(nonce, token_id) if token_id in control else name

    for token in file["added_tokens"]:
        token["content"] = renamed(token["content"], token["id"])
        # Special ones would be text, too
        token["special"] = token["special"] and token["id"] not in control
    # A control token that is a word of the model alone must be found as a whole, too
    known = {token["id"] for token in file["added_tokens"]}
    file["added_tokens"] += [
        {"id": token_id, "content": _name(nonce, token_id), **_PLAIN}
        for token_id in sorted(control - known)
    ]
    # It adds nothing, and trims the places of tokens
    file["post_processor"] = None
    model = file["model"]
    if isinstance(model["vocab"], dict):
        gone = {name for name, token_id in model["vocab"].items() if token_id in control}
        unknown = model["vocab"].get(model.get("unk_token"))
        if unknown in control:
            model["unk_token"] = renamed("", unknown)
        model["vocab"] = {
            renamed(name, token_id): token_id for name, token_id in model["vocab"].items()
        }
    else:
        gone = {name for token_id, (name, _) in enumerate(model["vocab"]) if token_id in control}
        model["vocab"] = [
            [renamed(name, token_id), score]
            for token_id, (name, score) in enumerate(model["vocab"])
        ]
    if model.get("merges"):
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [
            [left, right]
            for left, right in pairs
            if gone.isdisjoint((left, right, left + right.removeprefix(prefix)))
        ]
    return literal_tokenizer(json.dumps(file))
