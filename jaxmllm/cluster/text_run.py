"""Step time of a dense decoder trained on rows of one length, in closed form.

    TextRun, Device --text_step--> TextStep        seconds by part, and their two ends

For runs that others have published, because their descriptions come down to a line of numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

from jaxmllm.balance.costs.flops import Layer, decoder_layer
from jaxmllm.balance.costs.gather import GATHER_PRICE
from jaxmllm.cluster.clusters import ALL_REDUCE
from jaxmllm.cluster.collectives import Group, collective_seconds
from jaxmllm.cluster.device_seconds import (
    ACCUMULATED_BYTES,
    BACKWARD,
    FLASH_BACKWARD,
    UPDATED_BYTES,
    Device,
    stored_bytes,
)

NUMBER_BYTES: Final = 2  # of bfloat16, in which all these runs compute
FLASH = "flash"
UNFUSED = "unfused"
# Shares of a layer's products and of its attention that the backward pass computes again: with
# `selop` every second operation, with `qkv` all but the first projections (`TextRun.recomputed`)
RECOMPUTED: Final = {
    "none": (0.0, 0.0),
    "full": (1.0, 1.0),
    "sel": (0.0, 1.0),
    "dots": (0.0, 1.0),
    "selop": (0.5, 0.0),
    "qkv": (1.0, 1.0),
}


class TextRunError(ValueError):
    """A run whose numbers contradict each other; the message names them."""


@dataclass(frozen=True)
class TextRun:
    """A run as its owners describe it. Batches are counted in sequences."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    gated: bool
    vocab: int
    devices: int
    data: int
    fsdp: int
    context: int
    tensor: int
    stages: int
    interleave: int
    remat: str
    sequence: int
    batch: int
    microbatch: int  # sequences per data rank
    attention: str = FLASH
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    reduce_bytes: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if field.type == "int" and not (is_whole and value > 0):
                raise TextRunError(f"{field.name} {value!r} is no whole number above 0")
            if field.type == "bool" and not isinstance(value, bool):
                raise TextRunError(f"{field.name} {value!r} is neither true nor false")
        # First and last chunks may have one layer less, to make room for embedding and head
        if self.stages * max(self.interleave - 1, 1) > self.layers:
            chunks = f"stages {self.stages} x interleave {self.interleave}"
            raise TextRunError(f"{chunks} are more than layers {self.layers}")
        meshed = self.data * self.fsdp * self.context * self.tensor * self.stages
        if meshed != self.devices:
            raise TextRunError(f"axes of {meshed} devices on {self.devices}")
        if self.microbatches < 1:
            raise TextRunError(
                f"batch {self.batch} on data {self.data} x fsdp {self.fsdp} is less than a microbatch "
                f"of {self.microbatch}"
            )
        for key, known in (("remat", RECOMPUTED), ("attention", (FLASH, UNFUSED))):
            if getattr(self, key) not in known:
                raise TextRunError(f"{key} {getattr(self, key)!r} is none of {', '.join(known)}")

    @classmethod
    def of(cls, record: dict[str, Any]) -> TextRun:
        """The run that a JSON object describes; other keys of it are ignored.

        Raises:
          TextRunError: a key is missing, or numbers contradict each other.
        """
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in record.items() if key in known}
        # By default each head has keys of its own
        defaults: dict[str, Any] = {"kv_heads": record.get("heads"), "interleave": 1}
        try:
            return cls(**defaults | values)
        except TypeError as error:
            raise TextRunError(str(error).removeprefix("TextRun.__init__() ")) from error

    @cached_property
    def layer(self) -> Layer:
        """One layer; all of them are the same."""
        head_size = self.width // self.heads
        return decoder_layer(
            self.width, self.width, self.kv_heads * head_size, self.mlp_width, self.gated
        )

    @property
    def microbatches(self) -> float:
        """Microbatches of a data rank per step, the mean where a batch does not divide evenly."""
        return self.batch / (self.data * self.fsdp * self.microbatch)

    @property
    def slots(self) -> float:
        """Slots of a microbatch on a device."""
        return self.microbatch * self.sequence / self.context

    @property
    def recomputed(self) -> tuple[float, float]:
        """Shares of products and of attention that the backward pass computes again."""
        products, attention = RECOMPUTED[self.remat]
        if self.remat == "qkv":
            qkv = self.width * (self.width + 2 * self.kv_heads * (self.width // self.heads))
            products -= qkv / self.layer.parameters
        if self.remat == "sel" and self.attention == FLASH:
            attention = 0.0  # `FLASH_BACKWARD` already counts its own recomputation
        return products, attention


@dataclass(frozen=True)
class TextStep:
    """Seconds of a step by part. The parts sum up to `seconds`."""

    products: float
    attention: float
    traffic: float
    tensor: float
    context: float
    weights: float  # gathers and scatters that compute does not hide
    bubble: float  # of the pipeline, with sends between stages and the wait for the slowest stage
    replicas: float  # gradients between replicas
    update: float
    straggling: float
    low: float  # seconds if everything that can overlap does
    high: float  # seconds if nothing does

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        ends = ("low", "high")
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ends
        }


@dataclass(frozen=True)
class _LayerSeconds:
    """Seconds of one layer for one microbatch, forward and backward."""

    products: float
    attention: float
    traffic: float
    tensor: float
    hidden_tensor: float
    context: float
    hidden_context: float
    weights: float  # if nothing hides them

    @property
    def compute(self) -> float:
        return self.products + self.attention + self.traffic + self.tensor + self.context

    @property
    def hidden(self) -> float:
        """Seconds of collectives that `compute` leaves out because they overlap."""
        return self.hidden_tensor + self.hidden_context


def text_step(run: TextRun, device: Device) -> TextStep:
    """Seconds of a step of a run. Raises `TextRunError` where devices share cores, which this
    closed form does not cover."""
    if device.cluster.shared_cores:
        raise TextRunError(
            f"devices of {device.cluster.name} share cores: simulate a planned batch"
        )
    layer = _layer_seconds(run, device)
    together = device.together(layer.compute, layer.weights)
    head = _head_seconds(run, device)
    stages = run.stages
    microbatches = run.microbatches

    def pipelined(of_layer: float) -> float:
        """Seconds of all microbatches through the stages: the slowest stage decides, and the first
        microbatch's way through the others is waited for."""
        full_stage = math.ceil(run.layers / stages) * of_layer
        last_stage = run.layers // stages * of_layer + head
        mean = (run.layers * of_layer + head) / stages
        return microbatches * max(full_stage, last_stage) + (stages - 1) / run.interleave * mean

    sends = 0.0
    if stages > 1:
        rate = device.cluster.between_nodes.bytes_per_second * device.rates.network
        activations = run.slots * run.width * NUMBER_BYTES / run.tensor
        send = activations / rate + device.cluster.between_nodes.hop_seconds
        sends = 2 * run.interleave * (microbatches + stages - 1) * send
    replicas = _replica_seconds(run, device)
    update = device.memory_seconds(_device_parameters(run) / run.fsdp * UPDATED_BYTES)
    waited = replicas * device.rates.reduced

    step = pipelined(together) + sends + waited + update
    low = max(pipelined(max(layer.compute, layer.weights)), sends, replicas) + update
    high = pipelined(layer.compute + layer.hidden + layer.weights) + sends + replicas + update

    # Parts are means over the stages; during the rest of the pipeline's time, stages wait.
    share = microbatches / stages
    part_seconds = {
        name: share * run.layers * getattr(layer, name)
        for name in ("products", "attention", "traffic", "tensor", "context")
    }
    part_seconds["products"] += share * head
    weights = share * run.layers * (together - layer.compute)
    idle = pipelined(together) - sum(part_seconds.values()) - weights
    return TextStep(
        **part_seconds,
        weights=weights,
        bubble=idle + sends,
        replicas=waited,
        update=update,
        straggling=device.straggled(step, run.devices) - step,
        low=device.straggled(low, run.devices),
        high=device.straggled(high, run.devices),
    )


def _layer_seconds(run: TextRun, device: Device) -> _LayerSeconds:
    """Seconds of one layer of a run for one microbatch."""
    layer = run.layer
    slots = run.slots
    again, attention_again = run.recomputed
    passes = 1 + BACKWARD + again
    rate = device.product_rate(slots, run.width / run.tensor)
    forward = float(layer.attention((run.microbatch * run.sequence**2, 0)))
    pairs = forward / run.context / run.tensor
    matrices = 3 if run.gated else 2
    split = run.tensor if run.sequence_parallel else 1
    stored = stored_bytes(run.width, matrices * run.mlp_width, run.tensor, split)
    traffic = slots * stored * passes * device.rates.traffic
    traffic += layer.parameters / run.tensor * ACCUMULATED_BYTES
    if run.attention == UNFUSED:
        # It computes all pairs, also those that the causal mask hides
        computed = 2 * pairs * (1 + BACKWARD + attention_again) / rate
        scores = run.heads / run.tensor * run.sequence * slots * device.rates.score_bytes
        # `score_bytes` are those of a forward and a backward pass together.
        written = scores * (1 + BACKWARD + attention_again) / (1 + BACKWARD)
        attention = computed + device.memory_seconds(written)
    else:
        attention = pairs * (1 + FLASH_BACKWARD + attention_again) / device.attention_rate

    network = device.rates.network
    summed = slots * run.width * NUMBER_BYTES
    # Two sums of activations forward, after attention and after the MLP, and two backward.
    sums = (2 + 2 + 2 * again) * collective_seconds(
        device.cluster, ALL_REDUCE, summed, Group(run.tensor), network
    )
    waited = sums * device.rates.tensor if run.tensor_overlap else sums

    inner = run.tensor
    keys = 2 * run.kv_heads * (run.width // run.heads) * slots * run.context
    gathers = GATHER_PRICE.passes * collective_seconds(
        device.cluster,
        "all-gather",
        keys * NUMBER_BYTES / run.tensor,
        Group(run.context, inner),
        network,
    )
    exposed = gathers * float(GATHER_PRICE.exposed)

    # The mesh numbers devices of tensor parallelism first, then of context, fsdp and data.
    shards = Group(run.fsdp, inner * run.context)
    held = layer.parameters / run.tensor
    weights = 2 * collective_seconds(
        device.cluster, "all-gather", held * NUMBER_BYTES, shards, network
    ) + collective_seconds(
        device.cluster, "reduce-scatter", held * run.reduce_bytes, shards, network
    )
    return _LayerSeconds(
        products=layer.linear(1) * slots / run.tensor * passes / rate,
        attention=attention,
        traffic=device.memory_seconds(traffic),
        tensor=waited,
        hidden_tensor=sums - waited,
        context=exposed,
        hidden_context=gathers - exposed,
        weights=weights,
    )


def _head_seconds(run: TextRun, device: Device) -> float:
    """Seconds of the head for one microbatch, forward and backward."""
    flops = 2 * run.width * run.vocab * run.slots / run.tensor
    rate = device.product_rate(run.slots, run.width / run.tensor)
    return flops * (1 + BACKWARD) / rate


def _device_parameters(run: TextRun) -> float:
    """Parameters that a tensor rank of one stage holds, with those of both embedding and head."""
    layers = run.layer.parameters * run.layers / run.stages
    return (layers + 2 * run.width * run.vocab) / run.tensor


def _replica_seconds(run: TextRun, device: Device) -> float:
    """Seconds to sum gradients over devices that have other slots but the same parameters."""
    # As in `Network`, a group along two axes has the stride of the inner one: shards of documents
    # are next to each other, and whole copies of the parameters are farther apart.
    stride = run.tensor if run.context > 1 else run.tensor * run.fsdp
    replicas = Group(run.data * run.context, stride)
    summed = run.reduce_bytes * _device_parameters(run) / run.fsdp
    return collective_seconds(device.cluster, ALL_REDUCE, summed, replicas, device.rates.network)
