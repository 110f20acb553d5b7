"""How long steps take: completions are noted while the host waits for something else."""

import threading
from dataclasses import dataclass

from jaxmllm.runtime.step_times import Completions, StepTimes


@dataclass
class Work:
    """An array that becomes ready, or fails, when the test says so."""

    done: threading.Event
    error: Exception | None = None

    def block_until_ready(self) -> "Work":
        assert self.done.wait(60)
        if self.error is not None:
            raise self.error
        return self


def test_completions_are_noted_when_they_happen_in_order() -> None:
    times = iter([3.0, 5.0, 8.0])
    first_work, second_work, third_work = (Work(threading.Event()) for _ in range(3))
    second_work.error = RuntimeError("the device is gone")
    completions = Completions(lambda: next(times))
    completion_times = [
        completions.of({"loss": work}) for work in (first_work, second_work, third_work)
    ]
    assert not completion_times[0].done()
    second_work.done.set()
    first_work.done.set()
    assert [completion.result(60) for completion in completion_times[:2]] == [3.0, 5.0]
    assert not completion_times[2].done()
    third_work.done.set()
    assert completion_times[2].result(60) == 8.0
    completions.close()


def test_a_step_lasts_from_the_completion_of_the_one_before_unless_something_came_between() -> None:
    times = StepTimes()
    assert (
        times.seconds(began=100.0, completed=102.0) == 2.0
    )  # the first step starts when it is dispatched
    # Dispatched while the step before ran, it lasts from that completion
    assert times.seconds(began=100.5, completed=105.0) == 3.0
    assert times.seconds(began=107.0, completed=108.0) == 3.0  # the devices waited for data
    times.pause()
    assert times.seconds(began=200.0, completed=204.0) == 4.0
    assert times.seconds(began=201.0, completed=204.0) > 0  # a clock too coarse for the step
