"""Sounds from files: log-mel features, formats, rates and lengths, and what is refused.

The reference for features is their definition, computed in float64."""

import io
import math
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from jaxmllm.config.schema import AudioDataConfig
from jaxmllm.data.media.modality import Shape
from jaxmllm.data.media.mpeg import DECODER_DELAY
from jaxmllm.data.media.reference import File, MediaError
from jaxmllm.data.media.sounds import MAX_PEAK, MAX_RATE, MIN_RATE, Sounds, log_mel, mel_filters

SOUNDS = Sounds(
    sample_rate=16_000,
    window_length=400,
    hop_length=160,
    mel_bins=40,
    chunk_frames=32,
    merge=2,
    max_seconds=5.0,
)


def noise(count: int) -> np.ndarray:
    """Uniform noise in [-0.5, 0.5], the same for the same count."""
    return np.random.default_rng(count).uniform(-0.5, 0.5, count)


def tone(hertz: float, seconds: float, rate: int) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def reason(path: Path, shape: Shape | None = None) -> str:
    """The reason for which a sound file is refused, when measured or when loaded."""
    with pytest.raises(MediaError) as caught:
        if shape is None:
            SOUNDS.measure(File(path))
        else:
            SOUNDS.load(File(path), shape)
    assert str(path) in str(caught.value)
    return caught.value.reason


def mel(hertz: float) -> float:
    """A frequency on Slaney's mel scale: linear below 1000 Hz, logarithmic above."""
    return 3 * hertz / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000, 6.4)


def reference_log_mel(
    samples: np.ndarray, rate: int, window: int, hop: int, bins: int
) -> np.ndarray:
    """Log-mel features in float64, by definition: mirrored ends, frame after frame, a direct
    Fourier sum."""
    half_window = window // 2
    length = len(samples)
    period = max(1, 2 * (length - 1))
    mirror = [min(i % period, period - i % period) for i in range(-half_window, length + window)]
    padded = samples.astype(np.float64)[mirror]
    n = np.arange(window)
    hann = np.sin(np.pi * n / window) ** 2
    fourier = np.exp(-2j * np.pi * np.outer(np.arange(half_window + 1), n) / window)
    edges = np.linspace(0, mel(rate / 2), bins + 2)
    hertz = np.array([m * 200 / 3 if m < 15 else 1000 * 6.4 ** ((m - 15) / 27) for m in edges])
    filters = np.zeros((half_window + 1, bins))
    for k in range(half_window + 1):
        f = k * rate / window
        for b in range(bins):
            low, centre, high = hertz[b : b + 3]
            if low < f < high:
                height = (f - low) / (centre - low) if f <= centre else (high - f) / (high - centre)
                filters[k, b] = height * 2 / (high - low)
    power = [
        np.abs(fourier @ (hann * padded[i * hop : i * hop + window])) ** 2
        for i in range(math.ceil(length / hop))
    ]
    decades = np.log10(np.maximum(np.array(power) @ filters, 1e-10))
    return (np.maximum(decades, decades.max() - 8) + 4) / 4


@pytest.mark.parametrize("count", [1, 2, 100, 160, 161, 400, 3000])
def test_log_mel_against_the_definition(count: int) -> None:
    samples = noise(count).astype(np.float32)
    features = log_mel(samples, 16_000, 400, 160, 40)
    assert features.shape == (math.ceil(count / 160), 40) and features.dtype == np.float32
    # The features are float32, the reference float64.
    np.testing.assert_allclose(
        features, reference_log_mel(samples, 16_000, 400, 160, 40), atol=2e-4
    )


