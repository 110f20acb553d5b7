"""Plans of pipelined steps of models that draw: every state arrives where its condition looks for it."""

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
    """Examples of which some show pictures, and all draw fewer than so many, each from the text before it."""
    random = np.random.default_rng(seed)
    shown, made, text = [], [], []  # (example, tokens, slot, slots)
    for example in range(count):
        length = 0
        for slots in PER_TOKEN * random.integers(1, 8, random.integers(0, 3) if sees else 0):
            shown.append((example, slots // PER_TOKEN, length, slots))
            length += int(slots) // PER_TOKEN
        for _ in range(random.integers(0, drawn)):
            read = int(random.integers(1, 20))
            made.append((example, read, length, read + int(random.integers(1, 60))))
            length += read + 2
        text.append((example, 0, 0, length + int(random.integers(1, 10))))

    def items(found: list[tuple[int, int, int, int]]) -> PhaseItems:
        example, tokens, slot, slots = np.array(found, np.int64).reshape(-1, 4).T
        small = (column.astype(np.int32) for column in (example, tokens, slot))
        return PhaseItems(slots, slots, *small)

    phases = {"vision": items(shown)} if sees else {}
    phases |= {LANGUAGE: items(text), "diffusion": items(made)}
    return BatchItems(np.arange(count), 1, phases)


def sizes(
    model=DRAWS, replicas: int = 2, learns_text: bool = True, spans=None, capacities=None, **config
):
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
    """Whatever is drawn, or nothing: slots of the language rows that a row of the generator reads, end to end."""
    sees = "vision" in made.spec.phases
    items = drawn_batch(1, drawn=drawn, sees=sees)
    plan = plan_pipeline(items, made.spec, made.training)
    (run,) = plan_runs(items, made.spec, made.training)
    where = plan.phases["diffusion"]
    language = plan.phases[LANGUAGE]
    text = items.phases[LANGUAGE]
    pictures = items.phases["diffusion"]
    per_row = made.spec.phases[LANGUAGE].row_tokens
    ranks = made.spec.phases[LANGUAGE].ranks
    held = np.full((language.microbatches, ranks, per_row, 2), -1)
    for example, length in enumerate(text.length.tolist()):
        own = int(language.capacity[language.microbatch[example]])
        for token in range(length):
            member, slot = divmod(int(language.offset[example]) + token, own)
            held[language.microbatch[example], language.rank[example] + member, slot] = (
                example,
                token,
            )
    room = made.training.rows_read[LANGUAGE] * per_row
    widest = max(phase.widest for phase in made.spec.phases.values())
    route = plan.routes["diffusion"]
    for n, tokens in enumerate(pictures.tokens.tolist()):
        first = where.rank[n] // widest * widest
        pools = np.full((widest, room, 2), -1)
        read = run.rows.inputs["diffusion"][where.microbatch[n]]
        for place, (_, row) in enumerate(read):
            pools[:, place * per_row : (place + 1) * per_row] = held[row, first : first + widest]
        found = pools.reshape(-1, 2)[route.arrivals(n)].tolist()
        slot = int(pictures.slot[n])
        assert found == [[pictures.example[n], slot + token] for token in range(tokens)]


def test_rows_hold_no_more_items_than_segments(made):
    sees = "vision" in made.spec.phases
    items = drawn_batch(3, sees=sees)
    most = 2
    tight = dataclasses.replace(made.spec.phases["diffusion"], max_segments=most)
    spec = dataclasses.replace(made.spec, phases=made.spec.phases | {"diffusion": tight})
    roomy = {name: tuple(4 * n for n in rows) for name, rows in made.training.rows.items()}
    runs = plan_runs(items, spec, dataclasses.replace(made.training, rows=roomy))
    assert max(int(run.rows.phases["diffusion"].segment.max()) for run in runs) == most


def test_without_a_loss_of_text_the_decoder_has_no_head():
    with_loss, without = (sizes(BLIND, learns_text=learns) for learns in (True, False))
    head = 2 * DRAWS.language.vocab_size * DRAWS.language.width
    forward = [
        made.training.costs[LANGUAGE].linear[0, 0].sum() / made.spec.phases[LANGUAGE].capacities[0]
        for made in (with_loss, without)
    ]
    assert forward[0] - forward[1] == head
    assert not without.training.tables.ring.has_loss(0) and with_loss.training.tables.ring.has_loss(
        0
    )
