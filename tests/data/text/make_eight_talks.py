"""Makes what the reference makes of eight conversations in the dialects of seven families.

The conversations have pictures, clips, reasoning and system prompts. The goldens are ids, spans,
positions, pixels and log-mel frames.

python -m tests.data.text.make_eight_talks FOLDER        (needs torch 2.13 and transformers 5.23)

FOLDER/DIALECT/config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja,
preprocessor_config.json
FOLDER/DIALECT/talks.json   records, with media of made_media.py, and the day of making
FOLDER/DIALECT/talks.npz    ids_I [L], learned_I [L], positions_I [L, 3]; by name of a picture its
                            resized colors, patch by patch, and by name of a clip its frames [F, M]
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.text.dialects import DIALECTS, IMAGE
from tests.data.text.made_media import CLIPS, PICTURES, write_media
from tests.families.make_square_goldens import GEMMA3

THOUGHT = "<think>\nIs it a cat?\n</think>\n\nA cat."
# (role, parts): parts are texts, and names of pictures and clips. Media are left out where a family
# has no place for them.
TALKS: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...] = (
    (("system", ("Be kind.",)), ("user", ("What is this?",)), ("assistant", ("A cat.",))),
    (("user", ("photo.png", "What is this?")), ("assistant", ("A cat, a red cat.",))),
    (
        ("system", (" Be kind.\n",)),
        ("user", ("A cat: ", "thin.png", " and a red cat:\n\n", "clear.png", "1234?", "icon.png")),
        ("assistant", ("\n\nA cat,\n\n a red cat.",)),
    ),
    (
        ("user", ("What is this? ", "click.wav")),
        ("assistant", ("naïve",)),
        ("user", ("long.wav", "\n1234?")),
        ("assistant", ("猫",)),
    ),
    (("user", ("clear.png", "What", "speech.wav", " is?")), ("assistant", ("A cat.\n\n\n",))),
    (("user", ("What is this?",)), ("assistant", (THOUGHT,))),
    (
        ("system", ("You are kind.",)),
        ("user", ("What is this?", "icon.png")),
        ("assistant", (THOUGHT,)),
        ("user", ("\n1234?",)),
        ("assistant", ("Naïve 猫.",)),
    ),
    (
        ("system", ("Be kind.",)),
        ("user", ("icon.png", "speech.wav", "thin.png", "What is this?", "click.wav")),
        ("assistant", ("A cat.",)),
        ("user", ("photo.png", " 12 1 ")),
        ("assistant", (THOUGHT,)),
    ),
)
# Mel bins, the largest number of merged cells of a picture, and pixels along the side of a square.
MELS = 8
CELLS = 16
SIDE = 32
RATE = 16_000  # samples per second
ROTARY = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
DEEP = VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "num_mel_bins": MELS}
AUDIO |= {"output_dim": 16}
AXES = {"rope_parameters": ROTARY}


@dataclass(frozen=True)
class Reference:
    """How the reference reads a dialect."""

    model_type: str
    sections: dict[str, Any]
    patch: int = 0  # pixels along the side of a patch; 0 for dialects without pictures
    hears: bool = False


REFERENCES = {
    "llama3.1": Reference("llama", TEXT),
    "qwen3": Reference("qwen3", TEXT),
    "gemma3": Reference(
        "gemma3",
        GEMMA3 | {"vision_config": GEMMA3["vision_config"] | {"image_size": SIDE, "patch_size": 8}},
        patch=8,
    ),
    "qwen2.5-vl": Reference(
        "qwen2_5_vl", {"text_config": TEXT | AXES, "vision_config": VISION}, patch=14
    ),
    "qwen3-vl": Reference(
        "qwen3_vl",
        {
            "text_config": TEXT | {"rope_parameters": ROTARY | {"mrope_interleaved": True}},
            "vision_config": DEEP,
        },
        patch=16,
    ),
    "qwen2.5-omni": Reference(
        "qwen2_5_omni_thinker",
        {"text_config": TEXT | AXES, "vision_config": VISION, "audio_config": AUDIO},
        patch=14,
        hears=True,
    ),
    "qwen3-omni": Reference(
        "qwen3_omni_moe_thinker",
        {
            "text_config": TEXT | EXPERTS | AXES,
            "vision_config": DEEP,
            "audio_config": AUDIO | {"downsample_hidden_size": 8},
        },
        patch=16,
        hears=True,
    ),
}
# What the assistant says, with the token that ends it. Empty reasoning that a template writes by
# itself is not said by the assistant.
SAID = {
    "llama3.1": r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
    "qwen3": r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\s*)?(.*?<\|im_end\|>)",
    "gemma3": r"<start_of_turn>model\n(.*?<end_of_turn>)",
}
SAID_IN_CHATML = r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"
TOKENS = {  # of media: their names in the config, and as templates write them
    "qwen2.5-vl": {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>"},
    "qwen2.5-omni": {
        "image_token_index": "<|IMAGE|>",
        "video_token_index": "<|VIDEO|>",
        "audio_token_index": "<|AUDIO|>",
        "vision_start_token_id": "<|vision_bos|>",
        "audio_start_token_id": "<|audio_bos|>",
    },
    "qwen3-omni": {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "audio_token_id": "<|audio_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "audio_start_token_id": "<|audio_start|>",
    },
}
TOKENS["qwen3-vl"] = TOKENS["qwen2.5-vl"]


def main(folder: Path) -> None:
    """Writes the files of all dialects."""
    with tempfile.TemporaryDirectory() as media:
        write_media(Path(media))
        for dialect in REFERENCES:
            make(folder / dialect, dialect, Path(media))


def make(folder: Path, dialect: str, media: Path) -> None:
    """Writes the files of one dialect."""
    import transformers

    reference = REFERENCES[dialect]
    DIALECTS[dialect].folder(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ids_of = tokenizer.convert_tokens_to_ids
    tokens = {key: ids_of(token) for key, token in TOKENS.get(dialect, {}).items()}
    config = transformers.AutoConfig.for_model(reference.model_type, **reference.sections, **tokens)
    config.save_pretrained(folder)
    processors = {}
    if reference.patch:
        processors["image"] = _pictures(dialect, reference)
    if reference.hears:
        processors["audio"] = transformers.WhisperFeatureExtractor(
            feature_size=MELS, chunk_length=300
        )
    if processors:
        values: dict[str, Any] = {}
        for processor in processors.values():
            values |= processor.to_dict()
        (folder / "preprocessor_config.json").write_text(json.dumps(values, indent=1) + "\n")
    pictures, clips = _processed(dialect, processors, media)
    model = _model(config) if len(tokens) else None
    records = []
    arrays = {name: output.numbers for name, output in (pictures | clips).items()}
    for index, talk in enumerate(TALKS):
        messages = messages_of(talk, {*pictures, *clips})
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        media_names = [piece for _, parts in talk for piece in parts if piece in pictures | clips]
        text = _expanded(text, dialect, iter((pictures | clips)[name] for name in media_names))
        output = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_tensors="pt"
        )
        ids = output["input_ids"]
        positions = np.arange(ids.shape[1])[:, None].repeat(3, 1)
        if model is not None:
            grids = [pictures[name].grid for name in media_names if name in pictures]
            frames = [clips[name].grid[0] for name in media_names if name in clips]
            positions = _positions(model, ids, grids, frames, tokens)
        arrays[f"ids_{index}"] = ids[0].numpy().astype(np.int32)
        arrays[f"learned_{index}"] = _learned(text, dialect, output["offset_mapping"][0].tolist())
        arrays[f"positions_{index}"] = positions.astype(np.float32)
        records.append({"messages": messages})
    talks = {"day": str(date.today()), "records": records}  # a template may print this day
    (folder / "talks.json").write_text(json.dumps(talks, indent=1) + "\n")
    np.savez_compressed(folder / "talks.npz", **arrays)


@dataclass(frozen=True)
class Made:
    """What the reference makes of one picture or clip."""

    numbers: np.ndarray
    grid: tuple[int, ...]  # patches of frames, rows, columns; or frames of a clip
    tokens: int


def _pictures(dialect: str, reference: Reference) -> Any:
    """The processor of pictures for a dialect."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if dialect == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    cell = (2 * reference.patch) ** 2
    return Qwen2VLImageProcessorPil(
        patch_size=reference.patch, min_pixels=4 * cell, max_pixels=CELLS * cell
    )


