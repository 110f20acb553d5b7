"""From the config to a run that is ready to train: the only code below the entry that reads the whole config.

data      sources -> length indexes -> Corpus, without the examples that no row can hold
plan      lengths of a few batches -> row capacities and pool sizes -> PlanSpec
model     components on the mesh -> compiled programs
batches   MapDatasets whose element k is this host's share of step k
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import grain
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxmllm.attention.parts import SMALLER_BLOCK, block_size
from jaxmllm.balance.costs.calibration import load_calibration
from jaxmllm.balance.costs.flops import PhaseTime, phase_flops
from jaxmllm.balance.records import Backend, BatchItems, ExchangeGrid, Ints, PhaseFlops, PhaseSpec, PlanSpec, RouteSpec
from jaxmllm.balance.sizes.choose import PhaseNeeds, choose_sizes
from jaxmllm.balance.stages.sizes import PipelineSizes, choose_pipeline
from jaxmllm.config import Config, ConfigError, ModelConfig, PhaseConfig, SourceConfig
from jaxmllm.data.batches import Steps, evaluation_steps, example_order, sample_batches, steps
from jaxmllm.data.corpus import Corpus, modalities
from jaxmllm.data.index.build import DataError
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.rows.fill import LocalRanks, MisalignmentError, StepFiller
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.data.text.tokenizers import Tokenizer, TokenizerError, load_tokenizer
from jaxmllm.models.mllm import MLLM, build_model
from jaxmllm.runtime import hosts
from jaxmllm.runtime.checkpoint import check_space, state_bytes
from jaxmllm.runtime.hardware import peak_flops
from jaxmllm.runtime.metrics import CompilationCounter
from jaxmllm.training.messages import WarningLog
from jaxmllm.training.optimizer import MOMENTS
from jaxmllm.training.pipeline import PipelinePrograms
from jaxmllm.training.programs import LANGUAGE, Programs, local_ranks
from jaxmllm.training.step import Step
from sharding.exchange import Exchange, rank_nodes
from sharding.mesh import MeshError, abstract_mesh, make_mesh
from sharding.pipeline.graph import PipelineError

# What a user's config, data or mesh can cause; everything else is a bug and keeps its traceback.
USER_ERRORS = (ConfigError, DataError, MeshError, MisalignmentError, PipelineError, TokenizerError)
SAMPLED_EXAMPLES = 2048  # whose lengths decide the sizes that the config leaves to `auto` ...
SAMPLED_BATCHES = (8, 32)  # ... in as many batches as that makes, within these bounds
LARGEST = 64  # examples of most images or sound, which a pipeline must have room for
LENGTHS_AT_ONCE = 1 << 16  # examples whose slots are summed at one time
SAME_DATA = "Give all hosts the same files for data.sources and data.evaluation"
SAME_PLAN = "Give all hosts the same file for balance.calibration, and the same data"
VOCABULARY_MULTIPLE = 64  # so that an `auto` vocabulary divides over tensor-parallel ranks

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run that is ready to train."""

    config: Config
    programs: Programs
    corpus: Corpus
    batches: Steps
    evaluation: Steps | None
    sources: tuple[str, ...]  # names behind the source numbers of metrics
    peak_flops: float | None  # of one device
    compilations: CompilationCounter
    warnings: WarningLog
    held_out: Corpus | None  # what `evaluation` is made from

    @property
    def directory(self) -> Path:
        return Path(self.config.run.directory)

    @property
    def is_main(self) -> bool:
        return jax.process_index() == 0

    def say(self, line: str) -> None:
        """Print a line, once a run and not once a process."""
        if self.is_main:
            print(line, flush=True)

    def describe(self) -> str:
        """What `auto` came to, and what was refused, in a few lines."""
        rejected = ", ".join(f"{n} {reason}" for reason, n in self.corpus.rejected_counts().items()) or "none"
        lines = [f"data: {len(self.corpus)} examples; rejected: {rejected}"]
        for name, phase in self.programs.spec.phases.items():
            rows = " and ".join(map(str, phase.capacities))
            parts = self.programs.layouts[name].parts
            ranks = f"{phase.ranks} ranks" + (f" of {parts} parts" if parts > 1 else "")
            long = f"; long rows of {phase.long_capacity} slots on all ranks" if phase.long_capacity else ""
            lines.append(f"{name}: {ranks}, rows of {rows} slots, at most {phase.max_segments} segments{long}")
        for name, route in self.programs.spec.routes.items():
            pools = f"pools of {route.encoder_pool} and {route.language_pool} tokens"
            lines.append(f"route {name}: {pools}, {route.backend} exchange")
        return "\n".join(lines)


