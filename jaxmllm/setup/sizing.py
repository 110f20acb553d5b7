"""What `auto` means: from the config, the model and sampled batches to the fixed sizes of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmllm.arrays import Ints
from jaxmllm.attention.parts import SMALLER_BLOCK, block_size
from jaxmllm.balance.costs.calibration import load_calibration
from jaxmllm.balance.costs.flops import ItemCost, PhaseTime, phase_flops
from jaxmllm.balance.exchange.tables import BACKENDS, backend_for
from jaxmllm.balance.records import BatchItems, ExchangeGrid, PhaseSpec, PlanSpec
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.balance.stages.sizes import PipelineSizes, choose_pipeline
from jaxmllm.config.schema import Config, ConfigError, ModelConfig, PhaseConfig
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat
from sharding.exchange import LayoutPair
from sharding.rules import rank_nodes

LARGEST = 64  # examples of most images or sound, which a pipeline must have room for
LENGTHS_AT_ONCE = 1 << 16  # examples whose slots are summed at one time
_log = logging.getLogger(__name__)


def plan_spec(config: Config, model: MLLM, samples: Sequence[BatchItems], corpora: Sequence[Corpus]) -> PlanSpec:
    """Ranks, row classes, pools and costs of every phase."""
    needs = _needs(config, model, corpora)
    nodes, backend = rank_places(config, model), exchange_backend(config, model)
    return choose_sizes(samples, needs, exchange_grids(model), config.balance, nodes, backend)


def pipeline_sizes(
    config: Config, model: MLLM, samples: Sequence[BatchItems], corpora: Sequence[Corpus]
) -> PipelineSizes:
    """Rows, stages and slots of a pipeline."""
    needs = _needs(config, model, corpora)
    shapes = resolved_shapes(config, model)
    largest = [largest_examples(corpus, phase) for corpus in corpora for phase in config.model.encoders]
    return choose_pipeline(
        samples, needs, config.pipeline, shapes, model.trainable.components, config.data.batch_size, largest
    )


def largest_examples(corpus: Corpus, phase: str) -> BatchItems:
    """Lengths of the examples that have most slots of a phase."""
    slots = np.zeros(len(corpus), np.int64)
    for first in range(0, len(corpus), LENGTHS_AT_ONCE):
        numbers = np.arange(first, min(first + LENGTHS_AT_ONCE, len(corpus)))
        items = corpus.gather(numbers).phases[phase]
        np.add.at(slots, first + items.example, items.length)
    return corpus.gather(np.sort(np.argsort(-slots, kind="stable")[:LARGEST]))


def attention_spec(config: Config, model: MLLM, formats: Mapping[str, RowFormat], spec: PlanSpec) -> AttentionSpec:
    """Attention blocks and parts of every phase's rows."""
    parts = {phase: model.layout(phase).parts for phase in spec.phases}
    return AttentionSpec(
        blocks={name: attention_block(config, rows, formats, parts[name]) for name, rows in spec.phases.items()},
        parts=parts,
        bidirectional=config.model.language.bidirectional,
        windows=config.model.windows,
    )


