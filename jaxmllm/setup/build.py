"""From the config to a run that is ready to train: the only code below the entry that reads the whole config.

data      sources -> length indexes -> Corpus, without the examples that no row can hold
plan      lengths of a few batches -> row capacities and pool sizes -> PlanSpec
model     components on the mesh -> compiled programs
batches   MapDatasets whose element k is this host's share of step k
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import jax

from jaxmllm.balance.records import PhaseSpec, PlanSpec, RouteSpec
from jaxmllm.balance.stages.sizes import PipelineSizes
from jaxmllm.config.schema import Config
from jaxmllm.data.batches import evaluation_steps, steps
from jaxmllm.data.rows.fill import LocalRanks, StepFiller
from jaxmllm.runtime import hosts
from jaxmllm.runtime.checkpoint import check_space, state_bytes
from jaxmllm.runtime.hardware import peak_flops
from jaxmllm.runtime.metrics import CompilationCounter
from jaxmllm.setup.prepare import Groundwork, lay_groundwork
from jaxmllm.setup.sizing import attention_spec, pipeline_sizes, plan_spec
from jaxmllm.training.messages import WarningLog
from jaxmllm.training.optimizer import MOMENTS
from jaxmllm.training.programs.base import Programs
from jaxmllm.training.programs.phased import PhasedPrograms
from jaxmllm.training.programs.staged import StagedPrograms
from jaxmllm.training.programs.transfer import local_ranks
from jaxmllm.training.run import Run
from jaxmllm.training.step_functions import StepFunctions
from sharding.mesh import make_mesh

SAME_PLAN = "Give all hosts the same file for balance.calibration, and the same data"


def build_run(config: Config) -> Run:
    """Index the data, choose the sizes, compose the model, compile its programs.

    Raises one of `USER_ERRORS` for a config that cannot be run, `CheckpointError` where no checkpoint has room.
    """
    compilations, warnings = CompilationCounter(), WarningLog()
    ground = lay_groundwork(config, make_mesh(config.mesh_sizes))
    corpus, held_out = ground.corpus, ground.held_out
    params = ground.model.abstract(config.run.param_dtype)
    trained, _ = ground.model.trainable.split(params)
    moments = [trained] * MOMENTS
    check_space(Path(config.run.directory), state_bytes((params, moments)))
    programs, pipeline = make_programs(config, ground)
    spec, ranks, attention = programs.spec, local_share(programs), programs.attention
    training, evaluating = (pipeline.training, pipeline.evaluation) if pipeline else (None, None)
    batches = steps(StepFiller(corpus, spec, ranks, attention, training), config.data.batch_size, config.run.seed)
    evaluation = None
    if held_out:
        filler = StepFiller(held_out[0], spec, ranks, attention, evaluating)
        evaluation = evaluation_steps(filler, config.data.batch_size, config.evaluation.examples)
    peak: float | None
    if config.logging.peak_flops == "auto":
        peak = peak_flops(jax.local_devices()[0], config.components.language.compute_dtype)
    else:
        peak = config.logging.peak_flops
    return Run(
        config,
        programs,
        corpus,
        batches,
        evaluation,
        corpus.sources,
        peak,
        compilations,
        warnings,
        held_out[0] if held_out else None,
    )


def plan_facts(spec: PlanSpec) -> dict[str, str]:
    """What must be equal on all hosts for them to plan alike."""
    records: dict[str, PhaseSpec | RouteSpec] = {**spec.phases}
    records |= {f"route {name}": route for name, route in spec.routes.items()}
    facts = {
        f"{name}.{field.name}": repr(getattr(record, field.name))
        for name, record in records.items()
        for field in fields(record)
    }
    return facts | {f"nodes of {name}": str(ranks.tolist()) for name, ranks in spec.nodes.items()}


def make_programs(config: Config, ground: Groundwork) -> tuple[Programs, PipelineSizes | None]:
    """Choose the sizes and compile the programs; with a pipeline also how its steps are planned."""
    model, corpora = ground.model, [ground.corpus, *ground.held_out]
    functions = StepFunctions(model, config.optimizer, config.decay_steps, len(ground.corpus.sources))
    formats = ground.corpus.formats
    param_dtype = config.run.param_dtype
    if config.pipeline.stages == 1:
        spec = plan_spec(config, model, ground.samples, corpora)
        hosts.compare("plan", lambda: plan_facts(spec), SAME_PLAN)
        attention = attention_spec(config, model, formats, spec)
        return PhasedPrograms(functions, spec, formats, attention, param_dtype), None
    sizes = pipeline_sizes(config, model, ground.samples, corpora)
    hosts.compare("plan", lambda: plan_facts(sizes.spec) | {"pipeline": hosts.digest_of(sizes)}, SAME_PLAN)
    attention = attention_spec(config, model, formats, sizes.spec)
    return StagedPrograms(functions, sizes, formats, attention, param_dtype), sizes


def local_share(programs: Programs) -> LocalRanks:
    """The ranks of every phase and exchange that this host supplies."""
    return LocalRanks(
        phases={phase: local_ranks(layout.rows, layout.ranks) for phase, layout in programs.layouts.items()},
        exchange={
            phase: local_ranks(exchange.tables, math.prod(programs.spec.routes[phase].grid.shape))
            for phase, exchange in programs.exchanges.items()
        },
    )
