"""A model's own chat template: a Jinja file, or a JSON file that holds one as `chat_template`."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.sandbox import SecurityError

from jaxmllm.data.printable import shown
from jaxmllm.data.text import sandbox
from jaxmllm.data.text.conversation import REASONING, ConversationError
from jaxmllm.data.text.template_limits import LimitError
from jaxmllm.data.text.tokenizers import TokenizerError

MAX_FILE = 64 << 20  # bytes; large because tokenizer_config.json also lists the added tokens
MAX_SOURCE = 1 << 20  # characters; published templates have up to 20,000
DEFAULT = "default"  # name of the template to use in a file with several
CLOCK = "strftime_now"  # function by which templates ask for the date
DATE = "date_string"  # or variable that they read, written as `DATE_FORMAT`; it may have a default
DATE_FORMAT = "%d %b %Y"
QUESTION = {"role": "user", "content": "question"}
UNUSUAL = "\U00100004"  # text that no template writes by itself

Message = dict[str, Any]


class TemplateFileError(TokenizerError):
    """A template that can be used for no conversation. The message names the key, the file and what
    to do."""


class ChatTemplate:
    """Writes conversations as one model expects them.

    Args:
      source: text of the template.
      path: path of its file, for messages.
      names: special tokens by their names in templates, such as bos_token.
      today: the date that the template may print; none: it has no clock.

    Raises:
      TemplateFileError: it is no template, uses something that does not exist, or never reads the
        date although `today` is given.
    """

    def __init__(self, source: str, path: str, names: Mapping[str, str], today: date | None = None):
        self.source = source
        self.path = path
        self.names = dict(names)
        self.today = today
        tree = self._compile()
        # Pieces of text that the template itself may write, and the names of all variables in it
        self.literals = tuple(_literal_texts(tree))
        self.variables = _variable_names(tree)
        self.has_generation = sandbox.has_generation(tree)
        if today is not None and self.variables.isdisjoint((CLOCK, DATE)):
            raise TemplateFileError(
                f"data.chat_date: {shown(path)} prints no date by {CLOCK} or {DATE}; leave the key out"
            )
        self.prompt = self._generation_prompt()
        self.has_reasoning = self._writes_reasoning()
        self.strips_parts = self._strips_parts()

    @classmethod
    def read(cls, path: str | Path, names: Mapping[str, str], today: date | None) -> ChatTemplate:
        """The template of a file. Raises `TemplateFileError`."""
        return cls(_read_source(Path(path)), str(path), names, today)

    @property
    def fingerprint(self) -> str:
        """A digest that changes whenever the same conversation could be written differently."""
        settings = [self.source, sorted(self.names.items()), str(self.today)]
        if self.strips_parts:
            settings.append("texts apart")  # earlier versions joined neighbouring texts first
        return hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        marked: bool = False,
    ) -> str:
        """Write a conversation as one text.

        Args:
          messages: in the form that the template reads, with `role` and `content`.
          tools: JSON schemas of the tools that can be called.
          marked: put `sandbox.OPEN` and `sandbox.CLOSE` around the text that `{% generation %}`
            encloses.

        Raises:
          ConversationError: template_refused or template_failed, for this conversation alone.
          TemplateFileError: for any conversation: the template leaves its sandbox, exceeds its
            limits, or asks for a date that is not given.
        """
        return self._run(messages, tools, marked=marked)

    def __getstate__(self) -> dict[str, Any]:
        # The compiled template is not sent to workers: they compile it again
        return vars(self) | {"_template": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._compile()

    def _compile(self) -> nodes.Template:
        environment = sandbox.Sandbox(self.names)
        try:
            tree = environment.parse(self.source)
            environment.globals |= _date_variables(self.today, _variable_names(tree))
            self._template = environment.from_string(tree)
        except TemplateSyntaxError as error:
            self._fail(f"is no template: line {error.lineno}: {error.message}", "correct it")
        except SecurityError as error:
            self._forbid(error)
        except (TemplateError, RecursionError, MemoryError) as error:
            self._fail(f"is no template: {error}", "correct it")
        return tree

    def _run(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        prompt: bool = False,
        marked: bool = False,
    ) -> str:
        values = {
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        try:
            return sandbox.run(self._template, values, marked)
        except sandbox.RaisedError as error:
            raise ConversationError(
                "template_refused", f"the chat template refuses it: {error}"
            ) from error
        except SecurityError as error:
            self._forbid(error)
        except LimitError as error:
            self._fail(f"has no end: it {error} for one conversation", "correct its loops")
        except Exception as error:  # a template may raise anything
            if isinstance(error, UndefinedError) and CLOCK in str(error) and self.today is None:
                self._fail("prints today's date", "say in data.chat_date which day that is")
            raise ConversationError(
                "template_failed",
                f"the chat template {self.path} fails: {type(error).__name__}: {error}",
            ) from error

    @cached_property
    def after_answer(self) -> str:
        """Text that the template writes after the content of an answer; empty if that cannot be
        found out."""
        try:
            written = self._run([QUESTION, {"role": "assistant", "content": UNUSUAL}])
        except ConversationError:
            return ""
        return written.partition(UNUSUAL)[2]

    def _generation_prompt(self) -> str:
        """Text that the template writes between a question and the answer of the model; empty if
        that cannot be found out."""
        try:
            without = self._run([QUESTION])
            prompted = self._run([QUESTION], prompt=True)
        except ConversationError:
            return ""
        return prompted.removeprefix(without) if prompted.startswith(without) else ""

    def _writes_reasoning(self) -> bool:
        """Whether the template has a place for the reasoning of the last answer."""
        answer = {"role": "assistant", "content": "answer", **reasoning_fields(UNUSUAL)}
        try:
            return UNUSUAL in self._run([QUESTION, answer])
        except ConversationError:
            return False

    @cached_property
    def writes_calls(self) -> bool:
        """Whether the template has a place for the tool calls of an answer."""
        function = {"name": UNUSUAL, "arguments": {}}
        called = {"type": "function", "id": "123456789", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [called]}
        try:
            return UNUSUAL in self._run([QUESTION, answer])
        except ConversationError:
            return False

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template has a place for the tools that can be called."""
        parameters = {"type": "object", "properties": {}, "required": []}
        function = {"name": UNUSUAL, "description": "test", "parameters": parameters}
        try:
            return UNUSUAL in self._run([QUESTION], [{"type": "function", "function": function}])
        except ConversationError:
            return False

    def _strips_parts(self) -> bool:
        """Whether the template strips each text between media, not just a whole content."""
        text = {"type": "text", "text": f" {UNUSUAL} "}
        parts = [text, {"type": "image"}, text]
        try:
            written = self._run([{"role": "user", "content": parts}])
        except ConversationError:
            return False
        spaced = (f" {UNUSUAL}", f"{UNUSUAL} ")
        return written.count(UNUSUAL) == 2 and not any(text in written for text in spaced)

    def _forbid(self, error: Exception) -> NoReturn:
        self._fail(f"reaches out of its sandbox: {error}", "do not use it, or correct it")

    def _fail(self, what: str, cure: str) -> NoReturn:
        path = shown(self.path)
        raise TemplateFileError(
            f"data.chat_template: {path} {shown(what)}; {cure}, or set data.chat_template: chatml"
        ) from None


