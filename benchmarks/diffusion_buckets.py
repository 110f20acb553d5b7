"""Pictures and clips in batches of one shape, as others train on them: the baselines of
diffusion.py.

    media --bucket_media--> what a bucket keeps of each --batches_of_buckets--> batches of one shape
    media --batches_of_like_sizes--> batches that are padded to their largest item

The buckets are those of Open-Sora 2.0 (arXiv 2503.09642), from github.com/hpcaitech/Open-Sora:
areas and frame counts are the `bucket_config` of its first stage (pictures) and second stage
(clips); its `aspect` and `bucket` modules define how ratios become sizes and how an item finds its
bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache

import numpy as np

from jaxmllm.arrays import Longs, ceil_divide
from jaxmllm.balance.costs.flops import ItemCost

SIDE: int = 16  # pixels of a slot's side
FRAMES: int = 8  # frames in a slot
MOST_TEXT: int = 512  # tokens; buckets pad all texts to it

PICTURE_SIDES = (1024, 768, 256)  # roots of the areas of pictures, in pixels
CLIP_SIDES = (768, 256)
FRAME_COUNTS = np.arange(5, 130, 4)  # frames of the buckets of clips
# Height over width of the buckets; the inverses of these ratios are buckets, too
RATIOS = (2.39, 2.0, 17 / 9, 1.85, 16 / 9, 1.6, 1.5, 4 / 3, 1.0)
ENOUGH = 0.8  # an item fits a bucket if it has at least this share of the bucket's area


@dataclass(frozen=True)
class Media:
    """N pictures (clips of one frame) and clips with their captions; all fields are [N]."""

    frames: Longs
    height: Longs  # pixels
    width: Longs
    text: Longs  # tokens

    def __len__(self) -> int:
        return len(self.text)

    @property
    def latents(self) -> Longs:
        """Slots of each item without its text, [N]."""
        frame_slots = ceil_divide(self.height, SIDE) * ceil_divide(self.width, SIDE)
        return ceil_divide(self.frames, FRAMES) * frame_slots

    @property
    def slots(self) -> Longs:
        return self.latents + self.text

    @property
    def area(self) -> Longs:
        """Pixels of a frame of each item, [N]."""
        return self.height * self.width

    def at(self, numbers: Longs) -> Media:
        return Media(*(getattr(self, column.name)[numbers] for column in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Media]) -> Media:
        columns = (column.name for column in fields(cls))
        return cls(*(np.concatenate([getattr(media, name) for media in parts]) for name in columns))


@dataclass(frozen=True)
class Batch:
    """Items that a rank computes at once, all padded to one shape."""

    items: int
    latents: int  # slots of latents to which each item is padded
    text: int  # tokens to which each text is padded
    real: int  # slots that hold data, of all items
    real_cost: float  # cost of all items without their padding

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.items, self.latents, self.text

    @property
    def slots(self) -> int:
        return self.items * (self.latents + self.text)

    def cost(self, of: ItemCost) -> float:
        """Cost of the batch. Attention counts the padding, too: it is computed and masked."""
        return self.items * float(of.of(float(self.latents + self.text)))


# ---------------------------------------------------------------------------- buckets


@dataclass(frozen=True)
class Bucketed:
    """What the buckets keep of media."""

    kept: Media  # the N items that have a bucket, at the size of their bucket
    pixels: float  # share of a frame's pixels that is kept, summed over the N items
    frames: float  # share of the frames that is kept, summed over the N items


@cache
def bucket_sizes(side: int) -> tuple[tuple[int, int], ...]:
    """Heights and widths in pixels of the buckets of one area: for each ratio, multiples of `SIDE`
    with an area near `side`**2."""
    area = side**2
    sizes: dict[tuple[int, int], None] = {}
    for ratio in RATIOS:
        width = int(math.sqrt(area / ratio) // SIDE) * SIDE
        height = int(area / width // SIDE) * SIDE
        offsets = ((0, 0), (-SIDE, 0), (SIDE, 0), (0, -SIDE), (0, SIDE))
        candidates = [
            (height + height_step, width + width_step) for height_step, width_step in offsets
        ]
        sizes[min(candidates, key=lambda size: abs(size[0] * size[1] - area))] = None
    return tuple(sizes | {(width, height): None for height, width in sizes})


def bucket_media(media: Media) -> Bucketed:
    """Put every item into a bucket: the largest area that the item fills to `ENOUGH`, the most
    frames that it has, and the nearest ratio. Items are scaled until they just cover their bucket,
    then cropped."""
    # Frames, height and width of each item's bucket; zeros for items without one
    bucket_shapes = np.zeros((3, len(media)), np.int64)
    for sides, counts, members in (
        (PICTURE_SIDES, np.ones(1, np.int64), media.frames == 1),
        (CLIP_SIDES, FRAME_COUNTS, media.frames > 1),
    ):
        count_index = np.searchsorted(counts, media.frames, side="right") - 1
        for side in sides:
            fits_bucket = (
                members
                & (bucket_shapes[0] == 0)
                & (media.area >= ENOUGH * side**2)
                & (count_index >= 0)
            )
            sizes = np.array(bucket_sizes(side))
            ratio = media.height[fits_bucket] / media.width[fits_bucket]
            nearest_size = np.abs(ratio[:, None] - sizes[:, 0] / sizes[:, 1]).argmin(axis=1)
            bucket_shapes[:, fits_bucket] = counts[count_index[fits_bucket]], *sizes[nearest_size].T
    has_bucket = np.flatnonzero(bucket_shapes[0])
    frames, height, width = bucket_shapes[:, has_bucket]
    native = media.at(has_bucket)
    scale = np.maximum(height / native.height, width / native.width)
    cropped_pixels = height * width / scale**2  # pixels of the item that the bucket shows
    pixels = np.minimum(cropped_pixels, height * width) / native.area
    return Bucketed(
        Media(frames, height, width, native.text),
        pixels=float(pixels.sum()),
        frames=float((frames / native.frames).sum()),
    )


# ---------------------------------------------------------------------------- batches


def batches_of_buckets(
    kept: Media, most_slots: int, most_cost: float, cost: ItemCost
) -> tuple[list[Batch], int]:
    """Batches of each bucket, as large as the bounds allow but with one item at least, and texts
    padded to `MOST_TEXT`; and the number of items that are dropped because they do not fill a
    last batch."""
    shapes, bucket = np.unique(
        np.stack([kept.frames, kept.height, kept.width], axis=1), axis=0, return_inverse=True
    )
    real_cost = cost.of(kept.slots.astype(float))
    latents = kept.latents
    batches = []
    dropped_items = 0
    for shape_index in range(len(shapes)):
        members = np.flatnonzero(bucket == shape_index)
        # All items of a bucket have equal latents
        item_slots = int(latents[members[0]]) + MOST_TEXT
        size = max(1, min(most_slots // item_slots, int(most_cost / cost.of(float(item_slots)))))
        dropped_items += len(members) % size
        for start in range(0, len(members) - size + 1, size):
            batch_items = members[start : start + size]
            real_slots = int(kept.slots[batch_items].sum())
            batches.append(
                Batch(
                    size,
                    item_slots - MOST_TEXT,
                    MOST_TEXT,
                    real_slots,
                    float(real_cost[batch_items].sum()),
                )
            )
    return batches, dropped_items


def batches_of_like_sizes(
    media: Media, most_slots: int, most_cost: float, cost: ItemCost
) -> list[Batch]:
    """Batches of items in the order of their slots, as large as the bounds allow; each is padded to
    its most latents and its longest text."""
    media = media.at(np.lexsort((media.text, media.slots)))
    latents = media.latents
    text = media.text
    real_cost = cost.of(media.slots.astype(float))
    batches: list[Batch] = []

    def close(first: int, end: int) -> None:
        """Add a batch of the items from `first` up to `end`."""
        batch_slice = slice(first, end)
        real_slots = int((latents[batch_slice] + text[batch_slice]).sum())
        maxima = int(latents[batch_slice].max()), int(text[batch_slice].max())
        batches.append(Batch(end - first, *maxima, real_slots, float(real_cost[batch_slice].sum())))

    first = 0
    most_latents = most_text = 0
    for item in range(len(media)):
        most_latents = max(most_latents, int(latents[item]))
        most_text = max(most_text, int(text[item]))
        item_slots = most_latents + most_text
        items = item + 1 - first
        if items > 1 and (
            items * item_slots > most_slots or items * float(cost.of(float(item_slots))) > most_cost
        ):
            close(first, item)
            first = item
            most_latents = int(latents[item])
            most_text = int(text[item])
    close(first, len(media))
    return batches


def steps(batches: Sequence[Batch], ranks: int) -> Iterator[Sequence[Batch]]:
    """Steps of one batch for every rank; batches that do not fill a last step are left out."""
    for start in range(0, len(batches) - ranks + 1, ranks):
        yield batches[start : start + ranks]


def figures(batches: Sequence[Batch], ranks: int, cost: ItemCost) -> dict[str, float]:
    """`shapes` of all batches; and `real_slots`, `synchronised` and `over_ideal` of the steps in
    which each rank computes one batch, if there are enough batches for a step."""
    slots = real_slots = 0
    slowest = mean = ideal = 0.0
    for step in steps(batches, ranks):
        costs = [batch.cost(cost) for batch in step]
        slots += sum(batch.slots for batch in step)
        real_slots += sum(batch.real for batch in step)
        slowest += max(costs)
        mean += sum(costs) / ranks
        ideal += sum(batch.real_cost for batch in step) / ranks
    result: dict[str, float] = {"shapes": len({batch.shape for batch in batches})}
    if slots:
        result |= {
            "real_slots": real_slots / slots,
            "synchronised": slowest / mean,
            "over_ideal": slowest / ideal,
        }
    return result
