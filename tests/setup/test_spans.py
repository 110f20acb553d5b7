"""How many ranks may hold a row together: what `auto` allows, and what is refused."""

import math

import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.models.compose import build_model
from jaxmllm.setup.spans import left_alone, mesh_spans, node_spans, spans_of_phases
from sharding.mesh import abstract_mesh
from tests.support import ENCODER_LAYOUT, tiny_config


def on_mesh(tmp_path, mesh=None, devices=8, by_node=False, **changes):
    """The config and the model on a mesh, whose axes are cut by twos first or inside nodes first."""
    tree = tiny_config(tmp_path, **changes)
    tree["mesh"] = mesh or {"data": 4, "fsdp": 2}
    config = parse_config(tree)
    sizes = config.mesh_sizes
    spans_of_mesh = node_spans(config, sizes) if by_node else mesh_spans(config)
    model = build_model(
        config.model,
        320,
        config.components,
        abstract_mesh(sizes, devices, spans=spans_of_mesh),
    )
    return config, model


def spans(tmp_path, mesh=None, devices=8, **changes):
    return spans_of_phases(*on_mesh(tmp_path, mesh, devices, **changes))


AUTO = {f"phases__{phase}__spans": "auto" for phase in ("vision", "audio", "language")}


def test_auto_takes_what_ranks_and_nodes_allow(tmp_path):
    all_spans = dict.fromkeys(("vision", "audio", "language"), (1, 2, 4, 8))
    assert spans(tmp_path, **AUTO) == all_spans
    on_nodes = spans(tmp_path, **AUTO, balance__ranks_per_node=4)
    assert set(on_nodes.values()) == {(1, 2, 4)}
    across = spans(tmp_path, **AUTO, balance={"ranks_per_node": 4, "spans_cross_nodes": True})
    assert across == all_spans
    for cross, widest in ((False, ()), (True, (16, 32, 64))):
        balance = {"ranks_per_node": 8, "spans_cross_nodes": cross}
        cluster = spans(tmp_path, {"data": 128}, 128, **AUTO, balance=balance)
        assert set(cluster.values()) == {(1, 2, 4, 8, *widest)}
    for mesh, expected in (
        ({"data": 3, "fsdp": 2}, (1, 2, 6)),
        ({"data": 6}, (1, 2, 6)),
        ({"data": 12}, (1, 2, 4, 12)),
        ({"data": 24}, (1, 2, 4, 8)),
        ({"data": 9}, (1, 3)),
        ({"data": 5}, (1, 5)),
        ({"data": 7}, (1, 7)),
        ({"data": 10}, (1, 2, 10)),
        ({"data": 11}, (1,)),
    ):
        allowed = spans(tmp_path, mesh, math.prod(mesh.values()), **AUTO)
        assert set(allowed.values()) == {expected}
    on_nodes = spans(tmp_path, {"data": 12}, 12, **AUTO, balance__ranks_per_node=6)
    assert set(on_nodes.values()) == {(1, 2)}
    configured = spans(tmp_path, {"data": 16}, 16, **AUTO | {"phases__vision__spans": [1, 16]})
    assert configured == {"vision": (1, 16), "audio": (1, 2, 4, 8), "language": (1, 2, 4, 8)}
    assert set(spans(tmp_path, {"data": 1}, 1, **AUTO).values()) == {(1,)}


@pytest.mark.parametrize(
    "ranks_per_node, ranks, expected",
    [
        (3, 24, (1, 3)),
        (4, 24, (1, 2, 4)),
        (5, 20, (1, 5)),
        (6, 6, (1, 2, 6)),
        (6, 24, (1, 2, 6)),
        (6, 768, (1, 2, 6)),
        (8, 64, (1, 2, 4, 8)),
        (12, 48, (1, 2, 4, 12)),
        (72, 576, (1, 2, 4, 8)),
    ],
)
def test_axes_are_cut_inside_nodes_first(tmp_path, ranks_per_node, ranks, expected):
    changes = AUTO | {"balance__ranks_per_node": ranks_per_node}
    config, model = on_mesh(tmp_path, {"data": ranks}, ranks, by_node=True, **changes)
    assert set(spans_of_phases(config, model).values()) == {expected}