def test_mel_filters_peak_in_order() -> None:
    filters = mel_filters(16_000, 400, 40)
    centres = filters.argmax(0)
    assert (np.diff(centres) >= 0).all() and (filters >= 0).all() and (filters.sum(0) > 0).all()


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.mp3"])
@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (16_000, 2), (44_100, 2), (48_000, 1)])
def test_formats_rates_and_channels(name: str, rate: int, channels: int, tmp_path: Path) -> None:
    mono = tone(1000, 0.7, rate)
    soundfile.write(tmp_path / name, np.stack([mono] * channels, axis=1), rate)
    shape = SOUNDS.measure(File(tmp_path / name))
    assert shape == (70, 1, 1)
    features = SOUNDS.load(File(tmp_path / name), shape)
    assert (
        features.shape == (72, 40) == (SOUNDS.length(shape), SOUNDS.format.features)
        and features.dtype == SOUNDS.format.dtype
    )
    assert not features[70:].any() and np.isfinite(features).all()
    # The mel band whose centre is nearest to the tone of 1000 Hz must be the loudest.
    band = int(np.argmin(np.abs(np.linspace(0, mel(8000), 42)[1:-1] - mel(1000))))
    assert abs(int(np.median(features[5:65].argmax(1))) - band) <= 1


def test_channels_are_averaged(tmp_path: Path) -> None:
    channel = noise(4000)
    soundfile.write(
        tmp_path / "stereo.wav", np.stack([channel, -channel], axis=1), 16_000, subtype="FLOAT"
    )
    soundfile.write(tmp_path / "silence.wav", np.zeros(4000), 16_000, subtype="FLOAT")
    np.testing.assert_array_equal(
        *(SOUNDS.load(File(tmp_path / f"{name}.wav"), (25, 1, 1)) for name in ("stereo", "silence"))
    )


