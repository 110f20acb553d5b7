"""What a backward operation computes again under each setting of `remat`, and what it costs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from jaxmllm.balance.costs.flops import phase_layers
from jaxmllm.balance.stages.chain_costs import ATTENTION_PARTS, ChainCosts, ChainLayers
from sharding.pipeline.ring import Chain, Ring
from tests.balance.stages.test_plan import MODEL, TRAINED

SLOTS = 64
FEATURES = 16 * 16  # squared length of one item that fills a quarter of a row
KINDS = (FEATURES, 0)
# Shares that are computed again: (matrix products, attention) of a layer.
AGAIN = {
    "none": (0, 0),
    "dots": (0, 1),
    "full": (1, 1),
    ("attention",): (1, 0),
    ("attention", "projections", "mlp"): (0, 0),
    ("mlp",): (Fraction(1, 3), 1),
}


def language_costs(remat, layers):
    """Costs of the decoder's chunks in a row of `SLOTS`, with `layers` layers per chunk."""
    costs = ChainLayers(MODEL, TRAINED, {"language": (SLOTS,)}, {"language": remat})
    ring = Ring(1, (Chain("language", (0,) * len(layers), layers),))
    return costs.costs(ring)["language"].linear[0]


@pytest.mark.parametrize("remat", AGAIN)
def test_layers_compute_again_what_remat_does_not_keep(remat):
    linear, attention = AGAIN[remat]
    costs = ChainLayers(MODEL, TRAINED, {"language": (SLOTS,)}, {"language": remat})
    squares = {"language": KINDS}
    stem, *layers, head = costs.layers(squares, {"language": SLOTS})["language"]
    assert (stem.linear_again, head.linear_again, head.attention_again) == (0, 0, 0)
    assert len(layers) == len(phase_layers(MODEL, "language")) - 2
    assert {(layer.linear_again, layer.attention_again) for layer in layers} == {
        (linear, attention)
    }


def test_what_is_kept_costs_no_backward_pass():
    """Columns of the costs: forward, input gradient, weight gradient, recomputation."""
    layer_count = len(phase_layers(MODEL, "language")) - 2
    full_costs, none_costs = (
        language_costs(remat, (layer_count,))[:, 0] for remat in ("full", "none")
    )
    assert full_costs[0] == none_costs[0] and full_costs[3] == none_costs[3]
    head = phase_layers(MODEL, "language")[-1].linear(SLOTS)
    assert full_costs[1:3].sum() - none_costs[1:3].sum() == full_costs[0] - head


def test_a_frozen_language_model_returns_gradients_to_trained_encoders():
    """In every row class every chunk computes input gradients and no weight gradients, in
    proportion to the slots."""
    slots = {"vision": (SLOTS,), "language": (2 * SLOTS, SLOTS)}
    chains = [Chain(name, (0,), (len(phase_layers(MODEL, name)) - 2,)) for name in slots]
    ring = Ring(1, tuple(chains))
    costs = ChainLayers(MODEL, {"projector.vision": 1}, slots, {}).costs(ring)["language"].linear
    assert (costs[:, 1] > 0).all() and not costs[:, 2].any()
    assert (costs[0] == 2 * costs[1]).all()


def test_attention_of_long_rows_is_exact():
    """Against Python's integers: each product is far beyond 2**63 before it is divided."""
    attention = np.array([[[(1 << 57) + 12_345]] * 4])
    costs = ChainCosts((1 << 10,), np.zeros((1, 4, 1), np.int64), attention)
    squares = np.array([[1 << 20, 3 << 17, 7 << 20]])
    work = costs.work(squares, np.zeros(3, np.int64))
    exact = [
        int(attention.max()) * (square * ATTENTION_PARTS >> 20) // ATTENTION_PARTS
        for square in squares[0].tolist()
    ]
    assert work.input_gradient.tolist() == work.forward.tolist() == [exact]
