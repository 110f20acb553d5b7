"""What `jaxmllm plan` says of layouts: the rows of its table, why a layout lost, JSON records."""

from __future__ import annotations

from typing import Any, Final

from jaxmllm.balance.records import StepPlan
from jaxmllm.balance.statistics import ROWS_OF
from jaxmllm.cluster.clusters import GB
from jaxmllm.cluster.search.layouts import EQUAL, PlannedLayout, SearchResult, program_words
from jaxmllm.cluster.search.sieves import Planner

SPEED: Final = ["step s", "low", "high", "MFU", "HFU", "GB"]
COLUMNS: Final = ["mesh", "why not", *SPEED]
CHOSEN: Final = ["mesh", "remat", "rows"]
# A layout lost by waiting if ranks wait for a larger share of a phase's time than in the best
# layout, by more than this
WAITING: Final = 0.05
REST: Final = {
    "bubble": "stages wait for each other",
    "sends": "edges between stages",
    "ticks": "ticks, besides their operations",
    "exchange": "exchange of media tokens",
    "replicas": "gradients between replicas",
    "update": "update",
    "straggling": "straggling",
}
STATISTICS: Final = ("rows", "microbatches", "real_token_fraction", "max_over_mean")


def table(result: SearchResult, planner: Planner) -> list[list[Any]]:
    """A row for every layout that was planned: the ranked ones, then those that were struck out."""
    best = result.ranked[0]
    rows = []
    for layout in result.ranked:
        why = "" if layout is best else why_lost(layout, best)
        rows.append(_row(layout, why, planner))
    return rows + [_row(layout, why, planner) for layout, why in result.struck]


def chosen_table(result: SearchResult) -> list[list[Any]]:
    """A row of `CHOSEN` for every layout of `table`: what was chosen in addition to the mesh."""
    layouts = [*result.ranked, *(layout for layout, _ in result.struck)]
    return [
        [planned.choice.words, remat_words(planned), rows_words(planned)] for planned in layouts
    ]


def _row(layout: PlannedLayout, why: str, planner: Planner) -> list[Any]:
    return [layout.choice.words, why, *speed(layout, planner)]


def speed(layout: PlannedLayout, planner: Planner) -> list[Any]:
    """Cells of `SPEED`."""
    low, high = planner.device.interval(layout.seconds)
    used = f"{layout.peak.bytes / GB:.3g} of {planner.budget / GB:.3g}"
    used += ", compiled" if layout.peak.compiled else ""
    return [layout.seconds, low, high, f"{layout.mfu:.3f}", f"{layout.hfu:.3f}", used]


def waits(layout: PlannedLayout) -> str:
    """In words, the share of each phase's time that ranks wait for the slowest one."""
    shares = {phase: layout.statistic(f"{phase}/idle_share") for phase in layout.spec.phases}
    return ", ".join(f"{phase} {100 * share:.0f} %" for phase, share in shares.items())


def remat_words(layout: PlannedLayout) -> str:
    """`remat` of each phase in words, or once if all phases agree."""
    words = {}
    for phase, remat in _remat_by_phase(layout).items():
        words[phase] = remat if isinstance(remat, str) else "+".join(remat)
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{phase} {word}" for phase, word in words.items())


def _remat_by_phase(layout: PlannedLayout) -> dict[str, Any]:
    components = layout.config.components
    return {phase: getattr(components, phase).remat for phase in layout.spec.phases}


def rows_words(layout: PlannedLayout) -> str:
    """Slots of the largest row of each phase, on each rank that holds it."""
    return " / ".join(
        f"{spec.classes[0].capacity}"
        + (f"x{spec.classes[0].span}" if spec.classes[0].span > 1 else "")
        for spec in layout.spec.phases.values()
    )


def why_lost(layout: PlannedLayout, best: PlannedLayout) -> str:
    """One line: the part of the step that takes longest compared with the best layout."""
    if layout.seconds <= best.seconds * (1 + EQUAL):
        return "as fast, with no fewer axes"
    excess = {name: seconds - best.parts.get(name, 0.0) for name, seconds in layout.parts.items()}
    name = max(excess, key=lambda part: excess[part])
    # Parts that belong to no phase have no slash, and then `kind` is empty.
    phase, _, kind = name.partition("/")
    share = f"{100 * layout.parts[name] / layout.seconds:.0f} % of the step"
    if kind == "weights":
        return f"gathers of {phase} exposed, {share}"
    if kind == "inside":
        return f"{phase} waits inside layers, {share}"
    if kind == "compute":
        waits = layout.statistic(f"{phase}/idle_share")
        if waits > best.statistic(f"{phase}/idle_share") + WAITING:
            return f"{phase} waits {100 * waits:.0f} %"
        return f"{phase} computes {100 * excess[name] / best.parts[name]:.0f} % longer"
    return f"{REST[name]}, {share}"


# ---------------------------------------------------------------------------- records


def records(result: SearchResult, planner: Planner) -> dict[str, Any]:
    """What the search found, for JSON."""
    best = result.ranked[0]
    return {
        "considered": result.considered,
        "meshes": result.meshes,
        "estimated": len(result.estimates),
        "rejected": dict(result.rejected),
        "budget_bytes": planner.budget,
        "layouts": [record(layout, best, planner) for layout in result.ranked],
        "struck_out": [
            record(layout, best, planner) | {"why_not": why} for layout, why in result.struck
        ],
        "steps": [plan_record(plan) for plan in best.plans],
    }


def record(layout: PlannedLayout, best: PlannedLayout, planner: Planner) -> dict[str, Any]:
    """One layout, for JSON."""
    low, high = planner.device.interval(layout.seconds)
    overlapped, serial = layout.ends
    classes = {
        phase: [list(row_class) for row_class in spec.classes]
        for phase, spec in layout.spec.phases.items()
    }
    peak = layout.peak
    return {
        "mesh": layout.choice.sizes,
        "stages": layout.choice.stages,
        "encoders_over": list(layout.choice.as_data),
        "remat": _remat_by_phase(layout),
        "classes": classes,
        "kept_residuals": dict(layout.programs.kept_residuals),
        "step_s": layout.seconds,
        "low_s": low,
        "high_s": high,
        "overlapped_s": overlapped,
        "serial_s": serial,
        "mfu": layout.mfu,
        "hfu": layout.hfu,
        "parts": layout.parts,
        "peak_bytes": peak.bytes,
        "peak_parts": dict(peak.parts),
        "peak_program": program_words(peak.program),
        "peak_moment": peak.moment,  # "compiled" where the bytes are a compiler's
        "why_not": None if layout is best else why_lost(layout, best),
    }


def plan_record(plan: StepPlan) -> dict[str, Any]:
    """Rows of one step, named as a run logs them, and the capacities of its microbatches."""
    capacities = {
        f"{phase}/capacities": rows.capacity.tolist() for phase, rows in plan.phases.items()
    }
    return planned_statistics(plan) | capacities


def planned_statistics(plan: StepPlan) -> dict[str, float]:
    """Those statistics of a step's rows that a run logs, too."""
    return {
        name: value
        for name, value in plan.statistics.items()
        if (path := name.split("/"))[0] in plan.phases
        and (path[-1] in STATISTICS or path[-1].startswith(ROWS_OF))
    }
