"""What a run may change when it is resumed, and the lines that report it."""

import json
from collections import Counter
from itertools import chain
from typing import Any

import pytest

from jaxmllm.config.read import dump_config, load_config, parse_config
from jaxmllm.config.schema import Config
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.runtime.resume import begun_config, changes, check_compatible, resumed_config
from jaxmllm.setup.build import build_run
from jaxmllm.training.loop import train
from jaxmllm.training.run_folder import check_folder
from tests.support import tiny_config


def make_config(directory: str = "runs/a", **settings: Any) -> Config:
    """A minimal config without encoders; settings are dotted keys with `__` for the dots."""
    tree: dict[str, Any] = {
        "run": {"directory": directory, "steps": 10},
        "model": {
            "language": dict(width=8, layers=1, heads=2, kv_heads=1, head_size=4, mlp_width=16)
        },
        "data": {"sources": [{"name": "s", "path": "s.jsonl"}], "batch_size": 4},
        "optimizer": {"learning_rate": 1e-3},
    }
    for key, value in settings.items():
        *parents, leaf_key = key.split("__")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf_key] = value
    return parse_config(tree)


@pytest.mark.parametrize(
    "change",
    [
        {"directory": "runs/b"},
        {"run__steps": 99},
        {"mesh__fsdp": 2},
        {"data__workers": 3},
        {"phases__vision__capacities": [256]},
        {"balance__mode": "none"},
        {"components__projector__vision__remat": "none"},
        {"components__language__reduce": "step"},
        {"components__vision__layout": {"batch": ["data"]}},
        {"logging__every": 5},
        {"model__language__loss_chunk": 64},
    ],
)
def test_what_may_change_without_a_word(change: dict[str, Any]) -> None:
    saved = begun_config(make_config())
    current = make_config(**change)
    check_compatible(saved, current)
    messages = changes(saved, resumed_config(saved, current), 7)
    assert messages == [] or "run__steps" in change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"optimizer__learning_rate": 5e-4}, "optimizer.learning_rate 0.001 -> 0.0005"),
        ({"optimizer__schedule": "constant"}, "optimizer.schedule 'cosine' -> 'constant'"),
        ({"optimizer__warmup_steps": 3}, "optimizer.warmup_steps 0 -> 3"),
        ({"optimizer__decay_steps": 30}, "optimizer.decay_steps 10 -> 30"),
        ({"optimizer__weight_decay": 0.1}, "optimizer.weight_decay 0.0 -> 0.1"),
        ({"optimizer__beta2": 0.99}, "optimizer.beta2 0.95 -> 0.99"),
        ({"optimizer__clip_norm": None}, "optimizer.clip_norm 1.0 -> None"),
        ({"components__language__ema": 0.99}, "components.language.ema None -> 0.99"),
        ({"components__audio__freeze": True}, "components.audio.freeze False -> True"),
        (
            {"components__projector__vision__freeze": True},
            "components.projector.vision.freeze False -> True",
        ),
        (
            {"components__language__learning_rate_scale": 0.1},
            "components.language.learning_rate_scale 1.0 -> 0.1",
        ),
    ],
)
def test_what_may_change_and_is_told(change: dict[str, Any], line: str) -> None:
    saved = begun_config(make_config())
    current = make_config(**change)
    check_compatible(saved, current)
    assert changes(saved, resumed_config(saved, current), 7) == [f"from step 7: {line}"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"run__seed": 3}, "run.seed: 0 in the run, 3 now"),
        ({"data__tokenizer": "t.json"}, "data.tokenizer: None in the run, 't.json' now"),
        (
            {"data__images__max_pixels": 1000},
            "data.images.max_pixels: 1048576 in the run, 1000 now",
        ),
        (
            {"data__sources": [{"name": "s", "path": "z.jsonl"}]},
            "data.sources.0.path: 's.jsonl' in the run, 'z.jsonl'",
        ),
        ({"model__language__qk_norm": True}, "model.language.qk_norm: False in the run, True now"),
        ({"run__param_dtype": "float64"}, "run.param_dtype: 'float32' in the run, 'float64' now"),
    ],
)
def test_what_may_not_change(change: dict[str, Any], line: str) -> None:
    saved = make_config()
    current = make_config(**change)
    with pytest.raises(CheckpointError) as caught:
        check_compatible(saved, current)
    assert line in str(caught.value)
    assert "set run.directory to a new folder and model.from to runs/a" in str(caught.value)


