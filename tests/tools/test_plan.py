"""The command `plan`: its plans against what runs do, and the errors of what cannot be planned."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
import yaml
from PIL import Image

from jaxmllm.balance.stages.plan import plan_pipeline
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.cluster.clusters import CLUSTERS, cluster_of
from jaxmllm.cluster.device_peak import programs_peak
from jaxmllm.cluster.search.layouts import EQUAL, SearchResult
from jaxmllm.cluster.search.mesh_choices import MeshChoice
from jaxmllm.config.read import dump_config, load_config
from jaxmllm.data.batches import batch_examples, continued_examples
from jaxmllm.runtime.metrics import read_metrics
from jaxmllm.setup import chips
from jaxmllm.setup.ahead import OUTSIDE_STEPS, Memory
from jaxmllm.setup.build import staged_programs
from jaxmllm.setup.prepare import prepare
from jaxmllm.setup.sizing import pipeline_sizes, plan_spec
from jaxmllm.setup.spans import mesh_spans
from jaxmllm.tools import plan_check
from jaxmllm.tools.plan_counts import Count, conclusion
from jaxmllm.tools.plan_figures import plan_record, why_lost
from jaxmllm.tools.plan_layout import main
from jaxmllm.tools.sample_data import make_sample
from jaxmllm.train import main as train
from jaxmllm.training.history import segment_of, write_history
from sharding.mesh import make_mesh
from tests.training.drawing import drawing_config, make_pictures

CONFIG = """
run: {{directory: {data}/run, steps: 4, seed: 5}}
model:
  vision: {{width: 16, layers: 1, heads: 2, mlp_width: 32}}
  audio: {{width: 16, layers: 1, heads: 2, mlp_width: 32, mel_bins: 8, chunk_frames: 32}}
  language: {{width: 32, layers: 1, heads: 4, kv_heads: 2, head_size: 8, mlp_width: 48}}
data:
  sources: [{{name: sample, path: {data}/train.jsonl}}]
  batch_size: 16
phases:
  vision: {{block: 32, row_classes: 1}}
  audio: {{block: 32, row_classes: 1}}
  language: {{block: 32, row_classes: 1}}
optimizer: {{learning_rate: 1e-3}}
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    data = tmp_path_factory.mktemp("sample")
    make_sample(data, seed=1, train=64, test=4)
    path = data / "config.yaml"
    path.write_text(CONFIG.format(data=data))
    return path


# Given rows need not be sized, which is what takes longest
SMALL = [
    f"phases.{phase}={{block: 64, capacities: [{slots}], spans: [1]}}"
    for phase, slots in (("vision", 16384), ("audio", 16384), ("language", 12288))
]


# The same for the model that draws, whose items are small
FEW = [
    f"phases.{phase}={{block: 32, capacities: [{slots}], spans: [1]}}"
    for phase, slots in (("vision", 128), ("language", 256), ("diffusion", 256))
]


def plan(config_file, *words, devices=8, cluster="cpu"):
    """Run the command on a config, and return its exit code."""
    command = ["--config", str(config_file), "--devices", str(devices), "--cluster", cluster]
    return main([*command, *words])


@pytest.fixture(scope="module")
def out(config_file):
    """The folder of a plan on 8 devices with fsdp 2, made by the command."""
    folder = config_file.with_name("plan")
    assert plan(config_file, "--out", str(folder), "mesh={fsdp: 2, context: 1}") == 0
    return folder


def test_a_run_of_the_plan_has_the_rows_that_were_planned(out):
    config = load_config(out / "plan.yaml")
    record = json.loads((out / "plan.json").read_text())
    assert config.mesh.fsdp == 2 and config.mesh.model_dump() == record["layouts"][0]["mesh"]
    assert len(record["steps"]) == 5
    assert_planned_as_run(out, 8)


