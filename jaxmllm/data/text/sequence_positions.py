"""Three-axis positions of the tokens of a sequence.

M-RoPE (arXiv 2409.12191): text advances time, height and width together, media spread over the axes, and say where
what comes after them continues.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmllm.data.media.modality import Modality, Shape


class SequencePositions:
    """Positions of text and media in the order in which they are added."""

    def __init__(self) -> None:
        self._parts: list[NDArray[Any]] = []
        self._following: float = 0

    def add_text(self, tokens: int) -> None:
        line = self._following + np.arange(tokens)
        self._parts.append(np.repeat(line[:, None], 3, axis=1))
        self._following += tokens

    def add_item(self, modality: Modality, shape: Shape) -> None:
        """An item that has tokens in the sequence."""
        positions, self._following = modality.token_positions(shape, self._following)
        self._parts.append(positions)

    def finish(self) -> NDArray[np.float32]:
        """[L, 3] time, height, width of all that was added: whole numbers but for times of videos that lie between
        them, and what comes after these."""
        return np.concatenate(self._parts).astype(np.float32)
