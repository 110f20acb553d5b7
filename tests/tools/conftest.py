"""One generated batch, planned with and without balancing, and one small config with data."""

from __future__ import annotations

import pytest

from jaxmllm.tools import balance_comparison, balance_report
from jaxmllm.tools.sample_data import make_sample

BALANCE_CONFIG = """
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


@pytest.fixture(scope="session")
def balance_config(tmp_path_factory):
    """The file of a small config with data, whose encoder also splits its rows over tensor."""
    data = tmp_path_factory.mktemp("sample")
    make_sample(data, seed=1, train=64, test=4)
    path = data / "config.yaml"
    path.write_text(BALANCE_CONFIG.format(data=data))
    return path


@pytest.fixture(scope="session")
def compared():
    """A generated batch of 8 examples on each of 4 ranks, without and with balancing."""
    return balance_comparison.compare_generated(4, 8, seed=1, before="none")


@pytest.fixture(scope="session")
def balance(compared):
    """The report of the generated batch."""
    return balance_report.make_report(compared)
