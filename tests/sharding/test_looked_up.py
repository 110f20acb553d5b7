"""The gradient of a table that is looked up, as GPUs compute it: no two
programs write to one place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.mesh import make_mesh
from sharding.parameters import looked_up, sorted_sums
from sharding.rules import Layout


@pytest.mark.parametrize("count", [1, 2, 37, 256])
@pytest.mark.parametrize("vocabulary", [1, 3, 100])
def test_sorted_sums_are_those_of_a_scatter(count, vocabulary):
    random = np.random.default_rng(count)
    rows = jnp.asarray(random.integers(0, vocabulary, (2, count)), jnp.int32)
    # Sums of whole numbers are exact in any order.
    entries = jnp.asarray(random.integers(-9, 9, (2, count, 5)), jnp.float32)
    zeros = jnp.zeros((vocabulary, 5))
    np.testing.assert_array_equal(
        jax.jit(sorted_sums)(zeros, rows, entries), zeros.at[rows].add(entries)
    )


def test_a_sum_of_many_entries_is_as_near_as_float32_allows():
    """Two rows of about 2,000 entries each, against a sum in float64."""
    random = np.random.default_rng(0)
    rows = jnp.asarray(random.integers(0, 2, 4096), jnp.int32)
    entries = random.standard_normal((4096, 8)).astype(np.float32)
    expected = np.zeros((2, 8))
    np.add.at(expected, np.asarray(rows), entries.astype(np.float64))
    sums = sorted_sums(jnp.zeros((2, 8)), rows, jnp.asarray(entries))
    np.testing.assert_allclose(sums, expected, atol=1e-4)


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_on_gpus_every_place_is_written_once(platform):
    layout = Layout(make_mesh({"data": 1}, jax.devices()[:1]), ())
    table = jnp.ones((11, 4))
    rows = jnp.zeros((1, 8), jnp.int32)

    def loss(table):
        return looked_up(layout, table, (None, None), rows, jnp.float32).sum()

    text = jax.jit(jax.grad(loss)).trace(table).lower(lowering_platforms=(platform,)).as_text()
    unique = re.findall(r'"stablehlo\.scatter".*?unique_indices = (true|false)', text, re.DOTALL)
    # Each place is written once if the indices of the scatter are unique.
    assert unique == (["true"] if platform == "cuda" else ["false"])
