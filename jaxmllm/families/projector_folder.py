"""A projector as a folder of its own, for use where the exported parts are composed elsewhere.

config.json         what the projector is: `group` neighbouring features of a tower -> one vector of the decoder
model.safetensors   linear_1, linear_2, or linear alone: weight [out, in] and bias [out]; norm before them

For a tower with `deepstack_layers`, config.json lists these, and each has a deepstack.N.linear_1
and linear_2 of its own, after a deepstack.N.norm of the features of a group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from jaxmllm.config.schema import Gelu, ProjectorShapes
from jaxmllm.families.folder_config import CONFIG_JSON
from jaxmllm.families.lines import Line
from jaxmllm.families.model_folder import SINGLE
from jaxmllm.families.weight_files import write_tensors

ACTIVATIONS: dict[Gelu, str] = {"tanh": "gelu_pytorch_tanh", "exact": "gelu"}
DEEPSTACK = "deepstack.{layer}"
LINES = {
    "norm.scale": "norm.weight: i -> i",
    "norm.bias": "norm.bias: i -> i",
    "mlp.up": "linear_1.weight: f i -> i f",
    "mlp.up_bias": "linear_1.bias: f -> f",
    "mlp.down": "linear_2.weight: d f -> f d",
    "mlp.down_bias": "linear_2.bias: d -> d",
    "linear": "linear.weight: d i -> i d",
    "linear_bias": "linear.bias: d -> d",
    "deepstack.norm.scale": f"{DEEPSTACK}.norm.weight: i -> layer i",
    "deepstack.norm.bias": f"{DEEPSTACK}.norm.bias: i -> layer i",
    "deepstack.mlp.up": f"{DEEPSTACK}.linear_1.weight: f i -> layer i f",
    "deepstack.mlp.up_bias": f"{DEEPSTACK}.linear_1.bias: f -> layer f",
    "deepstack.mlp.down": f"{DEEPSTACK}.linear_2.weight: d f -> layer f d",
    "deepstack.mlp.down_bias": f"{DEEPSTACK}.linear_2.bias: d -> layer d",
}


def write_projector(
    folder: Path,
    parameters: Mapping[str, NDArray[Any]],
    group: int,
    shapes: ProjectorShapes,
    deepstack_layers: Sequence[int] = (),
) -> None:
    """Write a projector to a new folder.

    Args:
      parameters: by dotted path.
      group: neighbouring features that become one token; in pictures a square, row by row.
      shapes: what the projector does to the features.
    """
    tensors: dict[str, NDArray[Any]] = {}
    for path, values in parameters.items():
        tensors |= Line.of(LINES[path]).tensors(values)
    first_shape, last_shape = (
        parameters[name].shape
        for name in (("linear", "linear") if "linear" in parameters else ("mlp.up", "mlp.down"))
    )
    config: dict[str, Any] = {
        "model_type": "jaxmllm_projector",
        "group": group,
        "input_size": first_shape[0],
        "output_size": last_shape[1],
    }
    if "linear" not in parameters:
        config |= {"hidden_size": first_shape[1], "hidden_act": ACTIVATIONS[shapes.gelu]}
    if shapes.grouping != "concatenated":
        config["grouping"] = shapes.grouping
    if shapes.norm is not None:
        config |= {"norm": shapes.norm, "norm_eps": shapes.norm_epsilon}
    if deepstack_layers:
        config["deepstack_layers"] = [*deepstack_layers]
    folder.mkdir(parents=True)
    (folder / CONFIG_JSON).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(folder / SINGLE, tensors)
