"""The picture of the balance report with an empty phase, with shared rows, and with many ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from matplotlib.patches import Rectangle

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


def test_a_shared_row_is_one_wide_column(balance):
    """64 ranks hold a row each in one microbatch, and groups of four share rows in the other."""
    ranks = 64
    rows = np.full((2, ranks), 500.0)
    view = dataclasses.replace(
        balance.views["phases"]["language"],
        load=rows,
        real=rows,
        capacity=np.array([1000, 1000]),
        span=np.array([1, 4]),
    )
    phases = {"language": view}
    figure = drawing.draw({"tokens": phases, "phases": phases}, "shared")
    row_axes = [axes for axes in figure.axes if any("1 shared" in t.get_text() for t in axes.texts)]
    assert len(row_axes) == 2
    for axes in row_axes:
        bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
        assert len(bars) == 2 * ranks / 4, "data and padding of each shared row"
        assert all(3 < bar.get_width() < 4 for bar in bars)


@pytest.mark.slow
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
