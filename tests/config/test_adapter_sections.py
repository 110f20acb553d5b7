"""Sections of adapters that no model can have are refused by the name of the key."""

import pytest

from tests.config.test_schema import MINIMAL, refusal

ADAPTED = "model.adapters.language={rank: 4, alpha: 8}"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ("model.adapters.language={rank: 4, alpha: 8, parameters: ['*.query', '*.wq']}",),
            "adapters.language.parameters: '*.wq' matches no matrix that can have an adapter; language has "
            "layers.attention.query, layers.attention.key",
        ),
        (
            ("model.adapters.language={rank: 4, alpha: 8, parameters: [embedding]}",),
            "'embedding' matches no matrix that can have an adapter",
        ),
        (
            ("model.adapters.language={rank: 33, alpha: 8, parameters: ['*attention*']}",),
            "adapters.language.rank (33): layers.attention.key is a matrix of 64 x 32, whose rank is at most 32; "
            "lower it, or leave this matrix out of adapters.language.parameters",
        ),
        (
            ("model.adapters.language={rank: 4, alpha: 8, parameters: []}",),
            "model.adapters.language.parameters: is empty",
        ),
        (("model.adapters.language={rank: 0, alpha: 8}",), "model.adapters.language.rank"),
        (("model.adapters.language={rank: 4}",), "model.adapters.language.alpha"),
        (
            ("model.adapters.audio={rank: 4, alpha: 8}",),
            "adapters.audio: there is no model.audio to adapt; leave it out, or add that section",
        ),
        (
            (ADAPTED, "components.adapter.vision.freeze=true"),
            "components.adapter.vision: there is no model.adapters.vision; leave it out, or add that section",
        ),
        (("model.adapters.projector={rank: 4, alpha: 8}",), "model.adapters.projector"),
        ((ADAPTED, "components.adapter.language.remat=dots"), "components.adapter.language.remat"),
    ],
)
def test_adapters_that_cannot_be_are_refused_by_name(tmp_path, overrides, message):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    assert message in " ".join(refusal(path, *overrides).split())
