"""Documented commands parse, and documented options and keys are known.

This covers what README, docs, configs and launch files tell users to type.

text --commands--> words --parse--> options of the command's own parser --overrides--> load_config
     --code spans--> `--option`, `section.key` --------------------------------------> known to a parser, the schema
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from jaxmllm.__main__ import VERBS
from jaxmllm.config import strict_yaml
from jaxmllm.config.read import load_config, parse_config
from jaxmllm.config.schema import Config

ROOT = Path(__file__).parents[1]
PROSE = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "launch/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FILES = [*PROSE, *sorted((ROOT / "configs").glob("*.yaml"))]
EXAMPLE = ROOT / "configs/quickstart.yaml"
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:jaxmllm \S|\S*python -m (?:jaxmllm \S|jaxmllm\.|benchmarks\.|launch\.))"
)
# Modules that `python -m` may name, besides all of benchmarks/
MODULES = {"jaxmllm", "jaxmllm.train", "launch.local"}
KEY = re.compile(rf"^({'|'.join(Config.model_fields)})(\.[a-z_0-9.<>*]+)(=\S*)?$")
OTHER_PROGRAMS = {"--nodes"}  # options of programs that are not ours
FILE = re.compile(r"\.(py|jsonl?|npz|png|html|yaml|lock)$")  # `data.json` is a file, not a key


class Parsed(Exception):
    """Raised by a parser instead of returning, so that a command stops after its arguments."""

    def __init__(self, parser: argparse.ArgumentParser, options: argparse.Namespace):
        self.parser = parser
        self.options = options


@pytest.fixture
def stop_at_parser(monkeypatch):
    """Make parsers raise what they parsed, so that no command runs."""
    for name in ("parse_args", "parse_intermixed_args"):
        method = getattr(argparse.ArgumentParser, name)

        def parse(parser, arguments=None, method=method):
            raise Parsed(parser, method(parser, arguments))

        monkeypatch.setattr(argparse.ArgumentParser, name, parse)


def commands(file: Path) -> list[str]:
    """Commands of fenced blocks, of code spans and of comments, one line each."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".yaml":
        lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    else:
        blocks = [block.replace("\\\n", " ") for _, _, block in BLOCK.findall(text)]
        lines = [line.strip() for block in blocks for line in block.splitlines()]
        lines += SPAN.findall(BLOCK.sub("", text).replace("\\|", "|"))
    return [line for line in lines if COMMAND.match(line)]


def parse(command: str, monkeypatch: pytest.MonkeyPatch) -> Parsed:
    """Hand the words of a command to its own parser, and return what it raised."""
    words = [
        word for word in shlex.split(command, comments=True) if not re.match(r"^[A-Z_]+=", word)
    ]
    if words[0].endswith("python"):
        module = words[2]
        arguments = words[3:]
        assert module in MODULES or module.startswith("benchmarks."), f"{module} is no command"
    else:
        module = "jaxmllm"
        arguments = words[1:]
    if module == "jaxmllm":
        verb, *arguments = arguments
        if verb == "--help":
            raise SystemExit(0)
        module = VERBS[verb].module
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed) as parsed:
        main = importlib.import_module(module).main
        main(arguments) if main.__code__.co_argcount else main()
    return parsed.value


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_documented_commands_parse(file, stop_at_parser, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in commands(file):
        try:
            parsed = parse(command, monkeypatch)
            # `launch.local` runs a command after `--`, which is parsed as well
            if inner := getattr(parsed.options, "command", None):
                parsed = parse(shlex.join(inner[inner[0] == "--" :]), monkeypatch)
        except SystemExit as exited:
            assert not exited.code, f"{file.name}: {command}"  # 0: --help
            continue
        config = getattr(parsed.options, "config", None)
        overrides = [*getattr(parsed.options, "set", []), *getattr(parsed.options, "overrides", [])]
        if config is not None:
            # configs/my.yaml stands for the user's own
            path = Path(config) if Path(config).exists() else EXAMPLE
            load_config(path, overrides)


def test_commands_are_found():
    """If the search for commands were broken, the other tests would pass with nothing to check."""
    counts = {file.relative_to(ROOT).as_posix(): len(commands(file)) for file in FILES}
    assert (
        counts["README.md"] >= 5
        and counts["docs/balancing.md"] >= 5
        and counts["configs/quickstart.yaml"]
    )
    assert sum(counts.values()) > 25


def test_every_command_that_reads_a_config_takes_the_same_overrides(stop_at_parser):
    # `draw` reads the config of a run folder
    without_config = (
        "sample-data",
        "shapes",
        "convert",
        "draw",
    )
    modules = [verb.module for name, verb in VERBS.items() if name not in without_config]
    for module in [*modules, "benchmarks.balance_step", "benchmarks.pipeline_step"]:
        with pytest.raises(Parsed) as parsed:
            importlib.import_module(module).main(
                ["a=1", "--config", "x.yaml", "--set", "b=2", "c=3"]
            )
        assert (parsed.value.options.set, parsed.value.options.overrides) == (
            ["b=2", "c=3"],
            ["a=1"],
        ), module


@pytest.mark.parametrize("file", PROSE, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_documented_keys_are_known(file):
    for span in SPAN.findall(BLOCK.sub("", file.read_text(encoding="utf-8"))):
        for word in span.split():
            if (match := KEY.match(word)) and not FILE.search(word):
                key = match[1] + match[2]
                assert is_key(Config, key.split(".")), (
                    f"{file.name} names `{key}`, which the config does not have"
                )


@pytest.mark.parametrize("file", PROSE, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_documented_sections_are_valid(file):
    for _, language, block in BLOCK.findall(file.read_text(encoding="utf-8")):
        if language == "yaml":
            parse_config({**strict_yaml.read_file(EXAMPLE), **strict_yaml.read_text(block)})


def test_documented_options_are_known(stop_at_parser, monkeypatch):
    known = set(OTHER_PROGRAMS) | {"--help"}
    modules = {verb.module for verb in VERBS.values()} | {"launch.local"}
    modules |= {
        f"benchmarks.{file.stem}"
        for file in (ROOT / "benchmarks").glob("[!_]*.py")
        if file.stem != "common"
    }
    option_pattern = re.compile(r'add_argument\(\s*"(--[a-z-]+)')
    for module in [*modules, "jaxmllm.config.command_line", "jaxmllm.tools.output"]:
        known |= set(
            option_pattern.findall(
                Path(importlib.import_module(module).__file__).read_text(encoding="utf-8")
            )
        )
    for file in PROSE:
        for span in SPAN.findall(BLOCK.sub("", file.read_text(encoding="utf-8"))):
            for option in re.findall(r"(?:^| )(--[a-z][a-z-]*)", span):
                assert option in known, f"{file.name} names {option}, which no command has"


def is_key(section: type[BaseModel], names: list[str]) -> bool:
    """Whether a section has such a key; `<phase>` and `*` stand for any name."""
    name, *rest = names
    fields = {field.alias or key: field.annotation for key, field in section.model_fields.items()}
    chosen = list(fields) if name == "*" or name.startswith("<") else [name]
    if not rest:
        return any(key in fields for key in chosen)
    return any(
        is_key(child, rest) for key in chosen if key in fields for child in sections(fields[key])
    )


def sections(annotation: typing.Any) -> Iterator[type[BaseModel]]:
    """Sections in the annotation of a field, inside unions and lists as well."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for argument in typing.get_args(annotation):
            yield from sections(argument)