def test_rows_that_ranks_share_hold_what_a_run_of_the_plan_does(config_file, tmp_path):
    """A row that several ranks hold together takes items that no row of one rank could hold."""
    rows = "phases.language={block: 32, max_capacity: 128, row_classes: 1}"
    arguments = ["mesh={fsdp: 1, tensor: 1}", "pipeline.stages=1", *SMALL[:2], rows]
    assert plan(config_file, "--out", str(tmp_path), *arguments, devices=2) == 0
    assert_planned_as_run(tmp_path, 2)
    # With context 2, one rank holds each row in two parts, and no other rank could share it
    (reason,) = json.loads((tmp_path / "plan.json").read_text())["rejected"]
    assert "examples are refused" in reason


def test_what_compilers_say_takes_the_place_of_estimates(config_file, tmp_path, monkeypatch):
    """The compiler is a stand-in that says that layouts with fsdp 1 take too much."""
    budget = CLUSTERS["cpu"].budget

    def told(config, programs, chip):
        assert chip.name == "cpu" and programs.mesh.devices.size == 8
        size = int(budget) if config.mesh.fsdp == 1 else 1 << 20
        steps = [name for name in programs.jobs if name.function not in OUTSIDE_STEPS]
        return {name: Memory(0, 0, 0, size, 0) for name in steps}

    monkeypatch.setattr("jaxmllm.tools.plan_check.compiled_memory", told)
    monkeypatch.setattr("jaxmllm.tools.plan_layout.only_compile", lambda: None)
    record = tmp_path / "plan.json"
    arguments = ["--generated", "--check", "1", "--json", str(record), *SMALL]
    assert plan(config_file, *arguments, "mesh={context: 1, tensor: 1, data: -1}") == 0
    plans = json.loads(record.read_text())
    chosen, *unchecked = plans["layouts"]
    assert plans["checked"]["not_checked"] is None
    assert chosen["mesh"]["fsdp"] > 1 and chosen["peak_moment"] == "compiled"
    assert 1 << 20 <= chosen["peak_parts"]["program"] < budget
    struck = plans["struck_out"]
    assert plans["checked"]["compiled"] == 1 + len(struck)
    assert all(layout["why_not"].startswith("over memory by") for layout in struck)
    assert all(layout["mesh"]["fsdp"] == 1 for layout in struck)
    assert all(layout["peak_moment"] != "compiled" for layout in unchecked)


