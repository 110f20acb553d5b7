"""One record -> one `Conversation`: who said what, with which images, audio clips and videos.

Media have two forms. *Content parts* name each media item in its place; their text is literal:

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"},
                                               {"type": "text", "text": "What?"}]},
                  {"role": "assistant", "content": "A cat."}]}

*Placeholders* in string contents take the paths of the record's lists in order:

    {"images": ["a.png"], "messages": [{"role": "user", "content": "<image>What?"},
                                       {"role": "assistant", "content": "A cat."}]}

*Documents* have no turns and no roles. Instead of "messages" they have "text", a string with or
without placeholders, or "content", which may also be content parts. Interleaved pages are documents
with images:

    {"images": ["a.png"], "text": "A cat sits on a mat. <image> It sleeps."}
    {"content": [{"type": "text", "text": "A cat sits on a mat."},
                 {"type": "image", "image": "a.png"}]}

An assistant message may have "reasoning_content", a text that some chat templates put before the
answer; without a template file (`data.chat_template`) it is ignored. It may have "tool_calls", and
then needs no "content". A record may have "tools", the tools that can be called, and messages of
the role tool hold their results:

    {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {...}}}],
     "messages": [{"role": "user", "content": "Rain in Rome?"},
                  {"role": "assistant", "tool_calls": [
                      {"type": "function",
                       "function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
                  {"role": "tool", "name": "weather", "content": "sunny"},
                  {"role": "assistant", "content": "No."}]}

Tools, tool calls and arguments may also be strings that hold this JSON.

The source says what is learned: `targets: assistant` (the default) learns the assistant's turns, so
there must be at least one; `targets: all` learns the text of every turn and of documents. Optional
keys: "id" (default `<source>:<line>`; need not be unique) and "source" (a label for metrics). Other
keys and null keys are ignored, and so are "text" and "content" in a record with "messages".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxmllm.config.schema import Targets
from jaxmllm.data.media.reference import MediaReference, taken_as
from jaxmllm.data.printable import shown

ROLES = ("system", "user", "assistant", "tool")
DOCUMENT = "document"  # in place of a role, for a text that nobody says; records cannot use it
FORMS = ("messages", "text", "content")  # keys of records; the first one present is read
# Part -> key of its list in the placeholder form
MEDIA_LISTS = {"image": "images", "audio": "audios", "video": "videos"}
REASONING = "reasoning_content"  # key of an assistant's message
CALLS = "tool_calls"  # key of an assistant's message
TOOLS = "tools"  # key of a record
MAX_NESTED = 100  # levels of tools and arguments; templates and checks walk them by recursion
MAX_ID = 256  # characters; ids are kept in a table of fixed width

# Media path in a record -> reference to the media item; may raise `ConversationError`
Resolve = Callable[[str], MediaReference]

_PLACEHOLDER = re.compile("<(" + "|".join(MEDIA_LISTS) + ")>")


class ConversationError(ValueError):
    """A record that is not a valid conversation. `reason` is a short stable word for counting; the
    message is one line."""

    def __init__(self, reason: str, message: str):
        super().__init__(shown(message))
        self.reason = reason


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class MediaPart:
    """A media item; `part` is "image", "audio" or "video"."""

    part: str
    reference: MediaReference
    answered: bool = (
        False  # part of an assistant's answer: a generator, if there is one, learns to make it
    )


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]  # JSON
    id: str | None = None  # by which a turn of the role tool refers to this call


@dataclass(frozen=True)
class Turn:
    """What one role says, or a whole `DOCUMENT`: non-empty texts and media. Neighbouring texts are
    not joined, because some templates strip each of them."""

    role: str
    parts: tuple[TextPart | MediaPart, ...]
    reasoning: str = ""  # before the assistant's answer, if a template has a place for it
    calls: tuple[ToolCall, ...] = ()  # after the assistant's text
    tool: str | None = None  # role tool: name of the tool that answers
    call: str | None = None  # role tool: id of the call that it answers


@dataclass(frozen=True)
class Conversation:
    id: str
    source: str
    turns: tuple[Turn, ...]
    targets: Targets = "assistant"  # which turns are learned
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas, as templates read them

    @property
    def media(self) -> tuple[MediaPart, ...]:
        """All media in reading order."""
        return tuple(
            part for turn in self.turns for part in turn.parts if isinstance(part, MediaPart)
        )


def parse_json(line: bytes) -> Any:
    """The JSON value of one line. Raises `ConversationError("malformed_json")`."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (
        ValueError,
        RecursionError,
    ) as error:  # bad UTF-8 and over-long numbers are ValueErrors too
        raise ConversationError("malformed_json", f"not valid JSON: {error}") from error