@dataclass(frozen=True)
class Groundwork:
    """What is known of a run before anything is compiled or lies on a device."""

    model: MLLM
    corpus: Corpus
    held_out: list[Corpus]
    order: grain.MapDataset[int]  # of the training examples
    samples: list[BatchItems]  # batches that the sizes of `plan_spec` are chosen from


def lay_groundwork(config: Config, mesh: Mesh | AbstractMesh) -> Groundwork:
    """Index the data and compose the model; an abstract mesh does, where nothing shall run."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    model = build_model(config.model, vocabulary(config, tokenizer), config.components, mesh)
    if not model.trainable:
        raise ConfigError("every component is frozen: set components.<name>.freeze: false for what shall be trained")
    media = modalities(config.model, config.data, model.split_phases)
    corpus, held_out = open_corpora(config, tokenizer, media, model)
    hosts.compare("data", lambda: data_facts(corpus, held_out), SAME_DATA)
    order = example_order(corpus.members, config.run.seed)
    fewest, most = SAMPLED_BATCHES
    count = min(max(SAMPLED_EXAMPLES // config.data.batch_size, fewest), most)
    samples = sample_batches(order, corpus, config.data.batch_size, count)
    return Groundwork(model, corpus, held_out, order, samples)


def planning_mesh(config: Config, ranks: int | None = None) -> AbstractMesh:
    """The config's mesh for commands that plan without running: -1 takes the devices of this machine. With `ranks`, so
    many data ranks stand for the data and fsdp axes.

    Raises `ConfigError` where that leaves an axis open, or for a pipeline, whose rows such commands do not plan.
    """
    if config.pipeline.stages > 1:
        raise ConfigError(
            f"pipeline.stages ({config.pipeline.stages}): this command plans steps without a pipeline; "
            "set pipeline.stages=1"
        )
    sizes = config.mesh.model_dump()
    if ranks is not None:
        sizes |= {"data": ranks, "fsdp": 1}
        for axis in (name for name, size in sizes.items() if size == -1):
            raise ConfigError(f"mesh.{axis} is -1, but --ranks leaves no devices to count; set mesh.{axis} to a number")
    return abstract_mesh(sizes, jax.device_count() if -1 in sizes.values() else math.prod(sizes.values()))


def build_run(config: Config) -> Run:
    """Index the data, choose the sizes, compose the model, compile its programs.

    Raises one of `USER_ERRORS` for a config that cannot be run, `CheckpointError` where no checkpoint has room.
    """
    compilations, warnings = CompilationCounter(), WarningLog()
    ground = lay_groundwork(config, make_mesh(config.mesh_sizes))
    corpus, held_out = ground.corpus, ground.held_out
    params = ground.model.abstract(config.run.param_dtype)
    moments = [params[name] for name in ground.model.trainable] * MOMENTS
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


def data_facts(corpus: Corpus, held_out: Sequence[Corpus]) -> dict[str, str]:
    """What must be equal on all hosts of the data that they have read."""
    facts = {}
    for what, opened in (("data", corpus), *(("held-out data", corpus) for corpus in held_out)):
        for (name, _, examples), index in zip(opened.members, opened.indexes, strict=True):
            columns = (index.id, index.offset, index.item_shape, examples)
            digest = hosts.digest_of_bytes(column.tobytes() for column in columns)
            facts[f"{what} of source {name!r}"] = f"{len(examples)} examples, index {digest}"
        facts[f"{what} as a whole"] = opened.fingerprint()
    return facts


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
    step = Step(model, config.optimizer, config.decay_steps, len(ground.corpus.sources))
    modalities, param_dtype = ground.corpus.modalities, config.run.param_dtype
    if config.pipeline.stages == 1:
        spec = plan_spec(config, model, ground.samples, corpora)
        hosts.compare("plan", lambda: plan_facts(spec), SAME_PLAN)
        return Programs(step, spec, modalities, attention_spec(config, model, modalities, spec), param_dtype), None
    sizes = pipeline_sizes(config, model, ground.samples, corpora)
    hosts.compare("plan", lambda: plan_facts(sizes.spec) | {"pipeline": hosts.digest_of(sizes)}, SAME_PLAN)
    attention = attention_spec(config, model, modalities, sizes.spec)
    return PipelinePrograms(step, sizes, modalities, attention, param_dtype), sizes


def vocabulary(config: Config, tokenizer: Tokenizer) -> int:
    """Rows of the embedding: as the config says, or the tokenizer's rounded up."""
    size = config.model.language.vocab_size
    if size == "auto":
        return math.ceil(tokenizer.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.language.vocab_size is {size}, but the tokenizer has {tokenizer.vocab_size} tokens; "
            f"raise it, or say 'auto'"
        )
    return size


