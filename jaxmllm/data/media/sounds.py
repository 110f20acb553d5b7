"""Audio files of any rate and number of channels -> log-mel frames.

    file --header--> seconds --> frames                                 measured once, for the index
    file --decode--> mono --resample--> samples --STFT, mel, log--> [slots, mel_bins]

The spectrogram is Whisper's (arXiv 2212.04356): Slaney mel filters on a Hann-windowed power
spectrum, log10, at most 8 decades below the clip's maximum, then (x + 4) / 4. Frame i is centred on
sample i * hop, so that clips shorter than one window have frames too, and the number of frames
follows from the header alone.

No part of a clip is left out or made up: a file whose body does not have the measured length, or
that continues after the point where decoders stop, is refused (containers.py, mpeg.py). WAV files
of IMA ADPCM that libsndfile wrote, and of rarer encodings (NMS ADPCM, G.721), are the exception:
their clips include the filling of the last block, up to a tenth of a second, because their headers
do not tell it apart. Samples are decoded, averaged and resampled in blocks, so that memory grows
with the seconds of a file, not with its rate or channels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from io import BytesIO, FileIO
from typing import Any, Literal

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from jaxmllm.arrays import ceil_divide, round_up
from jaxmllm.config.schema import Silence
from jaxmllm.data.media import mpeg
from jaxmllm.data.media.containers import (
    check_flac,
    check_last_page,
    check_pages,
    check_wave,
    container,
    wave_filling,
)
from jaxmllm.data.media.modality import Shape
from jaxmllm.data.media.reference import MediaError, MediaReference, Stream, size_of
from jaxmllm.row_format import RowFormat

# Hz; every sound card is within these, a damaged header often is not.
MIN_RATE = 1_000
MAX_RATE = 1_000_000
# Samples are nominally within [-1, 1]. Recorders and mixers that write floats exceed that by some
# decibels, which is accepted unchanged. Integers written as floats exceed it thousands of times;
# only the user knows their width, and has to divide them.
MAX_PEAK = 100.0
_BLOCK = 1 << 18  # samples decoded at once, over all channels
_FRAMES = 4096  # frames transformed at once
# Frames past the clip's last one that the stem's convolutions read for its last token
REACH = 2


@dataclass(frozen=True)
class Sounds:
    """The audio modality. A shape is (frames, 1, 1); a clip has the slots of whole language tokens.

    A slot holds one float32 [mel_bins] frame, mostly within [-1, 1]. Slots past the last frame hold
    zeros or silence and are not real, except with `silence: heard`, where they hold silence and are
    real. Where the frames of a chunk are no whole number of attention tokens, empty slots after
    them fill up the last token.
    """

    sample_rate: int
    window_length: int
    hop_length: int
    mel_bins: int
    chunk_frames: int
    merge: int
    max_seconds: float
    stem_stride: int = 4  # slots of an attention token
    # What the tower sees of the rest of a clip's last chunk (`AudioConfig`)
    silence: Silence = "unseen"
    attention: Literal["clip", "chunk"] = "clip"  # tokens see their whole clip, or their chunks
    window_chunks: int = 1  # chunks that see one another, with `attention: chunk`
    pool: int = 1  # attention tokens whose mean becomes a feature; incomplete groups are dropped

    name = "audio"
    parts = ("audio",)
    generated = False
    formats = ("WAV", "FLAC", "OGG", "MP3")

    @functools.cached_property
    def format(self) -> RowFormat:
        stride = self.stem_stride
        slots = stride * self.pool * self.merge
        return RowFormat(
            features=self.mel_bins,
            dtype=np.dtype(np.float32),
            slots_per_token=slots,
            stride=stride,
            alignment=slots,
            axes=(0, 1),  # the second is 0 everywhere: rows of all encoders have two
            margin=stride,  # no convolution of a stem reaches further than the next token
        )

    def measure(self, media: MediaReference) -> Shape:
        """Frames from the header. Raises `MediaError`: missing_file, broken_audio_header,
        unsupported_sample_rate, empty_audio, audio_too_short, audio_too_long, and, if the beginning
        or end of the file shows it, truncated_audio, joined_audio, wrong_audio_length."""
        with media.open() as file:
            return self._shape(self._read_header(file, media), media)

    def captions(self, shape: Shape) -> tuple[str, ...]:
        return ()

    @property
    def chunk_slots(self) -> int:
        """Slots of a chunk: its frames, rounded up to whole attention tokens."""
        return round_up(self.chunk_frames, self.stem_stride)

    def length(self, shape: Shape) -> int:
        slots = ceil_divide(shape[0], self.chunk_frames) * self.chunk_slots
        if self.silence == "heard":
            return slots
        heard = self._clip_slots(shape) + (REACH if self.silence == "stem" else 0)
        return min(slots, round_up(heard, self.format.alignment))

    def _clip_slots(self, shape: Shape) -> int:
        """Slots from the first frame of a clip to its last one."""
        chunks, offset = divmod(shape[0] - 1, self.chunk_frames)
        return chunks * self.chunk_slots + offset + 1

    def real(self, shape: Shape) -> int:
        return self.length(shape) if self.silence == "heard" else self._clip_slots(shape)

    def heard(self, shape: Shape) -> int:
        """Number of frames of the clip and of silence that the tower reads."""
        # `stem` and `heard` come only with chunks of whole attention tokens (checked by
        # `AudioConfig`), so slots and frames are numbered the same.
        return self.length(shape) if self.silence in ("stem", "heard") else shape[0]

    def laid_out(self, frames: NDArray[np.float32], shape: Shape) -> NDArray[np.float32]:
        """The `heard` frames of a clip in their slots, zeros in the others: [length, mel_bins].

        Args:
          frames: [at least `heard`, mel_bins].
        """
        slots = np.zeros((self.length(shape), self.mel_bins), np.float32)
        numbers = np.arange(self.heard(shape))
        chunks, offsets = np.divmod(numbers, self.chunk_frames)
        slots[chunks * self.chunk_slots + offsets] = frames[: len(numbers)]
        return slots

    def tokens(self, shape: Shape) -> int:
        seen = ceil_divide(self._clip_slots(shape), self.stem_stride)
        return ceil_divide(seen // self.pool, self.merge)

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        """Log-mel frames in their slots: float32 [length, mel_bins], finite. Raises `MediaError`:
        those of `measure`, shape_changed, undecodable_audio (also samples that are not finite),
        samples_out_of_range (beyond MAX_PEAK)."""
        with media.open() as file:
            header = self._read_header(file, media)
            if (shape_now := self._shape(header, media)) != shape:
                raise MediaError(
                    "shape_changed",
                    f"{media} was indexed as {shape[0]} frames but has {shape_now[0]} now",
                )
            samples = _decode(
                self._checked_stream(file, header, media), header, self.sample_rate, media
            )
        # The resampler rounds the number of samples by a rule of its own
        samples = _pad_or_cut(samples, self._sample_count(header))
        if self.silence != "unseen":  # else the spectrogram mirrors the clip's end
            samples = _pad_or_cut(samples, self._samples_with_silence(len(samples), shape))
        frames = log_mel(
            samples, self.sample_rate, self.window_length, self.hop_length, self.mel_bins
        )
        return self.laid_out(frames, shape)

    def _samples_with_silence(self, samples: int, shape: Shape) -> int:
        """Number of samples of a clip with the silence that its frames hear after it.

        With `heard` and `stem`, whose frames of silence are read, it ends with the clip's last
        chunk at the latest. With `cut` and `masked`, whose frames of silence are not, it may
        continue past that chunk.
        """
        needed = max(samples + self.window_length, self.length(shape) * self.hop_length)
        if self.silence in ("cut", "masked"):
            return needed
        chunks = round_up(shape[0], self.chunk_frames) * self.hop_length
        return chunks if self.silence == "heard" else min(needed, chunks)

    def positions(self, shape: Shape) -> NDArray[np.int32]:
        """(attention token, 0, 0) of each frame: [length, 3]."""
        positions = np.zeros((self.length(shape), 3), np.int32)
        positions[:, 0] = np.arange(len(positions)) // self.stem_stride
        return positions

    def real_slots(self, shape: Shape) -> NDArray[np.bool_]:
        return np.arange(self.length(shape)) < self.real(shape)

    def apart(self, shape: Shape) -> NDArray[np.int32] | None:
        if self.attention == "clip":
            return None
        seen = self.window_chunks * self.chunk_slots
        return np.arange(self.length(shape), dtype=np.int32) // seen

    def token_positions(self, shape: Shape, start: float) -> tuple[NDArray[Any], float]:
        """Positions of a clip's tokens, which advance all three axes together, as text does:
        [tokens, 3]."""
        line = start + np.arange(self.tokens(shape))
        return np.repeat(line[:, None], 3, axis=1), start + len(line)

    def _read_header(self, file: Stream, media: MediaReference) -> _Header:
        """Sample rate and length of a file, without decoding."""
        kind = container(file)
        if size_of(file) == 0:
            raise MediaError("empty_audio", f"{media} is an empty file")
        if kind == "WAV":
            check_wave(file, media)
        elif kind == "OGG":
            check_last_page(file, media)
        elif kind == "MP3":
            stream = mpeg.open_stream(file, media)
            # libsndfile would guess the length from the bit rate, so it is not asked.
            if not stream.understood:
                frames = (
                    self._scan_frames(file, stream, media).frames
                    if stream.stored is None
                    else stream.stored
                )
                return _Header(kind, stream.first.rate, stream.samples(frames), stream)
        elif not kind:
            raise MediaError("broken_audio_header", f"{media} is no WAV, FLAC, OGG or MP3 file")
        with _open_sound(file, media) as sound:
            rate = sound.samplerate
            decoded = sound.frames
        filling = wave_filling(file, decoded) if kind == "WAV" else 0
        return _Header(kind, rate, decoded - filling, stream if kind == "MP3" else None, filling)

    def _scan_frames(
        self, file: Stream, stream: mpeg.MpegStream, media: MediaReference
    ) -> mpeg.Scan:
        """Scan the frames of an MP3 stream, up to one more than the most that could be used."""
        longest = (
            int(min(self.max_seconds * stream.first.rate, 2**62) + mpeg.DECODER_DELAY)
            // stream.first.samples
        )
        return mpeg.scan(
            file, stream, media, (longest if stream.stored is None else stream.stored) + 1
        )

    def _checked_stream(self, file: Stream, header: _Header, media: MediaReference) -> Stream:
        """The stream to decode with libsndfile, after checks that it will not leave anything out.
        Reads the whole file."""
        if header.kind == "OGG":
            check_pages(file, media)
        elif header.kind == "FLAC":
            check_flac(file, header.frames, media)
        elif header.stream is not None:
            scan = self._scan_frames(file, header.stream, media)
            # Without a count that libsndfile understands, an info frame with the number of frames
            # comes first. The stream ends with the last frame, without the tags after it.
            begin = header.stream.start if header.stream.understood else scan.begin
            file.seek(begin)
            info = b"" if header.stream.understood else mpeg.info_frame(header.stream, scan.frames)
            return BytesIO(info + file.read(scan.end - begin))
        return file

    def _sample_count(self, header: _Header) -> int:
        return ceil_divide(header.frames * self.sample_rate, header.rate)

    def _shape(self, header: _Header, media: MediaReference) -> Shape:
        """Shape of a clip. Raises `MediaError` if its rate or its length cannot be used."""
        if header.frames >= 2**62:  # libsndfile's value for streams that never stored their length
            raise MediaError(
                "broken_audio_header", f"{media} does not say how long it is; encode it again"
            )
        if not MIN_RATE <= header.rate <= MAX_RATE:
            raise MediaError(
                "unsupported_sample_rate",
                f"{media} has {header.rate} samples per second, which is not within {MIN_RATE} and {MAX_RATE}: its "
                "header is damaged, or it holds no sound; resample it",
            )
        if header.frames <= 0:
            raise MediaError("empty_audio", f"{media} holds no samples")
        if header.frames > self.max_seconds * header.rate:
            raise MediaError(
                "audio_too_long",
                f"{media} lasts {header.frames / header.rate:.1f} s, more than data.audio.max_seconds = "
                f"{self.max_seconds:g}; raise it or split the clip",
            )
        shape = ceil_divide(self._sample_count(header), self.hop_length), 1, 1
        if not self.tokens(shape):
            raise MediaError(
                "audio_too_short",
                f"{media} lasts {header.frames / header.rate:.3f} s, which is too short for a token of "
                f"{self.format.slots_per_token * self.hop_length / self.sample_rate:g} s; leave it out",
            )
        return shape


def log_mel(
    samples: NDArray[np.float32], sample_rate: int, window: int, hop: int, mel_bins: int
) -> NDArray[np.float32]:
    """Mono samples [n], n >= 1 -> [ceil(n / hop), mel_bins]. Frame i is centred on sample i * hop;
    the ends are mirrored. Finite wherever the samples are."""
    # Loud samples are first scaled to [-1, 1], because their squares could overflow. The factor is
    # added back to the logarithms.
    peak = max(1.0, float(np.abs(samples).max()))
    padded = np.pad(samples / np.float32(peak), (window // 2, window), mode="reflect")
    pieces = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop][
        : ceil_divide(len(samples), hop)
    ]
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)).astype(np.float32)
    filters = mel_filters(sample_rate, window, mel_bins)
    silence = max(1e-10 / peak**2, 1e-38)  # about the smallest normal float32
    decades = np.empty((len(pieces), mel_bins), np.float32)
    for start in range(0, len(pieces), _FRAMES):
        power = np.abs(np.fft.rfft(pieces[start : start + _FRAMES] * hann, axis=-1)) ** 2
        decades[start : start + _FRAMES] = np.log10(np.maximum(power @ filters, silence))
    decades += np.float32(2 * np.log10(peak))
    return (np.maximum(decades, decades.max() - 8) + 4) / 4


@functools.lru_cache(maxsize=8)
def mel_filters(sample_rate: int, window: int, mel_bins: int) -> NDArray[np.float32]:
    """Triangular filters of equal area on Slaney's mel scale, from 0 to sample_rate / 2:
    [window // 2 + 1, mel_bins]."""
    edges = _mel_to_hertz(np.linspace(0, _hertz_to_mel(sample_rate / 2), mel_bins + 2))
    bins = np.fft.rfftfreq(window, 1 / sample_rate)[:, None]
    low = edges[:-2]
    centre = edges[1:-1]
    high = edges[2:]
    triangles = np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)).clip(
        min=0
    )
    return (triangles * 2 / (high - low)).astype(np.float32)


