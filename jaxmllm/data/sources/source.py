"""The protocol of a source: a new format needs one implementation and a line in formats.py.

records()  --each record once, in order--> length index        (which keeps line and offset of each)
record(offset)  --> the same record again, by random access, in any process
resolve(name in a record) --> reference to a media item --address--> length index
media(address)  --> the same reference again
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from jaxmllm.data.media.reference import MediaReference

MISSING = (-1, -1)  # stamp of a media item that does not exist


class DataError(ValueError):
    """Data that cannot be trained on; the message says where, and the setting or file to change."""


class RawRecord(NamedTuple):
    """One record as its source holds it: the JSON text of a conversation or document."""

    line: int  # from 1; `Source.place` turns it into a place for messages
    offset: int  # argument of `Source.record`
    size: int  # its bytes in the source, for the progress bar
    text: bytes  # empty if there is a refusal
    # (reason, message) if the source itself cannot read the record
    refusal: tuple[str, str] | None = None


class Source(Protocol):
    """Records and their media. Implementations are frozen dataclasses that can be sent to worker
    processes. Their `repr` shows every setting, because names of cached indexes depend on it."""

    @property
    def path(self) -> Path:
        """The file or folder that data.sources names; indexes are cached next to it."""
        ...

    def size(self) -> int:
        """Bytes of all records."""
        ...

    def stamp(self) -> str:
        """A text that is equal as long as all records are. Raises `DataError` and `OSError`."""
        ...

    def records(self) -> Iterator[RawRecord]:
        """All records in order, read one at a time."""
        ...

    def record(self, offset: int) -> bytes:
        """The text of the record that `records` found at this offset."""
        ...

    def place(self, line: int) -> tuple[str, int]:
        """Place of a record for messages: (file, line or number in the file)."""
        ...

    def resolve(self, name: str) -> MediaReference:
        """The media item that a record names. Raises `ConversationError` for a name that no record
        may use. A missing item is noticed only when it is opened."""
        ...

    def media(self, address: str) -> MediaReference:
        """The media item of an address, without a check that it exists."""
        ...

    def media_stamp(self, address: str) -> tuple[int, int]:
        """(bytes, modification time in ns) of a media item: equal as long as its content is. For a
        folder, sum and maximum over itself and its files. `MISSING` if the item does not exist, or
        no record may name it."""
        ...
