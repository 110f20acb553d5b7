"""Models composed of any components: parameters, freezing, layouts and their errors, first values,
and the programs of the decoder."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmllm.config.schema import (
    AudioConfig,
    ComponentConfig,
    ComponentsConfig,
    LanguageConfig,
    ModelConfig,
    ProjectorComponents,
    ProjectorConfig,
    VisionConfig,
)
from jaxmllm.data.rows.masks import AttentionSpec, finish_language_row
from jaxmllm.models.compose import build_model
from jaxmllm.models.rows import LanguageRows
from sharding.mesh import MeshError, make_mesh
from tests.support import EXHAUSTIVE

MESH = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
VOCABULARY = 40
SLOTS = 64
BLOCK = 32
LANGUAGE = LanguageConfig(width=16, layers=2, heads=4, kv_heads=2, head_size=8, mlp_width=24)
VISION = VisionConfig(width=8, layers=1, heads=2, mlp_width=12, patch_size=2)
AUDIO = AudioConfig(width=8, layers=1, heads=2, mlp_width=12, mel_bins=5, chunk_frames=16, merge=4)
ALL = ModelConfig(language=LANGUAGE, vision=VISION, audio=AUDIO)


def build(config=ALL, mesh=MESH, **settings):
    return build_model(config, VOCABULARY, ComponentsConfig(**settings), mesh)


def paths(tree):
    return {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}


def count(tree):
    """Number of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


# ---------------------------------------------------------------------------- composition


@pytest.mark.parametrize(
    ("towers", "names"),
    [
        ({}, ["language"]),
        ({"vision": VISION}, ["vision", "projector.vision", "language"]),
        ({"audio": AUDIO}, ["audio", "projector.audio", "language"]),
        (
            {"audio": AUDIO, "vision": VISION},
            ["vision", "projector.vision", "audio", "projector.audio", "language"],
        ),
    ],
)
def test_any_subset_of_encoders(towers, names):
    model = build(ModelConfig(language=LANGUAGE, **towers))
    assert list(model.components) == names
    assert list(model.abstract("float32")) == names


def test_parameter_counts():
    """Every component, written out matrix by matrix. d, w: widths; biases and
    norms are single widths."""
    params = build().abstract("float32")
    d = 16
    heads = 4
    key_heads = 2
    size = 8
    hidden = 24
    layer = 2 * d * heads * size + 2 * d * key_heads * size + 3 * d * hidden + 2 * d
    assert count(params["language"]) == 2 * VOCABULARY * d + 2 * layer + d
    w = 8
    hidden = 12
    layer = 4 * w * w + 4 * w + 2 * w * hidden + hidden + w + 2 * w
    assert count(params["vision"]) == 12 * w + w + layer + w
    assert count(params["audio"]) == 3 * 5 * w + w + 3 * w * w + w + layer + w
    assert count(params["projector.vision"]) == 4 * w * d + d + d * d + d
    assert count(params["projector.audio"]) == 4 * w * d + d + d * d + d


def test_options_of_the_decoder_add_their_parameters():
    """Two layers: biases of queries, keys and values; norms of queries and keys; two more norms."""

    def language(**options):
        config = ModelConfig(language=LANGUAGE.model_copy(update=options))
        return build(config).abstract("float32")["language"]

    plain = language()
    assert paths(plain) - paths(language(tie_embeddings=True)) == {"['head']"}
    assert count(language(qkv_bias=True)) - count(plain) == 2 * (4 + 2 + 2) * 8
    assert count(language(qk_norm=True)) - count(plain) == 2 * (8 + 8)
    assert count(language(post_norms=True)) - count(plain) == 2 * (16 + 16)


def test_frozen_components_are_not_trainable():
    projectors = ProjectorComponents(audio=ProjectorConfig(freeze=True))
    model = build(vision=ComponentConfig(freeze=True), projector=projectors)
    assert model.trainable.components == {"projector.vision", "audio", "language"}


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param("dots", marks=EXHAUSTIVE),
        "full",
        pytest.param(("mlp",), marks=pytest.mark.slow),
    ],
)
def test_a_projector_computes_again_what_it_is_told_to(remat):
    """The gradient is the same, but of the projector's values only its arguments are kept."""

    def gradient(remat):
        """The traced gradient as text, and its value."""
        model = build(projector=ProjectorComponents(vision=ProjectorConfig(remat=remat)))
        params = model.init(0, "float32")
        features = jnp.ones((4, 16, 8))
        token_places = jnp.tile(jnp.arange(4), (4, 1))

        def loss(params):
            return jnp.square(model.project(params, "vision", features, token_places)).sum()

        return str(jax.make_jaxpr(jax.grad(loss))(params)), jax.jit(jax.grad(loss))(params)[
            "projector.vision"
        ]

    (plain, plain_gradient), (checkpointed, checkpointed_gradient) = (
        gradient("none"),
        gradient(remat),
    )
    assert "remat" in checkpointed and "remat" not in plain
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        plain_gradient,
        checkpointed_gradient,
    )


