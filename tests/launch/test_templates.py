"""Templates for Slurm and Kubernetes: what they tell processes, and when a job is queued again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).parents[2] / "launch"
VARIABLES = ("JAXMLLM_COORDINATOR", "JAXMLLM_PROCESSES", "JAXMLLM_PROCESS_ID")


def script(path: Path, text: str) -> None:
    """Write an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path):
    """A folder with stand-ins for Slurm's commands: two nodes with one
    task each, which run in turn."""
    script(tmp_path / "bin/scontrol", "#!/bin/sh\nprintf 'node-a\\nnode-b\\n'\n")
    tasks = 'while [ "${1#--}" != "$1" ]; do shift; done\nfor SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done\n'
    script(tmp_path / "bin/srun", f"#!/bin/sh\n{tasks}")
    show = f"import json, os, sys; print(json.dumps([*map(os.environ.get, {VARIABLES!r}), *sys.argv[1:]]))"
    script(
        tmp_path / "work/.venv/bin/python", f'#!/bin/sh\nexec {sys.executable} -c "{show}" "$@"\n'
    )
    slurm = {
        "SUBMIT_DIR": str(tmp_path / "work"),
        "JOB_NODELIST": "node-[a-b]",
        "JOB_ID": "45123",
        "NTASKS": "2",
    }
    return {
        **os.environ,
        **{f"SLURM_{name}": value for name, value in slurm.items()},
        "SLURM_CPUS_PER_TASK": "4",
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }


def test_slurm_tells_every_process_who_it_is_and_keeps_arguments_whole(cluster):
    arguments = ["configs/my.yaml", "--set", "data.sources=[{name: a b, path: c}]"]
    job = subprocess.run(
        ["bash", LAUNCH / "slurm.sh", *arguments], env=cluster, capture_output=True, text=True
    )
    assert job.returncode == 0, job.stderr
    commands = [json.loads(line) for line in job.stdout.splitlines()]
    command = ["-m", "jaxmllm", "train", "--resume=auto", "--config", *arguments]
    assert commands == [["node-a:25123", "2", str(process), *command] for process in range(2)]


@pytest.mark.parametrize(
    ("signal", "code", "requeued"),
    [("USR1", 0, True), ("USR1", 1, False), ("TERM", 0, False), (None, 0, False)],
)
def test_slurm_requeues_what_ran_out_of_time(cluster, tmp_path, signal, code, requeued):
    """A stand-in for srun signals the script, waits for TERM if that is
    passed on, and exits with a code."""
    send = f"kill -{signal} $PPID\n" if signal else ""
    wait_for_term = "while ! [ -e term ]; do sleep 0.05; done\n" if signal == "USR1" else ""
    script(
        tmp_path / "bin/srun",
        f"#!/bin/bash\ntrap 'touch term' TERM\n{send}{wait_for_term}exit {code}\n",
    )
    script(tmp_path / "bin/scontrol", f'#!/bin/sh\necho node-a; echo "$@" >> {tmp_path}/scontrol\n')
    job = subprocess.run(
        ["bash", LAUNCH / "slurm.sh", "my.yaml"], env=cluster, capture_output=True, timeout=60
    )
    assert job.returncode == code, job.stderr
    assert ("requeue 45123" in (tmp_path / "scontrol").read_text().splitlines()) == requeued


def test_slurm_asks_for_a_config(cluster):
    job = subprocess.run(["bash", LAUNCH / "slurm.sh"], env=cluster, capture_output=True, text=True)
    assert job.returncode == 2
    assert "usage: sbatch" in job.stderr


def test_kubernetes_numbers_and_names_agree():
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {item["name"]: item for item in container["env"]}
    assert set(variables) == {*VARIABLES, "JAXMLLM_STOPPED_CODE"}
    assert int(variables["JAXMLLM_STOPPED_CODE"]["value"]) > 0, (
        "an evicted pod is not one that is done"
    )
    assert container["args"][-1] == "--resume=auto"
    processes = int(variables["JAXMLLM_PROCESSES"]["value"])
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == processes
    host, port = variables["JAXMLLM_COORDINATOR"]["value"].split(":")
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}" and 1024 < int(port) < 65536
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
