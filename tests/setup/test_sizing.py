"""What the planner gets besides lengths: costs, measured times, and the largest examples."""

import json
import logging

import numpy as np
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.models.compose import build_model
from jaxmllm.setup.sizing import (
    LARGEST_EXAMPLES,
    largest_examples,
    measured_times,
    model_flops,
)
from sharding.mesh import abstract_mesh
from tests.balance.stages.test_plan import batch
from tests.support import tiny_config
from tests.tools.test_calibrate import content
from tests.training.drawing import drawing_config


def made(tree):
    """The config and the model of a tree, on 8 devices."""
    config = parse_config(tree)
    mesh = abstract_mesh(config.mesh_sizes, 8)
    return config, build_model(config.model, 320, config.components, mesh)


def test_a_decoder_without_a_loss_has_no_head(tmp_path):
    with_loss, without_loss = (
        model_flops(*made(drawing_config(tmp_path, objective__language={"weight": weight})))
        for weight in (1.0, 0.0)
    )
    width = 32
    assert with_loss["language"].linear - without_loss["language"].linear == 3 * 2 * width * 320
    assert with_loss | {"language": None} == without_loss | {"language": None}


@pytest.mark.parametrize(
    ("changes", "mesh", "said"),
    [
        ({}, {"data": 8}, None),
        ({"components__language__compute_dtype": "bfloat16"}, {"data": 8}, "computes in bfloat16"),
        ({}, {"data": 4, "tensor": 2}, "split by nothing, but this run's are by {'tensor': 2}"),
    ],
)
def test_a_calibration_of_another_mesh_or_type_is_said(tmp_path, caplog, changes, mesh, said):
    path = tmp_path / "calibration.json"
    tree = tiny_config(tmp_path, mesh=mesh, balance={"calibration": str(path)}, **changes)
    config, model = made(tree)
    flops = model_flops(config, model)
    file = content(mesh={"data": 8})
    for phase, cost in flops.items():
        file["phases"][phase]["flops"] = {"linear": cost.linear, "quadratic": cost.quadratic}
    path.write_text(json.dumps(file))
    with caplog.at_level(logging.WARNING):
        measured_times(config, model, flops)
    assert [said in line for line in caplog.messages] == [True] * (said is not None)


class Lengths:
    """A stand-in for a corpus, whose examples are (text tokens, slots of each image)."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def longest(self, phase):
        return int(self.gather(np.arange(len(self))).phases[phase].length.max())

    def gather(self, numbers):
        items = batch([self.examples[index] for index in numbers])
        items.examples[:] = numbers
        return items


def test_the_examples_that_need_most_rows_are_among_the_largest():
    """They have fewer slots than typical examples, but 12 images that fill a
    row each, or 48 of one size."""
    typical = [(5, [32] * 26)] * LARGEST_EXAMPLES
    corpus = Lengths([(5, [128]), (5, [68] * 12), *typical, (5, [16] * 48), (5, [64] * 12)])
    chosen = largest_examples(corpus, "vision").examples.tolist()
    assert {1, LARGEST_EXAMPLES + 2} <= set(chosen) and chosen == sorted(set(chosen))
