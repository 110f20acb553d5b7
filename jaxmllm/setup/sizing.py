"""What `auto` means: from the config, the model and sampled batches to the fixed sizes of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from jax.sharding import Mesh

from jaxmllm.arrays import sums_by
from jaxmllm.balance.costs.calibration import load_calibration
from jaxmllm.balance.costs.flops import ItemCost, PhaseTime, phase_flops
from jaxmllm.balance.costs.gather import flops_per_byte, gather_cost
from jaxmllm.balance.costs.microbatch import microbatch_cost
from jaxmllm.balance.records import BatchItems, PlanSpec
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.balance.stages.sizes import PipelineSizes, choose_pipeline
from jaxmllm.config.schema import Config, ConfigError, ModelConfig, Remat
from jaxmllm.data.corpus import Corpus
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat
from jaxmllm.setup.exchange_layout import exchange_backend, exchange_grids, nodes_of_ranks
from jaxmllm.setup.prepare import RunInputs
from jaxmllm.setup.row_memory import kept_forwards, slots_that_fit
from jaxmllm.setup.row_shapes import alignment
from jaxmllm.setup.spans import Spans
from sharding.mesh import axis_sizes, platform_of, whole_axis
from sharding.rules import APART

LARGEST_EXAMPLES = 64  # for each figure of `largest_examples`; each must fit a pipeline by itself
LENGTHS_AT_ONCE = 1 << 16  # examples whose slots are summed at one time, to bound memory
_log = logging.getLogger(__name__)


def plan_spec(config: Config, inputs: RunInputs) -> PlanSpec:
    """Ranks, row classes, pools and costs of every phase of a run without a pipeline."""
    model = inputs.model
    return choose_sizes(
        inputs.samples,
        _sizing_inputs_of(config, inputs),
        exchange_grids(model),
        config.balance,
        nodes_of_ranks(config, model),
        exchange_backend(config, model),
        inputs.of_sources,
    )


def pipeline_sizes(config: Config, inputs: RunInputs) -> PipelineSizes:
    """Rows, stages and slots of a run's pipeline. Raises `ConfigError` as `stage_sizes` does."""
    largest = [
        largest_examples(corpus, phase)
        for corpus in inputs.corpora
        for phase in inputs.model.phases
        if phase != LANGUAGE
    ]
    phases = _sizing_inputs_of(config, inputs)
    return stage_sizes(config, inputs.model, inputs.samples, phases, largest)


def stage_sizes(
    config: Config,
    model: MLLM,
    samples: Sequence[BatchItems],
    phases: Sequence[SizingInputs],
    largest: Sequence[BatchItems] = (),
    memory: float | None = None,
) -> PipelineSizes:
    """Rows, stages and slots of a pipeline, from sampled batches.

    Args:
      phases: results of `sizing_inputs`.
      largest: examples each of which must fit a run by itself.
      memory: bytes of a device; none: those of this process's devices.

    Raises:
      ConfigError: rows of components are split over different axes of the mesh, or over axes that
        split layers of others, or for a reason of `choose_pipeline`.
    """
    layouts = {phase: model.layout(phase) for phase in model.phases}
    # Axes of size 1 split nothing, so layouts may differ in them.
    if len({layout.split_axes("batch") for layout in layouts.values()}) > 1:
        axes = {phase: layout.whole_axes("batch") for phase, layout in layouts.items()}
        raise ConfigError(
            f"pipeline.stages ({config.pipeline.stages}): all components need the same ranks, but their rows are "
            f"split over {axes}; leave `batch` out of components.<name>.layout"
        )
    _check_row_parts(model)
    return choose_pipeline(
        samples,
        phases,
        config.pipeline,
        resolved_shapes(config, model),
        model.trainable.shares,
        config.data.batch_size,
        largest,
        remat_of(config, model),
        partial(kept_forwards, config, model, memory=memory),
        learns_text=config.objective.learns_text,
    )


def _check_row_parts(model: MLLM) -> None:
    """Raise `ConfigError` where a mesh axis splits the rows of one component and the layers of
    another: one program runs all of them, and its code is that of one device along the axes of
    rows, where nothing would add up the parts of a layer."""
    layouts = {name: component.layout for name, component in model.components.items()}
    for phase in model.phases:
        row_axes = {whole_axis(axis) for axis in layouts[phase].split_axes("sequence")}
        for name, layout in layouts.items():
            layer_axes = {whole_axis(axis) for axis in layout.split_axes(*APART["sequence"])}
            if shared := sorted(row_axes & layer_axes):
                raise ConfigError(
                    f"components.{phase}.layout.sequence: with pipeline.stages, mesh axes {shared} cannot split rows "
                    f"of {phase} and layers of {name}; leave `sequence` out, or name other axes"
                )


