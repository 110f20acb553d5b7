"""Every tower against a reference in plain numpy, in float64, one unpacked item at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from jaxmllm.config.schema import (
    AudioConfig,
    ComponentConfig,
    ComponentsConfig,
    LanguageConfig,
    ModelConfig,
    ProjectorComponents,
    ProjectorConfig,
    ProjectorShapes,
    VisionConfig,
)
from jaxmllm.data.rows.masks import AttentionSpec, finish_encoder_row, finish_language_row
from jaxmllm.models.compose import build_model
from jaxmllm.models.language import rope_sections
from jaxmllm.models.rows import EncoderRows, LanguageRows
from jaxmllm.models.vision import VisionTower, aligned_weights, resampling_weights
from jaxmllm.row_format import RowFormat
from sharding.mesh import make_mesh

MESH = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
VOCABULARY = 40
SLOTS = 64
BLOCK = 32
VISION = VisionConfig(width=16, layers=2, heads=2, mlp_width=24, patch_size=2, rope_theta=50.0)
AUDIO = AudioConfig(
    width=16, layers=2, heads=2, mlp_width=24, mel_bins=5, chunk_frames=16, rope_theta=70.0
)
FULL = LanguageConfig(
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=8,
    mlp_width=24,
    rope_sections=(1, 1, 2),
    rope_theta=90.0,
    qkv_bias=True,
    qk_norm=True,
)
TIED = LanguageConfig(
    width=16, layers=1, heads=2, kv_heads=2, head_size=16, mlp_width=24, tie_embeddings=True
)


# ---------------------------------------------------------------------------- the reference


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rms_norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def turn(x, angles):
    """Pairs (i, i + K / 2) of x [n, H, K] turned by angles [n, K / 2]."""
    pairs = x.shape[-1] // 2
    turned = (x[..., :pairs] + 1j * x[..., pairs:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attend(q, k, v, visible):
    """Attention query by query and head by head; a query that sees nothing gets zeros."""
    outputs = np.zeros_like(q)
    for i, head in np.ndindex(q.shape[:2]):
        visible_keys = np.flatnonzero(visible[i])
        key_head = head // (q.shape[1] // k.shape[1])
        if len(visible_keys):
            logits = k[visible_keys, key_head] @ q[i, head] / np.sqrt(q.shape[-1])
            weights = np.exp(logits - logits.max())
            outputs[i, head] = weights / weights.sum() @ v[visible_keys, key_head]
    return outputs


def layer(x, p, angles, visible):
    """One layer with whatever parameters it has: biases, and norms of queries and keys."""
    y = rms_norm(x, p["attention_norm"]["scale"])
    attention_params = p["attention"]

    def heads(name):
        projected = np.einsum("nd,dhk->nhk", y, attention_params[name]) + attention_params.get(
            f"{name}_bias", 0
        )
        return (
            rms_norm(projected, attention_params[f"{name}_norm"]["scale"])
            if f"{name}_norm" in attention_params
            else projected
        )

    mixed = attend(
        turn(heads("query"), angles), turn(heads("key"), angles), heads("value"), visible
    )
    x = (
        x
        + np.einsum("nhk,hkd->nd", mixed, attention_params["out"])
        + attention_params.get("out_bias", 0)
    )
    return x + mlp(rms_norm(x, p["mlp_norm"]["scale"]), p["mlp"])


def mlp(x, p):
    """A gated MLP with silu or a plain one with gelu, by its parameters."""
    if "gate" in p:
        gate = x @ p["gate"]
        return (gate / (1 + np.exp(-gate)) * (x @ p["up"])) @ p["down"]
    return gelu(x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def transformer(x, p, angles, visible, pool=1):
    """All layers and the last norm. `visible` is [n, n], or one such mask per layer; with `pool`,
    means of that many neighbours are normed."""
    layers = len(p["layers"]["mlp"]["up"])
    for i, layer_visible in enumerate(np.broadcast_to(visible, (layers, *visible.shape[-2:]))):
        x = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], p["layers"]), angles, layer_visible)
    return rms_norm(x.reshape(-1, pool, x.shape[-1]).mean(axis=1), p["norm"]["scale"])


def decoder(p, config, embedded, positions):
    """One example: [n, D] and [n, 3] -> hidden states [n, D]."""
    pairs = config.head_size // 2
    time, height, _ = rope_sections(config)
    axis = [0 if i < time else 1 if i < time + height else 2 for i in range(pairs)]
    angles = np.stack(
        [positions[:, axis[i]] * config.rope_theta ** (-i / pairs) for i in range(pairs)], axis=1
    )
    return transformer(embedded, p, angles, np.tri(len(embedded), dtype=bool))


def vision_tower(p, config, pixels, positions):
    """One image: [n, F] and (row, column) [n, 2] -> [n, D]."""
    x = (pixels.astype(float) / 255 * 2 - 1) @ p["patch"] + p["patch_bias"]
    axis_pairs = config.head_size // 4
    frequency = config.rope_theta ** (-np.arange(axis_pairs) / axis_pairs)
    angles = np.concatenate([positions[:, :1] * frequency, positions[:, 1:] * frequency], axis=1)
    visible = np.ones((config.layers, len(x), len(x)), bool)
    if config.window is not None:
        windows = positions // config.window
        inside = (windows[:, None] == windows).all(axis=2)
        visible[[i for i in range(config.layers) if i not in config.full_layers]] = inside
    return transformer(x, p, angles, visible)


def halving_convolution(p, chunk, frames):
    """A convolution of three taps and stride 2 that does not read over the edges of
    chunks of `chunk` frames."""
    outputs = np.empty((len(frames) // 2, p["kernel"].shape[1]))
    taps = np.split(p["kernel"], 3)
    for t in range(len(outputs)):
        outputs[t] = p["bias"]
        for tap, matrix in enumerate(taps):
            if (source := 2 * t - 1 + tap) >= 2 * t // chunk * chunk:
                outputs[t] += frames[source] @ matrix
    return gelu(outputs)


def audio_tower(p, config, frames, real):
    """One clip with `real` frames of data -> [n / 4 / pool, D], with zeros
    for tokens without data."""
    stem = halving_convolution(p["stem_mels"], config.chunk_frames, frames)
    if config.silence == "masked":
        stem[np.arange(len(stem)) * 2 >= real] = 0
    x = halving_convolution(p["stem_width"], config.chunk_frames // 2, stem)
    token = np.arange(len(x))
    pairs = config.head_size // 2
    angles = token[:, None] * config.rope_theta ** (-np.arange(pairs) / pairs)
    if config.positions == "sinusoidal":
        angles[:] = 0
        for i, channel in np.ndindex(len(x), half_width := config.width // 2):
            turns = i % (config.chunk_frames // 4) / 10_000 ** (channel / (half_width - 1))
            x[i, [channel, half_width + channel]] += np.sin(turns), np.cos(turns)
    audible = token * 4 < real
    visible = audible[:, None] & audible
    if config.attention == "chunk":
        chunk = token * 4 // config.chunk_frames
        visible &= chunk[:, None] == chunk
    features = transformer(x, p, angles, visible, config.pool)
    return np.where(audible[:: config.pool, None], features, 0)


# ---------------------------------------------------------------------------- rows


def packed(spans, slots=SLOTS):
    """Segments of `spans` [(row, start, stop)], numbered within each row."""
    segments = np.zeros((1 + max(row for row, _, _ in spans), slots), np.int32)
    for row, start, stop in spans:
        segments[row, start:stop] = segments[row].max() + 1
    return segments


def randomized(model, seed=1):
    """Random parameters, none of which stays at zero or one, where mistakes would be hidden."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: 0.3 * rng.standard_normal(leaf.shape), model.abstract("float64")
    )


