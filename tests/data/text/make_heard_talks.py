"""Makes ids and positions of conversations with pictures and clips.

They are made with the reference's processor and model.

python -m tests.data.text.make_heard_talks FOLDER        (needs torch 2.13 and transformers 5.23)

FOLDER/tokenizer.json, tokenizer_config.json, chat_template.jinja, preprocessor_config.json
FOLDER/talks.json      records; their media in reading order: heights and widths of pictures,
                       samples of clips
FOLDER/talks.npz       ids_I [L], positions_I [L, 3]
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.text.dialects import DIALECTS

# (role, parts): parts are texts, sizes of pictures, and samples of clips.
TALKS: tuple[tuple[tuple[str, tuple[Any, ...]], ...], ...] = (
    (("user", (16_000, "What is this?")), ("assistant", ("A cat.",))),
    (
        ("system", ("Be kind.",)),
        ("user", ("\nA cat: ", (300, 200), " and a red cat:\n\n", 48_161, (90, 1000), "1234?")),
        ("assistant", ("A cat,\n\n a red cat.",)),
    ),
    (
        ("user", (7_777, 481)),
        ("assistant", (" naïve",)),
        ("user", ("What ", (30, 900), 100_000, " is?")),
        ("assistant", ("猫",)),
    ),
    (("user", ("What is this?",)), ("assistant", ("A cat.",))),
)


def main(folder: Path) -> None:
    """Writes the files."""
    from PIL import Image
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5OmniProcessor,
        Qwen2_5OmniThinkerConfig,
        Qwen2_5OmniThinkerForConditionalGeneration,
        WhisperFeatureExtractor,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class Processor(Qwen2_5OmniProcessor):
        """The reference's processor without videos, which would require torchvision."""

        def __init__(
            self, image_processor: Any, feature_extractor: Any, tokenizer: Any, **more: Any
        ):
            self.image_processor, self.feature_extractor = image_processor, feature_extractor
            self.tokenizer, self.chat_template = tokenizer, more["chat_template"]
            self.image_token, self.audio_token = tokenizer.image_token, tokenizer.audio_token
            self.video_token = tokenizer.video_token

    DIALECTS["qwen2.5-omni"].folder(folder)
    images = Qwen2VLImageProcessorPil()
    images.save_pretrained(folder)
    names = {
        f"{kind}_token": token
        for kind, token in (
            ("image", "<|IMAGE|>"),
            ("audio", "<|AUDIO|>"),
            ("video", "<|VIDEO|>"),
            ("vision_bos", "<|vision_bos|>"),
            ("vision_eos", "<|vision_eos|>"),
            ("audio_bos", "<|audio_bos|>"),
            ("audio_eos", "<|audio_eos|>"),
        )
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=names
    )
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=300)
    template = (folder / "chat_template.jinja").read_text()
    processor = Processor(images, extractor, tokenizer, chat_template=template)
    ids_of = tokenizer.convert_tokens_to_ids
    text_sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text_sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
    config = Qwen2_5OmniThinkerConfig(
        text_config=text_sizes,
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16},
        audio_config={"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2},
        image_token_index=ids_of("<|IMAGE|>"),
        video_token_index=ids_of("<|VIDEO|>"),
        audio_token_index=ids_of("<|AUDIO|>"),
        vision_start_token_id=ids_of("<|vision_bos|>"),
        audio_start_token_id=ids_of("<|audio_bos|>"),
    )
    model = Qwen2_5OmniThinkerForConditionalGeneration(config).model
    records = []
    arrays = {}
    for index, talk in enumerate(TALKS):
        media = [item for _, parts in talk for item in parts if not isinstance(item, str)]
        messages = _messages(talk)
        text = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template)
        inputs: dict[str, Any] = {}
        counts = {"<|IMAGE|>": [], "<|AUDIO|>": []}
        if pictures := [
            Image.new("RGB", size[::-1]) for size in media if not isinstance(size, int)
        ]:
            inputs |= images(images=pictures, return_tensors="pt")
            grids = inputs["image_grid_thw"]
            counts["<|IMAGE|>"] = [int(grid.prod()) // images.merge_size**2 for grid in grids]
        if clips := [np.zeros(size, np.float32) for size in media if isinstance(size, int)]:
            features, placeholders = processor._process_audio(
                clips, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt"
            )
            inputs |= features
            counts["<|AUDIO|>"] = [item.count("<|AUDIO|>") for item in placeholders]
        for token, numbers in counts.items():
            pieces = text.split(token)
            assert len(pieces) == 1 + len(numbers)
            text = pieces[0] + "".join(
                token * length + piece for length, piece in zip(numbers, pieces[1:], strict=True)
            )
        encoding = tokenizer(text, return_tensors="pt")
        frames = inputs.get("feature_attention_mask")
        positions, _ = model.get_rope_index(
            encoding["input_ids"],
            image_grid_thw=inputs.get("image_grid_thw"),
            attention_mask=encoding["attention_mask"],
            audio_seqlens=None if frames is None else frames.sum(dim=1),
        )
        arrays[f"ids_{index}"] = encoding["input_ids"][0].numpy().astype(np.int32)
        arrays[f"positions_{index}"] = positions[:, 0].T.numpy().astype(np.int32)
        records.append({"record": {"messages": messages}, "media": media})
    (folder / "talks.json").write_text(json.dumps(records, indent=1) + "\n")
    np.savez_compressed(folder / "talks.npz", **arrays)


def _messages(talk: tuple[tuple[str, tuple[Any, ...]], ...]) -> list[dict[str, Any]]:
    """The messages as our reader and the reference read them. Media are named by number."""
    numbers = itertools.count()

    def part(of: Any) -> dict[str, str]:
        if isinstance(of, str):
            return {"type": "text", "text": of}
        if isinstance(of, int):
            return {"type": "audio", "audio": f"{next(numbers)}.wav"}
        return {"type": "image", "image": f"{next(numbers)}.png"}

    return [{"role": role, "content": [part(of) for of in parts]} for role, parts in talk]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
