"""What a run says of itself when it begins, and starts that are killed at any write.

Each of these leaves a folder in which the run can begin.
"""

import dataclasses
from pathlib import Path

import jax
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.runtime.checkpoint import Checkpoints
from jaxmllm.runtime.metrics import MetricsWriter
from jaxmllm.setup.build import build_run
from jaxmllm.training.begin import begin
from jaxmllm.training.run_folder import check_folder, read_config
from tests.support import EXHAUSTIVE, tiny_config


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


@pytest.fixture(scope="module")
def run(data):
    return build_run(parse_config(tiny_config(data)))


def test_a_run_names_the_kernel_that_attends_in_each_phase(run):
    lines = [line for line in run.describe().splitlines() if line.endswith("attention kernel cpu")]
    assert [line.partition(":")[0] for line in lines] == ["vision", "audio", "language"]


def test_a_run_tells_what_its_encoders_keep(run, monkeypatch):
    assert "residuals" not in run.describe()
    monkeypatch.setattr(run.programs, "kept_residuals", {"audio": 2})
    (line,) = (line for line in run.describe().splitlines() if "residuals" in line)
    assert line.startswith("audio: ") and "residuals of up to 2 microbatches kept" in line


def test_a_run_tells_which_rows_nodes_keep_to_one_rank(run):
    assert "nodes" not in run.describe()
    confined = dataclasses.replace(run, left_alone=("vision", "audio"))
    (line,) = (line for line in confined.describe().splitlines() if "nodes" in line)
    assert "vision, audio" in line and "balance.spans_cross_nodes" in line


@pytest.mark.slow
def test_a_run_tells_which_gradients_stay_whole(data):
    step = {f"components__{name}__reduce": "step" for name in ("audio", "language")}
    config = parse_config(tiny_config(data, mesh={"fsdp": 8, "data": 1}, **step))
    run = build_run(config)
    (line,) = (line for line in run.describe().splitlines() if line.startswith("gradients"))
    parameter_count = sum(leaf.size for leaf in jax.tree.leaves(run.programs.params["audio"]))
    assert f"audio {4 * parameter_count / 1e9:.2f} GB, language" in line and "vision" not in line


@pytest.mark.parametrize("renamed", [True, False], ids=["after", "before"])
@pytest.mark.parametrize(
    "writes",
    [
        1,
        *(pytest.param(write, marks=EXHAUSTIVE) for write in (2, 3, 5)),
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_a_start_that_is_killed_can_be_begun_again(run, tmp_path, monkeypatch, writes, renamed):
    """The process is killed after or before the n-th file takes its final name."""
    config = run.config.model_copy(
        update={"run": run.config.run.model_copy(update={"directory": str(tmp_path / "run")})}
    )
    run = dataclasses.replace(run, config=config)
    replace = Path.replace
    replaced = []

    def killed(draft: Path, target: Path) -> None:
        replaced.append(target)
        if len(replaced) < writes or renamed:
            replace(draft, target)
        if len(replaced) == writes:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            start(run)
    # The writes are those of the run folder itself
    assert all(target.parent == run.directory for target in replaced)
    checked = check_folder(config, resume=True)
    start(dataclasses.replace(run, config=checked))
    assert read_config(run.directory) == checked


def start(run) -> None:
    """Begin a run in its folder."""
    with (
        Checkpoints(run.directory / "checkpoints", 2) as checkpoints,
        MetricsWriter(run.directory, tensorboard=False) as writer,
    ):
        _, _, step = begin(run, checkpoints, writer)
    assert step == 0
