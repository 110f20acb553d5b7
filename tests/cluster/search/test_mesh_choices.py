"""What a config leaves open of its layout."""

from __future__ import annotations

import itertools
import math

import pytest

from benchmarks.omni import omni_config
from jaxmllm.cluster.search.mesh_choices import AXES, MeshChoice, mesh_choices, open_remat
from jaxmllm.config.schema import ConfigError


def config(**sections):
    return omni_config("tiny", data={"batch_size": 32}, **sections)


def test_all_meshes_are_there_once():
    choices = mesh_choices(config(pipeline={"stages": 1}), 24)
    assert len(set(choices)) == len(choices)
    every = {
        sizes
        for sizes in itertools.product((1, 2, 3, 4, 6, 8, 12, 24), repeat=4)
        if math.prod(sizes) == 24
    }
    assert {tuple(one.sizes.values()) for one in choices} == every
    both = [one for one in choices if one.context > 1 and one.tensor > 1 and one.as_data]
    assert len(both) == 3 * sum(sizes[2] > 1 and sizes[3] > 1 for sizes in every)


def test_what_the_config_names_stays():
    choices = mesh_choices(config(mesh={"fsdp": 4, "data": -1}), 16)
    assert {one.fsdp for one in choices} == {4}
    assert {one.data * one.context * one.tensor for one in choices} == {4}
    layout = {"batch": ["data", "fsdp", "tensor"]}
    given = config()
    towers = {
        name: getattr(given.components, name).model_copy(update={"layout": layout})
        for name in given.model.encoders
    }
    given = given.model_copy(update={"components": given.components.model_copy(update=towers)})
    choices = mesh_choices(given, 16)
    assert {one.as_data for one in choices} == {()}
    assert all(one.of(given).components.vision.layout == layout for one in choices)
    # As `omni_config` names it
    assert open_remat(config()) == ()


def test_axes_that_do_not_divide_the_devices_are_named():
    with pytest.raises(
        ConfigError,
        match=r"mesh.data 4, mesh.fsdp 2 need a multiple of 8 devices, not 12; say --devices 8",
    ):
        mesh_choices(config(mesh={"data": 4, "fsdp": 2}), 12)
    with pytest.raises(ConfigError, match="not 8; say --devices 4"):
        mesh_choices(config(mesh=dict.fromkeys(AXES, 1) | {"data": 4}), 8)


def test_encoders_over_an_axis_have_more_ranks():
    choice = MeshChoice(2, 2, 1, 2, ("tensor",))
    chosen = choice.of(config())
    assert chosen.components.vision.layout == {"batch": ["data", "fsdp", "tensor"]}
    assert chosen.components.language.layout == {}
    assert chosen.mesh.model_dump() == {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}
    assert choice.words == "data 2, fsdp 2, tensor 2; encoders over tensor" and choice.axes == 4


def test_stages_lie_on_meshes_of_the_devices_that_each_has():
    given = config(pipeline={"stages": 4}, mesh={"fsdp": 2, "context": 1, "data": -1})
    choices = mesh_choices(given, 16)
    assert [(one.data, one.tensor) for one in choices] == [(1, 2), (2, 1)]
    assert {(one.stages, one.as_data, one.devices) for one in choices} == {(4, (), 16)}
    assert choices[1].words == "4 stages, data 2, fsdp 2" and choices[1].axes == 3
    assert choices[1].of(given).mesh_sizes == choices[1].mesh_sizes
    with pytest.raises(
        ConfigError, match=r"stages 4, mesh.fsdp 2, mesh.context 1 need a multiple of 8"
    ):
        mesh_choices(given, 12)


def test_stages_are_open_where_neither_they_nor_an_axis_are_named():
    choices = mesh_choices(config(), 24)
    assert {one.stages for one in choices} == {1, 2, 4, 8}
    assert all(one.devices == 24 and (one.stages == 1 or not one.as_data) for one in choices)
    of_eight = {tuple(one.sizes.values()) for one in choices if one.stages == 8}
    assert of_eight == {tuple(3 if axis == named else 1 for axis in AXES) for named in AXES}
    for named in ({"pipeline": {"stages": 1}}, {"mesh": {"tensor": 2}}):
        assert {one.stages for one in mesh_choices(config(**named), 24)} == {1}
