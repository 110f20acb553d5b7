"""The pairs of tokens that attend to each other beyond what lengths tell: against
counting them in the mask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmllm.attention.mask import TokenIds, causal_ids, item_ids, visible
from jaxmllm.balance.costs.flops import ItemCost, phase_flops, phase_layers
from jaxmllm.balance.costs.gather import gathered_bytes
from jaxmllm.balance.costs.visible_pairs import VisiblePairs
from jaxmllm.config.schema import ModelConfig
from tests.balance.costs.test_flops import MODEL, NOTHING


def counted(ids: TokenIds) -> int:
    """Pairs that the dense mask shows."""
    return int(visible(ids.map(lambda column: column[:, None]), ids).sum())


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 12)), min_size=1, max_size=6),
    st.integers(1, 20),
)
def test_a_sequence_counts_the_pairs_that_its_masks_show(parts, window):
    """`squares` is twice the number of pairs without the diagonal, which causal attention counts
    half. Inside of images, which are seen in both directions, it counts fully."""
    tokens = [size for _, size in parts]
    groups = np.repeat([n * media for n, (media, _) in enumerate(parts, 1)], tokens).astype(
        np.int32
    )
    ids = causal_ids(np.ones_like(groups), groups)
    images = np.array([size for media, size in parts if media], np.int32)
    pairs = VisiblePairs(language_window=window, bidirectional=("vision",))
    media = [
        ("vision", np.zeros_like(images), images),
        ("audio", np.zeros(1, np.int32), images[:1]),
    ]
    extra = pairs.of_sequences(1, media[: 1 + bool(len(images))])[0]
    squares = ItemCost(0, 1, 1, window).squares(len(groups), extra)
    window_diagonal = np.minimum(len(groups), window) - np.minimum(images, window).sum()
    assert 2 * counted(ids) == squares[0] + len(groups) - images.sum()
    assert 2 * counted(ids.within(window)) == squares[1] + window_diagonal


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 9))
def test_an_image_counts_the_pairs_in_its_windows(height, width, side):
    """Windows of `side` x `side` patches, cut off at the edges of the image."""
    rows, columns = np.divmod(np.arange(height * width), width)
    windows = 1 + rows // side * (width // side + 1) + columns // side
    shapes = np.array([[1, height, width]], np.int32)
    (extra,) = VisiblePairs(tower_window=side).of_items("vision", shapes)
    squares = ItemCost(0, 1, 1, side**2, apart=True).squares(height * width, extra)
    assert squares == ((height * width) ** 2, counted(item_ids(windows)))


def test_patches_see_an_item_and_conditions_apart():
    """Patches and the tokens of their condition share slots, so an item has as many slots as the
    more numerous of them."""
    shapes = np.array([[2, 4, 5], [1, 6, 7], [1, 2, 3]], np.int32)
    tokens = np.array([3, 0, 9], np.int32)
    extra = VisiblePairs(crossed=("diffusion",)).of_items("diffusion", shapes, tokens)
    patches = shapes.prod(axis=1)
    squares, _ = ItemCost(0, 1).squares(np.maximum(patches, tokens), extra.T)
    assert squares.tolist() == (patches * patches + patches * tokens).tolist()


@given(st.integers(1, 60), st.integers(1, 20))
def test_a_clip_counts_the_pairs_in_its_chunks(frames, chunk):
    shapes = np.array([[frames, 1, 1]], np.int32)
    (extra,) = VisiblePairs(chunk=chunk).of_items("audio", shapes)
    squares = ItemCost(0, 1, 1, chunk, apart=True).squares(frames, extra)
    assert squares == (frames**2, counted(item_ids(1 + np.arange(frames) // chunk)))


def test_an_attention_apart_costs_queries_and_sends_as_much_as_the_first():
    """Cross-attention adds two products per layer with the weights of patches, and sends its keys
    and values as well. Its pairs are already among those of the item's slots."""
    drawing = {"width": 16, "layers": 3, "heads": 2, "mlp_width": 24}
    tree = MODEL.model_dump(by_alias=True) | {"diffusion": drawing}
    joint = ModelConfig.model_validate(tree)
    cross = ModelConfig.model_validate(tree | {"diffusion": drawing | {"conditioning": "cross"}})
    assert VisiblePairs.of_model(joint).crossed == ()
    assert VisiblePairs.of_model(cross).crossed == ("diffusion",)
    costs = [phase_flops(model, "diffusion", NOTHING) for model in (joint, cross)]
    # 3 layers, 2 more matrices of 16 x 16 (queries and output), 2 FLOPs per parameter.
    assert costs[1].linear - costs[0].linear == 3 * 2 * 2 * 16**2
    assert costs[1].quadratic == costs[0].quadratic
    sent = [gathered_bytes(model, "diffusion") for model in (joint, cross)]
    assert sent[1] == 2 * sent[0]