@pytest.mark.slow
def test_programs_of_a_planned_layout_compile(config_file, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmllm.tools.plan_layout.only_compile", lambda: None)
    record = tmp_path / "plan.json"
    arguments = ["--generated", "--check", "1", "--json", str(record), *SMALL, "mesh={data: 2}"]
    assert plan(config_file, *arguments, devices=2) == 0
    layout = json.loads(record.read_text())["layouts"][0]
    assert layout["peak_moment"] == "compiled" and layout["peak_parts"]["program"] > 1 << 20


def test_layouts_in_stages_are_left_to_the_other_command():
    staged = SimpleNamespace(choice=MeshChoice(2, 1, 1, 1, stages=2))
    result = SearchResult(ranked=[staged])
    checked = plan_check.check(result, SimpleNamespace(cluster=CLUSTERS["h100"]), 2)
    assert (checked.compiled, checked.staged, result.ranked) == (0, 1, [staged])
    assert "1 in stages: give their plan.yaml to `jaxmllm check`" in checked.line


def test_without_a_compiler_the_plan_goes_on(config_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jaxmllm.tools.plan_layout.only_compile", lambda: None)
    record = tmp_path / "plan.json"
    arguments = ["--generated", "--check", "2", "--json", str(record), *SMALL, "mesh={data: 8}"]
    assert plan(config_file, *arguments, cluster="a100") == 0
    assert "not checked by a compiler" in capsys.readouterr().out
    assert "NVIDIA A100" in json.loads(record.read_text())["checked"]["not_checked"]


@pytest.mark.parametrize(
    ("installed", "says"),
    [(False, "needs jax_plugins.xla_cuda12"), (True, "of jaxlib's version")],
)
def test_without_the_plugins_wheels_the_plan_goes_on(
    config_file, tmp_path, monkeypatch, capsys, installed, says
):
    """Both without the wheels and with wheels of another version."""
    monkeypatch.setattr("jaxmllm.tools.plan_layout.only_compile", lambda: None)
    monkeypatch.setattr(chips, "_installed", lambda package: installed)
    monkeypatch.setattr(chips, "_version", lambda wheel: "0.9.7")
    record = tmp_path / "plan.json"
    arguments = ["--generated", "--check", "1", "--json", str(record), *SMALL, "mesh={data: 8}"]
    assert plan(config_file, *arguments, cluster="h100") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if says in line]
    assert line.startswith("not checked by a compiler, bytes of all layouts are estimates: ")
    plans = json.loads(record.read_text())
    assert says in plans["checked"]["not_checked"] and plans["layouts"][0]["step_s"] > 0


def test_every_layout_says_why_it_lost(out):
    chosen, *losers = json.loads((out / "plan.json").read_text())["layouts"]
    assert chosen["why_not"] is None and losers and all(layout["why_not"] for layout in losers)
    for layout in (chosen, *losers):
        assert sum(layout["parts"].values()) == pytest.approx(layout["step_s"])


def test_the_layouts_are_drawn(out):
    with Image.open(out / "plan.png") as image:
        size = image.size
        assert len(image.getcolors()) > 8
    page = (out / "plan.html").read_text()
    layouts = json.loads((out / "plan.json").read_text())["layouts"]
    assert size[0] > 1000 and page.count("<tr>") == 2 * (1 + len(layouts))
    reasons = {layout["why_not"] for layout in layouts[1:]}
    assert "Chosen: <b>" in page and all(html.escape(reason) in page for reason in reasons)


def test_a_layout_that_takes_as_long_lost_by_its_axes():
    chosen, runner_up = (SimpleNamespace(seconds=seconds) for seconds in (1, 1 + EQUAL / 2))
    assert why_lost(runner_up, chosen) == "as fast, with no fewer axes"


def test_experts_are_planned_where_the_axis_divides_them(config_file, tmp_path):
    record = tmp_path / "plan.json"
    experts = "model.language.experts={count: 4, per_token: 2}"
    arguments = [
        "--generated",
        "--json",
        str(record),
        *SMALL,
        experts,
        "mesh={context: 1, tensor: 1}",
    ]
    assert plan(config_file, *arguments, "pipeline.stages=1", cluster="h100") == 0
    plans = json.loads(record.read_text())
    assert {layout["mesh"]["fsdp"] for layout in plans["layouts"]} <= {1, 2, 4}
    assert any("experts" in reason for reason in plans["rejected"])
    for layout in plans["layouts"]:
        assert sum(layout["parts"].values()) == pytest.approx(layout["step_s"])
        assert (layout["parts"]["language/inside"] > 0) == (layout["mesh"]["fsdp"] > 1)


def test_stems_of_convolutions_along_time_and_mels_are_planned(config_file, tmp_path):
    """More channels of the stem take more bytes and more time."""
    peaks = []
    for channels in (8, 64):
        record = tmp_path / f"{channels}.json"
        stem = f"model.audio.stem_channels={channels}"
        arguments = ["--generated", "--json", str(record), *SMALL, stem, "mesh={data: 8}"]
        assert plan(config_file, *arguments, cluster="h100") == 0
        (layout,) = json.loads(record.read_text())["layouts"]
        assert sum(layout["parts"].values()) == pytest.approx(layout["step_s"])
        peaks.append((layout["peak_bytes"], layout["parts"]["audio/compute"]))
    assert peaks[1] > peaks[0] and peaks[1][1] > peaks[0][1]


@pytest.fixture(scope="module")
def drawing_file(tmp_path_factory):
    """The config of a model that draws, without a mesh, which is left for the plan."""
    folder = tmp_path_factory.mktemp("drawing")
    make_pictures(folder)
    config = drawing_config(folder)
    config.pop("mesh", None)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def assert_planned_as_run(folder, devices):
    """Assert that the steps of the plan are those that a run of its config makes."""
    config = load_config(folder / "plan.yaml")
    record = json.loads((folder / "plan.json").read_text())
    mesh = make_mesh(config.mesh_sizes, jax.devices()[:devices], mesh_spans(config))
    inputs = prepare(config, mesh)
    spec = plan_spec(config, inputs)
    assert record["steps"]
    for step, predicted in enumerate(record["steps"]):
        items = inputs.corpus.gather(batch_examples(inputs.order, config.data.batch_size, step))
        assert json.loads(json.dumps(plan_record(plan_step(items, spec)))) == predicted


def test_a_model_that_draws_is_planned(drawing_file, tmp_path):
    arguments = ["--out", str(tmp_path), "mesh={fsdp: 2, context: 1, tensor: 1}", *FEW]
    assert plan(drawing_file, *arguments, devices=4) == 0
    layouts = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    for layout in layouts:
        assert sum(layout["parts"].values()) == pytest.approx(layout["step_s"])
        assert layout["parts"]["diffusion/compute"] > 0
    assert_planned_as_run(tmp_path, 4)


@pytest.mark.slow
def test_a_model_that_draws_is_planned_in_stages(drawing_file, tmp_path):
    arguments = ["--out", str(tmp_path), "mesh={data: 2}", "pipeline.stages=2", *FEW]
    assert plan(drawing_file, *arguments, devices=4) == 0
    (layout,) = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    assert layout["stages"] == 2 and layout["parts"]["diffusion/compute"] > 0
    assert sum(layout["parts"].values()) == pytest.approx(layout["step_s"])


@pytest.mark.slow
def test_a_plan_is_a_run(config_file, tmp_path, capsys):
    """Trained without edits, the plan's config logs the rows, capacities and real tokens that were
    planned.

    Fitted to the run, the prediction is what was measured.
    """
    folder = tmp_path / "plan"
    run = f"run.directory={tmp_path / 'run'}"
    arguments = ["--out", str(folder), "run.steps=10", run, "mesh={context: 1, tensor: 1}"]
    assert plan(config_file, *arguments) == 0
    planned = json.loads((folder / "plan.json").read_text())["steps"]
    assert train(["--config", str(folder / "plan.yaml")]) == 0
    logged = {record["step"]: record for record in read_metrics(tmp_path / "run")}
    assert len(planned) == 5
    for step_number, predicted in enumerate(planned, 1):
        # A run logs how many rows have each capacity, where the plan lists capacities by microbatch
        for phase in ("vision", "audio", "language"):
            capacities = predicted.pop(f"{phase}/capacities")
            rows = {name for name in predicted if name.startswith(f"{phase}/rows_of_")}
            assert {str(slots) for slots in capacities} <= {
                name.split("_of_")[1].partition("x")[0]
                for name in rows
                if logged[step_number][name]
            }
        assert predicted.items() <= logged[step_number].items()
        assert any(name.endswith("/real_token_fraction") for name in predicted)
    capsys.readouterr()
    fitted = tmp_path / "fitted"
    arguments = ["--from-run", str(tmp_path / "run"), "--cluster", "cpu", "--out", str(fitted)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "are exactly those planned" in printed
    *_, step = json.loads((fitted / "plan.json").read_text())["run"]
    assert step["predicted_s"] == pytest.approx(step["measured_s"], rel=0.05)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--cluster", "h10"], 2, "there is no cluster 'h10'; did you mean h100?"),
        (["language.width=4"], 1, "unknown key 'language'"),
        (["pipeline.stages=3"], 1, "pipeline.stages 3"),
        (["pipeline.stages=2", "--check", "1"], 1, "`jaxmllm check`"),
        (["mesh={data: 3}"], 1, "mesh.data 3 need a multiple of 3 devices, not 8"),
        (["--devices", "13", "data.batch_size=4", "mesh={context: 1}"], 1, "raise it to 13"),
        (
            [f"components.{name}.freeze=true" for name in ("vision", "audio", "language")]
            + ["components.projector.vision.freeze=true", "components.projector.audio.freeze=true"],
            1,
            "every component is frozen",
        ),
        (["balance.calibration=none.json"], 1, "make it with jaxmllm calibrate"),
        (["mesh={data: 1, fsdp: 1, context: 1}", "--devices", "6"], 1, "say --devices 2"),
        (["mesh={tensor: 8}"], 1, "kv_heads of language, 2"),
        (["mesh={data: 8}", "mesh.fsdp=2"], 1, "mesh.data 8, mesh.fsdp 2 need a multiple of 16"),
    ],
)
def test_what_cannot_be_planned_is_one_line(config_file, capsys, words, code, says):
    assert plan(config_file, "--generated", *words) == code
    error = capsys.readouterr().err.strip()
    assert says in error.splitlines()[-1] and error.splitlines()[-1].startswith("error: ")


