"""The report: both files, and the numbers of the plans that it draws."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from jaxmllm.balance.step_plan import plan_step
from jaxmllm.config.read import load_config
from jaxmllm.tools import balance_comparison as comparison
from jaxmllm.tools import balance_drawing as drawing
from jaxmllm.tools import balance_figures as figures
from jaxmllm.tools import balance_report as report
from jaxmllm.tools.sample_data import make_sample

CONFIG = """
run: {{directory: {data}/run, steps: 4, seed: 5}}
model:
  vision: {{width: 16, layers: 1, heads: 2, mlp_width: 32}}
  language: {{width: 32, layers: 1, heads: 4, kv_heads: 2, head_size: 8, mlp_width: 48}}
data:
  sources: [{{name: sample, path: {data}/train.jsonl}}]
  batch_size: 8
  max_rejected: 1.0
phases: {{vision: {{block: 32}}, language: {{block: 32}}}}
mesh: {{data: 2, tensor: 2}}
components: {{vision: {{layout: {{batch: [data, fsdp, tensor], heads: [], mlp: []}}}}}}
optimizer: {{learning_rate: 1e-3}}
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    data = tmp_path_factory.mktemp("sample")
    make_sample(data, seed=1, train=64, test=4)
    path = data / "config.yaml"
    path.write_text(CONFIG.format(data=data))
    return path


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    compared = comparison.compare_generated(4, 8, seed=1, before="none")
    made = report.make_report(compared)
    report.write(made, folder)
    return compared, made, folder


def rows_of(page, number):
    """Cells of one table of an HTML page, without its head."""
    body = re.findall(r"<tbody>(.*?)</tbody>", page, re.DOTALL)[number]
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]


def test_both_files_are_written_and_the_page_holds_the_picture(generated):
    _, _, folder = generated
    picture, page = (folder / "balance.png").read_bytes(), (folder / "balance.html").read_text(encoding="utf-8")
    assert np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).std() > 10
    assert base64.b64encode(picture).decode() in page
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)  # nothing is loaded from elsewhere


def test_the_table_has_the_statistics_of_the_plans(generated):
    compared, written, folder = generated
    plans = {spec.mode: plan_step(compared.items, spec).statistics for spec in (compared.before, compared.after)}
    table = figures.table(written.views)
    assert rows_of((folder / "balance.html").read_text(encoding="utf-8"), 0) == table
    assert [row[:2] for row in table[:-2]] == [[p, m] for p in ("vision", "audio", "language") for m in plans]
    for phase, mode, gap, ratio, synchronised, rows, real, idle in table[:-2]:
        said = {name.removeprefix(f"{phase}/"): value for name, value in plans[mode].items()}
        assert float(ratio) == pytest.approx(said["max_over_mean"], abs=6e-4)
        assert float(gap) == pytest.approx(said["gap_to_floor"], abs=6e-4)
        assert float(synchronised) == pytest.approx(said["synchronised"], abs=6e-4)
        assert int(rows) == said["microbatches"]
        assert float(real.removesuffix(" %")) == pytest.approx(100 * said["real_token_fraction"], abs=0.06)
        assert float(idle.removesuffix(" %")) == pytest.approx(100 * (1 - 1 / said["synchronised"]), abs=0.06)


def test_the_exchange_is_told_by_mode(generated):
    """Four ranks are one node: no token changes node, and what stays with its example changes no rank."""
    compared, written, folder = generated
    shown = figures.route_table(written.routes)
    assert rows_of((folder / "balance.html").read_text(encoding="utf-8"), 1) == shown
    tokens = sum(int(compared.items.phases[phase].tokens.sum()) for phase in ("vision", "audio"))
    assert [row[0] for row in shown] == ["none", "phases"]
    assert all(float(row[1]) == pytest.approx(tokens * compared.token_bytes / 1e6, abs=0.06) for row in shown)
    moved = plan_step(compared.items, compared.after).statistics["route/vision/moved_tokens"]
    assert shown[0][2] == "-" and float(shown[1][2].removesuffix(" %")) == pytest.approx(100 * moved / tokens, abs=0.06)
    assert [row[3:5] for row in shown] == [["-", "-"]] * 2
    assert float(shown[1][5]) >= 1


def test_what_is_drawn_adds_up_to_the_batch(generated):
    compared, written, _ = generated
    for views in written.views.values():
        for phase, view in views.items():
            items, spec = compared.items.phases[phase], compared.after.phases[phase]
            assert view.real.sum() == items.real.sum()
            assert (view.real <= view.capacity[:, None]).all()
            length = items.length.astype(float)
            assert view.load.sum() == pytest.approx((spec.cost.linear * length + spec.cost.quadratic * length**2).sum())
    times = [sum(view.load.max(axis=1).sum() for view in views.values()) for views in written.views.values()]
    assert written.ratio == pytest.approx(times[0] / times[1])
    assert written.ratio > 1


def test_a_phase_without_items_is_left_out_of_the_picture(generated):
    _, written, _ = generated
    empty = figures.PhaseView(np.zeros((0, 4)), np.zeros((0, 4), np.int64), np.zeros(0, np.int64), {})
    views = {mode: {**view, "audio": empty} for mode, view in written.views.items()}
    assert len(drawing.draw(views, "no sound").axes) == 8
    assert figures.table(views)[2][2:] == ["-"] * 6


def test_many_ranks_are_drawn_costliest_first(tmp_path):
    compared = comparison.compare_generated(drawing.IN_ORDER + 2, 2, seed=1, before="tokens")
    views = {
        spec.mode: figures.view(plan_step(compared.items, spec), compared.items, spec)
        for spec in (compared.before, compared.after)
    }
    figure = drawing.draw(views, "many")
    assert "costliest first" in figure.axes[-1].get_xlabel()


def test_the_command_draws_data_of_a_config(config_file, tmp_path, capsys):
    assert report.main(["--config", str(config_file), "--out", str(tmp_path), "data.batch_size=16"]) == 0
    out = capsys.readouterr().out
    assert "config.yaml, 2 data ranks, 16 examples per step" in out and "as long with mode none" in out
    assert {path.name for path in tmp_path.iterdir()} == {"balance.png", "balance.html"}


def test_generated_lengths_on_the_layouts_of_a_config(config_file):
    config = load_config(config_file, ["phases.language.max_capacity=65536"])
    compared = comparison.compare_on_generated(config, "name", ranks=4, per_rank=2, seed=3, before="none")
    assert compared.after.phases["vision"].ranks == 8 and compared.after.phases["language"].ranks == 4
    assert set(compared.items.phases) == {"vision", "language"} and len(compared.items.examples) == 8
    assert compared.after.phases["language"].capacities[0] % 32 == 0


@pytest.mark.parametrize("command", [[], ["--generated", "run.seed=1"], ["--generated", "--ranks", "0"]])
def test_commands_that_make_no_sense_are_refused(command, capsys):
    with pytest.raises(SystemExit):
        report.main(command)
    assert "error" in capsys.readouterr().err


def test_user_errors_are_told_in_one_line(config_file, capsys):
    assert report.main(["--config", str(config_file), "data.batchsize=3"]) == 1
    assert "data.batch_size" in capsys.readouterr().err
