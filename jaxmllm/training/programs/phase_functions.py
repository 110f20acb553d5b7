"""The functions that a run without stages compiles for the microbatches of a phase.

phased.py makes the programs that this list names, and cluster/ predicts their memory from it.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxmllm.phases import LANGUAGE
from jaxmllm.training.step_functions import KeptResiduals, Start, StepFunctions


class PhaseFunctions(NamedTuple):
    """Names of functions (`ProgramName.function`), in the order of a step; empty where a phase
    needs none."""

    forward: str = ""  # what another phase reads
    backward: str = (
        ""  # the loss and its gradients, or the gradients of what another phase has read
    )
    backward_kept: str = ""  # the same, from residuals that `forward` has left
    evaluate: str = ""  # the loss alone

    def backward_from(self, start: Start) -> str:
        """The name of the backward function that starts from `start`."""
        return self.backward_kept if isinstance(start, KeptResiduals) else self.backward

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are not empty."""
        return tuple(filter(None, self))


def phase_functions(functions: StepFunctions, phase: str, keeps: bool = False) -> PhaseFunctions:
    """The functions of a phase.

    Args:
      keeps: whether `forward` leaves residuals for the backward passes of some microbatches.
    """
    generators = functions.model.config.generators
    if phase in generators:
        return PhaseFunctions(backward="draw_loss_and_grad", evaluate="evaluate")
    if phase != LANGUAGE:
        trained = bool(functions.trainable_of(phase))
        return PhaseFunctions(
            forward="encode",
            backward="encode_grad" * trained,
            backward_kept="encode_grad_kept" * (trained and keeps),
        )
    generates = bool(generators)
    return PhaseFunctions(
        forward="language_states" * generates,
        backward="language_loss_and_grad" * (functions.trains_language or not generates),
        backward_kept="language_loss_and_grad_kept" * (functions.trains_states and keeps),
        evaluate="evaluate" * functions.learns_text,
    )
