"""What the balance report compares: one batch, drawn or generated, planned in two balance modes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxmllm.balance.records import BatchItems, Mode, PlanSpec
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.config.schema import Config, ModelConfig
from jaxmllm.tools.workload import MODEL, generate, longest, make_spec, mix_for

AFTER: Mode = "phases"
RANKS = 64  # of generated batches, unless the config or the caller says otherwise
PER_RANK = 32  # examples per rank of generated batches
NODE = 8  # ranks per node of generated batches
# Are generated to choose the sizes from, in as many batches as they fill ...
SAMPLED_EXAMPLES = 8192
FEWEST_BATCHES = 2  # ... but not fewer than this
MOST_BATCHES = 16  # ... and not more


@dataclass(frozen=True)
class Comparison:
    """One batch planned twice. The specs differ in their mode and in the sizes that suit it."""

    title: str  # where the lengths come from
    items: BatchItems
    before: PlanSpec
    after: PlanSpec
    token_bytes: int = 2 * MODEL.language.width  # of an encoder output


def compare_generated(ranks: int, per_rank: int, seed: int, before: Mode) -> Comparison:
    """A generated batch on the generator's own model."""
    samples, items = _generate(ranks * per_rank, seed)

    def spec(mode: Mode) -> PlanSpec:
        return make_spec(ranks, samples, mode, ranks_per_node=NODE)

    title = f"Generated lengths, {ranks} ranks, {per_rank} examples per rank, seed {seed}"
    return Comparison(title, items, before=spec(before), after=spec(AFTER))


def compare_on_data(
    config: Config, name: str, ranks: int | None, per_rank: int | None, before: Mode
) -> Comparison:
    """A batch that the run of a config would draw.

    Args:
      name: of the config, for the title.
      ranks: data ranks, instead of the config's `data` and `fsdp` axes.
      per_rank: examples per rank, instead of `data.batch_size`.

    Raises one of `USER_ERRORS` of training/run.py.
    """
    from jaxmllm.data.batches import batch_examples
    from jaxmllm.setup.planning_mesh import planning_mesh
    from jaxmllm.setup.prepare import prepare
    from jaxmllm.setup.sizing import plan_spec
    from sharding.mesh import axis_sizes

    mesh = planning_mesh(config, ranks)
    config = _with_batch(config, axis_sizes(mesh), per_rank)
    inputs = prepare(config, mesh)
    items = inputs.corpus.gather(
        batch_examples(inputs.order, config.data.batch_size, len(inputs.samples))
    )

    def spec(mode: Mode) -> PlanSpec:
        return plan_spec(with_mode(config, mode), inputs)

    title = f"{name}, {_sizes_in_words(config, axis_sizes(mesh))}"
    return Comparison(title, items, spec(before), spec(AFTER), _token_bytes(config))


def compare_on_generated(
    config: Config, name: str, ranks: int | None, per_rank: int | None, seed: int, before: Mode
) -> Comparison:
    """A generated batch on the model, layouts and rows of a config; arguments as `compare_on_data`."""
    from jaxmllm.data.media.modalities import row_formats
    from jaxmllm.data.text.tokenizers import load_tokenizer
    from jaxmllm.models.mllm import build_model
    from jaxmllm.setup.exchange_layout import exchange_backend, exchange_grids, nodes_of_ranks
    from jaxmllm.setup.planning_mesh import planning_mesh
    from jaxmllm.setup.prepare import run_modalities, vocabulary
    from jaxmllm.setup.sizing import sizing_inputs
    from jaxmllm.setup.spans import spans_of_phases
    from sharding.mesh import axis_sizes

    mesh = planning_mesh(config, ranks)
    config = _with_batch(config, axis_sizes(mesh), per_rank)
    words = vocabulary(config, load_tokenizer(config.data.tokenizer))
    model = build_model(config.model, words, config.components, mesh)
    samples, items = _generate(config.data.batch_size, seed, config.model)
    largest = {phase: longest(phase, mix_for(config.model), config.model) for phase in items.phases}
    spans = spans_of_phases(config, model)
    formats = row_formats(run_modalities(config, model, spans))
    grids = exchange_grids(model)
    nodes = nodes_of_ranks(config, model)
    backend = exchange_backend(config, model)

    def spec(mode: Mode) -> PlanSpec:
        in_mode = with_mode(config, mode)
        inputs = sizing_inputs(in_mode, model, formats, largest, spans)
        return choose_sizes(samples, inputs, grids, in_mode.balance, nodes, backend)

    title = f"{name} on generated lengths, {_sizes_in_words(config, axis_sizes(mesh))}, seed {seed}"
    return Comparison(title, items, spec(before), spec(AFTER), _token_bytes(config))


def with_mode(config: Config, mode: Mode) -> Config:
    """The config with another `balance.mode`."""
    return config.model_copy(update={"balance": config.balance.model_copy(update={"mode": mode})})


def _with_batch(config: Config, axes: Mapping[str, int], per_rank: int | None) -> Config:
    if per_rank is None:
        return config
    examples = _data_ranks(axes) * per_rank
    return config.model_copy(
        update={"data": config.data.model_copy(update={"batch_size": examples})}
    )


def _data_ranks(axes: Mapping[str, int]) -> int:
    return axes["data"] * axes["fsdp"]


def _sizes_in_words(config: Config, axes: Mapping[str, int]) -> str:
    return f"{_data_ranks(axes)} data ranks, {config.data.batch_size} examples per step"


def _token_bytes(config: Config) -> int:
    import jax.numpy as jnp

    return (
        config.model.language.width * jnp.dtype(config.components.language.compute_dtype).itemsize
    )


def _generate(
    examples: int, seed: int, model: ModelConfig = MODEL
) -> tuple[list[BatchItems], BatchItems]:
    """Batches to choose sizes from, and another one to plan."""
    sampled = min(max(SAMPLED_EXAMPLES // examples, FEWEST_BATCHES), MOST_BATCHES)
    batches = [
        generate([seed, index], examples, mix_for(model), model) for index in range(sampled + 1)
    ]
    return batches[:-1], batches[-1]
