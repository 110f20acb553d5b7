"""A mixture of experts equals a dense loop over all experts, on one device and on
many, whatever is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmllm.experts import expert_blocks
from jaxmllm.experts.expert_blocks import Matrices, list_blocks
from jaxmllm.experts.experts import experts
from jaxmllm.runtime.compilations import CompilationCounter
from sharding.mesh import make_mesh
from sharding.rules import make_layout
from tests.support import slow_cases

ROWS = 8
SLOTS = 12
WIDTH = 6
MLP_WIDTH = 10
COUNT = 8


def inputs(k: int, routing: str = "random", count: int = COUNT, dtype=np.float64, seed: int = 0):
    """(x, chosen, weights, matrices). A fifth of the slots hold no token: their choice is `count`,
    which is no expert. With routing "one", every token chooses the first k experts."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((ROWS, SLOTS, WIDTH)).astype(dtype)
    scores = random.standard_normal((ROWS, SLOTS, count))
    if routing == "one":
        scores[..., :k] += 100
    chosen = np.argsort(-scores, axis=-1)[..., :k].astype(np.int32)
    chosen[random.random((ROWS, SLOTS)) < 0.2] = count
    weights = random.random(chosen.shape).astype(dtype)
    shapes = Matrices(
        (count, WIDTH, MLP_WIDTH), (count, WIDTH, MLP_WIDTH), (count, MLP_WIDTH, WIDTH)
    )
    matrices = Matrices(*(random.standard_normal(shape).astype(dtype) for shape in shapes))
    return x, chosen, weights, matrices


def dense(x, chosen, weights, matrices):
    """The reference: every expert on every token, weighted by zero where it is not chosen."""
    total = 0
    for expert in range(len(matrices.gate)):
        gate, up, down = (matrix[expert] for matrix in matrices)
        weight = jnp.where(chosen == expert, weights, 0).sum(-1, keepdims=True)
        total += weight * ((jax.nn.silu(x @ gate) * (x @ up)) @ down)
    return total


def layout_of(devices: int = 1, overrides=None, **mesh: int):
    return make_layout(make_mesh({"data": 1} | mesh, jax.devices()[:devices]), overrides)


def gradients(function, x, chosen, weights, matrices):
    """Gradients by x, weights and matrices of a sum that is not linear in the
    result, and the result."""

    def objective(x, weights, matrices):
        out = function(x, chosen, weights, matrices)
        return (out**2).sum() / 2, out

    grad = jax.jit(jax.grad(objective, argnums=(0, 1, 2), has_aux=True))
    return grad(x, weights, matrices)


def assert_equal(found, expected, tolerance):
    for leaf, expected_leaf in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(
            leaf, expected_leaf, atol=tolerance * np.abs(expected_leaf).max(), rtol=0
        )


@pytest.mark.parametrize("kernel", ["jax", "ragged_dot"])
@pytest.mark.parametrize(("k", "routing"), [(1, "one"), (3, "random")])
def test_results_and_gradients_are_those_of_a_dense_loop(kernel, k, routing):
    with jax.enable_x64(True):
        given = inputs(k, routing)
        layout = layout_of()
        results = gradients(lambda *given: experts(*given, layout, kernel), *given)
        assert_equal(results, gradients(dense, *given), 1e-10)
        assert not np.any(results[1][given[1][..., 0] == COUNT])


MESHES = {  # sizes, overrides of the layout
    "experts-2": ({"fsdp": 2}, {}),
    "experts-4": ({"data": 2, "fsdp": 4}, {}),
    "experts-8": ({"fsdp": 8}, {}),
    "tensor": ({"fsdp": 2, "tensor": 2, "context": 2}, {}),
    "own-axis": ({"fsdp": 2, "tensor": 4}, {"experts": ["tensor"], "mlp": []}),
    "whole": ({"fsdp": 4}, {"experts": []}),
}


@pytest.mark.parametrize("mesh, overrides", slow_cases(MESHES, ("experts-4", "tensor", "own-axis")))
def test_every_mesh_computes_the_same(mesh, overrides):
    given = inputs(2, dtype=np.float32)
    layout = layout_of(8, overrides, **{"data": -1} | mesh)
    results = gradients(lambda *given: experts(*given, layout), *given)
    assert_equal(results, gradients(dense, *given), 1e-5)


