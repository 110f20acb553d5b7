"""The length index of one source: how long every example is in every phase, before anything is decoded.

    JSONL line --parse--> conversation --headers of its media--> shapes --render--> lengths, or a `Rejected`

It is cached as one .npz file, named by the source and every setting that lengths depend on. The cache counts when
the content of the JSONL is the same and every media file still has the size and modification time it had; else the
index is built anew, and headers are read again only for media that changed. (One `stat` a media file: thousands of
times cheaper than decoding, and it notices files that were missing and have arrived.)
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import shutil
import socket
import stat
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from jaxmllm.arrays import Ints, Longs
from jaxmllm.config.schema import SourceConfig, Targets
from jaxmllm.data.media.modality import MediaError, Modality, Shape
from jaxmllm.data.messages import shown
from jaxmllm.data.text.conversation import MAX_ID, Conversation, ConversationError, parse_conversation, parse_json
from jaxmllm.data.text.tokenizers import Tokenizer, modality_of, render

VERSION = 4  # of the cache file and of everything lengths depend on that is no setting
CHUNK = 2048  # lines whose media are measured together, unless they come to ...
CHUNK_BYTES = 64 << 20
MAX_LINE = 8 << 20  # bytes of a record; what is longer is refused without being held in memory
STALE = 24 * 3600  # seconds after which the draft of a cache file is nobody's
THREADS = 16  # that read headers: they wait for the disk, above all on network file systems

_log = logging.getLogger(__name__)
T = TypeVar("T")


class DataError(ValueError):
    """Data that cannot be trained on; the message says where and which setting or file to change."""


@dataclass(frozen=True)
class Rejected:
    """A record that is left out: `line` (from 1) of the JSONL file `path`, a stable `reason`, and a message."""

    id: str
    path: str
    line: int
    reason: str
    message: str

    def __str__(self) -> str:
        return shown(f"{self.path}:{self.line}: {self.message} [{self.reason}]")


@dataclass(frozen=True)
class MediaTable:
    """The D distinct media files of a source and what their headers said."""

    path: tuple[str, ...]  # [D] relative to the root
    phase: NDArray[np.int8]  # [D]
    stamp: Longs  # [D, 2] size in bytes and modification time in ns; -1 where there is no file
    shape: Ints  # [D, 2]; -1 where the header is of no use
    failure: Mapping[int, tuple[str, str]]  # reason and message there


@dataclass(frozen=True)
class LengthIndex:
    """N examples of one JSONL file and their K media items; example n has items item_start[n] .. item_start[n + 1]."""

    source: str  # configured name
    path: Path
    root: Path
    learned: Targets  # what `targets` counts
    phases: tuple[str, ...]  # encoder phases; item_phase counts in it
    labels: tuple[str, ...]  # the records' own source labels; label counts in it
    id: NDArray[np.str_]  # [N]
    offset: Longs  # [N] byte offset of the record's line
    line: Longs  # [N] from 1
    label: Ints  # [N]
    language_length: Longs  # [N] tokens
    targets: Longs  # [N] of them with a target
    checksum: Longs  # [N] CRC-32 of the record's line
    item_start: Longs  # [N + 1]
    item_phase: NDArray[np.int8]  # [K]
    item_media: Ints  # [K] row of `media`
    item_shape: Ints  # [K, 2]
    item_length: Longs  # [K] slots
    item_real: Longs  # [K] slots that hold data
    item_tokens: Longs  # [K] language tokens
    item_slot: Longs  # [K] where these start in the example's sequence
    media: MediaTable
    rejected: tuple[Rejected, ...]  # in order of lines

    def __len__(self) -> int:
        return len(self.id)

    def shapes(self, example: int) -> tuple[Shape, ...]:
        """Shapes of an example's media in reading order."""
        items = self.item_shape[self.item_start[example] : self.item_start[example + 1]]
        return tuple((int(a), int(b)) for a, b in items)

    def without(self, refused: Sequence[tuple[int, str, str]]) -> LengthIndex:
        """The index with some examples moved to `rejected`: (example, reason, message) of each, once an example."""
        if not refused:
            return self
        keep = np.ones(len(self), np.bool_)
        keep[[example for example, _, _ in refused]] = False
        counts = np.diff(self.item_start)
        items = np.repeat(keep, counts)
        moved = [Rejected(str(self.id[n]), str(self.path), int(self.line[n]), *why) for n, *why in refused]
        rows = {name: getattr(self, name)[keep] for name in _EXAMPLE_COLUMNS}
        rows |= {name: getattr(self, name)[items] for name in _ITEM_COLUMNS}
        rejected = tuple(sorted((*self.rejected, *moved), key=lambda r: r.line))
        return replace(self, **rows, item_start=_starts(counts[keep]), rejected=rejected)


