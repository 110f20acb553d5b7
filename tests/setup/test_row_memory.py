"""How many slots of a row fit a device, by an estimate of bytes."""

import jax
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.models.compose import build_model
from jaxmllm.setup import row_memory
from jaxmllm.setup.row_memory import kept_bytes, kept_residuals, slots_that_fit
from sharding.mesh import abstract_mesh
from tests.support import tiny_config

PHASES = ("vision", "audio", "language")


def slots(tmp_path, mesh=None, **changes):
    """Slots that fit per phase, on 8 devices."""
    tree = tiny_config(tmp_path, **changes) | {"mesh": mesh or {"data": 8}}
    config = parse_config(tree)
    model = build_model(config.model, 320, config.components, abstract_mesh(config.mesh_sizes, 8))
    return [slots_that_fit(config, model, phase) for phase in PHASES]


def test_slots_fit_what_layers_keep_of_them(tmp_path):
    fitting = slots(tmp_path)
    assert all(size & (size - 1) == 0 for size in fitting), "powers of two"
    # Per slot, the input of one layer and a layer at work, in float32
    bytes_of_slot = 4 * (16 + 16 * 16 + 6 * 32)
    assert (
        bytes_of_slot * fitting[0]
        <= row_memory.PLANNED_MEMORY / 2
        < 2 * bytes_of_slot * fitting[0] * 1.01
    )


def test_keeping_more_or_more_layers_leaves_less(tmp_path):
    default_slots = slots(tmp_path)[2]
    assert slots(tmp_path, components__language__remat="none")[2] < default_slots
    for remat in ("dots", ["attention"], ["projections", "mlp"]):
        language = {"model__language__layers": 200, "components__language__remat": remat}
        assert slots(tmp_path, **language)[2] < slots(tmp_path, model__language__layers=200)[2]
    assert slots(tmp_path, model__language__layers=40)[2] < default_slots
    assert slots(tmp_path, {"data": 2, "context": 4})[2] == 4 * default_slots


def test_norms_and_activations_that_keep_more(tmp_path):
    """In numbers per slot and layer: norms keep the width, 32, and activations 48."""

    def kept(remat, **choices):
        changes = {f"model__language__{key}": value for key, value in choices.items()}
        config = tiny_config(tmp_path, components__language__remat=remat, **changes)
        return kept_bytes(parse_config(config), "language")

    for remat, norms, activations in (
        ("full", 0, 0),
        (["mlp"], 1, 0),
        ("dots", 1, 0),
        ("none", 8, 2),
    ):
        values = (kept(remat, post_norms=True) - kept(remat)) / 4 / 2  # bytes, layers
        assert values == 32 * norms
        values = (kept(remat, activation="gelu_tanh") - kept(remat)) / 4 / 2
        assert values == 48 * activations


@pytest.mark.parametrize(
    ("remat", "widths"), [("full", 0), ("dots", 1), ("none", 2), (["mlp"], 1), (["attention"], 0)]
)
def test_layers_that_scale_what_they_add_keep_that(tmp_path, remat, widths):
    def kept(layer_scale):
        changes = {"components__vision__remat": remat, "model__vision__layer_scale": layer_scale}
        return kept_bytes(parse_config(tiny_config(tmp_path, **changes)), "vision")

    assert (kept(True) - kept(False)) / 4 == 16 * widths  # bytes


def test_experts_hold_tokens_of_all_devices_that_share_them(tmp_path):
    experts = {"model__language__experts": {"count": 8, "per_token": 2}}
    wide_mlp = {"model__language__mlp_width": 4096}
    assert slots(tmp_path, **wide_mlp, **experts)[2] > slots(tmp_path, **wide_mlp)[2]
    assert slots(tmp_path, {"fsdp": 8, "data": 1}, **experts)[2] < slots(tmp_path, **experts)[2]


def test_stages_hold_the_layers_of_one_and_what_waits_between_them(tmp_path):
    many_layers = {"model__language__layers": 400}
    staged = many_layers | {"pipeline__stages": 4, "mesh": {"data": 2}}
    assert slots(tmp_path, **staged)[2] > slots(tmp_path, **many_layers)[2]
    no_remat = {"components__language__remat": "none"}
    stage_settings = ({"pipeline__kept_residuals": 8}, {"pipeline__microbatches_in_flight": 1000})
    for settings in (no_remat, *stage_settings):
        assert slots(tmp_path, **staged | settings)[2] < slots(tmp_path, **staged)[2]
    for settings_of_stages in stage_settings:  # without stages, these settings change nothing
        assert (
            slots(tmp_path, **many_layers | settings_of_stages)[2]
            == slots(tmp_path, **many_layers)[2]
        )


def test_a_state_that_hardly_fits_leaves_a_tenth(tmp_path, monkeypatch):
    default_slots = slots(tmp_path)
    monkeypatch.setattr(row_memory, "PLANNED_MEMORY", 1 << 16)
    assert all(
        0 < reduced < default
        for reduced, default in zip(slots(tmp_path), default_slots, strict=True)
    )


