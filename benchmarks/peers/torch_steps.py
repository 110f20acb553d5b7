"""A training step as users of PyTorch write it, in two forms, and the process that runs them.

`PaddedModel` is made of transformers' modules: a SigLIP 2 tower for native resolutions, Whisper's
layers after two strided convolutions, a Llama; micro-batches are padded to their longest item.
`PackedModel` computes exactly what ours does, from our parameters, over the tokens of a micro-batch
end to end, with attention inside segments of variable length.

Letters: B items or examples of a micro-batch, L length of the longest, N tokens end to end, D
width, H heads, G key-value heads, K head size.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Siglip2VisionConfig, Siglip2VisionModel
from transformers.models.whisper.configuration_whisper import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

from benchmarks.peers.examples import Example, Item
from jaxmllm.config.schema import AudioConfig, LanguageConfig, ModelConfig, OptimizerConfig

# Side of the learned grid of positions that the vision tower interpolates: small, because our tower
# has no such parameters
GRID: Final = 2
LONGEST_CLIP: Final = 1 << 14  # tokens of the audio tower's attention
STRIDE: Final = math.prod(AudioConfig.model_fields["stem_strides"].default)
# Tuning tries micro-batches of 1/16, 1/8, .. of a step's examples
SHARES: Final = (16, 8, 4, 2, 1)
TRIALS: Final = 2  # timed steps per size, of which the faster counts
WORSE: Final = 1.2  # after a size this many times slower than the best so far, none is tried

Seconds = dict[str, float]


class Clock:
    """CPU seconds of a step by part, summed over its micro-batches."""

    def __init__(self) -> None:
        self.seconds: Seconds = defaultdict(float)
        self.reached = 0.0

    def notes(self, x: Tensor) -> None:
        """Record the time at which the backward pass reaches x."""
        x.register_hook(self._reach)

    def _reach(self, _: Tensor) -> None:
        self.reached = time.process_time()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass. Its time counts as the decoder's until the pass reaches the noted
        tensor, and as the encoders' and the embedding's from then on."""
        start = time.process_time()
        loss.backward()
        self.seconds["language backward"] += self.reached - start
        self.seconds["encoders backward"] += time.process_time() - self.reached

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds inside this context to the part `name`."""
        start = time.process_time()
        yield
        self.seconds[name] += time.process_time() - start


# ---------------------------------------------------------------------------- parts that both have


class Projector(nn.Module):
    """MLP that makes one language token of `group` neighbouring features."""

    def __init__(self, features: int, group: int, width: int):
        super().__init__()
        self.group = group
        self.up = nn.Linear(group * features, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(*x.shape[:-2], x.shape[-2] // self.group, -1)
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def of_phase(examples: Sequence[Example], phase: str) -> list[tuple[int, Item]]:
    """Items of a phase, each with the number of its example."""
    return [
        (example_index, item)
        for example_index, example in enumerate(examples)
        for item in example.items
        if item.phase == phase
    ]


def group_of(phase: str, model: ModelConfig) -> int:
    """Number of a tower's features that become one token."""
    section = getattr(model, phase)
    merge: int = section.merge
    return merge**2 if phase == "vision" else merge


# ---------------------------------------------------------------------------- padded, of transformers


