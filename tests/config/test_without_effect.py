"""Keys that have no effect because of another key's value."""

import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.without_effect import keys_without_effect
from tests.support import tiny_config
from tests.training.drawing import drawing_config

LAYOUT = {"batch": ["data", "fsdp", "tensor"], "heads": [], "mlp": []}


def keys(tmp_path, **changes):
    return keys_without_effect(parse_config(tiny_config(tmp_path, **changes)))


def test_none_of_a_plain_config(tmp_path):
    assert keys(tmp_path) == {}


@pytest.mark.parametrize(
    ("changes", "reason", "names"),
    [
        (
            {"model__audio": None, "components__audio__layout": LAYOUT},
            "there is no model.audio",
            [
                "components.audio.layout",
                "phases.audio.spans",
                "phases.audio.row_classes",
                "phases.audio.block",
                "phases.audio.kept_residuals",
                "data.audio.max_seconds",
            ],
        ),
        (
            {"components__projector__language__freeze": True, "data__generated__max_pixels": 4096},
            "there is no model.diffusion",
            ["components.projector.language.freeze", "data.generated.max_pixels"],
        ),
        (
            {"phases__vision__capacities": [2048], "phases__vision__max_capacity": 4096},
            "phases.vision.capacities says which rows there are",
            ["phases.vision.row_classes", "phases.vision.max_capacity"],
        ),
        (
            {"balance__mode": "none", "balance__spans_cross_nodes": True},
            "balance.mode (none) leaves every row to one rank",
            ["balance.spans_cross_nodes"],
        ),
        (
            {"balance__exchange": "ragged", "balance__pair_slots": 64},
            "balance.exchange (ragged) sends what is there",
            ["balance.pair_slots"],
        ),
        (
            {"pipeline__stages": 2, "pipeline__rollouts": 8},
            "pipeline.schedule (greedy) searches nothing",
            ["pipeline.rollouts"],
        ),
        (
            {
                "pipeline__stages": 2,
                "pipeline__microbatches": 6,
                "phases__language__row_classes": 5,
                "phases__vision__capacities": [2048],
                "phases__vision__row_classes": "auto",
                "phases__audio__row_classes": "auto",
            },
            "pipeline.microbatches (6) makes all rows of one class",
            ["phases.language.row_classes"],
        ),
        ({"pipeline__split_backward": True}, "pipeline.stages is 1", ["pipeline.split_backward"]),
        (
            {"data__evaluation": [], "evaluation__every": 2},
            "data.evaluation is empty",
            ["evaluation.every"],
        ),
        (
            {"optimizer__final_scale": 0.5},
            "optimizer.schedule is constant",
            ["optimizer.final_scale"],
        ),
        (
            {"data__evaluation": [{"name": "sample", "path": "test.jsonl", "weight": 2.0}]},
            "evaluation reads every example once",
            ["data.evaluation.0.weight"],
        ),
        (
            {
                "components__audio": {"freeze": True, "learning_rate_scale": 0.5, "reduce": "step"},
                "phases__audio__kept_residuals": "auto",
            },
            "components.audio is frozen",
            ["components.audio.learning_rate_scale", "components.audio.reduce"],
        ),
        (
            {"components__audio__freeze": True, "phases__audio__kept_residuals": 2},
            "components.audio is frozen",
            ["phases.audio.kept_residuals"],
        ),
        (
            {"model__vision__window": 4, "phases__vision__block": 256},
            "with model.vision.window, blocks have 64 tokens",
            ["phases.vision.block"],
        ),
        ({"profile__start": 3}, "profile.steps is 0", ["profile.start"]),
        (
            {"run": {"directory": "runs/x", "steps": 3}, "profile__steps": 2},
            "profile.start (10) is past the last step of 3",
            ["profile.steps"],
        ),
    ],
)
def test_each_reason(tmp_path, changes, reason, names):
    assert keys(tmp_path, **changes) == {reason: names}


def test_text_alone_exchanges_nothing(tmp_path):
    by_reason = keys(tmp_path, model__audio=None, model__vision=None, balance__pool_slots=512)
    assert by_reason["a model of text alone exchanges no tokens"] == ["balance.pool_slots"]


def test_stages_of_text_alone_defer_nothing_and_read_no_encoder_rows(tmp_path):
    changes = {"pipeline__deferral": False, "pipeline__encoder_rows_per_microbatch": 3}
    text_alone = {"model__audio": None, "model__vision": None}
    by_reason = keys(tmp_path, pipeline__stages=2, **text_alone, **changes)
    assert by_reason["there is no encoder"] == [
        "pipeline.deferral",
        "pipeline.encoder_rows_per_microbatch",
    ]
    assert not keys(tmp_path, pipeline__stages=2, **changes)


def test_none_where_the_other_key_asks_for_them(tmp_path):
    assert not keys(tmp_path, optimizer__schedule="cosine", optimizer__final_scale=0.5)
    assert not keys(tmp_path, profile__start=3, profile__steps=1)
    assert not keys(tmp_path, evaluation__every=2)
    assert not keys(tmp_path, balance__pair_slots=64)
    assert not keys(tmp_path, model__vision__window=4, phases__vision__block=32)
    adapted = {"model__adapters": {"audio": {"rank": 2, "alpha": 2.0}}}
    frozen_with_step = {"components__audio__freeze": True, "components__audio__reduce": "step"}
    assert not keys(tmp_path, **adapted, **frozen_with_step, phases__audio__kept_residuals=2)
    assert not keys(tmp_path, pipeline__stages=2, pipeline__schedule="search", pipeline__rollouts=8)


def test_a_decoder_that_nothing_trains_through_keeps_no_residuals(tmp_path):
    frozen = {f"components__{name}__freeze": True for name in ("language", "vision")}
    frozen |= {"components__projector__vision__freeze": True, "objective__language__weight": 0.0}

    def of_generator(residuals, **changes):
        keeps = {"phases__language__kept_residuals": residuals}
        return keys_without_effect(parse_config(drawing_config(tmp_path, **keeps, **changes)))

    reason = "the decoder and all that it reads are frozen"
    assert of_generator(2, **frozen)[reason] == ["phases.language.kept_residuals"]
    assert reason not in of_generator(0, **frozen)
    trained_projector = frozen | {"components__projector__vision__freeze": False}
    assert reason not in of_generator(2, **trained_projector)


def test_text_without_a_loss_has_no_logits(tmp_path):
    def by_reason(weight):
        changes = {"objective__language__weight": weight, "model__language__loss_chunk": 16}
        return keys_without_effect(parse_config(drawing_config(tmp_path, **changes)))

    reason = "objective.language.weight is 0, so that text has no logits"
    assert by_reason(0.0)[reason] == ["model.language.loss_chunk"]
    assert reason not in by_reason(0.5)
