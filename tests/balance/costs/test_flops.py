"""FLOPs against a list of every matrix product, written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxmllm.balance.costs.flops import phase_flops, real_flops
from jaxmllm.balance.records import PhaseFlops, PhaseItems
from jaxmllm.config.schema import AudioConfig, LanguageConfig, ModelConfig, VisionConfig

LANGUAGE = LanguageConfig(vocab_size=1000, width=64, layers=3, heads=8, kv_heads=2, head_size=16, mlp_width=96)
VISION = VisionConfig(width=32, layers=2, heads=4, mlp_width=128, patch_size=14, merge=2)
AUDIO = AudioConfig(width=48, layers=5, heads=4, mlp_width=80, mel_bins=40, merge=2, chunk_frames=64)
MODEL = ModelConfig(language=LANGUAGE, vision=VISION, audio=AUDIO)
ALL = frozenset({"vision", "audio", "projector.vision", "projector.audio", "language"})
NOTHING: frozenset[str] = frozenset()


def product(rows: int, inner: int, columns: int) -> int:
    return 2 * rows * inner * columns


def language_forward(n: int) -> tuple[int, int]:
    """(matrices, attention) of one sequence, product by product."""
    layer = product(n, 64, 8 * 16) + 2 * product(n, 64, 2 * 16) + product(n, 8 * 16, 64) + 3 * product(n, 64, 96)
    pairs = 8 * (product(n, 16, n) + product(n, n, 16)) // 2
    return 3 * layer + product(n, 64, 1000), 3 * pairs


def tower_forward(t: int, width: int, heads: int, mlp: int, layers: int) -> tuple[int, int]:
    layer = 4 * product(t, width, width) + product(t, width, mlp) + product(t, mlp, width)
    pairs = heads * (product(t, width // heads, t) + product(t, t, width // heads))
    return layers * layer, layers * pairs


def cost(flops: PhaseFlops, n: int) -> int:
    return flops.linear * n + flops.quadratic * n * n


@pytest.mark.parametrize("n", [16, 160])
def test_language_forward_and_backward(n):
    matrices, attention = language_forward(n)
    assert cost(phase_flops(MODEL, "language", NOTHING), n) == matrices + attention
    assert cost(phase_flops(MODEL, "language", ALL), n) == 3 * (matrices + attention)
    aligned = phase_flops(MODEL, "language", frozenset({"projector.vision"}))
    assert cost(aligned, n) == 2 * matrices + 3 * attention


@pytest.mark.parametrize("n", [16, 160])
def test_vision_by_freezing(n):
    patches = product(n, 14 * 14 * 3, 32)
    blocks, attention = tower_forward(n, 32, 4, 128, 2)
    first, second = product(n // 4, 4 * 32, 64), product(n // 4, 64, 64)

    def measured(*trainable: str) -> int:
        return cost(phase_flops(MODEL, "vision", frozenset(trainable)), n)

    assert measured() == measured("language") == patches + blocks + attention + first + second
    assert measured("projector.vision") == patches + blocks + attention + 2 * first + 3 * second
    assert measured("vision") == 2 * patches + 3 * (blocks + attention) + 2 * (first + second)
    assert measured(*ALL) == 2 * patches + 3 * (blocks + attention + first + second)


def test_a_windowed_layer_pays_for_its_window():
    """Attention of 2 layers is 8 * 32 FLOPs a pair; one of them is full, the other sees 4 x 4 patches."""
    windowed = MODEL.model_copy(update={"vision": MODEL.vision.model_copy(update={"window": 4, "full_layers": (1,)})})
    whole, narrow = (phase_flops(model, "vision", NOTHING) for model in (MODEL, windowed))
    attention = tower_forward(100, 32, 4, 128, 2)[1]
    assert whole.quadratic * 100**2 == attention
    assert narrow.quadratic == whole.quadratic // 2
    assert narrow.linear - whole.linear == whole.quadratic // 2 * 4 * 4


@pytest.mark.parametrize("n", [64, 320])
def test_audio_attends_over_a_quarter_of_the_frames(n):
    mels, halves = product(n // 2, 3 * 40, 48), product(n // 4, 3 * 48, 48)
    blocks, attention = tower_forward(n // 4, 48, 4, 80, 5)
    projector = product(n // 8, 2 * 48, 64) + product(n // 8, 64, 64)
    assert cost(phase_flops(MODEL, "audio", NOTHING), n) == mels + halves + blocks + attention + projector
    assert cost(phase_flops(MODEL, "audio", ALL), n) == 2 * mels + 3 * (halves + blocks + attention + projector)


def test_items_count_by_their_real_lengths():
    none = np.zeros(2, np.int32)
    items = PhaseItems(np.array([64, 128]), np.array([60, 100]), none, none, none)
    assert real_flops(items, PhaseFlops(7, 3)) == 7 * 160 + 3 * (3600 + 10000)


def test_errors_name_what_is_wrong():
    auto = ModelConfig(language=LANGUAGE.model_copy(update={"vocab_size": "auto"}), vision=VISION)
    with pytest.raises(ValueError, match="vocab_size"):
        phase_flops(auto, "language", NOTHING)
    with pytest.raises(ValueError, match="audio"):
        phase_flops(auto, "audio", NOTHING)
    with pytest.raises(ValueError, match=r"projector\.audio"):
        phase_flops(auto, "vision", frozenset({"projector.audio"}))
