"""How many slots of a row fit a device: an estimate on the safe side, which bounds what `auto` may
choose.

What a backward pass starts from grows with the slots of a row; the state does not. The estimate
counts what each layer keeps and what the largest layer holds while it runs, and leaves the same
amount again to everything else. In stages only the layers of one chunk keep something at a time,
and inputs and outputs of chunks wait.
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
    ConfigError,
    DiffusionConfig,
    LanguageConfig,
    Remat,
    TowerConfig,
    VisionConfig,
)
from jaxmllm.models.mllm import MLLM
from jaxmllm.models.model_component import LAYERS
from jaxmllm.models.rows import TokenPool
from jaxmllm.phases import LANGUAGE
from jaxmllm.runtime.hardware import device_memory
from jaxmllm.trainable import Params
from jaxmllm.training.optimizer import MOMENTS

PLANNED_MEMORY = 80 << 30  # bytes of a device that is only planned for
USED_SHARE = 0.5  # of what the state leaves, for the rows of one microbatch
KEPT_SHARE = 0.25  # of what the state leaves, at least, for residuals between a phase's two passes
# Least share of a device that counts as left: where the state leaves less, the run will say that
# it does not fit
LEAST_SHARE = 0.1
# Values of a slot that a layer keeps, by `remat`, and that it has in memory while it runs, in
# (widths of the layer, widths of its MLP). What a list names is kept in addition to `full`.
KEPT_WIDTHS = {"full": (1, 0), "dots": (6, 2), "none": (12, 4)}
RUNNING_WIDTHS = (16, 6)
# Additional widths while a layer runs:
GATHERED_WIDTHS = 6  # tokens gathered to the experts, their results and gradients, in float32
CROSS_WIDTHS = 8  # a second attention, to conditions
STREAM_WIDTHS = 14  # a second stream
CROSS_KEPT_WIDTHS = {"full": 0, "dots": 4, "none": 6}  # kept of that second attention
# For each layer of a tower whose output is added to a layer of the decoder: the output in two
# dtypes, and its gradient
DEEPSTACK_WIDTHS = 4
# Copies of what convolutions along time and mels yield: before and after GELU, and gradients
STEM_COPIES = 4
MODULATED_WIDTHS = 12  # vectors of the time that modulate a layer, in float32
# Memory may differ a little between hosts but capacities must not, so these are powers of two.


def slots_that_fit(config: Config, model: MLLM, phase: str) -> int:
    """Slots of a phase's row that a rank can hold: a power of two."""
    slots = _free_bytes(config, model) * USED_SHARE / _row_slot_bytes(config, model, phase)
    parts = model.layout(phase).parts
    return 1 << int(math.log2(max(slots * parts, 1)))


def kept_residuals(config: Config, model: MLLM, capacities: Mapping[str, int]) -> dict[str, int]:
    """Microbatches whose residuals stay in memory between the two passes of their phase, for every
    phase of two passes: with `auto` a power of two, or 0.

    Memory that the largest rows do not take is given to one phase after the other, each time as
    much as the phase has already.

    Args:
      capacities: slots per rank of the largest row of every phase.
    """
    asked = {
        phase: getattr(config.phases, phase).kept_residuals for phase in config.model.two_passes
    }
    microbatches = {phase: 0 if setting == "auto" else setting for phase, setting in asked.items()}
    growing = [phase for phase, setting in asked.items() if setting == "auto"]
    if not growing:  # a search for layouts fixes all of them, and calls this often
        return microbatches
    slots = {phase: size / model.layout(phase).parts for phase, size in capacities.items()}
    sizes = {phase: slots[phase] * kept_bytes(config, phase) for phase in microbatches}
    free = _free_bytes(config, model)
    rows = max(slots[phase] * _row_slot_bytes(config, model, phase) for phase in model.phases)
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
    """Number of forward operations of a phase's chunks in a pipeline for which memory has room to
    keep what `remat` says: a power of two, or 0.

    Args:
      capacity: of the phase's rows, slots per rank.
      layers: of the largest chunk.
      memory: bytes of a device; none: those of this process's devices.
    """
    room = _free_bytes(config, model, memory) * KEPT_SHARE / len(model.phases)
    shapes = getattr(config.model, phase)
    slots = capacity / model.layout(phase).parts / shapes.stem_stride
    values = layers * _kept_values(shapes, getattr(config.components, phase).remat)
    # The output of the chunk, and what is carried along with the input of each of its layers
    values += config.model.carried_width(phase) + layers * config.model.carried_beside(phase)
    fitting = room / (slots * values * _itemsize(config, phase))
    return 1 << int(math.log2(fitting)) if fitting >= 1 else 0


