"""FLOPs of the real shapes: the one source for MFU, for cutting pipeline stages and, where no
calibration gives measured times, for balancing.

    vision      patch embedding | blocks ... | projector      layers of each phase in the order of
    audio       stem | blocks ... | projector                 computation; a projector, and a head
    language    embedding | blocks ... | head                 with its loss, are ordinary layers
    diffusion   projector | patch embedding | blocks ... | output

A phase costs the sum of its layers. Matrix products count 2 FLOPs per multiply-add; norms,
activations, softmax and rotations are left out, as is usual. Backward counts what freezing leaves:

    bwd(l) = [something trained upstream of l] * dX(l) + trained share of l * dW(l),  dX = dW = fwd

Recomputation (remat, or attention's own) is not counted: MFU measures the model, not how it is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from jaxmllm.arrays import Longs
from jaxmllm.config.schema import (
    ADAPTER,
    PROJECTOR,
    AudioConfig,
    DiffusionConfig,
    ExpertsConfig,
    LanguageConfig,
    ModelConfig,
    ProjectorShapes,
    TowerConfig,
    VisionConfig,
)
from jaxmllm.phases import LANGUAGE, component_names, make_phases

NO_SQUARES: tuple[Fraction, ...] = (Fraction(0), Fraction(0))

# Share of the parameters that is trained, for each component that has trained ones
Shares: TypeAlias = Mapping[str, Fraction | int]

# Added to `ItemCost.squares`, for each kind of layer: a number, or [N] for N items
Extra: TypeAlias = Sequence[Any]


@dataclass(frozen=True)
class ItemCost:
    """Cost of one item of l slots, forward and backward, in FLOPs, or femtoseconds where measured.

        linear * l + quadratic * l**2 + windowed * (l**2 - max(0, l - window)**2)

    The last term is that of causal layers with windows: the triangle of all pairs less the triangle
    beyond the window. In towers, whose windows or chunks do not overlap, it is
    windowed * l * min(l, window).

    What the length does not determine is added to the squares, as `extra` for each kind of layer
    (`VisiblePairs`).
    """

    linear: int
    quadratic: int
    windowed: int = 0
    window: int = 0  # slots of an item that a windowed layer sees
    apart: bool = False  # whether windows do not overlap, as in a tower

    def of(self, length: Any, extra: Extra = (0, 0)) -> Any:
        """Cost of an item of each length, in integers or floating-point numbers like the
        lengths."""
        return self.linear * length + self.attention(length, extra)

    def squares(self, length: Any, extra: Extra = (0, 0)) -> tuple[Any, ...]:
        """The amounts that attention's cost is proportional to, for each kind of layer: squared
        lengths, and the part of them that is within the window."""
        beyond = (length > self.window) * (length - self.window)
        within = length * (length - beyond) if self.apart else length**2 - beyond**2
        return length**2 + extra[0], within + extra[1]

    @property
    def per_square(self) -> tuple[int, ...]:
        """Cost of attention per unit of each of `squares`."""
        return self.quadratic, self.windowed

    def attention(self, length: Any, extra: Extra = (0, 0)) -> Any:
        """Cost of pairs of slots, the part that is not linear in the length."""
        return sum(
            cost * square
            for cost, square in zip(self.per_square, self.squares(length, extra), strict=True)
        )

    def mean_squares(self, length: int) -> float:
        """`squares` averaged over the kinds of layers, weighted by `per_square`."""
        return self.attention(length) / sum(self.per_square) if any(self.per_square) else length**2

    def total(self, length: Longs, extra: Extra = (0, 0)) -> float:
        """Total cost of items of these lengths."""
        length = length.astype(float)
        squares = (square.sum() for square in self.squares(length, extra))
        attention = sum(
            cost * square for cost, square in zip(self.per_square, squares, strict=True)
        )
        return float(self.linear * length.sum() + attention)

    def shifted(self, bits: int) -> ItemCost:
        """The cost in units of 2**bits, rounded down."""
        return replace(
            self,
            linear=self.linear >> bits,
            quadratic=self.quadratic >> bits,
            windowed=self.windowed >> bits,
        )

    def measured(self, linear: Decimal, mean_square: Decimal) -> ItemCost:
        """The cost with measured figures per slot and per mean square; the latter is divided among
        the kinds of layers in proportion to `per_square`."""
        share = Fraction(self.windowed, sum(self.per_square)) if self.windowed else Fraction(0)
        windowed = share * Fraction(mean_square)
        return replace(
            self,
            linear=round(linear),
            quadratic=round(Fraction(mean_square) - windowed),
            windowed=round(windowed),
        )


@dataclass(frozen=True)
class PhaseTime:
    """Measured femtoseconds of one item, and of every row in addition to its items."""

    item: ItemCost
    row: int


@dataclass(frozen=True)
class Layer:
    """Forward FLOPs of one layer of a phase, for items of l slots each.

    Attributes:
      component: "vision", "projector.vision", "language", ...
      parameters: numbers in its matrices.
      products: FLOPs of each product with weights, per slot; gradients of one product flow through
        the products after it.
      attention_squares: FLOPs of scores and mixing, which have no weights, per unit of each of
        `ItemCost.squares`.
      adapters: FLOPs of the products with low-rank factors, per slot; they count as the first
        products.
    """

    component: str
    parameters: int
    products: tuple[Fraction, ...]
    attention_squares: tuple[Fraction, ...] = NO_SQUARES
    adapters: Fraction = Fraction(0)

    def linear(self, slots: int) -> int:
        """FLOPs of products with weights."""
        return round((sum(self.products, Fraction(0)) + self.adapters) * slots)

    @property
    def adapter(self) -> str:
        """Name of the component of its adapters, where it has any."""
        return f"{ADAPTER}{self.component}"

    def is_trained(self, trained: Mapping[str, Any]) -> bool:
        """Whether any of its weights is trained. `trained` has each component with trained weights
        as a key."""
        return self.component in trained or bool(self.adapters and self.adapter in trained)

    def trained_share(self, shares: Shares) -> Fraction | int:
        """Share of the products with weights for which weight gradients are computed."""
        component_share = shares.get(self.component, 0)
        if not self.adapters:
            return component_share
        products = sum(self.products, Fraction(0))
        trained = component_share * products + shares.get(self.adapter, 0) * self.adapters
        return trained / (products + self.adapters)

    def attention(self, squares: Sequence[int]) -> int:
        """FLOPs of scores and mixing.

        Args:
          squares: sums of `ItemCost.squares` over the items.
        """
        pairs = (
            flops * square for flops, square in zip(self.attention_squares, squares, strict=True)
        )
        return round(sum(pairs))


def phase_flops(
    model: ModelConfig, phase: str, trained: Shares, learns_text: bool = True
) -> ItemCost:
    """FLOPs of one item of a phase, forward and backward.

    An encoder phase includes its projector. The language phase of a model that learns text includes
    the head on every slot, as if all had targets: that balances the slots that may have one.
    `head_flops` gives the head's part.

    Args:
      model: shapes; `language.vocab_size` must be a number for the language phase.
      phase: name of a phase of the model.
      trained: share of the parameters that is trained, for each component that has trained ones:
        "vision", "projector.vision", ...
      learns_text: whether the decoder has a loss, and so a head.

    Raises:
      ValueError: unknown phase or component, or vocab_size not resolved.
    """
    linear = Fraction(0)
    squares = NO_SQUARES
    layers = _trained_layers(model, phase, frozenset(trained.items()))
    # The last layer of the decoder is its head, which only a loss needs.
    for layer in layers if learns_text or phase != LANGUAGE else layers[:-1]:
        linear += layer.linear
        squares = tuple(total + flops for total, flops in zip(squares, layer.squares, strict=True))
    quadratic, windowed = squares
    if not windowed:
        return ItemCost(round(linear), round(quadratic))
    # Windows of the decoder move along with the token; those of towers are side by side.
    apart = not make_phases(model)[phase].has_loss
    seen = _window_slots(model, phase)
    return ItemCost(round(linear), round(quadratic), round(windowed), seen, apart)


def _window_slots(model: ModelConfig, phase: str) -> int:
    """Slots of an item that a layer with windows sees: a chunk of a clip, a square of an image, a
    stretch of text."""
    if phase == "audio" and model.audio is not None:
        return model.audio.seen_slots
    window = model.windows[phase].window
    assert window is not None
    return window if phase == LANGUAGE else window**2


def head_flops(model: ModelConfig, trained: Shares, learns_text: bool = True) -> int:
    """FLOPs of the head for one slot, forward and backward, computed where the slot has a target.

    Args and errors are those of `phase_flops`.
    """
    *_, head = _trained_layers(model, LANGUAGE, frozenset(trained.items()))
    return round(head.linear) if learns_text else 0


class _LayerTotal(NamedTuple):
    """FLOPs of a layer, forward and backward: per slot, and per unit of each of
    `ItemCost.squares`."""

    linear: Fraction
    squares: tuple[Fraction, ...]


@lru_cache(maxsize=64)
def _trained_layers(
    model: ModelConfig, phase: str, shares: frozenset[tuple[str, Fraction | int]]
) -> tuple[_LayerTotal, ...]:
    """FLOPs of each layer of a phase, in the order of computation. `shares` are the items of a
    `Shares` mapping, so that results can be cached."""
    phases = make_phases(model)
    trained = dict(shares)
    components = frozenset(component_names(phases))
    if unknown := trained.keys() - components:
        raise ValueError(
            f"trained components {sorted(unknown)} are not in this model: it has {sorted(components)}"
        )
    layers = phase_layers(model, phase)
    # Gradients flow through this phase to trained components of the phases that it reads, directly
    # or through one of them.
    before = set(phases[phase].reads)
    before |= {name for read in before for name in phases[read].reads}
    upstream = any(name in trained for read in before for name in phases[read].components)
    totals = []
    for layer in layers:
        # Forward, input gradient and weight gradient. The last counts by the component's trained
        # share, wherever in the component the trained weights are.
        linear = (1 + upstream + trained.get(layer.adapter, 0)) * layer.adapters
        upstream = upstream or bool(layer.adapters and layer.adapter in trained)
        # Scores and mixing have two inputs each and no weights: their backward pass computes both
        # input gradients, or nothing.
        attention_passes = 3 if upstream else 1
        # A layer without products, such as an embedding, may still be trained.
        for product in layer.products or (Fraction(0),):
            linear += (1 + upstream + trained.get(layer.component, 0)) * product
            upstream = upstream or layer.component in trained
        totals.append(
            _LayerTotal(
                linear, tuple(attention_passes * flops for flops in layer.attention_squares)
            )
        )
    return tuple(totals)


def phase_layers(model: ModelConfig, phase: str) -> tuple[Layer, ...]:
    """The layers of a phase, with its projector or its embedding and head, in the order of
    computation.

    Raises:
      ValueError: the model has no such phase, or vocab_size is not resolved.
    """
    phases = make_phases(model)
    if phase not in phases:
        raise ValueError(f"phase {phase!r} is not in this model: it has {list(phases)}")
    if phase == LANGUAGE:
        layers = _language(model.language)
    else:
        layers = TOWERS[phase](getattr(model, phase), model.language.width)
    return tuple(_with_adapters(layers, model, phase))


def _with_adapters(layers: Iterable[Layer], model: ModelConfig, phase: str) -> Iterator[Layer]:
    """The layers of a phase, where layers with attention have the adapters of their matrices."""
    adapter = model.adapters.by_component.get(phase)
    if adapter is None:
        yield from layers
        return
    section = getattr(model, phase)
    sizes = adapter.adapted(section.matrices).values()
    # Two factors for each matrix: inputs x rank, and rank x outputs.
    weights = sum(adapter.rank * (inputs + outputs) for inputs, outputs in sizes)
    (products,) = _product(weights, per_token=section.stem_stride)
    for layer in layers:
        attends = any(layer.attention_squares)
        parameters = layer.parameters + weights
        yield replace(layer, parameters=parameters, adapters=products) if attends else layer


# ---------------------------------------------------------------------------- the layers of each phase


def _language(config: LanguageConfig) -> tuple[Layer, ...]:
    if config.vocab_size == "auto":
        raise ValueError(
            "model.language.vocab_size is 'auto': resolve it from the tokenizer before asking for FLOPs"
        )
    vocabulary = config.vocab_size * config.width
    embedding = Layer(LANGUAGE, 0 if config.tie_embeddings else vocabulary, products=())
    full = decoder_layer(
        config.width,
        config.heads * config.head_size,
        config.kv_heads * config.head_size,
        config.mlp_width,
        experts=config.experts,
    )
    windowed = replace(full, attention_squares=full.attention_squares[::-1])
    blocks = [windowed if narrow else full for narrow in config.windowed]
    return (embedding, *blocks, Layer(LANGUAGE, vocabulary, _product(vocabulary)))


def decoder_layer(
    width: int,
    heads_width: int,
    kv_width: int,
    mlp_width: int,
    gated: bool = True,
    experts: ExpertsConfig | None = None,
) -> Layer:
    """A layer with causal attention.

    Args:
      heads_width: heads * head_size of the queries.
      kv_width: heads * head_size of the keys.
      gated: whether the MLP has a third matrix, as ours has.
      experts: a mixture, in which each expert is such an MLP. A token costs the experts that it
        chooses, and the router; padding in the experts' blocks does not count.
    """
    mlp = width * (3 if gated else 2) * mlp_width
    outside = width * (2 * heads_width + 2 * kv_width)
    active = outside + mlp
    weights = outside + mlp
    if experts is not None:
        outside += width * experts.count  # the router
        active = outside + experts.per_token * mlp
        weights = outside + experts.count * mlp
    causal = Fraction(2 * heads_width)  # half of the pairs
    return Layer(LANGUAGE, weights, _product(active), attention_squares=(causal, Fraction(0)))


def _vision(config: VisionConfig, language_width: int) -> tuple[Layer, ...]:
    patch = config.patch_features * config.width
    table = config.learned_positions * config.width
    # Resampled positions are weighted sums of all learned ones; positions of a table are looked up
    multiplied = config.row_frames * patch + (table if config.resamples else 0)
    weights = config.patch_frames * patch + table
    embedding = Layer("vision", weights, _product(multiplied))
    blocks = [_encoder_block("vision", config, per_token=1)] * config.layers
    windowed = replace(blocks[0], attention_squares=blocks[0].attention_squares[::-1])
    blocks = [
        windowed if narrow else block for narrow, block in zip(config.windowed, blocks, strict=True)
    ]
    group = config.merge**2
    features = config.projector.inputs(config.width, group)
    projector = _projector(
        "vision", features, group, language_width, config.projector, config.projectors
    )
    return (embedding, *blocks, projector)


def _audio(config: AudioConfig, language_width: int) -> tuple[Layer, ...]:
    stride = config.stem_stride
    stem = _stem(config) if config.stem_channels is None else _plane_stem(config)
    block = _encoder_block("audio", config, per_token=stride)
    if config.attention == "chunk":
        block = replace(block, attention_squares=block.attention_squares[::-1])
    features = config.projector.inputs(config.width, config.merge)
    per_token = stride * config.merged
    projector = _projector("audio", features, per_token, language_width, config.projector)
    return (stem, *[block] * config.layers, projector)


def _stem(config: AudioConfig) -> Layer:
    """Two convolutions along time."""
    mels = config.stem_kernel * config.mel_bins * config.width
    halves = config.stem_kernel * config.width**2
    # The second convolution halves the number of frames that the first one yields
    after_first = _product(mels, per_token=config.stem_stride // 2)
    table = config.learned_positions * config.width  # looked up
    products = after_first + _product(halves, per_token=config.stem_stride)
    return Layer("audio", mels + halves + table, products)


def _plane_stem(config: AudioConfig) -> Layer:
    """Convolutions along time and mels, each computed at all mels that it leaves, and a matrix."""
    channels = config.stem_channels or 0
    inputs = 1
    per_token = 1
    products: tuple[Fraction, ...] = ()
    weights = config.learned_positions * config.width  # looked up
    for stride, mels in zip(config.plane_strides, config.stem_mels, strict=True):
        kernel = config.stem_kernel**2 * inputs * channels
        per_token *= stride
        weights += kernel
        products += _product(mels * kernel, per_token)
        inputs = channels
    matrix = config.stem_mels[-1] * channels * config.width
    return Layer("audio", weights + matrix, products + _product(matrix, per_token))


def _diffusion(config: DiffusionConfig, language_width: int) -> tuple[Layer, ...]:
    """Every slot counts both as a patch and as a projected state, which overcounts each a little.

    Left out are products that depend on times alone, once per item, and the keys and values of an
    attention to conditions.
    """
    patch = config.patch_features * config.width
    shapes = config.projector_shapes
    projector = _projector(LANGUAGE, language_width, 1, config.width, shapes)
    block = _encoder_block("diffusion", config, per_token=1)
    # With two streams each slot is in one of them, but both have weights
    block = replace(block, parameters=config.streams * block.parameters)
    if config.conditioning == "cross":
        patches = block.parameters - 2 * config.width**2
        block = replace(block, products=_product(patches))
    blocks = [block] * config.layers
    outer = Layer("diffusion", patch, _product(patch))
    inner = patch + config.edge_features * config.width
    return (projector, Layer("diffusion", inner, _product(inner)), *blocks, outer)


TOWERS: dict[str, Callable[[Any, int], tuple[Layer, ...]]] = {
    "vision": _vision,
    "audio": _audio,
    "diffusion": _diffusion,
}


def _encoder_block(phase: str, config: TowerConfig | DiffusionConfig, per_token: int) -> Layer:
    """A layer with attention in both directions; `per_token` slots are one token of its attention.

    Where a generator's layers have a second attention, its pairs are counted among those of an
    item's slots (`VisiblePairs`).
    """
    attentions = getattr(config, "attentions", 1)
    weights = (
        4 * attentions * config.width**2 + config.width * config.mlp_matrices * config.mlp_width
    )
    pairs = Fraction(4 * config.width, per_token**2)
    return Layer(
        phase,
        weights,
        _product(weights, per_token=per_token),
        attention_squares=(pairs, Fraction(0)),
    )


def _projector(
    phase: str,
    features: int,
    per_token: int,
    width: int,
    shapes: ProjectorShapes,
    count: int = 1,
) -> Layer:
    """One or two matrices on every `per_token` slots: a vector of `features` numbers becomes a
    language token.

    Args:
      count: number of such projectors side by side, each with its own features.
    """
    if shapes.linear:
        weights = features * width
        return Layer(f"{PROJECTOR}{phase}", weights, _product(weights, per_token=per_token))
    between = shapes.mlp_width or width
    weights_in = count * features * between
    weights_out = count * between * width
    products = _product(weights_in, per_token=per_token) + _product(
        weights_out, per_token=per_token
    )
    return Layer(f"{PROJECTOR}{phase}", weights_in + weights_out, products)


def _product(weights: int, per_token: int = 1) -> tuple[Fraction, ...]:
    """FLOPs per slot of a product with a matrix of `weights` numbers, done once for every
    `per_token` slots."""
    return (Fraction(2 * weights, per_token),)
