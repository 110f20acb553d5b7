"""YAML as config files use it: like `yaml.safe_load`, but without its surprises.

A key may occur only once in a mapping. 3e-4 is a number; quoted values and dates are text. 010,
which YAML reads as 8, and 1:30, which it reads as 90, are refused. The number of values with
aliases written out, the length of files and numbers, and the depth of nesting are bounded.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import yaml

MAX_FILE = 1 << 20  # bytes
MAX_VALUES = 100_000  # with aliases written out
MAX_NUMBER = 64  # characters: reading YAML's 1:30:00 takes quadratic time
KINDS = tuple(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge")
)


class YamlError(ValueError):
    """A text or file cannot be read; the message is one line that does not name it."""


def read_file(path: Path) -> Any:
    """The value that a YAML file holds. Raises `YamlError`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe could wait for ever
            raise YamlError("is no regular file")
        if status.st_size > MAX_FILE:
            raise YamlError(f"has {status.st_size} bytes, more than the {MAX_FILE} that are read")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise YamlError("does not exist") from error
    except UnicodeDecodeError as error:
        raise YamlError(
            f"is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from error
    except OSError as error:
        raise YamlError(f"cannot be read: {error.strerror}") from error
    return read_text(text)


def read_text(text: str) -> Any:
    """The value of a YAML text: nested dicts, lists, text, numbers, booleans, None.

    Raises `YamlError`.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check_nodes(root)
        return loader.construct_document(root)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlError(f"is not valid YAML: {_problem_words(error)}") from error


def write_text(value: Any) -> str:
    """YAML that `read_text` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    # Dates are text, because as dates they would be written back in another spelling.
    yaml_implicit_resolvers = {  # noqa: RUF012  (as in the base class)
        first: [(tag, pattern) for tag, pattern in resolvers if tag in KINDS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


_NOT_DECIMAL = re.compile(r"[-+]?(0[0-7_]+$|.*:)")
# YAML 1.1 requires a point and a sign in numbers like 3e-4 and 1e5; people, and YAML 1.2, do not.
_EXPONENT_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT_NUMBER, list("+-.0123456789"))


def _check_nodes(root: yaml.Node) -> None:
    """Raise `yaml.MarkedYAMLError` for anything that the module's docstring rules out, before
    values are constructed from the nodes."""
    sizes: dict[int, int] = {}  # values in a node, by its id: an alias is the same node again
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        key = id(node)
        if key in open_nodes:
            raise _error(node, "it contains itself")
        if key not in sizes:
            open_nodes.add(key)
            sizes[key] = 1 + sum(map(size, _children(node)))
            open_nodes.remove(key)
        if sizes[key] > MAX_VALUES:
            raise _error(node, f"it has more than {MAX_VALUES} values, aliases written out")
        return sizes[key]

    size(root)


def _children(node: yaml.Node) -> list[yaml.Node]:
    """The nodes directly in a node. Raises `yaml.MarkedYAMLError` if the node itself is refused."""
    if node.tag not in KINDS:
        raise _error(
            node,
            f"no value of the kind {node.tag.replace('tag:yaml.org,2002:', '!!')} is read here",
        )
    if isinstance(node, yaml.SequenceNode):
        return node.value
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise _error(key, f"the key {key.value!r} stands here twice")
            names.add(str(key.value))
        return [child for pair in node.value for child in pair]
    # Quoted text may have one as an escape, which could not be written as UTF-8.
    if any("\ud800" <= character <= "\udfff" for character in node.value):
        raise _error(node, "half of a surrogate pair is no text")
    if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_NUMBER:
        raise _error(node, f"a number of {len(node.value)} characters is too long")
    if node.tag.endswith((":int", ":float")) and _NOT_DECIMAL.match(node.value):
        raise _error(
            node,
            f"YAML reads {node.value} as an octal number, or one to base 60; write it in decimal, or quote text",
        )
    return []


def _error(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _problem_words(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"{error.problem} (line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1})"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())
