"""The layers of models: norms, positions, biases, MLPs, attention on a mesh, and
stacks with recomputation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmllm.attention.mask import TokenIds
from jaxmllm.config.schema import TowerConfig
from jaxmllm.data.rows.masks import AttentionSpec, finish_language_row
from jaxmllm.models.layers import (
    MLP,
    Block,
    GatedMLP,
    RowContext,
    SelfAttention,
    encoder_block,
    row_keys,
    run_stack,
    stacked,
)
from jaxmllm.models.norms import LayerNorm, RMSNorm
from jaxmllm.models.products import biased, sum_at_once, sum_in_groups, times_matrix
from jaxmllm.models.rotary import Rotation, rotary_angles, rotary_angles_2d, rotate
from jaxmllm.models.rows import RowTiles
from sharding.gradient import LayerGradient, Params
from sharding.mesh import make_mesh
from sharding.rules import make_layout
from tests.support import EXHAUSTIVE

SLOTS = 64
BLOCK = 32
WIDTH = 16
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 4
LAYERS = 2
MLP_WIDTH = 24
EVERYTHING = ("attention", "projections", "mlp")  # everything that has a name
MESH = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
SEGMENTS = np.array(
    [[1] * 20 + [2] * 7 + [3] * 33 + [0] * 4, [1] * 64, [0] * 64, [1] * 1 + [2] * 40 + [0] * 23]
)


def context(layout):
    """What a layer reads of four rows: ids, keys, tiles and rotary positions."""
    row = {"segments": SEGMENTS.astype(np.int32), "groups": np.zeros(SEGMENTS.shape, np.int32)}
    finish_language_row(row, AttentionSpec({"language": BLOCK}))
    ids = TokenIds(*(jnp.asarray(row[name]) for name in ("segments", "groups", "order")))
    return RowContext(
        layout,
        ids,
        row_keys(layout, ids),
        RowTiles(**row["tiles"]),
        Rotation.of(
            rotary_angles(
                jnp.tile(jnp.arange(SLOTS)[None, :, None], (4, 1, 1)), (HEAD_SIZE // 2,), 100.0
            )
        ),
    )


def inputs(seed=0):
    return np.random.default_rng(seed).standard_normal((4, SLOTS, WIDTH)).astype(np.float32)


# ---------------------------------------------------------------------------- norms and positions


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset):
    x = np.random.default_rng(0).standard_normal((2, 3, 8)) * 5
    scale = np.linspace(0.5, 2, 8)
    want = np.empty_like(x)
    for i in np.ndindex(2, 3):
        want[i] = x[i] / np.sqrt(sum(v * v for v in x[i]) / 8 + 1e-3) * scale
    with jax.enable_x64(True):
        norm = RMSNorm(8, 1e-3, offset)
        np.testing.assert_array_equal(norm.scale[...], np.full(8, 1 - offset))
        norm.scale[...] = jnp.asarray(scale) - offset
        np.testing.assert_allclose(norm(jnp.asarray(x)), want, rtol=1e-13)


@pytest.mark.parametrize("make", [RMSNorm, LayerNorm, partial(LayerNorm, affine=False)])
def test_gradients_of_norms(make):
    """Over one axis or two, against differences of the values in a random direction."""
    rng = np.random.default_rng(0)
    x, d_y, step = (rng.standard_normal((2, 3, 2, 4)) for _ in range(3))
    with jax.enable_x64(True):
        norms = [make(4, 1e-3)] + ([make(4, 1e-3, heads=2)] if make is RMSNorm else [])
        for norm in norms:
            weighted_sum = lambda x, norm=norm: (norm(x) * d_y).sum()  # noqa: E731
            derivative = float((jax.grad(weighted_sum)(jnp.asarray(x)) * step).sum())
            values = [float(weighted_sum(jnp.asarray(x + sign * 1e-5 * step))) for sign in (1, -1)]
            assert derivative == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-7)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 256)) * 300, jnp.bfloat16)
    norm = RMSNorm(256, 1e-6)
    got = norm(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, norm(x.astype(jnp.float32)).astype(jnp.bfloat16))


def test_text_gets_one_dimensional_rotary_positions_exactly():
    """Where the three positions of a token are equal, its angles must not
    depend on the sections."""
    positions = np.arange(50)[None, :, None] * 7
    three_axes = rotary_angles(jnp.asarray(positions.repeat(3, axis=2)), (2, 3, 3), 1e4)
    one_axis = rotary_angles(jnp.asarray(positions), (8,), 1e4)
    np.testing.assert_array_equal(three_axes, one_axis)


def test_sections_turn_with_their_own_axis():
    positions = np.random.default_rng(0).integers(0, 100, (2, 5, 3))
    sections = (2, 3, 3)
    theta = 500.0
    want = np.empty((2, 5, 8))
    axis_of = [0] * 2 + [1] * 3 + [2] * 3
    for r, c, pair in np.ndindex(want.shape):
        want[r, c, pair] = positions[r, c, axis_of[pair]] * theta ** (-2 * pair / 16)
    with jax.enable_x64(True):
        angles = rotary_angles(jnp.asarray(positions), sections, theta, jnp.float64)
    np.testing.assert_allclose(angles, want, rtol=1e-13)


def test_interleaved_sections_take_turns():
    """Sections of 4, 3 and 1 pairs: the axes take turns as long as they have pairs left, and
    the first has the rest."""
    positions = np.random.default_rng(1).integers(0, 99, (1, 4, 3))
    with jax.enable_x64(True):
        angles = rotary_angles(jnp.asarray(positions), (4, 3, 1), 1e4, jnp.float64, None, True)
    for pair, axis in enumerate((0, 1, 2, 0, 1, 0, 0, 1)):
        expected = positions[..., axis] * 1e4 ** (-pair / 8)
        np.testing.assert_allclose(angles[..., pair], expected, rtol=1e-12)


def test_both_axes_of_an_image_turn_over_all_frequencies():
    positions = np.random.default_rng(0).integers(0, 100, (2, 5, 2))
    want = np.empty((2, 5, 6))
    for r, c, pair in np.ndindex(want.shape):
        want[r, c, pair] = positions[r, c, pair // 3] * 100.0 ** (-(pair % 3) / 3)
    with jax.enable_x64(True):
        angles = rotary_angles_2d(jnp.asarray(positions), 6, 100.0, jnp.float64)
    np.testing.assert_allclose(angles, want, rtol=1e-13)


def test_angles_of_a_bfloat16_computation_are_float32():
    """bfloat16 cannot represent position 1,001."""
    angles = rotary_angles(jnp.full((1, 1, 1), 1001), (2,), 1e4, jnp.bfloat16)
    assert angles.dtype == jnp.float32 and angles[0, 0, 0] == 1001


def test_rotate_turns_pairs_as_complex_numbers():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 8))
    angles = rng.standard_normal((2, 5, 4)) * 50
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, :, None]
    with jax.enable_x64(True):
        got = rotate(jnp.asarray(x), Rotation.of(jnp.asarray(angles)))
    np.testing.assert_allclose(
        got, np.concatenate([turned.real, turned.imag], axis=-1), rtol=0, atol=1e-12
    )


# ---------------------------------------------------------------------------- sums over slots


ONE = make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])


def bias_gradient(add, d_out):
    """The gradient of a bias of zeros that `add` adds to every slot."""
    b = jnp.zeros(d_out.shape[-1], d_out.dtype)
    return jax.jit(jax.vjp(lambda b: add(jnp.zeros_like(d_out), b), b)[1])(d_out)[0]


def test_the_gradient_of_a_bias_in_bfloat16_is_rounded_once():
    """The error over 4,096 slots is no larger than the rounding of the exact sum, nor than
    the error of `jnp.add`."""
    d_out = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4096, 64)) + 1, jnp.bfloat16)
    want = np.asarray(d_out, np.float64).sum((0, 1))

    def error(add):
        return np.linalg.norm(np.asarray(bias_gradient(add, d_out), np.float64) - want)

    rounding_error = np.linalg.norm(np.asarray(jnp.asarray(want, jnp.bfloat16), np.float64) - want)
    biased_error = error(lambda x, b: biased(x, nnx.Param(b, axes=(None,)), make_layout(ONE)))
    assert biased_error <= 1.001 * rounding_error
    assert biased_error <= error(jnp.add)


def test_the_gradient_of_a_scale_is_one_sum_over_rows_and_slots():
    """It is not summed row by row, because XLA's CPU backend has a slow loop for that."""

    def summed(scale, x):
        norm = RMSNorm(WIDTH, 1e-6)
        norm.scale[...] = scale
        return norm(x).sum()

    text = jax.jit(jax.grad(summed)).lower(jnp.ones(WIDTH), jnp.ones((1, SLOTS, WIDTH))).as_text()
    sums = [line for line in text.splitlines() if "stablehlo.reduce(" in line]
    assert any(
        "across dimensions = [0, 1]" in line and f"tensor<{WIDTH}xf32>" in line for line in sums
    )
    assert not any("across dimensions = [1]" in line for line in sums)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-12)])
