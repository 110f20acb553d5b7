"""Finding each turn in the output of a chat template: marks are put into the contents, and looked
up in the output.

conversation --messages--> contents with marks --template--> text with marks
    --pieces--> texts, control tokens and media items, each learned or not

Marks are private characters, which no record may hold. One mark opens and one closes the learned
part of a turn. Each media item has a mark, which stays in its place. And each control token has a
mark that replaces its spelling in a content, so that any spelling that remains was written by the
template itself.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmllm.data.text.chat_template import ChatTemplate, Message, reasoning_fields
from jaxmllm.data.text.conversation import (
    CALLS,
    REASONING,
    TOOLS,
    Conversation,
    ConversationError,
    MediaPart,
    Turn,
)
from jaxmllm.data.text.sandbox import CLOSE, OPEN
from jaxmllm.data.text.tokenizers import TokenizerError

THOUGHT_OPEN = "\U00100002"
THOUGHT_CLOSE = "\U00100003"
MEDIA = 0x100010  # mark of media item 0; others follow
SPELLED = 0xF0000  # mark of control token 0 where a content spells it; others follow
MOST = 0xFF00  # number of marks for media items, and of marks for control tokens
PRIVATE = "[\U000f0000-\U0010ffff]"  # all marks

_PRIVATE_CHARACTER = re.compile(PRIVATE)
_ANSWER_MARKS = re.compile(f"[{OPEN}{CLOSE}{THOUGHT_OPEN}{THOUGHT_CLOSE}]")
# The marks of all turns in order: a template may drop the reasoning of a turn, but only as a whole
_MARKS_IN_ORDER = re.compile(f"(?:(?:{THOUGHT_OPEN}{THOUGHT_CLOSE})?{OPEN}{CLOSE})*")
# Reasoning inside a content, as models write it; its first tag may have been in the prompt. Only
# used on texts that hold THOUGHT_END: without it, the text would be searched once for each white
# space at its beginning.
THOUGHT_END = "</think>"
_INLINE_REASONING = re.compile(rf"(\s*(?:<think>)?)(.*?)({THOUGHT_END})(.*)", re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """A piece of a written conversation: literal text, the id of a control token, or the place of a
    media item."""

    content: str | int
    learned: bool = False
    media: int | None = None  # number of the item


@dataclass(frozen=True)
class ControlNames:
    """The control tokens of a tokenizer: ids by name, which is their spelling. Raises
    `TokenizerError` for too many."""

    ids: Mapping[str, int]

    def __post_init__(self) -> None:
        if len(self.ids) > MOST:
            raise TokenizerError(
                f"data.tokenizer: it has {len(self.ids)} special tokens, but chat templates take up to {MOST}; mark "
                "fewer as special, or set data.chat_template: chatml"
            )

    @cached_property
    def names(self) -> list[str]:
        return list(self.ids)

    @cached_property
    def spelled(self) -> re.Pattern[str]:
        """Pattern that finds the leftmost name, and the longest of several that begin there."""
        longest_first = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def separators(self) -> re.Pattern[str]:
        """Pattern that finds names and marks."""
        # The lookahead is for speed: `re` skips to possible first characters by itself only if all
        # alternatives begin with a literal
        initials = "".join(sorted({name[:1] for name in self.ids}))
        return re.compile(
            f"(?=[{re.escape(initials)}{PRIVATE[1:-1]}])(?:{self.spelled.pattern}|{PRIVATE})"
        )

    @cached_property
    def turn_end(self) -> re.Pattern[str]:
        """Pattern that matches the control token at the end of a turn, and white space before."""
        return re.compile(rf"\s*(?:{self.spelled.pattern})")

    @cached_property
    def marks(self) -> dict[str, str]:
        """The mark of each name."""
        return {name: chr(SPELLED + index) for index, name in enumerate(self.names)}

    def hide(self, text: str) -> str:
        """The text with spellings of control tokens replaced by their marks."""
        return self.spelled.sub(lambda match: self.marks[match[0]], text)

    def show(self, text: str) -> str:
        """The text with marks of control tokens spelled out again, and other marks removed; media
        keep theirs."""
        return _PRIVATE_CHARACTER.sub(self._mark_spelling, text)

    def _mark_spelling(self, match: re.Match[str]) -> str:
        character = ord(match[0])
        if character >= MEDIA:
            return match[0]
        return self.names[character - SPELLED] if character < SPELLED + len(self.ids) else ""


def written_pieces(
    conversation: Conversation, template: ChatTemplate, control: ControlNames
) -> list[Piece]:
    """The pieces of a conversation as a template writes it, in reading order.

    The template writes the conversation without marks and then with marks; both texts must agree.

    Raises:
      ConversationError: answers_unclear or media_unclear, if answers or media cannot be found again
        in the output of the template; no_place for reasoning, tools or calls; private_characters;
        and the reasons of `ChatTemplate.write`.
    """
    _check_private_characters(conversation)
    _check_places(conversation, template)
    strip = template.strips_parts
    plain = template.write(_messages(conversation, None, strip, mark=False), conversation.tools)
    tools = _map_texts(conversation.tools, control.hide)
    answers = [_Answer.of(turn) for turn in conversation.turns if _is_learned(conversation, turn)]
    # `{% generation %}` encloses what the model says. With targets `all`, other turns are learned,
    # too.
    said_by_template = template.has_generation and conversation.targets == "assistant"
    if said_by_template:
        messages = _messages(conversation, control, strip, mark=False)
        marked = template.write(messages, tools, marked=True)
        problem = _unfound_reason(marked, plain, control, None)
    else:
        marks = sum(answer.marks for answer in answers)
        # Templates may split a content after its reasoning, so both get marks of their own. If
        # these change what is written (of an empty reasoning, say), one pair around both is tried.
        for inline in (True, False):
            marked = template.write(_messages(conversation, control, strip, inline=inline), tools)
            problem = _unfound_reason(marked, plain, control, marks)
            if problem is None:
                break
    if problem is not None:
        raise _template_error("answers_unclear", problem)
    learned = (
        _between_marks(marked) if said_by_template else _learned(marked, template, control, answers)
    )
    # Both texts have the marks of media, so comparing them does not show whether the template
    # drops, repeats or moves media.
    media = [ord(mark) - MEDIA for mark in _PRIVATE_CHARACTER.findall(marked) if ord(mark) >= MEDIA]
    if media != list(range(len(conversation.media))):
        raise _template_error(
            "media_unclear",
            f"writes {len(media)} of its {len(conversation.media)} media, or in another order",
        )
    return _split_pieces(marked, learned, control)


def _unfound_reason(
    marked: str, plain: str, control: ControlNames, marks: int | None
) -> str | None:
    """Why answers cannot be found again in a marked text; None if they can.

    Args:
      marks: number of pairs of marks that the text must have; None: at least one.
    """
    if control.show(marked) != plain:
        return "writes it otherwise when its texts are marked"
    order = "".join(_ANSWER_MARKS.findall(marked))
    answers = order.count(OPEN)
    if not _MARKS_IN_ORDER.fullmatch(order) or (
        answers != marks if marks is not None else not answers
    ):
        return "does not write each of its learned texts whole, and once"
    return None


def _template_error(reason: str, what: str) -> ConversationError:
    return ConversationError(
        reason, f"the chat template {what}; use another template, or data.chat_template: chatml"
    )


def _check_private_characters(conversation: Conversation) -> None:
    if len(conversation.media) > MOST:
        raise ConversationError("media_unclear", f"holds more than {MOST} media")
    texts: list[Any] = [conversation.tools]
    for turn in conversation.turns:
        part_texts = [part.text for part in turn.parts if not isinstance(part, MediaPart)]
        texts.append([turn.reasoning, part_texts, _calls(turn, str), turn.tool, turn.call])
    if match := _PRIVATE_CHARACTER.search(json.dumps(texts, ensure_ascii=False)):
        raise ConversationError(
            "private_characters",
            f"holds the private character U+{ord(match[0]):X}, which marks answers in chat templates; remove it",
        )


def _check_places(conversation: Conversation, template: ChatTemplate) -> None:
    """Raise `ConversationError` for content that the template would leave out."""
    turns = conversation.turns
    if any(turn.reasoning for turn in turns) and not template.has_reasoning:
        raise _template_error("no_place", f"has no place for {REASONING}")
    if any(turn.calls for turn in turns) and not template.writes_calls:
        absent = CALLS
    elif conversation.tools and not template.writes_tools:
        absent = TOOLS
    else:
        return
    raise ConversationError(
        "no_place",
        f"the chat template has no place for {absent}; use another template, or remove them",
    )


@dataclass(frozen=True)
class _Answer:
    """A learned turn."""

    marks: int  # pairs of marks: around its content, if any, and the name of each call
    calls: bool  # whether it calls tools

    @classmethod
    def of(cls, turn: Turn) -> _Answer:
        return cls(len(turn.calls) + bool(turn.parts or not turn.calls), bool(turn.calls))


def _is_learned(conversation: Conversation, turn: Turn) -> bool:
    return turn.role == "assistant" or conversation.targets == "all"


def _messages(
    conversation: Conversation,
    control: ControlNames | None,
    strip: bool,
    mark: bool = True,
    inline: bool = True,
) -> list[Message]:
    """Messages in the form that templates read, with marks for media.

    Args:
      control: spellings of these control tokens are replaced by marks; None: they stay.
      strip: whether texts lose their outer white space in contents of several parts.
      mark: whether to put marks around the learned parts.
      inline: whether reasoning inside a content has marks of its own.
    """
    messages = []
    media_marks = map(chr, itertools.count(MEDIA))
    hide = control.hide if control else str
    for turn in conversation.turns:
        # Hidden as a whole: two texts together may spell a control token
        content = hide(_content(turn, media_marks, strip))
        reasoning = hide(turn.reasoning)
        marked = mark and _is_learned(conversation, turn)
        if marked and (content or not turn.calls):
            thinks = inline and turn.role == "assistant"
            content, reasoning = _marked_texts(content, reasoning, thinks)
        message: Message = {"role": turn.role, "content": content}
        if reasoning:
            message |= reasoning_fields(reasoning)
        if turn.calls:
            message[CALLS] = _calls(turn, hide, marked)
        for key, text in (("name", turn.tool), ("tool_call_id", turn.call)):
            if text is not None:
                message[key] = hide(text)
        messages.append(message)
    return messages


def _content(turn: Turn, media_marks: Iterator[str], strip: bool) -> str:
    """What a turn says, with the next marks for its media; `strip` as in `_messages`."""
    bare = strip and len(turn.parts) > 1
    content = ""
    for part in turn.parts:
        if isinstance(part, MediaPart):
            content += next(media_marks)
        else:
            content += part.text.strip() if bare else part.text
    return content


def _marked_texts(content: str, reasoning: str, thinks: bool) -> tuple[str, str]:
    """Content and reasoning with marks; `thinks`: reasoning inside the content has its own, unless
    the turn also has reasoning apart from it."""
    thought_match = None
    if thinks and not reasoning and THOUGHT_END in content:
        thought_match = _INLINE_REASONING.fullmatch(content)
    if thought_match is None:
        return _enclose(content, OPEN, CLOSE), reasoning and _mark_thought(reasoning)
    begin, thought, end, answer = thought_match.groups()
    return begin + _mark_thought(thought) + end + _enclose(answer, OPEN, CLOSE), reasoning


def _calls(turn: Turn, hide: Callable[[str], str], mark: bool = False) -> list[Message]:
    """The tool calls of a turn in the form that templates read; `mark`: with marks around names."""
    calls = []
    for call in turn.calls:
        name = hide(call.name)
        function = {
            "name": _enclose(name, OPEN, CLOSE) if mark else name,
            "arguments": _map_texts(call.arguments, hide),
        }
        named = {} if call.id is None else {"id": hide(call.id)}
        calls.append({"type": "function", **named, "function": function})
    return calls


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with `change` applied to all its texts, also to keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_texts(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(entry, change) for entry in value]
    return value


def _mark_thought(text: str) -> str:
    return _enclose(text, THOUGHT_OPEN, THOUGHT_CLOSE)


def _enclose(text: str, before: str, after: str) -> str:
    """A text with marks just inside its outer white space, because templates may strip that."""
    inner = text.strip()
    start = len(text) - len(text.lstrip())
    return text[:start] + before + inner + after + text[start + len(inner) :]


def _between_marks(marked: str) -> NDArray[np.bool_]:
    """Whether each character is between OPEN and CLOSE, marks included: [characters]."""
    learned = np.zeros(len(marked), bool)
    for answer in re.finditer(f"{OPEN}[^{CLOSE}]*{CLOSE}", marked):
        learned[answer.start() : answer.end()] = True
    return learned


def _learned(
    marked: str, template: ChatTemplate, control: ControlNames, answers: Sequence[_Answer]
) -> NDArray[np.bool_]:
    """Whether each character is learned: in each turn those from the first mark to the last, and
    the control token that follows them.

    Text that the template writes before reasoning (`<think>`) is learned, too, from the end of the
    generation prompt on, and so is white space between that prompt and the content. A turn that
    calls tools is learned from the end of the prompt to the control token that ends an answer,
    because the template writes the text around names and arguments.

    Raises `ConversationError`: answers_unclear, if the template does not show how an answer with
    calls begins or ends.
    """
    learned = np.zeros(len(marked), bool)
    matches = re.finditer(f"({THOUGHT_OPEN}[^{OPEN}]*)?{OPEN}[^{CLOSE}]*{CLOSE}", marked)
    after = 0
    for answer in answers:
        # One match for each pair of marks, and `_unfound_reason` has checked how many there are.
        spans = list(itertools.islice(matches, answer.marks))
        start = spans[0].start()
        marks_end = spans[-1].end()
        begin = marked.rfind(template.prompt, after, start) if template.prompt else -1
        if begin >= 0:
            begin += len(template.prompt)
            # Other text between prompt and content is the template's own, and is not learned.
            if spans[0][1] or answer.calls or not marked[begin:start].strip():
                start = begin
        # Arguments follow the marks of a call, so the end of the turn is searched for. After a
        # text, it follows at once or is missing.
        if answer.calls:
            end = control.turn_end.match(template.after_answer)
            turn_end = end[0].strip() if end else ""
            turn_end_start = marked.find(turn_end, marks_end)
            if begin < 0 or turn_end_start < 0 or not turn_end:
                raise _template_error(
                    "answers_unclear", f"does not tell how an answer with {CALLS} begins or ends"
                )
            after = turn_end_start + len(turn_end)
        else:
            end = control.turn_end.match(marked, marks_end)
            after = end.end() if end else marks_end
        learned[start:after] = True
    return learned


def _split_pieces(marked: str, learned: NDArray[np.bool_], control: ControlNames) -> list[Piece]:
    """The pieces of a marked text, cut at names, at marks, and where `learned` changes."""
    pieces: list[Piece] = []

    def add_text(start: int, end: int) -> None:
        # Cut where `learned` changes. `max` keeps both slices equally long for an empty text
        changes = np.flatnonzero(learned[start + 1 : end] ^ learned[start : max(end - 1, start)])
        cuts = [start, *(start + 1 + changes).tolist(), end]
        for piece_start, piece_end in itertools.pairwise(cuts):
            if piece_start < piece_end:
                pieces.append(Piece(marked[piece_start:piece_end], bool(learned[piece_start])))

    text_start = 0
    for match in control.separators.finditer(marked):
        add_text(text_start, match.start())
        text_start = match.end()
        character = ord(match[0][0])
        is_learned = bool(learned[match.start()])
        if character < SPELLED:
            pieces.append(Piece(control.ids[match[0]], is_learned))
        elif character >= MEDIA:
            pieces.append(Piece("", media=character - MEDIA))
        elif spelled := control.show(match[0]):
            pieces.append(Piece(spelled, is_learned))
    add_text(text_start, len(marked))
    return pieces
