"""The picture of the report, where batches are not like most."""

from __future__ import annotations

import numpy as np

from jaxmllm.balance.step_plan import plan_step
from jaxmllm.tools import balance_comparison as comparison
from jaxmllm.tools import balance_drawing as drawing
from jaxmllm.tools import balance_figures as figures


def test_a_phase_without_items_is_left_out_of_the_picture(balance):
    empty = figures.PhaseView(
        load=np.zeros((0, 4)),
        real=np.zeros((0, 4)),
        capacity=np.zeros(0, np.int64),
        span=np.zeros(0, np.int64),
        figures={},
        ideal=0.0,
    )
    views = {mode: {**view, "audio": empty} for mode, view in balance.views.items()}
    assert len(drawing.draw(views, "no sound").axes) == 8
    assert figures.table(views)[2][2:] == ["-"] * 9


def test_many_ranks_are_drawn_costliest_first():
    compared = comparison.compare_generated(drawing.IN_ORDER + 2, 2, seed=1, before="tokens")
    views = {
        spec.mode: figures.view(
            plan_step(compared.items, spec), compared.items, spec, compared.key_value_bytes
        )
        for spec in (compared.before, compared.after)
    }
    figure = drawing.draw(views, "many")
    assert "costliest first" in figure.axes[-1].get_xlabel()
