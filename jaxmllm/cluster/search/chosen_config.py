"""A planned layout as a config that trains unedited, with the rows that were planned."""

from __future__ import annotations

from typing import Any

from jaxmllm.balance.records import PhaseSpec, PlanSpec
from jaxmllm.cluster.search.layouts import PlannedLayout
from jaxmllm.config.read import config_tree, parse_config
from jaxmllm.config.schema import Config


def chosen_config(layout: PlannedLayout) -> Config:
    """The config of a layout, with its mesh, row classes and segments."""
    return with_rows(layout.config, layout.spec)


def with_rows(config: Config, spec: PlanSpec) -> Config:
    """The config with these row classes and segments."""
    tree = config_tree(config)
    for phase, of_phase in spec.phases.items():
        tree["phases"][phase] |= _rows(of_phase)
    return parse_config(tree, "the plan")


def _rows(spec: PhaseSpec) -> dict[str, Any]:
    """The keys of `phases.<phase>` that fix its rows."""
    return {
        "capacities": sorted(set(spec.capacities), reverse=True),
        "spans": sorted(set(spec.spans)),
        "max_segments": spec.max_segments,
    }
