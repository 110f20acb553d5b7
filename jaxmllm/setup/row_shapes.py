"""What rows of a phase must look like: their alignment, attention blocks, and largest size.

Rows consist of whole attention blocks and whole language tokens: no row ends inside of one.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxmllm.attention import kernel_cudnn
from jaxmllm.attention.attention import GPUS
from jaxmllm.balance.records import PhaseSpec, PlanSpec
from jaxmllm.balance.sizes.inputs import Alignment
from jaxmllm.config.schema import Config, ConfigError, PhaseConfig
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.models.mllm import MLLM
from jaxmllm.row_format import RowFormat
from jaxmllm.setup.row_memory import memory_of_a_device
from sharding.mesh import platform_of

SMALL_BLOCK, SMALLEST_BLOCK = 64, 32  # tokens


def alignment(
    config: Config, phase: str, formats: Mapping[str, RowFormat], parts: int
) -> Alignment:
    """The attention blocks and language tokens that rows of a phase consist of: every part of a row
    has the same number of them.

    A small block has 64 tokens, if that divides `phases.<phase>.block`, and the smallest 32, if
    that is a whole number of language tokens. Towers with windowed attention take small blocks for
    all rows: a larger one would hold several windows.

    Args:
      formats: by encoder phase; a phase without one has rows of text, where a slot is a token.
      parts: number that the slots of a rank are split into (context parallelism).
    """
    stride = 1
    token = 1
    if phase in formats:
        stride = formats[phase].stride
        token = formats[phase].alignment
    # The config gives blocks in tokens of attention; an alignment has them in slots.
    block = getattr(config.phases, phase).block * stride
    small = SMALL_BLOCK * stride
    smallest = SMALLEST_BLOCK * stride
    if block % small:
        return Alignment(block, stride=stride, token=token, parts=parts)
    if phase in formats and phase in config.model.windows:
        block = small
    smallest_whole = None if smallest % token else smallest
    return Alignment(block, small, smallest_whole, stride, token, parts=parts)


def largest_row(
    config: Config,
    phase: str,
    formats: Mapping[str, RowFormat],
    parts: int,
    *,
    span: int,
    fitting: int,
) -> int:
    """Slots of the largest row that a phase may have; longer items are rejected.

    Args:
      span: the largest number of ranks that may hold a row together.
      fitting: slots that the memory of a rank holds.
    """
    settings: PhaseConfig = getattr(config.phases, phase)
    if settings.capacities != "auto":
        return max(settings.capacities) * span
    largest = fitting if settings.max_capacity == "auto" else settings.max_capacity
    return alignment(config, phase, formats, parts).round_down(largest) * span


def attention_spec(
    config: Config, model: MLLM, formats: Mapping[str, RowFormat], spec: PlanSpec
) -> AttentionSpec:
    """Attention blocks and parts of every phase's rows.

    Raises:
      ConfigError: the attention kernel that the config names does not support a phase's rows or
        model.
    """
    parts = {phase: model.layout(phase).parts for phase in spec.phases}
    blocks = {}
    smaller = {}
    for phase, rows in spec.phases.items():
        shape = alignment(config, phase, formats, parts[phase])
        # Blocks of attention are in tokens, those of an alignment in slots.
        blocks[phase] = shape.block // shape.stride
        for row_class in rows.classes:
            block = shape.attention_block(row_class)
            if block < blocks[phase]:
                smaller[phase, row_class] = block
    runs = _runs(config, model, formats, spec, parts)
    for phase, block in blocks.items():
        _check_kernel(model, phase, block)
    return AttentionSpec(
        blocks=blocks,
        smaller_blocks=smaller,
        parts=parts,
        bidirectional=config.model.language.bidirectional,
        windows=config.model.windows,
        crossed=config.model.crossed,
        runs=runs,
    )


def _check_kernel(model: MLLM, phase: str, block: int) -> None:
    """Raise `ConfigError` where the config names a kernel that does not support the phase."""
    asked = model.components[phase].settings.attention
    kernel, needs = model.attention_choice(phase, block)
    if needs and kernel == asked:
        raise ConfigError(
            f"components.{phase}.attention ({kernel}): that kernel needs {needs}; set it to auto or jax, or change "
            f"model.{phase}, components.{phase}.compute_dtype or phases.{phase}.block"
        )


def _runs(
    config: Config,
    model: MLLM,
    formats: Mapping[str, RowFormat],
    spec: PlanSpec,
    parts: Mapping[str, int],
) -> dict[str, int]:
    """Most documents of a row, for phases whose attention kernel reads the positions of documents.

    Raises:
      ConfigError: rows are in parts, or a device has no memory for the kernel's workspace.
    """
    runs = {}
    for phase, rows in spec.phases.items():
        if getattr(config.components, phase).attention != "cudnn":
            continue
        if parts[phase] > 1 or any(row_class.span > 1 for row_class in rows.classes):
            raise ConfigError(
                f"components.{phase}.attention (cudnn): its rows are held in parts by several devices; set "
                f"phases.{phase}.spans: [1], and give {phase} a layout that counts context as batch, or no context"
            )
        if platform_of(model.layout(phase).mesh) in GPUS:
            _check_cudnn_memory(
                config, model, rows, formats[phase].stride if phase in formats else 1
            )
        runs[phase] = rows.max_segments
    return runs


def _check_cudnn_memory(config: Config, model: MLLM, rows: PhaseSpec, stride: int) -> None:
    """Raise `ConfigError` where a device has no memory for cuDNN's workspace.

    Args:
      rows: of the phase.
      stride: slots per token.
    """
    phase = rows.name
    tokens = max(rows.capacities) // stride
    layout = model.layout(phase)
    section = getattr(config.model, phase)
    needed = kernel_cudnn.backward_bytes(
        tokens,
        section.heads // layout.size("heads"),
        getattr(section, "kv_heads", section.heads) // layout.size("kv_heads"),
        section.head_size,
        rows.max_segments,
    )
    memory = memory_of_a_device(model)
    if needed > memory:
        raise ConfigError(
            f"components.{phase}.attention (cudnn): of rows of {tokens} tokens and up to {rows.max_segments} "
            f"segments its backward pass works in {needed / 1e9:.0f} GB, and a device has {memory / 1e9:.0f}; "
            f"lower phases.{phase}.max_segments or phases.{phase}.capacities, or set it to auto, gpu or jax"
        )