def build(**towers):
    """A model of the given components that computes in float64; the audio tower has
    the ranks of all axes."""
    float64 = ComponentConfig(compute_dtype="float64")
    over_all_axes = ComponentConfig(
        compute_dtype="float64", layout={"batch": ["data", "fsdp", "tensor"]}
    )
    projector = ProjectorConfig(compute_dtype="float64")
    settings = ComponentsConfig(
        vision=float64,
        audio=over_all_axes,
        language=float64,
        projector=ProjectorComponents(vision=projector, audio=projector),
    )
    return build_model(ModelConfig(**towers), VOCABULARY, settings, MESH)


@pytest.fixture(scope="module")
def encoders():
    with jax.enable_x64(True):
        model = build(language=TIED, vision=VISION, audio=AUDIO)
        return model, randomized(model)


def encode(encoders, phase, rows):
    """Features of a tower and tokens of its projector for some rows."""
    model, params = encoders
    with jax.enable_x64(True):

        @jax.jit
        def run(params, rows):
            features = model.features(params, phase, rows)
            return features, model.project(params, phase, features, rows.places)

        return [np.asarray(x) for x in run(params, rows)]


def encoder_rows(
    features, positions, segments, slots_per_token, stride=1, block=BLOCK, windows=None, parts=1
):
    """Rows of an encoder as the data pipeline finishes them."""
    ranks, slots = segments.shape
    row = {
        "features": features,
        "segments": segments,
        "positions": positions,
        "valid": np.ones((ranks, slots // slots_per_token), bool),
        "failed": np.zeros(ranks, np.int32),
    }
    row_format = RowFormat(
        *(features.shape[-1], features.dtype, slots_per_token, stride),
        alignment=1,
        axes=(1, 2),
        margin=stride,
    )
    windows = {} if windows is None else {"tower": windows}
    attention = AttentionSpec({"tower": block}, {"tower": parts}, windows=windows)
    finish_encoder_row(row, attention, "tower", row_format)
    return EncoderRows.of(row)


def close(got, want):
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * abs(want).max())


# ---------------------------------------------------------------------------- towers


@pytest.mark.parametrize("config", [FULL, TIED], ids=["full", "tied"])
def test_decoder(config):
    """Packed examples of several lengths, with tokens of media among the text,
    against each example alone."""
    spans = [(0, 0, 20), (0, 20, 21), (0, 21, 60), (1, 0, 64), (3, 0, 30), (3, 30, 50)]
    rng = np.random.default_rng(0)
    segments = packed(spans)
    tokens = rng.integers(0, VOCABULARY, segments.shape).astype(np.int32)
    positions = rng.integers(0, 60, (*segments.shape, 3)).astype(np.int32)
    media = np.where(rng.random(segments.shape) < 0.3, 0, -1).astype(np.int32)
    arrived = rng.standard_normal((*segments.shape, config.width))
    row = {
        "tokens": tokens,
        "targets": np.full_like(tokens, -1),
        "segments": segments,
        "positions": positions,
        "media": media,
        "sources": np.zeros((4, 3), np.int32),
        "groups": np.zeros_like(tokens),
    }
    finish_language_row(row, AttentionSpec({"language": BLOCK}))
    rows = LanguageRows.of(row)
    with jax.enable_x64(True):
        model = build(language=config)
        params = randomized(model)
        hidden = jax.jit(lambda *arguments: model.hidden(*arguments)[0])(
            params, rows, jnp.asarray(arrived)
        )
    language_params = params["language"]
    assert ("head" in language_params) == (config is FULL)
    head = model.head(params)
    close(
        np.asarray(head.matrix),
        language_params["head"] if config is FULL else language_params["embedding"],
    )
    assert head.axes == (("embed", "vocab") if config is FULL else ("vocab", "embed"))
    for row, start, stop in spans:
        span = row, slice(start, stop)
        embedded = np.where(
            media[span][:, None] >= 0, arrived[span], language_params["embedding"][tokens[span]]
        )
        close(np.asarray(hidden)[span], decoder(language_params, config, embedded, positions[span]))


def test_default_sections_share_the_pairs():
    assert rope_sections(TIED) == (2, 3, 3)
    assert rope_sections(TIED.model_copy(update={"head_size": 128})) == (16, 24, 24)  # Qwen2-VL's
    assert rope_sections(FULL) == (1, 1, 2)


def test_vision_tower_and_projector(encoders):
    spans = [(0, 0, 12), (0, 12, 16), (0, 16, 56), (1, 0, 64), (3, 0, 24)]
    rng = np.random.default_rng(1)
    segments = packed(spans)
    pixels = rng.integers(0, 256, (4, SLOTS, 12)).astype(np.uint8)
    positions = rng.integers(0, 30, (4, SLOTS, 2)).astype(np.int32)
    features, tokens = encode(encoders, "vision", encoder_rows(pixels, positions, segments, 4))
    params = encoders[1]
    for row, start, stop in spans:
        want = vision_tower(
            params["vision"], VISION, pixels[row, start:stop], positions[row, start:stop]
        )
        close(features[row, start:stop], want)
        want = mlp(want.reshape(-1, 4 * VISION.width), params["projector.vision"]["mlp"])
        close(tokens[row, start // 4 : stop // 4], want)


@pytest.mark.parametrize(("window", "full_layers"), [(2, ()), (4, (1,)), (3, (1,))])
def test_vision_tower_in_windows(window, full_layers):
    """Features, tokens and a directional derivative equal those of dense attention.

    Images have several sizes, and windows are cut at their edges. Windows of 3 also cut merged
    cells. Rows are computed in another order, but results are in the order of the image.
    """
    config = VISION.model_copy(update={"window": window, "full_layers": full_layers})
    shapes = [(0, 0, 6, 4), (0, 24, 4, 8), (1, 0, 8, 8), (3, 4, 2, 2)]  # row, start, height, width
    rng = np.random.default_rng(4)
    segments = packed(
        [(row, start, start + height * width) for row, start, height, width in shapes]
    )
    pixels = rng.integers(0, 256, (4, SLOTS, 12)).astype(np.uint8)
    positions = np.zeros((4, SLOTS, 2), np.int32)
    for row, start, height, width in shapes:
        # Patches are in the order of merged cells, and within a cell by row and column.
        cells = np.indices((height // 2, width // 2, 2, 2)).reshape(4, -1)
        positions[row, start : start + height * width] = np.stack(
            [2 * cells[0] + cells[2], 2 * cells[1] + cells[3]], 1
        )
    with jax.enable_x64(True):
        model = build(language=TIED, vision=config)
        params = randomized(model)
        # Arrays are copied because finishing rows reorders them in place.
        rows = encoder_rows(
            pixels.copy(), positions.copy(), segments.copy(), 4, block=16, windows=config
        )
        features, tokens = encode((model, params), "vision", rows)
        weights = rng.standard_normal(tokens.shape)

        def loss(params):
            features = model.features(params, "vision", rows)
            tokens = model.project(params, "vision", features, rows.places)
            real = jnp.repeat(segments[:, ::4, None] > 0, tokens.shape[2], axis=2)
            return jnp.sum(jnp.where(real, weights * tokens, 0))

        gradients = jax.device_get(jax.jit(jax.grad(loss))(params))
    assert any((np.diff(row_places) != 1).any() for row_places in rows.places)
    features = np.take_along_axis(
        features.reshape(4, -1, 4, config.width), rows.places[:, :, None, None], axis=1
    ).reshape(features.shape)

    def expected(params):
        """Slots, tokens, and the reference of features and tokens, image by image."""
        for row, start, height, width in shapes:
            patch_span = row, slice(start, start + height * width)
            tower_features = vision_tower(
                params["vision"], config, pixels[patch_span], positions[patch_span]
            )
            merged = tower_features.reshape(-1, 4 * config.width)
            token_span = row, slice(start // 4, (start + height * width) // 4)
            yield (
                patch_span,
                token_span,
                tower_features,
                mlp(merged, params["projector.vision"]["mlp"]),
            )

    for patch_span, token_span, tower_features, projected in expected(params):
        close(features[patch_span], tower_features)
        close(tokens[token_span], projected)
    direction = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), params)
    loss_ahead, loss_behind = (
        sum(
            (weights[span] * output).sum()
            for _, span, _, output in expected(
                jax.tree.map(lambda leaf, d, step=step: leaf + step * d, params, direction)
            )
        )
        for step in (1e-6, -1e-6)
    )
    products = jax.tree.map(lambda g, d: (g * d).sum(), gradients, direction)
    used_products = [products[name] for name in ("vision", "projector.vision")]
    assert sum(jax.tree.leaves(used_products)) == pytest.approx(
        (loss_ahead - loss_behind) / 2e-6, rel=1e-6
    )


@pytest.mark.parametrize(("places", "side"), [(5, 5), (7, 4), (16, 4), (3, 8), (1, 4), (5, 16)])
def test_resampling_is_that_of_image_libraries(places, side):
    """Against PIL's bilinear filter; padding, with no places at all, stays finite."""
    values = np.random.default_rng(0).standard_normal((1, side)).astype(np.float32)
    weights = np.asarray(
        resampling_weights(np.arange(places), np.full(places, places), side, np.float32)
    )
    resized = Image.fromarray(values).resize((places, 1), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(weights @ values[0], np.asarray(resized)[0], rtol=0, atol=2e-6)
    padding = resampling_weights(np.zeros(1, np.int32), np.zeros(1, np.int32), side, np.float32)
    assert np.isfinite(padding).all()


@pytest.mark.parametrize(("places", "side"), [(1, 5), (3, 5), (5, 5), (12, 5)])
def test_aligned_resampling_is_linear_from_corner_to_corner(places, side):
    """The first and last place fall on the first and last value."""
    values = np.random.default_rng(0).standard_normal(side)
    weights = aligned_weights(np.arange(places), np.full(places, places), side, np.float32)
    coordinates = np.linspace(0, side - 1, places)
    expected = np.interp(coordinates, np.arange(side), values)
    np.testing.assert_allclose(np.asarray(weights) @ values, expected, atol=2e-6)


def audio_rows(clips, slots=128, chunk=None):
    """Rows of `clips` [(row, start, stop, frames [real, F])]. With `chunk`, chunks of that many
    frames see themselves alone."""
    features = np.zeros((8, slots, AUDIO.mel_bins))
    segments = np.zeros((8, slots), np.int32)
    positions = np.zeros((8, slots, 2), np.int32)
    for index, (row, start, stop, frames) in enumerate(clips, 1):
        features[row, start : start + len(frames)] = frames
        chunk_offsets = 0 if chunk is None else np.arange(len(frames)) // chunk * len(clips)
        segments[row, start : start + len(frames)] = index + chunk_offsets
        positions[row, start:stop, 0] = np.arange(stop - start) // 4
    return encoder_rows(features, positions, segments, 8, stride=4)


CHUNKED = AUDIO.model_copy(
    update={
        "rope_theta": 10_000.0,
        "positions": "sinusoidal",
        "silence": "masked",
        "attention": "chunk",
        "pool": 2,
        "merge": 1,
        "projector": ProjectorShapes(linear=True),
    }
)


@pytest.mark.parametrize("config", [AUDIO, pytest.param(CHUNKED, marks=pytest.mark.slow)])
def test_audio_tower_and_projector(encoders, config):
    """Most clips end inside a chunk of 16 frames, and the next clip begins there."""
    if config != AUDIO:
        with jax.enable_x64(True):
            model = build(language=TIED, audio=config)
            encoders = model, randomized(model)
    spans = [
        (0, 0, 32, 27),
        (0, 32, 40, 8),
        (0, 40, 48, 1),
        (0, 48, 104, 49),
        (1, 0, 128, 125),
        (2, 8, 32, 18),
    ]
    rng = np.random.default_rng(2)
    clips = [
        (*span, rng.standard_normal((real, AUDIO.mel_bins)))
        for *span, real in [*spans, (7, 0, 48, 41)]
    ]
    rows = audio_rows(clips, chunk=config.chunk_frames if config.attention == "chunk" else None)
    features, tokens = encode(encoders, "audio", rows)
    params = encoders[1]
    slots = 4 * config.pool
    projector = params["projector.audio"]
    for row, start, stop, frames in clips:
        want = audio_tower(params["audio"], config, rows.features[row, start:stop], len(frames))
        close(features[row, start // slots : stop // slots], want)
        want = want.reshape(-1, config.merge * config.width)
        if config.projector.linear:
            want = want @ projector["linear"] + projector["linear_bias"]
        else:
            want = mlp(want, projector["mlp"])
        close(tokens[row, start // 8 : stop // 8], want)


@pytest.mark.slow
def test_a_stem_of_stride_one_keeps_clips_apart():
    """Three neighbours, which end inside a chunk, at its end and in the next one, have the
    features that each has alone."""
    config = AUDIO.model_copy(
        update={
            "rope_theta": 10_000.0,
            "stem_strides": (1, 2),
            "positions": "table",
            "norm": "layer",
            "gelu": "exact",
            "key_bias": False,
        }
    )
    rng = np.random.default_rng(5)
    spans = [(0, 12, 10), (12, 28, 16), (28, 52, 21)]  # frames: begin, end, and how many are real
    clips = [rng.standard_normal((real, config.mel_bins)) for *_, real in spans]
    features = np.zeros((8, 64, config.mel_bins))
    segments = np.zeros((8, 64), np.int32)
    positions = np.zeros((8, 64, 2), np.int32)
    for row in range(4):
        for index, ((begin, end, real), clip) in enumerate(zip(spans, clips, strict=True), 1):
            if row in (0, index):  # row 0 has all clips, the others one each
                features[row, begin : begin + real] = clip
                segments[row, begin : begin + real] = index
                positions[row, begin:end, 0] = np.arange(end - begin) // 2
    rows = encoder_rows(features, positions, segments, 4, stride=2, block=32)
    with jax.enable_x64(True):
        model = build(language=TIED, audio=config)
        encoded, _ = encode((model, randomized(model)), "audio", rows)
    for index, (begin, _, real) in enumerate(spans, 1):
        tokens = slice(begin // 2, begin // 2 + -(-real // 2))
        close(encoded[0, tokens], encoded[index, tokens])


LINE = {"rope_theta": 10_000.0, "positions": "sinusoidal"}
STEMS = {
    "strides-of-two": AUDIO,
    "stride-of-one": AUDIO.model_copy(update=LINE | {"stem_strides": (1, 2)}),
    "masked": AUDIO.model_copy(update=LINE | {"silence": "masked"}),
    # Chunks of 14 frames take 16 slots, which are two tokens.
    "planes": AUDIO.model_copy(update=LINE | {"stem_channels": 4, "chunk_frames": 14, "merge": 1}),
}


@pytest.mark.parametrize("config", STEMS.values(), ids=list(STEMS))
def test_a_stem_reads_over_the_edges_of_blocks(config):
    """Clips begin and end, and have chunks, anywhere in blocks of four tokens; devices hold blocks
    that are not neighbours."""
    stride = config.stem_stride
    chunk = config.chunk_slots
    slots = 32 * stride
    block = 4
    rng = np.random.default_rng(7)
    features = rng.standard_normal((8, slots, config.mel_bins))
    segments = np.zeros((8, slots), np.int32)
    positions = np.zeros((8, slots, 2), np.int32)
    for row in range(8):
        start = 0
        for clip in range(1, 6):
            tokens = int(rng.integers(1, 9))
            stop = start + tokens * stride
            is_frame = np.arange(tokens * stride) < tokens * stride - rng.integers(0, stride)
            is_frame &= np.arange(tokens * stride) % chunk < config.chunk_frames
            segments[row, start:stop] = np.where(is_frame, clip, 0)[: slots - start]
            positions[row, start:stop, 0] = (np.arange(tokens * stride) // stride)[: slots - start]
            start = min(stop, slots)
        features[row] *= segments[row, :, None] > 0
    with jax.enable_x64(True):
        model = build(language=TIED, audio=config)
        params = randomized(model)
        stem = jax.jit(lambda params, rows: model.stem(params, "audio", rows))
        arguments = features, positions, segments, stride, stride, block
        undealt, dealt = (
            encoder_rows(*map(np.copy, arguments[:3]), *arguments[3:], parts=parts)
            for parts in (1, 4)
        )
        want, got = (np.asarray(stem(params, rows)) for rows in (undealt, dealt))
    assert (dealt.places != undealt.places).any()
    close(np.take_along_axis(got, dealt.places[..., None], axis=1), want)


def test_clips_have_the_gradients_that_they_have_alone(encoders):
    """Gradients of frames and of all parameters, with clips packed behind one another or each at
    the start of its own row."""
    model, params = encoders
    rng = np.random.default_rng(5)
    sizes = [(32, 27), (8, 8), (8, 1), (56, 49), (24, 18)]  # slots, frames
    frames = [rng.standard_normal((real, AUDIO.mel_bins)) for _, real in sizes]
    d_tokens = [rng.standard_normal((slots // 8, TIED.width)) for slots, _ in sizes]
    starts = np.cumsum([0, *(slots for slots, _ in sizes[:-1])])
    places = {
        "packed": [(0, start) for start in starts],
        "alone": [(row, 0) for row in range(len(sizes))],
    }

    def gradients(places):
        """Gradients of parameters and of the frames of each clip, with the
        clips at these places."""
        spans = [
            (row, start, start + slots)
            for (row, start), (slots, _) in zip(places, sizes, strict=True)
        ]
        rows = audio_rows([(*span, clip) for span, clip in zip(spans, frames, strict=True)])

        def loss(params, features):
            with_features = rows._replace(features=features)
            tokens = model.project(
                params, "audio", model.features(params, "audio", with_features), rows.places
            )
            of_clips = zip(spans, d_tokens, strict=True)
            return sum(
                (tokens[row, start // 8 : stop // 8] * d).sum()
                for (row, start, stop), d in of_clips
            )

        d_params, d_features = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, rows.features)
        audio_gradients = {name: d_params[name] for name in ("audio", "projector.audio")}
        return audio_gradients, [d_features[row, start:stop] for row, start, stop in spans]

    with jax.enable_x64(True):
        packed, separate = (jax.device_get(gradients(places[name])) for name in ("packed", "alone"))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(separate))
    jax.tree.map(close, packed, separate)


def test_what_lies_behind_a_clip_has_no_gradient():
    """A clip of one frame ends in the middle of a language token.

    Biases are zero at first, so the other half of that token is zero in all layers. Each norm would
    make its gradient a thousand times larger, beyond what float32 holds.
    """
    frames = np.random.default_rng(6).standard_normal((1, AUDIO.mel_bins))
    rows = audio_rows([(0, 0, 8, frames)])
    with jax.enable_x64(True):
        model = build(language=TIED, audio=AUDIO.model_copy(update={"layers": 16}))

        def loss(params):
            features = model.features(params, "audio", rows)
            return jnp.square(model.project(params, "audio", features, rows.places)[0, 0]).sum()

        gradients = jax.device_get(jax.jit(jax.grad(loss))(model.init(0, "float64"))["audio"])
    assert any(np.any(leaf) for leaf in jax.tree.leaves(gradients))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients)) < 100


def test_nothing_leaks_from_one_image_to_the_next(encoders):
    """Other pixels next to an image, and other values at padding, leave its features as
    they were, bit for bit."""
    spans = [(row, start, start + 32) for row in range(4) for start in (0,)]
    rng = np.random.default_rng(3)
    segments = packed([*spans, (0, 32, 52)])
    pixels = rng.integers(0, 256, (4, SLOTS, 12)).astype(np.uint8)
    positions = rng.integers(0, 30, (4, SLOTS, 2)).astype(np.int32)
    features_before, _ = encode(encoders, "vision", encoder_rows(pixels, positions, segments, 4))
    pixels[:, 32:] = rng.integers(0, 256, pixels[:, 32:].shape)
    features_after, _ = encode(encoders, "vision", encoder_rows(pixels, positions, segments, 4))
    np.testing.assert_array_equal(features_before[:, :32], features_after[:, :32])
    assert (features_before[0, 32:52] != features_after[0, 32:52]).any()


@pytest.mark.parametrize("mean", [(0.5, 0.5, 0.5), (0.48145466, 0.4578275, 0.40821073)])
def test_pixels_are_rounded_to_the_compute_dtype_once(mean):
    """All 256 values of a color against float64, within one rounding to bfloat16."""
    std = (0.26862954, 0.26130258, 0.27577711)
    config = VISION.model_copy(update={"pixel_mean": mean, "pixel_std": std})
    colors = np.arange(256, dtype=np.uint8)[None, :, None].repeat(12, axis=2)
    tower = VisionTower(config, nnx.Rngs(0))
    normalised = np.asarray(tower._normalised(jnp.asarray(colors), jnp.bfloat16), np.float64)
    expected = (colors / 255 - np.tile(mean, 4)) / np.tile(std, 4)
    np.testing.assert_allclose(normalised, expected, rtol=2**-8, atol=1e-6)
