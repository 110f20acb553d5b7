"""What `jaxmllm waste` counts on a tiny sample, against loops over items."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxmllm.balance.step_plan import plan_step
from jaxmllm.config.read import load_config
from jaxmllm.data.batches import batch_examples
from jaxmllm.runtime.compilations import CompilationCounter
from jaxmllm.setup.prepare import prepare
from jaxmllm.setup.sizing import plan_spec
from jaxmllm.setup.spans import mesh_spans
from jaxmllm.tools.sample_data import make_sample
from jaxmllm.tools.waste import main
from sharding.mesh import abstract_mesh

RANKS = 4
STEPS = 3
BATCH = 16
CONFIG = """
run: {{directory: {data}/run, steps: 4, seed: 5}}
model:
  vision: {{width: 16, layers: 1, heads: 2, mlp_width: 32}}
  audio: {{width: 16, layers: 1, heads: 2, mlp_width: 32, mel_bins: 8, chunk_frames: 32}}
  language: {{width: 32, layers: 1, heads: 4, kv_heads: 2, head_size: 8, mlp_width: 48}}
data:
  sources: [{{name: sample, path: {data}/train.jsonl}}]
  batch_size: {batch}
phases: {{vision: {{block: 32}}, audio: {{block: 32}}, language: {{block: 32}}}}
optimizer: {{learning_rate: 1e-3}}
"""
FIGURES = {
    "real_token_fraction",
    "max_over_mean",
    "floor",
    "synchronised",
    "over_ideal",
    "rows",
    "rows_by_span",
    "gathered_bytes",
    "plan_ms",
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    data = tmp_path_factory.mktemp("sample")
    make_sample(data, seed=1, train=64, test=4)
    path = data / "config.yaml"
    path.write_text(CONFIG.format(data=data, batch=BATCH))
    return path


@pytest.fixture(scope="module")
def report(config_file):
    """The record that the command writes, which must compile nothing."""
    path = config_file.with_name("waste.json")
    compilations = CompilationCounter()
    assert (
        main(
            [
                "--config",
                str(config_file),
                "--ranks",
                str(RANKS),
                "--steps",
                str(STEPS),
                "--json",
                str(path),
            ]
        )
        == 0
    )
    # Figures are counted from plans alone
    assert compilations.count == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def measured(report):
    """Records by phase and method."""
    return {(record["phase"], record["method"]): record for record in report["results"]}


@pytest.fixture(scope="module")
def drawn(config_file):
    """Items of every step with their plans in modes `phases` and `none`, and the specs by mode."""
    config = load_config(config_file)
    sizes = {"data": RANKS, "fsdp": 1, "tensor": 1}
    inputs = prepare(config, abstract_mesh(sizes, RANKS, spans=mesh_spans(config)))
    specs = {}
    for mode in ("phases", "none"):
        with_mode = load_config(config_file, [f"balance.mode={mode}"])
        specs[mode] = plan_spec(with_mode, inputs)
    batches = [
        inputs.corpus.gather(batch_examples(inputs.order, BATCH, step)) for step in range(STEPS)
    ]
    return [
        (items, plan_step(items, specs["phases"]), plan_step(items, specs["none"]))
        for items in batches
    ], specs


PHASES = ("vision", "audio", "language")


def test_json_names_its_data_and_has_every_phase_and_method(report):
    assert report["benchmark"] == "waste"
    assert (report["seed"], report["steps"], report["batch_size"]) == (5, STEPS, BATCH)
    assert report["ranks"] == dict.fromkeys(PHASES, RANKS)
    assert "run.seed" in report["generator"]
    assert {"jax", "numpy", "python"} <= set(report["versions"])
    methods = [
        "balanced",
        "balanced, alone",
        "packed",
        "padded",
        "padded, balanced",
        "padded, one shape",
    ]
    pairs = [(record["phase"], record["method"]) for record in report["results"]]
    assert pairs == [(phase, method) for phase in (*PHASES, "all") for method in methods]
    assert all(record.keys() == {"phase", "method"} | FIGURES for record in report["results"])


def own_ranks(items, phase):
    """Lengths of the items of a phase by the rank where sampling put their example."""
    lengths = [[] for _ in range(RANKS)]
    # Sampling deals examples to ranks in runs of BATCH / RANKS
    for length, example in zip(
        items.phases[phase].length.tolist(), items.phases[phase].example.tolist(), strict=True
    ):
        lengths[example * RANKS // BATCH].append(length)
    return lengths


def extras(items, phase):
    """What is added to each item's squared length: media see one another in both directions."""
    phase_items = items.phases[phase]
    added = np.broadcast_to(phase_items.extra[0], phase_items.length.shape).tolist()
    assert any(added) == (phase == "language")
    return added


