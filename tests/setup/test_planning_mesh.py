"""The mesh of commands that plan steps without running them: by the config, or for `--ranks`."""

import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.setup.planning_mesh import planning_mesh
from tests.support import tiny_config


def test_what_plans_without_running_takes_the_mesh_of_the_config_or_as_many_data_ranks(tmp_path):
    def shape(ranks=None, **changes):
        return dict(planning_mesh(parse_config(tiny_config(tmp_path, **changes)), ranks).shape)

    assert shape() == {"data": 8, "fsdp": 1, "context": 1, "tensor": 1}
    assert shape(mesh={"data": 2, "fsdp": -1, "tensor": 2}) == {
        "data": 2,
        "fsdp": 2,
        "context": 1,
        "tensor": 2,
    }
    assert shape(mesh={"data": 2, "fsdp": 2}) == {"data": 2, "fsdp": 2, "context": 1, "tensor": 1}
    assert shape(64, mesh={"data": 2, "fsdp": -1, "tensor": 2}) == {
        "data": 2,
        "fsdp": 32,
        "context": 1,
        "tensor": 2,
    }
    for fsdp, shards in ((8, 8), (6, 2), (128, 64), (1, 1)):
        sharded = shape(64, mesh={"data": -1, "fsdp": fsdp})
        assert (sharded["data"], sharded["fsdp"]) == (64 // shards, shards)
    with pytest.raises(
        ConfigError, match=r"mesh.tensor is -1, but --ranks leaves no devices to count"
    ):
        shape(64, mesh={"data": 2, "tensor": -1})
    with pytest.raises(
        ConfigError, match=r"pipeline.stages \(2\): this command plans steps without a pipeline"
    ):
        shape(pipeline__stages=2)
