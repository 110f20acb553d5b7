"""A run that is ready to train, from its config.

prepare   data and model, nothing compiled yet                                   prepare.py
sizes     lengths of sampled batches -> row capacities, pools -> PlanSpec        sizing.py
programs  components on the mesh -> compiled programs
batches   MapDatasets whose element k is this host's share of step k
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path

import jax

from jaxmllm.balance.costs.flops import head_flops
from jaxmllm.balance.records import ExchangeGrid, PhaseSpec, PlanSpec, RouteSpec
from jaxmllm.balance.stages.plan import PipelineSpec
from jaxmllm.balance.stages.sizes import PipelineSizes
from jaxmllm.config.schema import Config
from jaxmllm.config.without_effect import keys_without_effect
from jaxmllm.data.batches import evaluation_steps, steps
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.rows.draws import DrawRule
from jaxmllm.data.rows.fill import StepFiller
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat
from jaxmllm.runtime import hosts
from jaxmllm.runtime.checkpoint import check_space, state_bytes
from jaxmllm.runtime.compilations import CompilationCounter
from jaxmllm.runtime.hardware import peak_flops
from jaxmllm.setup.prepare import RunInputs, prepare
from jaxmllm.setup.row_memory import check_room_for_pools, kept_residuals
from jaxmllm.setup.row_shapes import attention_spec
from jaxmllm.setup.sizing import pipeline_sizes, plan_spec, resolved_shapes
from jaxmllm.setup.spans import left_alone, node_spans
from jaxmllm.training.averages import first_averages
from jaxmllm.training.optimizer import MOMENTS
from jaxmllm.training.process_messages import WarningLog
from jaxmllm.training.programs.base import Programs
from jaxmllm.training.programs.phased import PhasedPrograms
from jaxmllm.training.programs.staged import StagedPrograms
from jaxmllm.training.run import Run
from jaxmllm.training.step_functions import StepFunctions
from sharding.mesh import make_mesh

_log = logging.getLogger(__name__)
BFLOAT16_ROUNDING = 2.0**-8  # the largest share of a number that rounding to bfloat16 changes
SAME_PLAN = "Give all hosts the same file for balance.calibration, and the same data"


def build_run(config: Config) -> Run:
    """Index the data, choose the sizes, compose the model, compile its programs.

    Raises one of `USER_ERRORS` for a config that cannot be run, `CheckpointError` where no
    checkpoint has room.
    """
    compilations = CompilationCounter()  # first: these two record from here on
    warnings = WarningLog()
    spans = node_spans(config, config.mesh_sizes, jax.local_device_count())
    inputs = prepare(config, make_mesh(config.mesh_sizes, spans=spans))
    _check_room_for_checkpoints(config, inputs.model)
    programs, pipeline = make_programs(config, inputs)
    batch_size = config.data.batch_size
    share = programs.local_share

    def filler(corpus: Corpus, stages: PipelineSpec | None, evaluation: bool = False) -> StepFiller:
        draws = draw_rule(config, evaluation)
        return StepFiller(
            corpus.for_rows(), programs.spec, share, programs.attention, stages, draws=draws
        )

    batches = steps(
        filler(inputs.corpus, pipeline.training if pipeline else None), batch_size, config.run.seed
    )
    evaluation = None
    if inputs.held_out is not None:
        evaluation = evaluation_steps(
            filler(inputs.held_out, pipeline.evaluation if pipeline else None, evaluation=True),
            batch_size,
            config.evaluation.examples,
        )
    return Run(
        config=config,
        programs=programs,
        corpus=inputs.corpus,
        batches=batches,
        evaluation=evaluation,
        sources=inputs.corpus.sources,
        head_flops=head_flops(
            resolved_shapes(config, inputs.model),
            inputs.model.trainable.shares,
            learns_text=programs.functions.learns_text,
        ),
        peak_flops=_peak_flops(config),
        compilations=compilations,
        warnings=warnings,
        held_out=inputs.held_out,
        left_alone=left_alone(config, inputs.model, inputs.spans),
    )


def draw_rule(config: Config, evaluation: bool = False) -> DrawRule | None:
    """The rule for all that is random in items to draw; none where the model draws nothing."""
    if not config.model.generators:
        return None
    return DrawRule(config.run.seed, config.objective.diffusion, evaluation)


def make_programs(config: Config, inputs: RunInputs) -> tuple[Programs, PipelineSizes | None]:
    """Choose the sizes and compile the programs. With a pipeline also return the sizes that its
    steps are planned with. Raises `ConfigError` where the pools do not fit a device."""
    programs, sizes = plan_programs(config, inputs)
    if isinstance(programs, PhasedPrograms):
        pools = {LANGUAGE, *programs.exchange_owner.values()}
        check_room_for_pools(
            config, inputs.model, {phase: programs.pools[phase] for phase in sorted(pools)}
        )
    if jax.process_index() == 0:  # all processes would say the same
        _warn_of_slow_attention(programs)
        _warn_without_effect(config)
        _warn_of_late_warm_up(config)
        _warn_of_rounded_moments(config)
    return programs.compile(), sizes


def plan_programs(config: Config, inputs: RunInputs) -> tuple[Programs, PipelineSizes | None]:
    """`make_programs` without compiling: the devices may be of a machine that is not there."""
    model = inputs.model
    formats = inputs.corpus.formats
    sources = len(inputs.corpus.sources)
    if config.pipeline.stages == 1:
        spec = plan_spec(config, inputs)
        programs = phased_programs(config, model, formats, spec, sources)
        # Hosts that differ would compile different programs, and hang in the first collective. How
        # much is kept follows from memory, which each host measures for itself.
        residual_facts = {
            f"{phase}.kept_residuals": str(n) for phase, n in programs.kept_residuals.items()
        }
        hosts.compare("plan", lambda: plan_facts(spec) | residual_facts, SAME_PLAN)
        return programs, None
    sizes = pipeline_sizes(config, inputs)

    def facts() -> dict[str, str]:
        return plan_facts(sizes.spec) | {"pipeline": hosts.digest_of(sizes)}

    hosts.compare("plan", facts, SAME_PLAN)
    return staged_programs(config, model, formats, sizes, sources), sizes


def phased_programs(
    config: Config,
    model: MLLM,
    formats: Mapping[str, RowFormat],
    spec: PlanSpec,
    sources: int,
) -> PhasedPrograms:
    """The programs of a run without stages, not compiled yet, for the chosen sizes of rows.

    Args:
      formats: by encoder phase.
      sources: number of sources, whose losses are reported one by one.
    """
    functions = step_functions(config, model, sources)
    attention = attention_spec(config, model, formats, spec)
    largest = {phase: max(of_phase.capacities) for phase, of_phase in spec.phases.items()}
    kept_microbatches = kept_residuals(config, model, largest)
    return PhasedPrograms(
        functions, spec, formats, attention, config.run.param_dtype, kept_microbatches
    )


def staged_programs(
    config: Config,
    model: MLLM,
    formats: Mapping[str, RowFormat],
    sizes: PipelineSizes,
    sources: int,
) -> StagedPrograms:
    """The programs of a run with stages, not compiled yet, for the chosen rows and slots."""
    functions = step_functions(config, model, sources)
    attention = attention_spec(config, model, formats, sizes.spec)
    return StagedPrograms(functions, sizes, formats, attention, config.run.param_dtype)


def step_functions(config: Config, model: MLLM, sources: int) -> StepFunctions:
    """The functions of a step, which programs are made of.

    Args:
      sources: number of sources, whose losses are reported one by one.
    """
    return StepFunctions(model, config.optimizer, config.decay_steps, sources, config.objective)


def _warn_of_slow_attention(programs: Programs) -> None:
    """Warn of the phases whose attention cannot use the kernel of their platform."""
    for phase in programs.spec.phases:
        needs = programs.functions.model.attention_choice(
            phase, programs.attention.blocks[phase]
        ).needs
        if needs:
            _log.warning(
                "attention of %s is the loop for every platform, which is slow here: the gpu kernel needs %s; "
                "change that, or set components.%s.attention: jax if it is meant",
                phase,
                needs,
                phase,
            )


def _warn_without_effect(config: Config) -> None:
    """Warn of keys that look as if they did something and do not, such as `pipeline.microbatches`
    without stages."""
    for reason, keys in keys_without_effect(config).items():
        _log.warning("%s: %s, so this changes nothing; leave it out", ", ".join(keys), reason)


def _warn_of_late_warm_up(config: Config) -> None:
    """Warn where the learning rate falls in one step instead of along a cosine."""
    warmup = config.optimizer.warmup_steps
    if config.optimizer.schedule == "cosine" and config.decay_steps <= warmup < config.run.steps:
        _log.warning(
            "optimizer.warmup_steps (%d) lasts until the end of the decay (optimizer.decay_steps: %d), so the learning "
            "rate falls from its peak to the last one in one step; choose fewer steps to warm up, or more to decay",
            warmup,
            config.decay_steps,
        )


def _warn_of_rounded_moments(config: Config) -> None:
    """Warn where the optimizer's mean of squared gradients can hardly fall, because it has the
    dtype of the parameters."""
    beta2 = config.optimizer.beta2
    if config.run.param_dtype == "bfloat16" and 1 - beta2 < BFLOAT16_ROUNDING:
        _log.warning(
            "optimizer.beta2 (%g) with run.param_dtype bfloat16: the mean of squared gradients is bfloat16, too, where "
            "falling by %.2g of itself is rounded away, so that steps get smaller than they should; set beta2 to 0.99 "
            "or less, or param_dtype to float32",
            beta2,
            1 - beta2,
        )


def plan_facts(spec: PlanSpec) -> dict[str, str]:
    """Facts that must be the same on all hosts for them to make the same plans."""
    records: dict[str, PhaseSpec | RouteSpec] = {**spec.phases}
    records |= {f"route {name}": route for name, route in spec.routes.items()}
    facts = {
        f"{name}.{field.name}": _told(getattr(record, field.name))
        for name, record in records.items()
        for field in fields(record)
    }
    return facts | {f"nodes of {name}": str(ranks.tolist()) for name, ranks in spec.nodes.items()}


def _told(value: object) -> str:
    """A value as hosts compare it: a grid, which has an entry for each rank, as a digest."""
    return hosts.digest_of(value) if isinstance(value, ExchangeGrid) else repr(value)


def _check_room_for_checkpoints(config: Config, model: MLLM) -> None:
    """Raise `CheckpointError` where the disk of the run folder has no room for a checkpoint: now,
    and not after minutes of compiling."""
    params = model.abstract(config.run.param_dtype)
    trained, _ = model.trainable.split(params)
    averages = jax.eval_shape(partial(first_averages, ema=model.ema), trained)
    check_space(Path(config.run.directory), state_bytes((params, [trained] * MOMENTS, averages)))


def _peak_flops(config: Config) -> float | None:
    """Peak FLOP/s of one device; None where they are not known."""
    if config.logging.peak_flops == "auto":
        return peak_flops(jax.local_devices()[0], config.components.language.compute_dtype)
    return config.logging.peak_flops
