"""Makes ids of conversations with pictures that become one square or several.

They are made with the reference's processors.

python -m tests.data.text.make_square_talks FOLDER        (needs torch 2.13 and transformers 5.23)

FOLDER/DIALECT/tokenizer.json, tokenizer_config.json, chat_template.jinja, and the processor's files
FOLDER/DIALECT/talks.json      records, and the heights and widths of their pictures
FOLDER/DIALECT/talks.npz       ids_I [L]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.text.dialects import CONTEXT, DIALECTS, IMAGE
from tests.data.text.make_pictured_talks import messages_of

# (role, parts): parts are texts, and sizes of pictures. Gemma's roles must alternate.
TALKS: tuple[tuple[tuple[str, tuple[Any, ...]], ...], ...] = (
    (("user", ((640, 480), "What is this?")), ("assistant", ("A cat.",))),
    (
        ("user", ("\nA cat: ", (300, 200), " and a red cat:\n\n", (90, 1000), "1234?")),
        ("assistant", ("A cat,\n\n a red cat.",)),
    ),
    (
        ("user", ((3000, 2000),)),
        ("assistant", (" naïve",)),
        ("user", ("What ", (30, 900), (2000, 11), " is?\n")),
        ("assistant", ("猫",)),
    ),
    (("user", ("\n What is this?",)), ("assistant", ("A cat.",))),
    (("user", ((20, 20), (20, 20), "\n")), ("assistant", ("A cat",)), ("user", (" ", (57, 83)))),
)
TOKENS = 4  # per picture
SIDE = 16  # pixels along the side of a square


def main(folder: Path) -> None:
    """Writes the files of all dialects."""
    for dialect, processor_of in PROCESSORS.items():
        make(folder / dialect, dialect, processor_of)


def _gemma3(tokenizer_file: str, template: str) -> Any:
    """The reference's processor of Gemma 3, of squares with TOKENS tokens."""
    from transformers import Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    names = zip(("boi_token", "eoi_token", "image_token"), IMAGE, strict=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=tokenizer_file, bos_token="<bos>", extra_special_tokens=dict(names)
    )
    return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=TOKENS)


def _internvl(tokenizer_file: str, template: str) -> Any:
    """The reference's processor of InternVL, of squares with TOKENS tokens."""
    from transformers import InternVLProcessor, PreTrainedTokenizerFast
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    class Processor(InternVLProcessor):
        """The reference's processor without videos, which would require torchvision."""

        def __init__(self, image_processor: Any, tokenizer: Any, **options: Any):
            super().__init__(image_processor, tokenizer, **options)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    images = GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    keys = ("start_image_token", "end_image_token", "context_image_token", "video_token")
    names = dict(zip(keys, CONTEXT, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_file, extra_special_tokens=names)
    return Processor(images, tokenizer, chat_template=template, image_seq_length=TOKENS)


PROCESSORS = {"gemma3": _gemma3, "internvl": _internvl}


def make(folder: Path, dialect: str, processor_of: Callable[[str, str], Any]) -> None:
    """Writes the files of one dialect."""
    from PIL import Image

    DIALECTS[dialect].folder(folder)
    template = (folder / "chat_template.jinja").read_text()
    processor = processor_of(str(folder / "tokenizer.json"), template)
    processor.image_processor.save_pretrained(folder)
    records = []
    arrays = {}
    for index, talk in enumerate(TALKS):
        sizes = [item for _, parts in talk for item in parts if not isinstance(item, str)]
        pictures = [Image.new("RGB", (width, height)) for height, width in sizes]
        messages = messages_of(talk)
        text = processor.apply_chat_template(messages, tokenize=False)
        # The template has already written the token that begins a text.
        encoding = processor(text=[text], images=pictures or None, add_special_tokens=False)
        arrays[f"ids_{index}"] = np.array(encoding["input_ids"][0], np.int32)
        records.append({"record": {"messages": messages}, "sizes": sizes})
    (folder / "talks.json").write_text(json.dumps(records, indent=1) + "\n")
    np.savez_compressed(folder / "talks.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
