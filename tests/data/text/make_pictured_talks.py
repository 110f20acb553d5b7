"""Makes ids and positions of conversations with pictures.

They are made with the reference's processor and model.

python -m tests.data.text.make_pictured_talks FOLDER        (needs torch 2.13 and transformers 5.23)

FOLDER/DIALECT/tokenizer.json, tokenizer_config.json, chat_template.jinja,
               preprocessor_config.json
FOLDER/DIALECT/talks.json      records, and the heights and widths of their pictures
FOLDER/DIALECT/talks.npz       ids_I [L], positions_I [L, 3]
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.text.dialects import DIALECTS

# (role, parts): parts are texts, and sizes of pictures.
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


# Dialect -> (the reference's names for it, side of a patch)
REFERENCES = {
    "qwen2.5-vl": ("Qwen2_5_VL", "qwen2_5_vl", 14),
    "qwen3-vl": ("Qwen3VL", "qwen3_vl", 16),
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

    prefix, model_type, patch = REFERENCES[dialect]
    reference: Any = getattr(transformers, f"{prefix}Processor")

    class Processor(reference):
        """The reference's processor without videos, which would require torchvision."""

        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str):
            super().__init__(image_processor, tokenizer, chat_template=chat_template)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    DIALECTS[dialect].folder(folder)
    images = Qwen2VLImageProcessorPil(patch_size=patch)
    images.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    template = (folder / "chat_template.jinja").read_text()
    processor = Processor(images, tokenizer, template)
    text_sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text_sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
    if dialect == "qwen3-vl":
        vision |= {"deepstack_visual_indexes": [0]}
    config = transformers.AutoConfig.for_model(
        model_type, text_config=text_sizes, vision_config=vision
    )
    model = transformers.AutoModel.from_config(config)
    records = []
    arrays = {}
    for index, talk in enumerate(TALKS):
        sizes = [item for _, parts in talk for item in parts if not isinstance(item, str)]
        pictures = [Image.new("RGB", (width, height)) for height, width in sizes]
        messages = messages_of(talk)
        text = processor.apply_chat_template(messages, tokenize=False)
        encoding = processor(text=[text], images=pictures or None, return_tensors="pt")
        ids = encoding["input_ids"]
        positions = torch.arange(ids.shape[1])[None, None].expand(3, 1, -1)
        if pictures:
            types = encoding["mm_token_type_ids"]
            grids = encoding["image_grid_thw"]
            positions, _ = model.get_rope_index(ids, types, image_grid_thw=grids)
        arrays[f"ids_{index}"] = ids[0].numpy().astype(np.int32)
        arrays[f"positions_{index}"] = positions[:, 0].T.numpy().astype(np.int32)
        records.append({"record": {"messages": messages}, "sizes": sizes})
    (folder / "talks.json").write_text(json.dumps(records, indent=1) + "\n")
    np.savez_compressed(folder / "talks.npz", **arrays)


def messages_of(talk: tuple[tuple[str, tuple[Any, ...]], ...]) -> list[dict[str, Any]]:
    """The messages as our reader and the reference read them. Pictures are named by number."""
    numbers = itertools.count()

    def part(of: Any) -> dict[str, str]:
        if isinstance(of, str):
            return {"type": "text", "text": of}
        return {"type": "image", "image": f"{next(numbers)}.png"}

    return [{"role": role, "content": [part(of) for of in parts]} for role, parts in talk]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
