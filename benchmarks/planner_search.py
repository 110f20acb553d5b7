"""The search of `jaxmllm plan` at scale.

    python -m benchmarks.planner --kinds scale

Searches for configs/omni-84b.yaml with 32 generated examples per device, on 2,560 and on 512 H100s.
Each search runs twice. The JSON's `rows`:

    kind scale          `devices`, `considered` (layouts), `meshes` (of these layouts), `rejected`
                        (by reason), `planned` (as whole steps), `cpu_seconds` (of one search with
                        its start), `peak_rss` (bytes, of the process so far), `same` (whether the
                        second search found the same), `chosen` and its `step_s`
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import Any, Final

from jaxmllm.cluster.clusters import CLUSTERS
from jaxmllm.cluster.search.layouts import SearchResult
from jaxmllm.config.read import load_config
from jaxmllm.tools.output import print_table
from jaxmllm.tools.plan_inputs import make_planner

SCALE: Final = "scale"
MODEL: Final = "configs/omni-84b.yaml"
DEVICES: Final = (2560, 512)
PER_DEVICE: Final = 32
COLUMNS: Final = (
    "devices",
    "considered",
    "meshes",
    "planned",
    "cpu_seconds",
    "peak_rss",
    "same",
    "chosen",
    "step_s",
)


def scale_rows(seed: int, devices: Sequence[int] = DEVICES) -> list[dict[str, Any]]:
    """A row per number of devices."""
    rows = [_row(device_count, seed) for device_count in devices]
    print_table("the search", COLUMNS, [[row[column] for column in COLUMNS] for row in rows])
    return rows


def _row(devices: int, seed: int) -> dict[str, Any]:
    """The row of one number of devices; searches twice, to compare the results."""
    start = time.process_time()
    result = _search(devices, seed)
    seconds = time.process_time() - start
    best_layout = result.ranked[0]
    return {
        "kind": SCALE,
        "devices": devices,
        "considered": result.considered,
        "meshes": result.meshes,
        "rejected": dict(result.rejected),
        "planned": len(result.ranked) + len(result.struck),
        "cpu_seconds": seconds,
        "peak_rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "same": _told(result) == _told(_search(devices, seed)),
        "chosen": best_layout.choice.words,
        "step_s": best_layout.seconds,
    }


def _search(devices: int, seed: int) -> SearchResult:
    config = load_config(MODEL, [f"data.batch_size={PER_DEVICE * devices}"])
    return make_planner(config, CLUSTERS["h100"], devices, seed).search(devices)


def _told(result: SearchResult) -> list[tuple[str, float, int]]:
    return [(layout.choice.words, layout.seconds, layout.peak.bytes) for layout in result.ranked]
