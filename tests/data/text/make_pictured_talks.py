"""Makes ids and positions of conversations with pictures, with the reference's processor and model.

python -m tests.data.text.make_pictured_talks FOLDER        (needs torch 2.13 and transformers 5.23)

FOLDER/tokenizer.json, tokenizer_config.json, chat_template.jinja, preprocessor_config.json
FOLDER/talks.json      records, and the heights and widths of their pictures
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

# (role, parts): texts, and sizes of pictures
TALKS: tuple[tuple[tuple[str, tuple[Any, ...]], ...], ...] = (
    (("user", ((640, 480), "What is this?")), ("assistant", ("A cat.",))),
    (
        ("system", ("Be kind.",)),
        ("user", ("\nA cat: ", (300, 200), " and a red cat:\n\n", (90, 1000), "1234?")),
        ("assistant", ("A cat,\n\n a red cat.",)),
    ),
    (
        ("user", ((3000, 2000),)),
        ("assistant", (" naïve",)),
        ("user", ("What ", (30, 900), (2000, 11), " is?")),
        ("assistant", ("猫",)),
    ),
    (("user", ("What is this?",)), ("assistant", ("A cat.",))),
    (("user", ((20, 20), (20, 20), "\n")), ("assistant", ("",)), ("user", (" ", (57, 83)))),
)


def main(folder: Path) -> None:
    """Write the files."""
    import torch
    from PIL import Image
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLModel,
        Qwen2_5_VLProcessor,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class Processor(Qwen2_5_VLProcessor):
        """Without videos, for which it asks for torchvision."""

        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str):
            super().__init__(image_processor, tokenizer, chat_template=chat_template)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    DIALECTS["qwen2.5-vl"].folder(folder)
    images = Qwen2VLImageProcessorPil()
    images.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    template = (folder / "chat_template.jinja").read_text()
    processor = Processor(images, tokenizer, template)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
    model = Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=small, vision_config=vision))
    records, arrays = [], {}
    for number, talk in enumerate(TALKS):
        sizes = [part for _, parts in talk for part in parts if not isinstance(part, str)]
        pictures = [Image.new("RGB", (width, height)) for height, width in sizes]
        messages = _messages(talk)
        text = processor.apply_chat_template(messages, tokenize=False)
        made = processor(text=[text], images=pictures or None, return_tensors="pt")
        ids = made["input_ids"]
        positions = torch.arange(ids.shape[1])[None, None].expand(3, 1, -1)
        if pictures:
            types, grids = made["mm_token_type_ids"], made["image_grid_thw"]
            positions, _ = model.get_rope_index(ids, types, image_grid_thw=grids)
        arrays[f"ids_{number}"] = ids[0].numpy().astype(np.int32)
        arrays[f"positions_{number}"] = positions[:, 0].T.numpy().astype(np.int32)
        records.append({"record": {"messages": messages}, "sizes": sizes})
    (folder / "talks.json").write_text(json.dumps(records, indent=1) + "\n")
    np.savez_compressed(folder / "talks.npz", **arrays)


def _messages(talk: tuple[tuple[str, tuple[Any, ...]], ...]) -> list[dict[str, Any]]:
    """As both sides read them; pictures go by number."""
    numbers = itertools.count()

    def part(of: Any) -> dict[str, str]:
        if isinstance(of, str):
            return {"type": "text", "text": of}
        return {"type": "image", "image": f"{next(numbers)}.png"}

    return [{"role": role, "content": [part(of) for of in parts]} for role, parts in talk]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
