"""The training loop and what it leaves: records, summary, evaluation, and limits that stop a run.

References are the run itself on devices of known speed, greedy decoding for exact matches, and
steps without the undecodable example.
"""

import dataclasses
import errno
import functools
import json
import math
import os
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soundfile
import yaml

from jaxmllm.balance.step_plan import plan_step
from jaxmllm.config.read import load_config, parse_config
from jaxmllm.data.batches import evaluation_steps
from jaxmllm.data.rows.fill import StepFiller
from jaxmllm.data.sources.jsonl import JsonLines
from jaxmllm.models.rows import EncoderRows, LanguageRows
from jaxmllm.runtime import checkpoint_files
from jaxmllm.runtime.checkpoint import Checkpoints
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.runtime.metrics import read_summary
from jaxmllm.runtime.resume import begun_config
from jaxmllm.runtime.signals import StopSignals
from jaxmllm.setup.build import build_run
from jaxmllm.tools.sample_data import make_sample
from jaxmllm.training.evaluate import evaluate
from jaxmllm.training.loop import train
from jaxmllm.training.programs.base import Evaluated
from jaxmllm.training.report import RunReport, TrainingError
from tests.support import EXHAUSTIVE, assert_close, scaled, tiny_config, without_targets
from tests.training.test_report import make_run

KINDS = {"picture", "sound", "both", "text"}
PHASES = ("vision", "audio", "language")


# ---------------------------------------------------------------------------- the run folder