def _row_slot_bytes(config: Config, model: MLLM, phase: str) -> float:
    """Bytes that a slot of a row takes."""
    return slot_bytes(config, phase) + _gathered_bytes(config, model, phase)


def _free_bytes(config: Config, model: MLLM, memory: float | None = None) -> float:
    """Bytes of a device that the state leaves, at least `LEAST_SHARE` of them."""
    memory = memory or memory_of_a_device(model)
    return max(memory - state_bytes(config, model), memory * LEAST_SHARE)


def memory_of_a_device(model: MLLM) -> int:
    """Bytes of a device of the mesh; `PLANNED_MEMORY` if it has none, or they do not tell."""
    return told_memory(model) or PLANNED_MEMORY


def told_memory(model: MLLM) -> int | None:
    """Bytes of a device of the mesh; None if it has none, or they do not tell."""
    mesh = model.layout(LANGUAGE).mesh
    if not isinstance(mesh, Mesh):
        return None
    # A device of this process, because devices of other processes do not tell their memory
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return device_memory(local[0] if local else mesh.devices.flat[0])


def check_room_for_pools(config: Config, model: MLLM, pools: Mapping[str, TokenPool]) -> None:
    """Raise `ConfigError` where a device has no memory for the pools of a step beside its state.

    All media tokens of a step wait there, so smaller pools would only be more in number.

    Args:
      pools: abstract pools of language and of the owners of exchanges, by phase.
    """
    memory = told_memory(model)
    state = state_bytes(config, model)
    pool_bytes = {phase: _device_bytes(config, pool) for phase, pool in pools.items()}
    others = [phase for phase in pools if phase != LANGUAGE]
    generators = sum(pool_bytes[phase] for phase in others if model.phases[phase].generates)
    encoders = sum(pool_bytes[phase] for phase in others) - generators
    # Pools of encoders are freed before those of generators are made.
    needed = pool_bytes[LANGUAGE] + max(encoders, generators)
    if memory is None or not state < memory < state + needed:
        return
    sizes = ", ".join(f"{phase} {size / 2**30:.2f}" for phase, size in pool_bytes.items())
    raise ConfigError(
        f"data.batch_size ({config.data.batch_size}): a device has {memory / 2**30:.2f} GiB, of which parameters, "
        f"moments and gradients take {state / 2**30:.2f}, and the pools of a step's media tokens {needed / 2**30:.2f} "
        f"({sizes}); lower it, or use more devices; if only batches of one source alone have so many tokens, set "
        f"balance.pool_slots to what usual ones need"
    )


def state_bytes(config: Config, model: MLLM) -> int:
    """Bytes of parameters, gradients, moments and averages on the device that holds most."""
    params = model.abstract(config.run.param_dtype)
    trained, _ = model.trainable.split(params)
    moments = MOMENTS * _device_bytes(config, trained)
    averages = _device_bytes(config, {name: trained[name] for name in model.ema}, least=4)
    gradients = _gradient_bytes(config, model, trained)
    return _device_bytes(config, params) + moments + averages + gradients


def _gradient_bytes(config: Config, model: MLLM, trained: Params) -> int:
    """Bytes of the sums of gradients, in at least float32. Where these are whole (`reduce: step`),
    a microbatch also has whole gradients of one layer at a time, until they are added."""
    if config.pipeline.stages > 1:
        return _device_bytes(config, trained, least=4)
    param_dtype = config.run.param_dtype
    sums = model.gradient_sums(trained, jnp.promote_types(param_dtype, jnp.float32))
    layer_bytes = [0]
    for phase, record in model.phases.items():
        components = model.by_device(phase).components
        # Phases follow one another, so the largest of these counts, not their sum.
        layer_bytes.append(0)
        for name in sums.keys() & set(record.components):
            component = components[name]
            axes = jax.tree.leaves(component.axes_of(trained[name]))
            for leaf, names in zip(jax.tree.leaves(sums[name]), axes, strict=True):
                if component.defers(names):
                    # The first axis counts the devices, each of which has its own sum.
                    _, *shape = leaf.sharding.shard_shape(leaf.shape)
                    numbers = math.prod(shape[1:] if names.stacked else shape)
                    layer_bytes[-1] += numbers * component.whole_dtype(names, param_dtype).itemsize
    return _device_bytes(config, sums) + max(layer_bytes)


def _device_bytes(config: Config, tree: object, least: int = 0) -> int:
    """Bytes of arrays on the device that holds most, with elements of at least `least` bytes."""
    total = 0
    for path, leaf in jax.tree.leaves_with_path(tree):
        layers, *sizes = leaf.sharding.shard_shape(leaf.shape) or (1,)
        if DictKey(LAYERS) in path:
            layers = _stage_layers(config, layers)
        total += layers * math.prod(sizes) * max(leaf.dtype.itemsize, least)
    return total


