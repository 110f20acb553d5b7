"""Count of compiled programs. After the first steps of a run there should be no more."""

from __future__ import annotations

import jax

# Event that JAX records when it hands a program to XLA, which it does once for each new program
_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts programs that JAX hands to XLA from its creation on, by `jit` or ahead of time.

    A program that JAX's persistent cache holds counts too, because it is new to this process.
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
