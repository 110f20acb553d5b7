"""The exchange of a run on the mesh: its backend, the grids of ranks, and the node of each rank."""

from __future__ import annotations

from jaxmllm.arrays import Ints
from jaxmllm.balance.exchange.tables import BACKENDS, backend_for
from jaxmllm.balance.records import ExchangeGrid
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from sharding.exchange import LayoutPair
from sharding.mesh import platform_of
from sharding.rules import rank_nodes


def check_exchange(config: Config) -> None:
    """Raise `ConfigError` for an unknown exchange: the schema does not know `BACKENDS`."""
    known = ("auto", *BACKENDS)
    chosen = config.balance.exchange
    if chosen not in known:
        raise ConfigError(f"balance.exchange: must be one of {', '.join(known)} (got {chosen!r})")


def exchange_backend(config: Config, model: MLLM) -> str:
    """The config's backend; `auto` is the first of the table that the devices' platform can run."""
    check_exchange(config)
    if config.balance.exchange != "auto":
        return config.balance.exchange
    return backend_for(platform_of(model.layout(LANGUAGE).mesh))


def exchange_grids(model: MLLM) -> dict[str, ExchangeGrid]:
    """How the ranks of a phase map to those of the language phase, for each phase that the language
    phase reads or that reads it."""
    language = model.layout(LANGUAGE)
    read_phases = model.phases[LANGUAGE].reads
    grids = {}
    for name, phase in model.phases.items():
        if name in read_phases or phase.generates:
            layouts = LayoutPair(language.mesh, model.layout(name), language)
            grids[name] = ExchangeGrid(*layouts.grid())
    return grids


def nodes_of_ranks(config: Config, model: MLLM) -> dict[str, Ints]:
    """Node of each rank, by phase."""
    configured = config.balance.ranks_per_node
    per_node = None if configured == "auto" else configured
    return {phase: rank_nodes(model.layout(phase), per_node) for phase in model.phases}
