"""Sound files of any rate and number of channels -> log-mel frames.

    file --header--> seconds --> frames                                       measured once, for the index
    file --decode--> mono --resample--> samples --STFT, mel, log--> [slots, mel_bins]

The spectrogram is Whisper's (arXiv 2212.04356): Slaney mel filters on a Hann-windowed power spectrum, log10,
at most 8 decades below the clip's maximum, then (x + 4) / 4. It is centred: frame i is about sample i * hop, so that
clips shorter than one window have frames too, and their number follows from the header alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from jaxmllm.data.modality import MediaError, Shape, require_file
from jaxmllm.data.mpeg import count_samples

STEM_STRIDE = 4  # frames behind one token of the tower's attention
TOLERANCE = 8  # frames by which header and body of a lossy file may disagree; padded with silence or cut


@dataclass(frozen=True)
class Sounds:
    """The audio modality. A shape is (frames, 1); a clip occupies the slots of whole language tokens.

    A slot holds one float32 [mel_bins] frame, mostly within [-1, 1]; slots past the last frame are zero and not real.
    """

    sample_rate: int
    window: int
    hop: int
    mel_bins: int
    chunk_frames: int
    merge: int
    max_seconds: float
    whole_chunks: bool = False  # a clip occupies whole chunks of slots, as the tower needs where rows are split

    name = "audio"
    part = "audio"
    dtype = np.dtype(np.float32)
    attention_stride = STEM_STRIDE

    @property
    def features(self) -> int:
        return self.mel_bins

    @property
    def granule(self) -> int:
        return self.chunk_frames if self.whole_chunks else self.slots_per_token

    @property
    def slots_per_token(self) -> int:
        return STEM_STRIDE * self.merge

    def measure(self, path: Path) -> Shape:
        """Frames from the header. Raises `MediaError`: missing_file, broken_audio_header, empty_audio,
        audio_too_long."""
        return self._shape(_header(path), path)

    def length(self, shape: Shape) -> int:
        return _ceil(shape[0], self.granule) * self.granule

    def real(self, shape: Shape) -> int:
        return shape[0]

    def tokens(self, shape: Shape) -> int:
        return _ceil(_ceil(shape[0], STEM_STRIDE), self.merge)

    def load(self, path: Path, shape: Shape) -> NDArray[Any]:
        """float32 [length, mel_bins]. Raises `MediaError`: those of `measure`, shape_changed, undecodable_audio,
        truncated_audio."""
        info = _header(path)
        if (found := self._shape(info, path)) != shape:
            raise MediaError("shape_changed", f"{path} was indexed as {shape[0]} frames but has {found[0]} now")
        samples = _fit(_mono(path), info.frames, TOLERANCE * self.hop * info.samplerate / self.sample_rate, path)
        if info.samplerate != self.sample_rate:
            samples = soxr.resample(samples, info.samplerate, self.sample_rate)
        samples = _pad_or_cut(samples, self._samples(info))
        slots = np.zeros((self.length(shape), self.mel_bins), np.float32)
        slots[: shape[0]] = log_mel(samples, self.sample_rate, self.window, self.hop, self.mel_bins)
        return slots

    def positions(self, shape: Shape) -> NDArray[np.int32]:
        """(attention token, 0) of each frame: [length, 2]."""
        time = np.arange(self.length(shape), dtype=np.int32) // STEM_STRIDE
        return np.stack([time, np.zeros_like(time)], axis=-1)

    def real_slots(self, shape: Shape) -> NDArray[np.bool_]:
        return np.arange(self.length(shape)) < shape[0]

    def token_positions(self, shape: Shape, start: int) -> NDArray[np.int32]:
        """Sound advances all three axes together, as text does: [tokens, 3]."""
        line = np.arange(start, start + self.tokens(shape), dtype=np.int32)
        return np.repeat(line[:, None], 3, axis=1)

    def _samples(self, info: _Header) -> int:
        return _ceil(info.frames * self.sample_rate, info.samplerate)

    def _shape(self, info: _Header, path: Path) -> Shape:
        if info.frames <= 0:
            raise MediaError("empty_audio", f"{path} holds no samples")
        if info.frames > self.max_seconds * info.samplerate:
            raise MediaError(
                "audio_too_long",
                f"{path} lasts {info.frames / info.samplerate:.1f} s, more than data.sounds.max_seconds = "
                f"{self.max_seconds:g}; raise it or split the clip",
            )
        return _ceil(self._samples(info), self.hop), 1


def log_mel(
    samples: NDArray[np.float32], sample_rate: int, window: int, hop: int, mel_bins: int
) -> NDArray[np.float32]:
    """Mono samples [n], n >= 1 -> [ceil(n / hop), mel_bins]. Frame i is centred on sample i * hop; the ends are
    mirrored."""
    frames = _ceil(len(samples), hop)
    padded = np.pad(samples, (window // 2, window), mode="reflect")
    pieces = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop][:frames]
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)).astype(np.float32)
    power = np.abs(np.fft.rfft(pieces * hann, axis=-1)) ** 2
    decades = np.log10(np.maximum(power @ mel_filters(sample_rate, window, mel_bins), 1e-10))
    return ((np.maximum(decades, decades.max() - 8) + 4) / 4).astype(np.float32)


@functools.lru_cache(maxsize=8)
def mel_filters(sample_rate: int, window: int, mel_bins: int) -> NDArray[np.float32]:
    """Triangles of equal area on Slaney's mel scale, from 0 to sample_rate / 2: [window // 2 + 1, mel_bins]."""
    edges = _mel_to_hertz(np.linspace(0, _hertz_to_mel(sample_rate / 2), mel_bins + 2))
    bins = np.fft.rfftfreq(window, 1 / sample_rate)[:, None]
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    triangles = np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)).clip(min=0)
    return (triangles * 2 / (high - low)).astype(np.float32)


