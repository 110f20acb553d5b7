"""Requests for pictures and clips: a source like any other, whose conversations end with the item
to draw.

    {"prompt": "a red circle", "size": "256x384"}                         height x width, in pixels
    {"prompt": "a red circle moves", "size": "64x64", "frames": 16}
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, ..]}],
     "size": "256x384", "seed": 3, "name": "blue"}

Messages have the form of training (text/conversation.py), and media paths are relative to the
folder of the file. The last message is the user's, or the text of the assistant before the item
that it draws. A picture is named by `name`, else by the number of its entry. Its noise is a
function of seed and messages, whatever else is requested.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmllm.data.media.blanks import BLANK, Blank
from jaxmllm.data.media.reference import MediaReference
from jaxmllm.data.sources.jsonl import JsonLines, resolved
from jaxmllm.data.sources.source import MISSING, DataError, RawRecord
from jaxmllm.data.text.conversation import MEDIA_LISTS, ConversationError, parse_json

KEYS = ("prompt", "messages", *MEDIA_LISTS.values(), "size", "frames", "seed", "name")
PROMPT = "--prompt"  # stands for the path when the only entry comes from the command line
_SIZE_PATTERN = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})")
_BLANK_ADDRESS = re.compile(rf"{BLANK}\d+x\d+x\d+")
_NAME_PATTERN = re.compile(r"[^/\\\0\ud800-\udfff]+")  # no surrogates: file names cannot have them
_LONGEST_NAME = 200  # bytes; a file name with its ending may have 255


@dataclass(frozen=True)
class Entry:
    """One picture or clip that is requested."""

    line: int
    name: str  # of its file, without the ending
    record: bytes  # the conversation, as JSON
    refusal: tuple[str, str] | None = None


@dataclass(frozen=True)
class Requests:
    """The entries of a file, or the one entry of a command line; a `Source`."""

    path: Path
    entries: tuple[Entry, ...]

    @classmethod
    def of_file(cls, path: Path, seed: int) -> Requests:
        """The entries of a JSONL file; lines without a seed have `seed`.

        Raises:
          DataError: the file cannot be read, holds no entry, or two entries have the same name.
        """
        try:
            file = resolved(path, strict=True)
            source = JsonLines(file, file.parent)
            source.stamp()
            records = list(source.records())
        except OSError as error:
            raise DataError(f"--jsonl: {path} cannot be read ({error.strerror})") from error
        if not records:
            raise DataError(f"--jsonl: {path} holds no line")
        return cls(
            source.path,
            _uniquely_named(_parse_entry(raw, i, seed) for i, raw in enumerate(records, start=1)),
        )

    @classmethod
    def of_prompt(cls, prompt: str, size: str, frames: int | None, seed: int) -> Requests:
        """One request for a picture of a prompt, or for a clip of `frames` frames."""
        text = json.dumps({"prompt": prompt, "size": size, "frames": frames}).encode()
        return cls(Path(PROMPT), (_parse_entry(RawRecord(1, 0, len(text), text), 1, seed),))

    def size(self) -> int:
        return sum(len(entry.record) for entry in self.entries)

    def stamp(self) -> str:
        texts = b"\n".join(entry.record for entry in self.entries)
        return hashlib.blake2b(texts, digest_size=16).hexdigest()

    def records(self) -> Iterator[RawRecord]:
        for number, entry in enumerate(self.entries):
            yield RawRecord(entry.line, number, len(entry.record), entry.record, entry.refusal)

    def record(self, offset: int) -> bytes:
        return self.entries[offset].record

    def place(self, line: int) -> tuple[str, int]:
        return str(self.path), line

    def resolve(self, name: str) -> MediaReference:
        if _BLANK_ADDRESS.fullmatch(name):
            return Blank.at(name)
        return self._files.resolve(name)

    def media(self, address: str) -> MediaReference:
        return Blank.at(address) if address.startswith(BLANK) else self._files.media(address)

    def media_stamp(self, address: str) -> tuple[int, int]:
        return MISSING if address.startswith(BLANK) else self._files.media_stamp(address)

    @property
    def _files(self) -> JsonLines:
        return JsonLines(self.path, self.path.parent)


def _uniquely_named(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    named: dict[str, Entry] = {}
    for entry in entries:
        holder = named.setdefault(entry.name, entry)
        if holder is not entry:
            raise DataError(
                f"--jsonl: lines {holder.line} and {entry.line} have the name {entry.name!r}: give one of them another"
            )
    return tuple(named.values())


def _parse_entry(raw: RawRecord, number: int, seed: int) -> Entry:
    """The entry of a line; `number` counts the entries from 1."""
    refusal = raw.refusal
    name = f"{number:04}"
    record = b""
    if refusal is None:
        try:
            asked = _checked_entry(parse_json(raw.text))
            name = asked.get("name", name)
            record = _conversation_record(asked, number, asked.get("seed", seed))
        except ConversationError as error:
            refusal = error.reason, str(error)
    return Entry(raw.line, name, record, refusal)


def _checked_entry(asked: Any) -> dict[str, Any]:
    """A parsed entry without its null values, after a check of everything except the messages.
    Raises `ConversationError`."""
    if not isinstance(asked, dict):
        raise ConversationError("wrong_type", "an entry must be a JSON object")
    asked = {key: value for key, value in asked.items() if value is not None}
    if unknown := sorted(asked.keys() - set(KEYS)):
        raise ConversationError(
            "wrong_type", f"unknown key {unknown[0]!r}; keys: {', '.join(KEYS)}"
        )
    if ("prompt" in asked) == ("messages" in asked):
        raise ConversationError("missing_field", "an entry has either 'prompt' or 'messages'")
    size = asked.get("size")
    if not isinstance(size, str) or not _SIZE_PATTERN.fullmatch(size):
        raise ConversationError(
            "wrong_type", f"size must be HEIGHTxWIDTH in pixels, such as 256x384 (got {size!r})"
        )
    # Defaults are for the checks alone and are not added to the entry: whether it has `frames`
    # tells a clip from a picture.
    frames = asked.get("frames", 1)
    if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1:
        raise ConversationError("wrong_type", f"frames must be a positive number (got {frames!r})")
    seed = asked.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConversationError("wrong_type", f"seed must be a whole number (got {seed!r})")
    name = asked.get("name", "name")
    # File systems limit bytes, not characters; a file whose name begins with a dot is hidden.
    named = isinstance(name, str) and _NAME_PATTERN.fullmatch(name) and not name.startswith(".")
    if not named or len(name.encode()) > _LONGEST_NAME:
        raise ConversationError(
            "wrong_type",
            f"name must be a file name without folders, of at most {_LONGEST_NAME} bytes (got {name!r})",
        )
    return asked


def _conversation_record(asked: dict[str, Any], number: int, seed: int) -> bytes:
    """The record of a conversation that ends with the item to draw. Its id, a digest of seed and
    messages, determines the noise; its source label is the number of the entry. Raises
    `ConversationError`."""
    conversation = {key: asked[key] for key in MEDIA_LISTS.values() if key in asked}
    conversation["messages"] = _messages(asked)
    # Computed before size and frames are added, so that noise does not depend on them.
    digest = hashlib.blake2b(
        json.dumps([seed, conversation], sort_keys=True).encode("utf-8", "surrogatepass"),
        digest_size=16,
    )
    # Text of the assistant at the end and the item become one turn.
    *before, last_message = conversation["messages"]
    answer_parts: Any = []
    if isinstance(last_message, dict) and last_message.get("role") == "assistant":
        answer_parts = last_message.get("content", "")
    else:
        before.append(last_message)
    if isinstance(answer_parts, str):
        answer_parts = [{"type": "text", "text": answer_parts}]
    if not isinstance(answer_parts, list):
        raise ConversationError("wrong_type", "content must be a string or a list of parts")
    kind = "video" if "frames" in asked else "image"
    height, width = map(int, asked["size"].split("x"))
    drawn_part = {"type": kind, kind: Blank(asked.get("frames", 1), height, width).address}
    messages = [*before, {"role": "assistant", "content": [*answer_parts, drawn_part]}]
    # Labels are numbered in the order of their text, so zeros before the number keep the order of
    # entries: what is drawn finds its entry by the number of its label.
    record = conversation | {
        "messages": messages,
        "id": digest.hexdigest(),
        "source": f"{number:09}",
    }
    return json.dumps(record).encode()


def _messages(asked: dict[str, Any]) -> list[Any]:
    if "messages" in asked:
        messages = asked["messages"]
        if not isinstance(messages, list) or not messages:
            raise ConversationError("wrong_type", "messages must be a list that is not empty")
        return messages
    prompt = asked["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConversationError("nothing_to_draw", "the prompt must be a text that is not empty")
    return [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
