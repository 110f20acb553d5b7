"""Layouts whose layers are cut into pipeline stages: their time in closed form, and their steps planned whole.

a step on the devices of one stage --in_stages--> every stage does its share of the layers, and waits
samples --rows, cut, schedule--> a run's own plan --simulate--> PlannedLayout
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.balance.stages.plan import plan_pipeline
from jaxmllm.cluster.device_peak import programs_peak
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.cluster.network import Network
from jaxmllm.cluster.search.chosen_config import with_rows
from jaxmllm.cluster.search.even_step import EvenRows
from jaxmllm.cluster.search.layouts import Estimate, PlannedLayout, Sampled
from jaxmllm.cluster.sends import Send
from jaxmllm.cluster.simulate import EXCHANGE, simulate
from jaxmllm.cluster.stage_seconds import PERMUTE, STAGE
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.build import staged_programs
from jaxmllm.setup.sizing import stage_sizes

WAYS = 2  # over an edge: activations, and their gradients back


def in_stages(
    parts: Mapping[str, float],
    rows: Mapping[str, EvenRows],
    stages: int,
    model: MLLM,
    device: Device,
) -> dict[str, float]:
    """Seconds of a step by part, named as in `StepTime`, if all stages have equal work and one wave of microbatches
    passes them.

    Args:
      parts: of the same step without stages on the devices of one.
      model: on the mesh with stages.
    """
    shares = {name: seconds / stages for name, seconds in parts.items() if name != EXCHANGE}
    of_layers = sum(seconds for name, seconds in shares.items() if "/" in name)
    bubble = of_layers * (stages - 1) / rows[LANGUAGE].microbatches
    network = Network(model.layout(LANGUAGE).mesh, device)
    edges = [
        _edge(model, phase, of_phase.capacity, stages, of_phase.microbatches + stages - 1)
        for phase, of_phase in rows.items()
    ]
    return shares | {"bubble": bubble, "sends": network.seconds(edges)}


def _edge(model: MLLM, phase: str, capacity: int, stages: int, ticks: int) -> Send:
    """What one edge moves of a phase: rows of the width of its layers, in as many ticks each way."""
    slots = capacity / model.layout(phase).parts
    slots /= getattr(getattr(model.config, phase), "stem_stride", 1)
    row = slots * model.config.carried_width(phase) * model.components[phase].dtype.itemsize
    return Send(PERMUTE, (STAGE,), stages, row, WAYS * ticks)


def planned_in_stages(
    estimate: Estimate,
    sampled: Sampled,
    inputs: Sequence[SizingInputs],
    device: Device,
    as_run: bool,
) -> PlannedLayout:
    """Sizes for a layout with stages, and its steps planned and simulated.

    Raises:
      ConfigError: an example that no run holds, or slots that no schedule fits.
      PipelineError: the layers cannot be cut so.
    """
    config, model = estimate.config, estimate.model
    memory = device.cluster.budget
    sizes = stage_sizes(config, model, sampled.samples, inputs, sampled.largest, memory)
    if not as_run:
        # What a run finds by trial where these rows are given
        config = with_rows(config, sizes.spec)
        inputs = [replace(one, config=getattr(config.phases, one.name)) for one in inputs]
        sizes = stage_sizes(config, model, sampled.samples, inputs, sampled.largest, memory)
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
