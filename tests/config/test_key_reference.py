"""docs/config.md against the reference of keys that is generated from the schema."""

from pathlib import Path

import pytest

from jaxmllm.config.key_reference import reference

PATH = Path(__file__).parents[2] / "docs/config.md"


def test_the_reference_is_current():
    assert PATH.read_text(encoding="utf-8") == reference(), (
        "a key, default or comment changed: python -m jaxmllm.config.key_reference > docs/config.md"
    )


@pytest.mark.parametrize(
    ("section", "row"),
    [
        ("checkpoint", "| `every` | integer > 0 or `null` | `null` | steps; none: only at the end and on SIGTERM |"),
        ("data", "| `batch_size` | integer > 0 and <= 1048576 | *required* | examples per step,"),
        ("model.vision", "| `from` | text or `null` | `null` | *above* |"),
        ("model.vision", "| `window` | integer >= 1 and <= 2^30 or `null` | `null` | Tokens, or patches of a side;"),
        (
            "components.projector.vision",
            "| `remat` | `none`, `dots`, `full` or list of `attention`, `projections` or `mlp` | `none` |",
        ),
        ("pipeline", "| `split_backward` | `true`, `false` or `auto` | `false` | Input and weight gradients"),
        ("data.sources[]", "| `weight` | number > 0 | `1.0` | Of examples;"),
    ],
)  # fmt: skip
def test_a_row_says_type_default_and_comment(section, row):
    (text,) = [
        text for text in reference().split("\n## ")[1:] if f"`{section}`" in text.split("\n")[0]
    ]
    assert f"\n{row}" in text
