"""Random folders of all families, with other sizes, choices and spellings than the goldens have.

They come with what the reference computes of them, which needs torch and transformers. By hand,
this makes NUMBER folders from a seed on:

python -m tests.families.redraw FOLDER SEED NUMBER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.families import make_goldens, make_heard_goldens, make_omni_goldens
from tests.families import make_pictured_goldens as pictured
from tests.families import make_square_goldens as square

Sizes = dict[str, Any]
LAYER_TYPES = make_goldens.LAYER_TYPES
DTYPES = ("float32", "bfloat16", "float16")
TEXT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
PICTURED_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
SQUARE_FAMILIES = ("gemma3", "internvl")
HEARD_FAMILIES = ("qwen2_audio", "qwen2_5_omni_thinker")
OMNI = "qwen3_omni_moe_thinker"
FAMILIES = (*TEXT_FAMILIES, *PICTURED_FAMILIES, *SQUARE_FAMILIES, *HEARD_FAMILIES, OMNI)


class Draw:
    """The random choices for one folder."""

    def __init__(self, seed: int):
        self.seed = seed
        self.random = np.random.default_rng(seed)
        self.dtype = self.one_of(*DTYPES)
        self.tied = self.flag()

    def one_of(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def flag(self) -> bool:
        return bool(self.random.integers(2))

    def below(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high))

    def text(self, head: int | None = None, free_width: bool = True) -> Sizes:
        """The sizes of a decoder.

        Args:
          head: size of a head; a random one if not given.
          free_width: whether the width may differ from the width of all heads together.
        """
        kv_heads = self.one_of(1, 2, 3)
        heads = kv_heads * self.one_of(1, 2, 3)
        head = head or self.one_of(4, 6, 8, 10, 12)
        sizes = {
            "vocab_size": self.below(40, 130),
            "hidden_size": heads * (self.one_of(4, 5, 6, 7, 9) if free_width else head),
            "intermediate_size": self.below(9, 50),
            "num_hidden_layers": self.below(1, 5),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": self.one_of(1e-4, 1e-5, 1e-6),
            "max_position_embeddings": self.one_of(128, 500),
        }
        return sizes | ({"head_dim": head} if free_width else {})

    def rotary(self) -> Sizes:
        """The rotary positions of a decoder of text alone."""
        kind = self.one_of("default", "linear", "llama3", "yarn")
        parameters = {"rope_type": kind, "rope_theta": self.one_of(777.0, 1e4, 5e5)}
        if kind == "linear":
            parameters |= {"factor": self.one_of(1.5, 4.0)}
        elif kind == "llama3":
            parameters |= {"factor": self.one_of(2.0, 32.0), "low_freq_factor": 1.0}
            parameters |= {"high_freq_factor": self.one_of(2.0, 4.0)}
            parameters |= {"original_max_position_embeddings": self.one_of(16, 40)}
        elif kind == "yarn":
            parameters |= {"factor": self.one_of(2.0, 4.0)}
            parameters |= {"original_max_position_embeddings": self.one_of(16, 32)}
            yarn_details = {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2}
            parameters |= self.one_of({}, yarn_details, {"truncate": False})
        return parameters

    def axes(self, head: int, interleaved: bool) -> Sizes:
        """Rotary positions with three axes."""
        pairs = head // 2
        # Interleaved axes have every third pair.
        side = pairs // 3 if interleaved else self.below(1, (pairs + 1) // 2)
        rotary = {"rope_type": "default", "rope_theta": self.one_of(1e4, 1e6)}
        interleaving = {"mrope_interleaved": True} if interleaved else {}
        return rotary | {"mrope_section": [pairs - 2 * side, side, side]} | interleaving

    def experts(self) -> Sizes:
        count = self.one_of(3, 5, 8)
        return {
            "num_experts": count,
            "num_experts_per_tok": self.one_of(2, 3),
            "moe_intermediate_size": self.below(5, 20),
        }

    def tower(self) -> Sizes:
        """Sizes of a vision tower with rotary positions."""
        count = self.one_of(1, 2, 3)
        return {
            "depth": self.below(1, 5),
            "num_heads": count,
            "hidden_size": count * self.one_of(4, 8),
            "intermediate_size": self.below(6, 40),
        }


def draw(folder: Path, name: str, seed: int) -> None:
    """Makes a folder of a family."""
    kinds: Mapping[tuple[str, ...], Callable[[Path, str, Draw], None]] = {
        TEXT_FAMILIES: _text,
        PICTURED_FAMILIES: _pictured,
        SQUARE_FAMILIES: _square,
        HEARD_FAMILIES: _heard,
        (OMNI,): _omni,
    }
    drawing = Draw(seed)
    for names, make in kinds.items():
        if name in names:
            make(folder, name, drawing)
    if drawing.flag():
        _spell_as_before(folder / "config.json", drawing)


def _text(folder: Path, name: str, drawing: Draw) -> None:
    """A decoder of text alone, of random sizes."""
    sizes = drawing.text(free_width=name != "qwen2")
    layers = sizes["num_hidden_layers"]
    sizes |= {"tie_word_embeddings": drawing.tied, "rope_parameters": drawing.rotary()}
    if name not in ("mistral", "qwen2"):
        sizes["attention_bias"] = drawing.flag()
    if name == "mistral":
        sizes["sliding_window"] = drawing.one_of(None, 4, 7)
    elif name in ("qwen2", "qwen3") and drawing.flag():
        sizes |= {"use_sliding_window": True, "sliding_window": drawing.one_of(3, 6)}
        sizes["max_window_layers"] = drawing.below(0, layers + 1)
    elif name == "qwen3_moe":
        sizes |= drawing.experts() | {"norm_topk_prob": drawing.flag()}
    elif name == "gemma3_text":
        # Layers with windows and layers without have rotary parameters of their own.
        full_rotary = drawing.one_of(
            make_goldens.LINEAR, {"rope_type": "default", "rope_theta": 5e4}
        )
        window_rotary = {"rope_type": "default", "rope_theta": drawing.one_of(50.0, 1e4)}
        sizes |= {"query_pre_attn_scalar": drawing.one_of(5, 10, 16)}
        sizes |= {"sliding_window": drawing.one_of(3, 5, 8)}
        sizes |= {"layer_types": [drawing.one_of(*LAYER_TYPES) for _ in range(layers)]}
        sizes["rope_parameters"] = dict(zip(LAYER_TYPES, (window_rotary, full_rotary), strict=True))
    # In float64: where rounding errors grow, the reference in float32 is as far from the exact
    # result as our model, in the other direction.
    sizes = make_goldens.SIZES | sizes
    make_goldens.make(folder, name, sizes, drawing.dtype, drawing.seed, computed_in="float64")


def _pictured(folder: Path, name: str, drawing: Draw) -> None:
    """A Qwen-VL model of random sizes."""
    head = drawing.one_of(6, 8, 10, 12)
    is_qwen2_5_vl = name == "qwen2_5_vl"
    text = pictured.TEXT | drawing.text(head, free_width=not is_qwen2_5_vl)
    text["rope_parameters"] = drawing.axes(head, interleaved=not is_qwen2_5_vl)
    vision = drawing.tower() | {"out_hidden_size": text["hidden_size"]}
    layers = range(vision["depth"])
    if is_qwen2_5_vl:
        vision = pictured.VISION | vision | {"window_size": drawing.one_of(8, 16, 24)}
        vision["fullatt_block_indexes"] = [layer for layer in layers if drawing.flag()]
    else:
        text["attention_bias"] = drawing.flag()
        max_taps = min(vision["depth"], text["num_hidden_layers"])
        tapped_layers = sorted(
            drawing.random.permutation(layers)[: drawing.below(1, max_taps + 1)].tolist()
        )
        vision = pictured.VISION_3 | vision | {"deepstack_visual_indexes": tapped_layers}
        vision["num_position_embeddings"] = drawing.one_of(9, 16, 49)
    if name == "qwen3_vl_moe":
        text |= drawing.experts()
    spelled_otherwise = name == "qwen3_vl_moe" or (is_qwen2_5_vl and drawing.flag())
    arguments = (text, vision, drawing.tied, drawing.dtype, spelled_otherwise, drawing.seed)
    pictured.make_pictured(folder, *arguments)


def _square(folder: Path, name: str, drawing: Draw) -> None:
    """A Gemma 3 or an InternVL with a tower of random sizes."""
    side = drawing.one_of(16, 24)
    tokens = (side // 8) ** 2
    heads = drawing.one_of(1, 2, 3)
    vision = {"hidden_size": heads * drawing.one_of(6, 8), "num_attention_heads": heads}
    vision |= {"num_hidden_layers": drawing.below(1, 4), "intermediate_size": drawing.below(6, 30)}
    base, processor = square.SQUARE["gemma3-tower" if name == "gemma3" else name][::2]
    vision = base["vision_config"] | vision
    # InternVL with free heads has the decoder of Qwen3.
    free_width = name == "gemma3" or drawing.flag()
    text = base["text_config"] | drawing.text(free_width=free_width)
    if name == "gemma3":
        text |= {"query_pre_attn_scalar": drawing.one_of(5, 10)}
        text |= {"sliding_window": drawing.one_of(tokens, tokens + 3)}
        layers = range(text["num_hidden_layers"])
        text |= {"layer_types": [drawing.one_of(*LAYER_TYPES) for _ in layers]}
        sections = {"vision_config": vision | {"image_size": side}, "mm_tokens_per_image": tokens}
    else:
        text["model_type"] = "qwen3" if free_width else "qwen2"
        rms_tower = {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"}
        vision |= drawing.one_of({}, rms_tower) | {"image_size": [side, side]}
        sections = {"vision_config": vision, "image_seq_length": tokens}
        sections |= {"tie_word_embeddings": drawing.tied}
    sections = base | sections | {"text_config": text}
    square.make_square(folder, sections, drawing.dtype, processor, drawing.seed)


def _heard(folder: Path, name: str, drawing: Draw) -> None:
    """A Qwen2-Audio model or a Qwen2.5-Omni thinker of random sizes."""
    head = drawing.one_of(6, 8, 10)
    text = make_heard_goldens.TEXT | drawing.text(head, free_width=False)
    width = text["hidden_size"]
    heads = drawing.one_of(1, 2, 3)
    audio = make_heard_goldens.AUDIO | {
        "d_model": heads * drawing.one_of(4, 6, 8),
        "encoder_attention_heads": heads,
        "encoder_layers": drawing.below(1, 4),
        "encoder_ffn_dim": drawing.below(8, 40),
        "num_mel_bins": drawing.one_of(8, 12, 20),
    }
    vision = make_heard_goldens.VISION | drawing.tower() | {"out_hidden_size": width}
    vision |= {"fullatt_block_indexes": [drawing.below(0, vision["depth"])]}
    if name != "qwen2_audio":
        text["rope_parameters"] = drawing.axes(head, interleaved=False)
    changed = {
        "AUDIO": audio,
        "HEARING": audio | {"n_window": drawing.one_of(6, 10, 14), "output_dim": width},
        "VISION": vision | {"window_size": drawing.one_of(8, 16, 24)},
    }
    with mock.patch.multiple(make_heard_goldens, **changed):
        arguments = (name, text, drawing.tied, drawing.dtype, drawing.seed)
        make_heard_goldens.make_heard(folder, *arguments)


def _omni(folder: Path, name: str, drawing: Draw) -> None:
    """A Qwen3-Omni thinker of random sizes."""
    head = drawing.one_of(6, 8, 10, 12)
    text = make_omni_goldens.TEXT | drawing.text(head) | drawing.experts()
    width = text["hidden_size"]
    text |= {"rope_parameters": drawing.axes(head, interleaved=True)}
    text |= {"attention_bias": drawing.flag()}
    vision = make_omni_goldens.VISION | drawing.tower() | {"out_hidden_size": width}
    vision |= {"num_position_embeddings": drawing.one_of(9, 25)}
    vision |= {"deepstack_visual_indexes": [drawing.below(0, vision["depth"])]}
    heads = drawing.one_of(1, 2, 4)
    audio = make_omni_goldens.AUDIO | {
        "d_model": 6 * heads,
        "encoder_attention_heads": heads,
        "encoder_layers": drawing.below(1, 3),
        "num_mel_bins": drawing.one_of(9, 16),
        "downsample_hidden_size": drawing.one_of(4, 6),
        "n_window_infer": drawing.one_of(100, 200, 400),
        "output_dim": width,
    }
    arguments = (name, text, vision, audio, drawing.tied, drawing.dtype, drawing.seed)
    make_omni_goldens.make_omni(folder, *arguments)


def _spell_as_before(path: Path, drawing: Draw) -> None:
    """Writes rotary parameters, window layers and types under the keys of transformers 4."""

    def respelled(section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        new_section = {key: respelled(value) for key, value in section.items()}
        rotary = new_section.get("rope_parameters")
        if isinstance(rotary, dict) and "rope_theta" in rotary:
            scaling = {
                k: v for k, v in new_section.pop("rope_parameters").items() if k != "rope_theta"
            }
            new_section["rope_theta"] = rotary["rope_theta"]
            if scaling != {"rope_type": "default"}:
                kind = drawing.one_of("type", "rope_type")
                new_section["rope_scaling"] = {kind: scaling.pop("rope_type"), **scaling}
        if "max_window_layers" in new_section:
            new_section.pop("layer_types", None)
        if "dtype" in new_section:
            new_section["torch_dtype"] = new_section.pop("dtype")
        return new_section

    path.write_text(json.dumps(respelled(json.loads(path.read_text())), indent=2))


if __name__ == "__main__":
    begin = int(sys.argv[2])
    for number in range(begin, begin + int(sys.argv[3])):
        family = FAMILIES[number % len(FAMILIES)]
        draw(Path(sys.argv[1]) / str(number) / family, family, number)