def open_corpora(
    config: Config, tokenizer: Tokenizer, modalities: Mapping[str, Modality], model: MLLM
) -> tuple[Corpus, list[Corpus]]:
    """The training corpus and, where there is one, the held-out corpus, with source numbers in common."""
    limits = {
        phase: largest_row(config, phase, modalities, model.layout(phase).parts)
        for phase in (*model.config.encoders, LANGUAGE)
    }

    def open_corpus(sources: Sequence[SourceConfig]) -> Corpus:
        sources = [below(config.data.root, source) for source in sources]
        opened = Corpus.open(sources, tokenizer, modalities, config.data.index_cache, progress=jax.process_index() == 0)
        corpus = opened.refuse(limits)
        corpus.check_rejected(config.data.max_rejected)
        return corpus

    corpora = [open_corpus(sources) for sources in (config.data.sources, config.data.evaluation) if sources]
    names = tuple(sorted({name for corpus in corpora for name in corpus.sources}))
    corpus, *held_out = (corpus.with_sources(names) for corpus in corpora)
    return corpus, held_out


def below(root: str | None, source: SourceConfig) -> SourceConfig:
    """The source with its paths below `data.root`."""
    if root is None:
        return source
    media = None if source.root is None else str(Path(root) / source.root)
    return source.model_copy(update={"path": str(Path(root) / source.path), "root": media})


def attention_spec(config: Config, model: MLLM, modalities: Mapping[str, Modality], spec: PlanSpec) -> AttentionSpec:
    """Attention blocks and parts of every phase's rows."""
    parts = {phase: model.layout(phase).parts for phase in spec.phases}
    return AttentionSpec(
        blocks={name: attention_block(config, rows, modalities, parts[name]) for name, rows in spec.phases.items()},
        parts=parts,
        bidirectional=config.model.language.bidirectional,
        windows=config.model.windows,
    )