def test_where_nothing_fits_the_line_says_what_would_do(config_file, tmp_path, capsys):
    """The closest layout, what it lacks, and how many devices would do; state alone is 0.7 MB."""
    cluster = tmp_path / "small.yaml"
    cluster.write_text("like: h100\nmemory: 4.0e+6\n")
    arguments = [
        "--generated",
        "mesh={data: 1, context: 1, tensor: 1}",
        "pipeline.stages=1",
        *SMALL,
    ]
    assert plan(config_file, *arguments, devices=2, cluster=str(cluster)) == 1
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("error: nothing fits 2 devices") and "GB in" in error


def test_a_chip_without_a_peak_is_one_line(config_file, tmp_path, capsys):
    cluster = tmp_path / "unknown.yaml"
    cluster.write_text("like: h100\ndevice_kind: XPU 9\n")
    assert plan(config_file, "--generated", "mesh={data: 8}", *SMALL, cluster=str(cluster)) == 1
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error == "error: cluster unknown: no peak for float32 on XPU 9; give peak_flops"


def test_a_calibration_of_something_else_is_named(config_file, tmp_path, capsys):
    coefficients = {"row": 1e-3, "slot": 1e-6, "linear": 0, "quadratic": 0, "residual": 0}
    cost = {"linear": 1, "quadratic": 1}
    phase = {
        "dtype": "float32",
        "capacities": [128],
        "flops": cost,
        "forward": coefficients,
        "training": coefficients,
    }
    record = dict.fromkeys(("package", "jax", "jaxlib", "platform", "date"), "") | {
        "device": "other",
        "mesh": {"data": 4},
        "phases": dict.fromkeys(("vision", "audio", "language"), phase),
    }
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(record))
    assert plan(config_file, "--generated", f"balance.calibration={path}", cluster="h100") == 1
    error = capsys.readouterr().err
    for message in (
        "on 'other'",
        "another model",
        "on 4 devices, but there are 8",
        "balance.calibration=null",
    ):
        assert message in error


