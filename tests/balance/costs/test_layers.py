"""FLOPs by layer: they add up to those of the phases, and name the layers that there are."""

from __future__ import annotations

import pytest

from jaxmllm.balance.costs.flops import phase_flops
from jaxmllm.balance.costs.layers import layer_flops
from jaxmllm.tools.workload import MODEL

WINDOWED = MODEL.model_copy(update={"vision": MODEL.vision.model_copy(update={"window": 8, "full_layers": (7, 31)})})


@pytest.mark.parametrize(
    "model, phase", [(MODEL, "vision"), (MODEL, "audio"), (MODEL, "language"), (WINDOWED, "vision")]
)
def test_layers_add_up_to_their_phase(model, phase):
    items = [640, 256, 1280]
    slots, squares = sum(items), sum(length**2 for length in items)
    layers = layer_flops(model, phase, slots, squares)
    whole = phase_flops(model, phase, frozenset())
    forward = sum(layer.linear + layer.attention for layer in layers)
    assert forward == pytest.approx(whole.linear * slots + whole.quadratic * squares, rel=1e-9)


def test_embedding_projector_and_head_are_layers():
    counts = {"vision": 32 + 2, "audio": 32 + 2, "language": 36 + 2}
    for phase, count in counts.items():
        layers = layer_flops(MODEL, phase, 128, 128**2)
        assert len(layers) == count
        last = "language" if phase == "language" else f"projector.{phase}"
        assert [layer.component for layer in layers] == [phase] * (count - 1) + [last]
    embedding, *_, head = layer_flops(MODEL, "language", 128, 128**2)
    assert embedding.linear == 0 and embedding.parameters == head.parameters == 151_936 * 4096
    millions = sum(layer.parameters for layer in layer_flops(MODEL, "language", 1, 1)) / 1e6
    assert 8000 < millions < 8300


def test_phases_that_are_none_are_refused():
    with pytest.raises(ValueError, match="phase 'video' is not in this model"):
        layer_flops(MODEL, "video", 1, 1)
    automatic = MODEL.language.model_copy(update={"vocab_size": "auto"})
    with pytest.raises(ValueError, match="vocab_size is 'auto'"):
        layer_flops(MODEL.model_copy(update={"language": automatic}), "language", 1, 1)
