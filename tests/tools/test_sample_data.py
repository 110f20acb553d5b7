"""Sample data: reproducible by seed, with answers that follow from the media alone."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from jaxmllm.tools.sample_data import KINDS, OPPOSITES, answer_of, main, make_sample
from jaxmllm.tools.sample_media import COLOURS, SOUNDS

TRAIN = 480
TEST = 160


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    out = tmp_path_factory.mktemp("sample")
    return out, make_sample(out, seed=3, train=TRAIN, test=TEST)


def read(out: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (out / f"{split}.jsonl").read_text().splitlines()]


def media_of(record: dict, part: str) -> list[str]:
    return [item[part] for item in record["messages"][0]["content"] if item["type"] == part]


def question_of(record: dict) -> str:
    return next(item["text"] for item in record["messages"][0]["content"] if item["type"] == "text")


def colour_in(path: Path) -> str:
    """The palette colour nearest to the middle of the picture."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"), float)
    height, width, _ = pixels.shape
    middle = pixels[height * 2 // 5 : height * 3 // 5, width * 2 // 5 : width * 3 // 5].mean(
        axis=(0, 1)
    )
    return min(COLOURS, key=lambda name: float(np.abs(middle - COLOURS[name]).sum()))


def sound_in(path: Path) -> str:
    """The kind of a clip, told by its peaks, flatness, bandwidth and pitch, in this order."""
    samples, rate = soundfile.read(path, always_2d=True)
    wave = samples.mean(axis=1)
    # Kurtosis: clicks are rare and loud
    if np.mean(wave**4) / np.mean(wave**2) ** 2 > 6:
        return "clicks"
    power = np.abs(np.fft.rfft(wave * np.hanning(len(wave)))) ** 2 + 1e-12
    frequency = np.fft.rfftfreq(len(wave), 1 / rate)
    # Spectral flatness: near 1 for white noise, near 0 for tones
    if np.exp(np.mean(np.log(power))) / np.mean(power) > 0.2:
        return "noise"
    share = power / power.sum()
    pitch = float((share * frequency).sum())
    # Bandwidth: a siren sweeps, other tones do not
    if np.sqrt((share * (frequency - pitch) ** 2).sum()) > 250:
        return "siren"
    peak = frequency[power.argmax()]
    return "low" if peak < 400 else "middle" if peak < 1400 else "high"


def test_two_runs_give_the_same_bytes_and_another_seed_does_not(sample, tmp_path):
    out, _ = sample
    make_sample(tmp_path / "again", seed=3, train=TRAIN, test=TEST)
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert files == sorted(
        p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file()
    )
    for path in files:
        assert (out / path).read_bytes() == (tmp_path / "again" / path).read_bytes(), path

    make_sample(tmp_path / "other", seed=4, train=TRAIN, test=TEST)
    assert (out / "train.jsonl").read_bytes() != (tmp_path / "other" / "train.jsonl").read_bytes()


def test_answers_follow_from_the_media_alone(sample):
    """Against labels that are measured in the files: mean colours and spectra."""
    out, _ = sample
    antonyms = {
        label: antonym for pair in OPPOSITES.items() for label, antonym in (pair, pair[::-1])
    }
    counts = Counter()
    for record in read(out, "train") + read(out, "test"):
        images = {colour_in(out / path) for path in media_of(record, "image")}
        clips = {sound_in(out / path) for path in media_of(record, "audio")}
        match record["source"]:
            case "picture":
                expected = [(*images,)]
            case "sound":
                expected = [(*clips,)]
            case "both":
                expected = [(*images, *clips)]
            case _:
                words = question_of(record).translate(str.maketrans(".,?:", "    ")).split()
                expected = [(antonyms[word],) for word in words if word in antonyms]
        assert [tuple(answer_of(record).split())] == expected, record
        counts[record["source"]] += 1
    assert counts == dict.fromkeys(KINDS, (TRAIN + TEST) // 4)


def test_kinds_have_exactly_their_modalities(sample):
    out, summary = sample
    modalities = {
        "picture": (True, False),
        "sound": (False, True),
        "both": (True, True),
        "text": (False, False),
    }
    records = read(out, "train")
    for record in records:
        assert (bool(media_of(record, "image")), bool(media_of(record, "audio"))) == modalities[
            record["source"]
        ]
    assert (
        {len(media_of(r, "image")) for r in records}
        == {len(media_of(r, "audio")) for r in records}
        == {0, 1, 2, 3}
    )
    assert summary["train"]["without_picture"] == summary["train"]["without_clip"] == 0.5


@pytest.mark.parametrize("split", ["train", "test"])
def test_spreads_hold_for_the_files_that_are_asked_about(sample, split):
    out, summary = sample
    records = read(out, split)
    areas = []
    seconds = []
    kinds = set()
    rates = set()
    channels = set()
    for path in {path for record in records for path in media_of(record, "image")}:
        with Image.open(out / path) as image:
            areas.append(image.width * image.height)
            kinds.add((image.format, image.mode))
    for path in {path for record in records for path in media_of(record, "audio")}:
        info = soundfile.info(out / path)
        seconds.append(info.duration)
        kinds.add(info.format)
        rates.add(info.samplerate)
        channels.add(info.channels)
    assert max(areas) / min(areas) >= 30
    assert max(seconds) / min(seconds) >= 15
    assert summary[split]["pictures"]["spread"] >= max(areas) / min(areas)
    assert summary[split]["clips"]["spread"] >= max(seconds) / min(seconds)
    assert kinds >= {
        ("PNG", "RGB"),
        ("PNG", "RGBA"),
        ("PNG", "P"),
        ("JPEG", "RGB"),
        ("WEBP", "RGB"),
        "WAV",
        "FLAC",
    }
    assert len(rates) >= 3
    assert channels == {1, 2}


def test_chance_is_the_share_of_the_commonest_answer_and_low(sample):
    out, summary = sample
    for split in ("train", "test"):
        for kind in KINDS:
            answers = [answer_of(record) for record in read(out, split) if record["source"] == kind]
            best = max(sum(answer == guess for answer in answers) for guess in answers)
            assert summary[split]["chance"][kind] == best / len(answers) < 0.2
    assert json.loads((out / "sample.json").read_text()) == summary


def test_splits_share_no_file_and_no_text_question(sample):
    out, _ = sample
    train = read(out, "train")
    test = read(out, "test")
    files = [
        {
            (out / p).read_bytes()
            for r in records
            for k in ("image", "audio")
            for p in media_of(r, k)
        }
        for records in (train, test)
    ]
    assert files[0] and files[1] and files[0].isdisjoint(files[1])
    texts = [
        {question_of(r) for r in records if r["source"] == "text"} for records in (train, test)
    ]
    assert texts[0] and texts[1] and texts[0].isdisjoint(texts[1])
    assert {answer_of(r) for r in test if r["source"] != "both"} == {
        answer_of(r) for r in train if r["source"] != "both"
    }


def test_labels_have_words_of_their_own():
    words = [*COLOURS, *SOUNDS, *OPPOSITES, *OPPOSITES.values()]
    assert len(words) == len(set(words))


def test_counts_must_fill_the_kinds(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"--train 6: must be a positive multiple of 4"):
        make_sample(tmp_path, train=6)
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--test", "0"])
    assert "--test 0" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "file" / "out")])
    assert "Not a directory" in capsys.readouterr().err.splitlines()[-1]


def test_command_prints_the_chance_levels(tmp_path, capsys):
    main([str(tmp_path), "--train", "16", "--test", "16"])
    printed = capsys.readouterr().out
    assert "train: 16 examples" in printed
    assert "text 0.250" in printed
