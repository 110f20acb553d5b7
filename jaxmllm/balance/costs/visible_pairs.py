"""What attention sees of an item and its length does not tell: `extra` of `ItemCost`, and so of plan and MFU.

images and clips in the decoder     their tokens see one another in both directions
images in a tower with windows      windows at the edges are cut
conditions of a generator           read by an attention apart, patches see them besides themselves
clips in a tower that sees chunks   the last one is cut, or the last few
tiles of an image                   each sees itself, and its class token
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxmllm.arrays import Ints, Longs, sums_by
from jaxmllm.config.schema import ModelConfig


@dataclass(frozen=True)
class VisiblePairs:
    """How a model's layers see media. Results are [N, 2]: for layers that see everything, and in windows."""

    tower_window: int | None = None  # side, in patches
    language_window: int | None = None
    bidirectional: tuple[str, ...] = ()  # phases whose tokens see their whole item in the decoder
    crossed: tuple[str, ...] = ()  # phases whose patches attend to conditions apart
    chunk: int | None = None  # slots of a clip that see one another in a tower
    # Frames of a chunk, and slots after them that are empty
    chunk_frames: tuple[int, int] = (1, 0)
    tiled: bool = False  # whether images are tiles with a class token each

    @classmethod
    def of_model(cls, model: ModelConfig) -> VisiblePairs:
        """As the model's config says."""
        tower = None if model.vision is None else model.vision.window
        language = model.language
        audio = model.audio
        chunk = None
        frames = (1, 0)
        if audio is not None and audio.attention == "chunk":
            chunk = audio.seen_slots
            frames = audio.chunk_frames, audio.chunk_slots - audio.chunk_frames
        tiled = model.vision is not None and model.vision.class_token
        crossed = tuple(model.crossed)
        bidirectional = language.bidirectional
        return cls(tower, language.window, bidirectional, crossed, chunk, frames, tiled)

    def of_items(self, phase: str, shapes: Ints, tokens: Ints | None = None) -> Longs | None:
        """Of items of these shapes [N, 3]: the pairs that are seen, less those that `ItemCost.squares` counts, where
        every window or chunk is whole, and all slots of another item see one another. None where lengths tell
        everything.

        Args:
          tokens: [N] that items of a generator read.
        """
        if phase in self.crossed:
            assert tokens is not None, "a generator's items read tokens"
            conditions = tokens.astype(np.int64)
            patches = shapes.astype(np.int64).prod(axis=1)
            counted = np.maximum(conditions, patches) ** 2
            seen = patches * (patches + conditions)
            return np.stack([seen - counted, np.zeros_like(seen)], axis=1)
        if phase == "vision" and self.tiled:
            tiles = shapes[:, 0].astype(np.int64)
            tile = 1 + shapes[:, 1:].astype(np.int64).prod(axis=1)
            return np.stack([tiles * tile**2 - (tiles * tile) ** 2, 0 * tiles], axis=1)
        side = {"vision": self.tower_window, "audio": self.chunk}.get(phase)
        if side is None:
            return None
        axes = slice(1, 3) if phase == "vision" else slice(0, 1)
        sizes = shapes[:, axes].astype(np.int64)
        if phase == "audio":
            frames, empty = self.chunk_frames
            sizes += sizes // frames * empty
        windows, cut_side = np.divmod(sizes, side)
        # Of each axis the sum of squared sizes of windows: those of the plane are all their products
        seen = (windows * side**2 + cut_side**2).prod(axis=1)
        slots = sizes.prod(axis=1)
        counted = slots * np.minimum(slots, side ** sizes.shape[1])
        return np.stack([np.zeros_like(seen), seen - counted], axis=1)

    def of_sequences(self, examples: int, media: Iterable[tuple[str, Ints, Ints]]) -> Longs:
        """Of the sequences of some examples: twice the pairs that only the both directions of media show.

        As of all causal pairs, half of the diagonal counts.

        Args:
          media: phase, [K] example and [K] tokens of its items.
        """
        extra = np.zeros((examples, 2), np.int64)
        window = self.language_window
        for phase, example, tokens in media:
            if phase in self.bidirectional:
                length = tokens.astype(np.int64)
                beyond = np.zeros_like(length) if window is None else (length - window).clip(0)
                for kind, pairs in enumerate((length**2, length**2 + beyond**2)):
                    extra[:, kind] += sums_by(example, pairs, examples)
        return extra


NOTHING_KNOWN = VisiblePairs()  # costs go by lengths alone