_BREAK = 1000.0  # hertz; Slaney's scale is linear below, logarithmic above
_LINEAR = 200 / 3  # hertz a mel
_LOG_STEP = np.log(6.4) / 27


def _hertz_to_mel(hertz: float) -> float:
    return hertz / _LINEAR if hertz < _BREAK else _BREAK / _LINEAR + float(np.log(hertz / _BREAK) / _LOG_STEP)


def _mel_to_hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = mel - _BREAK / _LINEAR
    return np.where(above < 0, mel * _LINEAR, _BREAK * np.exp(_LOG_STEP * above))


@dataclass(frozen=True)
class _Header:
    samplerate: int
    frames: int  # samples of each channel


def _header(path: Path) -> _Header:
    """Read rate and length without decoding."""
    require_file(path)
    if path.stat().st_size == 0:
        raise MediaError("empty_audio", f"{path} is an empty file")
    try:
        info = soundfile.info(str(path))
        # Without a Xing frame, libsndfile estimates the length of an MP3 from its size: off by up to a second.
        samples = count_samples(path.read_bytes()) if info.format == "MP3" else None
    except Exception as error:  # LibsndfileError, and TypeError for raw samples
        raise MediaError(
            "broken_audio_header", f"{path} has no readable WAV, FLAC, OGG or MP3 header: {error}"
        ) from error
    if info.samplerate <= 0 or info.frames >= 2**62:  # what libsndfile says of streams that never stored their length
        raise MediaError("broken_audio_header", f"{path} does not say how long it is; encode it again")
    return _Header(info.samplerate, info.frames if samples is None else samples)


def _mono(path: Path) -> NDArray[np.float32]:
    """All samples, mean over channels: [n]."""
    try:
        samples, _ = soundfile.read(str(path), dtype="float32", always_2d=True)
    except Exception as error:
        raise MediaError("undecodable_audio", f"{path} does not decode: {error}") from error
    mono = samples.mean(axis=1)
    if not np.isfinite(mono).all():
        raise MediaError("undecodable_audio", f"{path} holds samples that are not finite")
    return mono


def _fit(samples: NDArray[np.float32], expected: int, tolerance: float, path: Path) -> NDArray[np.float32]:
    """Give the body the length of its header, if they nearly agree."""
    if not len(samples) or abs(len(samples) - expected) > tolerance:
        raise MediaError("truncated_audio", f"{path} holds {len(samples)} samples where its header says {expected}")
    return _pad_or_cut(samples, expected)


def _pad_or_cut(samples: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    return np.pad(samples[:count], (0, max(0, count - len(samples))))


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
