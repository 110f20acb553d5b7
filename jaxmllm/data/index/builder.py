"""Building the length index of a source, before anything is decoded.

record --parse--> conversation --headers of its media--> shapes --render--> lengths, or a `Rejected`
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from jaxmllm.config.schema import SourceConfig, Targets
from jaxmllm.data.index.cache import (
    Stored,
    cache_file,
    known_formats,
    read_cache,
    still_known,
    write_cache,
)
from jaxmllm.data.index.length_index import (
    EXAMPLE_COLUMNS,
    ITEM_COLUMNS,
    LengthIndex,
    Measured,
    MediaKey,
    MediaTable,
    Rejected,
    item_count,
    starts,
)
from jaxmllm.data.media.generated import item_real, item_slots
from jaxmllm.data.media.modality import ClipShape, Modality, Shape
from jaxmllm.data.media.reference import MediaError, taken_as
from jaxmllm.data.printable import shown
from jaxmllm.data.sources.formats import open_source
from jaxmllm.data.sources.source import DataError, RawRecord, Source
from jaxmllm.data.text.conversation import (
    MAX_ID,
    Conversation,
    ConversationError,
    parse_conversation,
    parse_json,
)
from jaxmllm.data.text.render import modality_of, render
from jaxmllm.data.text.tokenizers import Tokenizer

CHUNK = 2048  # most records whose media are measured together
CHUNK_BYTES = 64 << 20  # a chunk also ends when its texts have this many bytes
# Threads that resolve paths and read headers. They mostly wait for the disk, above all on network
# file systems.
THREADS = 16


def build_index(
    config: SourceConfig,
    tokenizer: Tokenizer,
    modalities: Mapping[str, Modality],
    cache: Path | None = None,
    progress: bool = True,
) -> LengthIndex:
    """The index of a source: read from its cache file in the folder `cache` (default: next to the
    source), or built now.

    A record with any fault becomes a `Rejected`. Ids need not be unique: an example is identified
    by its place in the source. `progress` shows a bar when standard error is a terminal. Raises
    `DataError` when the source cannot be read.
    """
    source = open_source(config)
    # Taken before records are read: if the file changes meanwhile, its stamp differs next time.
    try:
        stamp = source.stamp()
    except DataError as error:
        raise DataError(f"source {config.name!r}: {error}; see data.sources") from error
    except OSError as error:
        where = f"source {config.name!r}: {shown(source.path)}"
        raise DataError(f"{where} cannot be read ({error.strerror}); see data.sources") from error
    file = cache_file(cache, config, source, tokenizer, modalities)
    formats = known_formats(modalities)
    stored = read_cache(file, config, source)
    known: Mapping[MediaKey, Measured] = {}
    if stored is not None:
        # Measurements stay valid one by one, even if records or other media have changed.
        known = still_known(stored, formats)
        if stored.stamp == stamp and len(known) == len(stored.index.media.address):
            return stored.index
    index = _IndexBuilder(config.name, config.targets, source, tokenizer, modalities, known).build(
        progress
    )
    write_cache(file, Stored(index, stamp, formats))
    return index


def uncached_index(
    name: str, source: Source, tokenizer: Tokenizer, modalities: Mapping[str, Modality]
) -> LengthIndex:
    """The index of a source, built without a cache file; see `build_index`."""
    builder = _IndexBuilder(name, "assistant", source, tokenizer, modalities, {})
    return builder.build(progress=False)


@dataclass(frozen=True)
class _ParsedRecord:
    """A record of a source with its conversation, or with (reason, message) if it has none."""

    record: RawRecord
    id: str
    conversation: Conversation | None
    failure: tuple[str, str] = ("", "")
    checksum: int = 0


class _IndexBuilder:
    """Reads a source chunk by chunk and grows the columns of its index."""

    def __init__(
        self,
        name: str,
        learned: Targets,
        source: Source,
        tokenizer: Tokenizer,
        modalities: Mapping[str, Modality],
        known: Mapping[MediaKey, Measured],
    ):
        self.name = name
        self.learned = learned
        self.source = source
        self.tokenizer = tokenizer
        self.modalities = modalities
        self.known = known
        self.phases = tuple(modalities)
        # (row in the media table, result of reading the header)
        self.media: dict[MediaKey, tuple[int, Measured]] = {}
        self.labels: dict[str, int] = {}
        self.examples: list[tuple[str, int, int, int, int, int, int]] = []  # as EXAMPLE_COLUMNS
        self.counts: list[int] = []  # items of each example
        self.items: list[tuple[int, int, Shape, int, int, int, int]] = []  # as ITEM_COLUMNS
        self.rejected: list[Rejected] = []

    def build(self, progress: bool) -> LengthIndex:
        with ThreadPoolExecutor(THREADS) as pool, _progress_bar(self.source, progress) as advance:
            for chunk in chunks(self.source.records()):
                parsed = list(pool.map(self._parse, chunk))  # resolves media paths on disk
                self._measure_media(parsed, pool)
                for line in parsed:
                    self._add_record(line)
                advance(sum(record.size for record in chunk))
        return self._finished_index()

    def _parse(self, record: RawRecord) -> _ParsedRecord:
        id = f"{self.name}:{record.line}"
        if record.refusal is not None:
            return _ParsedRecord(record, id, None, record.refusal)
        try:
            value = parse_json(record.text)
            if isinstance(value, dict) and isinstance(value.get("id"), str | int):
                id = str(value["id"])[:MAX_ID].encode("utf-8", "replace").decode()
            conversation = parse_conversation(
                value,
                self.source.resolve,
                default_id=id,
                default_source=self.name,
                targets=self.learned,
            )
            self._media_keys(conversation)  # refuses media that no encoder takes
        except ConversationError as error:
            return _ParsedRecord(record, id, None, (error.reason, str(error)))
        return _ParsedRecord(
            record, conversation.id, conversation, checksum=zlib.crc32(record.text.strip())
        )

    def _measure_media(self, parsed: Iterable[_ParsedRecord], pool: ThreadPoolExecutor) -> None:
        keys = (
            key
            for line in parsed
            if line.conversation
            for key in self._media_keys(line.conversation)
        )
        new = [key for key in dict.fromkeys(keys) if key not in self.media]
        for key, measured in zip(new, pool.map(self._measure_item, new), strict=True):
            # `len` is evaluated before the key is inserted, so it is the key's row in the table.
            # Rows follow the order in which records first name media, however long headers take.
            self.media[key] = len(self.media), measured

    def _measure_item(self, key: MediaKey) -> Measured:
        if key in self.known:
            return self.known[key]
        # The stamp is taken before the header is read: a file that changes in between has another
        # stamp next time, and is measured again.
        stamp = self.source.media_stamp(key.address)
        media = taken_as(key.part, self.source.media(key.address))
        try:
            return Measured(stamp, self.modalities[key.phase].measure(media))
        except MediaError as error:
            return Measured(stamp, None, (error.reason, str(error)))

    def _media_keys(self, conversation: Conversation) -> list[MediaKey]:
        return [
            MediaKey(modality_of(item, self.modalities).name, item.part, item.reference.address)
            for item in conversation.media
        ]

    def _add_record(self, line: _ParsedRecord) -> None:
        """Add a record to the columns, or to `rejected` if any of it cannot be used."""
        if line.conversation is None:
            self._reject(line, line.failure)
            return
        rows: list[int] = []
        shapes: list[Shape] = []
        for key in self._media_keys(line.conversation):
            row, measured = self.media[key]
            if measured.shape is None:
                self._reject(line, measured.failure)
                return
            # Each group of frames of a video is an item of its own; all share the video's row.
            rows += [row] * item_count(measured.shape)
            shapes.append(measured.shape)
        try:
            rendered = render(line.conversation, self.tokenizer, self.modalities, shapes)
        except ConversationError as error:
            self._reject(line, (error.reason, str(error)))
            return
        label = self.labels.setdefault(line.conversation.source, len(self.labels))
        targets = int(np.count_nonzero(rendered.targets >= 0))
        record = line.record
        self.examples.append(
            (
                line.id,
                record.offset,
                record.line,
                label,
                len(rendered.tokens),
                targets,
                line.checksum,
            )
        )
        self.counts.append(len(rows))
        for row, span in zip(rows, rendered.media, strict=True):
            modality = self.modalities[span.phase]
            slots = item_slots(modality, span.shape, span.conditions)
            real = item_real(modality, span.shape, span.conditions)
            self.items.append(
                (
                    self.phases.index(span.phase),
                    row,
                    span.shape,
                    slots,
                    real,
                    span.tokens,
                    span.slot,
                )
            )

    def _reject(self, line: _ParsedRecord, failure: tuple[str, str]) -> None:
        self.rejected.append(Rejected(line.id, *self.source.place(line.record.line), *failure))

    def _finished_index(self) -> LengthIndex:
        id, *example_columns = _columns(self.examples, len(EXAMPLE_COLUMNS))
        phase, media, shape, *item_columns = _columns(self.items, len(ITEM_COLUMNS))
        offset, line, label, length, targets, checksum = (
            np.array(column, np.int64) for column in example_columns
        )
        slots, real, tokens, slot = (np.array(column, np.int64) for column in item_columns)
        return LengthIndex(
            name=self.name,
            source=self.source,
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
            item_start=starts(self.counts),
            item_phase=np.array(phase, np.int8),
            item_media=np.array(media, np.int32),
            item_shape=np.array(shape, np.int32).reshape(-1, 3),
            item_length=slots,
            item_real=real,
            item_tokens=tokens,
            item_slot=slot,
            media=self._media_table(),
            rejected=tuple(self.rejected),
        )

    def _media_table(self) -> MediaTable:
        measured = [measured for _, measured in self.media.values()]
        clocks = [
            (item.shape.frames, item.shape.rate) if isinstance(item.shape, ClipShape) else (0, 0.0)
            for item in measured
        ]
        shapes = [item.shape or (-1, -1, -1) for item in measured]
        stamps = [item.stamp for item in measured]
        return MediaTable(
            address=tuple(key.address for key in self.media),
            part=tuple(key.part for key in self.media),
            phase=np.array([self.phases.index(key.phase) for key in self.media], np.int8),
            stamp=np.array(stamps, np.int64).reshape(-1, 2),
            shape=np.array(shapes, np.int32).reshape(-1, 3),
            frames=np.array([frames for frames, _ in clocks], np.int32),
            rate=np.array([rate for _, rate in clocks], np.float64),
            failure={row: item.failure for row, item in enumerate(measured) if item.shape is None},
        )


def chunks(records: Iterable[RawRecord]) -> Iterator[list[RawRecord]]:
    """The records in lists of up to CHUNK, or fewer once their texts have CHUNK_BYTES."""
    chunk: list[RawRecord] = []
    held = 0
    for record in records:
        chunk.append(record)
        held += len(record.text)
        if len(chunk) == CHUNK or held >= CHUNK_BYTES:
            yield chunk
            chunk = []
            held = 0
    if chunk:
        yield chunk


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True)) if rows else [()] * width


@contextmanager
def _progress_bar(source: Source, visible: bool) -> Iterator[Any]:
    """Yield a function that advances the bar by a number of bytes."""
    console = Console(stderr=True)
    with Progress(
        console=console, disable=not (visible and console.is_terminal), transient=True
    ) as bar:
        task = bar.add_task(f"indexing {source.path.name}", total=source.size())
        yield lambda byte_count: bar.advance(task, byte_count)
