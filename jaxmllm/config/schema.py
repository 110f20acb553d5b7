"""The schema of a run's config: frozen, typed records, one for each section. Import them from here.

    model                                model_sections.py, tower_sections.py, diffusion_section.py, adapter_sections.py
    components                           component_sections.py
    data                                 data_sections.py
    phases, balance, mesh, pipeline      plan_sections.py
    run, optimizer, evaluation, ...      run_sections.py

Only the code that *builds* a run (setup/) reads the whole `Config`; everything below it receives
the section it needs.
"""

from __future__ import annotations

from math import isqrt
from operator import attrgetter

from pydantic import model_validator

from jaxmllm.config.adapter_sections import ADAPTER, AdapterConfig, AdaptersConfig, Matrices
from jaxmllm.config.component_sections import (
    PROJECTOR,
    AdapterComponents,
    ComponentConfig,
    ComponentsConfig,
    ExpertKernel,
    Kept,
    Kernel,
    ProjectorComponents,
    ProjectorConfig,
    Remat,
    TrainingConfig,
)
from jaxmllm.config.data_sections import (
    CHATML,
    SQUARES,
    AudioDataConfig,
    DataConfig,
    GeneratedDataConfig,
    ImageDataConfig,
    LatentsDataConfig,
    ResizeKernel,
    ResizeRule,
    SourceConfig,
    Targets,
    VideoDataConfig,
)
from jaxmllm.config.diffusion_section import DiffusionConfig
from jaxmllm.config.layer_sections import Activation, Gelu, LayerWindows
from jaxmllm.config.model_sections import ExpertsConfig, LanguageConfig, ModelConfig
from jaxmllm.config.plan_sections import (
    MOST_ROW_CLASSES,
    BalanceConfig,
    MeshConfig,
    PhaseConfig,
    PhasesConfig,
    PipelineConfig,
)
from jaxmllm.config.rotary_scaling import RotaryScaling
from jaxmllm.config.run_sections import (
    CheckpointConfig,
    DiffusionObjectiveConfig,
    DistributedConfig,
    EvaluationConfig,
    ExpertsObjectiveConfig,
    LanguageObjectiveConfig,
    LoggingConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProfileConfig,
    RunConfig,
)
from jaxmllm.config.section import ConfigError, RenamedKeyError, Section
from jaxmllm.config.tower_sections import (
    AudioConfig,
    ProjectorShapes,
    Silence,
    TowerConfig,
    VisionConfig,
)

__all__ = [
    "ADAPTER",
    "CHATML",
    "MOST_ROW_CLASSES",
    "PROJECTOR",
    "SQUARES",
    "Activation",
    "AdapterComponents",
    "AdapterConfig",
    "AdaptersConfig",
    "AudioConfig",
    "AudioDataConfig",
    "BalanceConfig",
    "CheckpointConfig",
    "ComponentConfig",
    "ComponentsConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DiffusionConfig",
    "DiffusionObjectiveConfig",
    "DistributedConfig",
    "EvaluationConfig",
    "ExpertKernel",
    "ExpertsConfig",
    "ExpertsObjectiveConfig",
    "Gelu",
    "GeneratedDataConfig",
    "ImageDataConfig",
    "Kept",
    "Kernel",
    "LanguageConfig",
    "LanguageObjectiveConfig",
    "LatentsDataConfig",
    "LayerWindows",
    "LoggingConfig",
    "Matrices",
    "MeshConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PhaseConfig",
    "PhasesConfig",
    "PipelineConfig",
    "ProfileConfig",
    "ProjectorComponents",
    "ProjectorConfig",
    "ProjectorShapes",
    "Remat",
    "RenamedKeyError",
    "ResizeKernel",
    "ResizeRule",
    "RotaryScaling",
    "RunConfig",
    "Section",
    "Silence",
    "SourceConfig",
    "Targets",
    "TowerConfig",
    "TrainingConfig",
    "VideoDataConfig",
    "VisionConfig",
]