def reasoning_fields(reasoning: str) -> Message:
    """The reasoning of a message, under both names that templates use for it."""
    return {REASONING: reasoning, "thinking": reasoning}


def _literal_texts(tree: nodes.Template) -> list[str]:
    plain_texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    constants = (node.value for node in tree.find_all(nodes.Const))
    strings = [value for value in constants if isinstance(value, str)]
    return plain_texts + strings


def _variable_names(tree: nodes.Template) -> frozenset[str]:
    return frozenset(node.name for node in tree.find_all(nodes.Name))


def _date_variables(today: date | None, names: frozenset[str]) -> dict[str, Any]:
    """The names that give a template the date: a clock, or the date itself for a template that
    reads no clock."""
    if today is None:
        return {}
    moment = datetime.combine(today, time())
    if CLOCK in names:
        return {CLOCK: lambda format: moment.strftime(format)}
    return {DATE: moment.strftime(DATE_FORMAT)}


def _read_source(path: Path) -> str:
    """The text of the template in a Jinja or JSON file. Raises `TemplateFileError`."""

    def fail(what: str) -> NoReturn:
        raise TemplateFileError(
            f"data.chat_template: {shown(path)} {shown(what)}; name a file with a Jinja template, a JSON file that "
            "holds one as 'chat_template', or chatml"
        ) from None

    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe could wait forever
            fail("is no regular file")
        if status.st_size > MAX_FILE:
            fail(f"has {status.st_size} bytes, more than a template could")
        source: Any = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            value = json.loads(source)
            source = value.get("chat_template") if isinstance(value, dict) else None
    except TemplateFileError:
        raise
    except OSError as error:
        fail(f"cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        fail(f"cannot be read: {error}")
    if isinstance(source, list):
        source = next(
            (
                entry.get("template")
                for entry in source
                if isinstance(entry, dict) and entry.get("name") == DEFAULT
            ),
            None,
        )
    if not isinstance(source, str):
        fail(f"has no 'chat_template', and none named {DEFAULT!r}")
    if len(source) > MAX_SOURCE:
        fail(
            f"holds a template of {len(source)} characters, more than the {MAX_SOURCE} that are read"
        )
    return source