def _processed(
    dialect: str, processors: dict[str, Any], media: Path
) -> tuple[dict[str, Made], dict[str, Made]]:
    """What the reference makes of all pictures and all clips, by name."""
    from PIL import Image

    pictures = {}
    clips = {}
    if "image" in processors:
        processor = processors["image"]
        for name in PICTURES:
            processed = processor(images=[Image.open(media / name)], return_tensors="np")
            pixels = np.asarray(processed["pixel_values"], np.float64)
            if dialect == "gemma3":
                grid = (1, SIDE // 8, SIDE // 8)
                tokens = GEMMA3["mm_tokens_per_image"]
                patches = pixels[0].transpose(1, 2, 0)
            else:
                grid = tuple(processed["image_grid_thw"][0].tolist())
                tokens = int(np.prod(grid)) // processor.merge_size**2
                side = processor.patch_size
                frame_pair = pixels.reshape(-1, 3, 2, side, side)
                # A picture is repeated as two frames. One of them is kept.
                assert (frame_pair[:, :, 0] == frame_pair[:, :, 1]).all()
                patches = frame_pair[:, :, 0].transpose(0, 2, 3, 1)
            pictures[name] = Made(_levels(patches, processor), grid, tokens)
    if "audio" in processors:
        for name in CLIPS:
            clips[name] = _heard(dialect, processors["audio"], _sound(media / name))
    return pictures, clips


def _levels(patches: np.ndarray, processor: Any) -> np.ndarray:
    """The 8-bit colors from which the processor has made these numbers, to 1e-6."""
    mean = np.array(processor.image_mean)
    std = np.array(processor.image_std)
    levels = np.rint((patches * std + mean) * 255)
    assert np.abs((levels / 255 - mean) / std - patches).max() < 1e-6
    return levels.astype(np.uint8)


def _sound(path: Path) -> np.ndarray:
    """Samples [ceil(seconds * RATE)] at the reference's rate. The reference leaves their reading to
    its users."""
    import soundfile
    import soxr

    sound, rate = soundfile.read(path, dtype="float32", always_2d=True)
    count = -(-len(sound) * RATE // rate)
    samples = soxr.resample(sound.mean(axis=1), rate, RATE)[:count]
    return np.pad(samples, (0, count - len(samples)))


def _heard(dialect: str, extractor: Any, sound: np.ndarray) -> Made:
    """The frames of one clip.

    A longer clip lies beside it where the reference mirrors the end of the longest one."""
    import transformers.models.qwen2_5_omni.processing_qwen2_5_omni as omni
    import transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe as omni3

    pads_to_limit = dialect == "qwen2.5-omni"
    module, options = (
        (omni, {"padding": "max_length"})
        if pads_to_limit
        else (omni3, {"padding": True, "truncation": False})
    )
    longer_clips = [] if pads_to_limit else [np.zeros(len(sound) + RATE)]
    extracted = extractor(
        [sound, *longer_clips],
        sampling_rate=RATE,
        return_attention_mask=True,
        return_tensors="np",
        **options,
    )
    frames = int(extracted["attention_mask"][0].sum())
    tokens = int(module._get_feat_extract_output_lengths(frames))
    return Made(extracted["input_features"][0, :, :frames].T, (frames,), tokens)


def messages_of(talk: Any, known: set[str]) -> list[dict[str, Any]]:
    """The messages as our reader and the reference read them.

    Contents are lists where they hold media, and texts otherwise."""
    messages = []
    for role, names in talk:
        items: list[dict[str, str]] = []
        for name in names:
            kind = "image" if name in PICTURES else "audio" if name in CLIPS else "text"
            if kind == "text" and items and items[-1]["type"] == kind:
                items[-1][kind] += name
            elif kind == "text" or name in known:
                items.append({"type": kind, kind: name})
        is_text = len(items) == 1 and items[0]["type"] == "text"
        messages.append({"role": role, "content": items[0]["text"] if is_text else items})
    return messages


def _expanded(text: str, dialect: str, media: Iterator[Made]) -> str:
    """The text with as many placeholders as the reference writes for each item."""
    if dialect == "gemma3":
        begin, end, pad = IMAGE
        return re.sub(begin, lambda _: f"\n\n{begin}{pad * next(media).tokens}{end}\n\n", text)
    pads = [token for key, token in TOKENS.get(dialect, {}).items() if "start" not in key]
    if not pads:
        return text
    return re.sub("|".join(map(re.escape, pads)), lambda pad: pad[0] * next(media).tokens, text)


def _learned(text: str, dialect: str, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Per token, whether one of its characters is learned."""
    learned = np.zeros(len(text) + 1, bool)
    for said in re.finditer(SAID.get(dialect, SAID_IN_CHATML), text, re.DOTALL):
        learned[said.start(1) : said.end(1)] = True
    return np.array([learned[start : max(end, start + 1)].any() for start, end in offsets])


def _model(config: Any) -> Any:
    """A model of the reference that computes positions."""
    import transformers as t

    kinds = {
        "qwen2_5_omni_thinker": t.Qwen2_5OmniThinkerForConditionalGeneration,
        "qwen3_omni_moe_thinker": t.Qwen3OmniMoeThinkerForConditionalGeneration,
    }
    if config.model_type in kinds:
        return kinds[config.model_type](config).model
    return t.AutoModel.from_config(config)


def _positions(
    model: Any, ids: Any, grids: list[Any], frames: list[int], tokens: dict[str, int]
) -> np.ndarray:
    """The positions [L, 3] that the reference computes."""
    import torch

    if not grids and not frames:
        return np.arange(ids.shape[1])[:, None].repeat(3, 1)
    media: dict[str, Any] = {"image_grid_thw": torch.tensor(grids) if grids else None}
    if "audio_start_token_id" in tokens:
        media["audio_seqlens"] = torch.tensor(frames) if frames else None
        media["attention_mask"] = torch.ones_like(ids)
    else:
        media["mm_token_type_ids"] = (ids == tokens["image_token_id"]).long()
    positions, _ = model.get_rope_index(ids, **media)
    return np.asarray(positions[:, 0].T.numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
