"""Constants of predictions, fitted to published runs.

    runs --fit--> Rates, and one efficiency for each (system, chip)

The fit is a least squares of the logarithm of predicted over measured seconds. A few runs fit no
model (a system short of memory, say), so errors beyond `SPREAD` count by their size instead of
their square. Priors decide what runs cannot: a constant is near its known value, and systems on one
chip reach similar efficiencies.
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

SPREAD: Final = 0.03  # spread of predictions around measured times, in logarithms
OF_SYSTEMS: Final = 0.07  # spread of the efficiencies of systems on one chip, in logarithms


class Prior(NamedTuple):
    """What is known of a constant without these runs: a value, and its spread in logarithms."""

    value: float
    spread: float


# In the order of the fields of `Rates`
PRIORS: Final = {
    # FlashAttention-2 on an A100, relative to its matrix products (arXiv 2307.08691)
    "attention": Prior(0.6, 0.3),
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
    """A published run, and how long its step took."""

    system: str
    chip: str
    model: str
    run: TextRun
    seconds: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Published:
        """Read a run from a JSON object. Raises `TextRunError`, or KeyError for a missing key."""
        system = record["system"]
        chip = record["chip"]
        seconds = record["seconds"]
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
    """Constants and efficiencies fitted to runs."""

    rates: Rates
    efficiencies: Mapping[Owner, float]  # the best for the owner's own runs
    usual: Mapping[Owner, float]  # the same, drawn towards other systems on the chip

    def expected(self, chip: str) -> float:
        """The efficiency to expect of an unknown system: halfway, in logarithms, between the median
        of the systems on the chip and the median of all systems, because the few systems on one
        chip say little. For a chip without systems, it is the median of all."""
        overall_median = statistics.median(self.usual.values())
        chip_efficiencies = [
            share for (_, other_chip), share in self.usual.items() if other_chip == chip
        ]
        return (
            math.sqrt(statistics.median(chip_efficiencies) * overall_median)
            if chip_efficiencies
            else overall_median
        )


def fit(runs: Sequence[Published]) -> Fit:
    """Fit constants and efficiencies to runs."""
    owners = sorted({run.owner for run in runs})
    chips = sorted({chip for _, chip in owners})
    constants = len(PRIORS)
    systems = len(owners)
    values = np.log([_shifted(name, prior.value) for name, prior in PRIORS.items()])
    spreads = np.array([prior.spread for prior in PRIORS.values()])

    # x holds logarithms: constants, then efficiencies of owners, then the efficiencies of chips, to
    # which the priors draw the owners
    def residuals(x: Floats) -> Floats:
        """Errors of the runs, then distances from the priors of constants, then of efficiencies."""
        rates = _rates(x[:constants])
        log_by_owner = dict(zip(owners, x[constants : constants + systems], strict=True))
        log_by_chip = dict(zip(chips, x[constants + systems :], strict=True))
        errors = [
            math.log(run.predicted(rates, math.exp(log_by_owner[run.owner])).seconds / run.seconds)
            for run in runs
        ]
        return np.concatenate(
            [
                _bounded(np.array(errors) / SPREAD),
                (x[:constants] - values) / spreads,
                [(log_by_owner[owner] - log_by_chip[owner[1]]) / OF_SYSTEMS for owner in owners],
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
    """The efficiency that explains a system's runs best, with equal weights and no prior."""

    def residuals(x: Floats) -> Floats:
        share = math.exp(x[0])
        return np.array(
            [math.log(run.predicted(rates, share).seconds / run.seconds) for run in runs]
        )

    return math.exp(least_squares(residuals, [math.log(start)]).x[0])


def _rates(logarithms: Floats) -> Rates:
    """The constants whose fitted logarithms, in the order of `PRIORS`, are given."""
    numbers = dict(zip(PRIORS, np.exp(logarithms).tolist(), strict=True))
    return Rates(**(numbers | {"overlap": numbers["overlap"] + LEAST_OVERLAP}))


def _shifted(name: str, value: float) -> float:
    """The value whose logarithm is fitted: overlap counts from its least value, `LEAST_OVERLAP`, at
    which nothing overlaps."""
    return value - LEAST_OVERLAP if name == "overlap" else value


def _bounded(z: Floats) -> Floats:
    """Residuals whose squares are about z^2 where z is small, and 2 |z| where it is large."""
    return np.sign(z) * np.sqrt(2 * (np.sqrt(1 + z * z) - 1))


def difference(one: Rates, other: Rates) -> float:
    """The largest relative difference between two sets of constants."""
    return max(abs(a / b - 1) for a, b in zip(astuple(one), astuple(other), strict=True))