def test_batches_without_some_media_are_noted(config_file, capsys):
    text = config_file.with_name("text.jsonl")
    lines = config_file.with_name("train.jsonl").read_text().splitlines()
    text.write_text("\n".join(line for line in lines if "audio" not in line) + "\n")
    assert plan(config_file, f"data.sources=[{{name: text, path: {text}}}]", "mesh={data: 8}") == 0
    assert "note: no audio items in the sampled batches" in capsys.readouterr().err


def test_a_run_is_predicted_at_the_efficiency_that_it_shows(out, tmp_path, capsys):
    """The run is written by hand: the planned steps, with seconds that rise by 0.01 per step."""
    config = load_config(out / "plan.yaml")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    steps = json.loads((out / "plan.json").read_text())["steps"]
    records = [
        {"step": step_number, "step_seconds": 0.5 + 0.01 * step_number} | planned
        for step_number, planned in enumerate(steps, 1)
    ]
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    fitted = tmp_path / "fitted"
    assert main(["--from-run", str(folder), "--cluster", "cpu", "--out", str(fitted)]) == 0
    *phase_lines, step = json.loads((fitted / "plan.json").read_text())["run"]
    # The median of the two steps after warm-up, which take 0.54 and 0.55 seconds
    assert step["measured_s"] == pytest.approx(0.545)
    assert step["predicted_s"] == pytest.approx(0.545, rel=0.05)
    for line in phase_lines[:3]:
        assert line["planned_rows"] == line["logged_rows"]
        assert line["planned_real_token_fraction"] == line["logged_real_token_fraction"]
    cluster = cluster_of(str(fitted / "cluster.yaml"))
    assert cluster.efficiency.share < 0.5 and cluster.memory == CLUSTERS["cpu"].memory
    printed = capsys.readouterr().out
    assert "predicted with an efficiency of 0.5" in printed
    assert "all 2 steps are exactly those planned" in printed
    assert any("/rows_of_" in name for name in steps[0])
    # Logged rows that differ from the planned ones are told
    records[4]["language/rows"] += 1
    (folder / "metrics.jsonl").write_text("".join(json.dumps(logged) + "\n" for logged in records))
    assert main(["--from-run", str(folder), "--cluster", "cpu"]) == 0
    assert "of 2 steps, other than planned: language/rows in 1" in capsys.readouterr().out
    # Two steps are all warm-up, and leave nothing to fit to
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    assert main(["--from-run", str(folder), "--cluster", "cpu"]) == 1
    assert "let it run longer" in capsys.readouterr().err


