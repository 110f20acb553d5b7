"""An index without some examples equals the index of a file without their records."""

from pathlib import Path

import numpy as np

from tests.data.index.examples import ask, image, index_of, sound, text, write


def test_without(media: Path) -> None:
    records = [
        ask(image("a.png"), id="a"),
        ask(image("b.png"), sound("c.wav"), id="b"),
        ask(text("?"), id="c"),
    ]
    source = write(
        media / "train.jsonl", records[0], "{", *records[1:], ask(sound("c.wav"), id="d")
    )
    index = index_of(source)
    assert index.without([]) is index
    reduced = index.without([(1, "too_big", "b is too big")])
    expected = index_of(
        write(media / "less.jsonl", records[0], records[2], ask(sound("c.wav"), id="d"))
    )
    for name in (
        "id",
        "language_length",
        "targets",
        "item_start",
        "item_phase",
        "item_shape",
        "item_slot",
        "item_length",
        "item_real",
        "item_tokens",
    ):
        np.testing.assert_array_equal(getattr(reduced, name), getattr(expected, name))
    assert [(r.line, r.reason, r.id) for r in reduced.rejected] == [
        (2, "malformed_json", "animals:2"),
        (3, "too_big", "b"),
    ]
