"""What the sieves of `jaxmllm plan` miss: the layout that they choose, next to the best of all
legal layouts.

    python -m benchmarks.planner --kinds optimum

An omni model of 2B on 8 and on 16 H100s, with 32 generated examples per device and three mixes of
tasks; stages and mesh are open. Every layout that is legal and fits in closed form is also planned
and simulated as a whole step. The JSON's `rows`:

    kind optimum        `devices`, `mix`, `layouts` (simulated whole), `over_memory` and `failed`
                        (those that then do not fit, or whose stages cannot be planned), `best` of
                        them with `best_s`; `chosen` by the command, `chosen_s` and `over_best` (1
                        if it is the best; the command counts times within 1 % as equal and then
                        prefers fewer axes), `fastest_over_best` (fastest of the layouts that the
                        command planned whole)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.omni import omni_config
from benchmarks.pipeline_real import MIXES
from jaxmllm.cluster.clusters import CLUSTERS
from jaxmllm.cluster.search.layouts import PlannedLayout
from jaxmllm.cluster.search.sieves import Planner
from jaxmllm.config.schema import ConfigError
from jaxmllm.tools.output import print_table
from jaxmllm.tools.plan_inputs import make_planner
from sharding.pipeline.ring import PipelineError

OPTIMUM: Final = "optimum"
MODEL: Final = "2B"
DEVICES: Final = (8, 16)
PER_DEVICE: Final = 32
COLUMNS: Final = (
    "devices",
    "mix",
    "layouts",
    "over_memory",
    "failed",
    "best",
    "best_s",
    "chosen",
    "over_best",
    "fastest_over_best",
)


def optimum_rows(
    seed: int,
    model: str = MODEL,
    devices: Sequence[int] = DEVICES,
    mixes: Sequence[str] = tuple(MIXES),
    **sections: Any,
) -> list[dict[str, Any]]:
    """A row per number of devices and mix.

    Args:
      model: a model of `omni_config`; `sections` are sections for that config.
    """
    rows = []
    for device_count in devices:
        for mix in mixes:
            data = {"batch_size": PER_DEVICE * device_count}
            config = omni_config(model, data=data, **sections)
            planner = make_planner(config, CLUSTERS["h100"], device_count, seed, mix=MIXES[mix])
            rows.append(
                {"kind": OPTIMUM, "devices": device_count, "mix": mix}
                | _compared(planner, device_count)
            )
            print(
                f"{device_count} devices, {mix}: {rows[-1]['over_best']:.3f} of the best",
                flush=True,
            )
    print_table(
        "chosen, and best of all", COLUMNS, [[row[name] for name in COLUMNS] for row in rows]
    )
    return rows


def _compared(planner: Planner, devices: int) -> dict[str, Any]:
    """Figures of the planner's choice, and of all layouts that its closed form lets through."""
    result = planner.search(devices)
    chosen_layout = result.ranked[0]
    fastest_seconds = min(layout.seconds for layout in result.ranked)
    fitting_layouts: list[PlannedLayout] = []
    over_memory = failure_count = 0
    for estimate in result.estimates:
        try:
            layout = planner.whole.planned(estimate)
        except (ConfigError, PipelineError):
            failure_count += 1
            continue
        if layout.peak.bytes <= planner.budget:
            fitting_layouts.append(layout)
        else:
            over_memory += 1
    best_layout = min(fitting_layouts, key=lambda layout: layout.seconds)
    return {
        "layouts": len(result.estimates),
        "over_memory": over_memory,
        "failed": failure_count,
        "best": best_layout.choice.words,
        "best_s": best_layout.seconds,
        "chosen": chosen_layout.choice.words,
        "chosen_s": chosen_layout.seconds,
        "over_best": chosen_layout.seconds / best_layout.seconds,
        "fastest_over_best": fastest_seconds / best_layout.seconds,
    }
