"""How large batches must be for all of them to split devices between phases in the same way, on
loads of several kinds.

    rows bmin    of log-normal loads, of the generator's three mixes, and of the files of a folder

A load is the FLOPs of an example in one phase, forward and backward. Where lengths are real or
generated, the model is the generator's (8B and two towers of 0.6B, jaxmllm/tools/workload.py).
Every batch is drawn independently, examples of files with replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.pipeline_real import MIXES
from jaxmllm.arrays import Floats
from jaxmllm.balance.costs.flops import ItemCost, phase_flops
from jaxmllm.balance.records import BatchItems
from jaxmllm.cluster.profile import best_split, enough, smallest_batch, split_time
from jaxmllm.config.read import load_config
from jaxmllm.phases import LANGUAGE, component_names
from jaxmllm.setup.prepare import prepare
from jaxmllm.tools.workload import MODEL, PHASES, generate
from sharding.mesh import abstract_mesh

BMIN: Final = "bmin"
# Load of the first phases over the load of the last one; the second ratio is near a tie between
# splits of 8 : 8 and 9 : 7
RATIOS: Final = (1.29, 1.135)
SIGMAS: Final = (1.0, 0.7)
DEVICES: Final = 16
# Like Entrain's examples (arXiv 2605.27918): the first phases get one of 8 devices, half of them,
# or all but one
PRICED: Final = ((1, 7), (4, 4), (7, 1))
PRICED_ON: Final = 65_536  # examples whose loads price these splits
CONFIG: Final = Path(__file__).parents[1] / "configs" / "real-small.yaml"

Draw = Callable[[int], Floats]


def batch_rows(seed: int, data: Path | None = None) -> list[dict[str, Any]]:
    """The rows of every kind of loads, one for each size of growing batches.

    Args:
      data: a folder with the files that configs/real-small.yaml reads, or None.
    """
    # The files are read before anything else, because they may be invalid
    files = None if data is None else _files(data, seed)
    rows: list[dict[str, Any]] = []
    for ratio in RATIOS:
        rows += _rows(f"log-normal, {ratio} : 1", _lognormal(ratio, seed), {"ratio": ratio})
    for name, mix in MIXES.items():
        rows += _rows(f"generated, {name}", _generated(mix, seed), {"mix": name})
    if files is not None:
        rows += _rows("files", files, {"mix": "files"})
    return rows


def _rows(loads: str, draw: Draw, told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of one kind of loads; `told` are further keys of each row."""
    profiles = smallest_batch(draw, DEVICES)
    prices = bad_splits(draw(PRICED_ON))
    enough_profile = enough(profiles)
    for profile in profiles:
        print(f"{loads}: {profile.line}")
        yield {
            "kind": BMIN,
            "loads": loads,
            **told,
            "settled": profile.settled,
            **vars(profile),
        } | {
            "enough": profile is enough_profile,
            "bad_splits": prices,
        }
    price_text = ", ".join(f"{split} takes {price:.2f}x" for split, price in prices.items())
    print(f"{loads}: of 8 devices, first phases against the last: {price_text}")


def bad_splits(loads: Floats) -> dict[str, float]:
    """Time of the `PRICED` splits of devices between all phases but the last and the last phase,
    over the time of the best split."""
    phase_loads = [float(loads[:-1].sum()), float(loads[-1])]
    best_time = split_time(phase_loads, best_split(phase_loads, sum(PRICED[0])))
    return {
        " : ".join(map(str, split)): split_time(phase_loads, split) / best_time for split in PRICED
    }


def _lognormal(ratio: float, seed: int) -> Draw:
    """Draws of log-normal loads of mean 1, with the first phases' load multiplied by `ratio`."""
    random = np.random.default_rng(seed)

    def draw(samples: int) -> Floats:
        early_loads, last_loads = (
            random.lognormal(-(sigma**2) / 2, sigma, samples) for sigma in SIGMAS
        )
        return np.array([ratio * early_loads.sum(), last_loads.sum()])

    return draw


def _generated(mix: Mapping[str, float], seed: int) -> Draw:
    """Draws of generated batches, each with a seed of its own; phases without load are left out."""
    seeds = iter(range(1 << 30))

    def draw(samples: int) -> Floats:
        loads = example_loads(generate([seed, next(seeds)], samples, mix)).sum(axis=0)
        return loads[loads > 0]

    return draw


def _files(folder: Path, seed: int) -> Draw:
    """Draws of batches of a folder's examples, with replacement."""
    config = load_config(CONFIG, [f"data.root={folder}"])
    sizes = config.mesh.model_dump()
    corpus = prepare(config, abstract_mesh(sizes, int(np.prod([*sizes.values()])))).corpus
    loads = example_loads(corpus.gather(np.arange(len(corpus))))
    random = np.random.default_rng(seed)
    return lambda samples: loads[random.integers(0, len(loads), samples)].sum(axis=0)


def example_loads(items: BatchItems) -> Floats:
    """FLOPs of every example in each phase, language last: [B, phases]."""
    trained = dict.fromkeys(component_names(PHASES), 1)
    phases = [*(name for name in PHASES if name != LANGUAGE), LANGUAGE]
    loads = np.zeros((len(items.examples), len(phases)))
    for column, name in enumerate(phases):
        phase_items = items.phases[name]
        cost: ItemCost = phase_flops(MODEL, name, trained)
        np.add.at(loads[:, column], phase_items.example, cost.of(phase_items.length.astype(float)))
    return loads
