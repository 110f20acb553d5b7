"""Two processes of four devices train as one process of eight does."""

import json
import os
import subprocess
import sys

import numpy as np
import yaml

from jaxmllm.config import parse_config
from jaxmllm.training.build import build_run
from jaxmllm.training.loop import train
from tests.support import tiny_config, train_command


def test_two_processes_train_as_one(data, tmp_path):
    tree = tiny_config(data, run={"directory": str(tmp_path / "two"), "steps": 6}, checkpoint={"every": 3})
    tree |= {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "evaluation": {"every": 3}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    launcher = [sys.executable, "-m", "launch.local", "--processes", "2", "--devices", "4", "--"]
    environment = os.environ | {"NPROC": "16"}
    ran = subprocess.run(
        [*launcher, *train_command(config)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]

    tree["run"]["directory"] = str(tmp_path / "one")
    train(build_run(parse_config(tree)))
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [record["step"] for record in one] == [record["step"] for record in two] == [1, 2, 3, 3, 4, 5, 6, 6]
    for key in ("loss", "gradient_norm", "eval/loss", "eval/exact_match/text"):
        values = [[record[key] for record in records if key in record] for records in (one, two)]
        assert len(values[0]) in (2, 6)
        np.testing.assert_allclose(values[1], values[0], rtol=2e-5, err_msg=key)
