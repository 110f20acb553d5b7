"""A cluster's record fitted to measured steps, against the known record that made the times."""

from __future__ import annotations

import pytest

from jaxmllm.cluster.clusters import CLUSTERS
from jaxmllm.cluster.fitting import CALIBRATED, MeasuredStep, fitted

CPU = CLUSTERS["cpu"]
H100 = CLUSTERS["h100"]


def step(flops, moved, hops):
    """A predictor of the seconds of a step with so many FLOPs, moved bytes and hops."""

    def predicted(cluster):
        link = cluster.in_node
        computed = flops / (cluster.peak("float32") * cluster.efficiency.share)
        return computed + moved / link.bytes_per_second + hops * link.hop_seconds

    return predicted


# FLOPs alone, with many bytes, and with many hops
STEPS = [step(2e11, 0, 0), step(2e11, 8e9, 10), step(2e11, 1e8, 4000)]


def test_three_steps_tell_efficiency_links_and_hops():
    link = CPU.in_node.model_copy(update={"bytes_per_second": 3e9, "hop_seconds": 2e-4})
    true = CPU.model_copy(
        update={
            "in_node": link,
            "efficiency": CPU.efficiency.model_copy(update={"share": 0.3}),
        }
    )
    fit = fitted(CPU, [MeasuredStep(predict(true), predict) for predict in STEPS])
    assert fit.efficiency.share == pytest.approx(0.3, rel=0.02)
    assert fit.in_node.bytes_per_second == pytest.approx(3e9, rel=0.05)
    assert fit.in_node.hop_seconds == pytest.approx(2e-4, rel=0.05)
    assert fit.efficiency.uncertainty == CALIBRATED
    assert fit.source.startswith("fitted to 3 measured steps")


def test_one_step_moves_the_efficiency_and_leaves_links():
    predict = step(1e15, 1e9, 10)
    fit = fitted(H100, [MeasuredStep(predict(H100) * 1.2, predict)])
    assert predict(fit) == pytest.approx(predict(H100) * 1.2, rel=0.01)
    assert fit.efficiency.share == pytest.approx(H100.efficiency.share / 1.2, rel=0.01)
    assert fit.in_node.bytes_per_second == pytest.approx(H100.in_node.bytes_per_second, rel=0.01)


def test_a_step_in_stages_tells_what_a_tick_takes_besides():
    def staged(cluster):
        return STEPS[0](cluster) / 2 + 12 * cluster.tick_seconds

    true = CPU.model_copy(update={"tick_seconds": 0.05})
    steps = [MeasuredStep(predict(true), predict) for predict in STEPS]
    steps.append(MeasuredStep(staged(true), staged, ticks=12))
    fit = fitted(CPU, steps)
    assert fit.tick_seconds == pytest.approx(0.05, rel=0.05)
    assert fit.efficiency.share == pytest.approx(CPU.efficiency.share, rel=0.02)
    assert fitted(CPU, steps[:3]).tick_seconds == 0


def test_no_more_than_the_peak_is_reached():
    """A step that was measured at four times the predicted speed must not give a share above 1."""
    predict = step(1e15, 0, 0)
    assert fitted(H100, [MeasuredStep(predict(H100) / 4, predict)]).efficiency.share <= 1


@pytest.mark.parametrize("seconds", [[], [0.0], [1.0, -1.0]])
def test_steps_that_say_nothing(seconds):
    with pytest.raises(ValueError, match="one measured step or more"):
        fitted(H100, [MeasuredStep(measured, STEPS[0]) for measured in seconds])
