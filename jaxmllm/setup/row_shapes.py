"""What rows of a phase must look like: their alignment, their attention blocks, and the largest one.

Rows consist of whole attention blocks and whole language tokens, so that no row ends inside of either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from jaxmllm.attention import kernel_cudnn
from jaxmllm.attention.attention import GPUS
from jaxmllm.attention.parts import MIN_BLOCKS, SMALLER_BLOCK, block_size
from jaxmllm.balance.records import PhaseSpec, PlanSpec
from jaxmllm.balance.sizes.inputs import Alignment
from jaxmllm.config.schema import Config, ConfigError, PhaseConfig
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.models.mllm import MLLM
from jaxmllm.row_format import RowFormat
from jaxmllm.setup.row_memory import memory_of_a_device
from sharding.mesh import platform_of


def alignment(
    config: Config, phase: str, formats: Mapping[str, RowFormat], parts: int
) -> Alignment:
    """What row capacities of a phase are multiples of: whole attention blocks and whole language tokens, the same
    number in each part of a row.

    Args:
      formats: by encoder phase; a phase without one has rows of text, where a slot is a token.
      parts: that the slots of a rank are split into (context parallelism).

    Raises:
      ConfigError: a part would end inside of what the tower takes as a whole.
    """
    check_parts(config, phase, formats, parts)
    block: int = getattr(config.phases, phase).block
    small = small_block(config, phase, formats, in_parts=True)
    if _has_windows(config, phase, formats):
        block = small_block(config, phase, formats, in_parts=parts > 1)
    return Alignment(
        slots=_slots(block, phase, formats) * parts,
        small=_slots(small, phase, formats) * parts,
        few=MIN_BLOCKS,
        parts=parts,
    )


def _slots(block: int, phase: str, formats: Mapping[str, RowFormat]) -> int:
    """Slots of whole blocks and whole tokens. A block counts tokens of attention, each of `stride` slots."""
    if phase not in formats:
        return block
    row = formats[phase]
    return math.lcm(block * row.stride, row.alignment)


def _has_windows(config: Config, phase: str, formats: Mapping[str, RowFormat]) -> bool:
    """Whether a phase is a tower that attends in windows."""
    return phase in formats and phase in config.model.windows


def small_block(
    config: Config, phase: str, formats: Mapping[str, RowFormat], in_parts: bool
) -> int:
    """Tokens of the smallest block that attention may take: 64, or `phases.<phase>.block` where 64 does not divide
    it, or where rows are cut at its edges (`in_parts`) and it does not hold whole language tokens."""
    block: int = getattr(config.phases, phase).block
    if block % SMALLER_BLOCK:
        return block
    if in_parts and phase in formats:
        row = formats[phase]
        if SMALLER_BLOCK * row.stride % row.alignment:
            return block
    return SMALLER_BLOCK


def check_parts(config: Config, phase: str, formats: Mapping[str, RowFormat], parts: int) -> None:
    """Raise `ConfigError` where a block of attention is no whole number of what a tower takes as a whole, and rows
    are split into several parts by blocks. Arguments as for `alignment`; `parts` are those of a whole row."""
    if phase not in formats or parts == 1:
        return
    block: int = getattr(config.phases, phase).block
    row = formats[phase]
    slots = block * row.stride
    if slots % row.alignment:
        raise ConfigError(
            f"phases.{phase}.block: rows are split into {parts} parts by blocks of {slots} slots, "
            f"which must be a multiple of {row.alignment}, what the {phase} tower takes as a whole; "
            f"raise it to {math.lcm(slots, row.alignment) // row.stride}"
        )


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
    unit = alignment(config, phase, formats, parts).slots
    largest = fitting if settings.max_capacity == "auto" else settings.max_capacity
    return largest // unit * unit * span


def with_blocks(
    config: Config, model: MLLM, formats: Mapping[str, RowFormat], spec: PlanSpec
) -> PlanSpec:
    """The plan's rows with the blocks of their attention, which items are laid out by. A block that does not hold whole
    language tokens is left out."""
    phases = {}
    for name, rows in spec.phases.items():
        stride, whole = (
            (formats[name].stride, formats[name].alignment) if name in formats else (1, 1)
        )
        block = attention_block(config, rows, formats, model.layout(name).parts) * stride
        phases[name] = replace(rows, block=1 if block % whole else block)
    return replace(spec, phases=phases)


def attention_spec(
    config: Config, model: MLLM, formats: Mapping[str, RowFormat], spec: PlanSpec
) -> AttentionSpec:
    """Attention blocks and parts of every phase's rows."""
    parts = {phase: model.layout(phase).parts for phase in spec.phases}
    return AttentionSpec(
        blocks={
            phase: attention_block(config, rows, formats, parts[phase])
            for phase, rows in spec.phases.items()
        },
        parts=parts,
        bidirectional=config.model.language.bidirectional,
        windows=config.model.windows,
        crossed=config.model.crossed,
        runs=_runs(config, model, formats, spec, parts),
    )


def _runs(
    config: Config,
    model: MLLM,
    formats: Mapping[str, RowFormat],
    spec: PlanSpec,
    parts: Mapping[str, int],
) -> dict[str, int]:
    """How many documents a row has at most, of phases whose kernel of attention reads where they lie.

    Raises:
      ConfigError: rows are in parts, or a device has no memory for what the kernel works in.
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
    """Raise `ConfigError` where a device has no memory for what cuDNN works in. `stride`: slots of a token."""
    phase = rows.name
    tokens = max(rows.capacities) // stride
    layout, section = model.layout(phase), getattr(config.model, phase)
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


def attention_block(
    config: Config, rows: PhaseSpec, formats: Mapping[str, RowFormat], parts: int
) -> int:
    """Tokens of attention in a block: `phases.<phase>.block`, or 64 where a part of a row would otherwise have too few
    blocks to even out their work, and in towers that attend in windows, of which a larger block would hold several."""
    block: int = getattr(config.phases, rows.name).block
    stride = formats[rows.name].stride if rows.name in formats else 1
    split_rows = [
        (row_class.slots, row_class.span * parts)
        for row_class in rows.classes
        if row_class.span * parts > 1
    ]
    small = small_block(config, rows.name, formats, in_parts=bool(split_rows))
    if small == block or _has_windows(config, rows.name, formats):
        return small
    blocks = [block_size(slots // stride, shares, block) for slots, shares in split_rows]
    return min(blocks, default=block)
