"""A step of the 84B omni model on 2,560 H100s that are not there, in every balance mode and as a
chain of stages.

    rows simulated    `mode` none, tokens, language, phases: on the mesh of `MESH`, rows chosen for
                      each mode
                      `chain`: encoder-first pipeline stages with tensor parallelism, and nothing
                      balanced

The model has the sizes of OrchMLLM's largest (arXiv 2503.23830): language 80 x 8,192, vocabulary
152,064, vision 51 x 4,096, audio 32 x 1,280. Batches are generated, 32 examples per device. Nothing
is fitted to what others measured.

The chain is what Megatron-LM would run: layers cut into stages by their parameters, encoders first,
eight devices to each layer; examples packed in the order of sampling into microbatches of up to
`TOKENS` tokens, with their media encoded in the same microbatch; 1F1B, stages that wait only for
what they need, full recomputation, and gradients summed over replicas once per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.omni import omni_config
from jaxmllm.arrays import Longs
from jaxmllm.balance.costs.flops import Layer as FlopsLayer
from jaxmllm.balance.costs.flops import phase_layers
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.cluster.clusters import ALL_REDUCE, CLUSTERS
from jaxmllm.cluster.collectives import Group, collective_seconds
from jaxmllm.cluster.device_peak import programs_peak
from jaxmllm.cluster.device_seconds import BACKWARD, UPDATED_BYTES, Device
from jaxmllm.cluster.held import resident
from jaxmllm.cluster.simulate import real_flops, simulate
from jaxmllm.config.schema import Config, ModelConfig
from jaxmllm.phases import LANGUAGE
from jaxmllm.tools.generated_lengths import GeneratedLengths, generated_lengths
from jaxmllm.training.programs.base import Programs
from sharding.mesh import abstract_mesh
from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.cuts import partition
from sharding.pipeline.graph import Workload
from sharding.pipeline.layer_costs import Layer, chain_work, layer_costs
from sharding.pipeline.ring import Ring
from sharding.pipeline.schedules.by_name import scheduler_of
from sharding.pipeline.schedules.schedule import asynchronous

SIMULATED: Final = "simulated"
MODEL: Final = "OrchMLLM-84B"
MODES: Final = ("none", "tokens", "language", "phases")
DEVICES: Final = 2560
PER_DEVICE: Final = 32  # examples
MESH: Final = {"data": 40, "fsdp": 64}
CHIP: Final = "h100"
TENSOR: Final = 8
STAGES: Final = 10
TOKENS: Final = 8192  # in a language microbatch
TICK: Final = 1e-9  # seconds; unit of the integer durations of operations


def simulated_rows(seed: int) -> list[dict[str, Any]]:
    """The rows of every mode and of the chain."""
    cluster = CLUSTERS[CHIP]
    device = Device(cluster, cluster.efficiency.share)
    rows = []
    for mode in MODES:
        lengths = generated_lengths(_config(mode), abstract_mesh(MESH, DEVICES), seed)
        programs = lengths.programs()
        plan = plan_step(lengths.items, programs.spec)
        step = simulate(programs, plan, lengths.items, device)
        microbatches = {name: phase.microbatches for name, phase in plan.phases.items()}
        low, high = step.interval(device)
        rows.append(
            {
                "kind": SIMULATED,
                "mode": mode,
                "mesh": MESH,
                "step_s": step.seconds,
                "low_s": low,
                "high_s": high,
                "overlapped_s": step.low,
                "serial_s": step.high,
                "mfu": step.mfu,
                "hfu": step.hfu,
                "parts": dict(step.parts),
                "resident_bytes": resident(programs).total,
                "peak_bytes": programs_peak(programs, microbatches=microbatches).bytes,
                "capacities": {
                    name: list(phase.capacities) for name, phase in programs.spec.phases.items()
                },
            }
        )
        print(f"{mode}: {step.seconds:.1f} s, MFU {step.mfu:.3f}", flush=True)
    rows.append(chain_row(programs, lengths, device))
    return rows


def _config(mode: str) -> Config:
    return omni_config(
        MODEL,
        mesh=MESH,
        balance={"mode": mode},
        data={"batch_size": DEVICES * PER_DEVICE},
    )


# ---------------------------------------------------------------------------- the chain of stages


def chain_row(programs: Programs, lengths: GeneratedLengths, device: Device) -> dict[str, Any]:
    """The row of the chain of stages, on the same batch.

    Args:
      programs: programs of the model on any mesh, from which the FLOPs for MFU are taken.
    """
    replicas = DEVICES // (TENSOR * STAGES)
    chain = _Chain(lengths, device)
    slowest = 0.0
    work = 0.0
    for replica in range(replicas):
        makespan, mean = chain.seconds(replica, replicas)
        slowest = max(slowest, makespan)
        work += mean / replicas
    cluster = device.cluster
    held_parameters = chain.parameters / (TENSOR * STAGES)
    sum_seconds = collective_seconds(
        cluster, ALL_REDUCE, 4 * held_parameters, Group(replicas, TENSOR), device.rates.network
    )
    seconds_by_part = {
        "compute": work,
        "bubble": slowest - work,
        "replicas": sum_seconds * device.rates.reduced,
        "update": device.memory_seconds(held_parameters * UPDATED_BYTES),
    }
    step = sum(seconds_by_part.values())
    seconds_by_part["straggling"] = device.straggled(step, DEVICES) - step
    seconds = sum(seconds_by_part.values())
    uncertainty = cluster.efficiency.uncertainty
    mfu = real_flops(programs, lengths.items) / (DEVICES * device.peak * seconds)
    print(f"chain: {seconds:.1f} s, MFU {mfu:.3f}", flush=True)
    return {
        "kind": SIMULATED,
        "mode": "chain",
        "mesh": {"data": replicas, "tensor": TENSOR, "stages": STAGES},
        "step_s": seconds,
        "low_s": seconds * (1 - uncertainty),
        "high_s": seconds * (1 + uncertainty),
        "mfu": mfu,
        "parts": seconds_by_part,
        "layers_of_stages": {chain.name: list(chain.layers) for chain in chain.ring.chains},
    }


@dataclass(frozen=True)
class _Part:
    """The part of a microbatch in one phase."""

    slots: int
    squares: tuple[int, int]  # sums of squares, as `layer.attention` takes them


class _Chain:
    """A chain of stages cut by parameters, with microbatches as sampled."""

    def __init__(self, lengths: GeneratedLengths, device: Device):
        self.items = lengths.items
        self.device = device
        self.model: ModelConfig = lengths.config.model
        self.phases = list(lengths.items.phases)
        self.nothing = {phase: self._layers(phase, _Part(1, (0, 0))) for phase in self.phases}
        self.parameters = sum(
            layer.parameters for layers in self.nothing.values() for layer in layers
        )
        self.ring: Ring = partition(self.nothing, STAGES, "chain", cut_by="parameters")

    def seconds(self, replica: int, replicas: int) -> tuple[float, float]:
        """Seconds until a replica's last stage is done, and mean seconds of work of its stages."""
        microbatches = list(self._microbatches(replica, replicas))
        work = []
        for chain in self.ring.chains:
            microbatch_layers = (
                self._layers(chain.name, microbatch[chain.name]) for microbatch in microbatches
            )
            costs = [
                layer_costs(self.nothing | {chain.name: layers})[chain.name]
                for layers in microbatch_layers
            ]
            work.append(chain_work(chain, costs))
        encoders = len(self.ring.encoders)
        inputs = tuple(
            tuple((encoder, index) for encoder in range(encoders))
            for index in range(len(microbatches))
        )
        graph = build_graph(self.ring, Workload(tuple(work), inputs))
        schedule = scheduler_of("1f1b").make(graph, None, 1)
        return asynchronous(schedule) * TICK, float(graph.rank_work.mean()) * TICK

    def _microbatches(self, replica: int, replicas: int) -> Iterator[dict[str, _Part]]:
        """Microbatches of a replica: consecutive examples, as many as `TOKENS` allow."""
        count = len(self.items.examples) // replicas
        first_example = replica * count
        tokens = self.items.phases[LANGUAGE].length[first_example : first_example + count]
        begin = total = 0
        for end in range(count + 1):
            if end == count or (total and total + tokens[end] > TOKENS):
                yield {
                    phase: self._part(phase, first_example + begin, first_example + end)
                    for phase in self.phases
                }
                begin = end
                total = 0
            total += int(tokens[end]) if end < count else 0

    def _part(self, phase: str, begin: int, end: int) -> _Part:
        items = self.items.phases[phase]
        item_slice = slice(*np.searchsorted(items.example, [begin, end]))
        length: Longs = items.length[item_slice]
        return _Part(int(length.sum()), (int((length**2).sum()), 0))

    def _layers(self, phase: str, part: _Part) -> list[Layer]:
        """Layers of a phase, whose costs are durations of the forward pass on one of the `TENSOR`
        devices, in units of `TICK`."""
        layers = phase_layers(self.model, phase)
        # All blocks of a phase are one object, so keying by id times each kind of layer once
        layer_by_id = {id(layer): self._layer(phase, layer, part) for layer in layers}
        return [layer_by_id[id(layer)] for layer in layers]

    def _layer(self, phase: str, layer: FlopsLayer, part: _Part) -> Layer:
        """One of these layers: products with the sums of activations over `TENSOR`, and
        attention."""
        shapes = getattr(self.model, phase)
        device = self.device
        slots = max(part.slots, 1)
        rate = device.product_rate(slots, shapes.width / TENSOR)
        linear = layer.linear(slots) / TENSOR / rate
        if any(layer.attention_squares):
            tokens = slots / getattr(shapes, "stem_stride", 1)
            sum_seconds = collective_seconds(
                device.cluster,
                ALL_REDUCE,
                2 * tokens * shapes.width,
                Group(TENSOR),
                device.rates.network,
            )
            # Activations are summed twice in each of three passes (forward, recomputed, backward).
            # `linear` is the time of the forward pass, which is later counted 2 + BACKWARD times
            linear += 2 * sum_seconds * 3 / (2 + BACKWARD)
        return Layer(
            component=layer.component,
            linear=round(linear / TICK),
            attention=round(layer.attention(part.squares) / TENSOR / device.attention_rate / TICK),
            parameters=layer.parameters,
        )
