"""Makes ids and positions of conversations with pictures and videos.

They are made with the reference's processor and model.

python -m tests.data.text.make_moving_talks FOLDER
                               (needs torch 2.13, torchvision and transformers 5.23)

FOLDER/DIALECT/tokenizer.json, tokenizer_config.json, chat_template.jinja,
               preprocessor_config.json, video_preprocessor_config.json
FOLDER/DIALECT/talks.json      records; their media in reading order: heights and widths of
                               pictures; frames, frames per second, heights and widths of
                               videos
FOLDER/DIALECT/talks.npz       ids_I [L], positions_I [L, 3]
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.text.dialects import DIALECTS

Talk = tuple[tuple[str, tuple[Any, ...]], ...]
# (role, parts): parts are texts, sizes of pictures, and frames, rates and sizes of videos.
TALKS: tuple[Talk, ...] = (
    (("user", ((24, 8.0, 100, 180), "What is this?")), ("assistant", ("A cat.",))),
    (
        ("system", ("Be kind.",)),
        ("user", ("\nA cat: ", (61, 10.0, 60, 60), " and ", (300, 200), (4, 2.5, 33, 70), "1234?")),
        ("assistant", ("A cat,\n\n a red cat.",)),
    ),
    (
        ("user", ((7, 29.97, 200, 40),)),
        ("assistant", (" naïve",)),
        ("user", ("What ", (90, 120), (40, 0.7, 50, 64), " is?")),
        ("assistant", ("猫",)),
    ),
    (("user", ((31, 3.0, 57, 83),)), ("assistant", ("",))),
)
# Dialect -> (the reference's names for it, side of a patch, frames per second that are taken)
REFERENCES = {
    "qwen2.5-vl-moving": ("Qwen2_5_VL", "qwen2_5_vl", 14, 2.0),
    "qwen3-vl-moving": ("Qwen3VL", "qwen3_vl", 16, 2.0),
    "qwen2.5-omni-moving": ("Qwen2_5Omni", "qwen2_5_omni_thinker", 14, 3.0),
}
FRAME = "<|vision_start|><|video_pad|><|vision_end|>"
SIZE = {"shortest_edge": 4096, "longest_edge": 262_144}
# The names of Qwen2.5-Omni's tokens.
NAMES = {
    "image": "<|IMAGE|>",
    "audio": "<|AUDIO|>",
    "video": "<|VIDEO|>",
    "vision_bos": "<|vision_bos|>",
    "vision_eos": "<|vision_eos|>",
    "audio_bos": "<|audio_bos|>",
    "audio_eos": "<|audio_eos|>",
}


def main(folder: Path) -> None:
    """Writes the files of all dialects."""
    for dialect in REFERENCES:
        make(folder / dialect, dialect)


def make(folder: Path, dialect: str) -> None:
    """Writes the files of one dialect."""
    import torch
    import transformers
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.video_utils import VideoMetadata

    prefix, model_type, patch, fps = REFERENCES[dialect]
    has_audio = "omni" in dialect
    has_written_times = "qwen3" in dialect
    DIALECTS[dialect].folder(folder)
    images = Qwen2VLImageProcessorPil(patch_size=patch, size=SIZE)
    kind = "Qwen3VLVideoProcessor" if has_written_times else "Qwen2VLVideoProcessor"
    videos = getattr(transformers, kind)(
        patch_size=patch, size=SIZE, do_sample_frames=True, fps=fps, cap_pixels_per_frame=False
    )
    images.save_pretrained(folder)
    videos.save_pretrained(folder)
    special = {f"{name}_token": token for name, token in NAMES.items()} if has_audio else {}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=special
    )
    template = (folder / "chat_template.jinja").read_text()
    parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": videos}
    if has_audio:
        parts["feature_extractor"] = transformers.WhisperFeatureExtractor()
    processor: Any = getattr(transformers, f"{prefix}Processor")(**parts, chat_template=template)
    model = _model(model_type, tokenizer.convert_tokens_to_ids)
    records = []
    arrays = {}
    for index, talk in enumerate(TALKS):
        media = [item for _, parts in talk for item in parts if not isinstance(item, str)]
        messages = _messages(talk)
        text = processor.apply_chat_template(messages, tokenize=False)
        # Published processors write one frame around videos. This version leaves a second frame
        # around it, which is removed here.
        text = text.replace(FRAME, "<|video_pad|>") if has_written_times else text
        clips = [size for size in media if len(size) == 4]
        pictures = [Image.new("RGB", size[::-1]) for size in media if len(size) == 2]
        encoding = processor(
            text=[text],
            images=pictures or None,
            videos=[torch.zeros((size[0], 3, *size[2:]), dtype=torch.uint8) for size in clips],
            videos_kwargs={
                "video_metadata": [
                    VideoMetadata(total_num_frames=size[0], fps=size[1]) for size in clips
                ],
                "fps": fps,
                "do_sample_frames": True,
            },
            return_tensors="pt",
        )
        ids = encoding["input_ids"]
        argument_names = (
            "image_grid_thw",
            "video_grid_thw",
            "second_per_grid_ts",
            "mm_token_type_ids",
        )
        arguments = {name: encoding[name] for name in argument_names if name in encoding}
        if has_audio:
            arguments = {name: value for name, value in arguments.items() if "thw" in name}
            arguments["second_per_grids"] = torch.as_tensor(encoding["video_second_per_grid"])
            arguments["attention_mask"] = encoding["attention_mask"]
        positions, _ = model.get_rope_index(ids, **arguments)
        arrays[f"ids_{index}"] = ids[0].numpy().astype(np.int32)
        arrays[f"positions_{index}"] = positions[:, 0].T.numpy().astype(np.int32)
        records.append({"record": {"messages": messages}, "media": media})
    (folder / "talks.json").write_text(json.dumps(records, indent=1) + "\n")
    np.savez_compressed(folder / "talks.npz", **arrays)


def _model(model_type: str, id_of: Callable[[str], int]) -> Any:
    """A small model of the reference, which computes positions."""
    import transformers

    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
    if model_type == "qwen2_5_omni_thinker":
        config = transformers.Qwen2_5OmniThinkerConfig(
            text_config=text,
            vision_config=vision,
            audio_config={"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2},
            image_token_index=id_of("<|IMAGE|>"),
            video_token_index=id_of("<|VIDEO|>"),
            audio_token_index=id_of("<|AUDIO|>"),
            vision_start_token_id=id_of("<|vision_bos|>"),
            audio_start_token_id=id_of("<|audio_bos|>"),
        )
        return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config).model
    deepstack = {"deepstack_visual_indexes": [0]}
    vision |= deepstack if model_type == "qwen3_vl" else {"tokens_per_second": 2}
    config = transformers.AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
    return transformers.AutoModel.from_config(config)


def _messages(talk: Talk) -> list[dict[str, Any]]:
    """The messages as our reader and the reference read them. Media are named by number."""
    numbers = itertools.count()

    def part(of: Any) -> dict[str, str]:
        if isinstance(of, str):
            return {"type": "text", "text": of}
        if len(of) == 4:
            return {"type": "video", "video": f"{next(numbers)}.gif"}
        return {"type": "image", "image": f"{next(numbers)}.png"}

    return [{"role": role, "content": [part(of) for of in parts]} for role, parts in talk]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
