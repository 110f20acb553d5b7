"""Sections about the run itself: its steps, what it writes, how its processes wait."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from jaxmllm.config.section import Auto, DType, Section


class OptimizerConfig(Section):
    """AdamW with warm-up and a cosine or constant schedule.

    Weight decay leaves out norms, biases and embeddings.
    """

    learning_rate: PositiveFloat  # after the warm-up
    schedule: Literal["cosine", "constant"] = "cosine"
    # Steps until learning_rate is reached, linearly; they are counted in 32 bits
    warmup_steps: int = Field(0, ge=0, lt=1 << 31)
    # Step at which the cosine has fallen; auto: `run.steps` when the run begins.
    decay_steps: PositiveInt | Auto = "auto"
    final_scale: float = Field(0.1, ge=0.0, le=1.0)  # of learning_rate, from there on
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    epsilon: PositiveFloat = 1e-8
    weight_decay: float = Field(0.0, ge=0.0)  # times the learning rate, in every step
    clip_norm: PositiveFloat | None = 1.0  # of the gradient of all parameters; none: as it is
    max_skipped: PositiveInt = 5  # non-finite updates in a row before the run stops


class LanguageObjectiveConfig(Section):
    """The cross-entropy of text. With a `weight` of 0 the decoder has no head, and learns only what
    generators ask of its states."""

    weight: float = Field(1.0, ge=0.0)


class DiffusionObjectiveConfig(Section):
    """Rectified flow (arXiv 2209.03003): x_t = (1 - t) * image + t * noise, and the loss is the mean squared
    error of the velocity, noise - image, whatever is predicted: the velocity or the image (`sample`).

    Times t are drawn uniformly or as the logistic function of a normal number (arXiv 2403.03206), and
    moved towards noise: t -> shift * t / (1 + (shift - 1) * t). With `shift_patches`, `shift` is that of an item
    of so many patches, and grows with the square root of their number (arXiv 2403.03206): the same noise hides less
    of a larger picture.
    """

    weight: PositiveFloat = 1.0
    prediction: Literal["velocity", "sample"] = "velocity"
    times: Literal["uniform", "logit_normal"] = "logit_normal"
    shift: PositiveFloat = 1.0
    shift_patches: PositiveInt | None = None  # none: `shift` is that of all items
    # Share of items that are drawn without their conditions, for classifier-free guidance
    # (arXiv 2207.12598)
    condition_drop: float = Field(0.1, ge=0.0, le=1.0)


class ExpertsObjectiveConfig(Section):
    """Weights of what a mixture of experts adds to the loss; each term is a mean over layers and tokens.

    `balance`: experts times the sum over experts of the share of the tokens' choices that an expert had in the last
    step, of the whole batch (arXiv 2501.11873), times the probability that the router gives it now; 1 where all are
    even. It is linear in the tokens, so that no plan changes it. `router_z`: the square of the logarithm of the
    router's softmax denominator (arXiv 2202.08906).
    """

    balance: float = Field(0.0, ge=0.0)
    router_z: float = Field(0.0, ge=0.0)


class ObjectiveConfig(Section):
    """Losses besides the cross-entropy of text, and weights.

    Of a model that draws, the weighted sum of `language` and `diffusion` is trained, each a mean over its own targets.
    """

    language: LanguageObjectiveConfig = LanguageObjectiveConfig()
    diffusion: DiffusionObjectiveConfig = DiffusionObjectiveConfig()
    experts: ExpertsObjectiveConfig = ExpertsObjectiveConfig()

    @property
    def learns_text(self) -> bool:
        """Whether the decoder has a loss, and with it a head."""
        return self.language.weight > 0


class CheckpointConfig(Section):
    """When the state is saved, and how many states are kept."""

    every: PositiveInt | None = None  # steps; none: only at the end and on SIGTERM
    keep: PositiveInt = 3  # the latest ones; older ones are deleted


class LoggingConfig(Section):
    """Where metrics go, and how often."""

    every: PositiveInt = 1  # steps between metric records
    examples: bool = False  # write the ids of every step's examples to examples.jsonl
    tensorboard: bool = True  # the same records as events in tensorboard/ of the run folder
    wandb: str | None = None  # project name
    peak_flops: PositiveFloat | Auto = "auto"  # FLOPs per second of one device, for MFU


class ProfileConfig(Section):
    """Which steps the profiler records."""

    start: int = Field(10, ge=0)  # first recorded step
    steps: int = Field(0, ge=0)  # 0: no profile


class DistributedConfig(Section):
    """How long the processes of a run wait for one another."""

    # Seconds for processes that start, read data or compile later than others.
    start_timeout: float = Field(600.0, gt=0, le=1e6)
    # Seconds without a sign of life after which a process counts as dead.
    peer_timeout: float = Field(60.0, gt=0, le=1e6)


class EvaluationConfig(Section):
    """When the held-out examples are evaluated, and how many of them."""

    every: PositiveInt | None = None  # steps; none: only at the end
    examples: PositiveInt | None = None  # none: the whole held-out set
    at_start: bool = False  # also before the first step


class RunConfig(Section):
    """Where the run lives, how long it is, and what its random numbers and parameters start from."""

    directory: str  # the run folder, which belongs to this run alone
    steps: PositiveInt  # updates
    seed: int = Field(0, ge=0, lt=1 << 63)  # of all that is random
    param_dtype: DType = "float32"  # of parameters and their optimizer states
    # Folder of compiled programs, which the next start reads; auto: `compiled` next to the run folder;
    # none: every start compiles.
    compilation_cache: Auto | Annotated[str, Field(min_length=1)] | None = "auto"
