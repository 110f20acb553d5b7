"""How many slots of a row fit a device: an estimate, on the safe side, that bounds what `auto` may choose.

What a backward pass starts from grows with the slots of a row; the state does not. The estimate counts what
each layer keeps, what the largest layer holds while it runs, and leaves as much again to everything else. In
stages only the layers of one chunk keep something at a time, and what goes in and out of chunks waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.tree_util import DictKey

from jaxmllm.arrays import ceil_divide
from jaxmllm.balance.costs.kept_values import further_widths, named_values
from jaxmllm.balance.stages.trial_choice import CHOICE
from jaxmllm.config.schema import (
    AudioConfig,
    Config,
    DiffusionConfig,
    LanguageConfig,
    Remat,
    TowerConfig,
    VisionConfig,
)
from jaxmllm.models.mllm import MLLM
from jaxmllm.models.model_component import LAYERS
from jaxmllm.phases import LANGUAGE
from jaxmllm.runtime.hardware import device_memory
from jaxmllm.trainable import Params
from jaxmllm.training.optimizer import MOMENTS

PLANNED_MEMORY = 80 << 30  # bytes of a device that is only planned for
USED_SHARE = 0.5  # of what the state leaves, for the rows of one microbatch
KEPT_SHARE = 0.25  # of that, at least, for residuals of phases between their two passes
LEAST_SHARE = 0.1  # of a device, where the state leaves less: the run will say that it does not fit
# Values of a layer that are kept, by `remat`, and that are there while it runs: in widths of the layer, and
# of its MLP. What a list names comes to what `full` keeps.
KEPT_WIDTHS = {"full": (1, 0), "dots": (6, 2), "none": (12, 4)}
RUNNING_WIDTHS = (16, 6)
GATHERED_WIDTHS = 6  # besides, of tokens for the experts: themselves, results and gradients, wide
CROSS_WIDTHS = 8  # besides, of a layer that attends to conditions apart
STREAM_WIDTHS = 14  # besides, of a layer with two streams
CROSS_KEPT_WIDTHS = {"full": 0, "dots": 4, "none": 6}
# Besides, for each layer of a tower that adds to layers of the decoder: what it yields or adds, in two types, and its
# gradient
DEEPSTACK_WIDTHS = 4
STEM_COPIES = 4  # besides, of what convolutions along time and mels yield: before and after GELU, and gradients
MODULATED_WIDTHS = 12  # besides, of a layer that is modulated: vectors of the time, in float32
# Capacities that differ by little must not differ between hosts: down to a power of two.


def slots_that_fit(config: Config, model: MLLM, phase: str) -> int:
    """Slots of a phase's row that a rank can hold: a power of two."""
    slots = _left(config, model) * USED_SHARE / _row_bytes(config, model, phase)
    parts = model.layout(phase).parts
    return 1 << int(math.log2(max(slots * parts, 1)))


def kept_residuals(config: Config, model: MLLM, capacities: Mapping[str, int]) -> dict[str, int]:
    """Microbatches whose residuals stay in memory between the two passes of their phase, by phase of two passes: with
    `auto` a power of two, or none.

    What the largest rows do not take is given to one phase after the other, as much as it has already.

    Args:
      capacities: of the largest rows of every phase, slots of a rank.
    """
    asked = {
        phase: getattr(config.phases, phase).kept_residuals for phase in config.model.two_passes
    }
    microbatches = {phase: 0 if setting == "auto" else setting for phase, setting in asked.items()}
    growing = [phase for phase, setting in asked.items() if setting == "auto"]
    if not growing:  # as in a search for layouts, which says all of them, and often
        return microbatches
    slots = {phase: size / model.layout(phase).parts for phase, size in capacities.items()}
    sizes = {phase: slots[phase] * kept_bytes(config, phase) for phase in microbatches}
    free = _left(config, model)
    rows = max(slots[phase] * _row_bytes(config, model, phase) for phase in model.phases)
    room = max(free - rows / USED_SHARE, free * KEPT_SHARE)
    room -= sum(microbatches[phase] * size for phase, size in sizes.items())
    while growing:
        phase = growing.pop(0)
        added = max(microbatches[phase], 1)
        if added * sizes[phase] <= room:
            microbatches[phase] += added
            room -= added * sizes[phase]
            growing.append(phase)
    return microbatches


