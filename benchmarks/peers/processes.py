"""A system of another interpreter, as a process that answers line by line; and the check that all
systems must pass."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from jaxmllm.tools.arguments import positive_int

SAME_LOSS: Final = 1e-4  # largest absolute difference of losses before the first step
ROOT: Final = Path(__file__).parents[2]


class Peer:
    """A process of another interpreter that trains the model of a folder.

    Its module (see answering.py) writes a line of JSON when it has started (`facts`), and one for
    each line {"batch": PATH, "step": true} that it reads.
    """

    def __init__(
        self,
        python: str,
        module: str,
        folder: Path,
        name: str,
        settings: Mapping[str, Any],
        stack: ExitStack,
    ):
        path = folder.with_name(f"{name}.json")
        path.write_text(json.dumps(settings))
        self.name = module
        self.process = stack.enter_context(
            subprocess.Popen(
                [python, "-m", module, "serve", str(folder), str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(),
            )
        )
        stack.callback(self.process.kill)
        self.facts = self._answer()

    def __call__(self, batch: Path, step: bool = True) -> dict[str, Any]:
        """The answer to a batch; with `step` it is trained on."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"batch": str(batch), "step": step}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(f"{self.name} has ended; its last lines say why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def environment() -> dict[str, str]:
    """Environment variables with which another interpreter finds these modules."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def make_folder(python: str, module: str, folder: Path, sizes: Mapping[str, Any]) -> None:
    """Let a peer write a random model of some sizes in the form of a published folder."""
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(sizes))
    command = [python, "-m", module, "make", str(folder), str(path)]
    subprocess.run(command, check=True, env=environment())


def add_peer_options(parser: ArgumentParser, *, smaller: float, scaled: str) -> None:
    """Add what benchmarks that begin with a folder share: `--python`, `--steps` and `--smaller`,
    whose default is `smaller`, for the sizes of `scaled`."""
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter that the other system runs in (default: this one)",
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=7,
        help="measured steps per system (default: %(default)s)",
    )
    parser.add_argument(
        "--smaller",
        type=float,
        default=smaller,
        help=f"factor by which {scaled} are smaller than in the workload (default: %(default)s)",
    )


def parse_peer_options(parser: ArgumentParser, command: Sequence[str] | None) -> Namespace:
    """The options of a command, once `--smaller` is a number above 0."""
    options = parser.parse_args(command)
    if not 0 < options.smaller < math.inf:
        parser.error(f"--smaller {options.smaller} must be above 0")
    return options


def has_modules(python: str, *names: str) -> bool:
    """Whether an interpreter can import all of these modules."""
    probe = [python, "-c", f"import {', '.join(names)}"]
    try:
        return not subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode
    except OSError:
        return False


def check_losses(losses: Mapping[str, float]) -> None:
    """Raise ValueError unless all losses before the first step are equal to `SAME_LOSS`."""
    own_loss = losses["jaxmllm"]
    for name, loss in losses.items():
        if not abs(loss - own_loss) < SAME_LOSS:
            raise ValueError(
                f"{name}: the loss is {loss}, and {own_loss} in jaxmllm, before any step"
            )
