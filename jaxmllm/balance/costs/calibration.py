"""The file that `balance.calibration` names: measured times of every phase's rows.

    seconds of a row of C slots = row + slot * C + linear * sum of l + quadratic * sum of squares

The sums are over the row's items of l slots. The square of an item is l**2, or less where layers
have windows (`ItemCost.mean_squares` of its FLOPs). tools/calibrate.py writes the file,
setup/sizing.py reads it for the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from jaxmllm.balance.costs.flops import ItemCost, PhaseTime
from jaxmllm.config.schema import ConfigError, Section

PER_SECOND = 10**15  # femtoseconds; a fast chip does about one FLOP in each
REMEDY = "make it with jaxmllm calibrate --config .. --out PATH, or set balance.calibration to null"

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Fill:
    """Content of a made-up row with `capacity` slots on each of `span` ranks: `items` items of
    `length` slots each."""

    capacity: int
    items: int
    length: int
    span: int = 1

    def used(self, flops: ItemCost) -> tuple[float, float]:
        """(filled slots, sum of the squares of items with these FLOPs): one rank's part of each."""
        squares = self.items * flops.mean_squares(self.length)
        return self.items * self.length / self.span, squares / self.span


class Coefficients(Section):
    """Seconds of a row of C slots: row + slot * C + linear * sum of l + quadratic * sum of
    squares."""

    row: Seconds
    slot: Seconds
    linear: Seconds
    quadratic: Seconds
    residual: Seconds  # root mean square of the relative errors of the fit

    def seconds(self, fill: Fill, flops: ItemCost) -> float:
        """Seconds of a row with this fill, whose items have these FLOPs."""
        slots, squares = fill.used(flops)
        return self.row + self.slot * fill.capacity + self.linear * slots + self.quadratic * squares

    def time(self, flops: ItemCost) -> PhaseTime:
        """Times for the planner of items with these FLOPs, in femtoseconds: the same on every host,
        because the file's decimal figures are scaled."""
        row, slot, linear, quadratic = (
            PER_SECOND * Decimal(repr(seconds))
            for seconds in (self.row, self.slot, self.linear, self.quadratic)
        )
        return PhaseTime(flops.measured(slot + linear, quadratic), int(row.to_integral_value()))


class PhaseCalibration(Section):
    dtype: str  # of the computation
    capacities: tuple[int, ...]  # of the rows that were timed
    flops: ItemCost  # of an item: identifies the model and what of it is trained
    forward: Coefficients
    training: Coefficients  # forward and backward: what the planner reads

    @property
    def time(self) -> PhaseTime:
        """The times that the planner balances by."""
        return self.training.time(self.flops)


class Calibration(Section):
    """The content of the file."""

    package: str
    jax: str
    jaxlib: str
    platform: str
    device: str
    mesh: dict[str, int]
    date: str
    phases: dict[str, PhaseCalibration]

    def differences(
        self,
        device: str | None,
        flops: Mapping[str, ItemCost],
        dtypes: Mapping[str, str] | None = None,
        mesh: Mapping[str, int] | None = None,
    ) -> list[str]:
        """How a run on this kind of device differs from what was measured, in words.

        Args:
          device: kind of device; None: not known.
          flops: FLOPs of an item, by phase.
          dtypes: dtype of the computation, by phase; None: not known.
          mesh: number of devices along each axis; None: not known.
        """
        differences = []
        if device is not None and device != self.device:
            differences.append(f"was measured on {self.device!r}, but this run is on {device!r}")
        if mesh is not None and _row_axes(mesh) != (measured_split := _row_axes(self.mesh)):
            differences.append(
                f"was measured with rows split by {measured_split or 'nothing'}, but this run's are by "
                f"{_row_axes(mesh) or 'nothing'}"
            )
        for phase, dtype in (dtypes or {}).items():
            if dtype != (measured := self.phases[phase].dtype):
                differences.append(
                    f"was measured in {measured}, but phase {phase} computes in {dtype}"
                )
        changed_phases = [
            phase for phase, cost in flops.items() if cost != self.phases[phase].flops
        ]
        if changed_phases:
            differences.append(
                f"was measured with another model or other frozen components (phases {', '.join(changed_phases)})"
            )
        return differences


def _row_axes(mesh: Mapping[str, int]) -> dict[str, int]:
    """The axes along which several devices compute the same layers of a row together; only these
    change how long a row takes."""
    return {axis: size for axis, size in mesh.items() if size > 1 and axis in ("context", "tensor")}


def load_calibration(path: str | Path, phases: Iterable[str]) -> Calibration:
    """Read a calibration, which must include these phases.

    Raises:
      ConfigError: the file is absent or ill-formed, lacks a phase, or has no cost for a phase's
        items.
    """
    where = f"balance.calibration: {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise ConfigError(f"{where} cannot be read ({reason}); {REMEDY}") from error
    try:
        calibration = Calibration.model_validate_json(text)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}" for item in error.errors()
        ]
        raise ConfigError(f"{where} is no calibration: {'; '.join(problems)}; {REMEDY}") from error
    for phase in phases:
        if phase not in calibration.phases:
            has = ", ".join(calibration.phases) or "none"
            raise ConfigError(f"{where} lacks phases.{phase} (it has: {has}); {REMEDY}")
        measured = calibration.phases[phase].time
        if not measured.item.linear and not measured.item.quadratic:
            raise ConfigError(
                f"{where}: phases.{phase}.training: slot, linear and quadratic are all zero, so that items would cost "
                f"nothing; {REMEDY}"
            )
    return calibration