def kept_forwards(
    config: Config,
    model: MLLM,
    phase: str,
    capacity: int,
    layers: int,
    memory: float | None = None,
) -> int:
    """Forward operations of a phase's chunks in a pipeline that memory lets keep what `remat` says: a power of
    two, or none.

    Args:
      capacity: of the phase's rows, slots of a rank.
      layers: of the largest chunk.
      memory: bytes of a device; none: of this process's.
    """
    room = _left(config, model, memory) * KEPT_SHARE / len(model.phases)
    shapes = getattr(config.model, phase)
    slots = capacity / model.layout(phase).parts / shapes.stem_stride
    values = layers * _kept_values(shapes, getattr(config.components, phase).remat)
    # What the chunk yields, and what goes beside what each of its layers reads
    values += config.model.carried_width(phase) + layers * _beside(config, phase)
    fitting = room / (slots * values * _itemsize(config, phase))
    return 1 << int(math.log2(fitting)) if fitting >= 1 else 0


def _row_bytes(config: Config, model: MLLM, phase: str) -> float:
    """Bytes that a slot of a row takes."""
    return slot_bytes(config, phase) + _gathered_bytes(config, model, phase)


def _left(config: Config, model: MLLM, memory: float | None = None) -> float:
    """Bytes of a device that the state leaves."""
    memory = memory or memory_of_a_device(model)
    return max(memory - state_bytes(config, model), memory * LEAST_SHARE)


def memory_of_a_device(model: MLLM) -> int:
    """Bytes of a device of the mesh, or of the one that is planned for."""
    mesh = model.layout(LANGUAGE).mesh
    if not isinstance(mesh, Mesh):
        return PLANNED_MEMORY
    # A device of this process: those of others do not tell theirs
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return device_memory(local[0] if local else mesh.devices.flat[0]) or PLANNED_MEMORY


def state_bytes(config: Config, model: MLLM) -> int:
    """Parameters, gradients, moments and averages of the largest share that a device holds."""
    params = model.abstract(config.run.param_dtype)
    trained, _ = model.trainable.split(params)
    moments = MOMENTS * _device_bytes(config, trained)
    averages = _device_bytes(config, {name: trained[name] for name in model.ema}, least=4)
    gradients = _gradient_bytes(config, model, trained)
    return _device_bytes(config, params) + moments + averages + gradients


def _gradient_bytes(config: Config, model: MLLM, trained: Params) -> int:
    """Sums of gradients, in at least float32. Where those are whole (`reduce: step`), a microbatch has whole gradients
    beside them until they are added, of one layer at a time."""
    if config.pipeline.stages > 1:
        return _device_bytes(config, trained, least=4)
    param_dtype = config.run.param_dtype
    sums = model.gradient_sums(trained, jnp.promote_types(param_dtype, jnp.float32))
    beside = [0]
    for phase, record in model.phases.items():
        components = model.by_device(phase).components
        beside.append(0)
        for name in sums.keys() & set(record.components):
            component = components[name]
            axes = jax.tree.leaves(component.axes_of(trained[name]))
            for leaf, names in zip(jax.tree.leaves(sums[name]), axes, strict=True):
                if component.defers(names):
                    _, *shape = leaf.sharding.shard_shape(leaf.shape)
                    numbers = math.prod(shape[1:] if names.stacked else shape)
                    beside[-1] += numbers * component.whole_dtype(names, param_dtype).itemsize
    return _device_bytes(config, sums) + max(beside)


def _device_bytes(config: Config, tree: object, least: int = 0) -> int:
    """Bytes of arrays on the device that holds most, in elements of at least so many."""
    total = 0
    for path, leaf in jax.tree.leaves_with_path(tree):
        layers, *sizes = leaf.sharding.shard_shape(leaf.shape) or (1,)
        if DictKey(LAYERS) in path:
            layers = _layers_of_a_stage(config, layers)
        total += layers * math.prod(sizes) * max(leaf.dtype.itemsize, least)
    return total


