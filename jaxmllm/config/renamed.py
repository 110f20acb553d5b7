"""Former keys: they are refused, with a message that names their replacement."""

from __future__ import annotations

from typing import Any

RENAMED = {  # full old key -> full new key
    "data.sounds": "data.audio",
    "data.sounds.window": "data.audio.window_length",
    "data.sounds.hop": "data.audio.hop_length",
    "pipeline.live": "pipeline.microbatches_in_flight",
    "pipeline.fan": "pipeline.encoder_rows_per_microbatch",
}
REPLACED = {  # full old key -> what to do
    f"phases.{phase}.long_capacity": "leave it out; what one rank cannot hold goes to rows of several ranks, "
    f"'phases.{phase}.spans'"
    for phase in ("vision", "audio", "language")
}


def renamed_keys(tree: dict[str, Any]) -> list[str]:
    """For each former key in a config's tree, a line that says what to write instead."""
    renamed = [
        f"{old!r} is now called {new!r}" for old, new in RENAMED.items() if _has_key(tree, old)
    ]
    replaced = [
        f"{old!r} is gone: {advice}" for old, advice in REPLACED.items() if _has_key(tree, old)
    ]
    return renamed + replaced


def _has_key(tree: Any, key: str) -> bool:
    name, _, subkey = key.partition(".")
    if not isinstance(tree, dict) or name not in tree:
        return False
    return not subkey or _has_key(tree[name], subkey)
