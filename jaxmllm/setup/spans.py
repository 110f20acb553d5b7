"""How many neighbouring ranks may hold a row together, by phase.

config --mesh_spans--> how far the mesh's axes are cut --node_spans--> inside nodes first
config, layouts, nodes --spans_of_phases--> spans that the sizes of rows are chosen from
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, pairwise
from operator import mul

import numpy as np

from jaxmllm.arrays import Ints
from jaxmllm.balance.sizes.inputs import ODD_FACTORS
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.models.mllm import MLLM
from jaxmllm.setup.exchange_layout import nodes_of_ranks
from sharding.mesh import MeshError
from sharding.rules import Layout

# Spans that `auto` tries, up to a node of 12 ranks. Of those with an odd factor, a mesh allows only
# products of its innermost axes.
AUTO_SPANS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
# Spans that axes are then cut for; after that, each of `ODD_FACTORS` that is left cuts them
AUTO_CUT = (1, 2, 4, 8)
ACROSS_NODES = (16, 32, 64)  # added to both where groups may cross nodes

Spans = Mapping[str, tuple[int, ...]]  # by phase, ascending


def mesh_spans(config: Config) -> tuple[int, ...]:
    """All spans that any phase may have, ascending: the mesh is cut for them.

    Raises:
      ConfigError: one does not divide the next.
    """
    spans = {1}
    auto_cut = _candidate_spans(config, AUTO_CUT)
    cut_by_odd = False
    for phase in config.model.phases:
        settings = getattr(config.phases, phase)
        if settings.spans != "auto":
            spans |= set(settings.spans)
        elif settings.capacities == "auto" and config.may_share_rows:
            spans |= set(auto_cut)
            cut_by_odd = True
    ascending = sorted(spans)
    for shorter, longer in pairwise(ascending):
        if longer % shorter:
            raise ConfigError(
                f"phases.<phase>.spans: {shorter} of one phase does not divide {longer} of another (`auto` is "
                f"{list(auto_cut)} at least), so that the mesh cannot be cut for both; choose spans of which each "
                "divides the next, over all phases"
            )
    # Each multiplies the longest span, so that every span divides the next. Axes without such a
    # factor are not cut further.
    for factor in ODD_FACTORS if cut_by_odd else ():
        ascending.append(factor * ascending[-1])
    return tuple(ascending)


def node_spans(
    config: Config, sizes: Mapping[str, int], local_devices: int | None = None
) -> tuple[int, ...]:
    """The spans of `mesh_spans` with their factors in the order in which groups fill a node: on
    nodes of 6 ranks 1, 2, 6, 12, .. in place of 1, 2, 4, 8, .., of which 4 would cross nodes.

    Args:
      sizes: devices along each axis of the mesh.
      local_devices: devices of a node where `balance.ranks_per_node` is `auto`; None: not known, so
        factors keep their order.

    Raises:
      ConfigError: as for `mesh_spans`.
    """
    spans = mesh_spans(config)
    configured = config.balance.ranks_per_node
    node_devices = local_devices if configured == "auto" else configured
    node_ranks = _node_ranks(node_devices, sizes)
    if node_ranks is None or config.balance.spans_cross_nodes:
        return spans
    inside: list[int] = []
    outside: list[int] = []
    for shorter, longer in pairwise(spans):
        factor = longer // shorter
        fits = node_ranks % (math.prod(inside) * factor) == 0
        (inside if fits else outside).append(factor)
    return tuple(accumulate((*inside, *outside), mul, initial=1))


def _node_ranks(devices: int | None, sizes: Mapping[str, int]) -> int | None:
    """Data ranks on the devices of a node; None: not known, or a rank's devices are on several
    nodes."""
    rank_devices = sizes["context"] * sizes["tensor"]
    if devices is None or rank_devices < 1 or devices % rank_devices:
        return None
    return devices // rank_devices


def spans_of_phases(config: Config, model: MLLM) -> Spans:
    """The spans that the rows of each phase may have.

    `auto` takes all spans that the ranks and the nodes allow.

    Raises:
      ConfigError: a span in the config does not divide the ranks, or its groups cross nodes.
    """
    nodes = nodes_of_ranks(config, model)
    spans = {}
    for phase in model.phases:
        settings = getattr(config.phases, phase)
        check = partial(_check_ranks, config, phase, layout=model.layout(phase), node=nodes[phase])
        if settings.spans != "auto":
            for span in settings.spans:
                check(span)
            spans[phase] = settings.spans
        elif settings.capacities == "auto" and config.may_share_rows:
            spans[phase] = tuple(
                span for span in _candidate_spans(config, AUTO_SPANS) if _is_allowed(check, span)
            )
        else:
            spans[phase] = (1,)
    return spans


def _candidate_spans(config: Config, spans: tuple[int, ...]) -> tuple[int, ...]:
    return spans + ACROSS_NODES if config.balance.spans_cross_nodes else spans


def left_alone(config: Config, model: MLLM, spans: Spans) -> tuple[str, ...]:
    """Phases whose rows `auto` leaves to single ranks only because any group would cross nodes.

    Args:
      spans: of `spans_of_phases`.
    """
    crossing = config.balance.model_copy(update={"spans_cross_nodes": True})
    allowed = spans_of_phases(config.model_copy(update={"balance": crossing}), model)
    return tuple(phase for phase in spans if spans[phase] == (1,) != allowed[phase])


def _is_allowed(check: Callable[[int], None], span: int) -> bool:
    try:
        check(span)
    except ConfigError:
        return False
    return True


def _check_ranks(config: Config, phase: str, span: int, layout: Layout, node: Ints) -> None:
    key = f"phases.{phase}.spans"
    if layout.ranks % span:
        raise ConfigError(
            f"{key}: {span} does not divide the {layout.ranks} ranks of the phase; leave it out, or change mesh"
        )
    try:
        layout.spanned(span)
    except MeshError as error:
        raise ConfigError(f"{key}: {error}") from error
    groups = np.asarray(node).reshape(-1, span)
    if not config.balance.spans_cross_nodes and (groups != groups[:, :1]).any():
        raise ConfigError(
            f"{key}: groups of {span} ranks cross nodes; leave it out, or allow it by balance.spans_cross_nodes "
            "(keys and values of shared rows then travel between nodes), or say balance.ranks_per_node"
        )
