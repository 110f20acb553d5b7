"""Words from files and data, fit for a message: always one line, whatever a path or a library says."""

from __future__ import annotations

MAX_SHOWN = 2000  # characters


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """`value` as one line of printable text: a path, an id, a whole message. Of more than `limit`
    characters it keeps both ends, where paths and reasons stand.

    Control characters, line breaks of any kind, marks that turn the direction of writing, and bytes
    that are no Unicode are written as Python escapes them (`\\n`, `\\x1b`, `\\u202e`, `\\udcff`),
    so that no file name can forge a line of the log or steer a terminal. Text without them is
    returned as it is.
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