def test_a_source_more_is_named() -> None:
    sources = [{"name": "s", "path": "s.jsonl"}, {"name": "t", "path": "t.jsonl"}]
    with pytest.raises(
        CheckpointError, match=r"data\.sources\.1\.name: absent in the run, 't' now"
    ):
        check_compatible(make_config(), make_config(data__sources=sources))


def test_the_decay_keeps_its_end_when_the_run_gets_longer(tmp_path) -> None:
    """The end of the decay is fixed when a run begins; only `decay_steps` itself moves it."""
    saved = begun_config(make_config())
    assert saved.optimizer.decay_steps == 10
    (tmp_path / "config.yaml").write_text(dump_config(saved))
    assert load_config(tmp_path / "config.yaml") == saved
    longer = resumed_config(saved, make_config(run__steps=50))
    assert (longer.decay_steps, longer.run.steps) == (10, 50)
    messages = changes(saved, longer, 10)
    assert messages[0] == "from step 10: run.steps 10 -> 50"
    assert (
        "reaches final_scale 0.1 at step 10 and stays there; optimizer.decay_steps" in messages[1]
    )
    shorter = resumed_config(saved, make_config(run__steps=5))
    assert (
        "would reach final_scale 0.1 at step 10, after the run's end"
        in changes(saved, shorter, 2)[1]
    )
    longer_decay = resumed_config(saved, make_config(run__steps=50, optimizer__decay_steps=50))
    assert longer_decay.decay_steps == 50 and len(changes(saved, longer_decay, 10)) == 2
    assert (
        len(
            changes(
                saved,
                resumed_config(saved, make_config(run__steps=9, optimizer__schedule="constant")),
                1,
            )
        )
        == 2
    )


@pytest.mark.slow
def test_a_run_continues_with_other_settings(data, tmp_path, capsys):
    """A run goes on unfrozen, slower, in smaller batches and with other weights of its sources.

    Compared are the reported lines, and which examples were drawn.
    """
    sources = [
        {"name": name, "path": str(data / "train.jsonl"), "weight": 1.0} for name in ("a", "b")
    ]
    tree = tiny_config(data, run={"directory": str(tmp_path), "steps": 3}, data__evaluation=[])
    tree |= {
        "mesh": {"data": 8},
        "components": {"language": {"freeze": True}, "vision": {"freeze": True}},
    }
    tree["data"]["sources"], tree["logging"]["examples"] = sources, True
    train(build_run(check_folder(parse_config(tree), False)))
    tree["run"]["steps"] = 5
    tree["components"] = {"audio": {"freeze": True}}
    tree["optimizer"]["learning_rate"] = 1e-3
    tree["data"]["batch_size"] = 8
    tree["data"]["sources"] = [sources[0] | {"weight": 3.0}, sources[1]]
    capsys.readouterr()
    train(build_run(check_folder(parse_config(tree), True)))
    output = capsys.readouterr().out
    for line in (
        "from step 3: optimizer.learning_rate 0.01 -> 0.001",
        "from step 3: components.language.freeze True -> False",
        "from step 3: data.batch_size 16 -> 8",
        "from step 3: data.sources.0.weight 1.0 -> 3.0",
        "optimizer state of language, vision: begins at zero from step 3",
        "optimizer state of audio: dropped from step 3, the components are frozen",
    ):
        assert line in output
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["learning_rate"] for record in records] == pytest.approx([1e-2] * 3 + [1e-3] * 2)
    ids_by_step = [
        json.loads(line)["ids"] for line in (tmp_path / "examples.jsonl").read_text().splitlines()
    ]
    assert [len(ids) for ids in ids_by_step] == [16, 16, 16, 8, 8]
    assert max(Counter(chain.from_iterable(ids_by_step)).values()) <= 2, (
        "no source has begun its epoch anew: each holds an example once"
    )
    history = json.loads((tmp_path / "history.json").read_text())
    assert history[1] == {"step": 3, "batch_size": 8, "weights": [3.0, 1.0]}