def test_a_projector_runs_on_the_ranks_of_its_tower():
    """The projector of vision has eight ranks as its tower has, so `tensor`
    does not split its MLP."""
    model = build(vision=ComponentConfig(layout={"batch": ["data", "fsdp", "tensor"]}))
    assert [model.layout(phase).ranks for phase in ("vision", "audio", "language")] == [8, 4, 4]
    assert model.components["projector.vision"].layout.ranks == 8
    assert model.components["projector.vision"].layout.mesh_axes("mlp") == ()
    assert model.components["projector.audio"].layout.mesh_axes("mlp") == ("tensor",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"layout": {"heads": ["model"]}},
            r"components\.language\.layout\.heads: unknown mesh axis 'model'",
        ),
        ({"layout": {"vocab": ["data"]}}, r"components\.language\.layout: .*\['data'\]"),
        (
            {"layout": {"embed": ["fsdp", "tensor"]}},
            r"language\['.*\['tensor'\]; change this component's layout",
        ),
        # Two layers over two devices can be split.
        ({"layout": {"layers": ["fsdp"], "embed": ["data"]}}, None),
    ],
)
def test_layouts_that_cannot_be_are_refused_by_name(settings, message):
    if message is None:
        build(language=ComponentConfig(**settings))
    else:
        with pytest.raises(MeshError, match=message):
            build(language=ComponentConfig(**settings))


def test_layers_that_lie_on_devices_of_other_rows_are_refused_where_a_step_runs():
    """Otherwise each device would run its own rows through its own part of the layers alone."""
    model = build(language=ComponentConfig(layout={"layers": ["fsdp"], "embed": ["data"]}))
    with pytest.raises(
        MeshError, match=r"components\.language\.layout\.layers: mesh axes \['fsdp'\] split rows"
    ):
        model.by_device("language")
    model.by_device("vision")
    unsplit = {"heads": [], "kv_heads": [], "mlp": [], "vocab": [], "layers": ["tensor"]}
    build(language=ComponentConfig(layout=unsplit)).by_device("language")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"batch": ["data", "fsdp", "tensor"]}, r"batch: .*'tensor'\] is not \['data', 'fsdp'\]"),
        ({"sequence": ["tensor"]}, r"sequence: \['tensor'\] is not \[\], .* components\.vision"),
        ({"batch": ["fsdp", "data"], "sequence": []}, None),
    ],
)
def test_a_projector_may_not_name_other_ranks_than_its_tower(layout, message):
    projector = ProjectorComponents(vision=ProjectorConfig(layout=layout))
    if message is None:
        build(projector=projector)
    else:
        with pytest.raises(MeshError, match=rf"components\.projector\.vision\.layout\.{message}"):
            build(projector=projector)


def test_dimensions_that_do_not_split_are_refused_by_name():
    wide = make_mesh({"data": 2, "fsdp": 1, "tensor": 4})
    with pytest.raises(
        MeshError,
        match=r"language\['layers'\]\['attention'\].* of length 2 .* of 4 devices; change",
    ):
        build(ModelConfig(language=LANGUAGE), wide)
    build(ModelConfig(language=LANGUAGE), wide, language=ComponentConfig(layout={"kv_heads": []}))


# ---------------------------------------------------------------------------- first parameters


@pytest.fixture(scope="module")
def params():
    return build().init(3, "float32")


def equal(one, two):
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    )


