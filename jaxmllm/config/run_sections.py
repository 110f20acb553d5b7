"""Sections about the run itself: steps, losses, outputs, and how long its processes wait."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from jaxmllm.config.section import Auto, DType, Section


class OptimizerConfig(Section):
    """AdamW with warm-up and a cosine or constant schedule.

    Weight decay does not apply to norms, biases and embeddings.
    """

    learning_rate: PositiveFloat  # after the warm-up
    schedule: Literal["cosine", "constant"] = "cosine"
    # Steps in which the learning rate rises linearly to `learning_rate`; counted in 32 bits
    warmup_steps: int = Field(0, ge=0, lt=1 << 31)
    # Step at which the cosine decay ends; auto: the value of `run.steps` when the run begins
    decay_steps: PositiveInt | Auto = "auto"
    final_scale: float = Field(0.1, ge=0.0, le=1.0)  # factor of learning_rate from there on
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    epsilon: PositiveFloat = 1e-8
    weight_decay: float = Field(0.0, ge=0.0)  # multiplied by the learning rate in every step
    clip_norm: PositiveFloat | None = 1.0  # of the gradient of all parameters; none: no clipping
    max_skipped: PositiveInt = 5  # this many non-finite updates in a row stop the run


class LanguageObjectiveConfig(Section):
    """The cross-entropy of text. With a `weight` of 0 the decoder has no head, and its gradients
    come from generators alone."""

    weight: float = Field(1.0, ge=0.0)


class DiffusionObjectiveConfig(Section):
    """Rectified flow (arXiv 2209.03003): x_t = (1 - t) * image + t * noise. The loss is the mean
    squared error of the velocity, noise - image, whether the model predicts the velocity or the
    image (`sample`).

    `times` says how t is drawn: uniformly, or as the logistic function of a normal number
    (arXiv 2403.03206). Every t is then moved towards noise: t -> shift * t / (1 + (shift - 1) * t).
    With `shift_patches`, `shift` holds for an item of that many patches and grows with the square
    root of their number (arXiv 2403.03206), because the same noise hides less of a larger picture.
    """

    weight: PositiveFloat = 1.0
    prediction: Literal["velocity", "sample"] = "velocity"
    times: Literal["uniform", "logit_normal"] = "logit_normal"
    shift: PositiveFloat = 1.0
    shift_patches: PositiveInt | None = None  # none: all items have the same `shift`
    # Share of items that are learned without their conditions, for classifier-free guidance
    # (arXiv 2207.12598)
    condition_drop: float = Field(0.1, ge=0.0, le=1.0)


class ExpertsObjectiveConfig(Section):
    """Weights of the terms that a mixture of experts adds to the loss; each term is a mean over
    layers and tokens.

    `balance`: the number of experts times the sum, over experts, of an expert's share of all
    choices in the last step's whole batch (arXiv 2501.11873) times the probability that the router
    gives it now. The term is 1 where all experts are equal, and linear in the tokens, so it does
    not depend on the plan. `router_z`: the square of the logarithm of the router's softmax
    denominator (arXiv 2202.08906).
    """

    balance: float = Field(0.0, ge=0.0)
    router_z: float = Field(0.0, ge=0.0)


class ObjectiveConfig(Section):
    """The losses that are added up, and their weights.

    A model that draws is trained on the weighted sum of `language` and `diffusion`, each a mean
    over its own targets.
    """

    language: LanguageObjectiveConfig = LanguageObjectiveConfig()
    diffusion: DiffusionObjectiveConfig = DiffusionObjectiveConfig()
    experts: ExpertsObjectiveConfig = ExpertsObjectiveConfig()

    @property
    def learns_text(self) -> bool:
        """Whether the decoder has a loss, and therefore a head."""
        return self.language.weight > 0


class CheckpointConfig(Section):
    """When checkpoints are saved, and how many are kept."""

    every: PositiveInt | None = None  # steps; none: only at the end and on SIGTERM
    keep: PositiveInt = 3  # how many of the latest checkpoints are kept; older ones are deleted


class LoggingConfig(Section):
    """Where metrics go, and how often."""

    every: PositiveInt = 1  # steps between metric records
    examples: bool = False  # write the ids of each step's examples to examples.jsonl
    tensorboard: bool = True  # also write the records as events to tensorboard/ in the run folder
    wandb: str | None = None  # project of Weights & Biases; none: it is not used
    peak_flops: PositiveFloat | Auto = "auto"  # FLOP/s of one device, for MFU


class ProfileConfig(Section):
    """Which steps the profiler records."""

    start: int = Field(10, ge=0)  # first recorded step
    steps: int = Field(0, ge=0)  # 0: no profile


class DistributedConfig(Section):
    """How long the processes of a run wait for one another."""

    # Seconds that processes wait for others to start, to read their data and to compile
    start_timeout: float = Field(600.0, gt=0, le=1e6)
    # Seconds without a sign of life after which a process counts as dead
    peer_timeout: float = Field(60.0, gt=0, le=1e6)


class EvaluationConfig(Section):
    """When the held-out examples are evaluated, and how many of them."""

    every: PositiveInt | None = None  # steps; none: only at the end
    examples: PositiveInt | None = None  # how many; none: the whole held-out set
    at_start: bool = False  # also before the first step


class RunConfig(Section):
    """Folder and length of the run, its seed, and the dtype of its parameters."""

    directory: str  # the run folder, which belongs to this run alone
    steps: PositiveInt  # updates in all
    seed: int = Field(0, ge=0, lt=1 << 63)  # of all random numbers
    param_dtype: DType = "float32"  # of parameters and their optimizer states
    # Folder of compiled programs, which later starts read; auto: JAX_COMPILATION_CACHE_DIR, or else
    # `compiled` next to the run folder; none: every start compiles
    compilation_cache: Auto | Annotated[str, Field(min_length=1)] | None = "auto"
