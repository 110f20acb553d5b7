"""Made-up rows for calibration: what attention sees, against the FLOPs counted for their items."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxmllm.balance.costs.calibration import Fill
from jaxmllm.balance.records import PhaseSpec
from jaxmllm.config.read import parse_config
from jaxmllm.data.rows.fill import LocalRanks
from jaxmllm.data.rows.masks import Row
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.prepare import prepare
from jaxmllm.setup.row_shapes import attention_spec
from jaxmllm.setup.sizing import plan_spec
from jaxmllm.tools.made_up_rows import made_up_rows
from jaxmllm.tools.sample_data import make_sample
from sharding.mesh import abstract_mesh
from tests.support import tiny_config
from tests.training.drawing import drawing_config, make_pictures

SQUARES = {"resize": "square", "min_pixels": 84**2, "max_pixels": 84**2}


def made_up(tree: dict[str, Any], phase: str) -> tuple[Row, Fill, PhaseSpec]:
    """A row of two items of one phase on one device."""
    config = parse_config(tree)
    inputs = prepare(config, abstract_mesh(config.mesh_sizes, 1))
    plan = plan_spec(config, inputs)
    attention = attention_spec(config, inputs.model, inputs.corpus.formats, plan)
    one_rank = dict.fromkeys(plan.phases, (0,))
    programs = SimpleNamespace(
        spec=plan, attention=attention, local_share=LocalRanks(one_rank, one_rank)
    )
    run: Any = SimpleNamespace(config=config, programs=programs, corpus=inputs.corpus)
    spec = plan.phases[phase]
    fill = Fill(spec.classes[0].capacity, items=2, length=64)
    (row,) = made_up_rows(run, phase, fill).rows[phase]
    return row, fill, spec


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    make_sample(folder, train=24, test=4)
    return folder


@pytest.mark.parametrize(
    ("phase", "section", "images", "seen"),
    [
        ("vision", {}, {}, "segments"),
        ("vision", {"layers": 2, "window": 4}, {}, "windows"),
        (
            "vision",
            {"positions": "table", "position_grid": 6, "class_token": True},
            SQUARES,
            "segments",
        ),
        # Chunks of 30 frames are padded to 32 slots
        (
            "audio",
            {"attention": "chunk", "stem_channels": 4, "chunk_frames": 30, "merge": 2},
            {},
            "segments",
        ),
    ],
    ids=["plain", "windows", "class token", "chunks"],
)
def test_attention_sees_what_costs_count(
    data: Any, phase: str, section: dict[str, Any], images: dict[str, Any], seen: str
) -> None:
    changes = {f"model__{phase}__{key}": value for key, value in section.items()}
    changes |= {f"data__images__{key}": value for key, value in images.items()}
    tree = tiny_config(data, data__max_rejected=1.0, mesh={"data": 1}, **changes)
    row, fill, spec = made_up(tree, phase)
    _, slots_that_see_one_another = np.unique(row[seen][row["segments"] > 0], return_counts=True)
    full, windowed = spec.flops.squares(fill.length)
    expected_squares = windowed if seen == "windows" or section.get("attention") else full
    # Attention within groups of n slots takes n ** 2 scores each
    assert (slots_that_see_one_another**2).sum() == fill.items * expected_squares


@pytest.mark.parametrize("conditioning", ["joint", "cross"])
def test_generated_items_are_drawn_from_nothing(tmp_path: Any, conditioning: str) -> None:
    make_pictures(tmp_path)
    tree = drawing_config(tmp_path, mesh={"data": 1}, model__diffusion__conditioning=conditioning)
    row, fill, spec = made_up(tree, "diffusion")
    owners, patches = np.unique(row["owners"], return_counts=True)
    assert owners.tolist() == [0, 1, 2] and patches[1:].tolist() == [fill.length] * fill.items
    assert (row["owners"] > 0).tolist() == (row["patches"] >= 0).tolist()
    assert (row["segments"] == row["owners"]).all() and (row["conditions"] == -1).all()
    full, _ = spec.flops.squares(fill.length)
    assert (patches[1:] ** 2).sum() == fill.items * full
    text_row, _, _ = made_up(tree, LANGUAGE)
    assert (text_row["states"] == -1).all()
