"""Microbatches against plain loops: how far loads are levelled, and every limit."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.stages.microbatches import MicrobatchPlan, PhaseLoad, plan_microbatches


def ragged(seed: int, examples: int = 512) -> dict[str, np.ndarray]:
    """Work of vision log-uniform over 1:40, of text over 1:20; work of the language model
    is half of their sum."""
    random = np.random.default_rng(seed)
    vision, text = np.exp(random.uniform(0, np.log([[40.0], [20.0]]), (2, examples)))
    return {
        "vision": np.rint(1e9 * vision).astype(np.int64),
        "language": np.rint(5e8 * (vision + text)).astype(np.int64),
    }


def load(work, capacity=None, slots=None) -> PhaseLoad:
    """The load of a phase whose slots are its work unless told otherwise."""
    work = np.asarray(work, np.int64)
    return PhaseLoad(work, work if slots is None else np.asarray(slots, np.int64), capacity)


def loads_of(plan: MicrobatchPlan, work: np.ndarray, phase: str, replicas: int) -> np.ndarray:
    """Work of a phase by replica and microbatch: [replicas, M]."""
    loads = np.zeros((replicas, plan.microbatches), np.int64)
    np.add.at(loads, (plan.replica, plan.language if phase == "language" else plan.encoder), work)
    return loads


def check(plan, phases: dict[str, PhaseLoad], replicas: int) -> None:
    """Every example runs once, is deferred to the next microbatch at most,
    and no row is too full."""
    has_media = (
        sum(
            phase_load.work + phase_load.slots
            for phase, phase_load in phases.items()
            if phase != "language"
        )
        + 0 * plan.encoder
        > 0
    )
    deferred = plan.language - plan.encoder
    assert (
        ((deferred == 0) | (deferred == 1)).all()
        and (plan.encoder >= 0).all()
        and (plan.language < plan.microbatches).all()
    )
    assert not deferred[~has_media].any(), "an example without media has nothing to wait for"
    counts = np.bincount(plan.replica, minlength=replicas)
    assert len(counts) == replicas and counts.max() - counts.min() <= 1
    for phase, phase_load in phases.items():
        microbatch = plan.language if phase == "language" else plan.encoder
        row_slots: dict[tuple[int, int], int] = {}
        for row, slots in zip(
            zip(plan.replica, microbatch, strict=True), phase_load.slots, strict=True
        ):
            row_slots[row] = row_slots.get(row, 0) + int(slots)
        assert phase_load.capacity is None or max(row_slots.values()) <= phase_load.capacity


# ---------------------------------------------------------------------------- whole plans


def test_the_spread_over_microbatches_falls_as_far_as_it_should():
    """Standard deviation of the loads, against examples in random order: at least 30 times less for
    vision and 15 times for language, in each of ten batches."""
    reductions = []
    seconds = []
    for seed in range(10):
        work = ragged(seed)
        began = time.process_time()
        plan = plan_microbatches({"vision": load(work["vision"])}, load(work["language"]), 4, 32)
        seconds.append(time.process_time() - began)
        assert plan.microbatches == 32
        random_order = np.random.default_rng(seed).permutation(512).reshape(128, 4)
        reductions.append(
            [
                work[phase][random_order].sum(axis=1).std()
                / loads_of(plan, work[phase], phase, 4).std()
                for phase in work
            ]
        )
    encoder, language = np.array(reductions).min(axis=0)
    assert encoder > 30 and language > 15, "random order is far more uneven, for every seed"
    assert np.median(seconds) < 0.2, "about 35 ms on an idle core"


def test_equal_input_gives_equal_plans_whatever_the_unit():
    """Work in units of 2**20 has the same plan, so no rounding or overflow decides."""
    work = ragged(3, 64)
    plans = [
        plan_microbatches(
            {"vision": load(unit * work["vision"], slots=work["vision"])},
            load(unit * work["language"], slots=work["language"]),
            2,
            8,
        )
        for unit in (1, 1, 1 << 20)
    ]
    for plan in plans[1:]:
        assert plan.encoder.tolist() == plans[0].encoder.tolist()
        assert plan.language.tolist() == plans[0].language.tolist()


PHASE = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 30))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(PHASE, min_size=1, max_size=24),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([None, 30, 70]),
    st.sampled_from([None, 0, 10]),
)
def test_plans_keep_every_limit(examples, replicas, microbatches, capacity, limit):
    """Capacities of rows, and the slots that one microbatch may defer to the next."""
    vision, audio, language = np.array(examples, np.int64).T
    phases = {
        "vision": load(vision, capacity),
        "audio": load(audio, 60),
        "language": load(language, capacity),
    }
    plan = plan_microbatches(
        {name: phase_load for name, phase_load in phases.items() if name != "language"},
        phases["language"],
        replicas,
        microbatches,
        limit,
    )
    check(plan, phases, replicas)
    assert plan.microbatches >= microbatches
    passed_on = np.zeros((replicas, plan.microbatches), np.int64)
    is_deferred = plan.deferred
    np.add.at(
        passed_on, (plan.replica[is_deferred], plan.encoder[is_deferred]), language[is_deferred]
    )
    assert limit is None or passed_on.max(initial=0) <= limit


def test_several_encoders_are_all_levelled():
    """Two encoders whose work is unrelated, with many examples that lack one or both, and a
    language model that depends on both."""
    random = np.random.default_rng(0)
    vision, audio, text = np.rint(np.exp(random.uniform(5, 8, (3, 256)))).astype(np.int64)
    vision[random.random(256) < 0.4] = 0
    audio[random.random(256) < 0.6] = 0
    phases = {
        "vision": load(vision),
        "audio": load(audio),
        "language": load((vision + audio) // 4 + text),
    }
    plan = plan_microbatches(
        {"vision": phases["vision"], "audio": phases["audio"]}, phases["language"], 2, 12
    )
    check(plan, phases, 2)
    for phase, phase_load in phases.items():
        loads = loads_of(plan, phase_load.work, phase, 2)
        assert loads.std() / loads.mean() < 0.04, "0.2 to 0.5 in any order"


def test_text_alone_needs_no_encoder():
    phases = {"language": load(np.arange(1, 41))}
    plan = plan_microbatches({}, phases["language"], 1, 4)
    check(plan, phases, 1)
    assert np.ptp(loads_of(plan, phases["language"].work, "language", 1)) <= 1


def test_few_images_take_few_encoder_rows():
    """Two images with short texts among long texts come into one microbatch, since no
    text needs their room."""
    vision = np.zeros(32, np.int64)
    language = np.full(32, 100)
    vision[[4, 9]] = 50, 60
    plan = plan_microbatches({"vision": load(vision)}, load(language), 1, 8)
    assert set(plan.encoder[[4, 9]]) == {0}
    assert loads_of(plan, language, "language", 1).tolist() == [[400] * 8]


def test_more_microbatches_where_rows_are_short():
    """The planner takes more microbatches than it is asked for where items do not fit otherwise."""
    slots = np.array([6, 6, 6, 6, 4, 4, 4, 4])
    phases = {"vision": load(slots, 10), "language": load(np.ones(8))}
    assert (
        plan_microbatches({"vision": phases["vision"]}, phases["language"], 1, 2).microbatches == 4
    )
    phases = {"vision": load(slots[:4], 10), "language": load(np.ones(4))}
    plan = plan_microbatches({"vision": phases["vision"]}, phases["language"], 1, 2)
    check(plan, phases, 1)
    assert plan.microbatches == 4, "24 slots would fit three rows of 10, but not in pieces of 6"


def test_rows_that_only_tight_packing_fills():
    """Filling the lightest row first would put 5, 4 into one and 5, 3 into the other,
    and strand the second 3."""
    phases = {"language": load([5, 5, 4, 3, 3], 10)}
    plan = plan_microbatches({}, phases["language"], 1, 2)
    check(plan, phases, 1)
    assert plan.microbatches == 2


def test_a_batch_of_nothing():
    plan = plan_microbatches({"vision": load([])}, load([]), 2, 3)
    assert plan.microbatches == 3 and not len(plan.replica)


# ---------------------------------------------------------------------------- errors


def test_an_example_that_no_row_holds_is_named():
    with pytest.raises(
        ValueError, match=r"example 1 needs 12 slots of phase 'vision'.* 10: raise phases\.vision"
    ):
        plan_microbatches({"vision": load([3, 12], 10)}, load([1, 1]), 1, 2)


@pytest.mark.parametrize(("replicas", "microbatches"), [(0, 1), (1, 0), (0, 0)])
def test_no_replica_or_microbatch_is_refused(replicas, microbatches):
    with pytest.raises(ValueError, match="at least one replica and one microbatch"):
        plan_microbatches({}, load([1]), replicas, microbatches)


def test_loads_that_do_not_match_are_refused():
    with pytest.raises(
        ValueError, match=r"phase 'vision' has work of 2 .* the language phase has 1"
    ):
        plan_microbatches({"vision": load([1, 1])}, load([1]), 1, 1)
    with pytest.raises(ValueError, match="phase 'language' has negative"):
        plan_microbatches({}, load([-1]), 1, 1)
