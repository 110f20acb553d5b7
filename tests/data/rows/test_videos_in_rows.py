"""Videos from records to rows, with one item per group of frames.

The items are indexed, cached, planned, loaded, and masked where a file is damaged. Loaded features
are compared with the patches of the frames, cut as images."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxmllm.balance.records import PhasePlan
from jaxmllm.config.schema import SourceConfig, VideoDataConfig
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.modality import ClipShape
from jaxmllm.data.media.reference import FrameGroup
from jaxmllm.data.media.videos import ImagesAndVideos
from jaxmllm.data.rows.batch import Batch, LocalRows
from jaxmllm.data.rows.encoder_rows import _Filling, empty_rows
from jaxmllm.data.text.tokenizers import ByteTokenizer

COLORS = np.random.default_rng(0).integers(0, 256, (5, 16, 24, 3)).astype(np.uint8)
ANSWER = {"role": "assistant", "content": "yes"}


def reader(**videos: object) -> ImagesAndVideos:
    settings = VideoDataConfig(min_pixels=64, max_pixels=640, **videos)  # type: ignore[arg-type]
    return ImagesAndVideos(4, 2, 64, 640, resize="smart", patch_frames=2, videos=settings)


@pytest.fixture
def source(tmp_path) -> SourceConfig:
    """A JSONL source of four records: one video, an image and two videos, none, a video and an
    image."""
    first_frame, *later_frames = map(Image.fromarray, COLORS)
    first_frame.save(tmp_path / "a.png")
    first_frame.save(tmp_path / "v.png", save_all=True, append_images=later_frames, duration=500)
    records = [
        "<video> what",
        "<image> and <video> and <video>",
        "none",
        "<video><image>",
    ]
    lines = []
    for text in records:
        record = {
            "messages": [{"role": "user", "content": text}, ANSWER],
            "images": ["a.png"] * text.count("<image>"),
            "videos": ["v.png"] * text.count("<video>"),
        }
        lines.append(json.dumps(record) + "\n")
    (tmp_path / "train.jsonl").write_text("".join(lines))
    return SourceConfig(name="a", path=str(tmp_path / "train.jsonl"))


@pytest.mark.parametrize("times", ["positions", "text"])
def test_a_video_is_an_item_for_each_group_of_frames(source, times, tmp_path):
    modality = reader(times=times)
    corpus = Corpus.open([source], ByteTokenizer(), {"vision": modality})
    items = corpus.gather(np.arange(4)).phases["vision"]
    # Five frames make three groups of two, the last one padded; an image is one item more.
    assert items.example.tolist() == [0] * 3 + [1] * 7 + [3] * 4
    assert set(items.length.tolist()) == {24} and set(items.tokens.tolist()) == {6}
    cached = Corpus.open([source], ByteTokenizer(), {"vision": modality})
    for opened in (corpus, cached):
        shapes = opened.indexes[0].shapes(1)
        assert shapes == ((1, 4, 6), (3, 4, 6), (3, 4, 6))
        assert isinstance(shapes[1], ClipShape) and (shapes[1].frames, shapes[1].rate) == (5, 2.0)
    spans = cached.example(1).media
    numbers = [s.reference.number for s in spans if isinstance(s.reference, FrameGroup)]
    assert numbers == [0, 1, 2, 0, 1, 2]
    slots = [span.slot for span in spans]
    assert np.array_equal(slots, items.slot[items.example == 1])
    # Text times put the time of each group between the groups; positions leave no gap.
    gaps = np.diff(slots)[1:3]
    assert (gaps == 6).all() if times == "positions" else (gaps > 6).all()


def test_without_videos_their_records_are_refused(source):
    index = Corpus.open(
        [source], ByteTokenizer(), {"vision": Images(4, 2, 64, 640)}, progress=False
    ).indexes[0]
    assert len(index) == 1
    assert {refusal.reason for refusal in index.rejected} == {"no_encoder"}
    assert "set model.vision.videos, and see data.videos" in index.rejected[0].message


def filled(
    source: SourceConfig, modality: ImagesAndVideos | None = None
) -> tuple[dict[str, np.ndarray], list[str], list[int]]:
    """The first example's video in one row, with its items in another order than in the example.

    Returns the row, the messages about failed items, and the offset of each group."""
    modality = modality or reader()
    corpus = Corpus.open([source], ByteTokenizer(), {"vision": modality})
    examples = np.array([0])
    items = corpus.gather(examples)
    batch = Batch(
        examples, items, corpus.example, corpus.source_of, corpus.modalities, lambda: False
    )
    capacity = np.array([96])
    zeros = np.zeros(3, np.int32)
    plan = PhasePlan(
        capacity=capacity,
        span=np.array([1]),
        pool=np.array([0]),
        pool_offset=np.array([0]),
        microbatch=zeros,
        rank=zeros,
        offset=np.array([48, 0, 24], np.int32),
        segment=np.array([3, 1, 2], np.int32),
    )
    local = LocalRows("vision", plan, (0,))

    def make(count: int, slots: int) -> dict[str, np.ndarray]:
        return {
            "features": np.zeros((count, slots, modality.format.features), np.uint8),
            "segments": np.zeros((count, slots), np.int32),
            "positions": np.zeros((count, slots, 2), np.int32),
            "valid": np.zeros((count, slots // 4), np.bool_),
            "failed": np.zeros(count, np.int32),
        }

    rows = empty_rows(local, make)
    filling = _Filling(modality, items.phases["vision"], local, rows)
    return rows[0], filling.load_all(batch, 2), [*plan.offset]


def test_groups_lie_where_the_plan_has_them(source):
    row, failures, offsets = filled(source)
    images = Images(4, 2, 64, 640)
    frames = [images.patches(colors, (1, 4, 6)) for colors in COLORS]
    # Three groups of five frames: the last group repeats the last frame.
    for offset, (frame, next_frame) in zip(offsets, ((0, 1), (2, 3), (4, 4)), strict=True):
        features = row["features"][0, offset : offset + 24]
        np.testing.assert_array_equal(features, np.hstack([frames[frame], frames[next_frame]]))
    assert not failures and row["valid"][0, :18].all() and not row["valid"][0, 18:].any()


def test_a_video_that_does_not_decode_is_masked_and_counted(source):
    """The group before the damage stays valid; the groups from the damage on are masked."""
    path = Path(source.path).parent / "v.png"
    Corpus.open([source], ByteTokenizer(), {"vision": reader()})
    content = bytearray(path.read_bytes())
    # The second fdAT chunk of an animated PNG belongs to the third frame; the damage lies inside
    # its body.
    damage_start = [i for i in range(len(content)) if content[i : i + 4] == b"fdAT"][1] + 30
    content[damage_start : damage_start + 30] = bytes(30)
    path.write_bytes(content)
    row, failures, offsets = filled(source)
    assert row["failed"].tolist() == [2] and len(failures) == 2
    assert all("does not decode" in message for message in failures)
    valid = [bool(row["valid"][0, offset // 4]) for offset in offsets]
    assert valid == [True, False, False]
    assert (row["segments"][0, :72] > 0).all()


def test_files_of_a_folder_are_failed_one_by_one(source):
    """Hosts begin at different groups, so a sound file must be read whatever came before it."""
    folder = Path(source.path).parent / "v.png"
    folder.unlink()
    folder.mkdir()
    for index, colors in enumerate(COLORS):
        Image.fromarray(colors).save(folder / f"{index}.png")
    damaged = folder / "2.png"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:60] + bytes(20) + content[80:])
    row, failures, offsets = filled(source, reader(folder_fps=2.0))
    (message,) = failures
    assert row["failed"].tolist() == [1] and "2.png does not decode" in message
    assert [bool(row["valid"][0, offset // 4]) for offset in offsets] == [True, False, True]
