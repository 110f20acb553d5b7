"""The phases of a model, and planning and sizing of phases that no model has yet."""

from typing import get_args

import numpy as np
import pytest

from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import BatchItems, ExchangeGrid, Mode, PhaseItems
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.sizes.inputs import Alignment, SizingInputs
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.balance.validate_plan import validate
from jaxmllm.config.schema import (
    AudioConfig,
    BalanceConfig,
    DiffusionConfig,
    LanguageConfig,
    ModelConfig,
    PhaseConfig,
    VisionConfig,
)
from jaxmllm.phases import (
    LANGUAGE,
    Phase,
    component_names,
    decoder_phase,
    encoder_phase,
    make_phases,
)

TOWER = {"width": 16, "layers": 1, "heads": 2, "mlp_width": 16}
DECODER = LanguageConfig(width=16, layers=1, heads=2, kv_heads=2, head_size=8, mlp_width=16)

RANKS = 4
PER_TOKEN = {"vision": 4, "audio": 8, "video": 16}  # slots of one language token
ENCODERS = tuple(PER_TOKEN)
GENERATOR = Phase("generator", components=("generator",), reads=(LANGUAGE,), has_loss=True)
PHASES = {
    phase.name: phase
    for phase in (*map(encoder_phase, ENCODERS), decoder_phase(ENCODERS), GENERATOR)
}

NODES = dict.fromkeys(PHASES, np.arange(RANKS, dtype=np.int32) // 2)


def test_a_model_has_its_encoders_and_then_the_decoder_that_reads_them():
    model = ModelConfig(vision=VisionConfig(**TOWER), audio=AudioConfig(**TOWER), language=DECODER)
    phases = make_phases(model)
    assert tuple(phases) == (*model.encoders, LANGUAGE)
    assert all(name == phase.name == phase.components[0] for name, phase in phases.items())
    for encoder in model.encoders:
        assert not phases[encoder].has_loss and phases[encoder].reads == ()
    assert phases[LANGUAGE].has_loss and phases[LANGUAGE].reads == model.encoders
    assert component_names(phases) == (
        "vision",
        "projector.vision",
        "audio",
        "projector.audio",
        "language",
    )
    text_alone = ModelConfig(language=DECODER)
    assert make_phases(text_alone) == {
        LANGUAGE: Phase(LANGUAGE, (LANGUAGE,), reads=(), has_loss=True)
    }


def test_a_generator_comes_last_and_reads_the_decoder():
    diffusion = DiffusionConfig(width=16, layers=1, heads=2, mlp_width=16)
    model = ModelConfig(vision=VisionConfig(**TOWER), language=DECODER, diffusion=diffusion)
    phases = make_phases(model)
    assert tuple(phases) == model.phases == ("vision", LANGUAGE, "diffusion")
    assert [phase.generates for phase in phases.values()] == [False, False, True]
    assert phases["diffusion"].has_loss and phases["diffusion"].reads == (LANGUAGE,)
    assert component_names(phases)[-2:] == ("projector.language", "diffusion")


def made_up_batch(seed: int, examples: int = 32) -> BatchItems:
    """Media of three kinds, a sequence per example that holds them, and pictures for some."""
    random = np.random.default_rng(seed)
    text = random.integers(1, 40, examples)
    phases = {}
    for name, per_token in PER_TOKEN.items():
        # At most one item of a kind per example
        example = np.flatnonzero(random.random(examples) < 0.5)
        tokens = random.integers(1, 20, len(example))
        phases[name] = items_of(tokens * per_token, example, tokens, text[example])
        text[example] += tokens
    phases[LANGUAGE] = items_of(text, np.arange(examples))
    generated = np.flatnonzero(random.random(examples) < 0.7)
    phases["generator"] = items_of(random.integers(8, 64, len(generated)), generated)
    return BatchItems(np.arange(examples), 1, phases)


def items_of(length, example, tokens=0, slot=0) -> PhaseItems:
    """Items of one phase without padding."""
    zero = np.zeros_like(example)
    return PhaseItems(
        length, length, *((zero + column).astype(np.int32) for column in (example, tokens, slot))
    )


@pytest.mark.parametrize(
    ("mode", "nodes"),
    [
        *(
            pytest.param(mode, None, marks=() if mode == "phases" else pytest.mark.slow)
            for mode in get_args(Mode)
        ),
        pytest.param("phases", NODES, marks=pytest.mark.slow),
    ],
)
def test_a_third_encoder_and_a_phase_with_a_loss_of_its_own_are_sized_placed_and_balanced(
    mode, nodes
):
    """Tokens of the third encoder have a route like the others; the generator has none yet."""
    samples = [made_up_batch(seed) for seed in range(4)]
    inputs = [
        SizingInputs(
            phase,
            RANKS,
            Alignment(16),
            PER_TOKEN.get(name, 1),
            320,
            ItemCost(1000, 3),
            PhaseConfig(),
        )
        for name, phase in PHASES.items()
    ]
    ranks = np.arange(RANKS, dtype=np.int32)[:, None]
    grids = dict.fromkeys(PHASES[LANGUAGE].reads, ExchangeGrid(ranks, ranks))
    spec = choose_sizes(samples, inputs, grids, BalanceConfig(mode=mode), nodes)
    assert tuple(spec.phases) == tuple(PHASES) and tuple(spec.routes) == ENCODERS
    assert [rows.phase for rows in spec.phases.values()] == list(PHASES.values())

    batch = made_up_batch(9)
    plan = plan_step(batch, spec)
    validate(plan, batch, spec)
    for name in PHASES:
        assert plan.statistics[f"{name}/tokens"] == batch.phases[name].real.sum()
    sequences = batch.phases[LANGUAGE]
    generated = batch.phases["generator"]
    if mode == "phases":
        assert plan.statistics["generator/gap_to_floor"] < 1.25, "balanced on its own"
    else:
        rank_of_example = np.empty(len(batch.examples), np.int32)
        rank_of_example[sequences.example] = plan.phases[LANGUAGE].rank
        np.testing.assert_array_equal(
            plan.phases["generator"].rank, rank_of_example[generated.example]
        )
