"""The one schema of a run: frozen, typed records, a section each.

Only the code that *builds* a run (setup/) reads the whole `Config`; everything below it receives the section it needs.
"""

from __future__ import annotations

import unicodedata
from typing import ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

Auto = Literal["auto"]
Targets = Literal["assistant", "all"]
DType = Literal["float32", "bfloat16", "float64"]
Remat = Literal["none", "dots", "full"]
Kernel = Literal["auto", "jax", "gpu"]  # of attention; see attention/attention.py


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says which key, why, and what to do."""


class RenamedKeyError(ConfigError):
    """A configuration with keys that have another name now; the message says which."""


class Section(BaseModel):
    """Base of all sections: frozen, strict about types, no unknown keys, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# ---------------------------------------------------------------------------- model


class LanguageConfig(Section):
    """A decoder of the Llama/Qwen family. `rope_sections` are the (time, height, width) shares of the rotary
    pairs of one head (M-RoPE, arXiv 2409.12191); they add up to head_size / 2."""

    vocab_size: PositiveInt | Auto = "auto"
    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_size: PositiveInt
    mlp_width: PositiveInt
    rope_theta: PositiveFloat = 10_000.0
    rope_sections: tuple[int, int, int] | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    norm_epsilon: PositiveFloat = 1e-6
    loss_chunk: PositiveInt = 512  # tokens whose logits exist at one time
    bidirectional: tuple[Literal["vision", "audio"], ...] = ("vision", "audio")  # media that see their whole item

    @model_validator(mode="after")
    def _check(self) -> LanguageConfig:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_size % 2:
            raise ValueError(f"head_size ({self.head_size}) must be even: rotary positions turn pairs")
        if self.rope_sections is not None and sum(self.rope_sections) != self.head_size // 2:
            raise ValueError(f"rope_sections {self.rope_sections} must add up to head_size / 2 = {self.head_size // 2}")
        return self


class TowerConfig(Section):
    """What every encoder tower has; `merge` neighbouring outputs become one language token."""

    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    mlp_width: PositiveInt
    merge: PositiveInt = 2
    rope_theta: PositiveFloat = 10_000.0
    norm_epsilon: PositiveFloat = 1e-6

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @model_validator(mode="after")
    def _check_heads(self) -> TowerConfig:
        if self.width % (self.heads * 4):
            raise ValueError(
                f"width ({self.width}) must be a multiple of 4 * heads ({self.heads}): two rotary axes of pairs"
            )
        return self


