"""The window of steps that is profiled."""

from pathlib import Path

import jax.numpy as jnp

from jaxmllm.runtime.profiler import ProfilerWindow


def traces(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.xplane.pb"))


def test_a_window_of_steps_is_traced(tmp_path: Path) -> None:
    window = ProfilerWindow(tmp_path, start=2, steps=2)
    x = jnp.ones(8)
    for step in range(6):
        window.before_step(step, x)
        assert bool(traces(tmp_path)) == (step >= 4), "the trace is written when step 4 begins"
        x = x + 1
    window.close()
    assert len(traces(tmp_path)) == 1


def test_a_run_that_ends_inside_the_window_keeps_its_trace(tmp_path: Path) -> None:
    window = ProfilerWindow(tmp_path, start=0, steps=100)
    window.before_step(0)
    window.close(jnp.ones(8) + 1)
    window.close()
    assert len(traces(tmp_path)) == 1


def test_no_steps_no_trace(tmp_path: Path) -> None:
    window = ProfilerWindow(tmp_path / "profile", start=0, steps=0)
    window.before_step(0)
    window.close()
    assert not (tmp_path / "profile").exists()
