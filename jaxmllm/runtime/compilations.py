"""How many programs were compiled: after the first steps of a run, none."""

from __future__ import annotations

import jax

# Recorded by JAX around each hand-over of a program to XLA; one for every new program, none for a program in use.
_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts the programs that XLA has been given since this counter was made, by `jit` or ahead of time.

    A program that JAX's persistent cache already holds counts too: it is a new program to this
    process.
    """

    def __init__(self) -> None:
        self.names: list[str] = []  # of the functions, in order of compilation, e.g. "jit(update)"
        self.seconds = 0.0  # spent compiling
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    @property
    def count(self) -> int:
        """Compilations so far."""
        return len(self.names)

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == _BACKEND_COMPILE:
            self.names.append(str(details.get("fun_name", "unnamed")))
            self.seconds += duration_secs