_EXAMPLE_COLUMNS = ("id", "offset", "line", "label", "language_length", "targets", "checksum")
_ITEM_COLUMNS = ("item_phase", "item_media", "item_shape", "item_length", "item_real", "item_tokens", "item_slot")
_MEDIA_COLUMNS = ("phase", "stamp", "shape")


def build_index(
    source: SourceConfig,
    tokenizer: Tokenizer,
    modalities: Mapping[str, Modality],
    cache: Path | None = None,
    progress: bool = True,
) -> LengthIndex:
    """The index of a source, from its cache file in the folder `cache` (default: beside the JSONL) or built now.

    Whatever is wrong with a record becomes a `Rejected`; only blank lines are skipped. Ids need not be unique: an
    example is known by its place. `progress` shows a bar when standard error is a terminal. Raises `DataError` when
    the JSONL file cannot be read.
    """
    path, root = source_paths(source)
    where = f"source {source.name!r}: {shown(path)}"
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device could be read for ever
            raise DataError(f"{where} is no regular file; see data.sources")
        content = _content_hash(path)
    except OSError as error:
        raise DataError(f"{where} cannot be read ({error.strerror}); see data.sources") from error
    file = (cache or path.parent) / _cache_name(source, path, root, tokenizer, modalities)
    stored = _read_cache(file, source, path, root)
    known: dict[_MediaKey, _Measured] = {}
    if stored is not None:
        index, old_content = stored
        known = _unchanged(index)
        if old_content == content and len(known) == len(index.media.path):
            return index
    index = _Builder(source, path, root, tokenizer, modalities, known).build(progress)
    _write_cache(file, index, content)
    return index


def source_paths(source: SourceConfig) -> tuple[Path, Path]:
    """Absolute (JSONL file, media root) of a source."""
    path = Path(source.path).resolve()
    return path, path.parent if source.root is None else Path(source.root).resolve()


# ---------------------------------------------------------------------------- building

_MediaKey = tuple[str, str]  # phase, path relative to the root


@dataclass(frozen=True)
class _Measured:
    size: int
    mtime: int
    shape: Shape | None
    failure: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class _Line:
    number: int
    offset: int
    id: str
    conversation: Conversation | None
    failure: tuple[str, str] = ("", "")
    checksum: int = 0