class PaddedAudio(nn.Module):
    """Audio tower: two convolutions of stride 2, positions, Whisper's layers."""

    def __init__(self, config: AudioConfig):
        super().__init__()
        width = config.width
        whisper = WhisperConfig(
            d_model=width,
            encoder_attention_heads=config.heads,
            encoder_ffn_dim=config.mlp_width,
            activation_function="gelu_pytorch_tanh",
            dropout=0.0,
        )
        whisper._attn_implementation = "sdpa"
        self.first = nn.Conv1d(config.mel_bins, width, 3, stride=2, padding=1)
        self.second = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(WhisperEncoderLayer(whisper) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        angles = torch.arange(LONGEST_CLIP)[:, None] / 10_000 ** (
            torch.arange(width // 2) * 2 / width
        )
        table = torch.cat([angles.sin(), angles.cos()], dim=1)
        self.register_buffer("positions", table, persistent=False)

    def forward(self, frames: Tensor, visible: Tensor) -> Tensor:
        """frames [B, L, mel], visible [B, L / 4] -> [B, L / 4, D]."""
        x = F.gelu(self.first(frames.transpose(1, 2)), approximate="tanh")
        x = F.gelu(self.second(x), approximate="tanh").transpose(1, 2)
        x = x + self.positions[: x.shape[1]]
        mask = None if visible.all() else visible[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class PaddedModel(nn.Module):
    """A model of transformers' modules; towers and decoder pad a micro-batch to its longest
    item."""

    def __init__(self, config: ModelConfig, vocabulary: int):
        super().__init__()
        self.config = config
        language = config.language
        modules: dict[str, nn.Module] = {}
        if config.vision is not None:
            vision = config.vision
            modules["vision"] = Siglip2VisionModel(
                Siglip2VisionConfig(
                    hidden_size=vision.width,
                    intermediate_size=vision.mlp_width,
                    num_hidden_layers=vision.layers,
                    num_attention_heads=vision.heads,
                    patch_size=vision.patch_size,
                    num_patches=GRID**2,
                    vision_use_head=False,
                    attn_implementation="sdpa",
                )
            )
            modules["projector_vision"] = Projector(
                vision.width, group_of("vision", config), language.width
            )
        if config.audio is not None:
            modules["audio"] = PaddedAudio(config.audio)
            modules["projector_audio"] = Projector(
                config.audio.width, group_of("audio", config), language.width
            )
        modules["language"] = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=language.width,
                intermediate_size=language.mlp_width,
                num_hidden_layers=language.layers,
                num_attention_heads=language.heads,
                num_key_value_heads=language.kv_heads,
                head_dim=language.head_size,
                attention_bias=language.qkv_bias,
                tie_word_embeddings=language.tie_embeddings,
                attn_implementation="sdpa",
                use_cache=False,
            )
        )
        self.parts = nn.ModuleDict(modules)

    def forward(self, examples: Sequence[Example], clock: Clock) -> Tensor:
        """Sum of the losses of a micro-batch."""
        language = self.parts["language"]
        max_length = max(len(example.tokens) for example in examples)
        tokens = padded([example.tokens for example in examples], max_length)
        targets = padded([example.targets for example in examples], max_length, -1)
        mask = padded([np.ones_like(example.tokens) for example in examples], max_length)
        x = language.get_input_embeddings()(tokens)
        for phase in self.config.encoders:
            items = of_phase(examples, phase)
            if not items:
                continue
            with clock(f"{phase} forward"):
                features = self.parts[f"projector_{phase}"](
                    getattr(self, f"_{phase}")([item for _, item in items])
                )
            slots = [row * max_length + item.slot + np.arange(item.tokens) for row, item in items]
            embeddings = torch.cat(
                [f[: item.tokens] for f, (_, item) in zip(features, items, strict=True)]
            )
            x = x.flatten(0, 1).index_copy(0, torch.from_numpy(np.concatenate(slots)), embeddings)
            x = x.unflatten(0, tokens.shape)
        clock.notes(x)
        with clock("language forward"):
            logits = language(inputs_embeds=x, attention_mask=mask).logits
            return F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
            )

    def _vision(self, items: Sequence[Item]) -> Tensor:
        pixels = padded([item.features for item in items]).float() / 127.5 - 1
        mask = padded([np.ones(len(item.features), np.int64) for item in items])
        shapes = torch.tensor([item.shape[1:] for item in items])
        return self.parts["vision"](pixels, mask, shapes).last_hidden_state

    def _audio(self, items: Sequence[Item]) -> Tensor:
        frames = padded([item.features for item in items])
        mask = padded([np.ones(-(-item.real // STRIDE), np.bool_) for item in items])
        mask = F.pad(mask, (0, frames.shape[1] // STRIDE - mask.shape[1]))
        return self.parts["audio"](frames, mask)


def padded(arrays: Sequence[NDArray[Any]], longest: int = 0, value: int = 0) -> Tensor:
    """Stack arrays of [L, ...] into [B, longest, ...], padded with `value`; by default to the
    longest."""
    longest = longest or max(map(len, arrays))
    dtype = np.int64 if arrays[0].dtype == np.int32 else arrays[0].dtype
    out = np.full((len(arrays), longest, *arrays[0].shape[1:]), value, dtype)
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(out)


# ---------------------------------------------------------------------------- packed, our mathematics


class RMSNorm(nn.Module):
    def __init__(self, scale: NDArray[Any], epsilon: float):
        super().__init__()
        self.scale = parameter(scale)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.scale.shape, self.scale, self.epsilon)


def parameter(array: NDArray[Any]) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.array(array, np.float32)))


def linear(matrix: NDArray[Any], inputs: int, bias: NDArray[Any] | None = None) -> nn.Linear:
    """A linear layer from our matrix [inputs.., outputs..] and bias [outputs..]."""
    matrix = matrix.reshape(inputs, -1)
    layer = nn.Linear(*matrix.shape, bias=bias is not None)
    layer.weight = parameter(np.ascontiguousarray(matrix.T))
    if bias is not None:
        layer.bias = parameter(bias.reshape(-1))
    return layer


class Segments:
    """Sequences end to end, and attention inside each of them.

    Args:
      gathers: whether attention runs once on the sequences gathered into a padded batch, instead of
        once for each sequence.
    """

    def __init__(self, lengths: Sequence[int], causal: bool, gathers: bool):
        self.lengths = list(lengths)
        self.causal = causal
        self.gathers = gathers
        if gathers:
            counts = np.array(self.lengths)
            is_filled = np.arange(counts.max()) < counts[:, None]
            starts = (np.cumsum(counts) - counts)[:, None]
            table = np.where(is_filled, starts + np.arange(counts.max()), 0)
            self.table = torch.from_numpy(table)  # [B, L]
            self.places = torch.from_numpy(np.flatnonzero(is_filled))  # [N] in B * L
            mask = torch.from_numpy(is_filled)[:, None, None, :]
            if causal:  # padding follows an example, so the causal mask hides it
                mask = None
            self.visible = mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, K], k, v [N, G, K] -> [N, H, K]."""
        if not self.gathers:
            segments = zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True)
            return torch.cat([self._of_segment(*segment) for segment in segments])
        rows = [x[self.table].transpose(1, 2) for x in (q, k, v)]
        mixed = F.scaled_dot_product_attention(
            *rows, attn_mask=self.visible, is_causal=self.causal, enable_gqa=grouped(q, k)
        )
        return mixed.transpose(1, 2).flatten(0, 1)[self.places]

    def _of_segment(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=grouped(q, k, 1)
        )
        return mixed[0].transpose(0, 1)


def grouped(q: Tensor, k: Tensor, heads: int = 1) -> bool:
    """Whether there are fewer key heads than query heads; `heads` is their dimension."""
    return q.shape[heads] != k.shape[heads]


class Attention(nn.Module):
    """Attention inside segments, with rotary positions."""

    def __init__(self, tree: Mapping[str, Any], width: int):
        super().__init__()
        self.head_size = tree["query"].shape[-1]
        for name in ("query", "key", "value"):
            setattr(self, name, linear(tree[name], width, tree.get(f"{name}_bias")))
        self.out = linear(
            tree["out"], tree["out"].shape[0] * tree["out"].shape[1], tree.get("out_bias")
        )

    def forward(self, x: Tensor, segments: Segments, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_size))
            for project in (self.query, self.key, self.value)
        )
        mixed = segments.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.out(mixed.flatten(1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [N, H, K] by angles with cos, sin [N, 1, K / 2]."""
    first_half, second_half = x.chunk(2, dim=-1)
    return torch.cat(
        [first_half * cos - second_half * sin, second_half * cos + first_half * sin], dim=-1
    )


class GatedMLP(nn.Module):
    def __init__(self, tree: Mapping[str, Any], width: int):
        super().__init__()
        self.gate, self.up = linear(tree["gate"], width), linear(tree["up"], width)
        self.down = linear(tree["down"], tree["down"].shape[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MLP(nn.Module):
    def __init__(self, tree: Mapping[str, Any]):
        super().__init__()
        self.up = linear(tree["up"], tree["up"].shape[0], tree["up_bias"])
        self.down = linear(tree["down"], tree["down"].shape[0], tree["down_bias"])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """A layer: attention and an MLP, each after a norm and added to its input."""

    def __init__(self, tree: Mapping[str, Any], epsilon: float):
        super().__init__()
        width = tree["attention_norm"]["scale"].shape[0]
        self.attention_norm = RMSNorm(tree["attention_norm"]["scale"], epsilon)
        self.attention = Attention(tree["attention"], width)
        self.mlp_norm = RMSNorm(tree["mlp_norm"]["scale"], epsilon)
        self.mlp = GatedMLP(tree["mlp"], width) if "gate" in tree["mlp"] else MLP(tree["mlp"])

    def forward(self, x: Tensor, segments: Segments, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), segments, cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Tower(nn.Module):
    """Layers and a final norm."""

    def __init__(self, tree: Mapping[str, Any], epsilon: float):
        super().__init__()
        layers = tree["layers"]["attention_norm"]["scale"].shape[0]
        self.layers = nn.ModuleList(
            Block(layer_of(tree["layers"], index), epsilon) for index in range(layers)
        )
        self.norm = RMSNorm(tree["norm"]["scale"], epsilon)

    def forward(self, x: Tensor, segments: Segments, angles: Tensor) -> Tensor:
        cos = angles.cos()[:, None]
        sin = angles.sin()[:, None]
        for layer in self.layers:
            x = layer(x, segments, cos, sin)
        return self.norm(x)


def layer_of(tree: Any, number: int) -> Any:
    """Parameters of one layer of a stack."""
    if isinstance(tree, Mapping):
        return {name: layer_of(leaf, number) for name, leaf in tree.items()}
    return tree[number]


def frequencies(pairs: int, theta: float) -> NDArray[Any]:
    return theta ** (-np.arange(pairs) / pairs)


class PackedModel(nn.Module):
    """Our model's computation over the tokens of a micro-batch end to end."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Any], gathers: bool):
        super().__init__()
        self.config = config
        self.gathers = gathers
        towers: dict[str, nn.Module] = {}
        for phase in config.phases:
            towers[phase] = Tower(params[phase], getattr(config, phase).norm_epsilon)
        if config.vision is not None:
            vision = params["vision"]
            self.patch = linear(vision["patch"], config.vision.patch_features, vision["patch_bias"])
        if config.audio is not None:
            audio = params["audio"]
            self.first, self.second = (
                linear(audio[stem]["kernel"], audio[stem]["kernel"].shape[0], audio[stem]["bias"])
                for stem in ("stem_mels", "stem_width")
            )
        for phase in config.encoders:
            mlp = params[f"projector.{phase}"]["mlp"]
            width = mlp["down"].shape[0]
            projector = Projector(getattr(config, phase).width, group_of(phase, config), width)
            projector.up = linear(mlp["up"], mlp["up"].shape[0], mlp["up_bias"])
            projector.down = linear(mlp["down"], width, mlp["down_bias"])
            towers[f"projector_{phase}"] = projector
        self.towers = nn.ModuleDict(towers)
        language = params["language"]
        self.embedding = parameter(language["embedding"])
        self.head = None
        if not config.language.tie_embeddings:
            self.head = linear(language["head"], config.language.width)

    def forward(self, examples: Sequence[Example], clock: Clock) -> Tensor:
        """Sum of the losses of a micro-batch."""
        lengths = [len(example.tokens) for example in examples]
        starts = np.cumsum(lengths) - lengths
        x = F.embedding(whole([example.tokens for example in examples]), self.embedding)
        for phase in self.config.encoders:
            items = of_phase(examples, phase)
            if not items:
                continue
            with clock(f"{phase} forward"):
                media = self.towers[f"projector_{phase}"](
                    getattr(self, f"_{phase}")([item for _, item in items])
                )
            slots = [
                starts[example_index] + item.slot + np.arange(item.tokens)
                for example_index, item in items
            ]
            x = x.index_copy(0, torch.from_numpy(np.concatenate(slots)), media)
        clock.notes(x)
        with clock("language forward"):
            segments = Segments(lengths, True, self.gathers)
            positions = np.concatenate([example.positions for example in examples])
            x = self.towers["language"](
                x, segments, language_angles(self.config.language, positions)
            )
            targets = whole([example.targets for example in examples])
        with clock("head forward"):
            target_slots = torch.nonzero(targets >= 0)[:, 0]
            x = x[target_slots]
            logits = F.linear(x, self.embedding) if self.head is None else self.head(x)
            return F.cross_entropy(logits, targets[target_slots], reduction="sum")

    def _vision(self, items: Sequence[Item]) -> Tensor:
        """Features of images end to end; half of the pairs of dimensions rotate by each axis."""
        config = self.config.vision
        assert config is not None
        pixels = torch.from_numpy(np.concatenate([item.features for item in items]))
        x = self.patch(pixels.float() / 127.5 - 1)
        positions = np.concatenate([item.positions for item in items])
        pairs = config.head_size // 2
        frequency = np.tile(frequencies(pairs // 2, config.rope_theta), 2)
        angles = positions[:, np.repeat(np.arange(2), pairs // 2)] * frequency
        segments = Segments([len(item.features) for item in items], False, self.gathers)
        return self.towers["vision"](x, segments, torch.from_numpy(angles.astype(np.float32)))

    def _audio(self, items: Sequence[Item]) -> Tensor:
        """Features of clips end to end: two convolutions, then the tower."""
        config = self.config.audio
        assert config is not None
        frames = torch.from_numpy(np.concatenate([item.features for item in items]))
        positions = np.concatenate([item.positions[::STRIDE, 0] for item in items])
        starts_chunk = torch.from_numpy(positions % (config.chunk_frames // STRIDE) == 0)
        # After the first convolution each token has two slots; only the first one may begin a chunk
        halves = torch.stack([starts_chunk, torch.zeros_like(starts_chunk)], dim=1).flatten()
        x = halved(self.second, halved(self.first, frames, halves), starts_chunk)
        frequency = frequencies(config.head_size // 2, config.rope_theta)
        angles = torch.from_numpy((positions[:, None] * frequency).astype(np.float32))
        # Padding inside a clip is left out, and the projector reads zeros in its place.
        is_real = np.concatenate(
            [np.arange(len(i.features) // STRIDE) * STRIDE < i.real for i in items]
        )
        segments = Segments([-(-item.real // STRIDE) for item in items], False, self.gathers)
        if is_real.all():
            return self.towers["audio"](x, segments, angles)
        real_indices = torch.from_numpy(np.flatnonzero(is_real))
        real_output = self.towers["audio"](x[real_indices], segments, angles[real_indices])
        return torch.zeros_like(x).index_copy(0, real_indices, real_output)


def halved(project: nn.Linear, x: Tensor, first: Tensor) -> Tensor:
    """Convolution of width 3 and stride 2. Outputs marked in `first` see zeros before their two
    slots."""
    even = x[0::2]
    odd = x[1::2]
    previous = torch.cat([torch.zeros_like(odd[:1]), odd[:-1]])
    previous = torch.where(first[:, None], 0, previous)
    return F.gelu(project(torch.cat([previous, even, odd], dim=1)), approximate="tanh")


def language_angles(config: LanguageConfig, positions: NDArray[Any]) -> Tensor:
    """Angles of the decoder's rotary positions, [N, K / 2], from positions [N, 3]."""
    pairs = config.head_size // 2
    # Each pair of dimensions rotates by one of three axes; by default the two spatial axes have 3/8
    # of the pairs each
    spatial = 3 * pairs // 8
    sections = config.rope_sections or (pairs - 2 * spatial, spatial, spatial)
    axis = np.repeat(np.arange(3), sections)
    angles = positions[:, axis] * frequencies(pairs, config.rope_theta)
    return torch.from_numpy(angles.astype(np.float32))


def whole(arrays: Sequence[NDArray[Any]]) -> Tensor:
    """Arrays end to end as one tensor of int64."""
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64))


# ---------------------------------------------------------------------------- steps


class Stepper:
    """A model with its optimizer, which trains on a step's examples in micro-batches.

    Args:
      sorts: whether examples are sorted by length first.
    """

    def __init__(
        self, model: nn.Module, sorts: bool, config: OptimizerConfig, rates: Sequence[float]
    ):
        self.model = model
        self.sorts = sorts
        self.config = config
        self.rates = rates  # learning rate of each step
        self.size = 1  # examples in a micro-batch
        self.steps = 0
        decayed = [leaf for name, leaf in model.named_parameters() if is_decayed(name, leaf)]
        undecayed = [leaf for name, leaf in model.named_parameters() if not is_decayed(name, leaf)]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": undecayed, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    def microbatches(self, examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
        if self.sorts:
            examples = sorted(examples, key=lambda example: len(example.tokens))
        for start in range(0, len(examples), self.size):
            yield examples[start : start + self.size]

    def __call__(self, examples: Sequence[Example], updates: bool = True) -> dict[str, Any]:
        """Run one step; return the seconds of the step and of its parts, the loss and the number of
        targets. Without `updates` parameters stay as they are."""
        clock = Clock()
        start = time.perf_counter()
        cpu_start = time.process_time()
        targets = sum(int((example.targets >= 0).sum()) for example in examples)
        total = 0.0
        for microbatch in self.microbatches(examples):
            loss = self.model(microbatch, clock)
            clock.backward(loss / targets)
            total += loss.item()
        with clock("update"):
            if self.config.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
            if updates:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rates[self.steps]
                self.optimizer.step()
                self.steps += 1
            self.optimizer.zero_grad(set_to_none=True)
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu_start,
            "parts": dict(clock.seconds),
            "loss": total / targets,
            "targets": targets,
        }

    def tune(self, examples: Sequence[Example], size: int | None) -> float:
        """Choose the fastest size of micro-batches on these examples, or take the given one.

        Returns:
          Seconds of a step of that size, the least of `TRIALS` after one that is not counted.
        """
        sizes = [max(1, len(examples) // share) for share in SHARES] if size is None else [size]
        seconds: dict[int, float] = {}
        for self.size in dict.fromkeys(sizes):
            self(examples, updates=False)
            seconds[self.size] = min(
                self(examples, updates=False)["seconds"] for _ in range(TRIALS)
            )
            if seconds[self.size] > WORSE * min(seconds.values()):
                break
        self.size = min(seconds, key=seconds.__getitem__)
        return seconds[self.size]


def is_decayed(name: str, leaf: Tensor) -> bool:
    """Whether weight decay applies, as in ours: to all matrices but embeddings."""
    return leaf.ndim > 1 and not name.endswith(("embedding", "embed_tokens.weight"))


def parameters_by_component(model: nn.Module, config: ModelConfig) -> dict[str, int]:
    """Numbers of parameters by component, with our names."""
    counts: dict[str, int] = defaultdict(int)
    component_by_name = {"patch": "vision", "first": "audio", "second": "audio"}
    for name, leaf in model.named_parameters():
        path = name.split(".")
        component = (
            path[1]
            if path[0] in ("parts", "towers")
            else component_by_name.get(path[0], "language")
        )
        counts[component.replace("projector_", "projector.")] += leaf.numel()
    return dict(counts)


# ---------------------------------------------------------------------------- the process


def serve(
    connection: Connection,
    config: ModelConfig,
    optimizer: OptimizerConfig,
    rates: Sequence[float],
    params: Mapping[str, Any],
    sizes: Mapping[str, int],
    threads: int,
    seed: int,
) -> None:
    """Answer requests until None comes. A list of examples becomes the next step; "tune" chooses
    sizes of micro-batches on it, and answers with these and with facts about all peers; a peer's
    name runs the step, and answers with its measurements."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    vocabulary = params["language"]["embedding"].shape[0]

    def padded_model() -> nn.Module:
        return PaddedModel(config, vocabulary).train()

    steppers = {
        "whole": Stepper(padded_model(), False, optimizer, rates),
        "padded": Stepper(padded_model(), False, optimizer, rates),
        "grouped": Stepper(padded_model(), True, optimizer, rates),
    }
    packed = {
        gathers: Stepper(PackedModel(config, params, gathers), False, optimizer, rates)
        for gathers in (False, True)
    }
    examples: list[Example] = []
    while (request := connection.recv()) is not None:
        if isinstance(request, list):
            examples = request
            continue
        if request != "tune":
            connection.send(steppers[request](examples))
            continue
        seconds = {
            gathers: stepper.tune(examples, sizes.get("packed"))
            for gathers, stepper in packed.items()
        }
        gathers = min(seconds, key=seconds.__getitem__)
        steppers["packed"] = packed.pop(gathers)
        packed.clear()
        steppers["whole"].tune(examples, len(examples))
        for peer_name in ("padded", "grouped"):
            steppers[peer_name].tune(examples, sizes.get(peer_name))
        facts = {
            name: {
                "micro_batch": stepper.size,
                "parameters": parameters_by_component(stepper.model, config),
            }
            for name, stepper in steppers.items()
        }
        facts["packed"]["attention"] = (
            "segments gathered into a padded batch" if gathers else "segment by segment"
        )
        facts["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
        connection.send(facts)
