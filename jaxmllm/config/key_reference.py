"""Generate the reference of all keys from the schema: types, defaults, the comments at fields, and
the docstrings of sections.

python -m jaxmllm.config.key_reference > docs/config.md
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import tokenize
import types
from collections.abc import Iterable
from datetime import date
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel

from jaxmllm.config.read import sections_of
from jaxmllm.config.schema import Config
from jaxmllm.config.section import Section

HEAD = """\
# All keys of a config

jaxmllm/config/key_reference.py writes this file from the schema. A section of YAML is a heading here, and on the
command line a key has its section before it: `optimizer.learning_rate=3e-4`. *required* keys have no default. What a
meaning calls none is `null`, and `auto` is chosen when the run is built. Sections with the same keys stand together,
`data.sources[]` is an entry of that list, and indented lines are the values of a key. Where a meaning is *above*, the
text over the table tells it.
"""
BOUNDS = {Gt: ("gt", ">"), Ge: ("ge", ">="), Lt: ("lt", "<"), Le: ("le", "<=")}
WORDS = {int: "integer", float: "number", str: "text", date: "date"}
POWER_FROM = 1 << 30  # bounds from here on are powers of two, and are written as such


def reference() -> str:
    """Markdown of all sections, in the order of the schema."""
    return HEAD + "".join(
        _part(section, paths) for section, paths in _paths(Config).items() if section is not Config
    )


def _part(section: type[BaseModel], paths: list[str]) -> str:
    description = _description(section)
    title = ", ".join(f"`{path}`" for path in paths)
    return f"\n## {title}\n\n{description}\n\n{_key_table(section, description)}"


def _paths(section: type[BaseModel], prefix: str = "") -> dict[type[BaseModel], list[str]]:
    """Dotted paths of every section, by its class, starting with this section."""
    paths = {section: [prefix]}
    for name, field in section.model_fields.items():
        entry = "[]" if get_origin(field.annotation) is tuple else ""
        path = f"{prefix}.{field.alias or name}{entry}".removeprefix(".")
        for child in sections_of(field.annotation):
            for below, child_paths in _paths(child, path).items():
                paths.setdefault(below, []).extend(child_paths)
    return paths


def _description(section: type[BaseModel]) -> str:
    """The docstrings of a section and of the classes that it inherits fields from."""
    with_fields = (
        base
        for base in section.__mro__
        if base is section or (issubclass(base, Section) and inspect.get_annotations(base))
    )
    return "\n\n".join(inspect.cleandoc(base.__doc__) for base in with_fields if base.__doc__)


def _key_table(section: type[BaseModel], description: str) -> str:
    comments = _field_comments(section)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        value = "*required*" if field.is_required() else f"`{_yaml_text(default)}`"
        key = f"`{field.alias or name}`"
        cells = (
            key,
            _type_words(field.annotation, field.metadata),
            value,
            comments.get(name) or ("*above*" if key in description else ""),
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _field_comments(section: type[BaseModel]) -> dict[str, str]:
    """The comments above and after each field, by its name.

    A class that declares a field again without a comment keeps the inherited one.
    """
    comments = {}
    # From the bases to the section, so that the last comment of a field declared again counts.
    for base in reversed(section.__mro__):
        if not issubclass(base, Section):
            continue
        source = inspect.getsource(base)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        # All comments by line; of these, `comment_lines` have no code before them.
        words = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
        comment_lines = {
            line_number
            for line_number, token in words.items()
            if token.line.lstrip().startswith("#")
        }
        (record,) = ast.parse(source).body
        assert isinstance(record, ast.ClassDef)
        for node in record.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            first_line = node.lineno
            while first_line - 1 in comment_lines:
                first_line -= 1
            lines = range(first_line, (node.end_lineno or first_line) + 1)
            if texts := [words[line].string.lstrip("# ") for line in lines if line in words]:
                comments[node.target.id] = " ".join(texts)
    return comments


def _type_words(annotation: Any, constraints: Iterable[Any] = (), many: bool = False) -> str:
    """A type in words, in the plural if `many`."""
    *choices, last_choice = _type_choices(annotation, constraints, many)
    return f"{', '.join(choices)} or {last_choice}" if choices else last_choice


def _type_choices(annotation: Any, constraints: Iterable[Any], many: bool) -> list[str]:
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        inner, *outer = arguments
        # A pydantic `Field` has constraints in its metadata; any other argument is one itself.
        nested = [item for info in outer for item in getattr(info, "metadata", [info])]
        return _type_choices(inner, nested, many)
    if origin is Literal:
        return [f"`{_yaml_text(value)}`" for value in arguments]
    if origin in (Union, types.UnionType):
        return [choice for item in arguments for choice in _type_choices(item, constraints, many)]
    if annotation is type(None):
        return ["`null`"]
    if annotation is bool:
        return ["`true`", "`false`"]
    return [_single_type(annotation, constraints, many)]


def _single_type(annotation: Any, constraints: Iterable[Any], many: bool) -> str:
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is dict:
        key, value = arguments
        return f"mapping of {_type_words(key, many=True)} to {_type_words(value, many=True)}"
    if origin is list or (origin is tuple and arguments[-1] is ...):
        return f"list{'s' * many} of {_type_words(arguments[0], many=True)}"
    if origin is tuple:
        entries = [_type_words(argument, many=len(set(arguments)) == 1) for argument in arguments]
        return (
            f"list of {len(entries)} {entries[0]}"
            if len(set(entries)) == 1
            else f"list: {'; '.join(entries)}"
        )
    if annotation not in WORDS:
        return "section" + "s" * many
    bounds = []
    for item in constraints:
        for kind, (attribute, sign) in BOUNDS.items():
            if isinstance(item, kind):
                bounds.append(f"{sign} {_bound_text(getattr(item, attribute))}")
    return f"{WORDS[annotation]}{'s' * many} {' and '.join(bounds)}".rstrip()


def _bound_text(bound: float) -> str:
    if isinstance(bound, int) and bound >= POWER_FROM:
        return f"2^{bound.bit_length() - 1}"
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _yaml_text(value: Any) -> str:
    """A default as it would be written in a YAML file, on one line."""
    if isinstance(value, str) and value.isidentifier():
        return value
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml_text, value))}]"
    return json.dumps({} if isinstance(value, BaseModel) else value)


if __name__ == "__main__":
    print(reference(), end="")
