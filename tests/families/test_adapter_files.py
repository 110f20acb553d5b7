"""The low-rank factors of adapters as tensors of a folder, in the layout of PEFT."""

import json

import ml_dtypes
import numpy as np
import pytest

from jaxmllm.config.schema import AdapterConfig
from jaxmllm.families.adapter_files import factor_lines, write_adapter
from jaxmllm.families.dense_decoder import PARAMETERS
from jaxmllm.families.lines import Line
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.weight_files import FolderError, WeightFile
from tests.tools.test_convert import GOLDENS

QUERY = Line.of(PARAMETERS["layers.attention.query"])
OUT = Line.of(PARAMETERS["layers.attention.out"])


def test_factors_have_the_axes_of_their_matrix():
    key = "base_model.model.model.layers.{layer}.self_attn.q_proj.lora_%s.weight: %s"
    assert factor_lines(QUERY, 1) == (
        Line.of(key % ("A", "rank d -> layer d rank")),
        Line.of(key % ("B", "(h k) rank -> layer rank h k")),
    )
    key = key.replace("q_proj", "o_proj")
    assert factor_lines(OUT, 2) == (
        Line.of(key % ("A", "rank (h k) -> layer h k rank")),
        Line.of(key % ("B", "d rank -> layer rank d")),
    )


def test_modules_have_the_names_of_the_reference_whatever_the_keys_begin_with():
    family = ModelFolder.open(GOLDENS / "gemma3-tower").family
    path = "layers.mlp.up"
    layer = "layers.{layer}.mlp.up_proj.weight"
    assert family.lines[path].key == f"language_model.model.{layer}"
    assert family.module_line(path).key == f"model.language_model.{layer}"
    for name, module in (("qwen2_5_omni", "thinker.model"), ("qwen2_5_omni-thinker", "model")):
        family = ModelFolder.open(GOLDENS / name).family
        assert family.module_line(path).key == f"{module}.language_model.{layer}"


@pytest.mark.parametrize(
    "text",
    [
        "layers.{layer}.weight: d f -> layer d f",  # inputs by outputs
        "layers.{layer}.weight: (f d) -> layer d f",
        "layers.{layer}.bias: f d -> layer d f",
        "head.weight: f d -> d f",
        "layers.{layer}.weight[0/2]: f d -> layer d f",
    ],
)
def test_what_is_no_matrix_of_each_layer_is_refused(text):
    with pytest.raises(FolderError, match=r"is not a matrix of each layer"):
        factor_lines(Line.of(text), 1)


def test_the_products_of_what_is_written_are_those_of_the_factors(tmp_path):
    folder = ModelFolder.open(GOLDENS / "qwen3")
    rng = np.random.default_rng(0)
    factor_shapes = {
        "layers.attention.out": ((2, 4, 8, 3), (2, 3, 16)),
        "layers.attention.query": ((2, 16, 3), (2, 3, 4, 8)),
    }
    factors = {
        path: tuple(rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes)
        for path, shapes in factor_shapes.items()
    }
    adapter = AdapterConfig(rank=3, alpha=1.5)
    write_adapter(folder, adapter, factors, lambda path: factors[path], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 1.5)
    tensors = WeightFile.open(tmp_path / "out" / "adapter_model.safetensors").tensors
    assert len(tensors) == 2 * 2 * 2 and {tensor.dtype for tensor in tensors.values()} == {"BF16"}
    for path, module in (("out", "o_proj"), ("query", "q_proj")):
        a, b = (factor.astype(np.float32) for factor in factors[f"layers.attention.{path}"])
        for layer in range(2):
            key = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_"
            a_file, b_file = (
                tensors[f"{key}{name}.weight"].array().astype(np.float32) for name in "AB"
            )
            # Files hold transposed matrices, so the product of the files is compared with the
            # product of the factors.
            product = a[layer].reshape(-1, 3) @ b[layer].reshape(3, -1)
            np.testing.assert_allclose((b_file @ a_file).T, product, rtol=1e-5)
