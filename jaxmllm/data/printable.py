"""Text from files and data, made safe for messages: one line, whatever a path or library says."""

from __future__ import annotations

MAX_SHOWN = 2000  # characters


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """`value` (a path, an id, a whole message) as one line of printable text. If it has more than
    `limit` characters, its middle is left out: paths and reasons are at the ends.

    Control characters, line breaks of any kind, marks that change the direction of writing, and
    bytes that are not Unicode are written as Python escapes them (`\\n`, `\\x1b`, `\\u202e`,
    `\\udcff`), so that no file name can forge a line of the log or steer a terminal. Text without
    them is returned as it is.
    """
    text = str(value)
    if len(text) > limit:
        half = (limit - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