def test_nodes_of_several_devices_per_rank(tmp_path):
    """Nodes of 12 devices are 6 ranks of two devices, or 12 of an encoder that counts both."""
    config, model = on_mesh(
        tmp_path,
        {"data": 12, "tensor": 2},
        24,
        by_node=True,
        **AUTO,
        balance__ranks_per_node=12,
        components__vision__layout=ENCODER_LAYOUT,
    )
    assert spans_of_phases(config, model) == {
        "vision": (1, 2, 4, 12),
        "audio": (1, 2, 6),
        "language": (1, 2, 6),
    }


def test_axes_are_cut_by_twos_where_nodes_do_not_count(tmp_path):
    def cut(local_devices=None, **changes):
        config = parse_config(tiny_config(tmp_path, **AUTO | changes))
        return node_spans(config, config.mesh_sizes, local_devices), mesh_spans(config)

    by_node, by_twos = cut(local_devices=6)
    assert by_node == (1, 2, 6, 12, 24, 120, 840) and by_twos == (1, 2, 4, 8, 24, 120, 840)
    for changes in (
        {},
        {"local_devices": 8},
        {"local_devices": 6, "balance__spans_cross_nodes": True},
        {"local_devices": 6, "mesh": {"data": 3, "tensor": 4}},
        {"local_devices": 6, "mesh": {"data": 3, "tensor": -1}},
    ):
        by_node, by_twos = cut(**changes)
        assert by_node == by_twos


def test_ranks_on_nodes_of_their_own_are_named(tmp_path):
    def named(**changes):
        config, model = on_mesh(tmp_path, **(AUTO | changes))
        return left_alone(config, model, spans_of_phases(config, model))

    assert named(balance__ranks_per_node=1) == ("vision", "audio", "language")
    assert named(balance__ranks_per_node=1, phases__audio__spans=[1]) == ("vision", "language")
    assert named() == named(balance__ranks_per_node=2) == ()
    assert named(balance={"ranks_per_node": 1, "mode": "language"}) == ()


def test_ranks_are_those_of_the_phase(tmp_path):
    mesh = {"data": 4, "fsdp": 1, "tensor": 2}
    layout = {"components__vision__layout": ENCODER_LAYOUT}
    assert spans(tmp_path, mesh, **AUTO, **layout) == {
        "vision": (1, 2, 4, 8),
        "audio": (1, 2, 4),
        "language": (1, 2, 4),
    }


def test_auto_is_one_rank_where_capacities_are_given_or_rows_stay_where_they_are(tmp_path):
    one_rank = dict.fromkeys(("vision", "audio", "language"), (1,))
    capacities = {
        f"phases__{phase}__capacities": [4096] for phase in ("vision", "audio", "language")
    }
    assert spans(tmp_path, **AUTO, **capacities) == one_rank
    assert spans(tmp_path, **AUTO, balance__mode="language") == one_rank
    assert mesh_spans(parse_config(tiny_config(tmp_path, **AUTO, balance__mode="none"))) == (1,)


def test_auto_takes_blocks_that_hold_no_whole_tokens(tmp_path):
    """A token of language is 8 frames of audio, but a block of one slot of attention is 4."""
    assert spans(tmp_path, **AUTO, phases__audio__block=1)["audio"] == (1, 2, 4, 8)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"phases__vision__spans": [1, 3]},
            r"phases\.vision\.spans: 3 does not divide the 8 ranks",
        ),
        (
            {"phases__language__spans": [1, 8], "balance__ranks_per_node": 4},
            r"phases\.language\.spans: groups of 8 ranks cross nodes; .*balance\.spans_cross_nodes",
        ),
        (
            {"phases__vision__spans": [3], "phases__audio__spans": [1, 2]},
            r"phases\.<phase>\.spans: 2 of one phase does not divide 3 of another",
        ),
        (
            {"phases__vision__spans": [3], "phases__audio__spans": [2]},
            r"choose spans of which each divides the next, over all phases",
        ),
        ({"phases__audio__spans": []}, r"phases\.audio\.spans: .*different numbers of ranks"),
        ({"phases__audio__spans": [2, 2]}, r"phases\.audio\.spans: .*different numbers of ranks"),
        ({"phases__audio__spans": [4, 6]}, r"phases\.audio\.spans: .*each divides the next"),
        (
            {"phases__audio__spans": [1, 2], "balance__mode": "tokens"},
            r"phases\.audio\.spans \(\[1, 2\]\): with balance\.mode \(tokens\), .*on one rank",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        spans(tmp_path, **changes)


def test_all_rows_may_be_shared(tmp_path):
    assert spans(tmp_path, phases__language__spans=[8, 2])["language"] == (2, 8)
