"""Section `model.language.rope_scaling`: rotary frequencies for texts longer than those that a
decoder was first trained on."""

from __future__ import annotations

import math
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveFloat, PositiveInt, model_validator

from jaxmllm.config.section import Section

Frequencies = NDArray[np.float64]  # [K/2] radians per position of each pair, the fastest first

OF_KIND = {  # (required keys, optional keys) of a kind, in addition to `factor`
    "linear": ((), ()),
    "llama3": (("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("original_max_position_embeddings",),
        ("beta_fast", "beta_slow", "truncate", "attention_factor"),
    ),
}


class RotaryScaling(Section):
    """How the frequencies of rotary pairs are slowed down.

        linear   all by `factor` (arXiv 2306.15595)
        llama3   by `factor` below `low_freq_factor` turns, not at all above `high_freq_factor`, in
                 proportion to turns between them (arXiv 2407.21783)
        yarn     by `factor` below `beta_slow` turns, not at all above `beta_fast`, along a ramp
                 over the pairs between them; queries and keys are multiplied by
                 `attention_factor` (arXiv 2309.00071)

    Turns are the full rotations of a pair over `original_max_position_embeddings` positions. The
    keys have the same names as in a config.json.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt | None = None  # positions
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True  # round the ends of the ramp outwards to whole pairs
    attention_factor: PositiveFloat | None = None  # none: 0.1 ln(factor) + 1, at least 1

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        needed, possible = OF_KIND[self.kind]
        if missing := [key for key in needed if getattr(self, key) is None]:
            raise ValueError(f"kind {self.kind!r} needs {', '.join(missing)}")
        known = {"kind", "factor", *needed, *possible}
        unused = [
            key
            for key, field in type(self).model_fields.items()
            if key not in known and getattr(self, key) != field.default
        ]
        if unused:
            raise ValueError(f"kind {self.kind!r} has no {', '.join(unused)}; leave it out")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            low_value = getattr(self, low)
            high_value = getattr(self, high)
            if low_value is not None and high_value is not None and low_value >= high_value:
                raise ValueError(f"{low} ({low_value:g}) must be less than {high} ({high_value:g})")
        return self

    @property
    def multiplier(self) -> float:
        """Factor by which rotated queries and keys are multiplied."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def scaled(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """Scale the frequencies of all pairs, which are theta ** (-i / pairs) for pair i."""
        unslowed = self._kept(frequencies, theta)
        return frequencies * (unslowed + (1 - unslowed) / self.factor)

    def _kept(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """How far each frequency is kept: 1 keeps all of it, 0 divides it by `factor`."""
        if self.kind == "linear":
            return np.zeros_like(frequencies)
        positions = self.original_max_position_embeddings
        assert positions is not None
        if self.kind == "llama3":
            low = self.low_freq_factor
            high = self.high_freq_factor
            assert low is not None and high is not None
            turns = positions * frequencies / (2 * math.pi)
            return np.clip((turns - low) / (high - low), 0, 1)
        pairs = len(frequencies)
        # The pairs that make beta_fast and beta_slow turns, as numbers that need not be whole
        ramp_start, ramp_end = (
            pairs * math.log(positions / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            ramp_start = math.floor(ramp_start)
            ramp_end = math.ceil(ramp_end)
        ramp_start = max(ramp_start, 0)
        ramp_end = min(ramp_end, 2 * pairs - 1)
        if ramp_start == ramp_end:
            ramp_end += 0.001  # avoids a division by zero
        return 1 - np.clip((np.arange(pairs) - ramp_start) / (ramp_end - ramp_start), 0, 1)
