"""A row that several ranks share, through the functions of a step.

The reference is the same row on one rank; both run in float64.
"""

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
    OptimizerConfig,
    ProjectorComponents,
    ProjectorConfig,
    VisionConfig,
)
from jaxmllm.data.rows.masks import AttentionSpec, finish_encoder_row, finish_language_row
from jaxmllm.models.compose import build_model
from jaxmllm.models.rows import (
    EncoderRows,
    LanguageRows,
    TokenPool,
    abstract_encoder_rows,
    abstract_language_rows,
)
from jaxmllm.row_format import RowFormat
from jaxmllm.training.objectives.tokens import Sums
from jaxmllm.training.step_functions import StepFunctions
from sharding.mesh import make_mesh
from tests.support import EXHAUSTIVE, slow_cases

BLOCK = 8
VOCABULARY = 30
SOURCES = 3
SEGMENTS = 8
WIDTH = 8
POOL = 200
SLOTS = {"language": 128, "vision": 128, "audio": 512}  # of a complete row
CONFIG = ModelConfig(
    language=LanguageConfig(
        width=WIDTH,
        layers=2,
        heads=2,
        kv_heads=2,
        head_size=4,
        mlp_width=12,
        rope_sections=(0, 1, 1),
        loss_chunk=32,
        window=6,
        full_layers=(1,),
    ),
    vision=VisionConfig(
        width=8, layers=2, heads=2, mlp_width=12, patch_size=2, window=3, full_layers=(0,)
    ),
    audio=AudioConfig(width=8, layers=1, heads=2, mlp_width=12, mel_bins=4, chunk_frames=32),
)
FORMATS = {
    "vision": RowFormat(12, np.dtype(np.uint8), 4, stride=1, alignment=4, axes=(1, 2)),
    "audio": RowFormat(4, np.dtype(np.float32), 8, stride=4, alignment=8, axes=(0,), margin=4),
}
WIDE_ENCODERS = {"batch": ["data", "fsdp", "tensor"]}


def make_step(mesh, dtype="float64", freeze=False, remat="none", layout=()):
    """A step of a tiny model with three modalities; the decoder and images have windows."""
    encoder = ComponentConfig(compute_dtype=dtype, remat=remat, layout=dict(layout), freeze=freeze)
    projector = ProjectorConfig(compute_dtype=dtype)
    components = ComponentsConfig(
        vision=encoder,
        audio=encoder,
        language=ComponentConfig(compute_dtype=dtype, remat=remat),
        projector=ProjectorComponents(vision=projector, audio=projector),
    )
    model = build_model(CONFIG, VOCABULARY, components, mesh)
    return StepFunctions(model, OptimizerConfig(learning_rate=0.1), decay_steps=20, sources=SOURCES)


def randomized(step, phase):
    rng = np.random.default_rng(0)
    shapes = step.model.abstract("float32")
    shapes = {name: shapes[name] for name in step.model.phases[phase].components}
    return jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape), shapes)


def attention(phase, parts):
    return AttentionSpec({phase: BLOCK}, {phase: parts}, windows=CONFIG.windows)


