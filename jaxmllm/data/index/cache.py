"""The cache of length indexes: one .npz file per index, named by its source and every setting that
lengths depend on.

A stored index is used when the records are the same and every media item still has its old stamp.
Otherwise the index is built again, and headers are read again only for media that changed. (One
`stat` per media file is thousands of times cheaper than decoding, and notices files that were
missing and have arrived.) Media that were refused are measured again when a modality has learned
new formats since.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from jaxmllm.config.schema import SourceConfig
from jaxmllm.data.index.length_index import (
    EXAMPLE_COLUMNS,
    ITEM_COLUMNS,
    MEDIA_COLUMNS,
    LengthIndex,
    Measured,
    MediaKey,
    MediaTable,
    Rejected,
)
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.printable import shown
from jaxmllm.data.sources.source import Source
from jaxmllm.data.text.tokenizers import Tokenizer

VERSION = 11  # raise when the file's layout changes, or lengths change although no setting does
STALE_SECONDS = 24 * 3600  # an older draft of a cache file is taken to be abandoned
STAMP_THREADS = 16  # they wait for the disk, above all on network file systems
STAMPS_AT_ONCE = 2048  # per task of a thread; with fewer, tasks cost more than `stat`

Formats = Mapping[str, tuple[str, ...]]  # file formats that each modality can read, by phase

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """An index, the stamp of its records, and the formats that could be read when it was built."""

    index: LengthIndex
    stamp: str
    formats: Formats


def cache_file(
    folder: Path | None,
    config: SourceConfig,
    source: Source,
    tokenizer: Tokenizer,
    modalities: Mapping[str, Modality],
) -> Path:
    """Cache file of a source's index, in `folder` or else next to the source."""
    settings = [VERSION, config.name, repr(source), config.targets, tokenizer.fingerprint]
    settings.append({phase: repr(modality) for phase, modality in modalities.items()})
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=8).hexdigest()
    return (folder or source.path.parent) / f"{source.path.stem}.{digest}.index.npz"


def known_formats(modalities: Mapping[str, Modality]) -> Formats:
    """Formats that each modality can read, by phase."""
    return {phase: modality.formats for phase, modality in modalities.items()}


def still_known(stored: Stored, formats: Formats) -> dict[MediaKey, Measured]:
    """Stored measurements of unchanged media items that would be measured the same today."""
    index = stored.index
    media = index.media
    trusted = {
        phase: _trusted_outcomes(stored.formats.get(phase, ()), formats[phase])
        for phase in index.phases
    }
    groups = [
        media.address[start : start + STAMPS_AT_ONCE]
        for start in range(0, len(media.address), STAMPS_AT_ONCE)
    ]
    with ThreadPoolExecutor(STAMP_THREADS) as pool:
        # In the order of the table, so that a stamp's number is its row.
        stamps = chain.from_iterable(
            pool.map(lambda group: [index.source.media_stamp(a) for a in group], groups)
        )
        known = {}
        for row, stamp in enumerate(stamps):
            phase = index.phases[media.phase[row]]
            successes, failures = trusted[phase]
            if stamp == tuple(media.stamp[row]) and (
                failures if row in media.failure else successes
            ):
                known[MediaKey(phase, media.part[row], media.address[row])] = media.measured(row)
    return known


def _trusted_outcomes(stored: tuple[str, ...], known: tuple[str, ...]) -> tuple[bool, bool]:
    """Whether stored shapes, and whether stored failures, would be measured the same today.

    A new format can turn refusals into items; a format that is gone can turn items into refusals.
    """
    return set(stored) <= set(known), set(stored) == set(known)


def read_cache(file: Path, config: SourceConfig, source: Source) -> Stored | None:
    """The stored index; None if there is none, or it is damaged."""
    if not os.path.isfile(file):  # unlike Path.is_file, no error if the folder cannot be read
        return None
    try:
        with np.load(file, allow_pickle=False) as arrays:
            columns = dict(arrays)
        words = json.loads(columns.pop("words").tobytes())
        media = MediaTable(
            address=tuple(words["media_address"]),
            part=tuple(words["media_part"]),
            failure={row: (reason, message) for row, reason, message in words["media_failure"]},
            **{name: columns.pop(f"media_{name}") for name in MEDIA_COLUMNS},
        )
        index = LengthIndex(
            name=config.name,
            source=source,
            learned=config.targets,
            phases=tuple(words["phases"]),
            labels=tuple(words["labels"]),
            rejected=tuple(Rejected(**rejected) for rejected in words["rejected"]),
            media=media,
            **columns,
        )
        formats = {phase: tuple(names) for phase, names in words["formats"].items()}
        return Stored(index, words["stamp"], formats)
    except Exception as error:  # a damaged file can fail anywhere in zip, npy and JSON
        _log.warning(
            "the length index %s is damaged (%s) and is built anew", shown(file), shown(error)
        )
        return None


def write_cache(file: Path, stored: Stored) -> None:
    """Write an index to its cache file: to a draft that is then renamed, so that hosts that share
    the folder never see half a file. A failure to write is only logged."""
    index = stored.index
    media = index.media
    words = {
        "stamp": stored.stamp,
        "formats": stored.formats,
        "phases": index.phases,
        "labels": index.labels,
        "rejected": [asdict(rejected) for rejected in index.rejected],
        "media_address": media.address,
        "media_part": media.part,
        "media_failure": [(row, *failure) for row, failure in media.failure.items()],
    }
    columns = {
        name: getattr(index, name) for name in (*EXAMPLE_COLUMNS, *ITEM_COLUMNS, "item_start")
    }
    columns |= {f"media_{name}": getattr(media, name) for name in MEDIA_COLUMNS}
    # As bytes of JSON, because `read_cache` takes no pickled objects.
    columns["words"] = np.frombuffer(json.dumps(words).encode(), np.uint8)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _sweep_drafts(file)
        # `_sweep_drafts` reads from the name whether the writer is alive. The draft is in the
        # folder of the file, because renaming works within a file system.
        draft = f"{file.name}.{socket.gethostname()}.{os.getpid()}."
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=draft) as folder:
            np.savez(Path(folder, file.name), **columns)
            os.replace(Path(folder, file.name), file)
    except OSError as error:
        folder = shown(file.parent)
        _log.warning(
            "the length index cannot be kept in %s (%s); set data.index_cache",
            folder,
            error.strerror,
        )


def _sweep_drafts(file: Path) -> None:
    """Remove the drafts of this cache file that killed processes left: those of processes of this
    host that no longer run, and old ones of any host."""
    for folder in file.parent.glob(f"{glob.escape(file.name)}.*"):
        # FILE.HOST.PROCESS.RANDOM is split from the end: host names may contain dots.
        host, _, process = (
            folder.name.removeprefix(f"{file.name}.").rpartition(".")[0].rpartition(".")
        )
        dead = host == socket.gethostname() and process.isdecimal() and not _is_alive(int(process))
        if dead or time.time() - _modification_time(folder) > STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _modification_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process exists but belongs to another user
        pass
    return True
