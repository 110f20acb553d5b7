"""The programs of a generator: what they hold in addition to what the programs of any tower hold.

Vectors of the time modulate every slot in float32, and their gradients need the values that they
modulate.
With two streams, conditions run through their own once more in the backward pass, and nothing of
them is kept (models/streams.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jaxmllm.cluster.phase_program import (
    GAPS,
    WAITING,
    WIDE,
    PhaseProgram,
    Weight,
)
from jaxmllm.cluster.sends import SUM_BYTES

if TYPE_CHECKING:
    from jaxmllm.models.mllm import MLLM
    from jaxmllm.training.programs.base import ProgramName

# Values of a slot that a layer's backward pass has in memory at once, by remat: multiples of (D, F)
DRAWING: Final = {"full": (17.25, 3.75), "dots": (19.0, 3.75), "none": (18.75, 3.75)}
ATTENDING: Final = (17.5, 10.0)  # the same while its attention runs: multiples of (D, Q)
SECOND_ATTENTION: Final = (2.5, 5.0)  # added for a second attention: multiples of (D, Q)
# Multiples of D among those that gradients of vectors take, which frozen layers do not compute
OF_VECTORS: Final = 10
# Multiples of D added for two streams, by remat: rows that conditions are read from and written to.
# With `full` nothing of the patches is kept, and the values of a whole row of conditions are added,
# unless layers are frozen
OF_STREAMS: Final = {"full": 13.0, "dots": 2.0, "none": 2.0}
DRAWING_FORWARD: Final = (1.5, 1.0)  # the same as `DRAWING` for a forward pass
SECOND_FORWARD: Final = 3.0  # multiples of D added to it for a second stream or attention
# Multiples of D that a layer keeps where nothing is computed again, in addition to 6 F, and those
# added for a second attention
KEPT: Final = 37.5
SECOND_KEPT: Final = 16


class DrawingProgram(PhaseProgram):
    """One program of a generator: `draw_loss_and_grad` or `evaluate`."""

    def __init__(self, model: MLLM, name: ProgramName):
        super().__init__(model, name)
        self.second = self.shapes.attentions - 1

    @property
    def kept_values(self) -> float:
        remat = self.component.settings.remat
        if remat == "full":
            return self.width
        if remat == "none":
            return 6 * self.mlp + (KEPT + SECOND_KEPT * self.second) * self.width
        attention = self.queries + WIDE / self.itemsize * self.queries / self.shapes.head_size
        of_name = {
            "attention": (1 + self.second) * attention,
            # Keys and values of conditions are computed again
            "projections": (1 + self.second) * (self.queries + self.width) + 2 * self.keys,
            "mlp": self.mlp + self.width,  # the gradient of its gate reads its output
        }
        names = ("projections", "mlp") if remat == "dots" else remat
        return self.width + sum(of_name[name] for name in names)

    def _gathered(self, weight: Weight) -> float:
        """Bytes of a layer's matrix, once gathered."""
        return (WIDE if weight.wide else self.itemsize) * weight.numbers

    def _layer(self) -> float:
        remat = self.component.settings.remat
        remat = remat if isinstance(remat, str) else "full"
        width, mlp = DRAWING[remat]
        trained = [weight for weight in self.weights if weight.layers and weight.trained]
        second = OF_STREAMS[remat if trained else "dots"] * (self.shapes.streams - 1)
        added_width = second - OF_VECTORS * (not trained)
        attending, of_queries = ATTENDING
        values = max(
            (added_width + width) * self.width + mlp * self.mlp,
            (added_width + attending) * self.width + of_queries * self.queries,
        )
        beside, queries = SECOND_ATTENTION
        values += self.second * (beside * self.width + queries * self.queries)
        # Gradients that are not scattered wait as a whole until they are added
        gradients = sum(weight.numbers * (WAITING if weight.parts > 1 else 1) for weight in trained)
        keys = 0.0
        if self.layout.parts > 1:  # keys and values of the whole row, and their gradients
            keys = 2 * 2 * self.slots * self.layout.parts * self.keys
        return GAPS * (self.slots * values + SUM_BYTES * gradients) + keys

    def _bytes_outside_layers(self) -> float:
        """Bytes outside of layers: gradients, gathered parameters that compute in float32, and
        states with their gradients."""
        outside = [weight for weight in self.weights if not weight.layers]
        trained = [weight for weight in (*outside, *self.projector_weights) if weight.trained]
        gradients = SUM_BYTES * sum(weight.numbers for weight in trained)
        wide = [weight.numbers for weight in outside if weight.wide and weight.parts > 1]
        return gradients + WIDE * sum(wide) + 2 * self.slots * self._language_width

    def forward(self, keeps: bool) -> dict[str, float]:
        width, mlp = DRAWING_FORWARD
        width += SECOND_FORWARD * (self.second + self.shapes.streams - 1)
        values = width * self.width + mlp * self.mlp
        layer = [
            self._gathered(weight) for weight in self.weights if weight.layers and weight.parts > 1
        ]
        return {"layer forward": self.turned + self.slots * values + max(layer, default=0.0)}


def phase_program(model: MLLM, name: ProgramName) -> PhaseProgram:
    """The record of one program, of any phase."""
    kind = DrawingProgram if model.phases[name.subject].generates else PhaseProgram
    return kind(model, name)
