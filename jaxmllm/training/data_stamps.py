"""The data that a run is trained on, and whether they have changed: data.json, data.npz and
rejected.jsonl of the run folder.

    corpus --fingerprint--> data.json    examples, their order, shapes and tokens
           --stamps-------> data.npz     CRC-32 of every record, size and modification time of every media file

Lengths alone would not notice another answer of the same length or another picture of the same
size. Stamps do, and name the first record or file that differs.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxmllm.data.corpus import Corpus
from jaxmllm.data.index.length_index import LengthIndex, Rejected
from jaxmllm.runtime.agreement import agreed_problem
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.runtime.files import write_atomically

DATA_FILE = "data.json"
STAMPS_FILE = "data.npz"
REJECTED_FILE = "rejected.jsonl"

Stamps = Mapping[str, np.ndarray]


def check_data(
    run_directory: Path, corpus: Corpus, is_main: bool, say: Callable[[str], None] = print
) -> None:
    """Raise `CheckpointError` in every process unless the run in a folder was trained on this
    corpus. All processes call this; the main one compares."""
    problem = None
    if is_main:
        try:
            _check_unchanged(run_directory, corpus, say)
        except CheckpointError as error:
            problem = str(error)
    if problem := agreed_problem(problem):
        raise CheckpointError(problem)


def write_data(run_directory: Path, corpus: Corpus) -> None:
    """Store what the next resume compares with; one process calls this."""
    content = {
        "fingerprint": corpus.fingerprint(),
        "examples": len(corpus),
        "rejected": corpus.rejected_counts(),
    }
    stamps = stamps_of(corpus)
    _, saved = _read_stamps(run_directory)
    if saved.keys() != stamps.keys() or not all(
        np.array_equal(saved[name], stamps[name]) for name in stamps
    ):
        compressed = io.BytesIO()  # only after changes: takes seconds for millions of files
        np.savez_compressed(compressed, **stamps)  # type: ignore[arg-type]
        write_atomically(run_directory / STAMPS_FILE, compressed.getvalue())
    write_rejected(run_directory, corpus.rejected)
    write_atomically(run_directory / DATA_FILE, json.dumps(content, indent=1))


def write_rejected(run_directory: Path, rejected: Sequence[Rejected]) -> Path:
    """Store refused records, one JSON object per line, in rejected.jsonl and return its path; one
    process calls this."""
    path = run_directory / REJECTED_FILE
    lines = [json.dumps(asdict(refusal), ensure_ascii=False) for refusal in rejected]
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    return path


def stamps_of(corpus: Corpus) -> dict[str, np.ndarray]:
    """Arrays by "<number of the source>/<what>": checksum [N]; media, JSON of D addresses; stamp
    [D, 2], size and time."""
    arrays: dict[str, np.ndarray] = {}
    for index_number, index in enumerate(corpus.indexes):
        arrays[f"{index_number}/checksum"] = index.checksum.astype(np.uint32)
        arrays[f"{index_number}/media"] = _encode_addresses(index.media.address)
        arrays[f"{index_number}/stamp"] = index.media.stamp
    return arrays


def _check_unchanged(run_directory: Path, corpus: Corpus, say: Callable[[str], None]) -> None:
    """Raise `CheckpointError` if the corpus is not that of the run in a folder; warn of media files
    of which only the modification time differs."""
    saved, stamps = _read_stamps(run_directory)
    if saved is None:
        return
    advice = (
        f"restore it, or begin another run with this one's parameters: a new run.directory and "
        f"model.from={run_directory}"
    )
    # Stamps are compared before the fingerprint, because they tell what has changed.
    for index_number, index in enumerate(corpus.indexes):
        # Absent for a new source, and in a folder that an older version began.
        if f"{index_number}/checksum" not in stamps:
            continue
        if record := _changed_record(index, stamps[f"{index_number}/checksum"]):
            raise CheckpointError(f"{record}; {advice}")
        names, now, before = _common_media(
            index, stamps[f"{index_number}/media"], stamps[f"{index_number}/stamp"]
        )
        # Columns are size and modification time.
        resized = np.flatnonzero(now[:, 0] != before[:, 0])
        if len(resized):
            file = int(resized[0])
            raise CheckpointError(
                f"{index.source.media(names[file])} has {now[file, 0]} bytes, {before[file, 0]} when the run was "
                f"trained on it ({len(resized)} media files of source {index.name!r} differ so); {advice}"
            )
        touched = np.flatnonzero(now[:, 1] != before[:, 1])
        if len(touched):
            say(
                f"warning: {len(touched)} media files of source {index.name!r} have another modification time than "
                f"when the run was trained on them, the first is {index.source.media(names[touched[0]])}; their sizes "
                "are the same"
            )
    if saved["fingerprint"] != corpus.fingerprint():
        raise CheckpointError(
            f"{run_directory} was trained on other data: {saved['examples']} examples then, {len(corpus)} now, or "
            f"other lengths; restore the files and row limits, or begin another run with its parameters: a new "
            f"run.directory and model.from={run_directory}"
        )


def _common_media(
    index: LengthIndex, media: np.ndarray, stamp: np.ndarray
) -> tuple[Sequence[str], np.ndarray, np.ndarray]:
    """(addresses, stamps now, stamps before) of a source's media files that the run already had."""
    names = index.media.address
    if np.array_equal(
        media, _encode_addresses(names)
    ):  # a shortcut: one by one, millions take seconds
        return names, index.media.stamp, stamp
    saved_positions = {address: n for n, address in enumerate(json.loads(media.tobytes()))}
    common = [n for n, address in enumerate(names) if address in saved_positions]
    before = [saved_positions[names[n]] for n in common]
    return [names[n] for n in common], index.media.stamp[common], stamp[before]


def _encode_addresses(addresses: Sequence[str]) -> np.ndarray:
    return np.frombuffer(json.dumps(addresses).encode(), np.uint8)


def _changed_record(index: LengthIndex, before: np.ndarray) -> str | None:
    """A message that names the first record that has changed; None if none has."""
    now = index.checksum.astype(np.uint32)
    common = min(len(now), len(before))
    differing = np.flatnonzero(now[:common] != before[:common])
    if len(differing):
        record = int(differing[0])
        return (
            f"{index.place(record)}: the record {str(index.id[record])!r} is not the one that the run was "
            f"trained on ({len(differing)} records differ)"
        )
    if len(now) != len(before):
        return f"{index.source.path}: {len(now)} usable records, {len(before)} when the run was trained on them"
    return None


def _read_stamps(run_directory: Path) -> tuple[dict[str, Any] | None, Stamps]:
    """(data.json, stamps) of the run in a folder: None if no run began there, no stamps if an older
    version began it."""
    path = run_directory / DATA_FILE
    try:
        saved = dict(json.loads(path.read_text(encoding="utf-8")))
        saved["fingerprint"], saved["examples"]  # a KeyError if one is missing
    except FileNotFoundError:
        return None, {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged_error(path, error) from error
    path = run_directory / STAMPS_FILE
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return saved, dict(arrays)
    except FileNotFoundError:
        return saved, {}
    except Exception as error:  # a damaged file can fail anywhere in zip and npy
        raise _damaged_error(path, error) from error


def _damaged_error(path: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return CheckpointError(
        f"{path} is damaged ({reason}): restore it, or delete it to continue without comparing the data with that of "
        "the run"
    )
