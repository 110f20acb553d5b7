"""The conversations of the goldens, as the tests read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxmllm.data.media.reference import File
from jaxmllm.data.text.conversation import Conversation, parse_conversation


def conversation_of(record: dict[str, Any]) -> Conversation:
    """A conversation of which all is learned, and whose media are named by number."""
    return parse_conversation(
        record,
        lambda path: File(Path(path)),
        default_id="x",
        default_source="s",
        targets="all",
    )
