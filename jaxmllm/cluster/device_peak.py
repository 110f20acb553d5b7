"""The most that a device holds at one time in a step: what it holds between programs, and the
largest program.

programs --programs_peak--> Peak      estimated, or with temporary memory as a compiler reports it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from jaxmllm.cluster.held import device_bytes, resident
from jaxmllm.cluster.temporaries import Temporaries, job_temporaries, largest_residuals

if TYPE_CHECKING:
    from jaxmllm.training.programs.base import ProgramName, Programs
    from jaxmllm.training.programs.phased import PhasedPrograms

COMPILED: Final = "compiled"
Sizes = dict["ProgramName", "Temporaries | int"]


@dataclass(frozen=True)
class Peak:
    """The most that a device holds at one time in a step."""

    parts: Mapping[str, int]  # bytes by what they are; the last one is the program's own
    program: ProgramName
    moment: str  # of the program

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def compiled(self) -> bool:
        """Whether a compiler reported what the program takes."""
        return self.moment == COMPILED


def step_peak(
    held: Mapping[str, int], temporaries: Mapping[ProgramName, Temporaries | int]
) -> Peak:
    """The peak of a step over its programs.

    Args:
      held: bytes that are held between programs, by what they are.
      temporaries: of the step's programs: estimates, or bytes that a compiler reports (their moment
        is "compiled").
    """

    def total(name: ProgramName) -> int:
        of_program = temporaries[name]
        return of_program if isinstance(of_program, int) else of_program.total

    largest = max(temporaries, key=total)
    of_program = temporaries[largest]
    moment = of_program.moment if isinstance(of_program, Temporaries) else COMPILED
    return Peak({**held, "program": total(largest)}, largest, moment)


def programs_peak(
    programs: Programs,
    compiled: Mapping[ProgramName, int] | None = None,
    microbatches: Mapping[str, int] | None = None,
) -> Peak:
    """The peak of a step of these programs, which need not be compiled; only programs of stages are
    traced.

    Args:
      compiled: temporary bytes by program, as a compiler reports them, in place of estimates.
      microbatches: of a step, by phase, 1 where not given: the features of a frozen tower are kept
        for all of them.
    """
    from jaxmllm.training.programs.phased import PhasedPrograms

    if isinstance(programs, PhasedPrograms):
        names = _phased_results(programs)
        kept_bytes = _kept(programs, microbatches or {})
    else:
        names = _traced_results(programs)
        kept_bytes = 0
    totals: Sizes = {}
    for name, fresh in names:
        if compiled and name in compiled:
            totals[name] = compiled[name] + fresh
        else:
            # A program without temporaries may still have new results.
            moments = job_temporaries(programs, name).moments or {"results": 0}
            totals[name] = Temporaries({key: size + fresh for key, size in moments.items()})
    # Programs without an estimate, such as hops of an exchange, count if a compiler reports them.
    for name, size in (compiled or {}).items():
        totals.setdefault(name, size)
    return step_peak({**asdict(resident(programs)), "kept for backward": kept_bytes}, totals)


def _phased_results(programs: PhasedPrograms) -> Iterator[tuple[ProgramName, int]]:
    """The programs of a step that take memory of their own, each with the bytes of results that do
    not reuse an argument's memory."""
    from jaxmllm.training.programs.base import ProgramName

    yield ProgramName("update"), 0
    if unreduced := _unreduced_bytes(programs):
        yield ProgramName("add_replicas"), unreduced
    for phase, spec in programs.spec.phases.items():
        names = programs.functions_of(phase).names
        for capacity, span in spec.classes:
            yield from ((ProgramName(name, phase, capacity, span), 0) for name in names)


def _unreduced_bytes(programs: PhasedPrograms) -> int:
    """Bytes of gradients that are reduced between devices once per step: at that time they are held
    in addition to their sums."""
    import jax

    trees = map(jax.tree.leaves, (programs.trained, programs.accumulators))
    totals: list[Any] = [
        total
        for total, sums in zip(*trees, strict=True)
        if (total.shape, total.dtype) != (sums.shape, sums.dtype)
    ]
    return device_bytes(totals)


def _kept(programs: PhasedPrograms, microbatches: Mapping[str, int]) -> int:
    """Bytes that forward passes leave for the backward passes of a step's microbatches."""
    functions = programs.functions
    total = 0
    for phase in functions.model.config.two_passes:
        kept_microbatches = programs.kept_residuals.get(phase, 0)
        if functions.keeps_features(phase):
            kept_microbatches = microbatches.get(phase, 1)
        total += kept_microbatches * largest_residuals(programs, phase)
    return total


def _traced_results(programs: Programs) -> Iterator[tuple[ProgramName, int]]:
    """The result of `_phased_results` for any programs, from their jobs."""
    from jaxmllm.setup.ahead import OUTSIDE_STEPS

    for name, job in programs.jobs.items():
        if name.function not in OUTSIDE_STEPS:
            donated = device_bytes([job.arguments[index] for index in job.donated])
            yield name, device_bytes(job.result) - donated
