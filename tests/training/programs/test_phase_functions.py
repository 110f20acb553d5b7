"""The programs that a phase lists are those that a run compiles for it, in the same order."""

from __future__ import annotations

import pytest

from tests.cluster.programs import tiny

ENCODER = ("encode", "encode_grad")
KEPT = (*ENCODER, "encode_grad_kept")
DECODER = ("language_loss_and_grad", "evaluate")


@pytest.mark.parametrize(
    ("frozen", "kept", "vision"),
    [
        ((), 0, ENCODER),
        ((), 2, KEPT),
        # The projector is trained, from features that are kept in any case
        (("vision",), 2, ENCODER),
        (("vision", "projector.vision"), 2, ENCODER[:1]),
    ],
)
def test_a_phase_has_the_programs_that_it_needs(frozen, kept, vision):
    residuals = {"vision": {"kept_residuals": kept}, "audio": {"kept_residuals": 0}}
    _, programs = tiny(mesh={"data": 1}, devices=1, frozen=frozen, kept=residuals)
    expected = {"vision": vision, "audio": ENCODER, "language": DECODER}
    jobs = [name for name in programs.jobs if name.capacity]
    for phase, names in expected.items():
        assert programs.functions_of(phase).names == names
        assert tuple(name.function for name in jobs if name.subject == phase) == names
