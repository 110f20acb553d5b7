"""The data and the model of a run, before anything is compiled or lies on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grain
import jax
from jax.sharding import AbstractMesh, Mesh

from jaxmllm.balance.records import BatchItems
from jaxmllm.config.schema import Config, ConfigError, SourceConfig
from jaxmllm.data.batches import example_order, sample_batches
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.media.modalities import modalities, row_formats
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.text.tokenizers import Tokenizer, load_tokenizer
from jaxmllm.models.mllm import MLLM, build_model
from jaxmllm.runtime import hosts
from jaxmllm.setup.sizing import check_exchange, largest_row
from sharding.mesh import abstract_mesh

SAMPLED_EXAMPLES = 2048  # whose lengths decide the sizes that the config leaves to `auto` ...
SAMPLED_BATCHES = (8, 32)  # ... in as many batches as that makes, within these bounds
SAME_DATA = "Give all hosts the same files for data.sources and data.evaluation"
VOCABULARY_MULTIPLE = 64  # so that an `auto` vocabulary divides over tensor-parallel ranks


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
    check_exchange(config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    model = build_model(config.model, vocabulary(config, tokenizer), config.components, mesh)
    if not model.trainable.components:
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
    formats = row_formats(modalities)
    limits = {phase: largest_row(config, phase, formats, model.layout(phase).parts) for phase in model.phases}

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