class _Builder:
    """Reads a JSONL file chunk by chunk and grows the columns of its index."""

    def __init__(
        self,
        source: SourceConfig,
        path: Path,
        root: Path,
        tokenizer: Tokenizer,
        modalities: Mapping[str, Modality],
        known: Mapping[_MediaKey, _Measured],
    ):
        self.name, self.learned, self.path, self.root = source.name, source.targets, path, root
        self.tokenizer, self.modalities, self.known = tokenizer, modalities, known
        self.phases = tuple(modalities)
        self.media: dict[_MediaKey, tuple[int, _Measured]] = {}  # row in the table, what was found
        self.labels: dict[str, int] = {}
        self.examples: list[tuple[str, int, int, int, int, int, int]] = []  # as _EXAMPLE_COLUMNS
        self.counts: list[int] = []  # items of each example
        self.items: list[tuple[int, int, Shape, int, int, int, int]] = []  # as _ITEM_COLUMNS
        self.rejected: list[Rejected] = []

    def build(self, progress: bool) -> LengthIndex:
        with ThreadPoolExecutor(THREADS) as pool, _progress_bar(self.path, progress) as advance:
            for chunk in _line_chunks(self.path):
                lines = [self._parse(*line) for line in chunk]
                self._measure(lines, pool)
                for line in lines:
                    self._add(line)
                advance(sum(line.size for line in chunk))
        return self._finish()

    def _parse(self, number: int, offset: int, size: int, text: bytes) -> _Line:
        id = f"{self.name}:{number}"
        if size > MAX_LINE:
            failure = "line_too_long", f"a line of {size} bytes; a record has at most {MAX_LINE}: split it"
            return _Line(number, offset, id, None, failure)
        try:
            record = parse_json(text)
            if isinstance(record, dict) and isinstance(record.get("id"), str | int):
                id = str(record["id"])[:MAX_ID].encode("utf-8", "replace").decode()
            conversation = parse_conversation(
                record, self.root, default_id=id, default_source=self.name, targets=self.learned
            )
            self._keys(conversation)  # refuses media that no encoder takes
        except ConversationError as error:
            return _Line(number, offset, id, None, (error.reason, str(error)))
        return _Line(number, offset, conversation.id, conversation, checksum=zlib.crc32(text.strip()))

    def _measure(self, lines: Iterable[_Line], pool: ThreadPoolExecutor) -> None:
        keys = (key for line in lines if line.conversation for key in self._keys(line.conversation))
        new = [key for key in dict.fromkeys(keys) if key not in self.media]
        for key, measured in zip(new, pool.map(self._measure_one, new), strict=True):
            self.media[key] = len(self.media), measured

    def _measure_one(self, key: _MediaKey) -> _Measured:
        if key in self.known:
            return self.known[key]
        phase, relative = key
        path = self.root / relative
        stamp = _stamp(path)  # before the header: a file that changes in between is measured again next time
        try:
            return _Measured(*stamp, self.modalities[phase].measure(path))
        except MediaError as error:
            return _Measured(*stamp, None, (error.reason, str(error)))

    def _keys(self, conversation: Conversation) -> list[_MediaKey]:
        top = len(str(self.root).rstrip(os.sep)) + 1
        return [(modality_of(m.part, self.modalities).name, str(m.path)[top:]) for m in conversation.media]

    def _add(self, line: _Line) -> None:
        if line.conversation is None:
            self._reject(line, line.failure)
            return
        found = [self.media[key] for key in self._keys(line.conversation)]
        for _, measured in found:
            if measured.shape is None:
                self._reject(line, measured.failure)
                return
        shapes = [measured.shape for _, measured in found if measured.shape is not None]
        try:
            rendered = render(line.conversation, self.tokenizer, self.modalities, shapes)
        except ConversationError as error:
            self._reject(line, (error.reason, str(error)))
            return
        label = self.labels.setdefault(line.conversation.source, len(self.labels))
        targets = int(np.count_nonzero(rendered.targets >= 0))
        self.examples.append((line.id, line.offset, line.number, label, len(rendered.tokens), targets, line.checksum))
        self.counts.append(len(found))
        for (row, _), span in zip(found, rendered.media, strict=True):
            modality = self.modalities[span.phase]
            slots = modality.length(span.shape), modality.real(span.shape)
            self.items.append((self.phases.index(span.phase), row, span.shape, *slots, span.tokens, span.slot))

    def _reject(self, line: _Line, failure: tuple[str, str]) -> None:
        self.rejected.append(Rejected(line.id, str(self.path), line.number, *failure))

    def _finish(self) -> LengthIndex:
        id, *rows = _columns(self.examples, len(_EXAMPLE_COLUMNS))
        phase, media, shape, *lengths = _columns(self.items, len(_ITEM_COLUMNS))
        offset, line, label, length, targets, checksum = (np.array(row, np.int64) for row in rows)
        slots, real, tokens, slot = (np.array(row, np.int64) for row in lengths)
        return LengthIndex(
            source=self.name,
            path=self.path,
            root=self.root,
            learned=self.learned,
            phases=self.phases,
            labels=tuple(self.labels),
            id=np.array(id, np.str_),
            offset=offset,
            line=line,
            label=label.astype(np.int32),
            language_length=length,
            targets=targets,
            checksum=checksum,
            item_start=_starts(self.counts),
            item_phase=np.array(phase, np.int8),
            item_media=np.array(media, np.int32),
            item_shape=np.array(shape, np.int32).reshape(-1, 2),
            item_length=slots,
            item_real=real,
            item_tokens=tokens,
            item_slot=slot,
            media=self._media_table(),
            rejected=tuple(self.rejected),
        )

    def _media_table(self) -> MediaTable:
        measured = [measured for _, measured in self.media.values()]
        return MediaTable(
            path=tuple(path for _, path in self.media),
            phase=np.array([self.phases.index(phase) for phase, _ in self.media], np.int8),
            stamp=np.array([(m.size, m.mtime) for m in measured], np.int64).reshape(-1, 2),
            shape=np.array([m.shape or (-1, -1) for m in measured], np.int32).reshape(-1, 2),
            failure={row: m.failure for row, m in enumerate(measured) if m.shape is None},
        )


class _RawLine(NamedTuple):
    number: int  # from 1
    offset: int  # in bytes
    size: int
    text: bytes  # the beginning, where there are more than MAX_LINE bytes


def _line_chunks(path: Path) -> Iterator[list[_RawLine]]:
    """The lines that are not blank, some at a time."""
    chunk: list[_RawLine] = []
    held = 0
    for line in _lines(path):
        chunk.append(line)
        held += len(line.text)
        if len(chunk) == CHUNK or held >= CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def _lines(path: Path) -> Iterator[_RawLine]:
    offset = 0
    with path.open("rb") as file:
        for number in count(1):
            text = file.readline(MAX_LINE + 1)
            if not text:
                return
            size = len(text)
            if size > MAX_LINE:
                text = text[:MAX_ID]
                while (piece := file.readline(MAX_LINE)) and not piece.endswith(b"\n"):
                    size += len(piece)
                size += len(piece)
            if text.strip() or size > MAX_LINE:
                yield _RawLine(number, offset, size, text)
            offset += size


