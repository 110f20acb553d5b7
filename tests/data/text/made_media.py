"""Pictures and clips of conversations, made anew wherever they are read.

They have the same bytes each time, and so the same numbers in goldens and tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

# Heights and widths in pixels. The last one is partly transparent.
PICTURES = {
    "icon.png": (20, 20),
    "photo.png": (3000, 2000),
    "thin.png": (30, 1200),
    "clear.png": (90, 131),
}
CLEAR = "clear.png"
# Seconds, samples per second, and channels.
CLIPS = {
    "click.wav": (0.1, 8_000, 1),
    "speech.wav": (2.713, 44_100, 2),
    "long.wav": (31.0, 16_000, 1),
}


def write_media(folder: Path) -> None:
    """Writes all pictures and clips."""
    for index, (name, size) in enumerate(PICTURES.items()):
        colors = _waves(*size, index)
        if name == CLEAR:
            alpha = np.linspace(0, 255, colors[..., :1].size).reshape(*size, 1).astype(np.uint8)
            colors = np.concatenate([colors, alpha], axis=2)
        Image.fromarray(colors).save(folder / name, compress_level=1)
    for index, (name, (seconds, rate, channels)) in enumerate(CLIPS.items()):
        sound = np.stack([_tones(seconds, rate, index + i) for i in range(channels)], axis=1)
        soundfile.write(folder / name, sound, rate, "PCM_16")


def _waves(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """Colors [height, width, 3] with edges and fine lines, which tell kernels and orders of patches
    apart."""
    rows, columns, colors = np.ogrid[:height, :width, :3]
    waves = np.sin(rows / (5 + seed) + colors) + np.cos(columns / 7 - colors)
    edges = ((rows // 11 + columns // 13) % 2) * 60
    return np.asarray(90 + 40 * waves + edges).clip(0, 255).astype(np.uint8)


def _tones(seconds: float, rate: int, seed: int) -> NDArray[np.int16]:
    """Tones [samples] with noise, loud to the end."""
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).standard_normal(len(times))
    tones = np.sin(2 * np.pi * 440 * times) + np.sin(2 * np.pi * 1_234 * times)
    return np.asarray(6_000 * tones + 800 * noise).astype(np.int16)
