"""Three-axis positions of the tokens of a sequence.

M-RoPE (arXiv 2409.12191): text advances time, height and width together. Media spread over the
axes, and their modality gives the position at which the tokens after them continue.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmllm.data.media.modality import Modality, Shape


class SequencePositions:
    """Positions of text and media in the order in which they are added."""

    def __init__(self) -> None:
        self._position_blocks: list[NDArray[Any]] = []
        self._next_position: float = 0

    def add_text(self, tokens: int) -> None:
        line = self._next_position + np.arange(tokens)
        self._position_blocks.append(np.repeat(line[:, None], 3, axis=1))
        self._next_position += tokens

    def add_item(self, modality: Modality, shape: Shape) -> None:
        """Add an item that has tokens in the sequence."""
        positions, self._next_position = modality.token_positions(shape, self._next_position)
        self._position_blocks.append(positions)

    def finish(self) -> NDArray[np.float32]:
        """(time, height, width) of all tokens that were added: [L, 3]. Whole numbers, except for
        times of videos that are not rounded, and positions after these."""
        return np.concatenate(self._position_blocks).astype(np.float32)
