"""Why no layout was found, in one line: what is closest, what it lacks, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from jaxmllm.cluster.clusters import GB
from jaxmllm.cluster.search.layouts import SearchResult
from jaxmllm.cluster.search.mesh_choices import fixed_axes, mesh_choices
from jaxmllm.config.schema import ConfigError, MeshConfig
from jaxmllm.models.compose import laid_out
from sharding.mesh import MeshError

if TYPE_CHECKING:
    from jaxmllm.cluster.search.sieves import Planner

GROWTH: Final = 6  # doublings of the devices that are tried
OPEN: Final = "leave the axes open with mesh={}"


def why_none(planner: Planner, result: SearchResult, devices: int, *, may_open: bool = True) -> str:
    """One line: what is closest, what it lacks, and what would help. It suggests to open the axes
    of the mesh only if `may_open`."""
    opened = _open_planner(planner) if may_open else None
    if result.closest is not None:
        closest = result.closest
        return (
            f"nothing fits {devices} devices of {planner.cluster.name} with {planner.budget / GB:.0f} GB each: "
            f"closest is {closest.choice.words}, over by {closest.lacking / GB:.1f} GB in {closest.place}; "
            f"{_remedy(planner, opened, devices)}"
        )
    if result.failure is not None:
        return f"no layout in stages on {devices} devices can be planned: {result.failure}"
    if result.refusal is not None:  # another number of devices would not help
        return result.refusal
    opening = OPEN if opened and _enough_devices(opened, [devices]) else ""
    if result.fewest_ranks is not None:
        return (
            f"data.batch_size ({planner.config.data.batch_size}): every mesh of {devices} devices has more ranks; "
            f"{opening and f'{opening}, or '}raise it to {result.fewest_ranks} or more"
        )
    legal = " or ".join(map(str, _legal_devices(planner, devices)))
    remedy = opening if opening and not legal else f"say --devices {legal or 'another number'}"
    return f"no mesh of {devices} devices is legal ({'; '.join(result.rejected)}); {remedy}"


def _remedy(planner: Planner, opened: Planner | None, devices: int) -> str:
    """What would make a layout fit: more devices, or opening the axes that the config fixes."""
    counts = [devices << doubling for doubling in range(1, GROWTH + 1)]
    if more := _enough_devices(planner, counts):
        return f"{more} devices would do"
    if opened and (enough := _enough_devices(opened, [devices, *counts])):
        return f"{OPEN}, and {enough} devices would do"
    return f"up to {counts[-1]} devices would not do: freeze components, or shorten items"


def _open_planner(planner: Planner) -> Planner | None:
    """The planner with all axes of the mesh open; none where the config fixes none."""
    if not fixed_axes(planner.config):
        return None
    return replace(planner, config=planner.config.model_copy(update={"mesh": MeshConfig()}))


def _enough_devices(planner: Planner, counts: Sequence[int]) -> int | None:
    """The first of these numbers of devices on which a layout fits; none if there is none."""
    for devices in counts:
        try:
            choices = mesh_choices(planner.config, devices)
        except ConfigError:  # fixed axes do not divide the devices
            continue
        if any(planner.legal.of(choice, SearchResult()) for choice in choices):
            return devices
    return None


def _legal_devices(planner: Planner, devices: int) -> list[int]:
    """The nearest numbers of devices, below and above, that have a legal mesh."""
    below = next((n for n in range(devices - 1, 0, -1) if _is_legal(planner, n)), None)
    above = next((n for n in range(devices + 1, 2 * devices + 1) if _is_legal(planner, n)), None)
    return [n for n in (below, above) if n is not None]


def _is_legal(planner: Planner, devices: int) -> bool:
    """Whether the model can be laid out on some mesh of so many devices."""
    try:
        choices = mesh_choices(planner.config, devices)
    except ConfigError:
        return False
    for choice in choices:
        config = choice.of(planner.config)
        try:
            laid_out(planner.model, config.components, planner.mesh(config, choice))
            return True
        except MeshError:
            continue
    return False
