"""The records of the benchmark of pipeline steps.

The programs that it times are tested in training/programs/test_staged.py.
"""

import pytest

from benchmarks.pipeline_step import CALIBRATION, PLANS, YARDSTICK, StepTimes, main, summarise
from jaxmllm.config.schema import PipelineConfig
from jaxmllm.tools.tick_times import TickTimes


def test_ratios_are_over_the_same_batch():
    measured = {
        "chain 1F1B": {
            "seconds": [2.0, 4.0, 9.0],
            "predicted": [3.0, 3.0, 9.0],
            "cost": [10, 20],
            "idle": [0.4, 0.2],
            "ticks": [4, 6],
            "plan_ms": [1, 9, 2],
        },
        "segments": {
            "seconds": [1.0, 2.0, 3.0],
            "predicted": [2.0, 1.0, 2.0],
            "cost": [5, 10],
            "idle": [0.0, 0.2],
            "ticks": [8, 8],
            "plan_ms": [3, 3, 3],
        },
    }
    chain, segments = summarise(measured)
    assert (chain["plan"], segments["plan"]) == ("chain 1F1B", "segments")
    assert chain["ratio"]["median"] == 1 and segments["ratio"]["median"] == 2
    assert segments["ratio"]["three_quarters"] == pytest.approx(2.5)
    assert chain["predicted_seconds"] == 3 and segments["predicted_ratio"] == 3
    assert segments["ratio_by_flops"] == 2 and segments["idle_share"] == pytest.approx(0.1)
    assert chain["ticks"] == 5 and chain["plan_ms"] == 2


def test_a_step_is_predicted_by_its_terms():
    times = StepTimes(TickTimes(start=0.5, tick=0.01, flop=1e-9), rest=0.25)
    statistics = {
        "pipeline/cost": 2e9,
        "pipeline/ticks": 30.0,
        "pipeline/runs": 2.0,
        "plan_ms": 7.0,
    }
    assert times.seconds(statistics) == pytest.approx(0.25 + 2 * 0.5 + 30 * 0.01 + 2)


def test_plans_are_settings_of_a_pipeline():
    assert next(iter(PLANS)) == YARDSTICK
    assert all(PipelineConfig(stages=2, **plan) for plan in PLANS.values())
    assert CALIBRATION not in PLANS.values(), "it predicts others than itself"


@pytest.mark.parametrize("arguments", [["--stages", "1"], ["--steps", "0"], ["--plans", "none"]])
def test_arguments_that_cannot_be(arguments):
    with pytest.raises(SystemExit):
        main(["--config", "x.yaml", *arguments])
