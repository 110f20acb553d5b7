"""All sources of a run as one numbered set of examples.

indexes --concatenate--> columns --gather(examples)--> BatchItems, the input of a step plan
example number --byte offset--> JSONL line --render--> tokens, targets, positions, media spans
"""

from __future__ import annotations

import hashlib
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxmllm.arrays import Ints, Longs
from jaxmllm.balance.costs.visible_pairs import NOTHING_KNOWN, VisiblePairs
from jaxmllm.balance.records import BatchItems, PhaseItems
from jaxmllm.config.schema import SourceConfig
from jaxmllm.data.index.builder import build_index
from jaxmllm.data.index.length_index import LengthIndex, Rejected, starts
from jaxmllm.data.media.modalities import row_formats
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.printable import shown
from jaxmllm.data.sources.source import DataError
from jaxmllm.data.text.conversation import parse_conversation, parse_json
from jaxmllm.data.text.render import Rendered, render
from jaxmllm.data.text.tokenizers import Tokenizer
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat

SHOWN = 5  # refusals that an error quotes


class RejectedError(DataError):
    """More records of a corpus were refused than `data.max_rejected` allows; `rejected` holds all
    that were refused."""

    def __init__(self, message: str, rejected: tuple[Rejected, ...]):
        super().__init__(message)
        self.rejected = rejected


_SHORTENING_ADVICE = {
    "vision": "lower data.images.max_pixels (data.videos.max_pixels)",
    "audio": "lower data.audio.max_seconds or split the clip",
    "diffusion": "lower data.generated.max_pixels, lower max_frames of data.generated or data.latents, or shorten what "
    "it is made from",
}

_COLUMNS = (
    "language_length",
    "targets",
    "item_phase",
    "item_length",
    "item_real",
    "item_tokens",
    "item_slot",
)
_FINGERPRINTED_COLUMNS = (
    "language_length",
    "targets",
    "item_phase",
    "item_tokens",
    "item_slot",
    "item_count",
)