class Config(Section):
    """The whole config of a run; see configs/ for examples."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    objective: ObjectiveConfig = ObjectiveConfig()
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
        self._check_adapters()
        self._check_staged_balance()
        self._check_generator()
        self._check_latents()
        self._check_experts()
        self._check_images()
        self._check_videos()
        self._check_clips()
        projectors = [f"{PROJECTOR}{name}" for name in self.model.encoders]
        projectors += ["projector.language"] if self.model.generators else []
        for name in (*self.model.phases, *projectors):
            component = self.components.of(name)
            for key, usual in (("reduce_dtype", "float32"), ("reduce", "microbatch")):
                value = getattr(component, key)
                if self.pipeline.stages > 1 and value != usual:
                    raise ValueError(
                        f"components.{name}.{key} ({value}): with pipeline.stages, gradients go to the shards of "
                        "their parameters in every operation, in float32; leave it out"
                    )
        for name in self.model.phases:
            if self.components.of(name).attention == "cudnn":
                self._check_cudnn(name)
            rows = getattr(self.phases, name)
            if rows.kept_residuals not in ("auto", 0):
                self._check_kept_residuals(name, rows.kept_residuals)
            spans = rows.spans
            if spans not in ("auto", (1,)) and not self.may_share_rows:
                raise ValueError(
                    f"phases.{name}.spans ({list(spans)}): with balance.mode ({self.balance.mode}), every row "
                    "lies on one rank; leave spans out, or set balance.mode: phases"
                )
        return self

    def _check_staged_balance(self) -> None:
        """Refuse keys that a pipeline does not use: its stages have microbatches of their own
        (docs/pipelines.md), and no exchange."""
        defaults = BalanceConfig()
        for key in ("mode", "pool_slots", "pair_slots", "exchange"):
            value = getattr(self.balance, key)
            if self.pipeline.stages > 1 and value != getattr(defaults, key):
                raise ValueError(
                    f"balance.{key} ({value}): with pipeline.stages ({self.pipeline.stages}), media run where their "
                    "texts are read, in microbatches that are balanced in all phases; leave it out"
                )

    def _check_adapters(self) -> None:
        for name in type(self.components.adapter).model_fields:
            has_adapter = name in self.model.adapters.by_component
            if not has_adapter and getattr(self.components.adapter, name) != TrainingConfig():
                raise ValueError(
                    f"components.adapter.{name}: there is no model.adapters.{name}; leave it out, or add that section"
                )

    def _check_generator(self) -> None:
        if self.model.diffusion is None:
            # The losses of routers need experts, not a generator.
            if self.objective != ObjectiveConfig(experts=self.objective.experts):
                raise ValueError(
                    "objective: it says how the losses of a model that draws add up, and this one has but the "
                    "cross-entropy of text; leave it out, or give it model.diffusion"
                )
            return
        if self.trains_language:
            return
        if self.objective.language.weight:
            raise ValueError(
                f"objective.language.weight ({self.objective.language.weight:g}): the decoder and all that it reads "
                "are frozen, so that the loss of text trains nothing; set it to 0"
            )
        if self.objective.experts != ExpertsObjectiveConfig():
            raise ValueError(
                "objective.experts: the decoder and all that it reads are frozen, so that what its routers add trains "
                "nothing; leave it out"
            )

    def _check_latents(self) -> None:
        latents = self.data.latents
        model = self.model.diffusion
        if model is None or model.channels is None:
            if latents != LatentsDataConfig():
                raise ValueError(
                    "data.latents: the model draws no latents; set model.diffusion.channels, or leave it out"
                )
            return
        if self.data.generated != GeneratedDataConfig():
            raise ValueError(
                f"data.generated: it is about pixels, and model.diffusion.channels ({model.channels}) says that "
                "latents are drawn; leave it out, and see data.latents"
            )
        for key in ("mean", "std"):
            if (value_count := len(getattr(latents, key))) not in (1, model.channels):
                raise ValueError(
                    f"data.latents.{key}: {value_count} numbers, but one for all channels or one for each of "
                    f"model.diffusion.channels ({model.channels})"
                )
        if latents.shorten and latents.max_frames % model.patch_frames:
            raise ValueError(
                f"data.latents.max_frames ({latents.max_frames}): shortened clips would end within a patch; make it a "
                f"multiple of model.diffusion.patch_frames ({model.patch_frames})"
            )

    def _check_experts(self) -> None:
        language = self.components.language
        projectors = (f"{PROJECTOR}{name}" for name in ("vision", "audio", "language"))
        for name in ("vision", "audio", "diffusion", *projectors):
            kernel = attrgetter(name)(self.components).experts
            if kernel != "auto":
                raise ValueError(
                    f"components.{name}.experts ({kernel}): only the decoder may have experts; leave it out"
                )
        if self.model.language.experts is None:
            for key, value, usual in (
                ("components.language.experts", language.experts, "auto"),
                ("objective.experts", self.objective.experts, ExpertsObjectiveConfig()),
            ):
                if value != usual:
                    raise ValueError(
                        f"{key}: the decoder has no experts; leave it out, or give it model.language.experts"
                    )
            return
        stages = self.pipeline.stages
        if stages > 1 and self.model.generators and not self.objective.language.weight:
            raise ValueError(
                f"pipeline.stages ({stages}): what a router of model.language.experts adds goes with the loss of text "
                "there, and objective.language.weight is 0; set one of the two"
            )
        # `remat` is a word or names of what is kept; in a word, `in` would look for a substring.
        if "mlp" in language.remat and not isinstance(language.remat, str):
            raise ValueError(
                f"components.language.remat ({[*language.remat]}): the products of experts are computed again in any "
                "case; leave mlp out"
            )

    def _check_images(self) -> None:
        vision = self.model.vision
        images = self.data.images
        if images.resize == "tiles" and not (vision is not None and vision.class_token):
            raise ValueError(
                "data.images.resize (tiles): towers with a class token see tiles; name another rule"
            )
        if vision is None or vision.position_grid is None or vision.positions != "table":
            return
        grid = vision.position_grid
        squares = images.resize in SQUARES
        if not squares or isqrt(images.max_pixels) // vision.patch_size != grid:
            raise ValueError(
                f"data.images.resize ({images.resize}), max_pixels ({images.max_pixels}): with "
                f"model.vision.positions (table), every image has {grid} x {grid} patches; set resize: square, and "
                f"min_pixels and max_pixels to {(grid * vision.patch_size) ** 2}"
            )

    def _check_videos(self) -> None:
        vision = self.model.vision
        videos = self.data.videos
        resize = self.data.images.resize
        if vision is None or not vision.videos:
            if videos != VideoDataConfig():
                raise ValueError(
                    "data.videos: no videos are read; leave it out, or set model.vision.videos: true"
                )
            return
        if vision.class_token:
            raise ValueError(
                "model.vision.class_token: tiles of images have one, and no videos are read; leave it out, or set "
                "model.vision.videos: false"
            )
        if self.model.language.media_positions == "line":
            raise ValueError(
                "model.language.media_positions (line): groups of frames have times on an axis of their own; set grid, "
                "or model.vision.videos: false"
            )
        # Without `fps` all frames are taken, and only `max_frames` bounds them.
        fewest = videos.max_frames if videos.fps is None else videos.min_frames
        if fewest < vision.patch_frames:
            raise ValueError(
                f"data.videos.{'max' if videos.fps is None else 'min'}_frames ({fewest}) is less than one patch has, "
                f"model.vision.patch_frames ({vision.patch_frames}); raise it"
            )
        if videos.bounds == "video" and resize != "smart":
            raise ValueError(
                f"data.videos.bounds (video): with data.images.resize ({resize}), it is the size of each frame that is "
                "bounded; set bounds: frame, or resize: smart"
            )
        if vision.positions == "table" and videos.max_pixels != self.data.images.max_pixels:
            raise ValueError(
                f"data.videos.max_pixels ({videos.max_pixels}): with model.vision.positions (table), frames have the "
                f"size of images; set it and min_pixels to {self.data.images.max_pixels}"
            )

    def _check_clips(self) -> None:
        audio = self.model.audio
        data = self.data.audio
        if audio is None or audio.positions != "table":
            return
        seconds = audio.chunk_frames * data.hop_length / data.sample_rate
        if data.max_seconds > seconds:
            raise ValueError(
                f"data.audio.max_seconds ({data.max_seconds:g}): with model.audio.positions (table), a clip is one "
                f"chunk of {seconds:g} s at most; set it to {seconds:g}, and split longer clips"
            )

    def _check_cudnn(self, phase: str) -> None:
        """Refuse a phase whose attention cuDNN cannot compute (jaxmllm/attention/kernel_cudnn.py).

        An item must be a run of slots, in which every slot sees the whole item or, in texts, no
        later slots and at most the last `window` ones.
        """
        model = self.model
        section = getattr(model, phase)
        component = self.components.of(phase)
        seen = [name for name in model.language.bidirectional if name in model.encoders]
        reason = None
        if self.pipeline.stages > 1:
            reason = "pipeline.stages has rows of its own"
        elif phase in model.generators:
            reason = "patches and what they are drawn from are no runs of slots"
        elif component.compute_dtype != "bfloat16":
            reason = f"it computes in bfloat16; set components.{phase}.compute_dtype: bfloat16"
        elif section.head_size % 8 or section.head_size > 256:
            reason = f"heads must have a multiple of 8 numbers up to 256 (got {section.head_size})"
        elif phase == "language" and seen:
            reason = f"text would see {' and '.join(seen)} in both directions; set model.language.bidirectional: []"
        elif phase == "language" and section.window is not None and not all(section.windowed):
            reason = "all layers must have one window; leave model.language.full_layers out"
        elif phase == "vision" and section.window is not None:
            reason = (
                "windows of patches are more than a row has room for; leave model.vision.window out"
            )
        elif phase == "vision" and self.data.images.resize == "tiles":
            reason = "slots of a tile are no run (data.images.resize: tiles)"
        elif phase == "audio" and section.attention == "chunk":
            reason = "chunks are more than a row has room for; set model.audio.attention: clip"
        elif phase == "audio" and section.stem_channels is not None:
            reason = "chunks have empty slots between them (model.audio.stem_channels)"
        if reason:
            raise ValueError(
                f"components.{phase}.attention (cudnn): {reason}; or set it to auto, gpu or jax"
            )

    def _check_kept_residuals(self, phase: str, microbatches: int) -> None:
        what = f"phases.{phase}.kept_residuals ({microbatches})"
        if phase not in self.model.two_passes:
            raise ValueError(
                f"{what}: the {phase} phase runs forward and backward in one program, there is "
                "nothing to keep between them; leave it out"
            )
        if self.pipeline.stages > 1:
            raise ValueError(
                f"{what}: with pipeline.stages ({self.pipeline.stages}), pipeline.kept_residuals "
                "says what is kept; set that instead"
            )

    @property
    def trains_language(self) -> bool:
        """Whether the backward pass of the decoder has something to compute: anything of it, or of
        what it reads, is trained."""
        phases = (*self.model.encoders, "language")
        projectors = [f"{PROJECTOR}{name}" for name in self.model.encoders]
        adapted = self.model.adapters.by_component
        adapters = [f"{ADAPTER}{name}" for name in phases if name in adapted]
        components = map(self.components.of, (*phases, *projectors, *adapters))
        return not all(component.freeze for component in components)

    @property
    def may_share_rows(self) -> bool:
        """Whether several ranks may hold a row together."""
        return self.balance.mode == "phases"

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate has fallen to its final scale."""
        steps = self.optimizer.decay_steps
        return self.run.steps if steps == "auto" else steps

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices along each mesh axis.

        With a pipeline, stages come first: neighbours on the other axes then share a node.
        """
        stages = {"stage": self.pipeline.stages} if self.pipeline.stages > 1 else {}
        return stages | self.mesh.model_dump()
