"""What a family is: its config.json in the project's words, and where its parameters are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.lines import Line

Shapes = Mapping[str, tuple[int, ...]]  # of parameters by dotted path, or of tensors by key


@dataclass(frozen=True)
class Processor:
    """What a folder's processor does, in the project's words."""

    model: Mapping[str, Any]  # keys of the component's section
    data: Mapping[str, Any]  # keys of the section of `data` that reads its media


def patterns(lines: Iterable[str], prefixes: Iterable[str]) -> tuple[str, ...]:
    """Patterns of the keys of some lines, with each prefix before them."""
    keys = {re.sub(r"{\w+}", "*", line.split(":")[0].split("[")[0]) for line in lines}
    return tuple(sorted(prefix + key for key in keys for prefix in prefixes))


@dataclass(frozen=True)
class Variant:
    """Lines that replace others in some folders."""

    lines: Mapping[str, str]
    # Whether a folder has these, given the section and the shapes of tensors by unprefixed key
    fits: Callable[[dict[str, Any], Shapes], bool]
    copies: Mapping[str, str] = field(default_factory=dict)  # replace some of `Family.copies`


@dataclass(frozen=True)
class Family:
    """One component of a family of published models."""

    name: str
    model_type: str  # in config.json; of a generator its `_class_name`
    section: Callable[
        [FolderConfig], dict[str, Any]
    ]  # the keys of the component's section of `model`
    parameters: Mapping[str, str]  # line of each parameter of the component, by dotted path
    # Lines of second tensors that some folders have for a parameter: compared when read, and
    # written, too
    copies: Mapping[str, str]
    # Patterns of keys that belong to no parameter: not read, and written back as they are
    carried: tuple[str, ...] = ()
    component: str = "language"
    # Prefixes of the component's keys in different folders, first that of the reference's modules
    prefixes: tuple[str, ...] = ("",)
    prefix: str = ""  # that of one folder
    unprefixed: tuple[str, ...] = ()  # parameters whose keys have no prefix
    # Sizes of letters that lines join in a parameter, from the section
    letters: Callable[[dict[str, Any]], dict[str, int]] = field(default=lambda section: {})
    # The keys of `model` and `data` that say how media are read, from the processor's file
    processor: Callable[[FolderConfig, dict[str, Any]], Processor] | None = None
    # The keys of `data.videos`, from config.json, the file of the video processor and the section
    videos: Callable[[FolderConfig, FolderConfig, dict[str, Any]], dict[str, Any]] | None = None
    # Id of the token that the tokens of a media item replace, where config.json says it
    placeholder: Callable[[FolderConfig], int] | None = None
    video_placeholder: Callable[[FolderConfig], int] | None = None  # the same for a video
    variants: tuple[Variant, ...] = ()  # the first one that fits counts
    sizes: Mapping[str, int] = field(default_factory=dict)  # sizes of letters in one folder

    @property
    def keys(self) -> tuple[str, ...]:
        """Patterns of the keys of its parameters, in any folder."""
        all_lines = [self.parameters, *(variant.lines for variant in self.variants)]
        of_paths = [(path, line) for lines in all_lines for path, line in lines.items()]
        outer = [line for path, line in of_paths if path in self.unprefixed]
        inside = [line for path, line in of_paths if path not in self.unprefixed]
        return (*patterns(inside, self.prefixes), *patterns([*outer, *self.copies.values()], [""]))

    def of_folder(self, config: FolderConfig, shapes: Shapes) -> Family:
        """This family with the sizes, the prefix and the lines of one folder, whose tensors have
        these shapes by key."""
        # The first in the family's order counts: a later prefix may be empty or the beginning of an
        # earlier one, and then the same keys match.
        matches = [
            prefix for prefix in self.prefixes if any(key.startswith(prefix) for key in shapes)
        ]
        prefix = matches[0] if matches else self.prefixes[0]
        section = self.section(config)
        parameters = dict(self.parameters)
        plain = {key.removeprefix(prefix): shape for key, shape in shapes.items()}
        copies = dict(self.copies)
        for variant in self.variants:
            if variant.fits(section, plain):
                parameters |= variant.lines
                copies |= variant.copies
                break
        return replace(
            self,
            copies=copies,
            parameters={
                path: text if path in self.unprefixed else prefix + text
                for path, text in parameters.items()
            },
            prefix=prefix,
            sizes=self.letters(section),
        )

    def module_line(self, path: str) -> Line:
        """The line of a parameter as the reference names its modules, whatever the keys in the
        folder begin with."""
        line = self.lines[path]
        return replace(line, key=self.prefixes[0] + line.key.removeprefix(self.prefix))

    @cached_property
    def lines(self) -> dict[str, Line]:
        """Parsed lines, by path of the parameter."""
        return {path: Line.of(text, self.sizes) for path, text in self.parameters.items()}

    @cached_property
    def copy_lines(self) -> dict[str, Line]:
        """Parsed lines of `copies`, by path of the parameter."""
        return {path: Line.of(text, self.sizes) for path, text in self.copies.items()}


def together(*components: Family, carried: Iterable[str] = ()) -> tuple[Family, ...]:
    """The components of one folder, each of which carries the keys of the others.

    Args:
      carried: further patterns of keys, which belong to none of the components.
    """
    return tuple(
        replace(
            component,
            carried=(
                *component.carried,
                *carried,
                *(key for other in components if other is not component for key in other.keys),
            ),
        )
        for component in components
    )