@dataclass(frozen=True)
class Corpus:
    """The examples of several indexes, numbered consecutively: those of index i follow those of
    index i - 1.

    Frozen and made of plain arrays, so that it can be sent to worker processes.
    """

    indexes: tuple[LengthIndex, ...]
    weights: tuple[float, ...]  # of the indexes, for the mixture
    tokenizer: Tokenizer
    modalities: Mapping[str, Modality]
    # The labels that number sources, if set by `with_sources`; empty: those of `indexes`
    names: tuple[str, ...] = ()
    pairs: VisiblePairs = NOTHING_KNOWN  # how attention sees items, for costs

    @classmethod
    def open(
        cls,
        sources: Sequence[SourceConfig],
        tokenizer: Tokenizer,
        modalities: Mapping[str, Modality],
        cache: str | Path | None = None,
        progress: bool = True,
        pairs: VisiblePairs = NOTHING_KNOWN,
    ) -> Corpus:
        """Read or build the index of every source (see `build_index`). Raises `DataError`.

        Args:
          pairs: how attention sees items, where their lengths do not say it.
        """
        folder = None if cache is None else Path(cache)
        indexes = tuple(
            build_index(source, tokenizer, modalities, folder, progress) for source in sources
        )
        return cls(
            indexes, tuple(source.weight for source in sources), tokenizer, modalities, pairs=pairs
        )

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def formats(self) -> dict[str, RowFormat]:
        """Row format of each encoder and generator phase."""
        return row_formats(self.modalities)

    @cached_property
    def members(self) -> tuple[tuple[str, float, Longs], ...]:
        """(name, weight, example numbers) of each configured source."""
        members = []
        first_examples = self._starts[:-1].tolist()
        for index, weight, first in zip(self.indexes, self.weights, first_examples, strict=True):
            members.append((index.name, weight, np.arange(first, first + len(index))))
        return tuple(members)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Sorted labels by which losses are reported: the "source" that records give, else the
        configured name of their source."""
        return self.names or tuple(
            sorted({label for index in self.indexes for label in index.labels})
        )

    def with_sources(self, names: tuple[str, ...]) -> Corpus:
        """The corpus with its source labels numbered as in `names`, so that several corpora can
        share one numbering."""
        return replace(self, names=names)

    def longest(self, phase: str) -> int:
        """Slots of the largest item of a phase; 0 if there is none."""
        columns = self._columns
        if phase not in self.modalities:
            return int(columns["language_length"].max(initial=0))
        of_phase = columns["item_phase"] == list(self.modalities).index(phase)
        return int(columns["item_length"][of_phase].max(initial=0))

    def source_of(self, example: int) -> int:
        """Number, in `sources`, of an example's source label."""
        return int(self._label[example])

    def id(self, example: int) -> str:
        index, local = self._locate(example)
        return str(index.id[local])

    def gather(self, examples: Longs) -> BatchItems:
        """Lengths of a batch of examples, given by number [B]; numbers may repeat."""
        columns = self._columns
        item_start = columns["item_start"][examples]
        counts = columns["item_count"][examples]
        owner = np.repeat(np.arange(len(examples), dtype=np.int32), counts)
        # The ranges item_start .. item_start + count of all examples, end to end: arange counts
        # through all of them, and the offset of each range is repeated over its items.
        items = np.repeat(item_start - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        phases = {}
        for phase_index, phase in enumerate(self.modalities):
            of_phase = columns["item_phase"][items] == phase_index
            chosen = items[of_phase]
            lengths = {name: columns[f"item_{name}"][chosen] for name in ("length", "real")}
            tokens = columns["item_tokens"][chosen].astype(np.int32)
            phases[phase] = PhaseItems(
                **lengths,
                example=owner[of_phase],
                tokens=tokens,
                slot=columns["item_slot"][chosen].astype(np.int32),
                extra_squares=self.pairs.of_items(phase, self._shapes[chosen], tokens),
            )
        length = columns["language_length"][examples]
        numbers = np.arange(len(examples), dtype=np.int32)
        nothing = np.zeros_like(numbers)
        media = [(phase, items.example, items.tokens) for phase, items in phases.items()]
        extra = self.pairs.of_sequences(len(examples), media)
        phases[LANGUAGE] = PhaseItems(length, length, numbers, nothing, nothing, extra)
        return BatchItems(
            np.asarray(examples, np.int64), int(columns["targets"][examples].sum()), phases
        )

    def example(self, example: int) -> Rendered:
        """Read and render one example. Shapes come from the index, so no media file is read.

        Raises `DataError` when the JSONL file is no longer the one that was indexed.
        """
        index, local = self._locate(example)
        id = str(index.id[local])
        record = index.source.record(int(index.offset[local]))
        try:
            conversation = parse_conversation(
                parse_json(record),
                index.source.resolve,
                default_id=id,
                default_source=index.name,
                targets=index.learned,
            )
            rendered = render(conversation, self.tokenizer, self.modalities, index.shapes(local))
        except ValueError as error:
            raise DataError(_changed_record_message(index, local, f": {error}")) from error
        # A changed record may still be valid, so its text and length are compared with the index.
        same = zlib.crc32(record.strip()) == index.checksum[local]
        if not same or len(rendered.tokens) != index.language_length[local]:
            raise DataError(_changed_record_message(index, local))
        return rendered

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        return tuple(rejected for index in self.indexes for rejected in index.rejected)

    def rejected_counts(self) -> dict[str, int]:
        """Refused examples by reason, most frequent first."""
        return dict(Counter(rejected.reason for rejected in self.rejected).most_common())

    def check_rejected(self, max_rejected: float) -> None:
        """Raise `RejectedError` when more than this share of all records was refused or none is
        left, and `DataError` when a source has no record at all."""
        for index in self.indexes:
            if not len(index) and not index.rejected:
                raise DataError(
                    f"source {index.name!r}: {shown(index.source.path)} holds no record; see data.sources"
                )
        rejected = self.rejected
        total = len(self) + len(rejected)
        if len(self) and len(rejected) / total <= max_rejected:
            return
        by_reason = self.rejected_counts().items()
        counts = ", ".join(f"{examples} {reason}" for reason, examples in by_reason) or "none"
        quoted = "".join(f"\n  {refusal}" for refusal in rejected[:SHOWN])
        unquoted = f"\n  and {len(rejected) - SHOWN} more" if len(rejected) > SHOWN else ""
        no_json = "".join(
            f"\n{shown(index.source.path)} is no JSONL file, in which each line is a JSON object (see README.md)."
            for index in self.indexes
            if not len(index)
            and {refusal.reason for refusal in index.rejected} == {"malformed_json"}
        )
        way_on = ", or raise data.max_rejected to train without them" if len(self) else ""
        raise RejectedError(
            f"{len(rejected)} of {total} examples are refused, data.max_rejected allows a share of {max_rejected:g} "
            f"and at least one must remain; by reason: {counts}.{quoted}{unquoted}{no_json}\n"
            f"Fix the records{way_on}.",
            rejected,
        )

    def refuse(self, limits: Mapping[str, int]) -> Corpus:
        """The corpus without the examples that hold an item longer than `limits[phase]` slots, the
        largest row of the phase. They are added to `rejected` with the reason longer_than_row, and
        the other examples get new numbers."""
        indexes = tuple(index.without(_oversized_examples(index, limits)) for index in self.indexes)
        return replace(self, indexes=indexes)

    def for_rows(self) -> Corpus:
        """The corpus without media names and refusals, which filling rows does not read. Every data
        worker would have its own copy of them: 150 MB for a million media."""
        corpus = replace(self, indexes=tuple(index.for_rows() for index in self.indexes))
        # The cached arrays over all indexes are made here, once, and go to the workers in shared
        # memory. A worker that made them itself would have its own copy.
        columns = ("_starts", "_label", "_shapes", "_columns")
        vars(corpus).update({name: getattr(self, name) for name in columns})
        return corpus

    def fingerprint(self) -> str:
        """Digest that is equal for two runs exactly if their examples have the same number, order,
        shapes and tokens.

        Slots of encoder items are left out: they depend on the mesh (parts of a row hold whole
        chunks of sound), which a run may change. Weights of sources are left out too, and so are
        labels that come from other corpora (`with_sources`).
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((list(self.modalities), self.tokenizer.fingerprint)).encode())
        for index in self.indexes:
            digest.update(
                repr((index.name, len(index), len(index.item_shape), index.labels)).encode()
            )
            digest.update(index.id.tobytes() + index.label.tobytes() + index.offset.tobytes())
            digest.update(_flat_shapes(index.item_shape).tobytes())
        digest.update(b"".join(self._columns[name].tobytes() for name in _FINGERPRINTED_COLUMNS))
        return digest.hexdigest()

    @cached_property
    def _starts(self) -> Longs:
        return starts([len(index) for index in self.indexes])

    @cached_property
    def _label(self) -> Ints:
        label_numbers = {label: n for n, label in enumerate(self.sources)}
        example_labels = [np.zeros(0, np.int32)]
        for index in self.indexes:
            numbers = np.array([label_numbers[label] for label in index.labels], np.int32)
            example_labels.append(numbers[index.label])
        return np.concatenate(example_labels)

    @cached_property
    def _shapes(self) -> Ints:
        """Shapes of the items of all indexes, end to end: [K, 3]."""
        return np.concatenate([np.zeros((0, 3), np.int32), *(i.item_shape for i in self.indexes)])

    @cached_property
    def _columns(self) -> dict[str, Longs]:
        """Example and item columns of all indexes, end to end; item_start counts through all."""
        none = np.zeros(0, np.int64)
        columns = {}
        for name in _COLUMNS:
            of_indexes = [getattr(index, name) for index in self.indexes]
            columns[name] = np.concatenate([none, *of_indexes]).astype(np.int64)
        columns["item_count"] = np.concatenate(
            [none, *(np.diff(index.item_start) for index in self.indexes)]
        )
        columns["item_start"] = np.cumsum(columns["item_count"]) - columns["item_count"]
        return columns

    def _locate(self, example: int) -> tuple[LengthIndex, int]:
        if not 0 <= example < len(self):
            raise IndexError(f"example {example} of {len(self)}")
        # For a single number numpy's search takes ten times as long as bisect, and a step looks up
        # every id.
        index_number = bisect_right(self._starts, example) - 1
        return self.indexes[index_number], int(example - self._starts[index_number])


def _flat_shapes(shapes: Ints) -> Ints:
    """Shapes [K, 3] end to end, each without its first axis of size 1, so that images and sounds
    have two numbers.

    They had two when fingerprints of runs were first written, and fingerprints must stay the same.
    """
    flat = shapes == 1
    keep = np.ones_like(flat)
    has_flat = flat.any(axis=1)
    keep[has_flat, flat.argmax(axis=1)[has_flat]] = False
    return shapes[keep]


def _changed_record_message(index: LengthIndex, example: int, why: str = "") -> str:
    return (
        f"{index.place(example)}: not the record {str(index.id[example])!r} that was indexed{why}; restore the file "
        "and start the run again with --resume, or begin another run"
    )


def _oversized_examples(
    index: LengthIndex, limits: Mapping[str, int]
) -> list[tuple[int, str, str]]:
    """(example, reason, message) of each example with an item beyond the limits; the message is
    about the first such item."""
    refused: dict[int, str] = {}
    for phase_index, phase in enumerate(index.phases):
        if phase not in limits:
            continue
        for item in np.flatnonzero(
            (index.item_phase == phase_index) & (index.item_length > limits[phase])
        ):
            # The last example that begins at or before the item. Examples without items begin where
            # the next one does, and `right` skips them.
            example = int(np.searchsorted(index.item_start, item, side="right")) - 1
            media = index.source.media(index.media.address[index.item_media[item]])
            refused.setdefault(
                example,
                f"{shown(media)} takes {index.item_length[item]} slots of the {phase} phase, but its largest row holds "
                f"{limits[phase]}: {_SHORTENING_ADVICE.get(phase, 'shorten it')}, or raise phases.{phase}.capacities",
            )
    # After the media: the length of a conversation is named only if none of its items is too long.
    limit = limits.get(LANGUAGE)
    for example in () if limit is None else np.flatnonzero(index.language_length > limit).tolist():
        refused.setdefault(
            example,
            f"the conversation is {index.language_length[example]} tokens long, but the largest language row holds "
            f"{limit}: shorten it, lower data.images.max_pixels, data.videos.fps or data.audio.max_seconds (fewer "
            f"media tokens), or raise phases.{LANGUAGE}.capacities",
        )
    return [(example, "longer_than_row", message) for example, message in sorted(refused.items())]
