"""Memory that the C library keeps for the next program instead of giving it back to the system."""

from __future__ import annotations

import ctypes

# Of malloc.h, with values for them: threads share the one heap that can grow without bound, large blocks lie in
# it, too, and its end is never given back
_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD = -8, -4, -1
_SETTINGS = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: -1}


def keep_pages() -> bool:
    """Let this process keep the pages that it has had: for programs on CPU, before threads are started.

    A program there asks for its temporary memory each time that it runs. By default glibc takes large blocks from
    the system and gives them back, so that every page is cleared and mapped anew. The process stays as large as
    it once was.

    Returns:
      Whether it is so: not with another C library than glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # as on macOS, musl, Windows
        return False
    return all([mallopt(setting, value) == 1 for setting, value in _SETTINGS.items()])
