"""history.json of the run folder: the batch sizes and weights of sources of a run, and from which
step on each was used.

With it, the examples of a step stay a pure function of what is written down, whatever was changed
during the run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from jaxmllm.config.schema import Config
from jaxmllm.data.batches import Segment
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.runtime.files import write_atomically

HISTORY_FILE = "history.json"


def segment_of(config: Config, step: int = 0) -> Segment:
    """The batch size and weights of this config, for the steps from `step` on."""
    return Segment(
        step, config.data.batch_size, tuple(source.weight for source in config.data.sources)
    )


def read_history(run_directory: Path) -> tuple[Segment, ...]:
    """The segments of the run in a folder, empty if none began there. Raises `CheckpointError`."""
    path = run_directory / HISTORY_FILE
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        segments = tuple(
            Segment(
                int(entry["step"]), int(entry["batch_size"]), tuple(map(float, entry["weights"]))
            )
            for entry in entries
        )
        if (
            not segments
            or segments[0].step != 0
            or any(b.step <= a.step for a, b in pairwise(segments))
        ):
            raise ValueError("its steps do not ascend from 0")
        return segments
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{path} is damaged ({reason}), so it cannot be said which examples the run has seen: restore it, or begin "
            f"another run with its parameters: a new run.directory and model.from={run_directory}"
        ) from error


def write_history(run_directory: Path, history: Sequence[Segment]) -> None:
    """Store the segments; one process calls this."""
    write_atomically(
        run_directory / HISTORY_FILE, json.dumps([asdict(segment) for segment in history], indent=1)
    )


def continued_history(
    history: Sequence[Segment], current: Segment, run_directory: Path
) -> tuple[tuple[Segment, ...], list[str]]:
    """(segments up to and including `current`, which counts from its step on; lines to print).

    Segments after that step belong to steps that no checkpoint holds: they are dropped.
    """
    earlier = [segment for segment in history if segment.step < current.step]
    dropped = [segment for segment in history if segment.step > current.step]
    lines = [
        f"{run_directory / HISTORY_FILE}: the batch size {segment.batch_size} and weights {list(segment.weights)} from "
        f"step {segment.step} on are dropped, the run continues from step {current.step}"
        for segment in dropped
    ]
    if earlier and (earlier[-1].batch_size, earlier[-1].weights) == (
        current.batch_size,
        current.weights,
    ):
        return tuple(earlier), lines
    return (*earlier, current), lines