def slot_bytes(config: Config, phase: str) -> float:
    """Bytes that a slot of a row takes on the devices of its rank."""
    shapes = getattr(config.model, phase)
    running, running_mlp = RUNNING_WIDTHS
    if isinstance(shapes, DiffusionConfig):
        running += MODULATED_WIDTHS + (shapes.attentions - 1) * CROSS_WIDTHS
        running += STREAM_WIDTHS * (shapes.streams - 1)
    if _has_experts(shapes):  # their hidden values exist within a block only
        running_mlp = 0
    values = running * shapes.width + running_mlp * shapes.mlp_width
    if isinstance(shapes, AudioConfig):
        values += STEM_COPIES * shapes.stem_numbers
    if isinstance(shapes, VisionConfig) and shapes.resamples:
        values += shapes.learned_positions  # resampling has a weight for each
    if isinstance(shapes, VisionConfig | LanguageConfig):
        values += DEEPSTACK_WIDTHS * config.model.deepstack_depth * shapes.width
    if config.pipeline.stages > 1:
        in_flight = config.pipeline.microbatches_in_flight
        if in_flight == "auto":
            in_flight = CHOICE.per_stage * config.pipeline.stages
        # Inputs of chunks and gradients of their outputs
        values += 2 * in_flight * (shapes.width + config.model.carried_beside(phase))
    return kept_bytes(config, phase) + float(values * _itemsize(config, phase))


def kept_bytes(config: Config, phase: str) -> float:
    """Bytes of a slot that are kept for the backward pass."""
    shapes = getattr(config.model, phase)
    layers = _stage_layers(config, shapes.layers)
    values = _kept_values(shapes, getattr(config.components, phase).remat)
    if config.pipeline.stages > 1:
        values += config.model.carried_beside(phase)
        forwards = config.pipeline.kept_residuals
        # What `auto` keeps has a share of memory of its own: `kept_forwards`
        layers *= 1 if forwards == "auto" else 1 + forwards
    return layers * values * _itemsize(config, phase) / shapes.stem_stride


def _stage_layers(config: Config, layers: int) -> int:
    """Layers of the stage that has most."""
    return ceil_divide(layers, config.pipeline.stages)


def _kept_values(shapes: TowerConfig | DiffusionConfig | LanguageConfig, remat: Remat) -> float:
    """Numbers per slot that a layer keeps for its backward pass."""
    if isinstance(remat, str):
        widths, mlp_widths = KEPT_WIDTHS[remat]
        mlp_width = 0 if _has_experts(shapes) else shapes.mlp_width
        if isinstance(shapes, DiffusionConfig):
            widths += (shapes.attentions - 1) * CROSS_KEPT_WIDTHS[remat]
        more, more_of_mlp = further_widths(shapes, remat)
        return (widths + more) * shapes.width + (mlp_widths + more_of_mlp) * mlp_width
    kv_heads = shapes.kv_heads if isinstance(shapes, LanguageConfig) else shapes.heads
    queries, keys = (heads * shapes.head_size for heads in (shapes.heads, kv_heads))
    # A logsumexp, in float32, takes up to two numbers of the compute dtype
    of_name = named_values(shapes, queries, keys, shapes.mlp_width, logsumexp=2)
    if isinstance(shapes, DiffusionConfig):
        of_name |= {
            name: shapes.attentions * of_name[name] for name in ("attention", "projections")
        }
        of_name["mlp"] += shapes.width  # the output of the MLP, before its gate
    widths, _ = KEPT_WIDTHS["full"]
    return widths * shapes.width + sum(of_name[name] for name in remat)


def _has_experts(shapes: TowerConfig | DiffusionConfig | LanguageConfig) -> bool:
    """Whether the MLPs of a model section are mixtures, which keep none of their hidden values."""
    return isinstance(shapes, LanguageConfig) and shapes.experts is not None


def _gathered_bytes(config: Config, model: MLLM, phase: str) -> float:
    """Bytes per slot of tokens gathered to experts, which a device computes for the tokens of all
    devices that share them; 0 without experts."""
    shapes = getattr(config.model, phase)
    if not _has_experts(shapes):
        return 0
    numbers = GATHERED_WIDTHS * shapes.width * model.layout(phase).size("experts")
    return float(numbers * _itemsize(config, phase))


def _itemsize(config: Config, phase: str) -> int:
    return jnp.dtype(getattr(config.components, phase).compute_dtype).itemsize