def parse_conversation(
    record: Any,
    resolve: Resolve,
    *,
    default_id: str,
    default_source: str,
    targets: Targets = "assistant",
) -> Conversation:
    """The conversation of a decoded record; `targets` says which turns are to be learned.

    Raises `ConversationError` with one of the reasons wrong_type, missing_field, unknown_role,
    unknown_part, placeholder_mismatch, no_assistant_turn, nothing_to_learn, invalid_text, or a
    reason of `resolve`.
    """
    if not isinstance(record, dict):
        raise ConversationError(
            "wrong_type", f"a record must be a JSON object, not {_kind(record)}"
        )
    lists = {part: _media_paths(record, key) for part, key in MEDIA_LISTS.items()}
    # Placeholders of all messages take from the same iterators, so a path is used once.
    pending = {part: iter(paths) for part, paths in lists.items()}
    form = next((key for key in FORMS if record.get(key) is not None), "messages")
    if form == "messages":
        tools = _object_list(record, TOOLS, "the record")
        turns = _message_turns(record, lists, pending, resolve)
    else:
        tools = ()
        turns = (_document_turn(record, form, lists, pending, resolve),)
    if targets == "assistant" and not any(turn.role == "assistant" for turn in turns):
        raise ConversationError(
            "no_assistant_turn",
            "no turn has the role 'assistant': there is nothing to learn; a source with targets: all learns all text",
        )
    # Turns without content still have an end to learn; an empty document has nothing.
    if not any(turn.parts or turn.role != DOCUMENT for turn in turns):
        raise ConversationError("nothing_to_learn", "holds neither a turn nor text nor media")
    return Conversation(
        _label(record, "id", default_id),
        _label(record, "source", default_source),
        turns,
        targets,
        tools,
    )


def _message_turns(
    record: dict[str, Any],
    lists: dict[str, list[str]],
    pending: dict[str, Iterator[str]],
    resolve: Resolve,
) -> tuple[Turn, ...]:
    """A turn for each message of a record."""
    messages = _field(record, "messages", list, "the record")
    # Counts are compared before contents are parsed, so no placeholder lacks a path.
    _check_placeholders(
        [message.get("content") for message in messages if isinstance(message, dict)], lists
    )
    return tuple(
        _parse_turn(message, f"messages[{i}]", pending, resolve)
        for i, message in enumerate(messages)
    )


def _document_turn(
    record: dict[str, Any],
    form: str,
    lists: dict[str, list[str]],
    pending: dict[str, Iterator[str]],
    resolve: Resolve,
) -> Turn:
    """The only turn of a record that is a document; `form` is its key, "text" or "content"."""
    content = _field(record, form, str if form == "text" else (str, list), "the record")
    if form == "text" and record.get("content") is not None:
        raise ConversationError(
            "wrong_type", "the record has both 'text' and 'content'; a document is one of them"
        )
    _check_placeholders([content], lists)
    return Turn(DOCUMENT, _parse_parts(content, form, pending, resolve))


def _parse_turn(
    message: Any, where: str, pending: dict[str, Iterator[str]], resolve: Resolve
) -> Turn:
    if not isinstance(message, dict):
        raise ConversationError("wrong_type", f"{where} must be an object, not {_kind(message)}")
    role = _field(message, "role", str, where)
    if role not in ROLES:
        raise ConversationError(
            "unknown_role", f"{where} has the role {role!r}; roles are {', '.join(ROLES)}"
        )
    calls = _calls(message, where) if role == "assistant" else ()
    if calls and message.get("content") is None:
        message = message | {"content": ""}
    content = _field(message, "content", (str, list), where)
    parts = _parse_parts(content, f"{where}.content", pending, resolve)
    if role == "tool":
        tool = _optional_text(message, "name", where)
        return Turn(role, parts, tool=tool, call=_optional_text(message, "tool_call_id", where))
    if role != "assistant":
        return Turn(role, parts)
    parts = tuple(
        replace(part, answered=True) if isinstance(part, MediaPart) else part for part in parts
    )
    return Turn(role, parts, _optional_text(message, REASONING, where) or "", calls)


def _optional_text(message: dict[str, Any], key: str, where: str) -> str | None:
    if message.get(key) is None:
        return None
    text: str = _field(message, key, str, where)
    _check_encodable(text, f"{where}.{key}")
    return text


def _calls(message: dict[str, Any], where: str) -> tuple[ToolCall, ...]:
    calls = []
    for i, call in enumerate(_object_list(message, CALLS, where)):
        call_where = f"{where}.{CALLS}[{i}]"
        # A call may be wrapped as {"type": "function", "function": ...}, with its id outside.
        function = call
        if call.get("function") is not None:
            function = _field(call, "function", dict, call_where)
        name = _field(function, "name", str, call_where)
        if not name:
            raise ConversationError("missing_field", f"{call_where}.name is empty")
        arguments = _load_json(_field(function, "arguments", (dict, str), call_where), call_where)
        if not isinstance(arguments, dict):
            raise ConversationError(
                "wrong_type", f"{call_where}.arguments must be an object, not {_kind(arguments)}"
            )
        calls.append(ToolCall(name, arguments, _optional_text(call, "id", call_where)))
    return tuple(calls)


