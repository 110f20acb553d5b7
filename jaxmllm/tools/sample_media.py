"""Pictures and clips of the sample data: small files that differ in size as real ones do."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

COLOURS = {
    "red": (215, 35, 35),
    "green": (40, 165, 60),
    "blue": (40, 70, 215),
    "yellow": (235, 210, 35),
    "purple": (150, 45, 170),
    "black": (25, 25, 25),
}
TONES = {"low": (180.0, 240.0), "middle": (600.0, 800.0), "high": (2000.0, 2600.0)}  # Hz
SOUNDS = (*TONES, "noise", "siren", "clicks")
SMALLEST = (28, 28)  # pixels
LARGEST = (220, 160)
SHORTEST = 0.2  # seconds
LONGEST = 4.0
SAMPLE_RATES = (8_000, 16_000, 22_050, 44_100)
SAMPLE_RATE_SHARES = (0.4, 0.3, 0.2, 0.1)
STEREO_SHARE = 0.3


@dataclass(frozen=True)
class SampleFile:
    """A written file: its path in the data folder, its label in one word, its pixels or seconds."""

    path: str
    label: str
    size: float


def make_pictures(
    out: Path, folder: Path, rng: np.random.Generator, files: int
) -> list[SampleFile]:
    """Write pictures into `out / folder`. Areas spread evenly on a log scale, both ends
    included."""
    areas = rng.permutation(np.geomspace(np.prod(SMALLEST), np.prod(LARGEST), files))
    pictures = []
    for index, (area, colour) in enumerate(zip(areas, itertools.cycle(COLOURS), strict=False)):
        aspect = np.exp(rng.uniform(-0.5, 0.5))
        width = round(np.sqrt(area * aspect))
        height = round(np.sqrt(area / aspect))
        image = Image.fromarray(_figure_pixels(rng, height, width, COLOURS[colour]))
        path = folder / f"{index:05d}"
        # Five encodings and six colours take turns, so that no encoding tells a colour.
        match index % 5:
            case 0:
                path = path.with_suffix(".png")
                image.save(out / path, compress_level=3)
            case 1:
                path = path.with_suffix(".png")
                image.convert("RGBA").save(out / path, compress_level=3)
            case 2:
                path = path.with_suffix(".png")
                image.quantize(32).save(out / path, compress_level=3)
            case 3:
                path = path.with_suffix(".jpg")
                image.save(out / path, quality=85)
            case _:
                path = path.with_suffix(".webp")
                image.save(out / path, quality=85, method=0)
        pictures.append(SampleFile(path.as_posix(), colour, width * height))
    return pictures


def _figure_pixels(
    rng: np.random.Generator, height: int, width: int, colour: tuple[int, int, int]
) -> NDArray[np.uint8]:
    """Pixels [height, width, 3] of a disc, box or diamond, near a colour, amid a light ground."""
    y = np.abs(np.linspace(-1, 1, height) + rng.uniform(-0.1, 0.1))[:, None]
    x = np.abs(np.linspace(-1, 1, width) + rng.uniform(-0.1, 0.1))[None, :]
    distance = (np.hypot(x, y), np.maximum(x, y), (x + y) * 0.8)[rng.integers(3)]
    inside = (distance < rng.uniform(0.65, 0.85))[..., None]
    ground = rng.uniform(215, 250, size=3)
    pixels = np.where(inside, colour + rng.uniform(-15, 15, size=3), ground) + rng.normal(
        0, 4, (height, width, 1)
    )
    return pixels.clip(0, 255).astype(np.uint8)


def make_clips(out: Path, folder: Path, rng: np.random.Generator, files: int) -> list[SampleFile]:
    """Write clips into `out / folder`. Durations spread evenly on a log scale, both ends
    included."""
    durations = rng.permutation(np.geomspace(SHORTEST, LONGEST, files))
    clips = []
    for index, (seconds, sound) in enumerate(zip(durations, itertools.cycle(SOUNDS), strict=False)):
        rate = int(rng.choice(SAMPLE_RATES, p=SAMPLE_RATE_SHARES))
        samples = _wave(rng, sound, round(seconds * rate), rate)
        if rng.random() < STEREO_SHARE:
            samples = np.stack([samples, samples * rng.uniform(0.5, 1.0)], axis=1)
        path = folder / f"{index:05d}{('.wav', '.flac')[index % 2]}"
        # Integer samples: a WAV file of floats carries the time of writing.
        soundfile.write(out / path, samples, rate, subtype="PCM_16")
        clips.append(SampleFile(path.as_posix(), sound, len(samples) / rate))
    return clips


def _wave(rng: np.random.Generator, sound: str, samples: int, rate: int) -> NDArray[np.float64]:
    """Samples [samples] of one of `SOUNDS` with a little hiss, within -1..1."""
    time = np.arange(samples) / rate
    if sound in TONES:
        wave = np.sin(2 * np.pi * rng.uniform(*TONES[sound]) * time + rng.uniform(0, 2 * np.pi))
    elif sound == "noise":
        wave = rng.uniform(-1, 1, samples)
    elif sound == "siren":
        frequency = 1000 + 600 * np.sin(
            2 * np.pi * rng.uniform(6, 8) * time + rng.uniform(0, 2 * np.pi)
        )
        # The phase is the integral of a frequency that changes.
        wave = np.sin(2 * np.pi * np.cumsum(frequency) / rate)
    else:
        # Seconds since the last of 14 to 20 clicks in a second, each a burst of noise that fades.
        since_click = (time + rng.uniform(0, 0.05)) % (1 / rng.uniform(14, 20))
        wave = rng.uniform(-1, 1, samples) * np.exp(-since_click / 0.003)
    return rng.uniform(0.4, 0.8) * wave + rng.normal(0, 0.003, samples)