class LayerWindows(Section):
    """Which layers attend in windows: with `window`, all but `full_layers`, which see all that others would."""

    layers: PositiveInt
    window: PositiveInt | None = None
    full_layers: tuple[int, ...] = ()  # counted from 0

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Of each layer."""
        return tuple(self.window is not None and layer not in self.full_layers for layer in range(self.layers))

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        if self.window is None and self.full_layers:
            raise ValueError(f"full_layers {list(self.full_layers)} need a window; without one, all layers are full")
        if outside := [layer for layer in self.full_layers if not 0 <= layer < self.layers]:
            raise ValueError(f"full_layers names {outside}, but layers are 0 .. {self.layers - 1}")
        if self.window is not None and not any(self.windowed):
            raise ValueError(
                f"full_layers names all layers, so that window ({self.window}) changes nothing; unset both"
            )
        return self


class VisionConfig(LayerWindows, TowerConfig):
    """Native-resolution vision transformer; `merge` x `merge` patches become one language token. With `window`, layers
    attend inside windows of `window` x `window` patches, but for `full_layers`, which see the whole image."""

    patch_size: PositiveInt = 14

    @property
    def patch_features(self) -> int:
        """Numbers of one patch: three colors of every pixel."""
        return 3 * self.patch_size**2


class AudioConfig(TowerConfig):
    """Log-mel encoder: a convolutional stem inside chunks of `chunk_frames` frames of a clip, then the tower."""

    stem_stride: ClassVar[int] = 4  # frames that become one token of attention: two convolutions of stride 2 ..
    stem_kernel: ClassVar[int] = 3  # .. and of this width

    mel_bins: PositiveInt = 80
    chunk_frames: PositiveInt = 64

    @model_validator(mode="after")
    def _check_chunk(self) -> AudioConfig:
        token = self.stem_stride * self.merge
        if self.chunk_frames % token:
            raise ValueError(
                f"chunk_frames ({self.chunk_frames}) must be a multiple of {self.stem_stride} * merge ({token})"
            )
        return self


class ModelConfig(Section):
    """The composition: any subset of encoders over the decoder. With `from`, parameters are those of another run (its
    folder: the latest checkpoint) or checkpoint, component by component; its optimizer and step are not taken along."""

    from_: str | None = Field(None, alias="from")
    language: LanguageConfig
    vision: VisionConfig | None = None
    audio: AudioConfig | None = None

    @property
    def encoders(self) -> tuple[str, ...]:
        """Names of the encoder phases present, in the order used everywhere."""
        return tuple(name for name in ("vision", "audio") if getattr(self, name) is not None)

    @property
    def windows(self) -> dict[str, LayerWindows]:
        """The attention windows of phases whose layers have any."""
        sections = {phase: getattr(self, phase) for phase in (*self.encoders, "language")}
        return {phase: section for phase, section in sections.items() if getattr(section, "window", None) is not None}


# ---------------------------------------------------------------------------- components


class ComponentConfig(Section):
    """How one component trains.

    `train` names the parameters that do, by patterns of their paths inside the component, in which `*` stands for any
    characters: `[layers.mlp.*, "*bias"]`. `layout` overrides the logical-axis -> mesh-axes rules of sharding/rules.py:
    `{batch: [data, fsdp, tensor], heads: [], mlp: []}` runs an encoder data-parallel over `tensor`.
    """

    freeze: bool = False
    train: tuple[str, ...] = ("*",)
    learning_rate_scale: float = Field(1.0, ge=0.0)
    compute_dtype: DType = "float32"
    remat: Remat = "full"  # what the backward pass computes again; see models/layers.py
    attention: Kernel = "auto"  # auto: the platform's own where there is one
    layout: dict[str, list[str]] = {}

    @model_validator(mode="after")
    def _check_train(self) -> ComponentConfig:
        if not self.train:
            raise ValueError("train is empty: freeze the component (freeze: true), or name some of its parameters")
        if self.freeze and self.train != ("*",):
            raise ValueError(f"train ({[*self.train]}): the component is frozen; set freeze: false, or leave it out")
        return self


class ProjectorConfig(ComponentConfig):
    """A projector is one MLP: its backward pass keeps what it needs by default, and it has no attention."""

    remat: Remat = "none"

    @model_validator(mode="after")
    def _check_attention(self) -> ProjectorConfig:
        if self.attention != "auto":
            raise ValueError(f"attention ({self.attention}): a projector has none; leave the key out")
        return self


class ProjectorComponents(Section):
    vision: ProjectorConfig = ProjectorConfig()
    audio: ProjectorConfig = ProjectorConfig()


class ComponentsConfig(Section):
    """Settings by component name; the tree of names is also that of parameters, metrics and checkpoints."""

    vision: ComponentConfig = ComponentConfig()
    audio: ComponentConfig = ComponentConfig()
    projector: ProjectorComponents = ProjectorComponents()
    language: ComponentConfig = ComponentConfig()


# ---------------------------------------------------------------------------- data and plan


class SourceConfig(Section):
    """One file of conversations; media paths are relative to `root` (default: the file's folder). Both paths are
    relative to `data.root`."""

    name: str
    path: str
    format: str | None = None  # see data/sources/formats.py; none: by the file's ending, jsonl for unknown ones
    root: str | None = None
    weight: PositiveFloat = 1.0
    # What is learned: what the assistant says, or all text. Only with `all` may an example have no assistant turn.
    targets: Targets = "assistant"

    @field_validator("name", "path", "root")
    @classmethod
    def _check_text(cls, value: str | None) -> str | None:
        if value == "" or any(unicodedata.category(character) == "Cc" for character in value or ""):
            raise ValueError(f"must be text, not empty and without control characters (got {value!r})")
        return value


class ImageDataConfig(Section):
    """Bounds on the area of an image after resizing, in pixels."""

    min_pixels: int = Field(28 * 28, ge=1, le=89_478_485)  # at most what a file may have; see data/media/images.py
    max_pixels: PositiveInt = 1024 * 1024


class AudioDataConfig(Section):
    """Log-mel settings: frames of `window_length` samples, `hop_length` samples apart. Clips longer than `max_seconds`
    are rejected, not cut."""

    sample_rate: int = Field(16_000, ge=1_000, le=1_000_000)  # Hz; the same bounds as for files
    window_length: PositiveInt = 400
    hop_length: PositiveInt = 160
    max_seconds: PositiveFloat = 60.0


class DataConfig(Section):
    sources: tuple[SourceConfig, ...]
    evaluation: tuple[SourceConfig, ...] = ()
    root: str | None = None  # folder that the paths of sources are relative to; none: the current one
    batch_size: int = Field(gt=0, le=1 << 20)  # examples a step, over all hosts
    tokenizer: str | None = None  # a tokenizers JSON file; none: bytes
    images: ImageDataConfig = ImageDataConfig()
    audio: AudioDataConfig = AudioDataConfig()
    index_cache: str | None = None  # folder of length indexes; none: beside each JSONL file
    workers: int = Field(0, ge=0)  # processes per host that decode and fill rows; 0: a thread does
    prefetch: PositiveInt = 2  # steps prepared ahead, at least one per worker
    max_rejected: float = Field(0.0, ge=0.0, le=1.0)  # share of examples that may be refused by the index
    max_failed_media: int = Field(0, ge=0)  # media items whose body may fail to decode before the run stops

    @field_validator("sources")
    @classmethod
    def _check_sources(cls, sources: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
        if not sources:
            raise ValueError("must name at least one source (got [])")
        return sources


class PhaseConfig(Section):
    """Row shapes of one phase: `capacities` in slots (patches, frames, tokens), one program each, or `auto`:
    chosen from the length statistics, `row_classes` of them, none above `max_capacity`."""

    capacities: tuple[PositiveInt, ...] | Auto = "auto"
    row_classes: int = Field(1, ge=1, le=4)
    max_capacity: PositiveInt = 32_768
    max_segments: PositiveInt | Auto = "auto"
    block: PositiveInt = 128  # attention block; capacities are multiples of it
    # Language only: slots of a row that all ranks compute together, for one example longer than other rows hold.
    long_capacity: PositiveInt | None = None

    @field_validator("capacities")
    @classmethod
    def _check_capacities(cls, capacities: tuple[int, ...] | Auto) -> tuple[int, ...] | Auto:
        if not capacities:
            raise ValueError("must be 'auto' or at least one number of slots (got [])")
        return capacities


class PhasesConfig(Section):
    vision: PhaseConfig = PhaseConfig()
    audio: PhaseConfig = PhaseConfig()
    language: PhaseConfig = PhaseConfig()

    @model_validator(mode="after")
    def _check(self) -> PhasesConfig:
        for name in ("vision", "audio"):
            if getattr(self, name).long_capacity is not None:
                raise ValueError(f"{name}.long_capacity: only the language phase has long rows; use mesh.context there")
        return self


class BalanceConfig(Section):
    """`none`: examples stay on the rank where sampling put them, with their media; `tokens`: examples and their media
    are dealt to ranks by one number, their tokens in all phases; `language`: the language phase is balanced, media
    stay with their example; `phases`: every phase is balanced on its own."""

    mode: Literal["none", "tokens", "language", "phases"] = "phases"
    pool_slots: PositiveInt | Auto = "auto"  # routed tokens a rank holds in one buffer
    pair_slots: PositiveInt | Auto = "auto"  # tokens one rank sends another in one padded all-to-all
    # Backend: `padded`, `ragged` (balance/exchange/tables.py lists them); auto: ragged where the platform has it.
    exchange: str = "auto"
    ranks_per_node: PositiveInt | Auto = "auto"  # devices of a node, for placement; auto: those of a process
    check_every: PositiveInt = 100  # steps between comparisons of the plan over processes
    calibration: str | None = None  # file of `jaxmllm calibrate`; none: items are balanced by FLOPs


AxisSize = PositiveInt | Literal[-1]


class MeshConfig(Section):
    """Devices along each mesh axis; -1 on at most one axis takes the rest."""

    data: AxisSize = -1
    fsdp: AxisSize = 1
    context: AxisSize = 1  # parts of a row; see `sequence` in sharding/rules.py
    tensor: AxisSize = 1

    @model_validator(mode="after")
    def _check_rest(self) -> MeshConfig:
        free = [name for name, size in self.model_dump().items() if size == -1]
        if len(free) > 1:
            raise ValueError(f"{' and '.join(free)} are -1, but only one axis can take the rest of the devices")
        return self


class PipelineConfig(Section):
    """Stages that layers are cut into (docs/pipelines.md); `stages` is the outermost mesh axis, 1 means no pipeline.

    Numbers are of one replica. What a batch needs beyond `auto` bounds is computed in further runs within the step.
    All rows of a phase are of one class.
    """

    stages: PositiveInt = 1
    layout: Literal["chain", "segments", "parallel"] = "segments"
    schedule: str = "greedy"  # a name in sharding/pipeline/schedules/by_name.py, checked when a run is prepared
    rollouts: PositiveInt = 64  # greedy schedules that a search tries
    split_backward: bool = False  # input and weight gradients as operations of their own
    deferral: bool = True  # examples may run their language part one microbatch after their media
    microbatches: PositiveInt | Auto = "auto"  # of the language model per step; auto: 4 * stages
    microbatches_in_flight: PositiveInt | Auto = "auto"  # of those, on a rank at a time; auto: 4 * stages
    encoder_rows_per_microbatch: PositiveInt | Auto = "auto"  # rows that one microbatch reads from each encoder
    kept_residuals: int = Field(0, ge=0)  # forwards of each component whose residuals a rank keeps for the backward


# ---------------------------------------------------------------------------- training


class OptimizerConfig(Section):
    """AdamW with warm-up and a cosine or constant schedule; decay skips norms, biases and embeddings."""

    learning_rate: PositiveFloat
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = Field(0, ge=0)
    decay_steps: PositiveInt | Auto = "auto"  # step at which the cosine has fallen; auto: run.steps when the run begins
    final_scale: float = Field(0.1, ge=0.0, le=1.0)
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    epsilon: PositiveFloat = 1e-8
    weight_decay: float = Field(0.0, ge=0.0)
    clip_norm: PositiveFloat | None = 1.0
    max_skipped: PositiveInt = 5  # non-finite updates in a row before the run stops


class CheckpointConfig(Section):
    every: PositiveInt | None = None  # steps; none: only at the end and on SIGTERM
    keep: PositiveInt = 3


class LoggingConfig(Section):
    every: PositiveInt = 1  # steps between metric records
    examples: bool = False  # write the ids of every step's examples to examples.jsonl
    tensorboard: bool = True
    wandb: str | None = None  # project name
    peak_flops: PositiveFloat | Auto = "auto"  # of one device, for MFU


class ProfileConfig(Section):
    start: int = Field(10, ge=0)
    steps: int = Field(0, ge=0)  # 0: no profile


class DistributedConfig(Section):
    """How long the processes of a run wait for one another."""

    start_timeout: PositiveFloat = 600.0  # seconds: for processes that start, read data or compile later than others
    peer_timeout: PositiveFloat = 60.0  # seconds without a sign of life after which a process counts as dead


class EvaluationConfig(Section):
    every: PositiveInt | None = None  # steps; none: only at the end
    examples: PositiveInt | None = None  # none: the whole held-out set
    at_start: bool = False  # also before the first step


class RunConfig(Section):
    directory: str
    steps: PositiveInt
    seed: int = Field(0, ge=0, lt=1 << 63)
    param_dtype: DType = "float32"


class Config(Section):
    """A whole run on one screen; see configs/ for examples."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    components: ComponentsConfig = ComponentsConfig()
    phases: PhasesConfig = PhasesConfig()
    balance: BalanceConfig = BalanceConfig()
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    profile: ProfileConfig = ProfileConfig()
    distributed: DistributedConfig = DistributedConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        for name in (*self.model.encoders, "language"):
            remat = getattr(self.components, name).remat
            if self.pipeline.stages > 1 and remat != "full":
                raise ValueError(
                    f"components.{name}.remat ({remat}): with pipeline.stages, layers are computed again except where "
                    "pipeline.kept_residuals says; set that, and leave remat out"
                )
        return self

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate has fallen to its final scale."""
        return self.run.steps if self.optimizer.decay_steps == "auto" else self.optimizer.decay_steps

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices along each mesh axis; with a pipeline, stages first: neighbours on the other axes share a node."""
        stages = {"stage": self.pipeline.stages} if self.pipeline.stages > 1 else {}
        return stages | self.mesh.model_dump()