def test_gradients_of_biases_and_scales_are_those_of_the_plain_form(dtype, tolerance):
    """On heads [R, C, H, K], where a bias has two dimensions and a scale has one."""
    random = np.random.default_rng(0)
    layout = make_layout(ONE)
    with jax.enable_x64(True):
        x, d_out = random.standard_normal((2, 3, 50, 4, 8)).astype(dtype)
        params = {"b": random.standard_normal((4, 8)), "scale": random.standard_normal(8)}
        params = {name: jnp.asarray(value, dtype) for name, value in params.items()}

        def ours(params, x):
            norm = RMSNorm(8, 1e-6)
            norm.scale[...] = params["scale"]
            return norm(biased(x, nnx.Param(params["b"], axes=("heads", None)), layout))

        def plain(params, x):
            x = x + params["b"]
            return (
                x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * params["scale"]
            )

        (actual, actual_vjp), (expected, expected_vjp) = (
            jax.vjp(f, params, jnp.asarray(x)) for f in (ours, plain)
        )
        np.testing.assert_array_equal(actual, expected)
        for got, want in zip(
            *map(jax.tree.leaves, (actual_vjp(d_out), expected_vjp(d_out))), strict=True
        ):
            assert got.dtype == dtype
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * abs(want).max())


def test_sums_over_slots_are_left_to_the_weights_half_of_a_backward_pass():
    """The half for input gradients is on the critical path of a pipeline, so it
    must not sum over slots."""
    graph, mlp = filled(lambda rngs: MLP(rngs, WIDTH, 24))
    layout = make_layout(ONE)
    x = jnp.asarray(inputs())
    dy = jnp.asarray(inputs(1))

    def layer(params, x, _):
        return nnx.merge(graph, params.trained)(x, layout)

    params = Params(mlp, ())
    gradient = LayerGradient(layer, params, x, ())
    split = gradient.split()
    _, residuals = jax.jit(gradient.forward)(params, x, ())
    dx, pending = jax.jit(split.input_gradient)(params, (), residuals, dy)
    halves = jax.jit(split.weight_gradient)(params, (), pending), dx
    for got, want in zip(
        jax.tree.leaves(halves),
        jax.tree.leaves(jax.vjp(lambda p, x: layer(Params(p, ()), x, ()), mlp, x)[1](dy)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * abs(want).max())
    sums_with_inputs, sums_with_weights = (
        str(jax.make_jaxpr(half)(params, (), *arguments)).count("reduce_sum")
        for half, arguments in (
            (split.input_gradient, (residuals, dy)),
            (split.weight_gradient, (pending,)),
        )
    )
    # Two biases, and the gradient of each is written as one sum and, for GPUs, as two.
    assert (sums_with_inputs, sums_with_weights) == (0, 2 * (1 + 2))


@pytest.mark.parametrize("slots", [(2, 256), (3, 100), (1, 7), (5,)])
@pytest.mark.parametrize("features", [(16,), (4, 8)])
def test_sums_of_groups_of_slots_are_those_of_all_at_once(slots, features):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((*slots, *features)), jnp.float32)
    want = sum_at_once(x, len(slots))
    got = jax.jit(sum_in_groups, static_argnums=1)(x, len(slots))
    assert got.shape == want.shape == features
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * abs(want).max())


