"""Context parallelism: how evenly one long row is spread over ranks, in attention and in a whole
layer.

    python -m benchmarks.context [--json PATH]

Four ways to assign the blocks of a row to ranks:

    contiguous       equal stretches
    zigzag           the row is cut into 2 R equal stretches; rank r gets the r-th from either end
    longest_first    blocks by descending work, each to the lightest rank, whatever number it has
    equal            as in training (jaxmllm/attention/parts.py): equally many blocks per rank,
                     least work on the heaviest rank

Four kinds of rows; every image, clip and frame is seen in both directions inside itself:

    prepend          one document: images first (30 to 70 % of the row), then text
    interleave       one document: images, and after each a text
    video            one document: frames of one size, some words of time before each, and text in
                     the last tenth
    packed           documents of the workload generator, with images and clips where it puts them

Sizes of images and texts are those of the workload generator's tasks. Media see what precedes them
in their document, as in training here; with `--isolated` each sees only itself, as in other work on
the subject. Text sees everything before it.

`tiles` is max / mean over ranks of the visited tiles of attention. `layer` is max / mean of the
FLOPs of one layer of an 8B model (width 4096, MLP 14336, 32 heads of 128, 8 of them for keys):
tiles, and products with weights for each token. Both are means over seeds. `plan ms` is the median
CPU time on one core to count tiles, assign blocks, and order tokens.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Ints, Longs
from jaxmllm.attention.mask import TokenIds
from jaxmllm.attention.parts import (
    TILE,
    assign_blocks,
    block_work,
    contiguous,
    longest_first,
    span_work,
    zigzag,
)
from jaxmllm.balance.costs.flops import phase_layers
from jaxmllm.balance.records import RowClass
from jaxmllm.balance.sizes.inputs import Alignment
from jaxmllm.config.schema import LanguageConfig, ModelConfig
from jaxmllm.phases import LANGUAGE
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.tools.workload import TASKS, generate

TOKENS: Final = [8192, 16384, 32768, 65536, 131072]
RANKS: Final = [8, 16, 32]
MODEL: Final = ModelConfig(
    language=LanguageConfig(
        width=4096,
        layers=1,
        heads=32,
        kv_heads=8,
        head_size=128,
        mlp_width=14336,
        vocab_size=128_256,
    )
)
COLUMNS = ["tokens", "ranks", "block", "generator", "method", "tiles", "layer", "plan ms"]
GENERATOR = (
    "numpy default_rng([seed, tokens]) and generate([seed, tokens], ..) of the workload; "
    "see benchmarks/context.py"
)
EXAMPLES_PER_TOKEN = 1 / 64  # examples drawn for a packed row, which takes the ones that fit
FRAME_TOKENS = (64, 144, 256, 576)
TIME_WORDS = (2, 8)  # words before a frame: the least number, and one more than the largest


# ---------------------------------------------------------------------------- rows


def prepend(random: np.random.Generator, tokens: int) -> TokenIds:
    image_tokens = int(tokens * random.uniform(0.3, 0.7))
    group = np.zeros(tokens, np.int32)
    group[:image_tokens] = _numbered(TASKS["captioning"].image.draw(random, tokens), image_tokens)
    return _document(group)


def interleave(random: np.random.Generator, tokens: int) -> TokenIds:
    pieces = tokens // 64  # enough pieces to fill the row: no image has fewer than 64 tokens
    images = TASKS["captioning"].image.draw(random, pieces)
    texts = TASKS["captioning"].text.draw(random, pieces)
    return _document(_alternating(np.stack([texts, images], axis=1), tokens))


def video(random: np.random.Generator, tokens: int) -> TokenIds:
    words = random.integers(*TIME_WORDS, tokens)
    pieces = np.stack([words, np.full(tokens, random.choice(FRAME_TOKENS))], axis=1)
    frames = tokens - tokens // 10
    return _document(
        np.concatenate([_alternating(pieces, frames), np.zeros(tokens - frames, np.int32)])
    )


def packed(random: np.random.Generator, tokens: int) -> TokenIds:
    """Documents in the order drawn, without those that no longer fit; the rest is padding."""
    batch = generate(
        random.integers(2**31, size=4).tolist(), max(16, int(tokens * EXAMPLES_PER_TOKEN))
    )
    document, group, position = np.zeros((3, tokens), np.int32)
    starts = np.full(len(batch.examples), -1)
    end = 0
    for example, length in enumerate(batch.phases[LANGUAGE].length.tolist()):
        if end + length <= tokens:
            starts[example] = end
            document[end : end + length] = example + 1
            position[end : end + length] = np.arange(length)
            end += length
    for phase in ("vision", "audio"):
        items = batch.phases[phase]
        for item in np.flatnonzero(starts[items.example] >= 0):
            image_start = starts[items.example[item]] + items.slot[item]
            group[image_start : image_start + items.tokens[item]] = item + 1
    return TokenIds(document, group, position)


ROWS: Final[dict[str, Callable[[np.random.Generator, int], TokenIds]]] = {
    "prepend": prepend,
    "interleave": interleave,
    "video": video,
    "packed": packed,
}


def _document(group: Ints) -> TokenIds:
    """A row of one document, whose images are the [T] groups above 0."""
    return TokenIds(np.ones_like(group), group, np.arange(len(group), dtype=np.int32))


def _numbered(lengths: np.ndarray, tokens: int) -> Ints:
    """[tokens] the number, from 1, of each token's piece, for pieces of these lengths; the last
    piece is cut."""
    return np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths.astype(int))[:tokens]


def _alternating(lengths: np.ndarray, tokens: int) -> Ints:
    """[tokens] groups of pieces text, image, text, image, ..., from their lengths [n, 2]."""
    piece = _numbered(lengths.ravel(), tokens)  # odd pieces are text, even ones images
    return np.where(piece % 2, 0, piece // 2).astype(np.int32)


def isolated_work(ids: TokenIds, block: int) -> Longs:
    """`block_work` if a token of an image sees only its image: [N]."""
    document = ids.document
    group = ids.group
    image_start, image_stop = _runs(document, group)
    start = np.where(group > 0, image_start, _runs(document)[0])
    stop = np.where(group > 0, image_stop, np.arange(1, len(document) + 1, dtype=np.int32))
    return span_work(start, np.where(document > 0, stop, start), block)


def _runs(*columns: Ints) -> tuple[Ints, Ints]:
    """[T] start and stop of each token's run: the neighbouring tokens that are equal to it in all
    columns."""
    changes = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    edges = np.flatnonzero(np.concatenate([[True], changes, [True]])).astype(np.int32)
    return np.repeat(edges[:-1], np.diff(edges)), np.repeat(edges[1:], np.diff(edges))


# ---------------------------------------------------------------------------- methods

WorkOf = Callable[[TokenIds, int], Longs]  # like `block_work`: the work of each block
METHODS: Final[
    dict[str, Callable[[Callable[[], Longs], int, int], Ints]]
] = {  # called with a function that returns the work of blocks, and the numbers of blocks and ranks
    "contiguous": lambda work, blocks, ranks: contiguous(blocks, ranks),
    "zigzag": lambda work, blocks, ranks: zigzag(blocks, ranks),
    "longest_first": lambda work, blocks, ranks: longest_first(work(), ranks),
    "equal": lambda work, blocks, ranks: assign_blocks(work(), ranks),
}


@dataclass(frozen=True)
class RowBalance:
    """How evenly one row is spread: max / mean over ranks."""

    tiles: float
    layer: float
    seconds: float  # to plan the row


def balance(method: str, ids: TokenIds, ranks: int, work_of: WorkOf) -> RowBalance:
    """Plan one row, timed, and weigh the work of each rank."""
    block = block_of(len(ids.document), ranks)
    work = partial(work_of, ids, block)
    start = time.process_time()
    owner = METHODS[method](work, len(ids.document) // block, ranks)
    np.argsort(owner, kind="stable")  # the order of the blocks on the ranks is timed, too
    seconds = time.process_time() - start
    load = np.bincount(owner, work(), ranks)
    blocks = np.bincount(owner, minlength=ranks)
    return RowBalance(_over_mean(load), _over_mean(layer_cost(load, blocks, block)), seconds)


def block_of(tokens: int, ranks: int) -> int:
    """Tokens of an attention block in a row that context ranks hold."""
    return Alignment(128, small=64, smallest=32).attention_block(RowClass(tokens // ranks, ranks))


def layer_cost(work: NDArray[Any], blocks: NDArray[Any], block: int) -> NDArray[np.float64]:
    """Forward FLOPs of a layer on each rank; training multiplies both of their parts by three.

    Args:
      work: [R] half tiles.
      blocks: [R] blocks of query tokens.
    """
    layer = phase_layers(MODEL, "language")[1]
    # `attention` counts a causal sequence, which sees half of the pairs of its square
    pair_flops = 2 * layer.attention(squares=(1, 0))
    return blocks * float(block * layer.linear(1)) + work * (block**2 * pair_flops / TILE)


def _over_mean(load: NDArray[Any]) -> float:
    return float(load.max() / load.mean())


def measure(
    tokens: int, ranks: Sequence[int], seeds: int, seed: int, work_of: WorkOf
) -> list[dict[str, Any]]:
    """One record for every number of ranks, kind of rows and method."""
    rows = {
        name: [make(np.random.default_rng([seed + k, tokens]), tokens) for k in range(seeds)]
        for name, make in ROWS.items()
    }
    records = []
    for rank_count, (name, row_ids), method in itertools.product(ranks, rows.items(), METHODS):
        balances = [balance(method, ids, rank_count, work_of) for ids in row_ids]
        records.append(
            {
                "tokens": tokens,
                "ranks": rank_count,
                "block": block_of(tokens, rank_count),
                "generator": name,
                "method": method,
                "tiles": statistics.fmean(row.tiles for row in balances),
                "layer": statistics.fmean(row.layer for row in balances),
                "plan_ms": 1e3 * statistics.median(row.seconds for row in balances),
            }
        )
    return records


def verdict(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst figures of `equal`, and in how many cells (tokens, ranks, kind of rows) each other
    method has a lighter heaviest rank."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for record in records:
        cells.setdefault((record["tokens"], record["ranks"], record["generator"]), {})[
            record["method"]
        ] = record
    equal_records = [cell["equal"] for cell in cells.values()]
    return {
        "worst_layer": max(record["layer"] for record in equal_records),
        "worst_tiles": max(record["tiles"] for record in equal_records),
        "worst_plan_ms": max(record["plan_ms"] for record in equal_records),
        "cells": len(cells),
        "better": {
            method: {
                figure: sum(cell[method][figure] < cell["equal"][figure] for cell in cells.values())
                for figure in ("tiles", "layer")
            }
            for method in METHODS
            if method != "equal"
        },
    }


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument("--tokens", type=positive_int, nargs="+", default=TOKENS)
    parser.add_argument("--ranks", type=positive_int, nargs="+", default=RANKS)
    parser.add_argument(
        "--seeds", type=positive_int, default=5, help="rows per kind (default: %(default)s)"
    )
    parser.add_argument("--isolated", action="store_true", help="let images see only themselves")
    options = parser.parse_args(command)
    work_of = isolated_work if options.isolated else block_work
    try:
        records = [
            record
            for tokens in options.tokens
            for record in measure(tokens, options.ranks, options.seeds, options.seed, work_of)
        ]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    summary = verdict(records)
    image_context = "only themselves" if options.isolated else "what precedes them"
    print_table(
        f"max / mean over context ranks, mean of {options.seeds} seeds; images see {image_context}",
        COLUMNS,
        [
            [
                f"{value:.4f}" if name in ("tiles", "layer") else value
                for name, value in record.items()
            ]
            for record in records
        ],
    )
    print(
        f"equal, worst of {summary['cells']} cells: layer {summary['worst_layer']:.4f}, tiles "
        f"{summary['worst_tiles']:.4f}, planning {summary['worst_plan_ms']:.2f} ms"
    )
    for method, wins in summary["better"].items():
        print(f"{method} is better in {wins['layer']} cells by layer, in {wins['tiles']} by tiles")
    write_json(
        options.json,
        "context",
        options.seed,
        GENERATOR,
        seeds=options.seeds,
        isolated=options.isolated,
        rows=records,
        summary=summary,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