def attention_block(config: Config, rows: PhaseSpec, modalities: Mapping[str, Modality], parts: int) -> int:
    """`phases.<phase>.block`, or 64 where some part of a row, or some rank's share of a long one, would have so few
    blocks that their work could not be dealt out evenly."""
    block: int = getattr(config.phases, rows.name).block
    stride = whole = 1
    if rows.name != LANGUAGE:
        stride, whole = modalities[rows.name].attention_stride, modalities[rows.name].granule
    if block % SMALLER_BLOCK or SMALLER_BLOCK * stride % whole:
        return block
    shared = [(capacity, parts) for capacity in rows.capacities]
    if rows.long_capacity:
        shared.append((rows.long_capacity, parts * rows.ranks))
    return min((block_size(slots // stride, by, block) for slots, by in shared if by > 1), default=block)


def granule(config: Config, phase: str, modalities: Mapping[str, Modality], parts: int) -> int:
    """What row capacities of a phase are multiples of: whole attention blocks and whole language tokens, equally many
    in each part of a row."""
    block: int = getattr(config.phases, phase).block
    if phase == LANGUAGE:
        return block * parts
    slots, whole = block * modalities[phase].attention_stride, modalities[phase].granule
    if parts > 1 and slots % whole:
        raise ConfigError(
            f"phases.{phase}.block: rows are split into {parts} parts by blocks of {slots} slots, which must be a "
            f"multiple of {whole}, what the {phase} tower takes as a whole; raise it to "
            f"{math.lcm(slots, whole) // modalities[phase].attention_stride}"
        )
    return math.lcm(slots, whole) * parts


def largest_row(config: Config, phase: str, modalities: Mapping[str, Modality], parts: int) -> int:
    """Slots of the largest row that a phase may have; longer items are refused."""
    settings: PhaseConfig = getattr(config.phases, phase)
    if settings.long_capacity is not None:
        return settings.long_capacity
    if settings.capacities == "auto":
        unit = granule(config, phase, modalities, parts)
        return settings.max_capacity // unit * unit
    return max(settings.capacities)


def pipeline_sizes(
    config: Config, model: MLLM, samples: Sequence[BatchItems], corpora: Sequence[Corpus]
) -> PipelineSizes:
    """Rows, stages and slots of a pipeline."""
    needs = _needs(config, model, corpora)
    shapes = resolved_shapes(config, model)
    largest = [largest_examples(corpus, phase) for corpus in corpora for phase in config.model.encoders]
    return choose_pipeline(samples, needs, config.pipeline, shapes, model.trainable, config.data.batch_size, largest)


def largest_examples(corpus: Corpus, phase: str) -> BatchItems:
    """Lengths of the examples that have most slots of a phase."""
    slots = np.zeros(len(corpus), np.int64)
    for first in range(0, len(corpus), LENGTHS_AT_ONCE):
        numbers = np.arange(first, min(first + LENGTHS_AT_ONCE, len(corpus)))
        items = corpus.gather(numbers).phases[phase]
        np.add.at(slots, first + items.example, items.length)
    return corpus.gather(np.sort(np.argsort(-slots, kind="stable")[:LARGEST]))


def plan_spec(config: Config, model: MLLM, samples: Sequence[BatchItems], corpora: Sequence[Corpus]) -> PlanSpec:
    """Ranks, row classes, pools and costs of every phase."""
    needs = _needs(config, model, corpora)
    nodes, backend = rank_places(config, model), exchange_backend(config, model)
    return choose_sizes(samples, needs, exchange_grids(model), config.balance, nodes, backend)


def _needs(config: Config, model: MLLM, corpora: Sequence[Corpus]) -> list[PhaseNeeds]:
    longest = {phase: max(corpus.longest(phase) for corpus in corpora) for phase in (*config.model.encoders, LANGUAGE)}
    return phase_needs(config, model, corpora[0].modalities, longest)


def rank_places(config: Config, model: MLLM) -> dict[str, Ints]:
    """Node of each rank, by phase."""
    per_node = config.balance.ranks_per_node
    return {
        phase: rank_nodes(model.layout(phase), None if per_node == "auto" else per_node)
        for phase in (*model.config.encoders, LANGUAGE)
    }


def exchange_backend(config: Config, model: MLLM) -> Backend:
    """Ragged where the devices' platform has a ragged all-to-all, if the config leaves it open."""
    if config.balance.exchange != "auto":
        return config.balance.exchange
    mesh = model.layout(LANGUAGE).mesh
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()
    return "padded" if platform == "cpu" else "ragged"


def phase_needs(
    config: Config, model: MLLM, modalities: Mapping[str, Modality], longest: Mapping[str, int]
) -> list[PhaseNeeds]:
    """What decides the rows of every phase beside the samples; `longest` is the largest item of each, in slots."""
    flops = model_flops(config, model)
    times = measured_times(config, model, flops)
    return [
        PhaseNeeds(
            name=phase,
            ranks=model.layout(phase).ranks,
            granule=granule(config, phase, modalities, model.layout(phase).parts),
            slots_per_token=1 if phase == LANGUAGE else modalities[phase].slots_per_token,
            longest=longest[phase],
            flops=flops[phase],
            config=getattr(config.phases, phase),
            time=times.get(phase),
        )
        for phase in (*config.model.encoders, LANGUAGE)
    ]


def resolved_shapes(config: Config, model: MLLM) -> ModelConfig:
    """The model's shapes with the size of its vocabulary."""
    language = config.model.language.model_copy(update={"vocab_size": model.vocab_size})
    return config.model.model_copy(update={"language": language})


def model_flops(config: Config, model: MLLM) -> dict[str, PhaseFlops]:
    """FLOPs of an item, by phase."""
    shapes = resolved_shapes(config, model)
    return {phase: phase_flops(shapes, phase, model.trainable) for phase in (*config.model.encoders, LANGUAGE)}


def measured_times(config: Config, model: MLLM, flops: Mapping[str, PhaseFlops]) -> dict[str, PhaseTime]:
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


def exchange_grids(model: MLLM) -> dict[str, ExchangeGrid]:
    """How the ranks of each encoder phase lie on those of the language phase."""
    language = model.layout(LANGUAGE)
    return {
        phase: ExchangeGrid(*Exchange(language.mesh, model.layout(phase), language).grid())
        for phase in model.config.encoders
    }


def local_share(programs: Programs) -> LocalRanks:
    """The ranks of every phase and exchange that this host supplies."""
    return LocalRanks(
        phases={phase: local_ranks(layout.rows, layout.ranks) for phase, layout in programs.layouts.items()},
        exchange={
            phase: local_ranks(exchange.tables, math.prod(programs.spec.routes[phase].grid.shape))
            for phase, exchange in programs.exchanges.items()
        },
    )
