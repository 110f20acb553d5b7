"""The random draws of generated items.

Every draw is a function of (seed, step, example id, item) alone, and the draws follow the
distribution that the configuration asks for. The reference is the distribution's own mean, spread
and closed form."""

import numpy as np
import pytest

from jaxmllm.config.schema import DiffusionObjectiveConfig
from jaxmllm.data.rows.draws import EVALUATION_TIMES, DrawRule, StepDraws

PLAIN = DiffusionObjectiveConfig(times="uniform", condition_drop=0.25)
ITEMS = [(step, f"e{id}", item, 9) for step in range(20) for id in range(50) for item in range(2)]


def drawn(**changes):
    """The draws of every one of ITEMS, under PLAIN with the given changes."""
    rule = DrawRule(3, PLAIN.model_copy(update=changes))
    return [rule.of(*item) for item in ITEMS]


def test_draws_are_the_same_again_and_different_for_all_else():
    rule = DrawRule(3, PLAIN)
    drawn_once = rule.of(5, "a", 1, 9)
    assert rule.of(5, "a", 1, 9) == drawn_once == DrawRule(3, PLAIN).of(5, "a", 1, 9)
    assert rule.of(5, "a", 1, 90) == drawn_once, (
        "the size of an item moves its time where it is asked to"
    )
    other_draws = [
        rule.of(6, "a", 1, 9),
        rule.of(5, "b", 1, 9),
        rule.of(5, "a", 0, 9),
        DrawRule(4, PLAIN).of(5, "a", 1, 9),
    ]
    assert len({draws.noise for draws in (drawn_once, *other_draws)}) == 5
    # Noise keys are pairs of 32-bit words, and no two of the 2000 items share one.
    noise_keys = [draws.noise for draws in drawn()]
    assert len(set(noise_keys)) == len(ITEMS)
    assert all(0 <= word < 2**32 for key in noise_keys for word in key)


def test_copies_of_an_example_in_a_step_differ_but_for_the_first():
    rule = DrawRule(3, PLAIN)
    ids = ["a", "b", "a"]
    draws = StepDraws(rule, 5, np.array([0, 1, 2, 0]), ids.__getitem__)
    items = [draws.of(index, 1, 9) for index in range(4)]
    # The step has the ids a, b, a, a. The first a keeps the draws that it has alone in a step, and
    # the later ones must have draws of their own.
    assert items[:2] == [rule.of(5, id, 1, 9) for id in "ab"]
    assert len({item.noise for item in items}) == len({item.time for item in items}) == 4
    held_out = StepDraws(DrawRule(3, PLAIN, evaluation=True), 5, np.zeros(2, int), ids.__getitem__)
    assert held_out.of(0, 1, 9) == held_out.of(1, 1, 9), "whatever the batches of an evaluation"


def test_times_have_the_distribution_that_is_asked_for():
    uniform = np.array([draws.time for draws in drawn()])
    # A uniform variable on [0, 1] has mean 1/2 and standard deviation 1/sqrt(12). The bounds are
    # some three standard errors of 2000 draws.
    assert abs(uniform.mean() - 0.5) < 0.02 and abs(uniform.std() - 12**-0.5) < 0.01
    logits = np.array([draws.time for draws in drawn(times="logit_normal")])
    logits = np.log(logits / (1 - logits))
    assert abs(logits.mean()) < 0.06 and abs(logits.std() - 1) < 0.05
    shifted = np.array([draws.time for draws in drawn(shift=4.0)])
    np.testing.assert_allclose(shifted, 4 * uniform / (1 + 3 * uniform))
    # An item of 9 patches has 3/2 times the shift of one of 4 patches, the reference size: the
    # shift grows with the square root of the size, so 2 becomes 3.
    by_size = np.array([draws.time for draws in drawn(shift=2.0, shift_patches=4)])
    np.testing.assert_allclose(by_size, 3 * uniform / (1 + 2 * uniform))


def test_items_that_are_drawn_have_their_shift_in_the_place_of_a_time():
    rule = DrawRule(3, PLAIN.model_copy(update={"shift": 2.0, "shift_patches": 4}), True, True)
    assert [rule.of(0, "a", 0, patches)[1:] for patches in (4, 16)] == [(2.0, False), (4.0, False)]


def test_conditions_are_hidden_as_often_as_asked_for():
    assert np.mean([draws.hidden for draws in drawn()]) == pytest.approx(0.25, abs=0.03)
    assert not any(draws.hidden for draws in drawn(condition_drop=0.0))
    assert all(draws.hidden for draws in drawn(condition_drop=1.0))


def test_evaluations_draw_the_same_at_every_step_on_a_grid_of_times():
    rule = DrawRule(3, PLAIN, evaluation=True)
    draws = [rule.of(*item) for item in ITEMS]
    assert draws[:100] == draws[100:200]
    assert not any(item_draws.hidden for item_draws in draws)
    # Times are the centres of EVALUATION_TIMES equal intervals, so these are whole numbers from 0.
    grid_indices = {item_draws.time * EVALUATION_TIMES - 0.5 for item_draws in draws}
    np.testing.assert_allclose(sorted(grid_indices), np.arange(EVALUATION_TIMES))