def remat_of(config: Config, model: MLLM) -> dict[str, Remat]:
    """What the backward pass of each phase's tower or decoder computes again."""
    return {phase: getattr(config.components, phase).remat for phase in model.phases}


def largest_examples(corpus: Corpus, phase: str) -> BatchItems:
    """Lengths of the examples that may need most rows of a phase. Which do depends on the rows, so
    these are the examples with most slots, with most items, and with most items longer than half
    the longest, no two of which fit the smallest row that holds the longest."""
    figures = np.zeros((3, len(corpus)), np.int64)
    longest = corpus.longest(phase)
    for start in range(0, len(corpus), LENGTHS_AT_ONCE):
        examples = np.arange(start, min(start + LENGTHS_AT_ONCE, len(corpus)))
        items = corpus.gather(examples).phases[phase]
        length = items.length
        amounts = (length, np.ones_like(length), (2 * length > longest).astype(np.int64))
        for figure, of_items in zip(figures, amounts, strict=True):
            figure[examples] = sums_by(items.example, of_items, len(examples))
    # Stable, so that all hosts choose the same among equals.
    largest = np.argsort(-figures, axis=1, kind="stable")[:, :LARGEST_EXAMPLES]
    return corpus.gather(np.unique(largest))


def _sizing_inputs_of(config: Config, inputs: RunInputs) -> list[SizingInputs]:
    longest = {
        phase: max(corpus.longest(phase) for corpus in inputs.corpora)
        for phase in inputs.model.phases
    }
    return sizing_inputs(config, inputs.model, inputs.corpus.formats, longest, inputs.spans)


def sizing_inputs(
    config: Config,
    model: MLLM,
    formats: Mapping[str, RowFormat],
    longest: Mapping[str, int],
    spans: Spans,
) -> list[SizingInputs]:
    """Everything that decides the rows of every phase, except for the sampled lengths.

    Args:
      formats: by encoder phase.
      longest: by phase, slots of the largest item.
      spans: how many ranks may hold a row together.
    """
    flops = model_flops(config, model)
    times = measured_times(config, model, flops)
    shapes = resolved_shapes(config, model)
    platform = platform_of(model.layout(LANGUAGE).mesh)
    configured = config.balance.flops_per_gathered_byte
    per_byte = flops_per_byte(platform) if configured == "auto" else configured
    inputs = []
    for name, phase in model.phases.items():
        layout = model.layout(name)
        inputs.append(
            SizingInputs(
                phase=phase,
                ranks=layout.ranks,
                alignment=alignment(config, name, formats, layout.parts),
                slots_per_token=formats[name].slots_per_token if name in formats else 1,
                longest=longest[name],
                flops=flops[name],
                config=getattr(config.phases, name),
                time=times.get(name),
                gather_cost=gather_cost(shapes, name, per_byte),
                microbatch_cost=microbatch_cost(
                    shapes, name, platform, flops[name].linear, layout.size("embed")
                ),
                fitting=slots_that_fit(config, model, name),
                spans=spans[name] if config.may_share_rows else (1,),
            )
        )
    return inputs


# ---------------------------------------------------------------------------- costs


def resolved_shapes(config: Config, model: MLLM) -> ModelConfig:
    """The model's shapes with the size of its vocabulary."""
    language = config.model.language.model_copy(update={"vocab_size": model.vocab_size})
    return config.model.model_copy(update={"language": language})


def model_flops(config: Config, model: MLLM) -> dict[str, ItemCost]:
    """FLOPs of an item, by phase."""
    shapes = resolved_shapes(config, model)
    trained = model.trainable.shares
    learns_text = config.objective.learns_text
    return {phase: phase_flops(shapes, phase, trained, learns_text) for phase in model.phases}


def measured_times(
    config: Config, model: MLLM, flops: Mapping[str, ItemCost]
) -> dict[str, PhaseTime]:
    """Times of an item by phase, from `balance.calibration`; empty without one."""
    path = config.balance.calibration
    if path is None:
        return {}
    calibration = load_calibration(path, flops)
    mesh = model.layout(LANGUAGE).mesh
    # Commands that plan on an abstract mesh have no device that could differ from the measured one.
    device = mesh.devices.flat[0].device_kind if isinstance(mesh, Mesh) else None
    dtypes = {phase: getattr(config.components, phase).compute_dtype for phase in flops}
    for difference in calibration.differences(device, flops, dtypes, axis_sizes(mesh)):
        _log.warning(
            "balance.calibration: %s %s; calibrate anew for the best balance", path, difference
        )
    return {phase: calibration.phases[phase].time for phase in flops}
