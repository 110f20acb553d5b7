"""Parameters of a published folder are read straight into shardings.

The reference is the folder read on one device, or its tensors themselves.
"""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmllm.config.schema import ComponentsConfig, LanguageConfig, ModelConfig
from jaxmllm.families.model_folder import Fit, ModelFolder
from jaxmllm.families.weight_files import FolderError
from jaxmllm.models.compose import build_model
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from jaxmllm.training.initial import read_parameters
from sharding.mesh import make_mesh

FOLDER = Path(__file__).parents[1] / "families" / "goldens" / "qwen2"


def model_on(mesh: dict[str, int], **changes) -> MLLM:
    """The model of the folder on a mesh; changes of its config make it another model."""
    folder = ModelFolder.open(FOLDER)
    language = LanguageConfig(**folder.family.section(folder.config) | changes)
    device_mesh = make_mesh(mesh, jax.devices()[: int(np.prod([*mesh.values()]))])
    vocabulary = folder.config.number("vocab_size")
    return build_model(ModelConfig(language=language), vocabulary, ComponentsConfig(), device_mesh)


def read(mesh: dict[str, int], dtype: str = "float32"):
    return read_parameters(str(FOLDER), model_on(mesh).abstract(dtype), lambda line: None)


@pytest.mark.parametrize(
    "mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}, {"data": 8, "fsdp": 1}]
)
def test_any_mesh_reads_the_same(mesh):
    expected = jax.device_get(read({"data": 1, "fsdp": 1}))
    params = read(mesh)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), expected)
    abstract_params = model_on(mesh).abstract("float32")
    for leaf, abstract in zip(
        jax.tree.leaves(params), jax.tree.leaves(abstract_params), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)


def test_a_tensor_lies_where_its_line_says():
    language = jax.device_get(read({"data": 1, "fsdp": 1}))[LANGUAGE]
    tensors = ModelFolder.open(FOLDER).tensors
    query = np.array(tensors["model.layers.1.self_attn.q_proj.weight"].array())
    heads, size = language["layers"]["attention"]["query"].shape[2:]
    np.testing.assert_array_equal(
        language["layers"]["attention"]["query"][1], query.T.reshape(-1, heads, size)
    )
    assert read({"data": 1, "fsdp": 1}, "bfloat16")[LANGUAGE]["embedding"].dtype == "bfloat16"


def test_every_slice_is_read_once(monkeypatch):
    """Devices that hold the same slice share what is read, so the bytes are those of the folder."""
    read_bytes = []
    part = Fit.part

    def counted(fit, path, index, dtype):
        values = part(fit, path, index, dtype)
        read_bytes.append(values.nbytes)
        return values

    monkeypatch.setattr(Fit, "part", counted)
    read({"data": 2, "fsdp": 2, "tensor": 2})
    tensors = ModelFolder.open(FOLDER).tensors.values()
    assert sum(read_bytes) == sum(tensor.size for tensor in tensors)


def test_a_decoder_of_another_kind_is_refused_by_key():
    abstract_params = model_on({"data": 1, "fsdp": 1}, qk_norm=True).abstract("float32")
    with pytest.raises(FolderError, match=r"layers\.0\.self_attn\.k_norm\.weight is missing"):
        read_parameters(str(FOLDER), abstract_params)


def test_components_that_a_folder_lacks_are_named():
    lines: list[str] = []
    abstract_params = model_on({"data": 1, "fsdp": 1}).abstract("float32")
    read_parameters(str(FOLDER), abstract_params | {"vision": {}}, lines.append)
    assert lines[0] == f"model.from: language from {FOLDER}"
    assert lines[1].startswith("model.from: vision not in ") and "at random" in lines[1]