def test_a_run_whose_batch_size_changed_is_predicted_from_then_on(out, tmp_path, capsys):
    """The cluster comes from a file, and the fitted record stands without that file."""
    config = load_config(out / "plan.yaml", ["data.batch_size=8"])
    folder = tmp_path / "run"
    first_step = 2
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    history = [replace(segment_of(config), batch_size=16), segment_of(config, first_step)]
    write_history(folder, history)
    inputs = prepare(config, make_mesh(config.mesh_sizes, spans=mesh_spans(config)))
    spec = plan_spec(config, inputs)
    records = [{"step": 1, "step_seconds": 100.0}, {"step": 2, "step_seconds": 100.0}]
    for step in range(first_step, first_step + 5):
        examples = continued_examples(inputs.corpus.members, config.run.seed, history, step)
        planned = plan_record(plan_step(inputs.corpus.gather(examples), spec))
        records.append({"step": step + 1, "step_seconds": 0.5} | planned)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(logged) + "\n" for logged in records))
    cluster = tmp_path / "mine.yaml"
    cluster.write_text("like: cpu\nmemory: 16e9\n")
    fitted = tmp_path / "fitted"
    arguments = ["--from-run", str(folder), "--cluster", str(cluster), "--out", str(fitted)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "all 2 steps are exactly those planned" in printed
    assert "a step took 0.5 s, the median of 2;" in printed
    # The fitted record must not refer to the file that it began from
    cluster.unlink()
    fitted_cluster = cluster_of(str(fitted / "cluster.yaml"))
    assert (
        fitted_cluster.memory == 16e9
        and fitted_cluster.efficiency.share < 0.5
        and fitted_cluster.name == "cluster"
    )
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(logged) + "\n" for logged in records[:5])
    )
    assert main(arguments[:2]) == 1
    assert "3 steps are logged from step 3 on" in capsys.readouterr().err


STAGED = [*SMALL, "pipeline.stages=2", "mesh={fsdp: 1, context: 1, tensor: 1}"]


@pytest.mark.slow
def test_a_run_in_stages_has_the_rows_that_were_planned(config_file, tmp_path):
    assert plan(config_file, "--out", str(tmp_path), *STAGED, devices=4) == 0
    record = json.loads((tmp_path / "plan.json").read_text())
    (layout,) = record["layouts"]
    assert layout["stages"] == 2 and layout["mesh"]["data"] == 2
    assert layout["parts"]["bubble"] >= 0 and layout["parts"]["sends"] > 0
    assert sum(layout["parts"].values()) == pytest.approx(layout["step_s"])
    config = load_config(tmp_path / "plan.yaml")
    inputs = prepare(config, make_mesh(config.mesh_sizes, jax.devices()[:4]))
    sizes = pipeline_sizes(config, inputs)
    for step, predicted in enumerate(record["steps"]):
        items = inputs.corpus.gather(batch_examples(inputs.order, config.data.batch_size, step))
        planned = plan_record(plan_pipeline(items, sizes.spec, sizes.training))
        assert json.loads(json.dumps(planned)) == predicted
    programs = staged_programs(
        config, inputs.model, inputs.corpus.formats, sizes, len(inputs.corpus.sources)
    )
    assert layout["peak_bytes"] == programs_peak(programs).bytes


