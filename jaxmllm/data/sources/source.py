"""What the data side must know of a source: adding a format means adding one implementation and a
line in formats.py.

records()  --each record once, in order--> length index        (which keeps line and offset of each)
record(offset)  --> the same record again, by random access, in any process
resolve(name in a record) --> reference to a media item --address--> kept in the index --media(address)--> reference
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from jaxmllm.data.media.reference import MediaReference

MISSING = (-1, -1)  # the stamp of a media item that is not there


class DataError(ValueError):
    """Data that cannot be trained on; the message says where and which setting or file to change."""


class RawRecord(NamedTuple):
    """One record as it stands in its source: the JSON text of a conversation or document."""

    line: int  # from 1; with `Source.place` what messages name
    offset: int  # what `Source.record` finds it by
    size: int  # bytes of it in the source, for the progress bar
    text: bytes  # empty where there is a refusal
    # Reason and message where the source itself cannot read it
    refusal: tuple[str, str] | None = None


class Source(Protocol):
    """Records and their media. Implementations are frozen records whose `repr` shows every setting
    (length indexes are cached by it), and which travel to worker processes."""

    @property
    def path(self) -> Path:
        """The file or folder that data.sources names; indexes are cached beside it."""
        ...

    def size(self) -> int:
        """Bytes over all records."""
        ...

    def stamp(self) -> str:
        """Equal as long as all records are the same. Raises `DataError` and `OSError`."""
        ...

    def records(self) -> Iterator[RawRecord]:
        """All records in order, of which only one needs to be held in memory."""
        ...

    def record(self, offset: int) -> bytes:
        """The text of the record that `records` found at this offset."""
        ...

    def place(self, line: int) -> tuple[str, int]:
        """The file, and the line (or number) in it, where a person finds a record."""
        ...

    def resolve(self, name: str) -> MediaReference:
        """The media item that a record names. Raises `ConversationError` where no record may name
        it so; whether it is there shows when it is opened."""
        ...

    def media(self, address: str) -> MediaReference:
        """The media item of an address, without looking for it."""
        ...

    def media_stamp(self, address: str) -> tuple[int, int]:
        """Size in bytes and modification time in ns of a media item, or of all files of a folder: equal as
        long as its content is. `MISSING` where there is none, or none that a record may name."""
        ...