def segments_of(rng, groups, slots, unit):
    """Packed items whose lengths are multiples of `unit`, then padding.

    Some items are longer than the slots of a rank.
    """
    segments = np.zeros((groups, slots), np.int32)
    for row in segments:
        cuts = np.sort(rng.choice(np.arange(1, slots // unit), 4, replace=False)) * unit
        for segment, (start, stop) in enumerate(zip((0, *cuts), cuts, strict=False), 1):
            row[start:stop] = segment
    return segments


def language_row(groups):
    """Packed rows before they are finished; media read slots of a rank's pool in any order."""
    rng = np.random.default_rng(1)
    slots = SLOTS["language"]
    segments = segments_of(rng, groups, slots, 1)
    media = np.full((groups, slots), -1, np.int32)
    bidirectional = np.zeros((groups, slots), np.int32)
    for row, segment, group in zip(media, segments, bidirectional, strict=True):
        for segment_id in np.unique(segment[segment > 0]):
            media_slots = np.flatnonzero(segment == segment_id)[1 : rng.integers(2, 40)]
            row[media_slots] = 1
            group[media_slots] = media_slots[0] + 1 if len(media_slots) else 0
        row[row > 0] = rng.permutation(POOL)[: (row > 0).sum()]
    targets = rng.integers(0, VOCABULARY, segments.shape)
    return {
        "tokens": rng.integers(0, VOCABULARY, segments.shape).astype(np.int32),
        "targets": np.where((segments > 0) & (media < 0), targets, -1).astype(np.int32),
        "segments": segments,
        "positions": rng.integers(0, 40, (groups, slots, 3)).astype(np.int32),
        "media": media,
        "sources": rng.integers(0, SOURCES, (groups, SEGMENTS)).astype(np.int32),
        "groups": bidirectional,
    }


def encoder_row(phase, groups):
    """Packed rows of an encoder before they are finished; a tenth of the tokens is not valid."""
    rng = np.random.default_rng(2)
    row_format = FORMATS[phase]
    slots = SLOTS[phase]
    tokens = slots // row_format.slots_per_token
    segments = segments_of(rng, groups, slots, row_format.alignment)
    positions = rng.integers(0, 9, (groups, slots, len(row_format.axes)))
    if phase == "audio":  # positions count attention tokens from the start of the clip
        clip_start = np.argmax(segments[:, :, None] == segments[:, None], axis=2)
        positions = (np.arange(slots) - clip_start)[..., None] // row_format.stride
    return {
        "features": rng.integers(0, 99, (groups, slots, row_format.features)).astype(
            row_format.dtype
        ),
        "segments": segments,
        "positions": positions.astype(np.int32),
        "valid": rng.random((groups, tokens)) < 0.9,
        "failed": np.arange(groups, dtype=np.int32),
    }


def copied(row):
    return {name: array.copy() for name, array in row.items()}


def arrivals(media, ranks):
    """[groups, slots]: in which slot of its rank's pool the token of each media slot arrives.

    Tokens fill the pool of a rank one after the other.
    """
    is_media = (media >= 0).reshape(ranks, -1)
    return (
        np.where(is_media, np.cumsum(is_media, axis=1) - 1, -1)
        .reshape(media.shape)
        .astype(np.int32)
    )


def spread(pool, media, arrived, ranks):
    """Move what pools [groups, W, ..] hold at `media` to pools [ranks, W, ..] at `arrived`."""
    shared = np.zeros((ranks, *pool.shape[1:]), pool.dtype)
    slots = media.shape[1] * len(media) // ranks
    for group, slot in zip(*np.nonzero(media >= 0), strict=True):
        rank = group * (ranks // len(media)) + slot // slots
        shared[rank, arrived[group, slot]] = pool[group, media[group, slot]]
    return shared


def close(got, want, tolerance):
    """Each entry differs by at most `tolerance` of the largest entry of its leaf."""
    for actual, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        expected = np.asarray(expected, np.float64)
        scale = np.abs(expected).max() or 1
        np.testing.assert_allclose(
            np.asarray(actual, np.float64), expected, atol=tolerance * scale, rtol=0
        )


def reference_mesh(groups):
    return make_mesh({"data": groups}, jax.devices()[:groups])


MESHES = {  # mesh, span
    "fsdp2": ({"data": 2, "fsdp": 2, "tensor": 2}, 2),
    "context2": ({"data": 4, "context": 2}, 4),
    "data8": ({"data": 8}, 4),
    "fsdp8": ({"data": 1, "fsdp": 8}, 8),
    "tensor2": ({"data": 4, "tensor": 2}, 2),
}
SLOW = slow_cases({name: (name,) for name in MESHES if name != "context2"}, {"fsdp2"})


def cut_mesh(sizes):
    all_sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | sizes
    return make_mesh(all_sizes, spans=(1, 2, 4, 8))


def language_gradients(step, row, pool, ranks):
    """Run a row: the pool's gradients, and what the row adds to gradients and to sums.

    The evaluation of the row comes last.
    """
    params = randomized(step, "language")
    sums = Sums(*np.ones((4, ranks, SOURCES), pool.tokens.dtype))

    @jax.jit
    def program(params, rows, pool, sums):
        step_of_row = step.language_loss_and_grad(
            params, rows, pool, jnp.asarray(0.01), params, sums
        )
        return *step_of_row, step.evaluate(params, rows, pool, sums)

    return jax.device_get(program(params, LanguageRows.of(row), pool, sums))


@pytest.mark.parametrize("mesh", ["context2", *SLOW])
def test_a_language_row_of_several_ranks(mesh, remat="none"):
    """Gradients of pools, parameters and sums agree, although the ranks hold the slots dealt out.

    One media token is not valid, so its example must lose its targets on all ranks.
    """
    sizes, span = MESHES[mesh]
    with jax.enable_x64(True):
        step = make_step(cut_mesh(sizes), remat=remat).spanned("language", span)
        layout = step.model.layout("language")
        row = language_row(layout.groups)
        rng = np.random.default_rng(3)
        pool = TokenPool(
            rng.standard_normal((layout.groups, POOL, WIDTH)),
            np.ones((layout.groups, POOL), np.int32),
        )
        # One token of the first row's media failed
        pool.valid[0, row["media"].max(axis=1)[0]] = 0
        one_rank = copied(row)
        finish_language_row(one_rank, attention("language", 1))
        expected = language_gradients(
            make_step(reference_mesh(layout.groups)), one_rank, pool, layout.groups
        )

        arrived = arrivals(row["media"], layout.ranks)
        shared = copied(row) | {"media": arrived.copy()}
        finish_language_row(shared, attention("language", layout.parts))
        assert (shared["order"] != one_rank["order"]).any(), "slots are dealt"
        shared |= {"arrived": arrived}
        abstract_rows = abstract_language_rows(
            layout, SLOTS["language"] // span, SEGMENTS, BLOCK, windows=True
        )
        assert jax.tree.map(np.shape, LanguageRows.of(shared)) == jax.tree.map(
            np.shape, abstract_rows
        )
        pools = TokenPool(*(spread(leaf, row["media"], arrived, layout.ranks) for leaf in pool))
        actual = language_gradients(step, shared, pools, layout.ranks)

    d_pool = spread(expected[0].tokens, row["media"], arrived, layout.ranks)
    close(actual[0].tokens, d_pool, 1e-10)
    close(actual[1], expected[1], 1e-10)
    targets = [expected[2].targets[0].sum() - SOURCES, (row["targets"][0] >= 0).sum()]
    assert 20 < targets[0] < targets[1], "an example without a media token has no loss"
    for totals, reference in zip(actual[2:], expected[2:], strict=True):
        by_group = [x.reshape(-1, span, SOURCES) for x in jax.tree.leaves(totals)]
        close([x[:, 0] for x in by_group], jax.tree.leaves(reference), 1e-12)
        assert all((x[:, 1:] == 1).all() for x in by_group), "sums are those of the first rank"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", ["full", ("attention",)])
def test_a_language_row_of_several_ranks_computed_again(remat):
    test_a_language_row_of_several_ranks("fsdp2", remat=remat)


def encoder_gradients(step, phase, row, ranks, tokens, offset, d_tokens):
    """Run a row in two programs: its pool, the count of failures and gradients of parameters."""
    params = randomized(step, phase)
    pool = TokenPool(np.ones((ranks, POOL, WIDTH)), np.full((ranks, POOL), 2, np.int32))
    d_pool = np.ones((ranks, POOL, WIDTH))
    d_pool[:, offset : offset + tokens] = d_tokens.reshape(ranks, tokens, WIDTH)

    @jax.jit
    def program(params, rows, pool, offset, failed, d_pool):
        pool, features, failed = step.encode(phase, params, rows, pool, offset, failed)
        start = rows if features is None else features
        trained = {name: params[name] for name in step.trainable_of(phase)}
        return pool, failed, step.encode_grad(phase, params, start, d_pool, offset, trained)

    arguments = (EncoderRows.of(row), pool, np.int32(offset), np.int32(5), d_pool)
    return jax.device_get(program(params, *arguments))


@pytest.mark.parametrize(
    "phase, mesh, settings",
    [
        ("vision", "fsdp2", {"layout": WIDE_ENCODERS}),
        pytest.param("audio", "context2", {}, marks=EXHAUSTIVE),
        pytest.param("vision", "context2", {"remat": "full"}, marks=EXHAUSTIVE),
        pytest.param("vision", "fsdp2", {"freeze": True}, marks=EXHAUSTIVE),
        pytest.param("audio", "fsdp8", {"freeze": True}, marks=pytest.mark.slow),
        pytest.param("audio", "context2", {"freeze": True}, marks=EXHAUSTIVE),
        pytest.param("audio", "tensor2", {"remat": "dots"}, marks=EXHAUSTIVE),
    ],
)
def test_an_encoder_row_of_several_ranks(phase, mesh, settings):
    """Pools, counts of failures and gradients agree, even for a frozen tower or with `remat`."""
    sizes, span = MESHES[mesh]
    with jax.enable_x64(True):
        step = make_step(cut_mesh(sizes), **settings).spanned(phase, span)
        layout = step.model.layout(phase)
        row = encoder_row(phase, layout.groups)
        row_format = FORMATS[phase]
        tokens = SLOTS[phase] // row_format.slots_per_token
        d_tokens = np.random.default_rng(4).standard_normal((layout.groups, tokens, WIDTH))
        one_rank = copied(row)
        finish_encoder_row(one_rank, attention(phase, 1), phase, row_format)
        reference = make_step(reference_mesh(layout.groups), freeze=settings.get("freeze", False))
        expected = encoder_gradients(reference, phase, one_rank, layout.groups, tokens, 7, d_tokens)

        shared = copied(row)
        finish_encoder_row(shared, attention(phase, layout.parts), phase, row_format)
        assert (shared["places"] != one_rank["places"]).any(), "slots are dealt"
        abstract_rows = abstract_encoder_rows(
            layout, SLOTS[phase] // span, row_format, BLOCK, windows=phase in CONFIG.windows
        )
        assert jax.tree.map(np.shape, EncoderRows.of(shared)) == jax.tree.map(
            np.shape, abstract_rows
        )
        actual = encoder_gradients(step, phase, shared, layout.ranks, tokens // span, 11, d_tokens)

    # Different offsets (11 and 7) show that the offset of a microbatch is honoured
    for pool, reference_pool in zip(actual[0], expected[0], strict=True):
        filled_slots = pool[:, 11 : 11 + tokens // span]
        reference_slots = reference_pool[:, 7 : 7 + tokens]
        close(filled_slots.reshape(reference_slots.shape), reference_slots, 1e-10)
        assert (pool[:, :11] == pool[0, 0]).all(), "only the microbatch's slots are written"
    assert actual[1] == expected[1]
    close(actual[2], expected[2], 1e-10)