def _object_list(record: dict[str, Any], key: str, where: str) -> tuple[dict[str, Any], ...]:
    """The list of objects at a key, which may also be JSON in a string; empty if the key is missing
    or null."""
    if record.get(key) is None:
        return ()
    objects = _load_json(_field(record, key, (list, str), where), f"{where}.{key}")
    if not isinstance(objects, list) or not all(isinstance(entry, dict) for entry in objects):
        raise ConversationError("wrong_type", f"{where}.{key} must be a list of objects")
    _check_encodable(json.dumps(objects, ensure_ascii=False), f"{where}.{key}")
    return tuple(objects)


def _load_json(value: Any, where: str) -> Any:
    """The value, or the JSON value that a string holds. Raises `ConversationError` if it is nested
    too deep."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConversationError(
                "wrong_type", f"{where} is a string, but no JSON: {error}"
            ) from error
    _check_nesting(value, where)
    return value


def _check_nesting(value: Any, where: str, levels: int = MAX_NESTED) -> None:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return
    if not levels:
        raise ConversationError(
            "wrong_type", f"{where} is nested more than {MAX_NESTED} levels deep"
        )
    for entry in value:
        _check_nesting(entry, where, levels - 1)


def _parse_parts(
    content: str | list[Any], where: str, pending: dict[str, Iterator[str]], resolve: Resolve
) -> tuple[TextPart | MediaPart, ...]:
    pieces = (
        _split_placeholders(content, pending)
        if isinstance(content, str)
        else _content_parts(content, where)
    )
    return tuple(_resolve_parts(pieces, resolve, where))


def _split_placeholders(text: str, pending: dict[str, Iterator[str]]) -> Iterator[tuple[str, str]]:
    """("text", text) or (media part, path) for each piece of a string content."""
    pieces = _PLACEHOLDER.split(text)  # text, part, text, part, ..., text
    for i, piece in enumerate(pieces):
        yield (piece, next(pending[piece])) if i % 2 else ("text", piece)


def _content_parts(content: list[Any], where: str) -> Iterator[tuple[str, str]]:
    for i, part in enumerate(content):
        part_where = f"{where}[{i}]"
        if not isinstance(part, dict):
            raise ConversationError(
                "wrong_type", f"{part_where} must be an object, not {_kind(part)}"
            )
        kind = _field(part, "type", str, part_where)
        if kind not in ("text", *MEDIA_LISTS):
            known = ", ".join(("text", *MEDIA_LISTS))
            raise ConversationError(
                "unknown_part", f"{part_where} has the type {kind!r}; types are {known}"
            )
        yield kind, _field(part, kind, str, part_where)


def _resolve_parts(
    parts: Iterable[tuple[str, str]], resolve: Resolve, where: str
) -> Iterator[TextPart | MediaPart]:
    """Resolve media paths, and drop empty texts, so that both forms give the same conversation."""
    for kind, value in parts:
        _check_encodable(value, where)
        if kind != "text":
            yield MediaPart(kind, taken_as(kind, resolve(value)))
        elif value:
            yield TextPart(value)


def _check_placeholders(contents: list[Any], lists: dict[str, list[str]]) -> None:
    placeholders = [
        part
        for content in contents
        if isinstance(content, str)
        for part in _PLACEHOLDER.findall(content)
    ]
    for part, paths in lists.items():
        if placeholders.count(part) != len(paths):
            raise ConversationError(
                "placeholder_mismatch",
                f"{placeholders.count(part)} <{part}> placeholders in string contents but {len(paths)} paths in "
                f"{MEDIA_LISTS[part]!r}; write a literal <{part}> as a content part of type text",
            )


def _media_paths(record: dict[str, Any], key: str) -> list[str]:
    paths = record.get(key)
    if paths is None:
        return []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ConversationError("wrong_type", f"{key!r} must be a list of paths")
    return paths


def _label(record: dict[str, Any], key: str, default: str) -> str:
    value = record.get(key)
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int)
        or not 0 < len(str(value)) <= MAX_ID
    ):
        raise ConversationError(
            "wrong_type", f"{key!r} must be a number or a text of 1 to {MAX_ID} characters"
        )
    _check_encodable(str(value), repr(key))
    if "\0" in str(value):  # ids are kept in numpy strings, which drop it at their end
        raise ConversationError("invalid_text", f"{key!r} holds a NUL character")
    return str(value)


def _field(record: dict[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    if key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise ConversationError("missing_field", f"{where} has no {key!r} (its keys: {keys[:200]})")
    if not isinstance(record[key], kind):
        kinds = " or ".join(_JSON_NAMES[k] for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ConversationError(
            "wrong_type", f"{where}.{key} must be {kinds}, not {_kind(record[key])}"
        )
    return record[key]


def _check_encodable(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON may hold half of a surrogate pair
        raise ConversationError(
            "invalid_text", f"{where} holds text that is not Unicode: {error}"
        ) from error


_JSON_NAMES = {
    str: "a string",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return _JSON_NAMES.get(type(value), "a number")