def slot_bytes(config: Config, phase: str) -> float:
    """Bytes that a slot of a row takes on the devices of its rank."""
    shapes = getattr(config.model, phase)
    running, running_mlp = RUNNING_WIDTHS
    if isinstance(shapes, DiffusionConfig):
        running += MODULATED_WIDTHS + (shapes.attentions - 1) * CROSS_WIDTHS
        running += STREAM_WIDTHS * (shapes.streams - 1)
    if _has_experts(shapes):  # whose hidden values are those of a block
        running_mlp = 0
    values = running * shapes.width + running_mlp * shapes.mlp_width
    if isinstance(shapes, AudioConfig):
        values += STEM_COPIES * shapes.stem_numbers
    if isinstance(shapes, VisionConfig) and shapes.resamples:
        values += shapes.learned_positions  # a weight for each
    if isinstance(shapes, VisionConfig | LanguageConfig):
        values += DEEPSTACK_WIDTHS * config.model.deepstack_depth * shapes.width
    if config.pipeline.stages > 1:
        in_flight = config.pipeline.microbatches_in_flight
        if in_flight == "auto":
            in_flight = CHOICE.per_stage * config.pipeline.stages
        # Inputs of chunks and gradients of their outputs
        values += 2 * in_flight * (shapes.width + _beside(config, phase))
    return kept_bytes(config, phase) + float(values * _itemsize(config, phase))


def kept_bytes(config: Config, phase: str) -> float:
    """Bytes of a slot that are kept for the backward pass."""
    shapes = getattr(config.model, phase)
    layers = _layers_of_a_stage(config, shapes.layers)
    values = _kept_values(shapes, getattr(config.components, phase).remat)
    if config.pipeline.stages > 1:
        values += _beside(config, phase)
        forwards = config.pipeline.kept_residuals
        # What `auto` keeps has memory of its own
        layers *= 1 if forwards == "auto" else 1 + forwards
    return layers * values * _itemsize(config, phase) / shapes.stem_stride


def _beside(config: Config, phase: str) -> int:
    """Numbers of a slot that go in stages beside what layers read and yield."""
    shapes = getattr(config.model, phase)
    if isinstance(shapes, DiffusionConfig):  # conditions that have an attention of their own
        return shapes.width if shapes.conditioning == "cross" else 0
    width: int = getattr(config.model, phase).width
    return config.model.carried_width(phase) - width


def _layers_of_a_stage(config: Config, layers: int) -> int:
    """Of the stage that has most."""
    return ceil_divide(layers, config.pipeline.stages)


def _kept_values(shapes: TowerConfig | DiffusionConfig | LanguageConfig, remat: Remat) -> float:
    """Numbers that a layer keeps of a slot for its backward pass."""
    if isinstance(remat, str):
        widths, mlp_widths = KEPT_WIDTHS[remat]
        mlp_width = 0 if _has_experts(shapes) else shapes.mlp_width
        if isinstance(shapes, DiffusionConfig):
            widths += (shapes.attentions - 1) * CROSS_KEPT_WIDTHS[remat]
        more, more_of_mlp = further_widths(shapes, remat)
        return (widths + more) * shapes.width + (mlp_widths + more_of_mlp) * mlp_width
    kv_heads = shapes.kv_heads if isinstance(shapes, LanguageConfig) else shapes.heads
    queries, keys = (heads * shapes.head_size for heads in (shapes.heads, kv_heads))
    # A logsumexp takes up to two
    of_name = named_values(shapes, queries, keys, shapes.mlp_width, logsumexp=2)
    if isinstance(shapes, DiffusionConfig):
        of_name |= {
            name: shapes.attentions * of_name[name] for name in ("attention", "projections")
        }
        of_name["mlp"] += shapes.width  # what is gated
    widths, _ = KEPT_WIDTHS["full"]
    return widths * shapes.width + sum(of_name[name] for name in remat)


def _has_experts(shapes: TowerConfig | DiffusionConfig | LanguageConfig) -> bool:
    """Whether the MLPs of a tower are mixtures, which keep none of their hidden values."""
    return isinstance(shapes, LanguageConfig) and shapes.experts is not None


def _gathered_bytes(config: Config, model: MLLM, phase: str) -> float:
    """Bytes that a slot takes where devices compute their experts for the tokens of all that share them."""
    shapes = getattr(config.model, phase)
    if not _has_experts(shapes):
        return 0
    numbers = GATHERED_WIDTHS * shapes.width * model.layout(phase).size("experts")
    return float(numbers * _itemsize(config, phase))


def _itemsize(config: Config, phase: str) -> int:
    return jnp.dtype(getattr(config.components, phase).compute_dtype).itemsize
