"""Layouts whose layers are cut into pipeline stages: their time in closed form, and their steps
planned whole.

a step on the devices of one stage --in_stages--> each stage does its share of layers, and waits
samples --rows, cut, schedule--> a run's own plan --simulate--> PlannedLayout
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxmllm.balance.records import PlanSpec
from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.balance.stages.plan import plan_pipeline
from jaxmllm.balance.stages.sizes import PipelineSizes
from jaxmllm.cluster.device_peak import programs_peak
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.cluster.network import Network
from jaxmllm.cluster.search.chosen_config import with_rows
from jaxmllm.cluster.search.even_step import EvenRows
from jaxmllm.cluster.search.layouts import Estimate, PlannedLayout, Sampled
from jaxmllm.cluster.search.row_choice import equal_parts, first_examples
from jaxmllm.cluster.sends import Send
from jaxmllm.cluster.simulate import EXCHANGE, simulate
from jaxmllm.cluster.stage_seconds import PERMUTE, STAGE, once_seconds, seconds_besides
from jaxmllm.config.schema import Config, PhaseConfig
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.build import staged_programs
from jaxmllm.setup.sizing import remat_of, resolved_shapes, stage_sizes

WAYS = 2  # passes of a microbatch through the stages: activations, and gradients back


def in_stages(
    parts: Mapping[str, float],
    rows: Mapping[str, EvenRows],
    config: Config,
    model: MLLM,
    device: Device,
) -> dict[str, float]:
    """Seconds of a step by part, named as in `StepTime`, if all stages have equal work and one wave
    of microbatches passes them.

    Args:
      parts: seconds of the same step without stages, on the devices of one stage.
      model: on the mesh with stages.
    """
    stages = config.pipeline.stages
    shares = {name: seconds / stages for name, seconds in parts.items() if name != EXCHANGE}
    # Parts with a slash are those of phases: `<phase>/compute` and the like.
    of_layers = sum(seconds for name, seconds in shares.items() if "/" in name)
    bubble = of_layers * (stages - 1) / rows[LANGUAGE].microbatches
    network = Network(model.layout(LANGUAGE).mesh, device)
    ticks = {phase: WAYS * (of_phase.microbatches + stages - 1) for phase, of_phase in rows.items()}
    edges = [
        _edge_send(model, phase, of_phase.capacity, stages, ticks[phase])
        for phase, of_phase in rows.items()
    ]
    once = once_seconds(model, config.run.param_dtype, model.trainable.components, stages, network)
    return shares | {
        "replicas": once,
        "bubble": bubble,
        "sends": network.seconds(edges),
        "ticks": ticks[LANGUAGE] * seconds_besides(config.pipeline, model, device),
    }


def _edge_send(model: MLLM, phase: str, capacity: int, stages: int, ticks: int) -> Send:
    """The send of a phase over one edge, in `ticks` ticks: rows of the width that layers carry."""
    slots = capacity / model.layout(phase).parts
    shapes = getattr(model.config, phase)
    slots /= shapes.stem_stride
    width = shapes.width + model.config.carried_beside(phase)
    row = slots * width * model.components[phase].dtype.itemsize
    return Send(PERMUTE, (STAGE,), stages, row, ticks)


def planned_in_stages(
    estimate: Estimate,
    sampled: Sampled,
    inputs: Sequence[SizingInputs],
    device: Device,
    as_run: bool,
    known_rows: dict[str, PlanSpec],
) -> PlannedLayout:
    """Choose sizes for a layout with stages, and plan and simulate its steps.

    Args:
      as_run: see `Request`.
      known_rows: rows of other layouts, by the key `_rows_key`; those of this layout are added.

    Raises:
      ConfigError: an example that no run holds, or slots that no schedule fits.
      PipelineError: the layers cannot be cut into so many stages.
    """
    config = estimate.config
    model = estimate.model
    memory = device.cluster.budget
    if as_run:
        sizes = stage_sizes(config, model, sampled.samples, inputs, sampled.largest, memory)
    else:
        config, sizes = _searched_sizes(config, model, sampled, inputs, memory, known_rows)
    plans = tuple(plan_pipeline(items, sizes.spec, sizes.training) for items in sampled.steps)
    programs = staged_programs(config, model, sampled.formats, sizes, sampled.sources)
    times = tuple(
        simulate(programs, plan, items, device)
        for plan, items in zip(plans, sampled.steps, strict=True)
    )
    return PlannedLayout(
        choice=estimate.choice,
        config=config,
        spec=sizes.spec,
        programs=programs,
        plans=plans,
        times=times,
        peak=programs_peak(programs),
        even_seconds=estimate.seconds,
    )


def _searched_sizes(
    config: Config,
    model: MLLM,
    sampled: Sampled,
    inputs: Sequence[SizingInputs],
    memory: float,
    known_rows: dict[str, PlanSpec],
) -> tuple[Config, PipelineSizes]:
    """The config with one row class per phase where it leaves that open, and the sizes that a run
    with these rows finds by trial.

    Both come from one of the equal parts of a large batch. Layouts that differ in memory alone
    share their rows, because the trials for rows take most of the time.
    """
    share = equal_parts(inputs, sampled.samples)
    part_inputs = [
        replace(sizing, ranks=sizing.ranks // share, config=_with_one_class(sizing.config))
        for sizing in inputs
    ]
    data = config.data.model_copy(update={"batch_size": config.data.batch_size // share})
    of_part = config.model_copy(update={"data": data})
    samples = [first_examples(batch, share) for batch in sampled.samples]

    def sizes_of(inputs: Sequence[SizingInputs]) -> PipelineSizes:
        return stage_sizes(of_part, model, samples, inputs, sampled.largest, memory)

    # The rows may come from a layout with other memory. So slots and schedule are then chosen for
    # this layout's own memory, with the rows given.
    key = _rows_key(of_part, model, sampled, part_inputs)
    if key not in known_rows:
        known_rows[key] = sizes_of(part_inputs).spec
    config = with_rows(config, known_rows[key])
    given_inputs = [
        replace(sizing, config=rows, spans=rows.spans)
        for sizing in part_inputs
        for rows in (getattr(config.phases, sizing.name),)
    ]
    sizes = sizes_of(given_inputs)
    return config, _whole_batch_sizes(sizes, inputs, config.data.batch_size)


def _rows_key(config: Config, model: MLLM, sampled: Sampled, inputs: Sequence[SizingInputs]) -> str:
    """A key of everything that decides rows in stages, except memory."""
    of_phases = [
        (
            sizing.name,
            sizing.ranks,
            sizing.alignment,
            sizing.longest,
            sizing.largest_capacity,
            sizing.spans,
            sizing.gather_cost,
            sizing.config,
        )
        for sizing in inputs
    ]
    shapes = resolved_shapes(config, model)
    remat = remat_of(config, model)
    batch = id(sampled), config.data.batch_size
    return repr((batch, of_phases, config.pipeline, shapes, remat))


def _with_one_class(config: PhaseConfig) -> PhaseConfig:
    """The phase with one row class, where the config leaves that open: each further class takes as
    many trials again, and more code in the programs."""
    return config.model_copy(update={"row_classes": 1}) if config.row_classes == "auto" else config


def _whole_batch_sizes(
    sizes: PipelineSizes, inputs: Sequence[SizingInputs], examples: int
) -> PipelineSizes:
    """Sizes for the whole batch of `examples` examples, from those for one of its equal parts."""
    phases = {
        sizing.name: replace(sizes.spec.phases[sizing.name], ranks=sizing.ranks)
        for sizing in inputs
    }
    return PipelineSizes(
        replace(sizes.spec, phases=phases),
        replace(sizes.training, examples=examples),
        replace(sizes.evaluation, examples=examples),
    )