def test_of_two_streams_a_slot_runs_one():
    """A second stream doubles the weights of attention and MLP, but a slot
    passes through one stream."""
    diffusion = {"width": 16, "layers": 3, "heads": 2, "mlp_width": 24}
    tree = MODEL.model_dump(by_alias=True)
    models = [
        ModelConfig.model_validate(tree | {"diffusion": diffusion | {"streams": streams}})
        for streams in (1, 2)
    ]
    single, double = (phase_flops(model, "diffusion", NOTHING) for model in models)
    assert single == double
    single, double = (
        sum(layer.parameters for layer in phase_layers(model, "diffusion")) for model in models
    )
    assert double - single == 3 * (4 * 16**2 + 2 * 16 * 24)
    adapted = [len(model.diffusion.matrices) for model in models]
    assert adapted == [6, 12]


def test_a_model_says_what_counts():
    """Causal media, and towers without windows, add no pairs to what lengths tell."""
    tree = MODEL.model_dump(by_alias=True)
    tree["vision"] |= {"window": 8, "full_layers": (1,)}
    tree["language"]["bidirectional"] = ("vision",)
    model = ModelConfig.model_validate(tree)
    pairs = VisiblePairs.of_model(model)
    assert pairs == VisiblePairs(8, None, ("vision",))
    owner = np.array([0, 0, 2], np.int32)
    tokens = np.array([3, 4, 5], np.int32)
    extra = pairs.of_sequences(3, [("vision", owner, tokens), ("audio", owner, tokens)])
    assert extra.tolist() == [[25, 25], [0, 0], [25, 25]]
    flops = phase_flops(model, "vision", NOTHING)
    per_pair = 4 * model.vision.width
    # Windows of 8 x 8 in 37 x 37 patches: 16 whole ones, 8 at two edges, one in the corner.
    seen_pairs = 16 * 64**2 + 8 * 40**2 + 25**2
    shapes = np.array([[1, 37, 37]], np.int32)
    extra = pairs.of_items("vision", shapes).T
    assert flops.attention(np.array([1369]), extra) == pytest.approx(
        per_pair * (1369**2 + seen_pairs)
    )
    assert VisiblePairs().of_items("vision", shapes) is pairs.of_items("audio", shapes) is None
    tree["audio"] |= {"attention": "chunk", "chunk_frames": 96}
    model = ModelConfig.model_validate(tree)
    assert VisiblePairs.of_model(model).chunk == 96
    flops = phase_flops(model, "audio", NOTHING)
    per_pair = 4 * model.audio.width
    stride = model.audio.stem_stride
    layers = model.audio.layers
    clips = np.array([[200, 1, 1]], np.int32)
    extra = VisiblePairs.of_model(model).of_items("audio", clips).T
    seen_pairs = layers * (2 * 96**2 + 8**2) / stride**2
    assert flops.attention(np.array([200]), extra) == pytest.approx(per_pair * seen_pairs)
    tree["audio"] |= {"stem_channels": 2, "chunk_frames": 99, "window_chunks": 2}
    model = ModelConfig.model_validate(tree | {"audio": tree["audio"] | {"merge": 1}})
    pairs = VisiblePairs.of_model(model)
    clips = np.array([[250, 1, 1]], np.int32)
    slots = 2 * 104 + 52
    extra = pairs.of_items("audio", clips).T
    assert extra.tolist() == [[0], [208**2 + 52**2 - slots * 208]], "two chunks see each other"


def test_tiles_see_themselves_and_their_class_token():
    shapes = np.array([[1, 4, 4], [3, 2, 6]], np.int32)
    extra = VisiblePairs(tiled=True).of_items("vision", shapes)
    slots = np.array([17, 3 * 13])
    np.testing.assert_array_equal(slots**2 + extra[:, 0], [17**2, 3 * 13**2])
    assert not extra[:, 1].any(), "there are no windows"