def test_sums_over_heads_that_devices_share_are_gathered_nowhere():
    mesh = jax.make_mesh((4,), ("tensor",), devices=jax.devices()[:4])
    by_heads = NamedSharding(mesh, P(None, None, "tensor"))
    shape = jax.ShapeDtypeStruct((1, 256, 24, 16), jnp.float32, sharding=by_heads)
    text = jax.jit(sum_in_groups, static_argnums=1).lower(shape, 3).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text


@pytest.mark.parametrize(("inputs", "outputs"), [((8,), (16,)), ((16,), (8,)), ((4, 4), (8,))])
def test_gradients_of_matrices_are_those_of_the_plain_form(inputs, outputs):
    random = np.random.default_rng(0)
    shapes = (2, 50, *inputs), (*inputs, *outputs), (2, 50, *outputs)
    x, matrix, d_out = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in shapes)
    axes = len(inputs)
    expected, expected_vjp = jax.vjp(partial(jnp.tensordot, axes=axes), x, matrix)
    product, product_vjp = jax.vjp(partial(times_matrix, axes), x, matrix)
    np.testing.assert_array_equal(product, expected)
    for got, want in zip(jax.jit(product_vjp)(d_out), expected_vjp(d_out), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * abs(want).max())


@pytest.mark.parametrize(("width", "out_width"), [(16, 48), (48, 16)])
def test_no_gradient_of_a_matrix_is_a_product_of_two_transposed_factors(width, out_width):
    """XLA's CPU backend takes twice as long for such products, which it makes of the
    gradient that JAX derives."""

    def gradient(times, x, matrix, d_out):
        return jax.vjp(partial(times, x * 2), matrix)[1](d_out * 2)[0]

    def turned(times):
        shapes = (1, SLOTS, width), (width, out_width), (1, SLOTS, out_width)
        compiled = jax.jit(partial(gradient, times)).lower(*map(jnp.ones, shapes)).compile()
        return "lhs_contracting_dims={0}, rhs_contracting_dims={1}" in compiled.as_text()

    assert turned(partial(jnp.tensordot, axes=1))
    assert not turned(partial(times_matrix, 1))


