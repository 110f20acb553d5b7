"""The part of what attention sees that an item's length does not determine: `extra` of `ItemCost`,
for plan and MFU.

images and clips in the decoder     their tokens see one another in both directions
images in a tower with windows      windows at the edges are cut
conditions of a generator           read by a separate attention: patches see them and all patches
clips in a tower that sees chunks   the last chunk is cut, or the last few
tiles of an image                   each tile sees only itself and its class token
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxmllm.arrays import Ints, Longs, sums_by
from jaxmllm.config.schema import ModelConfig


@dataclass(frozen=True)
class VisiblePairs:
    """How a model's layers see media.

    Results are [N, 2]: for layers that see everything, and for layers with windows.
    """

    tower_window: int | None = None  # side, in patches
    language_window: int | None = None
    bidirectional: tuple[str, ...] = ()  # phases whose tokens see their whole item in the decoder
    crossed: tuple[str, ...] = ()  # phases whose patches see conditions by a separate attention
    chunk: int | None = None  # slots of a clip that see one another in a tower
    # Frames of a chunk, and empty slots after them
    chunk_frames: tuple[int, int] = (1, 0)
    tiled: bool = False  # whether images are tiles with a class token each

    @classmethod
    def of_model(cls, model: ModelConfig) -> VisiblePairs:
        """The visible pairs that a model's config describes."""
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
        """The pairs of slots that are seen in items of these shapes [N, 3], less those that
        `ItemCost.squares` counts; None where lengths determine everything.

        `squares` counts items in windows or chunks as if all of these were whole, and in other
        items all pairs of slots.

        Args:
          tokens: [N] tokens that each item of a generator reads.
        """
        if phase in self.crossed:
            assert tokens is not None, "a generator's items read tokens"
            # Conditions and patches both begin in the first slot, so an item is as long as the
            # larger number of the two.
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
            # Slots of a clip: every whole chunk is followed by empty slots.
            frames, empty = self.chunk_frames
            sizes += sizes // frames * empty
        windows, cut_side = np.divmod(sizes, side)
        # Sums of squared window sizes along each axis: their product is the sum over all windows
        seen = (windows * side**2 + cut_side**2).prod(axis=1)
        slots = sizes.prod(axis=1)
        counted = slots * np.minimum(slots, side ** sizes.shape[1])
        return np.stack([np.zeros_like(seen), seen - counted], axis=1)

    def of_sequences(self, examples: int, media: Iterable[tuple[str, Ints, Ints]]) -> Longs:
        """Twice the pairs of each example's sequence that are visible only because media are seen
        in both directions: [examples, 2].

        Half of the diagonal counts, as it does among causal pairs.

        Args:
          media: (phase, [K] example, [K] tokens) of the items of each phase.
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


NOTHING_KNOWN = VisiblePairs()  # costs depend on lengths alone
