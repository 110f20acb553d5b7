"""Makes the goldens of published families that read videos.

They are what the reference computes of texts with videos and pictures, with the checkpoints of
make_goldens.py.

python -m tests.families.make_moving_goldens GOLDENS FOLDER [all]
                                            (needs torch 2.13, torchvision, transformers 5.23)

FOLDER/NAME/inputs.npz     input_ids, attention_mask, mm_token_type_ids, labels [B, T], pixel_values
                           and pixel_values_videos [patches, numbers], image_grid_thw and
                           video_grid_thw [media, 3], and the seconds from one group of frames to
                           the next [videos], where the family has them
FOLDER/NAME/reference.npz  valid [B, T], logits [B, T, V], loss (mean over the learned next tokens)
FOLDER/NAME/gradients.npz  gradients of the loss, by key of the tensor: of the tensors that patches
                           and features of media meet first, or with `all` of every tensor
FOLDER/NAME/processed.npz  for some: bounds [2] of pixels; videos video_I [T, H, W, 3], and what the
                           video processor makes of them once Pillow has resized them, pixels_I
                           [patches, numbers], grid_I [3]; sizes [N, 3] (frames, height, width),
                           and what these become, resized [N, 2]; lengths [M, 2] (frames, frames
                           per second), and which frames of each are taken, taken_I [n]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.golden_files import compact, write_numbers
from tests.families.make_heard_goldens import PICTURE, SEEN, SEES, VIDEO, stored_key
from tests.families.make_pictured_goldens import as_stored, keys_in_files, plain_key

# Of pictures: frames, rows and columns of merged cells.
CELLS = {
    "tall": (1, 3, 2),
    "small": (1, 1, 1),
}
# Of videos: groups of frames, rows and columns of merged cells.
CLIPS = {
    "quick": (5, 2, 1),
    "slow": (3, 1, 2),
    "still": (1, 2, 2),
}
SECONDS = {"quick": 0.3, "slow": 1.7, "still": 1.0}  # from one group of frames to the next
TEXTS = ((4, "slow", 3, "tall", 2, "quick", 4), (7,), (2, "still", 5, "small", 3))
KEPT = ("patch_embed", "pos_embed", "merger.ln_q", "merger.norm", "embed_tokens")
# name -> (tokens that begin media, end media, stand for pictures and stand for videos; the name of
# the argument for seconds, if there is one)
MOVING: Mapping[str, tuple[tuple[int, int, int, int], str | None]] = {
    "qwen2_5_vl": ((3, 4, 5, 6), "second_per_grid_ts"),
    "qwen3_vl": ((3, 4, 5, 6), None),
    "qwen3_vl_moe": ((3, 4, 5, 6), None),
    "qwen2_5_omni": ((SEES, SEEN, PICTURE, VIDEO), "video_second_per_grid"),
}
FIRST_WORD = 10  # after all special tokens
PROCESSED = ("qwen2_5_vl", "qwen3_vl")
VOCABULARY = 40
SMALL = {"shortest_edge": 8 * 8 * 3, "longest_edge": 8 * 8 * 40}
# Frames, heights and widths of videos that are resized.
RAGGED = (
    (4, 24, 16),
    (5, 29, 41),
    (2, 9, 60),
)
RATES = (1.0, 3.0, 9.97, 10.0, 24.0, 29.97, 30.0)


def main(goldens: Path, folder: Path, everything: bool = False) -> None:
    """Writes the files of all families."""
    for seed, name in enumerate(MOVING):
        (folder / name).mkdir(parents=True, exist_ok=True)
        make_moving(goldens / name, folder / name, seed, everything)


def make_moving(source: Path, folder: Path, seed: int, everything: bool) -> None:
    """Computes with the reference, in float32, what one checkpoint makes of the texts."""
    import torch

    random = np.random.default_rng(seed)
    model, keys = _model(source)
    inputs = _texts(random, source.name)
    output = model(**{key: torch.tensor(value) for key, value in inputs.items()})
    output.loss.backward()
    logits, loss = (value.detach().numpy() for value in (output.logits, output.loss))
    gradients = {
        keys(key): as_stored(key, parameter.grad.numpy())
        for key, parameter in model.named_parameters()
        if parameter.grad is not None and (everything or any(fragment in key for fragment in KEPT))
    }
    write_numbers(folder, inputs, logits, loss, gradients)
    if source.name in PROCESSED:
        np.savez_compressed(folder / "processed.npz", **_processed(random, source.name))


def _model(source: Path) -> tuple[Any, Callable[[str], str]]:
    """A checkpoint, and the function from a parameter's name in memory to its key in the files."""
    import torch
    import transformers as t

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if source.name == "qwen2_5_omni":
        thinker = t.Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(source, **options)
        return thinker, partial(stored_key, source.name)
    config = t.AutoConfig.from_pretrained(source)
    config.video_token_id = MOVING[source.name][0][-1]
    options |= {"experts_implementation": "eager"}
    model = t.AutoModelForImageTextToText.from_pretrained(source, config=config, **options)
    stored = keys_in_files(source)
    return model, lambda key: stored[plain_key(key)]