def test_a_frozen_matrix_keeps_no_input():
    x = jnp.ones((1, SLOTS, WIDTH))
    matrix = jnp.ones((WIDTH, 24))
    residuals = jax.tree.leaves(jax.vjp(lambda x: times_matrix(1, x, matrix), x)[1])
    assert [leaf.shape for leaf in residuals] == [matrix.shape]


# ---------------------------------------------------------------------------- MLPs


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def filled(make, dtype=np.float32):
    """A module's graph and random parameters, including its biases and scales."""
    rng = np.random.default_rng(0)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return graph, jax.tree.map(
        lambda leaf: (0.5 * rng.standard_normal(leaf.shape)).astype(dtype), shapes
    )


def test_mlps():
    """A plain MLP, a gated one with silu, and a gated one with gelu, against numpy."""
    x = np.random.default_rng(1).standard_normal((4, 6, WIDTH))
    layout = make_layout(MESH)
    makers = (lambda rngs: MLP(rngs, WIDTH, 24, 10)), (lambda rngs: GatedMLP(rngs, WIDTH, 24))
    (plain_graph, plain), (gated_graph, gated) = (filled(make, np.float64) for make in makers)
    gelu_graph, _ = filled(lambda rngs: GatedMLP(rngs, WIDTH, 24, "gelu_tanh"))
    with jax.enable_x64(True):
        got_plain, got_gated, got_gelu = jax.jit(
            lambda plain, gated, x: (
                nnx.merge(plain_graph, plain)(x, layout),
                nnx.merge(gated_graph, gated)(x, layout),
                nnx.merge(gelu_graph, gated)(x, layout),
            )
        )(plain, gated, x)
    p = nnx.to_pure_dict(plain)
    np.testing.assert_allclose(
        got_plain, gelu(x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"], atol=1e-12
    )
    p = nnx.to_pure_dict(gated)
    gate = x @ p["gate"]
    np.testing.assert_allclose(
        got_gated, (gate / (1 + np.exp(-gate)) * (x @ p["up"])) @ p["down"], atol=1e-12
    )
    np.testing.assert_allclose(got_gelu, (gelu(gate) * (x @ p["up"])) @ p["down"], atol=1e-12)


def test_initial_weights_keep_the_scale_of_their_input():
    """The standard deviation of a kernel is the inverse root of its number of inputs."""

    def make():
        rngs = nnx.Rngs(0)
        return nnx.state(MLP(rngs, 400, 100, 50)), nnx.state(SelfAttention(rngs, 100, 4, 2, 25))

    mlp, attention = (nnx.to_pure_dict(state) for state in jax.jit(make)())
    for kernel, fan_in in (
        (mlp["up"], 400),
        (mlp["down"], 100),
        (attention["query"], 100),
        (attention["out"], 100),
    ):
        np.testing.assert_allclose(kernel.std(), fan_in**-0.5, rtol=0.05)
    assert not mlp["up_bias"].any()


# ---------------------------------------------------------------------------- attention on the mesh


@pytest.fixture(scope="module")
def attend():
    """`attend(overrides)`: the output of attention on the mesh and the gradients of
    a weighted sum of it."""
    sizes = WIDTH, HEADS, KV_HEADS, HEAD_SIZE
    graph, parameters = filled(
        lambda rngs: SelfAttention(rngs, *sizes, qkv_bias=True, qk_norm=True)
    )

    def run(overrides):
        layout = make_layout(MESH, overrides)

        def loss(parameters, x):
            out = nnx.merge(graph, parameters)(x, context(layout))
            return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

        grads, out = jax.jit(jax.grad(loss, has_aux=True))(parameters, inputs())
        return [out, *jax.tree.leaves(grads)]

    return run


@pytest.fixture(scope="module")
def whole_heads(attend):
    return attend({"heads": [], "kv_heads": []})


@pytest.mark.parametrize(
    "overrides",
    [{}, {"kv_heads": []}, {"heads": []}],
    ids=["both_split", "heads_split", "kv_heads_split"],
)
def test_splitting_heads_changes_nothing(attend, whole_heads, overrides):
    """Where there are fewer key heads than tensor ranks only the queries can be split, and each
    rank needs the keys that its queries read."""
    for got, want in zip(attend(overrides), whole_heads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------- stacks


def make_block(rngs):
    return Block(WIDTH, 1e-6, *block_parts(rngs))


def make_normed_block(rngs):
    return Block(WIDTH, 1e-6, *block_parts(rngs), post_norms=True)


def block_parts(rngs):
    attention = SelfAttention(rngs, WIDTH, HEADS, KV_HEADS, HEAD_SIZE)
    return attention, GatedMLP(rngs, WIDTH, MLP_WIDTH)


def make_encoder_block(rngs, **choices):
    config = TowerConfig(width=WIDTH, layers=LAYERS, heads=HEADS, mlp_width=MLP_WIDTH, **choices)
    return encoder_block(config, rngs)


@pytest.fixture(scope="module")
def stack():
    make = lambda: stacked(make_block, LAYERS, nnx.Rngs(0))  # noqa: E731
    return nnx.graphdef(nnx.eval_shape(make)), jax.jit(lambda: nnx.state(make()))()


def loss_of(graph, remat, parameters, x):
    rows = context(make_layout(MESH))
    return (run_stack(nnx.merge(graph, parameters), x, rows, remat) ** 2).sum()


@pytest.fixture(scope="module")
def gradients(stack):
    graph, parameters = stack

    def gradient(remat):
        loss = partial(loss_of, graph, remat)
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(parameters, inputs())

    return {remat: gradient(remat) for remat in ("none", "dots", "full", EVERYTHING)}


def test_layers_of_a_stack_start_differently(stack):
    gate = np.asarray(stack[1].mlp.gate[...])
    assert gate.shape == (LAYERS, WIDTH, MLP_WIDTH)
    assert abs(gate[0] - gate[1]).min() > 0


def test_a_stack_is_its_layers_in_turn(stack):
    graph, parameters = stack
    rows = context(make_layout(MESH))
    x = jnp.asarray(inputs())
    run_layer = jax.jit(lambda p, x: nnx.merge(graph, p)(x, rows))
    got = jax.jit(lambda p, x: run_stack(nnx.merge(graph, p), x, rows, "none"))(parameters, x)
    for i in range(LAYERS):
        x = run_layer(jax.tree.map(lambda leaf, i=i: np.asarray(leaf[i]), parameters), x)
    np.testing.assert_allclose(got, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("remat", ["dots", "full", EVERYTHING])
def test_rematerialisation_leaves_the_gradients_as_they_are(gradients, remat):
    for got, want in zip(
        jax.tree.leaves(gradients[remat]), jax.tree.leaves(gradients["none"]), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * abs(want).max())


@pytest.mark.parametrize("remat", ["dots", "full", EVERYTHING])
def test_layers_of_a_loop_hide_nothing_from_the_compiler(stack, remat):
    """A barrier around a layer would copy its weights and whatever is kept."""
    graph, parameters = stack
    loss = partial(loss_of, graph, remat)
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(parameters, inputs()))
    assert "prevent_cse=False" in jaxpr and "prevent_cse=True" not in jaxpr


def counted(stack):
    """`count(remat)`: how many numbers the forward pass of a stack keeps for its backward pass."""
    graph, parameters = stack

    def pullback(remat, parameters, x):
        return jax.vjp(partial(loss_of, graph, remat), parameters, x)[1]

    def count(remat):
        residuals = jax.eval_shape(partial(pullback, remat), parameters, inputs())
        return sum(leaf.size for leaf in jax.tree.leaves(residuals))

    return count


@pytest.fixture(scope="module")
def kept(stack):
    return counted(stack)


def test_rematerialisation_keeps_less(kept):
    assert kept("full") < kept("dots") < kept(EVERYTHING) < kept("none")


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (("attention",), HEADS * HEAD_SIZE + HEADS),
        (("projections",), (HEADS + 2 * KV_HEADS) * HEAD_SIZE + WIDTH),
        (("mlp",), 2 * MLP_WIDTH),
    ],
)
def test_a_list_keeps_what_it_names_beside_the_input(kept, names, values):
    """Per slot: outputs and logsumexps of attention; queries, keys, values and the output
    projection; gate and up of the MLP."""
    slots = LAYERS * inputs().size // WIDTH
    assert kept(names) - kept("full") == slots * values


