"""Bytes that programs take for themselves while they run, at named moments, from abstract shapes
and shardings; nothing is compiled.

    model, ProgramName --program_temporaries--> Temporaries      the largest moment decides
    device_peak.py adds what is held between programs

The counts are in phase_program.py, and those of a generator in drawing_program.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxmllm.cluster.drawing_program import phase_program
from jaxmllm.cluster.phase_program import FORWARD, Temporaries
from jaxmllm.cluster.sends import BACKWARD

if TYPE_CHECKING:
    from jaxmllm.models.mllm import MLLM
    from jaxmllm.training.programs.base import ProgramName, Programs
    from jaxmllm.training.programs.phased import PhasedPrograms
    from jaxmllm.training.programs.staged import StagedPrograms


def job_temporaries(programs: Programs, name: ProgramName) -> Temporaries:
    """Bytes that one of `programs.jobs` takes for itself, also where a model is in stages."""
    if name.function == "gradients":
        return _pipeline_temporaries(programs)  # type: ignore[arg-type]  # no other programs have this one
    keeps = bool(programs.kept_residuals.get(name.subject))
    return program_temporaries(programs.functions.model, name, keeps)


def residual_bytes(model: MLLM, name: ProgramName) -> int:
    """Bytes that `encode` or `language_states` leaves on a device for the backward pass of a
    microbatch: residuals, or features of a frozen tower.

    Args:
      name: of one of these programs, with capacity and span of its rows.
    """
    return round(phase_program(model, name).residuals())


def largest_residuals(programs: PhasedPrograms, phase: str) -> int:
    """`residual_bytes` of a phase of two passes, for the row class that leaves most."""
    from jaxmllm.training.programs.base import ProgramName

    forward = programs.functions_of(phase).forward
    classes = programs.spec.phases[phase].classes
    names = (ProgramName(forward, phase, *row_class) for row_class in classes)
    return max(residual_bytes(programs.functions.model, name) for name in names)


def _pipeline_temporaries(programs: StagedPrograms) -> Temporaries:
    """Bytes of a pipeline at its moments: what the loop over its schedule carries, one operation,
    and a copy of boxes of backward operations, because a branch writes into its own. Copied are all
    boxes that are filled from slots, or the largest box if that is more."""
    from jaxmllm.training.programs.base import ProgramName
    from sharding.pipeline.graph import Pool

    held = programs.held
    model = programs.functions.model
    boxes = {key: size for key, size in held.boxes.items() if key[0] == Pool.RESIDUAL}
    filled = sum(size for key, size in boxes.items() if key in held.pools)
    copied = max(filled, max(boxes.values(), default=0))
    carried = held.total + programs.held_sums + copied
    moments: dict[str, int] = {}
    for phase, spec in programs.spec.phases.items():
        for capacity, span in spec.classes:
            name = ProgramName("gradients", phase, capacity, span)
            operations = phase_program(model, name).staged()
            for operation, size in operations.items():
                moment = f"{phase} {operation}"
                moments[moment] = max(moments.get(moment, 0), round(carried + size))
    return Temporaries(moments)


def program_temporaries(model: MLLM, name: ProgramName, keeps: bool = False) -> Temporaries:
    """Bytes that a program of a phase takes for itself; programs of no phase take next to nothing.

    Args:
      model: on any mesh, which may be abstract.
      name: of `FORWARD` or `BACKWARD`, with capacity and span of its rows.
      keeps: whether a forward pass leaves residuals. They are in its results, and so are other
        values that it works on.
    """
    if name.function not in (*FORWARD, *BACKWARD) or not name.subject:
        return Temporaries({})
    return phase_program(model, name).temporaries(keeps)
