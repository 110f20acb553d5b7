"""Section `components`: how each part of the model trains and runs."""

from __future__ import annotations

from operator import attrgetter
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from jaxmllm.config.adapter_sections import ADAPTER
from jaxmllm.config.section import DType, Section

PROJECTOR: Final = (
    "projector."  # what the names of projectors begin with, before that of what they read
)
Kept = Literal["attention", "projections", "mlp"]  # values of a layer, named where they are made
Remat = Literal["none", "dots", "full"] | tuple[Kept, ...]
Kernel = Literal["auto", "jax", "cpu", "gpu", "cudnn"]  # of attention; see attention/attention.py
ExpertKernel = Literal["auto", "jax", "ragged_dot"]  # see experts/experts.py


class TrainingConfig(Section):
    """What of a component trains, and how fast.

    `train` names the parameters that do, by patterns of their paths inside the component, in which
    `*` stands for any characters: `[layers.mlp.*, "*bias"]`.

    With `ema`, a running average of what is trained is kept beside it, in at least float32: after each
    update it moves towards the parameters by 1 - `ema` of the difference, in the first updates by more
    (training/averages.py). Evaluations and the command `draw` use it.
    """

    freeze: bool = False
    train: tuple[str, ...] = ("*",)
    ema: float | None = Field(None, gt=0.0, lt=1.0)  # share that stays in an update
    learning_rate_scale: float = Field(1.0, ge=0.0)  # times optimizer.learning_rate

    @model_validator(mode="after")
    def _check_train(self) -> Self:
        if not self.train:
            raise ValueError(
                "train is empty: freeze the component (freeze: true), or name some of its parameters"
            )
        if self.freeze and self.train != ("*",):
            raise ValueError(
                f"train ({[*self.train]}): the component is frozen; set freeze: false, or leave it out"
            )
        if self.freeze and self.ema is not None:
            raise ValueError(
                f"ema ({self.ema:g}): the component is frozen, so that its average is what it is; set freeze: false, "
                "or leave ema out"
            )
        return self


class ComponentConfig(TrainingConfig):
    """How one component trains and runs.

    `layout` overrides the rules of sharding/rules.py, logical axis -> mesh axes:
    `{batch: [data, fsdp, tensor], heads: [], mlp: []}` runs an encoder data-parallel over `tensor`.

    `remat` is what the backward pass of a layer, or of a projector, computes again: `full` all but
    its input, `dots` all but the products with weights, `none` nothing. Weights are gathered again in any
    case. A list names what is kept instead, beside the input:

        attention     its output and logsumexp, so that it runs once; not what it reads
        projections   the products that make queries, keys, values and its output
        mlp           the products before its activation, and the last one where it is normed or gated
    """

    compute_dtype: DType = "float32"  # of products and activations; GPUs and TPUs want bfloat16
    # In what the gradients of shards are added over devices: at least float32, or compute_dtype, which
    # sends half as much where that is bfloat16, and rounds every sum
    reduce_dtype: Literal["float32", "compute"] = "float32"
    # When: in every microbatch, or once a step, until which each device holds whole sums of its own
    reduce: Literal["microbatch", "step"] = "microbatch"
    remat: Remat = "full"
    attention: Kernel = "auto"  # auto: the platform's own where there is one
    experts: ExpertKernel = "auto"  # of a mixture of experts, where the component has one
    layout: dict[str, list[str]] = Field(default_factory=dict)

    @field_validator("remat")
    @classmethod
    def _check_remat(cls, remat: Remat) -> Remat:
        if not isinstance(remat, str) and (not remat or len(set(remat)) < len(remat)):
            raise ValueError(
                f"must be 'none', 'dots', 'full' or different names of what is kept (got {[*remat]})"
            )
        return remat


class ProjectorConfig(ComponentConfig):
    """How a projector trains: one MLP, whose backward pass by default recomputes nothing."""

    remat: Remat = "none"

    @model_validator(mode="after")
    def _check_attention(self) -> ProjectorConfig:
        if self.attention != "auto":
            raise ValueError(
                f"attention ({self.attention}): a projector has none; leave the key out"
            )
        if not isinstance(self.remat, str) and self.remat != ("mlp",):
            raise ValueError(
                f"remat ({[*self.remat]}): of these values a projector has none but mlp; set [mlp]"
            )
        return self


class ProjectorComponents(Section):
    """Settings by projector."""

    vision: ProjectorConfig = ProjectorConfig()
    audio: ProjectorConfig = ProjectorConfig()
    language: ProjectorConfig = ProjectorConfig()  # the decoder's states -> what `diffusion` reads


class AdapterComponents(Section):
    """What of adapters trains; they run as the component does that they adapt, and lie as its matrices do."""

    vision: TrainingConfig = TrainingConfig()
    audio: TrainingConfig = TrainingConfig()
    language: TrainingConfig = TrainingConfig()
    diffusion: TrainingConfig = TrainingConfig()


class ComponentsConfig(Section):
    """Settings by component; parameters, metrics and checkpoints have the same tree of names."""

    vision: ComponentConfig = ComponentConfig()
    audio: ComponentConfig = ComponentConfig()
    projector: ProjectorComponents = ProjectorComponents()
    language: ComponentConfig = ComponentConfig()
    diffusion: ComponentConfig = ComponentConfig()
    adapter: AdapterComponents = AdapterComponents()

    def of(self, name: str) -> ComponentConfig:
        """Settings of a component by its name: "vision", "projector.vision", "adapter.vision", ..."""
        settings = attrgetter(name)(self)
        if not name.startswith(ADAPTER):
            component: ComponentConfig = settings
            return component
        return self.of(name.removeprefix(ADAPTER)).model_copy(update=dict(settings))