def test_a_norm_after_an_mlp_has_what_it_reads_kept():
    """Its input is the output of the MLP, one width per slot."""
    make = lambda: stacked(make_normed_block, LAYERS, nnx.Rngs(0))  # noqa: E731
    kept = counted(nnx.split(nnx.eval_shape(make)))
    slots = LAYERS * inputs().size // WIDTH
    assert kept(("mlp",)) - kept("full") == slots * (2 * MLP_WIDTH + WIDTH)


@pytest.mark.parametrize(
    ("remat", "widths"),
    [("full", 0), ("dots", 1), ("none", 2), (("mlp",), 1), (("projections",), 0)],
)
def test_a_layer_that_scales_what_it_adds_keeps_that(remat, widths):
    def kept(layer_scale):
        make = partial(make_encoder_block, layer_scale=layer_scale)
        stack = nnx.eval_shape(lambda: stacked(make, LAYERS, nnx.Rngs(0)))
        return counted(nnx.split(stack))(remat)

    scales = 2 * LAYERS * WIDTH
    assert kept(True) - kept(False) - scales == LAYERS * inputs().size * widths


def products(jaxpr):
    """Number of matrix products in a jaxpr, without dot products of slots. Products in a loop count
    once, and of several branches the one with most counts."""
    return sum(
        (eqn.primitive.name == "dot_general" and not is_slot_dots(eqn))
        + (max if eqn.primitive.name == "cond" else sum)(
            [0, *map(products, core.jaxprs_in_params(eqn.params))]
        )
        for eqn in jaxpr.eqns
    )