def test_lengths_and_positions(tmp_path: Path) -> None:
    for samples, frames in [
        (1, 1),
        (159, 1),
        (160, 1),
        (161, 2),
        (32 * 160, 32),
        (32 * 160 + 1, 33),
    ]:
        soundfile.write(tmp_path / "a.wav", noise(samples), 16_000)
        shape = SOUNDS.measure(File(tmp_path / "a.wav"))
        assert shape == (frames, 1, 1)
        assert (
            len(SOUNDS.load(File(tmp_path / "a.wav"), shape))
            == SOUNDS.length(shape)
            == math.ceil(frames / 8) * 8
        )
        assert SOUNDS.real(shape) == frames == SOUNDS.real_slots(shape).sum()
    assert [SOUNDS.tokens((frames, 1, 1)) for frames in (1, 4, 5, 8, 9, 33)] == [1, 1, 1, 1, 2, 5]
    assert SOUNDS.positions((5, 1, 1)).tolist() == [[i // 4, 0, 0] for i in range(8)]
    positions, following = SOUNDS.token_positions((33, 1, 1), 7)
    assert positions.tolist() == [[7 + i] * 3 for i in range(5)] and following == 12
    assert (SOUNDS.format.slots_per_token, SOUNDS.format.stride, SOUNDS.format.alignment) == (
        8,
        4,
        8,
    )


def test_short_clips_at_odd_rates(tmp_path: Path) -> None:
    for rate in (4000, 11_025, 22_050, 96_000):
        for samples in (1, 2, 7, 50):
            soundfile.write(tmp_path / "a.wav", noise(samples), rate)
            shape = SOUNDS.measure(File(tmp_path / "a.wav"))
            assert shape[0] == math.ceil(math.ceil(samples * 16_000 / rate) / 160)
            assert np.isfinite(SOUNDS.load(File(tmp_path / "a.wav"), shape)).all()


def test_empty_audio(tmp_path: Path) -> None:
    for name in ("a.wav", "a.flac"):
        soundfile.write(tmp_path / name, np.zeros(0), 16_000)
        assert reason(tmp_path / name) == "empty_audio"
    (tmp_path / "b.ogg").write_bytes(b"")
    assert reason(tmp_path / "b.ogg") == "empty_audio"


def test_too_long(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(8000 * 5 + 1), 8000)
    with pytest.raises(MediaError, match=r"data\.audio\.max_seconds = 5") as caught:
        SOUNDS.measure(File(tmp_path / "a.wav"))
    assert caught.value.reason == "audio_too_long"


def test_missing_and_broken_headers(tmp_path: Path) -> None:
    assert reason(tmp_path / "absent.wav") == "missing_file"
    for name in ("a.wav", "a.raw", "a.mp3", "a.ogg"):
        (tmp_path / name).write_bytes(b"hello" * 20)
        assert reason(tmp_path / name) == "broken_audio_header"


def test_samples_that_are_not_finite(tmp_path: Path) -> None:
    for value in (np.nan, np.inf, -np.inf):
        for channels in ([value], [value, 0.0], [0.0, value]):
            samples = np.tile(np.append(np.zeros((799, len(channels))), [channels], axis=0), (1, 1))
            soundfile.write(tmp_path / "a.wav", samples, 16_000, subtype="FLOAT")
            assert reason(tmp_path / "a.wav", (5, 1, 1)) == "undecodable_audio"
    # Finite as a double, but not in float32.
    soundfile.write(tmp_path / "a.wav", np.full(800, 1e300), 16_000, subtype="DOUBLE")
    assert reason(tmp_path / "a.wav", (5, 1, 1)) == "undecodable_audio"


def test_samples_out_of_range(tmp_path: Path) -> None:
    """Samples up to MAX_PEAK are taken as they are, and beyond it the clip is refused.

    Channels that cancel each other out count, too."""
    path = tmp_path / "a.wav"
    for peak in (1e20, 32768.0, 1.01 * MAX_PEAK):
        for samples in (
            peak * noise(800) * 2,
            np.stack([np.full(800, peak), np.full(800, -peak)], axis=1),
        ):
            soundfile.write(path, samples, 16_000, subtype="FLOAT")
            assert reason(path, (5, 1, 1)) == "samples_out_of_range"
    for peak in (1.5, 30.0, 0.99 * MAX_PEAK):
        samples = (peak * np.sign(noise(800))).astype(np.float32)
        soundfile.write(path, samples, 16_000, subtype="FLOAT")
        expected = reference_log_mel(samples, 16_000, 400, 160, 40)
        np.testing.assert_allclose(SOUNDS.load(File(path), (5, 1, 1))[:5], expected, atol=2e-4)


@pytest.mark.parametrize("peak", [1e-38, 1e-20, 1.0, 1e4, 1e20, 3e38])
def test_no_finite_sound_has_features_that_are_not_finite(peak: float) -> None:
    samples = (peak * tone(440, 0.1, 16_000) * 2).astype(np.float32)
    features = log_mel(samples, 16_000, 400, 160, 40)
    assert np.isfinite(features).all()
    # Scaling samples by `peak` adds 2 * log10(peak) decades of power, and features are decades / 4.
    expected = (
        reference_log_mel(tone(440, 0.1, 16_000) * 2, 16_000, 400, 160, 40)
        + 2 * math.log10(peak) / 4
    )
    if peak >= 1:  # the floor of log-mel features would cut off a quieter sound
        np.testing.assert_allclose(features, expected, atol=1e-3)


def test_sample_rates(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    for rate in (1, MIN_RATE - 1, MAX_RATE + 1, 200_000_000):
        soundfile.write(path, np.zeros(400), rate)
        assert reason(path) == "unsupported_sample_rate"
    for rate in (MIN_RATE, MAX_RATE):
        soundfile.write(path, noise(rate), rate)
        assert SOUNDS.measure(File(path)) == (100, 1, 1)
        assert np.isfinite(SOUNDS.load(File(path), (100, 1, 1))).all()


def test_the_configured_rate_has_the_bounds_of_files() -> None:
    for rate in (MIN_RATE, MAX_RATE):
        assert AudioDataConfig(sample_rate=rate).sample_rate == rate
    for rate in (MIN_RATE - 1, MAX_RATE + 1):
        with pytest.raises(ValueError, match="sample_rate"):
            AudioDataConfig(sample_rate=rate)


@pytest.mark.parametrize("rate", [8000, 11_025, 44_100, 96_000])
def test_decoding_in_blocks_is_decoding_at_once(
    rate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soundfile.write(
        tmp_path / "a.flac", np.stack([tone(440, 1.3, rate), tone(880, 1.3, rate)], axis=1), rate
    )
    shape = SOUNDS.measure(File(tmp_path / "a.flac"))
    loaded = SOUNDS.load(File(tmp_path / "a.flac"), shape)
    mono = soundfile.read(tmp_path / "a.flac", dtype="float32")[0].mean(axis=1)
    single_pass = log_mel(soxr.resample(mono, rate, 16_000), 16_000, 400, 160, 40)
    monkeypatch.setattr("jaxmllm.data.media.sounds._BLOCK", 1000)
    monkeypatch.setattr("jaxmllm.data.media.sounds._FRAMES", 7)
    np.testing.assert_allclose(SOUNDS.load(File(tmp_path / "a.flac"), shape), loaded, atol=1e-4)
    # The resampler may round the last sample away, which the last frames see.
    np.testing.assert_allclose(loaded[: shape[0] - 3], single_pass[: shape[0] - 3], atol=1e-4)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", noise(800), 16_000)
    assert reason(tmp_path / "a.wav", (6, 1, 1)) == "shape_changed"


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.opus", "a.mp3"])
@pytest.mark.parametrize("rate", [8000, 16_000, 24_000, 48_000])
def test_the_length_of_the_header_is_that_of_the_body(name: str, rate: int, tmp_path: Path) -> None:
    """The lengths agree exactly, whatever the format, because loading compares them."""
    for samples in (1, 100, 959, 960, 961, 4096, 5000):
        options = {"format": "OGG", "subtype": "OPUS"} if name == "a.opus" else {}
        soundfile.write(tmp_path / name, noise(samples), rate, **options)
        shape = SOUNDS.measure(File(tmp_path / name))
        assert shape == (math.ceil(math.ceil(samples * 16_000 / rate) / 160), 1, 1)
        assert SOUNDS.load(File(tmp_path / name), shape).shape == (SOUNDS.length(shape), 40)


BLOCKS = {"IMA_ADPCM": 1017, "MS_ADPCM": 1012, "GSM610": 320}  # samples of a block at 16 kHz


def with_fact(path: Path, samples: int) -> None:
    """Write a number of samples into the `fact` chunk of a WAV file."""
    content = path.read_bytes()
    begin = content.index(b"fact") + 8
    path.write_bytes(content[:begin] + samples.to_bytes(4, "little") + content[begin + 4 :])


@pytest.mark.parametrize("rate", [16_000, 44_100])
@pytest.mark.parametrize(
    ("encoding", "channels"),
    [("IMA_ADPCM", 1), ("IMA_ADPCM", 2), ("MS_ADPCM", 1), ("MS_ADPCM", 2), ("GSM610", 1)],
)
def test_what_fills_the_last_block_is_no_part_of_a_clip(
    encoding: str, channels: int, rate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clip of blocks has the frames of its samples alone. Those decoded after them are loud, and
    would be seen by its last frames."""
    path = tmp_path / "a.wav"
    soundfile.write(path, np.stack([noise(5000)] * channels, axis=1), rate, subtype=encoding)
    decoded = soundfile.read(path, dtype="float32", always_2d=True)[0].mean(axis=1)
    stored = len(decoded) - 300
    with_fact(path, stored)
    shape = SOUNDS.measure(File(path))
    assert shape == (math.ceil(math.ceil(stored * 16_000 / rate) / 160), 1, 1)
    loaded = SOUNDS.load(File(path), shape)
    soundfile.write(tmp_path / "b.wav", decoded[:stored], rate, subtype="FLOAT")
    np.testing.assert_array_equal(loaded, SOUNDS.load(File(tmp_path / "b.wav"), shape))
    monkeypatch.setattr("jaxmllm.data.media.sounds._BLOCK", 300)
    np.testing.assert_allclose(SOUNDS.load(File(path), shape), loaded, atol=1e-4)


@pytest.mark.parametrize("encoding", BLOCKS)
def test_lengths_that_cannot_be_are_not_believed(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, noise(5000), 16_000, subtype=encoding)
    decoded = soundfile.info(path).frames
    for stored in (0, 1, decoded // 2, decoded - BLOCKS[encoding], decoded + 1, 2**32 - 1):
        with_fact(path, stored)
        shape = SOUNDS.measure(File(path))
        assert shape == (math.ceil(decoded / 160), 1, 1)
        SOUNDS.load(File(path), shape)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_two_channels_of_libsndfile_keep_their_last_block(blocks: int, tmp_path: Path) -> None:
    """Its number of samples of IMA ADPCM is half of that in the blocks, which one block could
    hold."""
    path = tmp_path / "a.wav"
    samples = blocks * BLOCKS["IMA_ADPCM"]
    soundfile.write(path, np.stack([noise(samples)] * 2, axis=1), 16_000, subtype="IMA_ADPCM")
    assert SOUNDS.measure(File(path)) == (math.ceil(samples / 160), 1, 1)


def strip_info_frame(mp3: bytes) -> bytes:
    """The MP3 file of an encoder that does not store the length."""
    return mp3[mp3.index(mp3[:2], 4) :]


@pytest.mark.parametrize("rate", [8000, 16_000, 24_000, 44_100])
@pytest.mark.parametrize("loud_first", [False, True])
def test_mp3_without_a_stored_length(rate: int, loud_first: bool, tmp_path: Path) -> None:
    """A changing bit rate defeats libsndfile's guess, which cuts off half of a clip that begins
    loud."""
    halves = [np.zeros(rate), noise(rate)]
    buffer = io.BytesIO()
    clip = np.concatenate(halves[::-1] if loud_first else halves)
    soundfile.write(buffer, clip, rate, format="MP3", bitrate_mode="VARIABLE")
    mp3 = buffer.getvalue()
    without_info = strip_info_frame(mp3)
    (tmp_path / "a.mp3").write_bytes(mp3)
    stored = SOUNDS.load(File(tmp_path / "a.mp3"), SOUNDS.measure(File(tmp_path / "a.mp3")))[:200]
    id3 = b"ID3\x04\x00\x00" + bytes([0, 0, 1, 0]) + bytes(128)
    ape = b"APETAGEX" + (2000).to_bytes(4, "little") + (32).to_bytes(4, "little") + bytes(16)
    for content in (
        without_info,
        id3 + id3 + without_info,
        without_info + b"TAG" + bytes(125),
        without_info + ape + id3 + bytes(10),
    ):
        (tmp_path / "a.mp3").write_bytes(content)
        shape = SOUNDS.measure(File(tmp_path / "a.mp3"))
        samples = shape[0] * rate / 100
        assert len(clip) <= samples <= len(clip) + 2 * 1152 + 2 * rate / 100
        loaded = SOUNDS.load(File(tmp_path / "a.mp3"), shape)
        # The whole clip is there, delayed by what the encoder put in front of it.
        features = loaded[: shape[0]]
        level_changes = (np.diff(features[:, 10:].mean(axis=1) > 0) != 0).sum()
        assert level_changes >= 1
        assert abs(features.mean() - stored.mean()) < 0.15
    assert DECODER_DELAY == 529


def test_many_channels(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.tile(noise(800)[:, None], (1, 1000)), 16_000)
    soundfile.write(tmp_path / "mono.wav", noise(800), 16_000)
    np.testing.assert_allclose(
        *(SOUNDS.load(File(tmp_path / f"{name}.wav"), (5, 1, 1)) for name in ("a", "mono")),
        atol=1e-4,
    )


def test_eight_bit_wave_from_another_writer(tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 1, 8000, 0, "NONE", ""))
        file.writeframes(bytes(range(256)) * 10)
    assert SOUNDS.measure(File(tmp_path / "a.wav")) == (32, 1, 1)
