"""The balance report: the files that it writes, and what its command accepts."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from jaxmllm.tools import balance_figures as figures
from jaxmllm.tools import balance_report as report


@pytest.fixture(scope="module")
def folder(balance, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    report.write(balance, folder)
    return folder


def rows_of(page, number):
    """Cells of one table of an HTML page, without its head."""
    body = re.findall(r"<tbody>(.*?)</tbody>", page, re.DOTALL)[number]
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]


def test_both_files_are_written_and_the_page_holds_the_picture(folder):
    picture = (folder / "balance.png").read_bytes()
    page = (folder / "balance.html").read_text(encoding="utf-8")
    assert np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).std() > 10
    assert base64.b64encode(picture).decode() in page
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)  # nothing is loaded from elsewhere


def test_the_page_has_the_tables(folder, balance):
    page = (folder / "balance.html").read_text(encoding="utf-8")
    assert rows_of(page, 0) == figures.table(balance.views)
    assert rows_of(page, 1) == figures.route_table(balance.routes)


def test_the_command_draws_data_of_a_config(balance_config, tmp_path, capsys):
    assert (
        report.main(["--config", str(balance_config), "--out", str(tmp_path), "data.batch_size=16"])
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "config.yaml, 2 data ranks, 16 examples per step" in out and "as long with mode none" in out
    )
    assert {path.name for path in tmp_path.iterdir()} == {"balance.png", "balance.html"}


@pytest.mark.parametrize(
    "command", [[], ["--generated", "run.seed=1"], ["--generated", "--ranks", "0"]]
)
def test_commands_that_make_no_sense_are_refused(command, capsys):
    with pytest.raises(SystemExit):
        report.main(command)
    assert "error" in capsys.readouterr().err


def test_batches_that_are_too_large_are_told_before_they_are_made(balance_config, capsys):
    """Whether the command or the config names the ranks and examples."""
    config_words = ["--config", str(balance_config), "--per-rank", "1048576"]
    for command in (
        ["--generated", "--ranks", "1048576"],
        config_words,
        [*config_words, "--generated"],
    ):
        assert report.main(command) == 1
        assert "a batch has at most 1048576; lower one of them" in capsys.readouterr().err


def test_user_errors_are_told_in_one_line(balance_config, capsys):
    assert report.main(["--config", str(balance_config), "data.batchsize=3"]) == 1
    assert "data.batch_size" in capsys.readouterr().err


def test_a_mode_whose_rows_do_not_hold_the_data_is_named(balance_config, tmp_path, capsys):
    command = ["--config", str(balance_config), "--out", str(tmp_path)]
    assert report.main([*command, "phases.language.max_capacity=96"]) == 1
    assert "error: --before none: there is nothing to compare with" in capsys.readouterr().err