def is_slot_dots(eqn):
    """Whether a product leaves only batch dimensions (attention/slot_products.py)."""
    _, (batch, _) = eqn.params["dimension_numbers"]
    return len(batch) == eqn.outvars[0].aval.ndim


# A layer has four products of attention with weights, two in the loop of attention, and three or
# two of the MLP, whose last product no gradient reads unless a norm follows.
ATTENTION = 4
LOOP = 2


@pytest.mark.parametrize(
    ("make", "mlp", "asked"),
    [
        (make_block, 3, 2),
        pytest.param(make_normed_block, 3, 3, marks=EXHAUSTIVE),
        (make_encoder_block, 2, 1),
    ],
)
@pytest.mark.parametrize(
    ("remat", "again"),
    [
        ("none", lambda mlp: 0),
        ("dots", lambda mlp: LOOP),
        ("full", lambda mlp: ATTENTION + LOOP + mlp),
        (("attention",), lambda mlp: ATTENTION + mlp),
        (("projections",), lambda mlp: LOOP + mlp),
        (("mlp",), lambda mlp: ATTENTION + LOOP),
        (("attention", "projections"), lambda mlp: mlp),
        (("projections", "mlp"), lambda mlp: LOOP),
        (("mlp", "attention"), lambda mlp: ATTENTION),
        (EVERYTHING, lambda mlp: 0),
    ],
)
def test_only_what_is_not_kept_is_computed_again(make, mlp, asked, remat, again):
    stack = nnx.eval_shape(lambda: stacked(make, LAYERS, nnx.Rngs(0)))
    gradient = jax.grad(partial(loss_of, nnx.graphdef(stack), remat), argnums=(0, 1))
    jaxpr = jax.make_jaxpr(gradient)(nnx.state(stack), inputs()).jaxpr
    forward = ATTENTION + LOOP + mlp
    # Two products per product with weights, and five in the loops of attention.
    backward = 2 * (ATTENTION + mlp) + 5
    assert products(jaxpr) == forward + backward + again(asked)
