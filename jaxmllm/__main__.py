"""The commands: `python -m jaxmllm VERB`, installed also as `jaxmllm VERB`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

USAGE = "usage: jaxmllm VERB [options]        (also: python -m jaxmllm VERB)"


@dataclass(frozen=True)
class Verb:
    """A command: `main(arguments)` of a module, imported only to run it: that may take seconds."""

    module: str
    summary: str


VERBS = {
    "train": Verb("jaxmllm.train", "train the model of a config, or resume its run"),
    "draw": Verb("jaxmllm.tools.draw", "draw pictures and clips with a run that has learned to"),
    "report": Verb(
        "jaxmllm.tools.balance_report",
        "draw load and padding of every rank, before and after balancing",
    ),
    "timeline": Verb(
        "jaxmllm.tools.timeline", "draw a pipeline's schedule: operations of every rank over time"
    ),
    "calibrate": Verb(
        "jaxmllm.tools.calibrate", "measure what rows take on these devices, to balance by it"
    ),
    "waste": Verb(
        "jaxmllm.tools.waste", "show what a config wastes on its data, in padding and waiting"
    ),
    "check": Verb(
        "jaxmllm.tools.check",
        "compile a config's programs for devices that are not there: memory, and what they send",
    ),
    "convert": Verb(
        "jaxmllm.tools.convert",
        "read and write published model folders, compare them with a reference",
    ),
    "plan": Verb(
        "jaxmllm.tools.plan_layout",
        "choose mesh, layouts, remat and rows for a cluster, from the batches of a config",
    ),
    "sample-data": Verb(
        "jaxmllm.tools.sample_data", "make a small data set of pictures, sounds and questions"
    ),
    "shapes": Verb(
        "jaxmllm.tools.shapes", "make captioned pictures to learn drawing from, or judge drawn ones"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments after it; return the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words:
        print(help_text(), file=sys.stderr)
        return 2
    verb, *options = words
    if verb in ("-h", "--help"):
        print(help_text())
        return 0
    if verb not in VERBS:
        print(f"error: {unknown(verb)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(VERBS[verb].module).main(options))


def help_text() -> str:
    """Usage, and a line for every verb."""
    width = max(map(len, VERBS))
    lines = (f"  {name:{width}}  {verb.summary}" for name, verb in VERBS.items())
    return "\n".join([USAGE, "", *lines, "", "jaxmllm VERB --help tells its options."])


def unknown(verb: str) -> str:
    """One line about an unknown verb that names the nearest one."""
    nearest = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.0)[0]
    return f"there is no verb {verb!r}; did you mean {nearest!r}? verbs: {', '.join(VERBS)}"


if __name__ == "__main__":
    sys.exit(main())
