"""Constants of predictions, fitted to published runs.

    runs --fit--> Rates, and one efficiency for each (system, chip)

Least squares of the logarithm of predicted over measured seconds. A few runs fit no model (a system short of memory,
say), so errors beyond `SPREAD` count by their size and not by their square. What runs cannot tell apart is decided by
priors: a constant is near what is known of it, and systems on one chip reach similar efficiencies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from jaxmllm.arrays import Floats
from jaxmllm.cluster.clusters import cluster_of
from jaxmllm.cluster.device_seconds import Device, Rates
from jaxmllm.cluster.text_run import TextRun, TextRunError, TextStep, text_step

SPREAD: Final = 0.03  # of predictions around what is measured, in logarithms
OF_SYSTEMS: Final = 0.07  # of the efficiencies of systems on one chip, likewise


class Prior(NamedTuple):
    """What is known of a constant without these runs: a value, and its spread in logarithms."""

    value: float
    spread: float


# In the order of `Rates`
PRIORS: Final = {
    "attention": Prior(
        0.6, 0.3
    ),  # FlashAttention-2 on an A100 against its products, arXiv 2307.08691
    "score_bytes": Prior(12, 0.5),  # each score written and read three times, in 2 bytes
    "traffic": Prior(2, 0.5),  # written once, read once
    "half_side": Prior(600, 1.0),
    "overlap": Prior(2, 0.3),
    "network": Prior(0.8, 0.3),
    "reduced": Prior(0.7, 0.5),
    "straggling": Prior(0.01, 1.0),
    "tensor": Prior(0.3, 0.7),
}
assert tuple(PRIORS) == tuple(field.name for field in fields(Rates))
LEAST_OVERLAP: Final = 1.0

Owner = tuple[str, str]  # system, chip


@dataclass(frozen=True)
class Published:
    """A run and how long its step took."""

    system: str
    chip: str
    model: str
    run: TextRun
    seconds: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Published:
        """From a JSON object. Raises `TextRunError`, or KeyError for a key that is missing."""
        system, chip, seconds = record["system"], record["chip"], record["seconds"]
        if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
            raise TextRunError(f"seconds {seconds!r} is no number above 0")
        return cls(system, chip, record.get("model", ""), TextRun.of(dict(record)), seconds)

    @property
    def owner(self) -> Owner:
        return self.system, self.chip

    def predicted(self, rates: Rates, efficiency: float) -> TextStep:
        return text_step(self.run, Device(cluster_of(self.chip), efficiency, rates))


@dataclass(frozen=True)
class Fit:
    """What runs say."""

    rates: Rates
    efficiencies: Mapping[Owner, float]  # each the best for its own runs
    usual: Mapping[Owner, float]  # likewise, drawn to those of other systems on the chip

    def expected(self, chip: str) -> float:
        """The efficiency to expect of a system that is not known: the median of the others on the chip, halfway to that
        of all systems, for the few of one chip say little. Of a chip without any, that of all systems."""
        of_all = statistics.median(self.usual.values())
        others = [share for (_, on), share in self.usual.items() if on == chip]
        return math.sqrt(statistics.median(others) * of_all) if others else of_all


def fit(runs: Sequence[Published]) -> Fit:
    """Constants and efficiencies from runs."""
    owners = sorted({run.owner for run in runs})
    chips = sorted({chip for _, chip in owners})
    constants, systems = len(PRIORS), len(owners)
    values = np.log([_shifted(name, prior.value) for name, prior in PRIORS.items()])
    spreads = np.array([prior.spread for prior in PRIORS.values()])

    def residuals(x: Floats) -> Floats:
        rates = _rates(x[:constants])
        own = dict(zip(owners, x[constants : constants + systems], strict=True))
        of_chip = dict(zip(chips, x[constants + systems :], strict=True))
        errors = [
            math.log(run.predicted(rates, math.exp(own[run.owner])).seconds / run.seconds)
            for run in runs
        ]
        return np.concatenate(
            [
                _bounded(np.array(errors) / SPREAD),
                (x[:constants] - values) / spreads,
                [(own[owner] - of_chip[owner[1]]) / OF_SYSTEMS for owner in owners],
            ]
        )

    start = np.concatenate([values, np.full(systems + len(chips), math.log(0.75))])
    solution = least_squares(residuals, start).x
    rates = _rates(solution[:constants])
    usual = dict(zip(owners, np.exp(solution[constants:]).tolist(), strict=False))
    efficiencies = {
        owner: _own_efficiency([run for run in runs if run.owner == owner], rates, usual[owner])
        for owner in owners
    }
    return Fit(rates, efficiencies, usual)


def _own_efficiency(runs: Sequence[Published], rates: Rates, start: float) -> float:
    """The efficiency that explains a system's runs best, each of them counting alike."""

    def residuals(x: Floats) -> Floats:
        share = math.exp(x[0])
        return np.array(
            [math.log(run.predicted(rates, share).seconds / run.seconds) for run in runs]
        )

    return math.exp(least_squares(residuals, [math.log(start)]).x[0])


def _rates(logarithms: Floats) -> Rates:
    numbers = dict(zip(PRIORS, np.exp(logarithms).tolist(), strict=True))
    return Rates(**(numbers | {"overlap": numbers["overlap"] + LEAST_OVERLAP}))


def _shifted(name: str, value: float) -> float:
    """The overlap counts from its least value, where nothing overlaps."""
    return value - LEAST_OVERLAP if name == "overlap" else value


def _bounded(z: Floats) -> Floats:
    """Residuals whose squares are z^2 where it is small, and 2 |z| where it is large."""
    return np.sign(z) * np.sqrt(2 * (np.sqrt(1 + z * z) - 1))


def difference(one: Rates, other: Rates) -> float:
    """The largest difference of two sets of constants, as a share."""
    return max(abs(a / b - 1) for a, b in zip(astuple(one), astuple(other), strict=True))
