"""Comparisons on generated lengths take the model, layouts and rows from a config."""

from __future__ import annotations

import pytest

from jaxmllm.config.read import load_config
from jaxmllm.tools import balance_comparison as comparison


@pytest.mark.slow
def test_generated_lengths_on_the_layouts_of_a_config(balance_config):
    config = load_config(balance_config, ["phases.language.max_capacity=65536"])
    compared = comparison.compare_on_generated(
        config, "name", ranks=4, per_rank=2, seed=3, before="none"
    )
    assert (
        compared.after.phases["vision"].ranks == 8 and compared.after.phases["language"].ranks == 4
    )
    assert (
        set(compared.items.phases) == {"vision", "language"} and len(compared.items.examples) == 8
    )
    assert compared.after.phases["language"].capacities[0] % 32 == 0
