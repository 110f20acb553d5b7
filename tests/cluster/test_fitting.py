"""A cluster's record from measured steps, against one that is known."""

from __future__ import annotations

import pytest

from jaxmllm.cluster.clusters import CLUSTERS
from jaxmllm.cluster.fitting import CALIBRATED, MeasuredStep, fitted

CPU = CLUSTERS["cpu"]
H100 = CLUSTERS["h100"]


def step(flops, moved, hops):
    """What a step of so many FLOPs, bytes and hops is predicted to take."""

    def predicted(cluster):
        link = cluster.in_node
        computed = flops / (cluster.peak("float32") * cluster.efficiency.share)
        return computed + moved / link.bytes_per_second + hops * link.hop_seconds

    return predicted


STEPS = [step(2e11, 0, 0), step(2e11, 8e9, 10), step(2e11, 1e8, 4000)]


def test_three_steps_tell_efficiency_links_and_hops():
    link = CPU.in_node.model_copy(update={"bytes_per_second": 3e9, "hop_seconds": 2e-4})
    true = CPU.model_copy(
        update={
            "in_node": link,
            "efficiency": CPU.efficiency.model_copy(update={"share": 0.3}),
        }
    )
    found = fitted(CPU, [MeasuredStep(one(true), one) for one in STEPS])
    assert found.efficiency.share == pytest.approx(0.3, rel=0.02)
    assert found.in_node.bytes_per_second == pytest.approx(3e9, rel=0.05)
    assert found.in_node.hop_seconds == pytest.approx(2e-4, rel=0.05)
    assert found.efficiency.uncertainty == CALIBRATED
    assert found.source.startswith("fitted to 3 measured steps")


def test_one_step_moves_the_efficiency_and_leaves_links():
    one = step(1e15, 1e9, 10)
    found = fitted(H100, [MeasuredStep(one(H100) * 1.2, one)])
    assert one(found) == pytest.approx(one(H100) * 1.2, rel=0.01)
    assert found.efficiency.share == pytest.approx(H100.efficiency.share / 1.2, rel=0.01)
    assert found.in_node.bytes_per_second == pytest.approx(H100.in_node.bytes_per_second, rel=0.01)


def test_a_step_in_stages_tells_what_a_tick_takes_besides():
    def staged(cluster):
        return STEPS[0](cluster) / 2 + 12 * cluster.tick_seconds

    true = CPU.model_copy(update={"tick_seconds": 0.05})
    steps = [MeasuredStep(one(true), one) for one in STEPS]
    steps.append(MeasuredStep(staged(true), staged, ticks=12))
    found = fitted(CPU, steps)
    assert found.tick_seconds == pytest.approx(0.05, rel=0.05)
    assert found.efficiency.share == pytest.approx(CPU.efficiency.share, rel=0.02)
    assert fitted(CPU, steps[:3]).tick_seconds == 0


def test_no_more_than_the_peak_is_reached():
    one = step(1e15, 0, 0)
    assert fitted(H100, [MeasuredStep(one(H100) / 4, one)]).efficiency.share <= 1


@pytest.mark.parametrize("seconds", [[], [0.0], [1.0, -1.0]])
def test_steps_that_say_nothing(seconds):
    with pytest.raises(ValueError, match="one measured step or more"):
        fitted(H100, [MeasuredStep(one, STEPS[0]) for one in seconds])
