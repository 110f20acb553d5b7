"""Section `components`: how each part of the model trains and runs."""

from __future__ import annotations

from operator import attrgetter
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from jaxmllm.config.adapter_sections import ADAPTER
from jaxmllm.config.section import DType, Section

PROJECTOR: Final = (
    "projector."  # prefix of the names of projectors, before the name of the component they read
)
Kept = Literal["attention", "projections", "mlp"]  # names of values, given where layers make them
Remat = Literal["none", "dots", "full"] | tuple[Kept, ...]
Kernel = Literal["auto", "jax", "cpu", "gpu", "cudnn"]  # of attention; see attention/attention.py
ExpertKernel = Literal["auto", "jax", "ragged_dot"]  # see experts/experts.py


class TrainingConfig(Section):
    """Which parameters of a component are trained, and how fast.

    `train` lists them as patterns of their paths inside the component, in which `*` stands for any
    characters: `[layers.mlp.*, "*bias"]`.

    With `ema`, a running average of the trained parameters is kept, in at least float32. After each
    update it moves towards the parameters by 1 - `ema` of the difference, and by more in the first
    updates (training/averages.py). Evaluations and the command `draw` use it.
    """

    freeze: bool = False
    train: tuple[str, ...] = ("*",)
    ema: float | None = Field(None, gt=0.0, lt=1.0)  # share of the average that an update keeps
    learning_rate_scale: float = Field(1.0, ge=0.0)  # factor of optimizer.learning_rate

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

    `layout` overrides the rules of sharding/rules.py, which map logical axes to mesh axes:
    `{batch: [data, fsdp, tensor], heads: [], mlp: []}` runs an encoder data-parallel over `tensor`.

    `remat` says what the backward pass of a layer or projector computes again: with `full`
    everything but its input, with `dots` everything but the products with weights, with `none`
    nothing. Weights are gathered again in any case. A list names values that are kept in addition
    to the input:

        attention     the output and logsumexp of attention, so that it runs once; not its inputs
        projections   the products that make queries, keys, values and the output of attention
        mlp           the products before the MLP's activation, and its last product where that is
                      normed or gated
    """

    compute_dtype: DType = "float32"  # of products and activations; on GPUs and TPUs, use bfloat16
    # Type in which gradients are added over devices into their shards: at least float32, or
    # compute_dtype, which sends half as much if it is bfloat16, but rounds every sum
    reduce_dtype: Literal["float32", "compute"] = "float32"
    # When that happens: in every microbatch, or only once at the end of a step, until when every
    # device holds whole, unsharded sums of its own
    reduce: Literal["microbatch", "step"] = "microbatch"
    remat: Remat = "full"
    attention: Kernel = "auto"  # kernel of attention; auto: the platform's own if it has one
    experts: ExpertKernel = "auto"  # kernel of a mixture of experts, if there is one
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
    """How a projector trains and runs. By default, its backward pass computes nothing again."""

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
    """Settings of each projector."""

    vision: ProjectorConfig = ProjectorConfig()
    audio: ProjectorConfig = ProjectorConfig()
    language: ProjectorConfig = ProjectorConfig()  # between the decoder's states and `diffusion`


class AdapterComponents(Section):
    """Which parameters of adapters are trained. All else is as for the component that they adapt:
    adapters run as it does, and are sharded like its matrices."""

    vision: TrainingConfig = TrainingConfig()
    audio: TrainingConfig = TrainingConfig()
    language: TrainingConfig = TrainingConfig()
    diffusion: TrainingConfig = TrainingConfig()


class ComponentsConfig(Section):
    """Settings by component. Parameters, metrics and checkpoints have the same tree of names."""

    vision: ComponentConfig = ComponentConfig()
    audio: ComponentConfig = ComponentConfig()
    projector: ProjectorComponents = ProjectorComponents()
    language: ComponentConfig = ComponentConfig()
    diffusion: ComponentConfig = ComponentConfig()
    adapter: AdapterComponents = AdapterComponents()

    def of(self, name: str) -> ComponentConfig:
        """Settings of the component with this name: "vision", "projector.vision", ...

        Those of an adapter are the settings of the component that it adapts, except for the keys of
        `TrainingConfig`.
        """
        settings = attrgetter(name)(self)
        if not name.startswith(ADAPTER):
            component: ComponentConfig = settings
            return component
        return self.of(name.removeprefix(ADAPTER)).model_copy(update=dict(settings))
