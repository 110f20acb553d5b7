"""The sandbox in which chat templates run: no access to the outside, no randomness, bounded memory
and time.

A template is a program that comes with a model. jinja2's immutable sandbox keeps it away from the
interpreter, and template_limits.py bounds its memory and time. Functions whose results differ
between processes are removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from jaxmllm.data.text.template_limits import (
    WIDTH,
    LimitError,
    Limits,
    check_format,
    check_growth,
    check_length,
    check_product,
    check_size,
    current_budget,
    limited,
)

# Private characters around text of the model; no record may hold them (see answer_marks.py)
OPEN = "\U00100000"
CLOSE = "\U00100001"
_ENCLOSED_METHOD = "enclosed"  # the method of `_GenerationTag` that its tag calls
# Methods and filters that are removed: they only pad or wrap text, or draw at random
ABSENT_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs"}
ABSENT_FILTERS = ("center", "wordwrap", "random")
BOUNDED_FILTERS = ("indent", "format", "batch", "slice", "replace", "join", "round")


class RaisedError(TemplateRuntimeError):
    """The template itself refuses a conversation, by calling `raise_exception`."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that compiles chat templates, with the helpers that transformers gives them:
    `raise_exception`, `tojson` without HTML escapes, `break`, `continue`, and the tag `generation`.

    Args:
      values: further names that templates can use.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        for name in ABSENT_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]  # random text
        self.filters |= {name: _bounded(name, self.filters[name]) for name in BOUNDED_FILTERS}
        self.filters |= {"tojson": _to_json, "checked": check_size}
        self.globals |= {"raise_exception": _raise_refusal, "dict": _new_dict, **values}

    def count_step(self) -> None:
        """Count one pass of a loop, or one call of a macro."""
        current_budget().step()

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"the attribute {attribute!r} of a {type(obj).__name__}")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in ABSENT_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if getattr(value, "__name__", "") in ("format", "format_map"):
            check_format(getattr(value, "__self__", None))
        return super().wrap_str_format(value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        applied_to = getattr(__obj, "__self__", None)
        if isinstance(applied_to, str):
            check_growth(__obj.__name__, (applied_to, *args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            check_format(left)
        if operator in ("*", "**"):
            check_product(operator, left, right)
        return check_size(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _CountingTransformer().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree


def run(
    template: Template,
    values: Mapping[str, Any],
    marked: bool = False,
    limits: Limits | None = None,
) -> str:
    """Run a template of a `Sandbox` and return the text that it writes.

    Args:
      marked: put `OPEN` and `CLOSE` around the text that `{% generation %}` encloses.

    Raises:
      RaisedError: the template called `raise_exception`.
      LimitError: it exceeds its limits, or calls itself without end.
      SecurityError: it uses something that the sandbox forbids.
      Exception: any other error of the template's own code.
    """
    length = 0
    blocks = []
    with limited(limits or Limits(), marked):
        try:
            for block in template.generate(values):
                length += len(block)
                check_length(length)
                blocks.append(block)
        except (RecursionError, MemoryError) as error:
            raise LimitError("calls itself too deeply, or fills the memory") from error
    return "".join(blocks)


def has_generation(tree: nodes.Template) -> bool:
    """Whether a template marks the text of the model with `{% generation %}`."""
    return any(node.name == _ENCLOSED_METHOD for node in tree.find_all(nodes.ExtensionAttribute))


class _GenerationTag(Extension):
    """The tag `{% generation %} ... {% endgeneration %}` around text that the model says."""

    tags = {"generation"}  # noqa: RUF012  (as in the base class)

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method(_ENCLOSED_METHOD), [], [], body, lineno=line)

    def enclosed(self, caller: Macro) -> str:
        return f"{OPEN}{caller()}{CLOSE}" if current_budget().marked else caller()


class _CountingTransformer(NodeTransformer):
    """A rewriting of templates that counts passes of loops and calls of macros, and checks the
    results of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._insert_step_count(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._insert_step_count(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._insert_step_count(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        joined = self.generic_visit(node)
        return nodes.Filter(joined, "checked", [], [], None, None, lineno=node.lineno)

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        if node.attr.startswith("_"):
            raise SecurityError(f"the attribute {node.attr!r} of a namespace")
        return node

    def _insert_step_count(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("count_step"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose numbers, formats and results are bounded."""

    @wraps(function)  # also copies the marks of jinja2 about its arguments
    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if hasattr(function, "jinja_pass_arg"):  # the first is an environment or a context
            values = values[1:]
        if any(isinstance(value, int) and abs(value) > WIDTH for value in values[1:]):
            raise LimitError(f"the filter {name!r} takes numbers up to {WIDTH}")
        if name == "format":
            check_format(values[0])
        check_growth(name, values)
        return check_size(function(*args, **kwargs))

    return bounded


def _raise_refusal(message: Any = "") -> NoReturn:
    raise RaisedError(str(message))


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if (indent or 0) > WIDTH:
        raise LimitError(f"the filter 'tojson' takes numbers up to {WIDTH}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
