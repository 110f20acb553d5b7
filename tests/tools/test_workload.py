"""Generated lengths: reproducible by seed, in the units of training, correlated as described."""

from __future__ import annotations

import numpy as np
import pytest

from jaxmllm.balance.step_plan import plan_step
from jaxmllm.balance.validate_plan import validate
from jaxmllm.config.schema import DiffusionConfig, ModelConfig
from jaxmllm.tools.workload import (
    DEFAULT_MIX,
    FRAME_TOKENS,
    MODEL,
    TASKS,
    LogNormal,
    LogUniform,
    describe,
    generate,
    longest,
    make_spec,
    mix_for,
)


def alone(task, examples=1500, seed=3):
    """A batch of examples of one task."""
    return generate(seed, examples, {task: 1.0})


def test_one_seed_makes_one_batch():
    batch = generate([5, 1], 200)
    repeated = generate([5, 1], 200)
    other_seed = generate([5, 2], 200)
    for phase in batch.phases:
        for field in ("length", "real", "example", "tokens", "slot"):
            np.testing.assert_array_equal(
                getattr(batch.phases[phase], field), getattr(repeated.phases[phase], field)
            )
    assert not np.array_equal(batch.phases["language"].length, other_seed.phases["language"].length)


def test_clips_whose_silence_is_heard_take_whole_chunks():
    audio = MODEL.audio.model_copy(update={"silence": "heard", "chunk_frames": 3000})
    model = MODEL.model_copy(update={"audio": audio})
    clips, heard = (generate(0, 1000, model=variant).phases["audio"] for variant in (MODEL, model))
    np.testing.assert_array_equal(heard.length, -(-clips.real // 3000) * 3000)
    np.testing.assert_array_equal(heard.real, heard.length)
    np.testing.assert_array_equal(heard.tokens * 8, heard.length)
    assert longest("audio", {"spoken_question": 1.0}, model) == 6000


def test_units_are_those_of_training():
    batch = generate(0, 1000)
    vision, audio, language = (batch.phases[name] for name in ("vision", "audio", "language"))
    assert (vision.length % 4 == 0).all() and (vision.tokens * 4 == vision.length).all()
    assert (vision.real == vision.length).all()
    assert (audio.tokens == np.ceil(audio.real / 8)).all() and (
        audio.length == audio.tokens * 8
    ).all()
    assert (audio.real > 0).all()
    assert language.length.tolist() == language.real.tolist() and len(language.length) == 1000
    assert all(
        items.length.dtype == np.int64 and items.example.dtype == np.int32
        for items in batch.phases.values()
    )


def test_media_stand_inside_their_sequence_one_after_another():
    batch = generate(1, 500)
    end_of_last = {}
    text_tokens = batch.phases["language"].length.copy()
    for phase in ("vision", "audio"):
        items = batch.phases[phase]
        assert (np.diff(items.example) >= 0).all()
        for example, slot, tokens in zip(items.example, items.slot, items.tokens, strict=True):
            assert slot >= end_of_last.get(example, 0) + 1  # a frame token before ...
            end_of_last[example] = slot + tokens + 1  # ... and one behind
            assert end_of_last[example] <= batch.phases["language"].length[example]
            text_tokens[example] -= tokens + 2
    assert (text_tokens > 0).all() and batch.targets == text_tokens.sum()


@pytest.mark.parametrize(
    ("task", "vision", "audio"),
    [
        ("text", 0, 0),
        ("speech_recognition", 0, 1),
        ("spoken_question", 0, 1),
        ("captioning", 1, 0),
        ("visual_question", 1, 0),
    ],
)
def test_every_example_of_a_task_has_its_media(task, vision, audio):
    batch = alone(task, 50)
    assert np.bincount(batch.phases["vision"].example, minlength=50).tolist() == [vision] * 50
    assert np.bincount(batch.phases["audio"].example, minlength=50).tolist() == [audio] * 50


def test_multi_image_examples_have_two_to_eight():
    counts = np.bincount(alone("multi_image").phases["vision"].example)
    assert set(counts.tolist()) == set(range(2, 9))


def test_transcripts_follow_their_clips_and_answers_do_not():
    assert describe(alone("speech_recognition"))["correlation/text|audio"] > 0.9
    assert abs(describe(alone("spoken_question"))["correlation/text|audio"]) < 0.1


def test_distributions_are_what_they_say():
    random = np.random.default_rng(0)
    normal = LogNormal(100, 0.5, 50, 300).draw(random, 20_000)
    assert normal.min() >= 50 and normal.max() <= 300
    # The reference: truncate by rejection
    inside = np.exp(np.random.default_rng(1).normal(np.log(100), 0.5, 100_000))
    inside = inside[(inside >= 50) & (inside <= 300)]
    np.testing.assert_allclose(
        np.quantile(normal, [0.1, 0.5, 0.9]), np.quantile(inside, [0.1, 0.5, 0.9]), rtol=0.02
    )
    uniform = np.log(LogUniform(10, 1000).draw(random, 20_000))
    np.testing.assert_allclose(
        np.quantile(uniform, [0, 0.5, 1]), np.log([10, 100, 1000]), atol=0.05
    )


def test_the_mix_is_drawn_by_weight():
    batch = generate(0, 20_000)
    has_image = len(np.unique(batch.phases["vision"].example)) / 20_000
    assert has_image == pytest.approx(
        sum(DEFAULT_MIX[t] for t in TASKS if "vision" in TASKS[t].phases), abs=0.01
    )


def test_description_is_that_of_plain_sums():
    batch = generate(2, 300)
    description = describe(batch)
    vision = batch.phases["vision"]
    assert description["vision/items"] == len(vision.length)
    assert description["vision/cv"] == pytest.approx(np.std(vision.length) / np.mean(vision.length))
    assert description["vision/max_over_mean"] == pytest.approx(
        np.max(vision.length) / np.mean(vision.length)
    )
    audio = batch.phases["audio"]
    assert description["audio/inner_padding"] == pytest.approx(
        1 - audio.real.sum() / audio.length.sum()
    )
    slots_of_example = [vision.length[vision.example == example].sum() for example in range(300)]
    expected = np.corrcoef(slots_of_example, batch.phases["language"].length)[0, 1]
    assert description["correlation/vision,language"] == pytest.approx(expected)


def test_nothing_is_longer_than_promised():
    batch = generate(0, 20_000)
    for phase, items in batch.phases.items():
        assert 0.5 * longest(phase) < items.length.max() <= longest(phase)


def test_models_get_the_tasks_and_units_that_they_can_take():
    without_audio = MODEL.model_copy(update={"audio": None})
    mix = mix_for(without_audio)
    assert "captioning" in mix and "text" in mix and "spoken_question" not in mix
    assert list(generate(0, 20, mix, without_audio).phases) == ["vision", "language"]
    with pytest.raises(ValueError, match="spoken_question"):
        generate(0, 20, DEFAULT_MIX, without_audio)
    coarse_model = MODEL.model_copy(
        update={"audio": MODEL.audio.model_copy(update={"chunk_frames": 400, "merge": 100})}
    )
    assert (generate(0, 50, DEFAULT_MIX, coarse_model).phases["audio"].length % 400 == 0).all()


DIFFUSION = {"width": 64, "layers": 1, "heads": 2, "mlp_width": 128, "patch_size": 16}


@pytest.mark.parametrize("conditioning", ["joint", "cross"])
@pytest.mark.parametrize("patch_frames", [1, 8])
def test_models_that_draw_get_pictures_and_clips(conditioning, patch_frames):
    """Each drawn item follows its caption, and is conditioned on all of the caption's tokens."""
    generator = {"conditioning": conditioning, "patch_frames": patch_frames}
    drawing = ModelConfig(
        language=MODEL.language,
        vision=MODEL.vision,
        diffusion=DiffusionConfig(**DIFFUSION, **generator),
    )
    mix = mix_for(drawing)
    assert {"text", "captioning", "draw_picture"} <= mix.keys()
    assert ("draw_clip" in mix) == (patch_frames > 1) and "spoken_question" not in mix
    drawn_alone = mix_for(drawing, learns_text=False)
    assert drawn_alone.keys() == mix.keys() - DEFAULT_MIX.keys()
    batch = generate(0, 4000, mix, drawing)
    assert list(batch.phases) == ["vision", "diffusion", "language"]
    items = batch.phases["diffusion"]
    language = batch.phases["language"]
    share = sum(drawn_alone.values()) / sum(mix.values())
    assert len(items.length) / 4000 == pytest.approx(share, abs=0.03)
    assert len(np.unique(items.example)) == len(items.example)
    assert (items.tokens + FRAME_TOKENS == language.length[items.example]).all()
    if conditioning == "cross":
        np.testing.assert_array_equal(items.length, np.maximum(items.real, items.tokens))
        pairs = items.real * (items.real + items.tokens)
        np.testing.assert_array_equal(items.extra[0] + items.length**2, pairs)
    else:
        np.testing.assert_array_equal(items.length, items.real)
        assert (items.length > items.tokens).all() and items.extra_squares is None
    for phase, phase_items in batch.phases.items():
        assert phase_items.length.max() <= longest(phase, mix, drawing)
    assert items.length.max() > longest("diffusion", mix, drawing) / 2
    with pytest.raises(ValueError, match="draw_picture"):
        generate(0, 20, mix, MODEL)


@pytest.mark.parametrize("mix", [{"poetry": 1.0}, {"text": 0.0}, {"text": -1.0, "captioning": 2.0}])
def test_impossible_mixes_are_refused(mix):
    with pytest.raises(ValueError, match=r"mix|poetry"):
        generate(0, 10, mix)


@pytest.mark.parametrize("mode", ["phases", pytest.param("none", marks=pytest.mark.slow)])
def test_generated_batches_can_be_planned(mode):
    spec = make_spec(4, [generate([0, i], 32) for i in range(3)], mode)
    batch = generate([0, 9], 32)
    validate(plan_step(batch, spec), batch, spec)