@pytest.mark.slow
@pytest.mark.exhaustive
def test_stages_are_simulated_under_the_mode_that_they_have(config_file, tmp_path):
    record = tmp_path / "modes.json"
    arguments = ["--generated", "--simulate", "--json", str(record), *STAGED]
    assert plan(config_file, *arguments, "mesh={data: 2}", devices=4, cluster="h100") == 0
    modes = json.loads(record.read_text())["modes"]
    assert [(mode["mode"], mode["stages"]) for mode in modes] == [("phases", 2)]


@pytest.mark.slow
def test_every_balance_mode_is_simulated(config_file, tmp_path):
    record = tmp_path / "modes.json"
    arguments = ["--generated", "--simulate", "--json", str(record), "mesh={data: 8}"]
    assert plan(config_file, *arguments, cluster="h100") == 0
    modes = {mode["mode"]: mode for mode in json.loads(record.read_text())["modes"]}
    assert [*modes] == ["none", "tokens", "language", "phases"]
    assert all(
        mode["step_s"] == pytest.approx(sum(mode["parts"].values())) for mode in modes.values()
    )
    assert modes["phases"]["step_s"] <= modes["none"]["step_s"]


def test_modes_that_rows_of_several_ranks_leave_out_are_lines(config_file, tmp_path, capsys):
    record = tmp_path / "modes.json"
    rows = [word.replace("spans: [1]", "spans: [2]") for word in SMALL]
    arguments = ["--generated", "--simulate", "--json", str(record), *rows, "mesh={data: 2}"]
    assert plan(config_file, *arguments, devices=2, cluster="h100") == 0
    simulated, *refused = json.loads(record.read_text())["modes"]
    assert simulated["mode"] == "phases" and simulated["step_s"] > 0
    assert [mode["mode"] for mode in refused] == ["none", "tokens", "language"]
    printed = capsys.readouterr().out
    for mode in refused:
        assert "every row lies on one rank; leave spans out" in mode["why_not"]
        assert f"balance.mode {mode['mode']} is not simulated: {mode['why_not']}" in printed
    # As the mode of the config, it is an error
    assert plan(config_file, *arguments, "balance.mode=none", devices=2, cluster="h100") == 1
    assert "every row lies on one rank" in capsys.readouterr().err


def test_batches_are_profiled(config_file, capsys):
    assert plan(config_file, "--generated", "--profile", "mesh={data: 8}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "devices of vision : audio : language"
    assert lines[1].startswith("batches of 512 examples")
    assert any("warning: data.batch_size (16) is below" in line for line in lines)
    assert main(["--config", str(config_file), "--devices", "2", "--generated", "--profile"]) == 1
    assert "3 phases cannot share 2 devices" in capsys.readouterr().err


@pytest.mark.slow
def test_numbers_of_devices_are_compared(config_file, tmp_path, capsys):
    """The cheapest and the fastest are named, and why a number has no layout."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("like: cpu\nprice_per_hour: 2.0\n")
    arguments = [*SMALL, "--out", str(tmp_path / "plan"), "mesh={fsdp: 2, context: 1, tensor: 1}"]
    assert plan(config_file, *arguments, devices="4,3,2", cluster=str(cluster)) == 0
    counts = json.loads((tmp_path / "plan" / "plan.json").read_text())["counts"]
    two_devices, three_devices, four_devices = counts
    assert three_devices.keys() == {"devices", "why_not"} and "mesh" in three_devices["why_not"]
    for compared in (two_devices, four_devices):
        hours = 1000 * compared["step_s"] * compared["devices"] / 3600
        assert compared["device_hours"] == pytest.approx(hours)
        assert compared["price"] == pytest.approx(2 * hours)
    assert "cheapest" in capsys.readouterr().out
    for name in ("counts.png", "counts.html"):
        assert (tmp_path / "plan" / name).stat().st_size


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (
            {8: 2.0, 16: 1.25},
            "8 devices are the cheapest; 16 are 1.60 times as fast for 25 % more device hours",
        ),
        ({8: 2.0, 16: 2.5}, "8 devices are the cheapest and the fastest"),
    ],
)
def test_more_devices_are_faster_and_dearer(seconds, said):
    counts = [
        Count(devices, None, SimpleNamespace(seconds=step)) for devices, step in seconds.items()
    ]
    assert conclusion([*counts, Count(12, None, None, "no mesh")]) == said