def _processor(name: str, **changes: Any) -> Any:
    """A family's video processor, for patches of four by four pixels."""
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    kind = Qwen3VLVideoProcessor if name.startswith("qwen3") else Qwen2VLVideoProcessor
    options = {"patch_size": 4, "cap_pixels_per_frame": False, "do_sample_frames": False}
    if kind is Qwen3VLVideoProcessor:  # the checkpoints have the colors of Qwen2.5-VL
        options |= {"image_mean": Qwen2VLVideoProcessor.image_mean}
        options |= {"image_std": Qwen2VLVideoProcessor.image_std}
    return kind(**options | changes)


def _texts(random: np.random.Generator, name: str) -> dict[str, np.ndarray]:
    """Texts in which media alternate with tokens. No token of media is learned."""
    (begin, end, picture, moving), seconds = MOVING[name]
    video = _processor(name)
    cell = video.patch_size * video.merge_size
    rows: list[list[int]] = []
    media: dict[int, list[np.ndarray]] = {picture: [], moving: []}
    steps = []
    for text in TEXTS:
        ids: list[int] = []
        for piece in text:
            if isinstance(piece, int):
                ids += random.integers(FIRST_WORD, VOCABULARY, piece).tolist()
                continue
            token = picture if piece in CELLS else moving
            frames, height, width = (CELLS | CLIPS)[piece]
            shape = (frames * (2 if token == moving else 1), cell * height, cell * width, 3)
            media[token].append(random.integers(0, 256, shape).astype(np.uint8))
            # Where times are written as text, groups of frames stand apart.
            runs = frames if token == moving and seconds is None else 1
            for _ in range(runs):
                ids += [begin, *[token] * (frames * height * width // runs), end]
            if token == moving:
                steps.append(SECONDS[piece])
        rows.append(ids)
    length = max(map(len, rows))
    ids = np.array([row + [0] * (length - len(row)) for row in rows])
    mask = np.arange(length) < np.array([len(row) for row in rows])[:, None]
    inputs = {
        "input_ids": ids,
        "attention_mask": mask.astype(np.int64),
        "labels": np.where(mask & ~np.isin(ids, (picture, moving)), ids, -100),
    }
    if name != "qwen2_5_omni":  # Qwen2.5-Omni tells media by their tokens
        inputs["mm_token_type_ids"] = (ids == picture) + 2 * (ids == moving)
    for token, kind in ((picture, "image"), (moving, "video")):
        processed = [_patches(video, frames) for frames in media[token]]
        pixels = "pixel_values" if token == picture else "pixel_values_videos"
        inputs[pixels] = np.concatenate([patches for patches, _ in processed])
        inputs[f"{kind}_grid_thw"] = np.array([grid for _, grid in processed])
    if seconds is not None:
        inputs[seconds] = np.array(steps, np.float32)
    return inputs


def _patches(video: Any, frames: np.ndarray, resize: bool = False) -> tuple[np.ndarray, list[int]]:
    """The patches and the grid of a video. A picture is a video that stands still."""
    import torch

    moving = torch.tensor(frames.transpose(0, 3, 1, 2))
    processed = video(videos=[moving], do_resize=resize, return_tensors="np")
    return processed["pixel_values_videos"], processed["video_grid_thw"][0].tolist()


def _processed(random: np.random.Generator, name: str) -> dict[str, Any]:
    """Videos resized by Pillow, the grids of many sizes, and the frames taken of many lengths."""
    from PIL import Image
    from transformers.models.qwen2_vl import video_processing_qwen2_vl as qwen2
    from transformers.models.qwen3_vl import video_processing_qwen3_vl as qwen3
    from transformers.video_utils import VideoMetadata

    small = _processor(name, size=SMALL)
    arrays: dict[str, Any] = {"bounds": [*SMALL.values()]}
    for index, shape in enumerate(RAGGED):
        video = random.integers(0, 256, (*shape, 3)).astype(np.uint8)
        _, grid = _patches(small, video, resize=True)
        # Pillow resizes, because the processor's own kernel rounds differently.
        size = (small.patch_size * grid[2], small.patch_size * grid[1])
        resized = [Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC) for frame in video]
        patches, _ = _patches(small, np.stack(resized))
        arrays |= {f"video_{index}": video, f"pixels_{index}": patches, f"grid_{index}": grid}
    sides = np.exp(random.uniform(np.log(8), np.log(3000), (300, 2))).round().astype(np.int32)
    sides = sides[sides.max(axis=1) <= 100 * sides.min(axis=1)]
    sizes = np.column_stack([random.integers(2, 99, len(sides)), sides]).astype(np.int32)
    min_pixels = 128 * 28 * 28
    max_pixels = 768 * 28 * 28
    arrays |= {"sizes": sizes, "resized_bounds": [min_pixels, max_pixels]}
    arrays["resized"] = np.array(
        [
            qwen3.smart_resize(*size, 2, 32, min_pixels, max_pixels)
            if name == "qwen3_vl"
            else qwen2.smart_resize(*size[1:], 28, min_pixels, max_pixels)
            for size in sizes.tolist()
        ],
        np.int32,
    )
    lengths = [(frames, rate) for frames in (2, 3, 4, 5, 7, 11, 60, 97, 301) for rate in RATES]
    arrays["lengths"] = np.array(lengths)
    for index, (frames, rate) in enumerate(lengths):
        metadata = VideoMetadata(total_num_frames=frames, fps=rate)
        arrays[f"taken_{index}"] = np.asarray(small.sample_frames(metadata, fps=2)).astype(np.int32)
    return arrays


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), everything := "all" in sys.argv[3:])
    if not everything:
        compact(Path(sys.argv[2]))