_BREAK_HERTZ = 1000.0  # Slaney's scale is linear below, logarithmic above
_HERTZ_PER_MEL = 200 / 3  # in the linear part
_LOG_STEP = np.log(6.4) / 27


def _hertz_to_mel(hertz: float) -> float:
    return (
        hertz / _HERTZ_PER_MEL
        if hertz < _BREAK_HERTZ
        else _BREAK_HERTZ / _HERTZ_PER_MEL + float(np.log(hertz / _BREAK_HERTZ) / _LOG_STEP)
    )


def _mel_to_hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = mel - _BREAK_HERTZ / _HERTZ_PER_MEL
    return np.where(above < 0, mel * _HERTZ_PER_MEL, _BREAK_HERTZ * np.exp(_LOG_STEP * above))


@dataclass(frozen=True)
class _Header:
    kind: str  # container format
    rate: int
    frames: int  # samples of each channel
    stream: mpeg.MpegStream | None = None  # of an MP3 file
    filling: int = 0  # samples of each channel that are decoded after those of the clip


def _open_sound(file: Stream, media: MediaReference) -> soundfile.SoundFile:
    """Open a stream with libsndfile."""
    file.seek(0)  # libsndfile begins at the stream's position
    # libsndfile reads a file by its descriptor, and anything else through slower calls to Python.
    source = file.fileno() if isinstance(file, FileIO) else file
    try:
        return soundfile.SoundFile(source, closefd=False)
    except MemoryError:
        raise
    except Exception as error:  # LibsndfileError, and TypeError for raw samples
        reason = getattr(error, "error_string", error)  # without the number of the descriptor
        raise MediaError(
            "broken_audio_header", f"{media} has no readable header: {reason}"
        ) from error


