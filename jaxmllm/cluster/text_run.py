"""Step time of a dense decoder trained on rows of one length, in closed form.

    TextRun, Device --text_step--> TextStep        seconds, by what they go to, and two ends

For runs that others have published, for what they say of themselves is a line of numbers.
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

NUMBER_BYTES: Final = 2  # bfloat16, in which all of them compute
FLASH = "flash"
UNFUSED = "unfused"
# What the backward pass makes again: shares of the products and of the attention of a layer. `selop` is every second
# operation, `qkv` everything but the first projections, whose share depends on the layer.
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
    """A run as its owners tell of it. Batches are in sequences."""

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
    microbatch: int  # sequences of a data rank
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
        # First and last chunks may lack a layer, for embedding and head
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
        """From a JSON object, whose other keys are left alone.

        Raises:
          TextRunError: a key is missing, or numbers contradict.
        """
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in record.items() if key in known}
        # A head each has keys of its own where nothing else is said
        usual: dict[str, Any] = {"kv_heads": record.get("heads"), "interleave": 1}
        try:
            return cls(**usual | values)
        except TypeError as error:
            raise TextRunError(str(error).removeprefix("TextRun.__init__() ")) from error

    @cached_property
    def layer(self) -> Layer:
        """One of them, as they are all alike."""
        head_size = self.width // self.heads
        return decoder_layer(
            self.width, self.width, self.kv_heads * head_size, self.mlp_width, self.gated
        )

    @property
    def microbatches(self) -> float:
        """Of a data rank in a step; on the average, where a batch does not divide evenly."""
        return self.batch / (self.data * self.fsdp * self.microbatch)

    @property
    def slots(self) -> float:
        """Of a microbatch on a device."""
        return self.microbatch * self.sequence / self.context

    @property
    def recomputed(self) -> tuple[float, float]:
        """Shares of products and of attention that the backward pass makes again."""
        products, attention = RECOMPUTED[self.remat]
        if self.remat == "qkv":
            qkv = self.width * (self.width + 2 * self.kv_heads * (self.width // self.heads))
            products -= qkv / self.layer.parameters
        if self.remat == "sel" and self.attention == FLASH:
            attention = 0.0  # it recomputes by itself, in any case
        return products, attention


@dataclass(frozen=True)
class TextStep:
    """Seconds of a step, by what they go to. The parts sum up to `seconds`."""

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
    low: float  # everything that can overlap does
    high: float  # nothing does

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
class _Layer:
    """Seconds of one layer for one microbatch, forward and backward."""

    products: float
    attention: float
    traffic: float
    tensor: float
    hidden_tensor: float
    context: float
    hidden_context: float
    weights: float  # on their own

    @property
    def compute(self) -> float:
        return self.products + self.attention + self.traffic + self.tensor + self.context

    @property
    def hidden(self) -> float:
        """Seconds of collectives that `compute` leaves out because they overlap."""
        return self.hidden_tensor + self.hidden_context


def text_step(run: TextRun, device: Device) -> TextStep:
    """What a step of a run takes. Raises `TextRunError` where devices share cores, which this form does not tell."""
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
        """All microbatches through the stages: the slowest decides, and the first one's way through
        the others is waited for."""
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

    # Parts are means over the stages; what the pipeline takes besides them, stages wait.
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


def _layer_seconds(run: TextRun, device: Device) -> _Layer:
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
        # Of all pairs, also those that causal attention does not see
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
    return _Layer(
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
    """Of one microbatch."""
    flops = 2 * run.width * run.vocab * run.slots / run.tensor
    rate = device.product_rate(run.slots, run.width / run.tensor)
    return flops * (1 + BACKWARD) / rate


def _device_parameters(run: TextRun) -> float:
    """Parameters of a stage's share of a tensor rank, those of embedding and head on one of them."""
    layers = run.layer.parameters * run.layers / run.stages
    return (layers + 2 * run.width * run.vocab) / run.tensor


def _replica_seconds(run: TextRun, device: Device) -> float:
    """Gradients between devices that see other slots and hold the same parameters."""
    replicas = Group(run.data * run.context, run.tensor * run.fsdp)
    summed = run.reduce_bytes * _device_parameters(run) / run.fsdp
    return collective_seconds(device.cluster, ALL_REDUCE, summed, replicas, device.rates.network)
