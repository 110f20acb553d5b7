"""Compiled programs on disk, so that a run that starts again need not compile for minutes.

config --keep_programs--> JAX's settings, before anything is compiled --describe--> a line for the log

JAX finds programs by their text, the compiler's version and options, and the devices; it compiles
those that it does not find. Only the first process writes, but all read: give several hosts a
folder that they share.
"""

from __future__ import annotations

from pathlib import Path

import jax

from jaxmllm.config.schema import Config, ConfigError

FOLDER = "compiled"  # next to the run folder


def keep_programs(config: Config) -> None:
    """Set up JAX's cache as `run.compilation_cache` says; nothing may have been compiled before.

    With `auto`, JAX_COMPILATION_CACHE_DIR takes precedence.
    """
    folder = config.run.compilation_cache
    if folder == "auto":
        folder = jax.config.jax_compilation_cache_dir or str(  # type: ignore[attr-defined]
            Path(config.run.directory).absolute().parent / FOLDER
        )
    if folder is None or reason_against(config):
        jax.config.update("jax_enable_compilation_cache", False)
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    # By default JAX keeps only programs that took a second, but a start has many small ones
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def reason_against(config: Config) -> str | None:
    """Why the programs of a config are never kept, whatever it says; None if they may be."""
    # Programs of pipelines that XLA's CPU client read from disk have sometimes hung in their
    # collectives or damaged the heap (jax 0.10.2); those that it had compiled itself never did.
    if config.pipeline.stages > 1 and jax.default_backend() == "cpu":
        return "on CPU, programs of pipelines that are read from disk may hang"
    return None


def check_kept(config: Config) -> None:
    """Raise `ConfigError` unless the programs that this process compiles are kept on disk."""
    if reason := reason_against(config):
        raise ConfigError(f"compiled programs would not be kept: {reason}")
    if not _cache_folder():
        raise ConfigError(
            "compiled programs would not be kept: set run.compilation_cache to auto or a folder, and do not turn JAX's "
            "cache off (JAX_ENABLE_COMPILATION_CACHE)"
        )


def describe(config: Config) -> str:
    """Line for the log that says where compiled programs are kept."""
    if reason := reason_against(config):
        return f"compiled programs: not kept: {reason}"
    folder = _cache_folder()
    return f"compiled programs: {f'kept in {folder}' if folder else 'not kept'}"


def _cache_folder() -> str | None:
    """Folder of JAX's cache; None if it is off or has none."""
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    folder: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return folder if enabled else None
