"""Which keys may change when a run is resumed: none that its past steps depend on.

saved config, current config --check_compatible--> refusal by key | --resumed_config--> config of the steps to come
                             --changes-----------> a line for each key whose new value counts from now on
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmllm.config.read import config_tree, dotted_values
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.runtime.checkpoint_fit import listed

# Keys on which no step depends. Each pattern covers the key it matches and everything below it.
FREE_KEYS = (
    "run.directory",
    "run.compilation_cache",
    "model.language.loss_chunk",
    "components.*.remat",
    "components.*.reduce",
    "components.*.attention",
    "components.*.experts",
    "components.*.layout",
    "data.root",
    "data.evaluation",
    "data.index_cache",
    "data.workers",
    "data.prefetch",
    "data.max_rejected",
    "data.max_failed_media",
    "optimizer.max_skipped",
    "phases",
    "balance",
    "mesh",
    "pipeline",
    "distributed",
    "evaluation",
    "checkpoint",
    "logging",
    "profile",
)

# Keys on which only later steps depend: their new values apply from the step of the checkpoint on.
CHANGEABLE_KEYS = (
    "run.steps",
    "data.batch_size",
    "data.sources.*.weight",
    "components.*.freeze",
    "components.*.ema",
    "components.*.learning_rate_scale",
    "objective.experts",
    "optimizer",
)


def check_compatible(saved: Config, current: Config, has_checkpoint: bool = True) -> None:
    """Raise `CheckpointError` unless a run begun with `saved` may continue with `current`.

    Everything that its past batches and losses depend on must be equal; `FREE_KEYS` and
    `CHANGEABLE_KEYS` may differ. `has_checkpoint` decides which way out the message names.
    """
    differences = [
        f"{key}: {before} in the run, {now} now"
        for key, before, now in _differences(saved, current)
        if not _matches(key, (*FREE_KEYS, *CHANGEABLE_KEYS))
    ]
    if differences:
        directory = current.run.directory
        anew = (
            "begin another run with this one's parameters: set run.directory to a new folder and model.from to "
            f"{directory}"
            if has_checkpoint
            else f"begin anew, for it has no checkpoint: delete {directory}, or choose another run.directory"
        )
        raise CheckpointError(
            f"the run in {directory} cannot be resumed with this config, its steps would differ:\n"
            f"{listed(differences)}\n"
            f"Set these keys back, or {anew}. If nothing has changed but a name (data that has moved, say), change it "
            f"in {Path(directory) / 'config.yaml'} too."
        )


def check_free(saved: Config, current: Config) -> None:
    """Raise `ConfigError` unless only `FREE_KEYS` differ: where and how a run computes."""
    differences = [
        key for key, _, _ in _differences(saved, current) if not _matches(key, FREE_KEYS)
    ]
    if differences:
        raise ConfigError(
            f"{differences[0]} is what the run was trained with, and cannot be set here; what can: "
            f"{', '.join(key for key in ('mesh', 'phases', 'balance', 'components.<name>.layout'))}, and others on "
            "which no result depends"
        )


def begun_config(config: Config) -> Config:
    """The config of a run that begins, in which values that the run must keep are resolved: the end
    of the learning rate's decay."""
    optimizer = config.optimizer.model_copy(update={"decay_steps": config.decay_steps})
    return config.model_copy(update={"optimizer": optimizer})


def resumed_config(saved: Config, current: Config) -> Config:
    """`current` with the values that the run resolved when it began and `current` leaves open."""
    if current.optimizer.decay_steps != "auto":
        return current
    optimizer = current.optimizer.model_copy(update={"decay_steps": saved.decay_steps})
    return current.model_copy(update={"optimizer": optimizer})


def changes(saved: Config, current: Config, step: int) -> list[str]:
    """A line for each change that applies from `step` on, and one that says what a new number of
    steps does to the learning rate."""
    lines = [
        f"from step {step}: {key} {before} -> {now}"
        for key, before, now in _differences(saved, current)
        if _matches(key, CHANGEABLE_KEYS) and not _matches(key, FREE_KEYS)
    ]
    steps = current.run.steps
    horizon = current.decay_steps
    optimizer = current.optimizer
    if saved.run.steps == steps or optimizer.schedule == "constant" or steps == horizon:
        return lines
    if steps > horizon:
        effect = f"reaches final_scale {optimizer.final_scale:g} at step {horizon} and stays there"
    else:
        effect = f"would reach final_scale {optimizer.final_scale:g} at step {horizon}, after the run's end"
    return [
        *lines,
        f"run.steps is {steps}: the learning rate {effect}; optimizer.decay_steps says where it ends",
    ]


def _differences(saved: Config, current: Config) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value before, value now) of every key that differs."""
    before = dict(dotted_values(config_tree(saved)))
    now = dict(dotted_values(config_tree(current)))
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key) or (key in before) != (key in now):
            yield key, _value_text(before, key), _value_text(now, key)


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(
        fnmatch.fnmatchcase(key, pattern) or fnmatch.fnmatchcase(key, f"{pattern}.*")
        for pattern in patterns
    )


def _value_text(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"
