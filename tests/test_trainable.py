"""The mask of trained parameters: patterns choose paths, and split trees join again."""

from fractions import Fraction

import numpy as np
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.trainable import EVERYTHING, Trainable, join

PARAMS = {
    "tower": {
        "layers": {"mlp": {"up": np.ones((2, 3)), "up_bias": np.ones(3)}},
        "norm": {"scale": np.ones(1)},
    },
    "projector.tower": {"mlp": {"up": np.ones((3, 2))}},
}


def paths(tree, prefix=""):
    """Dotted paths of the leaves of a tree."""
    for key, value in tree.items():
        yield from paths(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]


@pytest.mark.parametrize(
    ("patterns", "trained", "shares"),
    [
        ({}, set(), {}),
        ({"tower": ()}, set(), {}),
        ({"projector.tower": EVERYTHING}, {"projector.tower.mlp.up"}, {"projector.tower": 1}),
        (
            {"tower": ("*bias", "norm.*")},
            {"tower.layers.mlp.up_bias", "tower.norm.scale"},
            {"tower": Fraction(4, 10)},
        ),
        (dict.fromkeys(PARAMS, EVERYTHING), set(paths(PARAMS)), {"tower": 1, "projector.tower": 1}),
    ],
)
def test_patterns_choose_parameters_by_path(patterns, trained, shares):
    mask = Trainable.of(PARAMS, patterns)
    assert mask.paths == trained and mask.shares == shares and mask.components == shares.keys()
    trained_part, frozen_part = mask.split(PARAMS)
    assert (
        set(paths(trained_part)) == trained
        and set(paths(frozen_part)) == set(paths(PARAMS)) - trained
    )
    assert join(trained_part, frozen_part) == PARAMS
    tower = {"tower": PARAMS["tower"]}
    assert join(*mask.split(tower)) == tower


def test_whole_components_are_not_copied():
    trained_part, frozen_part = Trainable.of(PARAMS, {"tower": EVERYTHING}).split(PARAMS)
    assert trained_part["tower"]["norm"]["scale"] is PARAMS["tower"]["norm"]["scale"]
    assert trained_part.keys() == {"tower"} and frozen_part.keys() == {"projector.tower"}


def test_a_pattern_without_a_parameter_is_refused_by_its_key():
    with pytest.raises(
        ConfigError,
        match=r"components\.tower\.train: 'mlp' matches no parameter .* layers\.mlp\.up,",
    ):
        Trainable.of(PARAMS, {"tower": ("norm.*", "mlp")})


@pytest.mark.parametrize("settings", [{"train": []}, {"train": ["*bias"], "freeze": True}])
def test_nothing_is_trained_by_freezing_alone(settings):
    with pytest.raises(ConfigError, match=r"components\.vision.*train .*freez"):
        parse_config({"components": {"vision": settings}})
