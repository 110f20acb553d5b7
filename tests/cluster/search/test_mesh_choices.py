"""The meshes and remat that the search tries where a config leaves them open."""

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
    # The reference: every split of 24 devices over data, fsdp, context and tensor
    meshes = {
        sizes
        for sizes in itertools.product((1, 2, 3, 4, 6, 8, 12, 24), repeat=4)
        if math.prod(sizes) == 24
    }
    assert {tuple(choice.sizes.values()) for choice in choices} == meshes
    # Encoders may take context, tensor or both as further data axes, hence three choices each
    regrouped = [
        choice for choice in choices if choice.context > 1 and choice.tensor > 1 and choice.as_data
    ]
    assert len(regrouped) == 3 * sum(sizes[2] > 1 and sizes[3] > 1 for sizes in meshes)


def test_what_the_config_names_stays():
    choices = mesh_choices(config(mesh={"fsdp": 4, "data": -1}), 16)
    assert {choice.fsdp for choice in choices} == {4}
    assert {choice.data * choice.context * choice.tensor for choice in choices} == {4}
    layout = {"batch": ["data", "fsdp", "tensor"]}
    with_layouts = config()
    towers = {
        name: getattr(with_layouts.components, name).model_copy(update={"layout": layout})
        for name in with_layouts.model.encoders
    }
    with_layouts = with_layouts.model_copy(
        update={"components": with_layouts.components.model_copy(update=towers)}
    )
    choices = mesh_choices(with_layouts, 16)
    assert {choice.as_data for choice in choices} == {()}
    assert all(choice.of(with_layouts).components.vision.layout == layout for choice in choices)
    # `omni_config` names the remat policy, which leaves none to choose
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
    staged = config(pipeline={"stages": 4}, mesh={"fsdp": 2, "context": 1, "data": -1})
    choices = mesh_choices(staged, 16)
    assert [(choice.data, choice.tensor) for choice in choices] == [(1, 2), (2, 1)]
    assert {(choice.stages, choice.as_data, choice.devices) for choice in choices} == {(4, (), 16)}
    assert choices[1].words == "4 stages, data 2, fsdp 2" and choices[1].axes == 3
    assert choices[1].of(staged).mesh_sizes == choices[1].mesh_sizes
    with pytest.raises(
        ConfigError, match=r"stages 4, mesh.fsdp 2, mesh.context 1 need a multiple of 8"
    ):
        mesh_choices(staged, 12)


def test_stages_are_open_where_neither_they_nor_an_axis_are_named():
    choices = mesh_choices(config(), 24)
    assert {choice.stages for choice in choices} == {1, 2, 4, 8}
    assert all(
        choice.devices == 24 and (choice.stages == 1 or not choice.as_data) for choice in choices
    )
    eight_stages = {tuple(choice.sizes.values()) for choice in choices if choice.stages == 8}
    assert eight_stages == {tuple(3 if axis == named else 1 for axis in AXES) for named in AXES}
    for named in ({"pipeline": {"stages": 1}}, {"mesh": {"tensor": 2}}):
        assert {choice.stages for choice in mesh_choices(config(**named), 24)} == {1}
