"""Lines of the experts of a decoder. Either each matrix of each expert has a tensor of its own, or
all experts of a layer share two tensors, one of them for the first two matrices of each expert,
with axes in one of two orders."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxmllm.families.family import Shapes, Variant

MLP = "layers.{layer}.mlp"
ROUTER = {"layers.router.matrix": f"{MLP}.gate.weight: e d -> layer d e"}
APART = {
    "layers.mlp.gate": f"{MLP}.experts.{{expert}}.gate_proj.weight: f d -> layer expert d f",
    "layers.mlp.up": f"{MLP}.experts.{{expert}}.up_proj.weight: f d -> layer expert d f",
    "layers.mlp.down": f"{MLP}.experts.{{expert}}.down_proj.weight: d f -> layer expert f d",
}
INPUTS_FIRST = {  # as Qwen3-VL-MoE is published
    "layers.mlp.gate": f"{MLP}.experts.gate_up_proj[0/2, axis 2]: e d f -> layer e d f",
    "layers.mlp.up": f"{MLP}.experts.gate_up_proj[1/2, axis 2]: e d f -> layer e d f",
    "layers.mlp.down": f"{MLP}.experts.down_proj: e f d -> layer e f d",
}
OUTPUTS_FIRST = {  # as transformers 5 has all experts in memory
    "layers.mlp.gate": f"{MLP}.experts.gate_up_proj[0/2, axis 1]: e f d -> layer e d f",
    "layers.mlp.up": f"{MLP}.experts.gate_up_proj[1/2, axis 1]: e f d -> layer e d f",
    "layers.mlp.down": f"{MLP}.experts.down_proj: e d f -> layer e f d",
}


def expert_variants() -> tuple[Variant, ...]:
    """Variants for all forms in which a folder may have experts, whichever is its family's own."""
    fits = {"apart": APART, "inputs": INPUTS_FIRST, "outputs": OUTPUTS_FIRST}
    return tuple(Variant(lines, partial(_has_expert_form, form)) for form, lines in fits.items())


def _has_expert_form(form: str, section: dict[str, Any], shapes: Shapes) -> bool:
    """Whether the first layer has experts in this form. Square matrices fit both orders: one of the
    two shared tensors may have them, but not both."""
    experts = f"{MLP}.experts".format(layer=0)
    if form == "apart":
        return f"{experts}.0.down_proj.weight" in shapes
    count = section["experts"]["count"]
    width = section["width"]
    mlp_width = section["mlp_width"]
    expected = {"gate_up_proj": (width, 2 * mlp_width), "down_proj": (mlp_width, width)}
    order = 1 if form == "inputs" else -1
    return all(
        shapes.get(f"{experts}.{name}") == (count, *sides[::order])
        for name, sides in expected.items()
    )