def test_frozen_matrices_cost_no_gradients():
    """Matrix products of a block: 3 forward; backward 3 for the gradient of x and 2 computed again,
    and 3 for the matrices where they are trained."""
    x, chosen, weights, matrices = inputs(2, dtype=np.float32)
    layout = layout_of()
    objective = lambda x, matrices: experts(x, chosen, weights, matrices, layout).sum()  # noqa: E731
    frozen, trained = (jax.grad(objective, argnums) for argnums in (0, (0, 1)))
    products = [str(jax.make_jaxpr(f)(x, matrices)).count("dot_general") for f in (frozen, trained)]
    assert products == [8, 11]
    expected = jax.grad(lambda x: dense(x, chosen, weights, matrices).sum())(x)
    assert_equal(jax.jit(frozen)(x, matrices), expected, 1e-5)


@pytest.mark.parametrize("routing", ["random", "one"])
def test_blocks_hold_every_pair_of_own_experts_once(routing):
    """Blocks of at most 8 pairs (token, expert), each of one expert."""
    _, chosen, _, _ = inputs(3, routing)
    shifted = chosen.reshape(-1, 3) - 2  # this device holds experts 2 to 5
    blocks = jax.device_get(list_blocks(jnp.array(shifted), 4, 8))
    pairs_held = []
    for block in range(int(blocks.number)):
        begin = blocks.begin[block]
        end = blocks.end[block]
        assert 0 < end - begin <= 8
        pairs = blocks.pairs[begin:end]
        assert (shifted.reshape(-1)[pairs] == blocks.expert[block]).all()
        pairs_held += [*pairs]
    assert (
        sorted(pairs_held)
        == np.flatnonzero((shifted.reshape(-1) >= 0) & (shifted.reshape(-1) < 4)).tolist()
    )


@pytest.mark.parametrize("devices", [1, 4])
def test_blocks_have_the_rows_of_an_expert_however_many_devices_share(devices, monkeypatch):
    """768 pairs are 48 for each of 16 experts, which takes blocks of 64 rows. A device with a
    quarter of the experts has a quarter of the pairs, so larger blocks would be mostly empty."""
    rows_of_blocks = []

    def spied(chosen, experts, rows):
        rows_of_blocks.append((experts, rows))
        return list_blocks(chosen, experts, rows)

    monkeypatch.setattr(expert_blocks, "list_blocks", spied)
    given = inputs(8, dtype=np.float32, count=16)
    layout = layout_of(devices, fsdp=devices)
    gradients(lambda *given: experts(*given, layout), *given)
    assert rows_of_blocks == [(16 // devices, 64)] * 2  # forward and backward


def test_one_compilation_serves_every_routing():
    layout = layout_of()
    run = jax.jit(lambda *given: experts(*given, layout))
    given = [inputs(2, routing, seed=seed) for seed in range(10) for routing in ("random", "one")]
    run(*given[0])
    counter = CompilationCounter()
    for arguments in given:
        assert np.isfinite(run(*arguments)).all()
    assert counter.names == []
    counter.close()


def test_shapes_that_do_not_fit_are_told():
    x, chosen, weights, matrices = inputs(2)
    layout = layout_of()
    with pytest.raises(ValueError, match=r"needs gate and up \[E, 6, F\]"):
        experts(x, chosen, weights, matrices._replace(down=matrices.gate), layout)
    with pytest.raises(ValueError, match=r"chosen and weights must be \[8, 12, 'k'\]"):
        experts(x, chosen[:1], weights, matrices, layout)


@pytest.mark.parametrize("kernel", ["jax", "ragged_dot"])
def test_bfloat16_is_added_in_float32(kernel):
    given = inputs(3, dtype=np.float32)
    x, chosen, weights, matrices = given
    narrow = x.astype(jnp.bfloat16), chosen, weights, jax.tree.map(jnp.bfloat16, matrices)
    layout = layout_of()
    results = gradients(lambda *given: experts(*given, layout, kernel), *narrow)
    assert [leaf.dtype.name for leaf in jax.tree.leaves(results[0])] == [
        "bfloat16",
        "float32",
        *["bfloat16"] * 3,
    ]
    assert_equal(jax.tree.map(np.float32, results), gradients(dense, *given), 0.03)