def _chunks(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while chunk := list(islice(items, size)):
        yield chunk


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True)) if rows else [()] * count


def _starts(counts: Sequence[int] | NDArray[Any]) -> Longs:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


@contextmanager
def _progress_bar(path: Path, wanted: bool) -> Iterator[Any]:
    """Yields a function that advances the bar by so many bytes."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not (wanted and console.is_terminal), transient=True) as bar:
        task = bar.add_task(f"indexing {path.name}", total=path.stat().st_size)
        yield lambda count: bar.advance(task, count)


# ---------------------------------------------------------------------------- cache


def _cache_name(
    source: SourceConfig, path: Path, root: Path, tokenizer: Tokenizer, modalities: Mapping[str, Modality]
) -> str:
    settings = [VERSION, source.name, str(path), str(root), source.targets, tokenizer.fingerprint]
    settings.append({phase: repr(modality) for phase, modality in modalities.items()})
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=8).hexdigest()
    return f"{path.stem}.{digest}.index.npz"


def _content_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _stamp(path: str | Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _unchanged(index: LengthIndex) -> dict[_MediaKey, _Measured]:
    """What is known of those media files that are as they were."""
    table = index.media
    chunks = _chunks(iter(table.path), CHUNK)
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda paths: [_stamp(os.path.join(index.root, path)) for path in paths], chunks))
    return {
        (index.phases[table.phase[row]], table.path[row]): _Measured(
            *stamp,
            None if row in table.failure else (int(table.shape[row, 0]), int(table.shape[row, 1])),
            table.failure.get(row, ("", "")),
        )
        for row, stamp in enumerate(chain.from_iterable(found))
        if stamp == tuple(table.stamp[row])
    }


def _write_cache(file: Path, index: LengthIndex, content: str) -> None:
    """Write beside and rename, so that hosts that share the folder never see half a file."""
    media = index.media
    words = {
        "content": content,
        "phases": index.phases,
        "labels": index.labels,
        "rejected": [asdict(rejected) for rejected in index.rejected],
        "media_path": media.path,
        "media_failure": [(row, *why) for row, why in media.failure.items()],
    }
    columns = {name: getattr(index, name) for name in (*_EXAMPLE_COLUMNS, *_ITEM_COLUMNS, "item_start")}
    columns |= {f"media_{name}": getattr(media, name) for name in _MEDIA_COLUMNS}
    columns["words"] = np.frombuffer(json.dumps(words).encode(), np.uint8)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _sweep_drafts(file)
        draft = f"{file.name}.{socket.gethostname()}.{os.getpid()}."
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=draft) as folder:
            np.savez(Path(folder, file.name), **columns)
            os.replace(Path(folder, file.name), file)
    except OSError as error:
        folder = shown(file.parent)
        _log.warning("the length index cannot be kept in %s (%s); set data.index_cache", folder, error.strerror)


def _sweep_drafts(file: Path) -> None:
    """Remove what killed processes left of this cache file: drafts of processes of this host that are no more, and old
    ones of any host."""
    for folder in file.parent.glob(f"{glob.escape(file.name)}.*"):
        host, _, process = folder.name.removeprefix(f"{file.name}.").rpartition(".")[0].rpartition(".")
        dead = host == socket.gethostname() and process.isdecimal() and not _is_alive(int(process))
        if dead or time.time() - _stamp(folder)[1] / 1e9 > STALE:
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        pass
    return True


def _read_cache(file: Path, source: SourceConfig, path: Path, root: Path) -> tuple[LengthIndex, str] | None:
    """The stored index and the hash of the JSONL it was built from; None where there is none of use."""
    if not os.path.isfile(file):  # also where the folder cannot be read, unlike Path.is_file
        return None
    try:
        with np.load(file, allow_pickle=False) as arrays:
            columns = dict(arrays)
        words = json.loads(columns.pop("words").tobytes())
        media = MediaTable(
            path=tuple(words["media_path"]),
            failure={row: (reason, message) for row, reason, message in words["media_failure"]},
            **{name: columns.pop(f"media_{name}") for name in _MEDIA_COLUMNS},
        )
        index = LengthIndex(
            source=source.name,
            path=path,
            root=root,
            learned=source.targets,
            phases=tuple(words["phases"]),
            labels=tuple(words["labels"]),
            rejected=tuple(Rejected(**rejected) for rejected in words["rejected"]),
            media=media,
            **columns,
        )
        return index, words["content"]
    except Exception as error:  # a damaged file can fail anywhere in zip, npy and JSON
        _log.warning("the length index %s is damaged (%s) and is built anew", shown(file), shown(error))
        return None
