"""Keys that have no effect because of the value of another key.

They are reported, not refused, so that `model.audio=null` on the command line is enough to train
without that tower.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from jaxmllm.config.schema import PROJECTOR, Config, Section

# Sections that configure an optional component of the model
SECTIONS = {
    "vision": ("components.vision", "components.projector.vision", "phases.vision", "data.images"),
    "audio": ("components.audio", "components.projector.audio", "phases.audio", "data.audio"),
    "diffusion": (
        "components.diffusion",
        "components.projector.language",
        "phases.diffusion",
        "data.generated",
    ),
}


def keys_without_effect(config: Config) -> dict[str, list[str]]:
    """Keys that are set but have no effect, by the reason."""
    keys: dict[str, list[str]] = {}
    for reason, path, of_section in _ineffective_keys(config):
        unused = [f"{path}.{key}" for key in _set_keys(config, path) if key in of_section]
        if unused:
            keys.setdefault(reason, []).extend(unused)
    return keys


def _ineffective_keys(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(reason, path of a section, keys of it that have no effect) triples."""
    for component, paths in SECTIONS.items():
        if component not in config.model.phases:
            for path in paths:
                yield f"there is no model.{component}", path, _all_keys(config, path)
    for phase in config.model.phases:
        if getattr(config.phases, phase).capacities != "auto":
            reason = f"phases.{phase}.capacities says which rows there are"
            yield reason, f"phases.{phase}", ("row_classes", "max_capacity")
    if config.pipeline.stages == 1:
        yield "pipeline.stages is 1", "pipeline", _all_keys(config, "pipeline")
    else:
        yield from _ineffective_in_stages(config)
    yield from _ineffective_where_frozen(config)
    if not config.objective.learns_text:
        reason = "objective.language.weight is 0, so that text has no logits"
        yield reason, "model.language", ("loss_chunk",)
    vision = config.model.vision
    # The same rule as in `alignment` (setup/row_shapes.py)
    if vision is not None and vision.window is not None and config.phases.vision.block % 64 == 0:
        yield "with model.vision.window, blocks have 64 tokens", "phases.vision", ("block",)
    if not config.may_share_rows:
        reason = f"balance.mode ({config.balance.mode}) leaves every row to one rank"
        yield reason, "balance", ("spans_cross_nodes", "flops_per_gathered_byte")
    if not (config.model.encoders or config.model.generators):
        reason = "a model of text alone exchanges no tokens"
        yield reason, "balance", ("exchange", "pool_slots", "pair_slots")
    elif config.balance.exchange == "ragged":
        yield "balance.exchange (ragged) sends what is there", "balance", ("pair_slots",)
    if not config.data.evaluation:
        yield "data.evaluation is empty", "evaluation", _all_keys(config, "evaluation")
    for source_number in range(len(config.data.evaluation)):
        yield "evaluation reads every example once", f"data.evaluation.{source_number}", ("weight",)
    if config.optimizer.schedule == "constant":
        yield "optimizer.schedule is constant", "optimizer", ("final_scale",)
    if not config.profile.steps:
        yield "profile.steps is 0", "profile", ("start",)
    elif config.profile.start >= config.run.steps:
        reason = (
            f"profile.start ({config.profile.start}) is past the last step of {config.run.steps}"
        )
        yield reason, "profile", ("steps",)


def _ineffective_in_stages(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    pipeline = config.pipeline
    for phase in config.model.phases:
        if getattr(config.phases, phase).capacities == "auto" and pipeline.microbatches != "auto":
            reason = f"pipeline.microbatches ({pipeline.microbatches}) makes all rows of one class"
            yield reason, f"phases.{phase}", ("row_classes",)
    if pipeline.schedule not in ("auto", "search"):
        yield f"pipeline.schedule ({pipeline.schedule}) searches nothing", "pipeline", ("rollouts",)
    if not config.model.encoders:
        idle = () if config.model.generators else ("encoder_rows_per_microbatch",)
        yield "there is no encoder", "pipeline", ("deferral", *idle)


def _ineffective_where_frozen(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    model = config.model
    components = config.components
    adapted = model.adapters.by_component
    trained_adapters = [name for name in adapted if not getattr(components.adapter, name).freeze]
    projected = (*model.encoders, "language") if model.generators else model.encoders
    for name in (*model.phases, *(f"{PROJECTOR}{name}" for name in projected)):
        if components.of(name).freeze:
            # Adapters take these two keys from the component that they adapt.
            added = () if name in trained_adapters else ("reduce", "reduce_dtype")
            keys = ("learning_rate_scale", *added)
            yield f"components.{name} is frozen", f"components.{name}", keys
            keeps = name in model.encoders and getattr(config.phases, name).kept_residuals != 0
            if keeps and name not in trained_adapters:
                yield f"components.{name} is frozen", f"phases.{name}", ("kept_residuals",)
    if model.generators and not config.trains_language and config.phases.language.kept_residuals:
        reason = "the decoder and all that it reads are frozen"
        yield reason, "phases.language", ("kept_residuals",)
    for name in (name for name in adapted if name not in trained_adapters):
        path = f"components.adapter.{name}"
        yield f"{path} is frozen", path, ("learning_rate_scale",)


def _all_keys(config: Config, path: str) -> tuple[str, ...]:
    return tuple(type(_section_at(config, path)).model_fields)


def _set_keys(config: Config, path: str) -> list[str]:
    """Keys of a section whose values are not the defaults."""
    section = _section_at(config, path)
    fields = type(section).model_fields
    return [
        key for key, value in section if value != fields[key].get_default(call_default_factory=True)
    ]


def _section_at(config: Config, path: str) -> Section:
    """The section at a dotted path, in which numbers are indices of lists."""

    def child(node: Any, name: str) -> Any:
        return node[int(name)] if name.isdigit() else getattr(node, name)

    section: Section = reduce(child, path.split("."), config)
    return section