def test_first_parameters_lie_as_described(params):
    abstract = build().abstract("float32")
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    for leaf, want in zip(jax.tree.leaves(params), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
    up = params["language"]["layers"]["mlp"]["up"]
    assert up.shape == (2, 16, 24) and up.sharding.shard_shape(up.shape) == (2, 8, 12)


def test_a_component_starts_alike_in_any_company_and_on_any_mesh(params):
    """First parameters depend on the seed and the component's name, not on other
    components or the mesh."""
    language_alone = build(
        ModelConfig(language=LANGUAGE), make_mesh({"data": 4, "fsdp": 1, "tensor": 2})
    ).init(3, "float32")
    assert equal(language_alone["language"], params["language"])
    without_audio = build(
        ModelConfig(language=LANGUAGE, vision=VISION),
        make_mesh({"data": 8, "fsdp": 1, "tensor": 1}),
        vision=ComponentConfig(layout={"embed": ["data"]}),
    ).init(3, "float32")
    for name in without_audio:
        assert equal(without_audio[name], params[name]), name


def test_seeds_and_components_start_differently(params):
    vision, audio = (params[f"projector.{phase}"]["mlp"]["up"] for phase in ("vision", "audio"))
    assert vision.shape == audio.shape and not equal(vision, audio)
    other_seed = build(
        ModelConfig(language=LANGUAGE), make_mesh({"data": 4, "fsdp": 1, "tensor": 2})
    ).init(4, "float32")
    assert not equal(other_seed["language"]["embedding"], params["language"]["embedding"])


# ---------------------------------------------------------------------------- programs


def make_rows(seed):
    """Four rows of four random examples each, with three slots of padding and media in
    a fifth of the slots."""
    rng = np.random.default_rng(seed)
    lengths = rng.multinomial(SLOTS - 3, [0.25] * 4)
    segments = np.tile(np.append(np.repeat(np.arange(1, 5), lengths), [0] * 3), (4, 1)).astype(
        np.int32
    )
    row = dict(
        tokens=rng.integers(0, VOCABULARY, (4, SLOTS)).astype(np.int32),
        targets=np.full((4, SLOTS), -1, np.int32),
        segments=segments,
        positions=rng.integers(0, SLOTS, (4, SLOTS, 3)).astype(np.int32),
        media=np.where(rng.random((4, SLOTS)) < 0.2, 1, -1).astype(np.int32),
        sources=np.zeros((4, 4), np.int32),
        groups=np.zeros((4, SLOTS), np.int32),
    )
    finish_language_row(row, AttentionSpec({"language": BLOCK}))
    return LanguageRows.of(row)


@pytest.fixture(scope="module")
def hidden():
    """`hidden(dtype)` computes states, and gradients of their weighted sum, in that dtype."""
    programs = {}
    weights = np.random.default_rng(0).standard_normal((4, SLOTS, 16)).astype(np.float32)

    def program(dtype):
        model = build(ModelConfig(language=LANGUAGE), language=ComponentConfig(compute_dtype=dtype))

        def loss(params, rows, media):
            states, head = model.hidden(params, rows, media)
            return (states.astype(jnp.float32) * weights).sum() + head.matrix.sum(), states

        return programs.setdefault(dtype, jax.jit(jax.grad(loss, has_aux=True)))

    return program


def media(seed):
    return np.random.default_rng(seed).standard_normal((4, SLOTS, 16)).astype(np.float32)


def test_bfloat16_computes_nearly_the_same(hidden, params):
    """States differ by at most 0.1, and each gradient by 5 % of its norm."""
    language_params = {"language": params["language"]}
    grads, states = hidden("float32")(language_params, make_rows(0), media(0))
    low_grads, low_states = hidden("bfloat16")(language_params, make_rows(0), media(0))
    assert low_states.dtype == jnp.bfloat16
    is_token = make_rows(0).segments > 0
    np.testing.assert_allclose(
        np.asarray(low_states, np.float32)[is_token], states[is_token], rtol=0, atol=0.1
    )
    flat = jax.tree.leaves_with_path(low_grads)
    for (path, got), want in zip(flat, jax.tree.leaves(grads), strict=True):
        assert got.dtype == np.float32, path
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < 0.05, (jax.tree_util.keystr(path), error)


def test_a_scaled_embedding_leaves_media_as_they_are():
    """The factor, the root of the width, is rounded to bfloat16 like the
    numbers that it multiplies."""
    config = LANGUAGE.model_copy(update={"width": 20, "scale_embedding": True})
    model = build(ModelConfig(language=config), language=ComponentConfig(compute_dtype="bfloat16"))
    random = np.random.default_rng(0)
    table, media = (random.standard_normal((rows, 20)) for rows in (VOCABULARY, 4 * SLOTS))
    table, media = (values.astype(jnp.bfloat16) for values in (table, media.reshape(4, SLOTS, 20)))
    rows = make_rows(0)
    got = jax.jit(model.embed)({"language": {"embedding": table}}, rows, media)
    text = table[np.asarray(rows.tokens)] * np.asarray(20**0.5, jnp.bfloat16)
    want = np.where((np.asarray(rows.media) >= 0)[..., None], media, text)
    np.testing.assert_array_equal(got, want)


def test_gradients_of_a_frequent_token_do_not_stop_growing():
    """A bfloat16 sum of ones would stop growing at 256."""
    component = build(ModelConfig(language=LANGUAGE)).components["language"]
    tokens = np.full((4, 1000), 7)

    def total(params):
        return (
            component.module(params)
            .embed(tokens, component.layout, jnp.bfloat16)
            .astype(jnp.float32)
            .sum()
        )

    params = {
        "language": jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), component.shapes)
    }
    grad = jax.jit(jax.grad(total))(params)["language"]["embedding"]
    want = np.zeros_like(grad)
    want[7] = 4000
    np.testing.assert_array_equal(grad, want)


def test_new_values_do_not_compile_again(hidden, params):
    program = hidden("float32")
    for seed in range(3):
        language_params = jax.tree.map(
            lambda leaf, seed=seed: leaf + seed, {"language": params["language"]}
        )
        program(language_params, make_rows(seed), media(seed))
    cache_size = program._cache_size()
    program({"language": params["language"]}, make_rows(9), media(9))
    assert program._cache_size() == cache_size == 1