def attention_block(config: Config, rows: PhaseSpec, formats: Mapping[str, RowFormat], parts: int) -> int:
    """`phases.<phase>.block`, or 64 where some part of a row, or some rank's share of a long one, would have so few
    blocks that their work could not be dealt out evenly."""
    block: int = getattr(config.phases, rows.name).block
    stride = whole = 1
    if rows.name in formats:
        stride, whole = formats[rows.name].stride, formats[rows.name].alignment
    if block % SMALLER_BLOCK or SMALLER_BLOCK * stride % whole:
        return block
    shared = [(capacity, parts) for capacity in rows.capacities]
    if rows.long_capacity:
        shared.append((rows.long_capacity, parts * rows.ranks))
    return min((block_size(slots // stride, by, block) for slots, by in shared if by > 1), default=block)


def alignment(config: Config, phase: str, formats: Mapping[str, RowFormat], parts: int) -> int:
    """What row capacities of a phase are multiples of: whole attention blocks and whole language tokens, equally many
    in each part of a row."""
    block: int = getattr(config.phases, phase).block
    if phase not in formats:  # text: a slot is a token
        return block * parts
    slots, whole = block * formats[phase].stride, formats[phase].alignment
    if parts > 1 and slots % whole:
        raise ConfigError(
            f"phases.{phase}.block: rows are split into {parts} parts by blocks of {slots} slots, which must be a "
            f"multiple of {whole}, what the {phase} tower takes as a whole; raise it to "
            f"{math.lcm(slots, whole) // formats[phase].stride}"
        )
    return math.lcm(slots, whole) * parts


def largest_row(config: Config, phase: str, formats: Mapping[str, RowFormat], parts: int) -> int:
    """Slots of the largest row that a phase may have; longer items are refused."""
    settings: PhaseConfig = getattr(config.phases, phase)
    if settings.long_capacity is not None:
        return settings.long_capacity
    if settings.capacities == "auto":
        unit = alignment(config, phase, formats, parts)
        return settings.max_capacity // unit * unit
    return max(settings.capacities)


def _needs(config: Config, model: MLLM, corpora: Sequence[Corpus]) -> list[SizingInputs]:
    longest = {phase: max(corpus.longest(phase) for corpus in corpora) for phase in model.phases}
    return sizing_inputs(config, model, corpora[0].formats, longest)


def sizing_inputs(
    config: Config, model: MLLM, formats: Mapping[str, RowFormat], longest: Mapping[str, int]
) -> list[SizingInputs]:
    """What decides the rows of every phase beside the samples; `longest` is the largest item of each, in slots."""
    flops = model_flops(config, model)
    times = measured_times(config, model, flops)
    return [
        SizingInputs(
            phase=phase,
            ranks=model.layout(name).ranks,
            alignment=alignment(config, name, formats, model.layout(name).parts),
            slots_per_token=formats[name].slots_per_token if name in formats else 1,
            longest=longest[name],
            flops=flops[name],
            config=getattr(config.phases, name),
            time=times.get(name),
        )
        for name, phase in model.phases.items()
    ]


def rank_places(config: Config, model: MLLM) -> dict[str, Ints]:
    """Node of each rank, by phase."""
    per_node = config.balance.ranks_per_node
    return {phase: rank_nodes(model.layout(phase), None if per_node == "auto" else per_node) for phase in model.phases}


def check_exchange(config: Config) -> None:
    """Raise `ConfigError` for an exchange that is not there: the schema does not know the table of backends."""
    known = ("auto", *BACKENDS)
    if config.balance.exchange not in known:
        raise ConfigError(f"balance.exchange: must be one of {', '.join(known)} (got {config.balance.exchange!r})")


def exchange_backend(config: Config, model: MLLM) -> str:
    """The config's backend of the exchange; `auto` is the first of the table that the devices' platform can run."""
    check_exchange(config)
    if config.balance.exchange != "auto":
        return config.balance.exchange
    mesh = model.layout(LANGUAGE).mesh
    return backend_for(mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend())


def exchange_grids(model: MLLM) -> dict[str, ExchangeGrid]:
    """How the ranks of each encoder phase lie on those of the language phase."""
    language = model.layout(LANGUAGE)
    return {
        phase: ExchangeGrid(*LayoutPair(language.mesh, model.layout(phase), language).grid())
        for phase in model.config.encoders
    }


def resolved_shapes(config: Config, model: MLLM) -> ModelConfig:
    """The model's shapes with the size of its vocabulary."""
    language = config.model.language.model_copy(update={"vocab_size": model.vocab_size})
    return config.model.model_copy(update={"language": language})


def model_flops(config: Config, model: MLLM) -> dict[str, ItemCost]:
    """FLOPs of an item, by phase."""
    shapes = resolved_shapes(config, model)
    return {phase: phase_flops(shapes, phase, model.trainable.components) for phase in model.phases}


def measured_times(config: Config, model: MLLM, flops: Mapping[str, ItemCost]) -> dict[str, PhaseTime]:
    """Times of an item by phase, from `balance.calibration`; empty without one."""
    path = config.balance.calibration
    if path is None:
        return {}
    calibration = load_calibration(path, flops)
    mesh = model.layout(LANGUAGE).mesh
    device = mesh.devices.flat[0].device_kind if isinstance(mesh, Mesh) else None
    for difference in calibration.differences(device, flops):
        _log.warning("balance.calibration: %s %s; calibrate anew for the best balance", path, difference)
    return {phase: calibration.phases[phase].training.time for phase in flops}
