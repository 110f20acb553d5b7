"""Two processes of four devices train as one process of eight, and report all messages."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml

from jaxmllm.config.read import parse_config
from jaxmllm.setup.build import build_run
from jaxmllm.tools.sample_data import make_sample
from jaxmllm.training.loop import train
from tests.support import slow_cases, tiny_config, train_command


def in_two_processes(tree, folder):
    """Run the config by the launcher, and return the completed process with what it printed."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    launcher = [sys.executable, "-m", "launch.local", "--processes", "2", "--devices", "4", "--"]
    environment = os.environ | {"NPROC": "16"}
    command = [*launcher, *train_command(config)]
    return subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


def records_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# Context and stages lie across the processes: the axis of least stride is within a process, the
# first axis between processes
LAYOUTS = {
    "fsdp-tensor": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
    "context": {"mesh": {"data": 1, "fsdp": 1, "context": 8}},
    "context2": {"mesh": {"data": 2, "fsdp": 2, "context": 2}},
    "stages": {"mesh": {"data": 4}, "pipeline": {"stages": 2, "layout": "chain"}},
    # Rows of 8 ranks lie on both processes, and each of them fills such a row completely
    "spans": {
        "mesh": {"data": 4, "fsdp": 2},
        "phases": {
            name: {"block": 16, "capacities": [capacity], "spans": [1, 2, 8]}
            for name, capacity in {"vision": 16, "audio": 64, "language": 32}.items()
        },
        "balance": {"spans_cross_nodes": True},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    slow_cases({name: (name,) for name in LAYOUTS}, {"fsdp-tensor", "stages"}),
)
def test_two_processes_train_as_one(data, tmp_path, layout):
    """Batches are the same; losses, gradient norms and evaluations agree up to rounding."""
    tree = tiny_config(
        data, run={"directory": str(tmp_path / "two"), "steps": 6}, checkpoint={"every": 3}
    )
    tree |= LAYOUTS[layout] | {"evaluation": {"every": 3}}
    completed = in_two_processes(tree, tmp_path)
    assert completed.returncode == 0, completed.stdout[-5000:]

    tree["run"]["directory"] = str(tmp_path / "one")
    train(build_run(parse_config(tree)))
    single_records, double_records = (records_of(tmp_path / name) for name in ("one", "two"))
    assert (
        [record["step"] for record in single_records]
        == [record["step"] for record in double_records]
        == [1, 2, 3, 3, 4, 5, 6, 6]
    )
    batches = [
        [record["batch"] for record in records if "batch" in record]
        for records in (single_records, double_records)
    ]
    assert batches[0] == batches[1] and len(set(batches[0])) == 6, "the same examples in every step"
    for key in ("loss", "gradient_norm", "eval/loss", "eval/exact_match/text"):
        values = [
            [record[key] for record in records if key in record]
            for records in (single_records, double_records)
        ]
        assert len(values[0]) in (2, 6)
        np.testing.assert_allclose(values[1], values[0], rtol=2e-5, err_msg=key)


@pytest.mark.slow
def test_what_the_second_process_cannot_decode_is_named_before_both_end(tmp_path):
    """All pictures are broken, so both processes have some; the limit soon ends the run."""
    make_sample(tmp_path, train=96, test=24)
    for path in (tmp_path / "media").rglob("*.png"):
        content = path.read_bytes()
        path.write_bytes(content[: content.index(b"IDAT") + 4] + bytes(64))
    tree = tiny_config(
        tmp_path, run={"directory": str(tmp_path / "run"), "steps": 6}, mesh={"data": 8}
    )
    completed = in_two_processes(tree, tmp_path)
    assert completed.returncode != 0
    errors = [
        line for line in completed.stdout.splitlines() if "could not be decoded so far" in line
    ]
    assert errors and "Traceback" not in completed.stdout, completed.stdout[-3000:]
    message_records = [record for record in records_of(tmp_path / "run") if "message" in record]
    assert {record["process"] for record in message_records} == {0, 1} and {
        record["step"] for record in message_records
    } <= {1, 2}
    for record in message_records:
        line = f"step {record['step']}: process {record['process']}: {record['message']}"
        assert "masked: " in line and ".png" in line
        assert completed.stdout.index(line) < completed.stdout.index("could not be decoded so far")
    failed_media = next(record for record in records_of(tmp_path / "run") if "loss" in record)[
        "failed_media"
    ]
    assert failed_media == sum(record["step"] == 1 for record in message_records), (
        "few enough to be named one by one"
    )
