"""A peer's process: makes a folder, or answers every step with a line of JSON. Runs in interpreters
without jax.

python -m benchmarks.peers.PEER make FOLDER SIZES.json
python -m benchmarks.peers.PEER serve FOLDER SETTINGS.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Trainer(Protocol):
    """A torch model in training."""

    model: Any

    def __call__(self, batch: Any, step: bool, /) -> dict[str, Any]:
        """The loss of a batch and the measured times; with `step`, also update the parameters."""
        ...


def answer(
    make: Callable[[Path, dict[str, Any]], None],
    begin: Callable[[Path, dict[str, Any]], Trainer],
    read: Callable[[Path], Any],
    versions: Mapping[str, str],
) -> None:
    """Run the command line of a peer.

    Args:
      make: writes a random model of some sizes in the form of a published folder.
      begin: makes the trainer of a folder's model from settings.
      read: reads a batch from a file.
      versions: versions of the packages that train.
    """
    verb, folder, settings_path = sys.argv[1:]
    values = json.loads(Path(settings_path).read_text())
    if verb == "make":
        make(Path(folder), values)
        return
    trainer = begin(Path(folder), values)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(json.dumps({"parameters": parameters, "versions": versions}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        result = trainer(read(Path(request["batch"])), request["step"])
        print(json.dumps(result | {"peak_bytes": peak_bytes()}), flush=True)


def peak_bytes() -> int:
    """The most resident memory that this process has had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
