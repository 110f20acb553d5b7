"""Plans of pipelined steps of models that draw: every state of the language model arrives where the
generator's condition looks for it."""

import dataclasses

import numpy as np
import pytest

from jaxmllm.balance.costs.flops import phase_flops
from jaxmllm.balance.records import BatchItems, PhaseItems
from jaxmllm.balance.sizes.inputs import Alignment, SizingInputs
from jaxmllm.balance.stages.plan import plan_pipeline, plan_runs
from jaxmllm.balance.stages.sizes import choose_pipeline
from jaxmllm.config.schema import DiffusionConfig, PhaseConfig, PipelineConfig
from jaxmllm.phases import LANGUAGE, make_phases
from tests.balance.stages.test_plan import MODEL, PER_TOKEN

DRAWS = MODEL.model_copy(
    update={"diffusion": DiffusionConfig(width=16, layers=4, heads=2, mlp_width=32)}
)
BLIND = DRAWS.model_copy(update={"vision": None})
LONGEST = {"vision": 64, LANGUAGE: 96, "diffusion": 128}


def drawn_batch(seed: int, count: int = 24, drawn: int = 3, sees: bool = True) -> BatchItems:
    """Examples with up to two shown pictures, unless `sees` is false, and fewer than `drawn` drawn
    ones, each from the text before it."""
    random = np.random.default_rng(seed)
    # Items as (example, tokens, slot in the sequence, slots in their own phase).
    shown_images = []
    drawn_images = []
    texts = []
    for example in range(count):
        length = 0
        for slots in PER_TOKEN * random.integers(1, 8, random.integers(0, 3) if sees else 0):
            shown_images.append((example, slots // PER_TOKEN, length, slots))
            length += int(slots) // PER_TOKEN
        for _ in range(random.integers(0, drawn)):
            condition = int(random.integers(1, 20))
            drawn_images.append(
                (example, condition, length, condition + int(random.integers(1, 60)))
            )
            length += condition + 2
        texts.append((example, 0, 0, length + int(random.integers(1, 10))))

    def items(found: list[tuple[int, int, int, int]]) -> PhaseItems:
        example, tokens, slot, slots = np.array(found, np.int64).reshape(-1, 4).T
        int32_columns = (column.astype(np.int32) for column in (example, tokens, slot))
        return PhaseItems(slots, slots, *int32_columns)

    phases = {"vision": items(shown_images)} if sees else {}
    phases |= {LANGUAGE: items(texts), "diffusion": items(drawn_images)}
    return BatchItems(np.arange(count), 1, phases)


def sizes(
    model=DRAWS, replicas: int = 2, learns_text: bool = True, spans=None, capacities=None, **config
):
    """Sizes of a pipeline of a model that draws, chosen from four random batches."""
    trained = dict.fromkeys((LANGUAGE, "projector.language", "diffusion"), 1)
    inputs = [
        SizingInputs(
            phase,
            replicas,
            alignment=Alignment(16),
            slots_per_token=PER_TOKEN if name == "vision" else 1,
            longest=LONGEST[name],
            flops=phase_flops(model, name, trained),
            config=PhaseConfig(row_classes=1, capacities=(capacities or {}).get(name, "auto")),
            spans=(spans or {}).get(name, (1,)),
        )
        for name, phase in make_phases(model).items()
    ]
    sees = model.vision is not None
    samples = [drawn_batch(seed, sees=sees) for seed in range(4)]
    settings = PipelineConfig(**{"stages": 2} | config)
    return choose_pipeline(samples, inputs, settings, model, trained, 24, learns_text=learns_text)


SHARED = {
    "capacities": {"vision": (48,), LANGUAGE: (64, 48), "diffusion": (64,)},
    "spans": {"vision": (1, 2), LANGUAGE: (1, 2, 4), "diffusion": (1, 2)},
}
CASES = {
    "two levels": dict(model=BLIND, learns_text=False, layout="chain"),
    "three levels": dict(layout="segments", split_backward=True),
    "parallel": dict(stages=4, layout="parallel", schedule="1f1b", learns_text=False),
    "shared rows": dict(replicas=4, layout="chain", **SHARED),
}


@pytest.fixture(scope="module", params=sorted(CASES))
def made(request):
    return sizes(**CASES[request.param])


@pytest.mark.parametrize("drawn", [1, 3])
def test_states_lie_where_conditions_look_for_them(made, drawn):
    """Whatever is drawn, or nothing: the language rows that a row of the generator reads, slot by
    slot, against what its route says. Every slot is labelled by (example, token)."""
    sees = "vision" in made.spec.phases
    items = drawn_batch(1, drawn=drawn, sees=sees)
    plan = plan_pipeline(items, made.spec, made.training)
    (run,) = plan_runs(items, made.spec, made.training)
    diffusion_plan = plan.phases["diffusion"]
    language = plan.phases[LANGUAGE]
    texts = items.phases[LANGUAGE]
    pictures = items.phases["diffusion"]
    per_row = made.spec.phases[LANGUAGE].row_tokens
    ranks = made.spec.phases[LANGUAGE].ranks
    held_tokens = np.full((language.microbatches, ranks, per_row, 2), -1)
    for example, length in enumerate(texts.length.tolist()):
        capacity = int(language.capacity[language.microbatch[example]])
        for token in range(length):
            member, slot = divmod(int(language.offset[example]) + token, capacity)
            held_tokens[language.microbatch[example], language.rank[example] + member, slot] = (
                example,
                token,
            )
    pool_slots = made.training.rows_read[LANGUAGE] * per_row
    widest = max(phase.widest for phase in made.spec.phases.values())
    route = plan.routes["diffusion"]
    for n, tokens in enumerate(pictures.tokens.tolist()):
        first_rank = diffusion_plan.rank[n] // widest * widest
        pools = np.full((widest, pool_slots, 2), -1)
        rows_read = run.rows.inputs["diffusion"][diffusion_plan.microbatch[n]]
        for position, (_, row) in enumerate(rows_read):
            pools[:, position * per_row : (position + 1) * per_row] = held_tokens[
                row, first_rank : first_rank + widest
            ]
        tokens_read = pools.reshape(-1, 2)[route.arrivals(n)].tolist()
        slot = int(pictures.slot[n])
        assert tokens_read == [[pictures.example[n], slot + token] for token in range(tokens)]


def test_rows_hold_no_more_items_than_segments(made):
    """Rows of the generator are limited to two items, and there are rows enough for all."""
    sees = "vision" in made.spec.phases
    items = drawn_batch(3, sees=sees)
    max_segments = 2
    limited_phase = dataclasses.replace(made.spec.phases["diffusion"], max_segments=max_segments)
    spec = dataclasses.replace(made.spec, phases=made.spec.phases | {"diffusion": limited_phase})
    more_rows = {name: tuple(4 * n for n in rows) for name, rows in made.training.rows.items()}
    runs = plan_runs(items, spec, dataclasses.replace(made.training, rows=more_rows))
    assert max(int(run.rows.phases["diffusion"].segment.max()) for run in runs) == max_segments


def test_without_a_loss_of_text_the_decoder_has_no_head():
    """The forward cost per slot falls by exactly the product with the vocabulary."""
    with_loss, without_loss = (sizes(BLIND, learns_text=learns) for learns in (True, False))
    head = 2 * DRAWS.language.vocab_size * DRAWS.language.width
    forward = [
        chosen.training.costs[LANGUAGE].linear[0, 0].sum()
        / chosen.spec.phases[LANGUAGE].capacities[0]
        for chosen in (with_loss, without_loss)
    ]
    assert forward[0] - forward[1] == head
    assert not without_loss.training.tables.ring.has_loss(
        0
    ) and with_loss.training.tables.ring.has_loss(0)
