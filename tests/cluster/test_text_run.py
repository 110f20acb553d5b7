"""A text model's step in closed form: against counts by hand, and what holds for any constants."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmllm.cluster.clusters import CLUSTERS
from jaxmllm.cluster.collectives import Group, collective_seconds
from jaxmllm.cluster.device_seconds import RATES, Device
from jaxmllm.cluster.text_run import RECOMPUTED, TextRun, TextRunError, text_step

RUN = TextRun(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=8,
    mlp_width=14336,
    gated=True,
    vocab=128256,
    devices=1,
    data=1,
    fsdp=1,
    context=1,
    tensor=1,
    stages=1,
    interleave=1,
    remat="none",
    sequence=8192,
    batch=4,
    microbatch=1,
)
DEVICE = Device(CLUSTERS["h100"], 0.8)
AXES = st.sampled_from([1, 2, 4])


@st.composite
def runs(draw):
    """Runs on any mesh of axes up to 4, with all that a run may choose."""
    axes = {name: draw(AXES) for name in ("data", "fsdp", "context", "tensor", "stages")}
    devices = 1
    for size in axes.values():
        devices *= size
    return replace(
        RUN,
        **axes,
        devices=devices,
        batch=axes["data"] * axes["fsdp"] * draw(st.integers(1, 8)),
        remat=draw(st.sampled_from(sorted(RECOMPUTED))),
        attention=draw(st.sampled_from(["flash", "unfused"])),
        sequence_parallel=draw(st.booleans()),
        tensor_overlap=draw(st.booleans()),
    )


def test_one_device_computes_the_flops_of_the_model_and_sends_nothing():
    ideal = Device(
        DEVICE.cluster,
        1.0,
        replace(RATES, half_side=1e-9, attention=1.0, traffic=1e-9, straggling=0.0),
    )
    step = text_step(RUN, ideal)
    tokens = 4 * 8192
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    products = 6 * tokens * (32 * layer + 4096 * 128256)
    assert step.products == pytest.approx(products / 989.5e12)
    # Scores are not stored, so backward takes two and a half times as much as forward
    assert step.attention == pytest.approx(3.5 * 2 * 4096 * 8192 * tokens * 32 / 989.5e12)
    sent = (step.tensor, step.context, step.weights, step.bubble, step.replicas, step.straggling)
    assert sent == pytest.approx((0,) * 6, abs=1e-12)


@given(run=runs())
def test_parts_add_up_between_both_ends(run):
    step = text_step(run, DEVICE)
    assert all(part >= -1e-9 for part in step.parts.values())
    assert step.low <= step.seconds * (1 + 1e-9)
    assert step.seconds <= step.high * (1 + 1e-9)


@given(run=runs(), factor=st.floats(1.1, 4))
def test_better_hardware_is_never_slower(run, factor):
    cluster = DEVICE.cluster
    faster = cluster.model_copy(
        update={
            "memory_bandwidth": cluster.memory_bandwidth * factor,
            "in_node": cluster.in_node.model_copy(
                update={"bytes_per_second": cluster.in_node.bytes_per_second * factor}
            ),
            "between_nodes": cluster.between_nodes.model_copy(
                update={"reduced_per_second": cluster.between_nodes.reduced_per_second * factor}
            ),
        }
    )
    assert text_step(run, Device(faster, 0.8)).seconds <= text_step(run, DEVICE).seconds * 1.0001
    assert text_step(run, Device(cluster, 0.9)).seconds <= text_step(run, DEVICE).seconds


def test_gradients_of_parts_of_a_document_are_added_where_its_devices_are():
    """Devices along context lie in one node, whatever the shards of parameters, and those along
    data in different ones."""

    def replicas(**axes):
        run = replace(RUN, devices=64, fsdp=8, sequence=131072, batch=64, **axes)
        return text_step(run, DEVICE).replicas

    summed = 4 * (32 * RUN.layer.parameters + 2 * 4096 * 128256) / 8
    for axes, stride in (({"context": 8}, 1), ({"data": 8}, 8)):
        seconds = collective_seconds(
            DEVICE.cluster, "all-reduce", summed, Group(8, stride), DEVICE.rates.network
        )
        assert replicas(**axes) == pytest.approx(seconds * DEVICE.rates.reduced)
    assert replicas(context=8) < 0.5 * replicas(data=8)


def test_what_is_made_again_takes_time():
    seconds = {remat: text_step(replace(RUN, remat=remat), DEVICE).seconds for remat in RECOMPUTED}
    assert seconds["none"] == seconds["sel"] < seconds["dots"] < seconds["qkv"] < seconds["full"]
    stored = replace(RUN, attention="unfused")
    assert (
        text_step(stored, DEVICE).seconds < text_step(replace(stored, remat="sel"), DEVICE).seconds
    )


def test_pipelines_wait_less_with_more_microbatches_and_chunks():
    def idle(**changes):
        run = replace(RUN, devices=4, stages=4, layers=32, vocab=512, **changes)
        step = text_step(run, DEVICE)
        return step.bubble / step.seconds

    assert idle(batch=4) > idle(batch=16) > idle(batch=16, interleave=4) > 0
    # With four microbatches on four stages, 3 of 7 ticks of a stage are idle
    assert idle(batch=4) == pytest.approx(3 / 7, abs=0.03)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 8}, "axes of 1 devices on 8"),
        ({"microbatch": 8}, "less than a microbatch"),
        ({"remat": "some"}, "remat 'some' is none of none, full"),
        ({"attention": "sparse"}, "attention 'sparse'"),
    ],
)
def test_runs_that_contradict_themselves(change, message):
    with pytest.raises(TextRunError, match=message):
        replace(RUN, **change)


def test_a_record_lacks_a_key():
    with pytest.raises(TextRunError, match=r"missing.*'layers'"):
        TextRun.of({key: value for key, value in vars(RUN).items() if key != "layers"})


def test_devices_that_share_cores_are_refused():
    with pytest.raises(TextRunError, match="devices of cpu share cores"):
        text_step(RUN, Device(CLUSTERS["cpu"], 0.5))