def _decode(
    file: Stream, header: _Header, sample_rate: int, media: MediaReference
) -> NDArray[np.float32]:
    """All samples of a file, averaged over channels and resampled: [n]."""
    resampler = (
        soxr.ResampleStream(header.rate, sample_rate, 1) if header.rate != sample_rate else None
    )
    pieces = []
    decoded = 0
    with _open_sound(file, media) as sound:
        while True:
            try:
                block = sound.read(
                    max(1, _BLOCK // sound.channels), dtype="float32", always_2d=True
                )
            except MemoryError:  # the machine's fault, not the file's
                raise
            except Exception as error:
                reason = getattr(error, "error_string", error)
                raise MediaError(
                    "undecodable_audio", f"{media} does not decode: {reason}"
                ) from error
            _check_range(block, media)
            mono = block[: max(0, header.frames - decoded)].mean(axis=1)
            decoded += len(block)
            pieces.append(
                mono if resampler is None else resampler.resample_chunk(mono, last=not len(block))
            )
            if not len(block):
                break
    expected = header.frames + header.filling
    if decoded != expected:
        raise MediaError(
            "truncated_audio",
            f"{media} holds {decoded} samples where its header says {expected}; copy it again, or encode it again",
        )
    return np.concatenate(pieces)


def _check_range(block: NDArray[np.float32], media: MediaReference) -> None:
    # Checked before channels are averaged, because opposite values would cancel. (np.maximum keeps
    # NaN, Python's max may not.)
    peak = float(np.maximum(block.max(initial=0), -block.min(initial=0)))
    if not np.isfinite(peak):
        raise MediaError(
            "undecodable_audio", f"{media} holds samples that are not finite; write the clip again"
        )
    if peak > MAX_PEAK:
        raise MediaError(
            "samples_out_of_range",
            f"{media} has samples up to {peak:.3g}, where full scale is 1 and {MAX_PEAK:g} the most that is taken; if "
            "they are integers written as floats, divide them by full scale (32768 for 16 bits)",
        )


def _pad_or_cut(samples: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    return np.pad(samples[:count], (0, max(0, count - len(samples))))
