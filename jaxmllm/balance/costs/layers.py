"""Forward FLOPs of every single layer: what pipeline stages are cut by. Added up, they are those of
balance/costs/flops.py.

vision      patch embedding | blocks ... | projector          each chain in the order of computation; a projector
audio       stem | blocks ... | projector                     and a head with its loss are layers like any other
language    embedding | blocks ... | head
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from jaxmllm.balance.costs.flops import STEM_KERNEL, STEM_STRIDE
from jaxmllm.config.schema import AudioConfig, LanguageConfig, ModelConfig, TowerConfig, VisionConfig
from jaxmllm.phases import LANGUAGE, make_phases


@dataclass(frozen=True)
class LayerFlops:
    """Forward FLOPs of one layer on a set of items, and the parameters of its matrices."""

    component: str  # "vision", "projector.vision", "language", ...
    linear: int  # of products with weights
    attention: int  # of scores and mixing, which have none
    parameters: int


def layer_flops(model: ModelConfig, phase: str, slots: int, squares: int) -> tuple[LayerFlops, ...]:
    """The layers of a phase, with its projector or its embedding and head, in the order of computation.

    Args:
      model: shapes; `language.vocab_size` must be a number.
      slots: sum of the lengths l of the items in the phase's slots, or what a row of fixed capacity has.
      squares: sum of l**2.

    Raises:
      ValueError: the model has no such phase, or vocab_size is not resolved.
    """
    if phase == LANGUAGE:
        return _language(model.language, slots, squares)
    if phase not in model.encoders:
        raise ValueError(f"phase {phase!r} is not in this model: it has {list(make_phases(model))}")
    if phase == "vision":
        assert model.vision is not None
        return _vision(model.vision, model.language.width, slots, squares)
    assert model.audio is not None
    return _audio(model.audio, model.language.width, slots, squares)


def _language(config: LanguageConfig, slots: int, squares: int) -> tuple[LayerFlops, ...]:
    if config.vocab_size == "auto":
        raise ValueError("model.language.vocab_size is 'auto': resolve it from the tokenizer before asking for FLOPs")
    heads_width = config.heads * config.head_size
    weights = config.width * (2 * heads_width + 2 * config.kv_heads * config.head_size + 3 * config.mlp_width)
    causal = 2 * heads_width * squares  # half of the pairs
    vocabulary = config.vocab_size * config.width
    embedding = LayerFlops(LANGUAGE, 0, 0, 0 if config.tie_embeddings else vocabulary)
    block = LayerFlops(LANGUAGE, 2 * weights * slots, causal, weights)
    return (embedding, *[block] * config.layers, LayerFlops(LANGUAGE, 2 * vocabulary * slots, 0, vocabulary))


def _vision(config: VisionConfig, language_width: int, slots: int, squares: int) -> tuple[LayerFlops, ...]:
    patch = 3 * config.patch_size**2 * config.width
    embedding = LayerFlops("vision", 2 * patch * slots, 0, patch)
    tokens = Fraction(slots, config.merge**2)
    projector = _projector("vision", config.merge**2 * config.width, language_width, tokens)
    blocks = _blocks("vision", config, Fraction(slots), Fraction(squares))
    if config.window is not None:  # a patch of a windowed layer sees no more than its window
        windowed = replace(blocks[0], attention=4 * config.width * config.window**2 * slots)
        blocks = [block if layer in config.full_layers else windowed for layer, block in enumerate(blocks)]
    return (embedding, *blocks, projector)


def _audio(config: AudioConfig, language_width: int, slots: int, squares: int) -> tuple[LayerFlops, ...]:
    mels, width = STEM_KERNEL * config.mel_bins * config.width, STEM_KERNEL * config.width**2
    flops = Fraction(2 * mels * slots, 2) + Fraction(2 * width * slots, STEM_STRIDE)  # after a stride of 2, and of 4
    stem = LayerFlops("audio", round(flops), 0, mels + width)
    tokens = Fraction(slots, STEM_STRIDE)
    blocks = _blocks("audio", config, tokens, Fraction(squares, STEM_STRIDE**2))
    return (stem, *blocks, _projector("audio", config.merge * config.width, language_width, tokens / config.merge))


def _blocks(phase: str, config: TowerConfig, tokens: Fraction, squares: Fraction) -> list[LayerFlops]:
    weights = config.width * (4 * config.width + 2 * config.mlp_width)
    block = LayerFlops(phase, round(2 * weights * tokens), round(4 * config.width * squares), weights)
    return [block] * config.layers


def _projector(phase: str, features: int, width: int, tokens: Fraction) -> LayerFlops:
    weights = features * width + width**2
    return LayerFlops(f"projector.{phase}", round(2 * weights * tokens), 0, weights)