def test_forwards_of_a_pipeline_keep_what_a_share_of_memory_holds(tmp_path, monkeypatch):
    """By what `remat` keeps of the layers of a chunk, rounded down to a power of two."""

    def kept(capacity=4096, layers=2, **changes):
        tree = tiny_config(tmp_path, pipeline__stages=2, mesh={"data": 2}, **changes)
        config = parse_config(tree)
        model = build_model(
            config.model, 320, config.components, abstract_mesh(config.mesh_sizes, 4)
        )
        return row_memory.kept_forwards(config, model, "language", capacity, layers)

    monkeypatch.setattr(row_memory, "PLANNED_MEMORY", 1 << 30)
    default_kept = kept()
    assert default_kept.bit_count() == 1 and kept(capacity=2 * 4096) == default_kept // 2
    assert kept(layers=8) < default_kept and kept(components__language__remat="none") < default_kept
    assert kept(capacity=1 << 40) == 0


def test_averages_and_gradients_that_stay_whole_are_counted(tmp_path):
    """Averages are float32. Deferred gradients are summed in float32, beside those of one layer in
    the dtype of the computation."""

    def state(mesh, **changes):
        config = parse_config(tiny_config(tmp_path, **changes) | {"mesh": mesh})
        model = build_model(
            config.model, 320, config.components, abstract_mesh(config.mesh_sizes, 8)
        )
        return row_memory.state_bytes(config, model), model

    averaged = {"components__language__ema": 0.9}
    sharded_bytes, model = state({"data": 8})
    decoder = sum(leaf.size for leaf in jax.tree.leaves(model.components["language"].shapes))
    assert state({"data": 8}, **averaged)[0] == sharded_bytes + 4 * decoder
    step = {"components__language__reduce": "step"}
    bfloat16 = {"components__language__compute_dtype": "bfloat16"}
    assert state({"data": 8}, **step)[0] == state({"data": 8})[0]
    for mesh, devices, tensor_shards in (
        ({"fsdp": 8}, 8, 1),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2, 2),
    ):
        sharded_bytes, model = state({"data": 1} | mesh)
        params = model.components["language"].shapes
        trees = [  # layers with their MLP, and the head
            {"layers": params["layers"]["attention"], "mlp": params["layers"]["mlp"]},
            params["head"],
        ]
        layers, head = (
            sum(leaf.size for leaf in jax.tree.leaves(tree)) / tensor_shards for tree in trees
        )
        gathered_bytes = 4 * (layers + head) * (1 - 1 / devices)
        layer = layers / model.config.language.layers
        assert state({"data": 1} | mesh, **step)[0] == sharded_bytes + gathered_bytes + 4 * (
            layer + head
        )
        bfloat16_bytes = state({"data": 1} | mesh, **step, **bfloat16)[0]
        assert bfloat16_bytes == sharded_bytes + gathered_bytes + 2 * layer + 4 * head


def test_sharded_states_leave_more(tmp_path, monkeypatch):
    monkeypatch.setattr(row_memory, "PLANNED_MEMORY", 1 << 19)
    replicated = slots(tmp_path, {"data": 8})[2]
    sharded = slots(tmp_path, {"data": 1, "fsdp": 8})[2]
    assert sharded > replicated


def kept(tmp_path, capacity=1 << 20, others=1, **changes):
    """Microbatches of each phase whose residuals are kept, for rows of given sizes."""
    config = parse_config(tiny_config(tmp_path, mesh={"data": 8}, **changes))
    model = build_model(config.model, 320, config.components, abstract_mesh(config.mesh_sizes, 8))
    capacities = dict.fromkeys(PHASES, others) | {"vision": capacity}
    return kept_residuals(config, model, capacities)


AUTO = {f"phases__{phase}__kept_residuals": "auto" for phase in ("vision", "audio")}


def test_residuals_are_kept_as_memory_allows(tmp_path):
    # Residuals are one layer's input, 16 floats per slot. They share what rows leave, for which
    # twice their counted bytes are reserved.
    size = 16 * 4 << 20
    running = 4 * (16 + 16 * 16 + 6 * 32) << 20
    room = row_memory.PLANNED_MEMORY - 2 * running
    vision_alone = AUTO | {"phases__audio__kept_residuals": 0}
    kept_numbers = kept(tmp_path, **vision_alone)
    assert kept_numbers["audio"] == 0
    assert kept_numbers["vision"] <= room / size < 2 * kept_numbers["vision"] * 1.01
    assert (
        kept(tmp_path, components__vision__remat="none", **vision_alone)["vision"]
        < kept_numbers["vision"]
    )
    assert kept(tmp_path, 1 << 40, **AUTO)["vision"] == 0
    configured = {"phases__vision__kept_residuals": 5, "phases__audio__kept_residuals": 0}
    assert kept(tmp_path, **configured) == {"vision": 5, "audio": 0}
    assert kept(tmp_path) == {"vision": 0, "audio": 0}


def test_phases_share_what_large_rows_leave_for_residuals(tmp_path):
    equal_rows = kept(tmp_path, 1 << 20, others=1 << 20, **AUTO)
    assert equal_rows["vision"] / 2 <= equal_rows["audio"] <= 8 * equal_rows["vision"]
    audio_fixed = AUTO | {"phases__audio__kept_residuals": equal_rows["audio"]}
    assert kept(tmp_path, 1 << 20, others=1 << 20, **audio_fixed)["vision"] >= equal_rows["vision"]
    # Rows of the largest size leave nothing, so residuals have a reserved share
    large_rows = kept(tmp_path, 1 << 20, others=1 << 26, **AUTO)
    assert 0 < large_rows["vision"] < equal_rows["vision"]
