"""FLOPs of the real shapes: the one source for MFU and, unless a calibration says what they take, for balancing.

An item of l slots has `linear * l + quadratic * l**2` of them. Matrix products count 2 FLOPs a multiply-add; norms,
activations, softmax and rotary turns are left out, as is usual. Backward counts what freezing leaves:

    bwd(l) = [something trainable upstream of l] * dX(l) + [l trainable] * dW(l)        dX = dW = fwd

Recomputation (remat, or attention's own) is not counted: MFU measures the model, not the way it is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from jaxmllm.balance.records import PhaseFlops, PhaseItems
from jaxmllm.config.schema import AudioConfig, LanguageConfig, ModelConfig, TowerConfig, VisionConfig
from jaxmllm.phases import LANGUAGE, component_names, make_phases

STEM_STRIDE = 4  # frames behind one token of the audio tower: two convolutions of stride 2 ...
STEM_KERNEL = 3  # ... and of this width


@dataclass(frozen=True)
class PhaseTime:
    """Measured femtoseconds: linear * l + quadratic * l**2 of one item of l slots, and what every row takes beside."""

    linear: int
    quadratic: int
    row: int


def phase_flops(model: ModelConfig, phase: str, trainable: frozenset[str]) -> PhaseFlops:
    """FLOPs of a phase, per slot and per slot squared.

    An encoder phase includes its projector. The language phase includes the head on every slot, for that is what
    its program computes.

    Args:
      model: shapes; `language.vocab_size` must be a number when the phase is "language".
      phase: "language" or an encoder of the model.
      trainable: names of the components that are trained: "vision", "projector.vision", "language", ...

    Raises:
      ValueError: unknown phase or component, or vocab_size not resolved.
    """
    components = set(component_names(make_phases(model)))
    if unknown := trainable - components:
        raise ValueError(f"trainable components {sorted(unknown)} are not in this model: it has {sorted(components)}")
    if phase == LANGUAGE:
        return _language(model.language, upstream=bool(trainable), trained=LANGUAGE in trainable)
    if phase not in model.encoders:
        raise ValueError(f"phase {phase!r} is not in this model: it has {list(make_phases(model))}")
    trained = phase in trainable
    projector_trained = f"projector.{phase}" in trainable
    if phase == "vision":
        assert model.vision is not None
        return _vision(model.vision, model.language.width, trained, projector_trained)
    assert model.audio is not None
    return _audio(model.audio, model.language.width, trained, projector_trained)


def real_flops(items: PhaseItems, flops: PhaseFlops) -> float:
    """FLOPs of items from their real lengths: padding inside and between items is not counted."""
    real = items.real.astype(float)
    return float(flops.linear * real.sum() + flops.quadratic * (real * real).sum())


def _language(config: LanguageConfig, upstream: bool, trained: bool) -> PhaseFlops:
    if config.vocab_size == "auto":
        raise ValueError("model.language.vocab_size is 'auto': resolve it from the tokenizer before asking for FLOPs")
    heads_width = config.heads * config.head_size
    query_key_value = _matrix(config.width, heads_width + 2 * config.kv_heads * config.head_size)
    block = query_key_value + _matrix(heads_width, config.width) + 3 * _matrix(config.width, config.mlp_width)
    weights = config.layers * block + _matrix(config.width, config.vocab_size)
    causal_attention = config.layers * 2 * heads_width  # half of the pairs
    return PhaseFlops(_passes(upstream, trained) * weights, _attention_passes(upstream) * causal_attention)


def _vision(config: VisionConfig, language_width: int, trained: bool, projector_trained: bool) -> PhaseFlops:
    embedding = _passes(False, trained) * _matrix(3 * config.patch_size**2, config.width)
    blocks, attention = _tower(config, trained)
    if config.window is not None:  # a patch of a windowed layer sees no more than its window
        full, windowed = len(config.full_layers), config.layers - len(config.full_layers)
        blocks += attention // config.layers * windowed * config.window**2
        attention = attention // config.layers * full
    projector = _projector(config.merge**2 * config.width, language_width, trained, projector_trained)
    return PhaseFlops(embedding + blocks + round(Fraction(projector, config.merge**2)), attention)


def _audio(config: AudioConfig, language_width: int, trained: bool, projector_trained: bool) -> PhaseFlops:
    mels = Fraction(_matrix(STEM_KERNEL * config.mel_bins, config.width), 2)  # its outputs are 2 frames apart
    width = Fraction(_matrix(STEM_KERNEL * config.width, config.width), STEM_STRIDE)
    stem = _passes(False, trained) * mels + _passes(trained, trained) * width
    blocks, attention = _tower(config, trained)
    projector = _projector(config.merge * config.width, language_width, trained, projector_trained)
    per_frame = stem + Fraction(blocks, STEM_STRIDE) + Fraction(projector, STEM_STRIDE * config.merge)
    return PhaseFlops(round(per_frame), round(Fraction(attention, STEM_STRIDE**2)))


def _tower(config: TowerConfig, trained: bool) -> tuple[int, int]:
    """Blocks of an encoder: FLOPs per attention token and, bidirectional, per attention token squared."""
    block = 4 * _matrix(config.width, config.width) + 2 * _matrix(config.width, config.mlp_width)
    attention = 4 * config.width
    return config.layers * _passes(trained, trained) * block, config.layers * _attention_passes(trained) * attention


def _projector(features: int, width: int, upstream: bool, trained: bool) -> int:
    """FLOPs per language token."""
    first = _passes(upstream, trained) * _matrix(features, width)
    return first + _passes(upstream or trained, trained) * _matrix(width, width)


def _matrix(inputs: int, outputs: int) -> int:
    return 2 * inputs * outputs


def _passes(upstream: bool, trained: bool) -> int:
    """Forward, input gradient, weight gradient: those that happen."""
    return 1 + upstream + trained


def _attention_passes(upstream: bool) -> int:
    """Scores and mixing have two inputs each and no weights: backward is all of it, or nothing."""
    return 3 if upstream else 1