def cost(spec, length, extra=0):
    """The planner's cost of an item."""
    return spec.cost.linear * length + spec.cost.quadratic * (length**2 + extra)


def ideal_share(spec, items, phase):
    """The cost of a rank if all ranks had equal loads."""
    lengths_and_extras = zip(items.phases[phase].real.tolist(), extras(items, phase), strict=True)
    return sum(cost(spec, *length_and_extra) for length_and_extra in lengths_and_extras) / RANKS


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("method", ["padded", "padded, one shape"])
def test_padding_is_that_of_a_loop_over_ranks(measured, drawn, phase, method):
    batches, specs = drawn
    spec = specs["phases"].phases[phase]
    tokens = slots = rows = slowest = ideal = weighted = 0
    for items, _, _ in batches:
        shapes = [(len(lengths), max(lengths, default=0)) for lengths in own_ranks(items, phase)]
        if method == "padded, one shape":
            shapes = [
                (
                    max(items_of_rank for items_of_rank, _ in shapes),
                    max(longest for _, longest in shapes),
                )
            ] * RANKS
        costs = [items_of_rank * cost(spec, longest) for items_of_rank, longest in shapes]
        owners = items.phases[phase].example.tolist()
        for example, extra in zip(owners, extras(items, phase), strict=True):
            costs[example * RANKS // BATCH] += spec.cost.quadratic * extra
        share = ideal_share(spec, items, phase)
        tokens += sum(items.phases[phase].real.tolist())
        slots += sum(items_of_rank * longest for items_of_rank, longest in shapes)
        rows += sum(items_of_rank for items_of_rank, _ in shapes)
        slowest += max(costs)
        ideal += share
        weighted += share * max(costs) / (sum(costs) / RANKS)
    record = measured[phase, method]
    assert record["real_token_fraction"] == pytest.approx(tokens / slots)
    assert record["rows"] == pytest.approx(rows / STEPS)
    assert record["over_ideal"] == pytest.approx(slowest / ideal)
    assert record["max_over_mean"] == record["synchronised"] == pytest.approx(weighted / ideal)
    assert record["floor"] is None


def least_padded(costs, ranks):
    """The least cost of the costliest rank when each pads its items to its longest.

    Costs come in descending order, and ranks take them in runs; every cut is tried.
    """
    if not costs or not ranks:
        return 0 if not costs else float("inf")
    cuts = range(1, len(costs) + 1)
    return min(max(cut * costs[0], least_padded(costs[cut:], ranks - 1)) for cut in cuts)


@pytest.mark.parametrize("phase", PHASES)
def test_padding_is_balanced_as_well_as_it_can_be(measured, drawn, phase):
    batches, specs = drawn
    spec = specs["phases"].phases[phase]
    slowest = ideal = extra_cost = 0
    for items, _, _ in batches:
        costs = sorted(
            (cost(spec, length) for length in items.phases[phase].length.tolist()), reverse=True
        )
        slowest += least_padded(costs, RANKS)
        extra_cost += spec.cost.quadratic * sum(extras(items, phase))
        ideal += ideal_share(spec, items, phase)
    record = measured[phase, "padded, balanced"]
    # Lengths alone are balanced, so the extra cost of media may fall on any rank
    assert slowest / ideal * (1 - 1e-9) <= record["over_ideal"]
    assert record["over_ideal"] <= (slowest + extra_cost) / ideal * (1 + 1e-9)
    assert record["over_ideal"] <= measured[phase, "padded"]["over_ideal"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("method", "mode"), [("balanced", "phases"), ("packed", "none")])
def test_plans_are_measured_as_by_a_loop_over_rows(measured, drawn, phase, method, mode):
    batches, specs = drawn
    spec = specs[mode].phases[phase]
    widest = max(row_class.span for row_class in spec.classes)
    tokens = slots = rows = slowest = ideal = weighted = waiting = floor = gathered = 0
    by_span = {}
    for items, balanced, packed in batches:
        plan = (balanced if mode == "phases" else packed).phases[phase]
        length = items.phases[phase].length.tolist()
        real = items.phases[phase].real.tolist()
        extra = extras(items, phase)
        item_cost = [
            cost(spec, *length_and_extra) for length_and_extra in zip(length, extra, strict=True)
        ]
        row_cost = np.zeros((len(plan.capacity), RANKS))
        row_time = np.zeros((len(plan.capacity), RANKS))
        shapes = zip(plan.capacity.tolist(), plan.span.tolist(), strict=True)
        for microbatch, (capacity, span) in enumerate(shapes):
            for rank in range(0, RANKS, span):
                group = slice(rank, rank + span)
                members = np.flatnonzero(
                    (plan.microbatch == microbatch) & (plan.rank == rank)
                ).tolist()
                costs = (cost(spec, length[n], extra[n]) for n in members)
                # A shared row costs each of its ranks an equal part, rounded up
                row_cost[microbatch, group] = -(-sum(costs) // span)
                squares = sum(length[n] ** 2 + extra[n] for n in members)
                attention = spec.cost.quadratic * squares / span
                row_time[microbatch, group] = spec.cost.linear * capacity + attention
                slots += capacity * span
                gathered += span * (span - 1) * capacity
                by_span[str(span)] = by_span.get(str(span), 0) + 1 / STEPS
                rows += 1
        share = ideal_share(spec, items, phase)
        tokens += sum(real)
        slowest += row_time.max(axis=1).sum()
        ideal += share
        mean = sum(item_cost) / RANKS
        weighted += share * row_cost.sum(axis=0).max() / mean
        floor += share * max(1, max(item_cost) / (widest * mean))
        waiting += share * row_cost.max(axis=1).sum() / mean
    record = measured[phase, method]
    assert record["real_token_fraction"] == pytest.approx(tokens / slots)
    assert record["rows"] == pytest.approx(rows / STEPS)
    assert record["rows_by_span"] == pytest.approx(by_span)
    # Keys and values of one layer, of 2 bytes per number: as wide as the tower, or two heads of 8.
    # A token of sound stands for 4 frames.
    numbers_of_slot = {"vision": 16, "audio": 16 / 4, "language": 2 * 8}[phase]
    assert record["gathered_bytes"] == pytest.approx(2 * 2 * numbers_of_slot * gathered / STEPS)
    assert record["over_ideal"] == pytest.approx(slowest / ideal)
    assert record["max_over_mean"] == pytest.approx(weighted / ideal)
    assert record["synchronised"] == pytest.approx(waiting / ideal)
    assert record["floor"] == pytest.approx(floor / ideal)
    assert 1 <= record["floor"] <= record["max_over_mean"] <= record["synchronised"]


@pytest.mark.parametrize("phase", PHASES)
def test_packing_alone_leaves_every_rank_its_own_load(measured, drawn, phase):
    batches, specs = drawn
    spec = specs["none"].phases[phase]
    weighted = ideal = 0
    for items, _, _ in batches:
        loads = [
            sum(cost(spec, length) for length in lengths) for lengths in own_ranks(items, phase)
        ]
        owners = items.phases[phase].example.tolist()
        for example, extra in zip(owners, extras(items, phase), strict=True):
            loads[example * RANKS // BATCH] += spec.cost.quadratic * extra
        share = ideal_share(spec, items, phase)
        weighted += share * max(loads) / (sum(loads) / RANKS)
        ideal += share
    assert measured[phase, "packed"]["max_over_mean"] == pytest.approx(weighted / ideal)
    assert measured[phase, "balanced"]["max_over_mean"] < measured[phase, "packed"]["max_over_mean"]


def test_user_errors_are_told_in_one_line(config_file, capsys):
    assert main(["--config", str(config_file), "data.batchsize=3"]) == 1
    assert "data.batch_size" in capsys.readouterr().err


def test_what_only_shared_rows_hold_leaves_the_other_plans_out(config_file, tmp_path, capsys):
    """Rows of 160 tokens hold the longest text on two ranks, but not on one."""
    path = tmp_path / "waste.json"
    command = ["--config", str(config_file), "--ranks", str(RANKS), "--steps", "1"]
    assert main([*command, "--json", str(path), "phases.language.max_capacity=160"]) == 0
    results = {
        (record["phase"], record["method"]): record
        for record in json.loads(path.read_text())["results"]
    }
    assert results["language", "balanced"]["rows_by_span"].keys() == {"2"}
    printed = capsys.readouterr().out
    for method in ("balanced, alone", "packed"):
        assert f"{method}: impossible, for rows of one rank" in printed
        for phase in ("language", "all"):
            assert results[phase, method] == {"phase": phase, "method": method} | dict.fromkeys(
                FIGURES
            )
