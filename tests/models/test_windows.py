"""A decoder whose layers differ in what they see: packed examples against each example
alone, by dense attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmllm.config.schema import ComponentConfig, ComponentsConfig, LanguageConfig, ModelConfig
from jaxmllm.data.rows.masks import AttentionSpec, finish_language_row
from jaxmllm.models.compose import build_model
from jaxmllm.models.rows import LanguageRows
from sharding.mesh import make_mesh
from tests.support import EXHAUSTIVE

BLOCK = 8
SLOTS = 64
VOCABULARY = 40
WINDOW = 6
SPANS = [(0, 0, 30), (0, 30, 33), (0, 33, 62), (1, 0, 64)]  # row, start, stop
IMAGES = [(0, 5, 20), (0, 40, 44), (1, 50, 60)]  # one is wider than the window
DECODER = LanguageConfig(
    width=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_size=8,
    mlp_width=24,
    rope_sections=(2, 1, 1),
    window=WINDOW,
)


def rows(config):
    """The packed rows of all examples, with their images, and random tokens and positions."""
    rng = np.random.default_rng(0)
    segments, groups = np.zeros((2, 2, SLOTS), np.int32)
    for index, (row, start, stop) in enumerate(SPANS, 1):
        segments[row, start:stop] = index
    for index, (row, start, stop) in enumerate(IMAGES, 1):
        groups[row, start:stop] = index
    row = {
        "tokens": rng.integers(0, VOCABULARY, segments.shape).astype(np.int32),
        "targets": np.full_like(segments, -1),
        "segments": segments,
        "positions": rng.integers(0, 30, (*segments.shape, 3)).astype(np.int32),
        "media": np.full_like(segments, -1),
        "sources": np.zeros((2, 4), np.int32),
        "groups": groups,
    }
    finish_language_row(row, AttentionSpec({"language": BLOCK}, windows={"language": config}))
    return LanguageRows.of(row)


def seen(groups, window):
    """[n, n]: which tokens each token of one example sees, decided token by token."""
    pairs = np.zeros((len(groups), len(groups)), bool)
    for query, key in np.ndindex(pairs.shape):
        in_window = query - window < key <= query
        pairs[query, key] = in_window or (groups[query] == groups[key] > 0)
    return pairs


def norm(x, scale):
    return scale * x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def turned(x, positions):
    """[n, heads, 8] with pairs (i, i + 4) turned by the positions along axes 0, 0, 1, 2."""
    angles = positions[:, [0, 0, 1, 2]] * 10_000.0 ** (-np.arange(4) / 4)
    cos = jnp.cos(angles)[:, None]
    sin = jnp.sin(angles)[:, None]
    return jnp.concatenate(
        [x[..., :4] * cos - x[..., 4:] * sin, x[..., 4:] * cos + x[..., :4] * sin], -1
    )


def layer(x, p, positions, pairs):
    """One layer of the decoder on one example, with `pairs` of tokens that see each other."""
    y = norm(x, p["attention_norm"]["scale"])
    q, k, v = (
        jnp.einsum("nd,dhk->nhk", y, p["attention"][name]) for name in ("query", "key", "value")
    )
    q = turned(q, positions)
    k = jnp.repeat(turned(k, positions), 2, axis=1)
    v = jnp.repeat(v, 2, axis=1)
    logits = jnp.where(pairs, jnp.einsum("qhk,phk->hqp", q, k) / np.sqrt(8), -jnp.inf)
    x = x + jnp.einsum("hqp,phk,hkd->qd", jax.nn.softmax(logits), v, p["attention"]["out"])
    y = norm(x, p["mlp_norm"]["scale"])
    return x + (jax.nn.silu(y @ p["mlp"]["gate"]) * (y @ p["mlp"]["up"])) @ p["mlp"]["down"]


def dense(p, config, tokens, positions, groups):
    """The decoder on one example, without packing or tiles."""
    x = p["embedding"][tokens]
    for number, windowed in enumerate(config.windowed):
        pairs = seen(groups, config.window if windowed else len(groups))
        x = layer(
            x, jax.tree.map(lambda leaf, number=number: leaf[number], p["layers"]), positions, pairs
        )
    return norm(x, p["norm"]["scale"])


@pytest.mark.parametrize(
    "full_layers",
    [pytest.param((), marks=EXHAUSTIVE), (1,), pytest.param((0, 2), marks=pytest.mark.slow)],
)
def test_values_and_gradients_are_those_of_each_example_alone(full_layers):
    """All layers in windows, one full layer in the middle, or full layers at both ends."""
    config = DECODER.model_copy(update={"full_layers": full_layers})
    batch = rows(config)
    with jax.enable_x64(True):
        settings = ComponentsConfig(language=ComponentConfig(compute_dtype="float64"))
        mesh = make_mesh({"data": 1}, jax.devices()[:1])
        model = build_model(ModelConfig(language=config), VOCABULARY, settings, mesh)
        rng = np.random.default_rng(1)
        params = jax.tree.map(
            lambda leaf: 0.3 * rng.standard_normal(leaf.shape), model.abstract("float64")
        )
        weights = rng.standard_normal((2, SLOTS, config.width))

        def packed(params):
            hidden = model.hidden(params, batch, jnp.zeros((2, SLOTS, config.width)))[0]
            return jnp.sum(jnp.where(batch.segments[..., None] > 0, hidden * weights, 0)), hidden

        def alone(params):
            total = 0.0
            states = []
            for row, start, stop in SPANS:
                span = (row, slice(start, stop))
                columns = (column[span] for column in (batch.tokens, batch.positions, batch.groups))
                states.append(dense(params["language"], config, *columns))
                total += jnp.sum(states[-1] * weights[span])
            return total, states

        (_, hidden), gradients = jax.jit(jax.value_and_grad(packed, has_aux=True))(params)
        (_, states), expected = jax.jit(jax.value_and_grad(alone, has_aux=True))(params)
    for (row, start, stop), example_states in zip(SPANS, states, strict=True):
        np.testing.assert_allclose(
            hidden[row, start:stop],
            example_states,
            rtol=0,
            atol=1e-10 * np.abs(example_states).max(),
        )
    for (path, got), want in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected), strict=True
    ):
        want = np.asarray(want)
        # Some gradients are nearly zero, so the tolerance has a floor.
        tolerance = 1e-10 * max(np.abs(want).max(), 1e-3)
        np.testing.assert_allclose(
            got, want, rtol=0, atol=tolerance, err_msg=jax.tree_util.keystr(path)
        )


def test_what_makes_no_sense_is_refused_by_name():
    tree = DECODER.model_dump()
    for changes, message in [
        ({"window": None, "full_layers": (1,)}, r"full_layers \[1\] need a window"),
        ({"full_layers": (3,)}, r"full_layers names \[3\], but layers are 0 \.\. 2"),
        (
            {"full_layers": (0, 1, 2)},
            r"full_layers names all layers, so that window \(6\) changes nothing",
        ),
        ({"window": 0}, "window"),
    ]:
        with pytest.raises(ValueError, match=message):
            LanguageConfig.model_validate(tree | changes)
