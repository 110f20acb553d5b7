"""The share of a GPU's memory that JAX may take."""

import pytest

from jaxmllm.runtime.gpu_memory import TAKEN_SHARE, take_gpu_memory


def test_jax_takes_what_plans_count_on():
    environment = {}
    take_gpu_memory(environment)
    assert environment == {"XLA_CLIENT_MEM_FRACTION": str(TAKEN_SHARE)}


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_what_the_environment_says_stays(name):
    environment = {name: "0.5"}
    take_gpu_memory(environment)
    assert environment == {name: "0.5"}
