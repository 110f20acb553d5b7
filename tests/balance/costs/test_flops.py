"""FLOPs per item against a list of every matrix product, written out by hand."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from jaxmllm.balance.costs.flops import ItemCost, head_flops, phase_flops, phase_layers
from jaxmllm.config.schema import (
    AdapterConfig,
    AdaptersConfig,
    AudioConfig,
    ExpertsConfig,
    LanguageConfig,
    ModelConfig,
    ProjectorShapes,
    VisionConfig,
)
from jaxmllm.tools.workload import MODEL as WORKLOAD

LANGUAGE = LanguageConfig(
    vocab_size=1000, width=64, layers=3, heads=8, kv_heads=2, head_size=16, mlp_width=96
)
VISION = VisionConfig(width=32, layers=2, heads=4, mlp_width=128, patch_size=14, merge=2)
AUDIO = AudioConfig(
    width=48, layers=5, heads=4, mlp_width=80, mel_bins=40, merge=2, chunk_frames=64
)
MODEL = ModelConfig(language=LANGUAGE, vision=VISION, audio=AUDIO)
ALL = dict.fromkeys(("vision", "audio", "projector.vision", "projector.audio", "language"), 1)
NOTHING: dict[str, int] = {}


def product(rows: int, inner: int, columns: int) -> int:
    """FLOPs of a matrix product: a multiplication and an addition per element."""
    return 2 * rows * inner * columns


def language_forward(n: int) -> tuple[int, int]:
    """(matrices, attention) of one sequence of `n` tokens, product by product; causal attention
    is half of all pairs."""
    layer = (
        product(n, 64, 8 * 16)
        + 2 * product(n, 64, 2 * 16)
        + product(n, 8 * 16, 64)
        + 3 * product(n, 64, 96)
    )
    pairs = 8 * (product(n, 16, n) + product(n, n, 16)) // 2
    return 3 * layer + product(n, 64, 1000), 3 * pairs


def tower_forward(t: int, width: int, heads: int, mlp: int, layers: int) -> tuple[int, int]:
    """(matrices, attention) of the blocks of an encoder on `t` tokens that all see each other."""
    layer = 4 * product(t, width, width) + product(t, width, mlp) + product(t, mlp, width)
    pairs = heads * (product(t, width // heads, t) + product(t, t, width // heads))
    return layers * layer, layers * pairs


def cost(flops: ItemCost, n: int) -> int:
    return flops.linear * n + flops.quadratic * n * n


@pytest.mark.parametrize("n", [16, 160])
def test_language_forward_and_backward(n):
    matrices, attention = language_forward(n)
    assert cost(phase_flops(MODEL, "language", NOTHING), n) == matrices + attention
    assert cost(phase_flops(MODEL, "language", ALL), n) == 3 * (matrices + attention)
    # A frozen language model returns the gradients of its inputs, but computes none of its weights.
    # Attention has no weights, so its backward pass is the whole one.
    aligned = phase_flops(MODEL, "language", {"projector.vision": 1})
    assert cost(aligned, n) == 2 * matrices + 3 * attention


@pytest.mark.parametrize(
    "trained, passes",
    [
        (NOTHING, 1),
        ({"projector.vision": 1}, 2),
        ({"language": Fraction(1, 3)}, 2 + Fraction(1, 3)),
        (ALL, 3),
    ],
)
def test_the_head_is_what_a_larger_vocabulary_adds_to(trained, passes):
    """A second thousand of words costs as much as the first; 1 FLOP is for
    the rounding of thirds."""
    assert head_flops(MODEL, trained) == round(passes * product(1, 64, 1000))
    larger = MODEL.model_copy(update={"language": LANGUAGE.model_copy(update={"vocab_size": 2000})})
    added = (
        phase_flops(larger, "language", trained).linear
        - phase_flops(MODEL, "language", trained).linear
    )
    assert abs(added - head_flops(MODEL, trained)) <= 1
    without_loss, with_loss = (
        phase_flops(MODEL, "language", trained, learns) for learns in (False, True)
    )
    assert abs(with_loss.linear - without_loss.linear - head_flops(MODEL, trained)) <= 1
    assert without_loss.quadratic == with_loss.quadratic and head_flops(MODEL, trained, False) == 0


@pytest.mark.parametrize("n", [1, 7, 8, 9, 100])
@pytest.mark.parametrize("trainable, passes", [(NOTHING, 1), (ALL, 3)])
def test_a_window_counts_the_pairs_that_it_leaves(n, trainable, passes):
    """Each token sees itself and up to 7 before it, in two of three layers. The diagonal counts
    half, as it does in the count of all causal pairs."""
    config = LANGUAGE.model_copy(update={"window": 8, "full_layers": (1,)})
    flops = phase_flops(MODEL.model_copy(update={"language": config}), "language", trainable)
    full = sum(query + 0.5 for query in range(n))
    windowed = sum(min(query, 8) + 0.5 - (query >= 8) * 0.5 for query in range(n))
    per_pair = 2 * product(1, 8 * 16, 1)
    assert flops.attention(n) == passes * per_pair * (full + 2 * windowed)
    matrices = language_forward(n)[0]
    assert flops.of(n) == passes * matrices + flops.attention(n)
    if n <= 8:
        assert flops.of(n) == phase_flops(MODEL, "language", trainable).of(n)
    layers = phase_layers(MODEL.model_copy(update={"language": config}), "language")
    forward = sum(layer.linear(n) + layer.attention(flops.squares(n)) for layer in layers)
    assert forward * passes == flops.of(n)


def test_experts_cost_what_a_token_chooses_and_hold_all():
    """With 2 of 6 experts a token runs one MLP more than the dense layer, and the layer holds five
    more; `product` counts two FLOPs per parameter."""
    experts = ExpertsConfig(count=6, per_token=2)
    model = MODEL.model_copy(update={"language": LANGUAGE.model_copy(update={"experts": experts})})
    mlp = 3 * product(1, 64, 96)
    router = product(1, 64, 6)
    added_flops = (
        phase_flops(model, "language", NOTHING).linear
        - phase_flops(MODEL, "language", NOTHING).linear
    )
    assert added_flops == 3 * (mlp + router)
    dense_parameters, expert_parameters = (
        phase_layers(config, "language")[1].parameters for config in (MODEL, model)
    )
    assert expert_parameters - dense_parameters == (5 * mlp + router) / 2


def test_measured_times_keep_the_shares_of_the_layers():
    """A measured time replaces the scale of the FLOPs; full and windowed layers keep
    their ratio of 30 to 10."""
    flops = ItemCost(100, quadratic=30, windowed=10, window=16)
    time = flops.measured(Decimal("7.0"), Decimal("400"))
    assert time == ItemCost(7, 300, 100, 16)
    assert time.attention(50) == pytest.approx(400 * flops.mean_squares(50))
    assert flops.shifted(1) == ItemCost(50, 15, 5, 16)
    length = np.array([5, 16, 20, 50])
    assert flops.of(length).tolist() == [flops.of(int(n)) for n in length]
    assert flops.total(length) == flops.of(length).sum()


@pytest.mark.parametrize("n", [16, 160])
def test_vision_by_freezing(n):
    """One forward pass everywhere; gradients of weights where they are trained, gradients of inputs
    where something trained lies before."""
    patches = product(n, 14 * 14 * 3, 32)
    blocks, attention = tower_forward(n, 32, 4, 128, 2)
    hidden = product(n // 4, 4 * 32, 64)
    output = product(n // 4, 64, 64)

    def measured(*trained: str) -> int:
        return cost(phase_flops(MODEL, "vision", dict.fromkeys(trained, 1)), n)

    assert measured() == measured("language") == patches + blocks + attention + hidden + output
    assert measured("projector.vision") == patches + blocks + attention + 2 * hidden + 3 * output
    assert measured("vision") == 2 * patches + 3 * (blocks + attention) + 2 * (hidden + output)
    assert measured(*ALL) == 2 * patches + 3 * (blocks + attention + hidden + output)


@pytest.mark.parametrize(
    ("positions", "summed"), [("table", 0), ("resampled", 1), ("rotary_and_resampled", 1)]
)
def test_learned_positions_are_looked_up_or_sums_of_a_table(positions, summed):
    """Resampling a learned table of 6 x 6 positions is a product of every patch
    with the whole table."""
    vision = {"positions": positions, "position_grid": 6}
    model = MODEL.model_copy(update={"vision": VISION.model_copy(update=vision)})
    for trained, passes in ((NOTHING, 1), (ALL, 2)):
        learned, rotary = (phase_flops(config, "vision", trained) for config in (model, MODEL))
        assert learned.linear - rotary.linear == summed * passes * product(1, 6 * 6, 32)
        assert learned.quadratic == rotary.quadratic
    (learned, *_), (rotary, *_) = (phase_layers(config, "vision") for config in (model, MODEL))
    assert learned.parameters - rotary.parameters == 6 * 6 * 32


def test_gated_towers_patches_of_frames_and_wider_projectors():
    """A gate is a third matrix of the MLP. Patches of two frames have twice the weights, but a
    still image only meets their sum. A projector may have its own hidden width."""
    choices = {"gated_mlp": True, "patch_frames": 2, "projector": ProjectorShapes(mlp_width=48)}
    chosen = MODEL.model_copy(update={"vision": VISION.model_copy(update=choices)})
    (patches, block, *_, projector), (plain_patches, plain_block, *_, plain_projector) = (
        phase_layers(config, "vision") for config in (chosen, MODEL)
    )
    assert block.linear(7) - plain_block.linear(7) == product(7, 32, 128)
    assert block.parameters - plain_block.parameters == 32 * 128
    assert patches.linear(7) == plain_patches.linear(7), "a still image meets a sum of weights"
    assert patches.parameters == 2 * plain_patches.parameters
    video_model = chosen.model_copy(
        update={"vision": VISION.model_copy(update=choices | {"videos": True})}
    )
    assert phase_layers(video_model, "vision")[0].linear(7) == 2 * plain_patches.linear(7)
    assert projector.parameters == 4 * 32 * 48 + 48 * 64
    assert plain_projector.parameters == 4 * 32 * 64 + 64 * 64
    assert projector.linear(8) == product(2, 4 * 32, 48) + product(2, 48, 64)


def test_pools_of_features_and_projectors_of_one_matrix():
    choices = {"pool": 3, "projector": ProjectorShapes(linear=True)}
    chosen = MODEL.model_copy(update={"audio": AUDIO.model_copy(update=choices)})
    (*stem, projector), (*plain_stem, plain) = (
        phase_layers(config, "audio") for config in (chosen, MODEL)
    )
    assert stem == plain_stem
    assert projector.parameters == AUDIO.merge * AUDIO.width * 64
    slots = 3 * AUDIO.merge * AUDIO.stem_stride
    assert projector.linear(slots) == product(1, AUDIO.merge * AUDIO.width, 64)
    assert plain.linear(slots) == 3 * (product(1, 2 * 48, 64) + product(1, 64, 64))


def test_projectors_of_means_read_one_feature():
    choices = {"projector": ProjectorShapes(linear=True, grouping="mean")}
    chosen = MODEL.model_copy(update={"vision": VISION.model_copy(update=choices)})
    projector = phase_layers(chosen, "vision")[-1]
    assert projector.parameters == VISION.width * 64
    assert projector.linear(4) == product(1, VISION.width, 64)


def test_deepstack_adds_projectors_side_by_side():
    """Two tapped layers add two projectors; their gradients go on into the tower only
    where that is trained."""
    tapped_vision = VISION.model_copy(update={"deepstack_layers": (0, 1)})
    model = MODEL.model_copy(update={"vision": tapped_vision})
    hidden = product(4, 4 * 32, 64)
    output = product(4, 64, 64)
    for trained, passes in ((NOTHING, (1, 1)), ({"projector.vision": 1}, (2, 3)), (ALL, (3, 3))):
        tapped_flops, plain_flops = (
            phase_flops(config, "vision", trained) for config in (model, MODEL)
        )
        added = 2 * (passes[0] * hidden + passes[1] * output)
        assert cost(tapped_flops, 16) - cost(plain_flops, 16) == added
    assert phase_layers(model, "vision")[-1].parameters == 3 * (4 * 32 * 64 + 64 * 64)


def test_a_part_of_a_component_costs_its_share_of_weight_gradients():
    """The rest of the backward pass costs as much as if the whole component were trained."""
    one_third = {"vision": Fraction(1, 3)}
    trained, partly_trained, frozen = (
        phase_flops(MODEL, "vision", shares) for shares in ({"vision": 1}, one_third, {"vision": 0})
    )
    assert partly_trained.quadratic == trained.quadratic == frozen.quadratic
    assert partly_trained.linear - frozen.linear == pytest.approx(
        (trained.linear - frozen.linear) / 3, abs=1
    )


def test_adapters_add_two_thin_products_to_each_matrix():
    """Of the language model the adapted matrices are 64 x 32 and 96 x 64, in three layers; of
    audio 48 x 48, in five."""
    adapters = {
        "language": AdapterConfig(rank=4, alpha=8, parameters=("*.key", "*.down")),
        "audio": AdapterConfig(rank=2, alpha=1, parameters=("*.out",)),
    }
    adapted = MODEL.model_copy(update={"adapters": AdaptersConfig(**adapters)})
    n = 160
    adapter = sum(
        product(n, inner, 4) + product(n, 4, columns) for inner, columns in ((64, 32), (96, 64))
    )
    matrices, attention = language_forward(n)
    frozen = phase_flops(adapted, "language", NOTHING)
    assert cost(frozen, n) == matrices + attention + 3 * adapter
    # The gradient of what the first layer's matrices read counts as well: adapters of that layer
    # precede them in the count.
    trained = phase_flops(adapted, "language", {"adapter.language": 1})
    assert cost(trained, n) == 2 * matrices + 3 * attention + (2 + 3 + 3) * adapter
    trained_components = {"adapter.language": 1, "projector.vision": 1}
    assert (
        cost(phase_flops(adapted, "language", trained_components), n)
        == 2 * matrices + 3 * attention + 9 * adapter
    )
    per_token = product(n // 4, 48, 2) + product(n // 4, 2, 48)
    adapted_audio, plain_audio = (
        phase_flops(model, "audio", NOTHING) for model in (adapted, MODEL)
    )
    assert cost(adapted_audio, n) - cost(plain_audio, n) == 5 * per_token


def test_layers_tell_what_of_them_is_trained():
    adapters = AdaptersConfig(language=AdapterConfig(rank=4, alpha=8, parameters=("*.key",)))
    embedding, block, *_, head = phase_layers(
        MODEL.model_copy(update={"adapters": adapters}), "language"
    )
    base = product(1, 1, block.parameters - 4 * (64 + 32))
    adapter = 2 * 4 * (64 + 32)
    assert block.linear(1) == base + adapter
    assert not embedding.is_trained({"adapter.language": 1})
    assert not head.is_trained({"adapter.language": 1})
    assert block.is_trained({"adapter.language": 1}) and block.is_trained({"language": 1})
    assert block.trained_share({"adapter.language": 1}) == Fraction(adapter, base + adapter)
    assert block.trained_share({"language": Fraction(1, 2)}) == Fraction(base, 2 * (base + adapter))
    assert not block.is_trained({"projector.vision": 1})


def test_a_windowed_layer_pays_for_its_window():
    """Attention of two layers takes 8 * 32 FLOPs per pair; one layer is full, the
    other sees 4 x 4 patches."""
    windowed = MODEL.model_copy(
        update={"vision": MODEL.vision.model_copy(update={"window": 4, "full_layers": (1,)})}
    )
    full, with_window = (phase_flops(model, "vision", NOTHING) for model in (MODEL, windowed))
    attention = tower_forward(100, 32, 4, 128, 2)[1]
    assert full.quadratic * 100**2 == attention
    assert with_window.quadratic == full.quadratic // 2
    assert with_window.windowed == full.quadratic // 2 and with_window.linear == full.linear
    for n in (5, 16, 100):
        assert with_window.attention(n) == full.quadratic // 2 * (n * n + n * min(n, 4 * 4))


@pytest.mark.parametrize("n", [64, 320])
def test_audio_attends_over_a_quarter_of_the_frames(n):
    """Two convolutions of stride 2 leave a quarter of the frames, and the
    projector merges pairs."""
    mels = product(n // 2, 3 * 40, 48)
    halves = product(n // 4, 3 * 48, 48)
    blocks, attention = tower_forward(n // 4, 48, 4, 80, 5)
    projector = product(n // 8, 2 * 48, 64) + product(n // 8, 64, 64)
    assert (
        cost(phase_flops(MODEL, "audio", NOTHING), n)
        == mels + halves + blocks + attention + projector
    )
    assert cost(phase_flops(MODEL, "audio", ALL), n) == 2 * mels + 3 * (
        halves + blocks + attention + projector
    )


def test_a_stem_of_stride_one_costs_its_outputs():
    audio = {"stem_strides": (1, 2), "positions": "table"}
    model = MODEL.model_copy(update={"audio": AUDIO.model_copy(update=audio)})
    stem, *_ = phase_layers(model, "audio")
    assert stem.linear(64) == product(64, 3 * 40, 48) + product(32, 3 * 48, 48)
    assert stem.parameters == 3 * 40 * 48 + 3 * 48 * 48 + 32 * 48
    n = 64
    matrices, attention = tower_forward(n // 2, 48, 4, 80, 5)
    projector = product(n // 4, 2 * 48, 64) + product(n // 4, 64, 64)
    flops = phase_flops(model, "audio", NOTHING)
    assert cost(flops, n) == stem.linear(64) + matrices + attention + projector


def test_a_stem_along_time_and_mels_costs_its_outputs():
    """Three convolutions of stride 2 leave 21, 11 and 6 of 41 mels, and 8 tokens of 64 slots."""
    audio = {"stem_channels": 4, "mel_bins": 41, "positions": "sinusoidal"}
    stem, *_ = phase_layers(
        MODEL.model_copy(update={"audio": AUDIO.model_copy(update=audio)}), "audio"
    )
    # (times x mels) x kernel x channels in and out of each convolution, then the linear layer.
    outputs = 32 * 21 * 9 * 4, 16 * 11 * 9 * 16, 8 * 6 * 9 * 16, 8 * 6 * 4 * 48
    assert stem.linear(64) == 2 * sum(outputs)
    assert stem.parameters == 9 * 4 + 2 * 9 * 16 + 6 * 4 * 48


def test_the_cost_of_items():
    """Shifting by 2 bits divides by 4 and rounds down."""
    item = ItemCost(7, 3)
    length = np.array([60, 100])
    assert item.of(60) == 7 * 60 + 3 * 3600 and item.attention(60) == 3 * 3600
    assert item.of(length).tolist() == [item.of(60), item.of(100)]
    assert item.total(length) == 7 * 160 + 3 * (3600 + 10000)
    assert ItemCost(100, 13).shifted(2) == ItemCost(25, 3)


WINDOWED = WORKLOAD.model_copy(
    update={"vision": WORKLOAD.vision.model_copy(update={"window": 8, "full_layers": (7, 31)})}
)


@pytest.mark.parametrize(
    "model, phase",
    [(WORKLOAD, "vision"), (WORKLOAD, "audio"), (WORKLOAD, "language"), (WINDOWED, "vision")],
)
def test_the_forward_pass_is_that_of_all_layers(model, phase):
    """The cost of a phase is the sum over its layers, also where layers differ in their windows."""
    items = np.array([640, 256, 1280])
    flops = phase_flops(model, phase, NOTHING)
    slots = int(items.sum())
    squares = [int(kind.sum()) for kind in flops.squares(items)]
    layers = phase_layers(model, phase)
    forward = sum(layer.linear(slots) + layer.attention(squares) for layer in layers)
    assert forward == pytest.approx(flops.total(items), rel=1e-9)


def test_embedding_projector_and_head_are_layers():
    layer_counts = {"vision": 32 + 2, "audio": 32 + 2, "language": 36 + 2}
    for phase, layer_count in layer_counts.items():
        layers = phase_layers(WORKLOAD, phase)
        assert len(layers) == layer_count
        last_component = "language" if phase == "language" else f"projector.{phase}"
        assert [layer.component for layer in layers] == [phase] * (layer_count - 1) + [
            last_component
        ]
    embedding, *_, head = phase_layers(WORKLOAD, "language")
    assert embedding.linear(1) == 0 and embedding.parameters == head.parameters == 151_936 * 4096
    millions = sum(layer.parameters for layer in phase_layers(WORKLOAD, "language")) / 1e6
    # The language model of the workload is one of 8 billion parameters.
    assert 8000 < millions < 8300


def test_errors_name_what_is_wrong():
    auto = ModelConfig(language=LANGUAGE.model_copy(update={"vocab_size": "auto"}), vision=VISION)
    with pytest.raises(ValueError, match="vocab_size"):
        phase_flops(auto, "language", NOTHING)
    with pytest.raises(ValueError, match="audio"):
        phase_flops(auto, "audio", NOTHING)
    with pytest.raises(ValueError, match="phase 'video' is not in this model"):
        phase_layers(MODEL, "video")
    with pytest.raises(ValueError, match=r"projector\.audio"):
        phase_flops(auto, "vision", {"projector.audio": 1})