# Least seconds that the devices below take
STEP_SECONDS = 0.6
EVALUATION_SECONDS = 0.6


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A complete run on slow devices: its folder, the summary that it returned and its config."""
    folder = tmp_path_factory.mktemp("finished")
    tree = tiny_config(
        data, run={"directory": str(folder), "steps": 6}, checkpoint={"every": 2, "keep": 2}
    )
    tree |= {"mesh": {"data": 4, "fsdp": 2}, "evaluation": {"every": 3}}
    tree["logging"] |= {"tensorboard": True, "peak_flops": 1e12}
    run = build_run(parse_config(tree))
    slow_down(run.programs)
    return folder, train(run), tree


def slow_down(programs) -> None:
    """Make the devices take `STEP_SECONDS` longer per step and `EVALUATION_SECONDS` per evaluation.

    The host continues meanwhile, as it does with real devices; the delays follow one another.
    """
    devices = ThreadPoolExecutor(1)
    train_at_once = programs.train
    totals_at_once = programs.totals

    def late(array, seconds):
        return Late(
            array, devices.submit(lambda: (jax.block_until_ready(array), time.sleep(seconds)))
        )

    def slow_train(state, batch):
        state, metrics = train_at_once(state, batch)
        return state, metrics | {"loss": late(metrics["loss"], STEP_SECONDS)}

    def slow_totals(sums):
        totals = totals_at_once(sums)
        return totals._replace(loss=late(totals.loss, EVALUATION_SECONDS))

    programs.train, programs.totals = slow_train, slow_totals


@dataclasses.dataclass(frozen=True)
class Late:
    """An array that becomes ready after some other work."""

    array: jax.Array
    work: Future

    def block_until_ready(self):
        self.work.result(60)
        return self.array

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.block_until_ready(), dtype)


def test_run_folder(finished):
    folder, _, tree = finished
    assert load_config(folder / "config.yaml") == begun_config(parse_config(tree))
    # Defaults are written out
    assert yaml.safe_load((folder / "config.yaml").read_text())["optimizer"]["beta2"] == 0.95
    assert sorted(int(path.name) for path in (folder / "checkpoints").iterdir()) == [4, 6]
    assert any((folder / "tensorboard").iterdir())


def test_metric_records_hold_what_there_is_to_know(finished):
    """Records of steps and of evaluations have all metrics, and the metrics fit one another."""
    folder, _, _ = finished
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    expected_keys = {
        "loss",
        "learning_rate",
        "gradient_norm",
        "examples/s",
        "mfu",
        "data_wait_seconds",
        "plan_ms",
    }
    expected_keys |= {"compilations", "skipped", "failed_media", "masked_targets", "step_seconds"}
    expected_keys |= {
        f"{phase}/{name}"
        for phase in PHASES
        for name in ("tokens/s", "real_token_fraction", "max_over_mean", "rows")
    }
    for record in steps:
        assert expected_keys <= record.keys(), expected_keys - record.keys()
        source_losses = [value for name, value in record.items() if name.startswith("loss/")]
        assert {name.removeprefix("loss/") for name in record if name.startswith("loss/")} <= KINDS
        # The mean over all targets lies between the means by source
        assert min(source_losses) <= record["loss"] <= max(source_losses)
        assert all(
            0 < record[f"{phase}/real_token_fraction"] <= 1 <= record[f"{phase}/max_over_mean"]
            for phase in PHASES
        )
        assert record["mfu"] > 0
        token_bytes = 4 * 32 + 4  # 32 float32 numbers and one flag of validity
        assert (
            record["route/vision/bytes_moved"]
            == token_bytes * record["route/vision/slots_moved"]
            > 0
        )
        assert record["route/vision/node_bytes"] == token_bytes * record["route/vision/node_tokens"]
        assert record["route/vision/ragged"] == 0
    evaluations = [record for record in records if "eval/loss" in record]
    assert [record["step"] for record in evaluations] == [3, 6]
    assert all(
        {f"eval/exact_match/{kind}" for kind in KINDS} <= record.keys() for record in evaluations
    )
    # After the first evaluation, in step 3, nothing is compiled
    assert steps[-1]["compilations"] == steps[3]["compilations"]


@pytest.mark.parametrize("late", [False, True], ids=["in a step", "in the last save"])
@pytest.mark.parametrize("error", [CheckpointError("checkpoint 4: why"), OSError(28, "full")])
def test_the_summary_of_a_run_that_fails_or_is_killed_is_not_complete(
    tmp_path, monkeypatch, error, late
):
    """The summary is marked incomplete when a run begins, and gets the error at its end."""
    run = make_run(logging=SimpleNamespace(tensorboard=False, wandb=None))
    run.config.checkpoint = SimpleNamespace(keep=1)
    run.directory, run.programs.saved_state = tmp_path, {}
    report = RunReport(run, None, None, None)
    (tmp_path / "summary.json").write_text('{"steps": 4, "complete": true, "error": null}')
    summaries = []

    def fail(on_time):
        summaries.append(read_summary(tmp_path))  # what a kill would leave behind
        if on_time:
            raise error

    def loop(*arguments):
        report.resume(4)
        return SimpleNamespace(
            step=4, report=report, run_steps=lambda: fail(not late), close=lambda: None
        )

    monkeypatch.setattr("jaxmllm.training.loop.begin", lambda run, *rest: (run, None, 4))
    monkeypatch.setattr("jaxmllm.training.loop.Loop", loop)
    waits = iter([fail, lambda on_time: None])  # the second one is called on closing
    monkeypatch.setattr(Checkpoints, "wait", lambda self: next(waits)(True))
    if not late:
        next(waits)
    with pytest.raises(type(error), match=r"why|full"):
        train(run, StopAt())
    assert summaries[0] == {"steps": 4, "complete": False, "error": None}
    assert not read_summary(tmp_path)["complete"]
    assert read_summary(tmp_path)["error"] == str(error)


def test_summary(finished):
    folder, summary, _ = finished
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["steps"] == 6 and math.isfinite(summary["loss"]) and summary["wall_seconds"] > 0
    assert summary["eval"]["exact_match"].keys() == KINDS
    assert summary["eval"]["examples"] == dict.fromkeys(KINDS, 6)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert (
        summary["loss"] == steps[-1]["loss"]
        and summary["compilations"] == records[-2]["compilations"]
    )
    for phase in PHASES:
        # Figures of the run lie between those of its steps
        fractions = [record[f"{phase}/real_token_fraction"] for record in steps]
        assert min(fractions) <= summary["real_token_fraction"][phase] <= max(fractions)
        costs = [record[f"{phase}/max_over_mean"] for record in steps]
        assert min(costs) <= summary["max_over_mean_cost"][phase] <= max(costs)


def test_times_of_a_run_are_those_of_its_steps(finished):
    """No step is much faster than its devices, and all take less than the run without evaluations.

    These bounds hold however loaded the machine is.
    """
    folder, summary, _ = finished
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    seconds = [record["step_seconds"] for record in steps]
    assert min(seconds) > 0.75 * STEP_SECONDS, seconds  # also before an evaluation and at the end
    assert sum(seconds) < summary["wall_seconds"] - 2 * EVALUATION_SECONDS
    # 8 devices with a stated peak of 1e12 FLOP/s each
    flops = [record["mfu"] * record["step_seconds"] * 8e12 for record in steps]
    assert max(flops) < 4 * min(flops)  # batches of 16 examples differ, but not that much
    for number, record in enumerate(steps, 1):
        assert record["examples/s"] == pytest.approx(16 * number / sum(seconds[:number]))


# ---------------------------------------------------------------------------- evaluation


@pytest.fixture(scope="module")
def learnt(alone):
    """Parameters that answer some examples exactly and others not."""
    batch = alone.put(alone.step(range(48)))
    state = alone.programs.init(0)
    for _ in range(60):
        state, _ = alone.programs.train(state, batch)
    return state.params


@pytest.mark.slow
def test_exact_match_is_what_greedy_decoding_reproduces(alone, learnt):
    reproduces = greedy_decoder(alone, learnt)
    matches = []
    for i in [*range(10), *range(48, 54)]:
        sums = jax.device_get(alone.programs.evaluate(learnt, alone.put(alone.step([i]))).sums)
        assert sums.examples.sum() == 1
        matches.append(sums.exact.sum() == 1)
        assert reproduces(i) == matches[-1]
    assert True in matches and False in matches


def greedy_decoder(setup, params):
    """example -> whether greedy decoding writes its answer, with one forward pass per token."""
    model = setup.programs.functions.model

    @functools.partial(jax.jit, static_argnums=0)
    def encode(phase, rows):
        return model.project(params, phase, model.features(params, phase, rows), rows.places)

    @jax.jit
    def logits(rows, media):
        hidden, head = model.hidden(params, rows, media)
        return hidden @ head.matrix

    def right(example: int) -> bool:
        step = setup.step([example])
        rendered = setup.corpus.example(example)
        plan = plan_step(setup.corpus.gather(np.array([example])), setup.spec)
        (rows,) = step.rows["language"]
        media = np.zeros((1, rows["tokens"].shape[1], model.config.language.width), np.float32)
        for phase, row_format in setup.corpus.formats.items():
            spans = [span for span in rendered.media if span.phase == phase]
            encoded = [
                np.asarray(encode(phase, EncoderRows.of(arrays))) for arrays in step.rows[phase]
            ]
            placement = plan.phases[phase]
            for span, row, offset in zip(
                spans, placement.microbatch, placement.offset, strict=True
            ):
                first_token = offset // row_format.slots_per_token
                media[0, span.slot : span.slot + span.tokens] = encoded[row][
                    0, first_token : first_token + span.tokens
                ]
        (positions,) = np.nonzero(rendered.targets >= 0)  # tokens followed by one of the answer
        assert np.all(np.diff(positions) == 1)
        tokens = rows["tokens"].copy()
        tokens[0, positions[0] + 1 :] = 0
        for position in positions:
            token = int(
                np.argmax(
                    logits(LanguageRows.of(rows | {"tokens": tokens.copy()}), media)[0, position]
                )
            )
            if token != rendered.targets[position]:
                return False
            tokens[0, position + 1] = token
        return True

    return right


def test_evaluation_counts_every_example_once(alone, learnt):
    """The result does not depend on the size of batches, and equals that of single examples."""
    filler = StepFiller(alone.held_out, alone.spec, alone.programs.local_share, alone.attention)
    source_names = alone.held_out.sources
    results = []
    for batch_size in (10, 24):  # 24 = 10 + 10 + 4
        batches = evaluation_steps(filler, batch_size)
        results.append(
            evaluate(alone.programs, learnt, batches, source_names, alone.held_out.source_of)
        )
    in_batches, in_one_batch = results
    assert in_batches["examples"] == in_one_batch["examples"] == dict.fromkeys(KINDS, 6)
    assert in_batches["exact_match"] == in_one_batch["exact_match"]
    assert in_batches["loss"] == pytest.approx(in_one_batch["loss"], rel=1e-5)
    assert (
        in_batches["masked_examples"] == in_batches["failed_media"] == 0
        and in_batches["masked_by_source"] == {}
    )
    single_sums = [
        alone.programs.evaluate(learnt, alone.put(alone.step([i], alone.held_out))).sums
        for i in range(24)
    ]
    loss, targets = (
        sum(float(getattr(sums, name).sum()) for sums in single_sums)
        for name in ("loss", "targets")
    )
    assert in_one_batch["loss"] == pytest.approx(loss / targets, rel=1e-5)


def test_an_evaluation_counts_beyond_what_float32_tells(alone):
    # From 2**24 on, float32 cannot count single targets
    programs = alone.programs
    offset = 2**24
    for i in range(4):
        batch = alone.put(alone.step([i]))
        expected = programs.evaluate(alone.params, batch).sums.targets
        sums, failed = programs._nothing_evaluated()
        large_counts = jax.device_put(np.asarray(sums.targets) + offset, sums.targets.sharding)
        previous = Evaluated(sums._replace(targets=large_counts.astype(sums.targets.dtype)), failed)
        counts = programs.evaluate(alone.params, batch, previous).sums.targets
        np.testing.assert_array_equal(np.int64(counts) - offset, expected)


@pytest.fixture(scope="module")
def damaged_held_out(tmp_path_factory) -> tuple[Path, set[Path]]:
    """A sample, and its held-out PNG files, whose bodies are broken."""
    folder = tmp_path_factory.mktemp("damaged_held_out")
    make_sample(folder, train=96, test=24)
    records = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    pictures = {
        part["image"]
        for record in records
        for part in record["messages"][0]["content"]
        if "image" in part
    }
    broken = {folder / name for name in sorted(pictures) if name.endswith(".png")}
    for path in broken:
        break_body(path)
    return folder, broken


def test_undecodable_held_out_media_are_counted_and_named(alone, damaged_held_out):
    """Examples with broken media are masked and reported; the others count as usual."""
    folder, broken = damaged_held_out
    corpus = setup_corpus(alone, folder, alone.held_out)
    filler = StepFiller(corpus, alone.spec, alone.programs.local_share, alone.attention)
    messages = []
    batches = evaluation_steps(filler, 10)
    names = corpus.sources
    result = evaluate(
        alone.programs, alone.params, batches, names, corpus.source_of, tell=messages.append
    )
    broken_media = {
        i: [media for media in corpus.example(i).media if media.reference.path in broken]
        for i in range(24)
    }
    masked = [i for i, media in broken_media.items() if media]
    assert (
        result["failed_media"]
        == sum(map(len, broken_media.values()))
        == sum(map(len, messages))
        > 1
    )
    assert all(
        sum(str(path) in line for lines in messages for line in lines) >= 1 for path in broken
    )
    assert result["masked_examples"] == len(masked)
    assert result["masked_by_source"] == Counter(names[corpus.source_of(i)] for i in masked)
    counted = Counter(names[corpus.source_of(i)] for i in range(24) if i not in masked)
    assert result["examples"] == counted
    # The reference: all examples evaluated one by one
    single_results = [
        alone.programs.evaluate(alone.params, alone.put(alone.step([i], corpus))) for i in range(24)
    ]
    assert [int(single.failed) > 0 for single in single_results] == [i in masked for i in range(24)]
    loss, targets = (
        sum(float(getattr(single.sums, name).sum()) for single in single_results)
        for name in ("loss", "targets")
    )
    assert result["loss"] == pytest.approx(loss / targets, rel=1e-5)


def test_an_evaluation_of_nothing_has_no_loss(alone, damaged_held_out):
    folder, broken = damaged_held_out
    corpus = setup_corpus(alone, folder, alone.held_out)
    masked = [
        i
        for i in range(24)
        if any(media.reference.path in broken for media in corpus.example(i).media)
    ]
    result = evaluate(
        alone.programs, alone.params, [alone.step(masked, corpus)], corpus.sources, corpus.source_of
    )
    assert (
        result["loss"] is None
        and result["exact_match"] == {}
        and result["masked_examples"] == len(masked)
    )
    empty = evaluate(alone.programs, alone.params, [], corpus.sources, corpus.source_of)
    assert empty["loss"] is None and empty.keys() == result.keys()


class StopAt(StopSignals):
    """Signals of a run that come by themselves: the n-th call of `should_stop` is answered yes."""

    def __init__(self, call: float = math.inf):
        super().__init__()
        self.calls_left = call

    def should_stop(self) -> bool:
        self.calls_left -= 1
        return self.calls_left <= 0


@pytest.mark.slow
def test_a_run_stops_within_an_evaluation_and_makes_up_for_it(damaged_held_out, tmp_path):
    """A resumed run repeats the evaluation that a signal ended.

    Calls of `should_stop` 1 and 2 belong to the two batches of the evaluation at the start, 3 to 5
    to steps, 6 and 7 to the batches of the next evaluation.
    """
    folder, _ = damaged_held_out
    tree = tiny_config(
        folder, run={"directory": str(tmp_path), "steps": 4}, mesh={"data": 1, "fsdp": 8}
    )
    tree |= {"evaluation": {"at_start": True, "every": 3}}
    tree["data"]["max_failed_media"] = 1000
    run = build_run(parse_config(tree))

    def records():
        lines = (
            (tmp_path / "metrics.jsonl").read_text().splitlines()
            if (tmp_path / "metrics.jsonl").exists()
            else []
        )
        return [record for record in map(json.loads, lines) if "message" not in record]

    def history():
        return [(record["step"], "eval/examples/text" in record) for record in records()]

    summary = train(run, StopAt(2))
    assert (
        summary["steps"] == 0
        and summary["eval"] is None
        and not summary["complete"]
        and history() == []
    )
    summary = train(run, StopAt(7))
    assert summary["steps"] == 3 and summary["eval"]["step"] == 0 and not summary["complete"]
    assert history() == [(0, True), (1, False), (2, False), (3, False)]
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [0, 3]
    strict = parse_config(tree | {"data": tree["data"] | {"max_failed_media": 0}})
    with pytest.raises(
        TrainingError, match=r"step 3: \d+ media items of the evaluation .*max_failed_media = 0"
    ):
        train(dataclasses.replace(run, config=strict), StopAt())
    assert "max_failed_media" in json.loads((tmp_path / "summary.json").read_text())["error"]
    summary = train(run, StopAt())
    assert history() == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
        (3, True),
        (4, False),
        (4, True),
    ]
    assert summary["complete"] and summary["eval"]["step"] == 4 and summary["error"] is None
    assert records()[-1]["eval/failed_media"] == summary["eval"]["failed_media"] > 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    failure_records = [
        record for record in map(json.loads, lines) if "message" in record and record["step"] == 4
    ]
    assert failure_records and all(
        "masked in the evaluation" in record["message"] for record in failure_records
    )


@pytest.mark.slow
def test_a_run_that_a_signal_ends_in_its_last_evaluation_is_not_complete(
    damaged_held_out, tmp_path
):
    """Call 1 of `should_stop` belongs to the step, 2 and 3 to the batches of the evaluation."""
    folder, _ = damaged_held_out
    tree = tiny_config(
        folder, run={"directory": str(tmp_path), "steps": 1}, mesh={"data": 1, "fsdp": 8}
    )
    tree["data"]["max_failed_media"] = 1000
    run = build_run(parse_config(tree))
    for stop in (
        StopAt(1),
        StopAt(2),
    ):  # before the evaluation that is due, and on resume within it
        summary = train(run, stop)
        assert (summary["steps"], summary["eval"], summary["complete"]) == (1, None, False)
    summary = train(run, StopAt())
    assert summary["complete"] and summary["eval"]["step"] == 1
    assert train(run, StopAt(1))["complete"], "nothing was left to do"


# ---------------------------------------------------------------------------- undecodable media


def break_body(path: Path) -> None:
    """Overwrite the data of a PNG so that it cannot be decoded; the header stays as it is."""
    content = bytearray(path.read_bytes())
    body = content.index(b"IDAT") + 4
    content[body : body + 16] = bytes(16)
    path.write_bytes(content)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> tuple[Path, int]:
    """A sample with one picture whose body is broken, and an example that shows it alone."""
    folder = tmp_path_factory.mktemp("damaged")
    make_sample(folder, train=96, test=24)
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    images_of = [
        [part["image"] for part in record["messages"][0]["content"] if "image" in part]
        for record in records
    ]
    example = next(
        i for i, images in enumerate(images_of) if len(images) == 1 and images[0].endswith(".png")
    )
    break_body(folder / images_of[example][0])
    return folder, example


@pytest.mark.parametrize(
    "ranks, apart",
    [
        pytest.param(1, False, marks=EXHAUSTIVE),
        pytest.param(2, False, marks=EXHAUSTIVE),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_undecodable_media_mask_their_example(setups, by_example, damaged, ranks, apart):
    """The step equals one with the example's targets masked, and one without the example.

    `apart`: the picture is encoded on another rank than the one that holds its text.
    """
    folder, damaged_example = damaged
    setup = setups(by_example(mesh={"data": ranks}), ranks)
    corpus = setup_corpus(setup, folder)
    source = setup.corpus.source_of(damaged_example)
    unaffected = [
        i
        for i in range(96)
        if corpus.example(i).media and not shares_media(corpus, i, damaged_example)
    ]
    batches = (
        [damaged_example, *unaffected[start : start + 9]] for start in range(len(unaffected) - 9)
    )
    steps = ((batch, setup.step(batch, corpus)) for batch in batches)
    examples, step = next(
        (batch, step) for batch, step in steps if (len(set(places(step, source))) == 2) == apart
    )
    assert len(step.failures) == 1 and "png" in step.failures[0]

    result = setup.gradients(step)
    assert result.failed == 1 and result.targets[source] == 0 and result.loss[source] == 0
    undamaged_step = setup.step(examples)  # the undamaged data
    masked = setup.gradients(without_targets(undamaged_step, [source]))
    np.testing.assert_array_equal(result.targets, masked.targets)
    np.testing.assert_allclose(result.loss, masked.loss, rtol=1e-5)
    assert_close(result.grads, masked.grads, 1e-5)
    remaining = setup.gradients(setup.step(examples[1:]))
    assert_close(
        scaled(result.grads, step.targets / remaining.targets.sum()), remaining.grads, 1e-5
    )

    state, metrics = setup.programs.train(setup.programs.init(0), setup.put(step))
    assert metrics["failed_media"] == 1 and state.failed_media == 1 and metrics["skipped"] == 0
    assert metrics["masked_targets"] == step.targets - remaining.targets.sum() > 0
    assert metrics["loss"] == pytest.approx(remaining.mean_loss, rel=1e-5)
    _, clean_metrics = setup.programs.train(
        setup.programs.init(0), setup.put(setup.step(examples[1:]))
    )
    assert metrics["gradient_norm"] == pytest.approx(
        float(clean_metrics["gradient_norm"]), rel=1e-5
    )


def places(step, source: int) -> tuple[int, int]:
    """The rank of the picture that failed, and the rank of the text of this source."""
    (encoder,) = np.flatnonzero(sum(rows["failed"] for rows in step.rows["vision"]))
    ((language, _),) = np.argwhere(sum(rows["sources"] == source for rows in step.rows["language"]))
    return int(encoder), int(language)


def setup_corpus(setup, folder, corpus=None):
    """A corpus of `setup`, by default for training, read from a folder of the same layout."""
    corpus = corpus or setup.corpus
    (index,) = corpus.indexes
    copy = folder / index.source.path.name
    copy.write_bytes(index.source.path.read_bytes())
    return dataclasses.replace(
        corpus, indexes=(dataclasses.replace(index, source=JsonLines(copy, folder)),)
    )


def shares_media(corpus, i: int, j: int) -> bool:
    """Whether two examples show or play the same file."""
    return bool(
        {m.reference for m in corpus.example(i).media}
        & {m.reference for m in corpus.example(j).media}
    )


@pytest.mark.slow
def test_run_stops_past_the_limit_of_undecodable_media(damaged, tmp_path):
    """With a limit of 0 the run stops at the broken picture; with a limit of 100 it finishes."""
    folder, _ = damaged
    tree = tiny_config(
        folder, run={"directory": str(tmp_path / "run"), "steps": 12}, mesh={"data": 8}
    )
    tree["checkpoint"] = {"every": 1}
    with pytest.raises(
        TrainingError, match=r"\d+ media items could not be decoded.*data\.max_failed_media = 0"
    ):
        train(build_run(parse_config(tree)))
    tree["run"]["directory"] = str(tmp_path / "tolerant")
    tree["data"]["max_failed_media"] = 100
    summary = train(build_run(parse_config(tree)))
    assert summary["steps"] == 12
    records = [
        json.loads(line)
        for line in (tmp_path / "tolerant" / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        records[-2]["failed_media"] >= 1
        and max(record.get("masked_targets", 0) for record in records) > 0
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_clip_of_absurd_amplitude_costs_no_update(tmp_path):
    """A clip with overflowing features is masked, so neither updates nor evaluations become NaN."""
    folder = tmp_path / "data"
    make_sample(folder, train=96, test=24)
    for split in ("train", "test"):
        path = min((folder / "media" / split).glob("*.wav"))
        samples, rate = soundfile.read(path)
        soundfile.write(path, 1e20 * samples, rate, subtype="FLOAT")
    tree = tiny_config(
        folder, run={"directory": str(tmp_path / "run"), "steps": 12}, mesh={"data": 8}
    )
    tree["data"]["max_failed_media"] = 100
    train(build_run(parse_config(tree)))
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [record for record in records if "failed_media" in record]
    assert (
        len(steps) >= 12
        and steps[-1]["failed_media"] >= 1
        and all(record["skipped"] == 0 for record in steps)
    )
    evaluations = [
        value
        for record in records
        for name, value in record.items()
        if name.startswith("eval") and "loss" in name
    ]
    assert evaluations and all(value is not None and math.isfinite(value) for value in evaluations)


# ---------------------------------------------------------------------------- numbers that are not finite


def test_updates_that_are_not_finite_are_skipped(alone):
    """Parameters of NaN spoil steps with audio; steps of text alone go on."""
    state = alone.programs.init(0)
    broken = jax.tree.map(lambda leaf: leaf, state.params)
    # Only steps with audio read these parameters
    broken["projector.audio"] = jax.tree.map(lambda leaf: leaf * jnp.nan, broken["projector.audio"])
    before = jax.device_get((broken, state.optimizer))
    audio_batch = alone.put(alone.step(alone.of_kind(["audio"])[:4]))
    text_batch = alone.put(alone.step(alone.of_kind([])[:4]))
    state = state._replace(params=broken)
    for streak in (1, 2):
        state, metrics = alone.programs.train(state, audio_batch)
        assert not np.isfinite(metrics["loss"])
        assert (metrics["skipped"], metrics["skipped_in_row"]) == (streak, streak)
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get((state.params, state.optimizer)), before
    )
    state, metrics = alone.programs.train(state, text_batch)
    assert np.isfinite(metrics["loss"]) and (metrics["skipped"], metrics["skipped_in_row"]) == (
        2,
        0,
    )
    assert not np.array_equal(
        state.params["language"]["embedding"], before[0]["language"]["embedding"]
    )


@pytest.mark.slow
def test_run_stops_after_too_many_skipped_updates(data, tmp_path, capsys):
    """A huge learning rate spoils the parameters; their last finite state stays the checkpoint."""
    tree = tiny_config(
        data, run={"directory": str(tmp_path), "steps": 20}, checkpoint={"every": 1, "keep": 1}
    )
    tree["mesh"] = {"data": 8}
    tree["optimizer"] |= {"learning_rate": 1e30, "max_skipped": 3}
    with pytest.raises(
        TrainingError, match=r"not finite for 3 steps in a row.*optimizer\.max_skipped"
    ):
        train(build_run(parse_config(tree)))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["skipped"] for record in records][-3:] == [1, 2, 3]
    # The first loss is finite; updates at this rate soon spoil the parameters
    assert records[0]["loss"] is not None and records[-1]["loss"] is None
    last_finite_step = max(record["step"] for record in records if record["skipped"] == 0)
    saved_steps = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert saved_steps == [last_finite_step], (
        "a state inside the streak took the place of the last good one"
    )
    assert (
        f"step {last_finite_step + 1}: no checkpoint, the last 1 updates were not finite"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_save_that_fails_ends_the_run_before_the_next_one(data, tmp_path, monkeypatch):
    tree = tiny_config(
        data, run={"directory": str(tmp_path), "steps": 5}, checkpoint={"every": 2, "keep": 1}
    )
    tree["mesh"] = {"data": 8}
    save = Checkpoints.save

    def saved_at_once(checkpoints, *arguments, **options):
        save(checkpoints, *arguments, **options)
        checkpoints._writer._async_manager._thread.join(60)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Checkpoints, "save", saved_at_once)
    monkeypatch.setattr(checkpoint_files, "_checksum", full)
    with pytest.raises(CheckpointError, match=r"checkpoint 2 cannot be written .*No space left"):
        train(build_run(parse_config(tree)))
    assert read_summary(tmp_path)["steps"] == 3
