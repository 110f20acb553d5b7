"""Adapters of a published decoder as the peft library reads them: a folder of two files.

layers.mlp.up    model.layers.{layer}.mlp.up_proj.weight: f d -> layer d f               of the family
          .a     base_model.model.model.layers.{layer}.mlp.up_proj.lora_A.weight: rank d -> layer d rank
          .b     base_model.model.model.layers.{layer}.mlp.up_proj.lora_B.weight: f rank -> layer rank f
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from jaxmllm.config.schema import AdapterConfig
from jaxmllm.families.lines import STACKED, Line
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.weight_files import FolderError, write_tensors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # before the keys of the published model
WEIGHT = ".weight"
RANK = "rank"  # the axis that factors have and their matrix has not
LAYER = STACKED[0]


def factor_lines(line: Line, inputs: int) -> tuple[Line, Line]:
    """Lines of the two factors of a matrix in an adapter's folder.

    Args:
      line: line of the matrix, a parameter whose first axis counts layers.
      inputs: number of axes after the first that are the matrix's inputs.

    Raises:
      FolderError: the tensor is not one matrix of outputs and inputs.
    """
    reads = line.letters[:inputs]
    makes = line.letters[inputs:]
    apart = [{*group} for group in line.tensor] == [{*makes}, {*reads}] and line.parts == 1
    if not (apart and line.stacked == (LAYER,) and line.key.endswith(WEIGHT)):
        raise FolderError(
            f"{line.key} is not a matrix of each layer, outputs by inputs, to which adapters could be told apart; "
            "write the folder whole, without --adapters"
        )
    module = f"{PREFIX}{line.key.removesuffix(WEIGHT)}"
    outputs_of, inputs_of = line.tensor
    return (
        Line(f"{module}.lora_A{WEIGHT}", ((RANK,), inputs_of), (LAYER, *reads, RANK)),
        Line(f"{module}.lora_B{WEIGHT}", (outputs_of, (RANK,)), (LAYER, RANK, *makes)),
    )


def write_adapter(
    source: ModelFolder,
    adapter: AdapterConfig,
    paths: Iterable[str],
    factors: Callable[[str], tuple[NDArray[Any], NDArray[Any]]],
    folder: Path,
) -> None:
    """Write the factors to a new folder, in their own types.

    Args:
      source: the published folder that they adapt.
      paths: paths of the adapted parameters.
      factors: returns those of a parameter by path, [layers, *inputs, rank] and
        [layers, rank, *outputs].

    Raises:
      FolderError: a parameter is not one matrix in every layer.
    """
    tensors: dict[str, NDArray[Any]] = {}
    modules = []
    for path in paths:
        line = source.family.module_line(path)
        a, b = factors(path)
        for of_factor, values in zip(factor_lines(line, a.ndim - 2), (a, b), strict=True):
            tensors |= of_factor.tensors(values)
        modules.append(re.escape(line.key.removesuffix(WEIGHT)))
    layers = re.escape(f"{{{LAYER}}}")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source.path),
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        # Whole names, because other parts of a model may have modules with the same endings
        "target_modules": "|".join(modules).replace(layers, r"\d+"),
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(parents=True)
    write_tensors(folder / ADAPTER_WEIGHTS, tensors)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
