"""What the balance report compares: one batch, drawn or generated, planned in two balance modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from jaxmllm.balance.costs.gather import gathered_bytes
from jaxmllm.balance.records import BatchItems, Mode, PlanSpec
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.phases import LANGUAGE
from jaxmllm.tools.arguments import MOST
from jaxmllm.tools.workload import MODEL, PHASES, generated_batches, make_spec, spans_up_to

AFTER: Mode = "phases"
RANKS = 64  # ranks of generated batches, unless the config or the caller says otherwise
PER_RANK = 32  # examples per rank of generated batches
NODE = 8  # ranks per node of generated batches


@dataclass(frozen=True)
class Comparison:
    """One batch planned twice. The specs differ in their mode and in the sizes that suit it."""

    title: str  # where the lengths come from
    items: BatchItems
    before: PlanSpec
    after: PlanSpec
    token_bytes: int = 2 * MODEL.language.width  # bytes of an encoder output
    # Bytes of the keys and values of a row slot, by phase
    key_value_bytes: Mapping[str, float] = field(
        default_factory=lambda: {phase: gathered_bytes(MODEL, phase) for phase in PHASES}
    )


def compare_generated(ranks: int, per_rank: int, seed: int, before: Mode) -> Comparison:
    """Compare modes on a generated batch and the generator's own model. Raises `ConfigError` if the
    batch is too large."""
    samples, (items,) = generated_batches(_example_count(ranks, per_rank), seed)

    def spec(mode: Mode) -> PlanSpec:
        spans = spans_up_to(NODE, ranks) if mode == AFTER else (1,)
        return make_spec(ranks, samples, mode, ranks_per_node=NODE, spans=spans)

    title = f"Generated lengths, {ranks} ranks, {per_rank} examples per rank, seed {seed}"
    return Comparison(title, items, before=spec(before), after=spec(AFTER))


def compare_on_data(
    config: Config, name: str, ranks: int | None, per_rank: int | None, before: Mode
) -> Comparison:
    """Compare modes on a batch that the run of a config would draw.

    Args:
      name: name of the config, for the title.
      ranks: data ranks, instead of those of the config.
      per_rank: examples of a rank, instead of `data.batch_size`.

    Raises one of `USER_ERRORS` of training/run.py.
    """
    from jaxmllm.data.batches import batch_examples
    from jaxmllm.setup.planning_mesh import planning_mesh
    from jaxmllm.setup.prepare import prepare
    from jaxmllm.setup.sizing import plan_spec
    from sharding.mesh import axis_sizes

    mesh = planning_mesh(config, ranks)
    config = _with_batch_size(config, axis_sizes(mesh), per_rank)
    inputs = prepare(config, mesh)
    # The batch after those that sizes were chosen from.
    items = inputs.corpus.gather(
        batch_examples(inputs.order, config.data.batch_size, len(inputs.samples))
    )

    def spec(mode: Mode) -> PlanSpec:
        return plan_spec(with_mode(config, mode), inputs)

    title = f"{name}, {_sizes_in_words(config, axis_sizes(mesh))}"
    return Comparison(
        *(title, items, *_planned(spec, before), _token_bytes(config), key_value_bytes(config))
    )


def compare_on_generated(
    config: Config, name: str, ranks: int | None, per_rank: int | None, seed: int, before: Mode
) -> Comparison:
    """Compare modes on a generated batch with the model, layouts and rows of a config; arguments as
    in `compare_on_data`."""
    from jaxmllm.setup.planning_mesh import planning_mesh
    from jaxmllm.tools.generated_lengths import generated_lengths
    from sharding.mesh import axis_sizes

    mesh = planning_mesh(config, ranks)
    config = _with_batch_size(config, axis_sizes(mesh), per_rank)
    lengths = generated_lengths(config, mesh, seed)
    title = f"{name} on generated lengths, {_sizes_in_words(config, axis_sizes(mesh))}, seed {seed}"

    def spec(mode: Mode) -> PlanSpec:
        return replace(lengths, config=with_mode(config, mode)).spec

    return Comparison(
        *(title, lengths.items, *_planned(spec, before)),
        *(_token_bytes(config), key_value_bytes(config)),
    )


def _planned(spec: Callable[[Mode], PlanSpec], before: Mode) -> tuple[PlanSpec, PlanSpec]:
    """Specs of the mode `before` and of `AFTER`. Raises `ConfigError` if only rows of several ranks
    hold the largest items, which `before` does not have."""
    after = spec(AFTER)
    try:
        return spec(before), after
    except ConfigError as error:
        raise ConfigError(
            f"--before {before}: there is nothing to compare with, for its rows lie on one rank each, and so "
            f"{error}; `jaxmllm waste` shows the run's own plan alone"
        ) from error


def with_mode(config: Config, mode: Mode) -> Config:
    """The config with another `balance.mode`."""
    return config.model_copy(update={"balance": config.balance.model_copy(update={"mode": mode})})


def _with_batch_size(config: Config, axes: Mapping[str, int], per_rank: int | None) -> Config:
    if per_rank is None:
        return config
    examples = _example_count(_data_ranks(axes), per_rank)
    return config.model_copy(
        update={"data": config.data.model_copy(update={"batch_size": examples})}
    )


def _example_count(ranks: int, per_rank: int) -> int:
    """Examples of a batch. Raises `ConfigError` for more than `data.batch_size` may be."""
    if ranks * per_rank > MOST:
        raise ConfigError(
            f"--ranks, --per-rank: {ranks} ranks of {per_rank} examples are {ranks * per_rank}, and a batch has at "
            f"most {MOST}; lower one of them"
        )
    return ranks * per_rank


def _data_ranks(axes: Mapping[str, int]) -> int:
    return axes["data"] * axes["fsdp"]


def _sizes_in_words(config: Config, axes: Mapping[str, int]) -> str:
    return f"{_data_ranks(axes)} data ranks, {config.data.batch_size} examples per step"


def key_value_bytes(config: Config) -> dict[str, float]:
    """Bytes of the keys and values of a row slot in all layers, by phase."""
    return {
        phase: gathered_bytes(config.model, phase, _number_bytes(config, phase))
        for phase in config.model.phases
    }


def _token_bytes(config: Config) -> int:
    return config.model.token_width * _number_bytes(config, LANGUAGE)


def _number_bytes(config: Config, phase: str) -> int:
    import jax.numpy as jnp

    return int(jnp.dtype(getattr(config.components, phase).compute_dtype).itemsize)
