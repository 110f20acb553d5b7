"""What programs of a diffusion generator hold, send and take.

The reference is what XLA reported for the same programs compiled for H100s (jax 0.10.2).
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.omni import MODELS
from jaxmllm.balance.records import PlanSpec, RouteSpec, RowClass
from jaxmllm.balance.sizes.inputs import phase_spec
from jaxmllm.cluster.clusters import CLUSTERS
from jaxmllm.cluster.device_peak import programs_peak
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.cluster.drawing import Drawing
from jaxmllm.cluster.held import device_bytes
from jaxmllm.cluster.phase_seconds import PhaseSeconds
from jaxmllm.cluster.sends import program_sends, ring_bytes
from jaxmllm.cluster.temporaries import job_temporaries, residual_bytes
from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import DiffusionConfig
from jaxmllm.data.media.modalities import modalities, row_formats
from jaxmllm.models.compose import build_model
from jaxmllm.models.streams import SHARES
from jaxmllm.setup.build import phased_programs
from jaxmllm.setup.exchange_layout import exchange_backend, exchange_grids
from jaxmllm.setup.sizing import sizing_inputs
from jaxmllm.setup.spans import spans_of_phases
from jaxmllm.training.programs.base import ProgramName
from sharding.mesh import abstract_mesh

DRAW = "draw_loss_and_grad"
STATES = "language_states"
LOSS = "language_loss_and_grad"
LOSS_KEPT = f"{LOSS}_kept"
POOL = 4096  # slots of a route's pools
CROSS = (("conditioning", "cross"),)
STREAMS = (("streams", 2),)
FSDP = (("data", 1), ("fsdp", 64))
HYBRID = (("data", 8), ("fsdp", 8))
TENSOR = (("data", 1), ("fsdp", 16), ("tensor", 4))
CONTEXT = (("data", 1), ("fsdp", 16), ("context", 4))
SHAPES = {
    "usual": {"width": 3072, "layers": 24, "heads": 24, "mlp_width": 12_288},
    "narrow": {"width": 2048, "layers": 20, "heads": 16, "mlp_width": 8192},
    "wide": {"width": 4096, "layers": 36, "heads": 32, "mlp_width": 14_336},
    "tiny": {"width": 64, "layers": 2, "heads": 4, "mlp_width": 128},
}


@cache
def drawing(
    mesh, language="2B", shapes="usual", slots=8192, remat="full", frozen=(), choices=(),
    segments=32, keeps=0,
):  # fmt: skip
    """The config and programs of a decoder and a generator, with given row sizes.

    Args:
      keeps: microbatches of the decoder whose residuals stay.
    """
    model = {
        "language": MODELS[language]["language"] | {"rope_sections": None},
        "diffusion": SHAPES[shapes] | {"channels": 16, "patch_size": 2} | dict(choices),
    }
    settings = {"compute_dtype": "bfloat16"}
    components = {phase: settings | {"remat": remat, "freeze": phase in frozen} for phase in model}
    components["projector"] = {"language": settings}
    capacities = {"language": 8192, "diffusion": slots}
    phases = {phase: {"capacities": [n], "spans": [1]} for phase, n in capacities.items()}
    phases["language"]["kept_residuals"] = keeps
    config = parse_config(
        {
            "run": {"directory": "runs/drawing", "steps": 4},
            "model": model,
            "components": components,
            "mesh": dict(mesh),
            "phases": phases,
            "data": {"sources": [{"name": "none", "path": "none.jsonl"}], "batch_size": 128},
            "optimizer": {"learning_rate": 1e-4},
        }
    )
    sizes = config.mesh_sizes
    devices = abstract_mesh(sizes, math.prod(sizes.values()))
    vocab_size = config.model.language.vocab_size
    composed = build_model(config.model, vocab_size, config.components, devices)
    spans = spans_of_phases(config, composed)
    formats = row_formats(modalities(config.model, config.data))
    longest = dict.fromkeys(composed.phases, 512)
    inputs = sizing_inputs(config, composed, formats, longest, spans)
    specs = {
        sizing.name: phase_spec(
            sizing, (RowClass(sizing.config.capacities[0]),), max_segments=segments
        )
        for sizing in inputs
    }
    backend = exchange_backend(config, composed)
    routes = {
        phase: RouteSpec(grid, POOL, POOL, pair_slots=64, backend=backend)
        for phase, grid in exchange_grids(composed).items()
    }
    spec = PlanSpec(specs, routes, config.balance.mode)
    return config, phased_programs(config, composed, formats, spec, 1)


def program_of(programs, function):
    """The program of a function; the generator's where both phases have one of that name."""
    names = [name for name in programs.jobs if name.function == function]
    return next((name for name in names if name.subject == "diffusion"), names[0])


@pytest.mark.parametrize(
    ("function", "mesh", "sections", "compiled_gb"),
    [
        (DRAW, FSDP, {}, 3.565),
        (DRAW, FSDP, {"slots": 16_384}, 6.530),
        (DRAW, FSDP, {"remat": "dots"}, 14.472),
        (DRAW, FSDP, {"remat": ("attention",)}, 4.875),
        (DRAW, FSDP, {"remat": "none", "slots": 4096}, 38.984),
        (DRAW, FSDP, {"choices": CROSS}, 3.971),
        (DRAW, FSDP, {"choices": CROSS, "slots": 16_384}, 7.378),
        (DRAW, FSDP, {"choices": CROSS, "remat": "dots"}, 17.322),
        (DRAW, FSDP, {"choices": CROSS, "remat": "none", "slots": 4096}, 47.065),
        (DRAW, CONTEXT, {"choices": CROSS, "slots": 16_384}, 2.778),
        (DRAW, FSDP, {"choices": STREAMS}, 4.556),
        (DRAW, FSDP, {"choices": STREAMS, "slots": 16_384}, 8.182),
        (DRAW, FSDP, {"choices": STREAMS, "remat": "dots"}, 14.760),
        (DRAW, FSDP, {"choices": STREAMS, "remat": "none", "slots": 4096}, 40.083),
        (DRAW, FSDP, {"choices": STREAMS, "frozen": ("diffusion",)}, 2.792),
        (DRAW, TENSOR, {"choices": STREAMS, "language": "7B"}, 3.780),
        (DRAW, CONTEXT, {"choices": STREAMS, "slots": 16_384}, 3.238),
        (DRAW, FSDP, {"choices": (("modulation", "shared"),)}, 3.620),
        (DRAW, FSDP, {"choices": (("mlp_width", 3072),)}, 3.210),
        (DRAW, FSDP, {"frozen": ("diffusion",)}, 2.581),
        (DRAW, TENSOR, {"language": "7B"}, 2.988),
        (DRAW, TENSOR, {"language": "7B", "choices": CROSS}, 3.261),
        (DRAW, CONTEXT, {"slots": 16_384}, 2.356),
        (DRAW, (("data", 8), ("fsdp", 1)), {}, 3.928),
        ("evaluate", FSDP, {}, 0.571),
        ("evaluate", FSDP, {"choices": CROSS}, 0.744),
        ("evaluate", FSDP, {"choices": STREAMS}, 0.795),
        (STATES, FSDP, {}, 0.498),
        (STATES, CONTEXT, {"slots": 16_384}, 0.181),
        (LOSS_KEPT, (("data", 1), ("fsdp", 16)), {"keeps": 2}, 1.951),
        (LOSS_KEPT, FSDP, {"keeps": 2, "remat": "dots"}, 1.895),
        (LOSS_KEPT, FSDP, {"keeps": 2, "remat": "none"}, 1.895),
        (
            DRAW,
            HYBRID,
            {
                "language": "7B",
                "shapes": "narrow",
                "slots": 12_288,
                "remat": "dots",
                "segments": 64,
            },
            12.351,
        ),
        (
            DRAW,
            (("data", 1), ("fsdp", 128)),
            {"language": "7B", "shapes": "wide", "segments": 64},
            5.563,
        ),
    ],
    ids=str,
)
def test_estimates_are_what_was_compiled(function, mesh, sections, compiled_gb):
    _, programs = drawing(mesh, **sections)
    estimated = job_temporaries(programs, program_of(programs, function))
    assert 0.95 * compiled_gb < estimated.total / 1e9 < 1.1 * compiled_gb


@pytest.mark.parametrize(
    ("function", "mesh", "sections", "compiled_mb"),
    [
        (DRAW, FSDP, {}, {"all-gather fsdp": 21_546.75, "reduce-scatter fsdp": 16_224.51}),
        (
            DRAW,
            FSDP,
            {"remat": "none", "slots": 4096},
            {"all-gather fsdp": 21_546.75, "reduce-scatter fsdp": 16_224.51},
        ),
        (
            DRAW,
            FSDP,
            {"choices": STREAMS, "remat": "dots"},
            {"all-gather fsdp": 92_445.95, "reduce-scatter fsdp": 75_084.23},
        ),
        (
            DRAW,
            FSDP,
            {"choices": STREAMS, "remat": "none", "slots": 4096},
            {"all-gather fsdp": 85_757.35, "reduce-scatter fsdp": 75_084.23},
        ),
        (
            DRAW,
            TENSOR,
            {"language": "7B", "choices": STREAMS},
            {
                "all-gather fsdp": 37_384.52,
                "all-reduce tensor": 32_099.23,
                "reduce-scatter fsdp": 25_610.16,
            },
        ),
        (
            DRAW,
            FSDP,
            {"choices": CROSS, "remat": "none", "slots": 4096},
            {"all-gather fsdp": 32_248.52, "reduce-scatter fsdp": 26_926.28},
        ),
        (
            DRAW,
            FSDP,
            {"choices": (("modulation", "shared"),)},
            {"all-gather fsdp": 11_067.94, "reduce-scatter fsdp": 11_096.58},
        ),
        (
            DRAW,
            FSDP,
            {"frozen": ("diffusion",)},
            {"all-gather fsdp": 21_546.75, "reduce-scatter fsdp": 55.74},
        ),
        (
            DRAW,
            TENSOR,
            {"language": "7B", "choices": CROSS},
            {
                "all-gather fsdp": 16_469.36,
                "all-reduce tensor": 19_981.81,
                "reduce-scatter fsdp": 10_321.92,
            },
        ),
        (
            DRAW,
            CONTEXT,
            {"slots": 16_384},
            {
                "all-gather context": 7247.76,
                "all-gather fsdp": 20_520.71,
                "all-reduce context": 18.87,
                "reduce-scatter context": 3623.88,
                "reduce-scatter fsdp": 15_451.91,
            },
        ),
        (STATES, FSDP, {}, {"all-gather fsdp": 2579.45, "all-to-all fsdp": 24.77}),
        (
            STATES,
            CONTEXT,
            {"slots": 16_384},
            {
                "all-gather context": 176.16,
                "all-gather fsdp": 2456.62,
                "all-reduce context": 18.87,
                "all-to-all fsdp": 5.90,
            },
        ),
        # Layers do not run forward again, so their weights are gathered once
        (
            LOSS_KEPT,
            FSDP,
            {"keeps": 2, "remat": "dots"},
            {
                "all-gather fsdp": 3038.90,
                "all-to-all fsdp": 24.77,
                "reduce-scatter fsdp": 6077.80,
            },
        ),
        (
            LOSS_KEPT,
            FSDP,
            {"keeps": 2, "remat": "none"},
            {
                "all-gather fsdp": 3038.90,
                "all-to-all fsdp": 24.77,
                "reduce-scatter fsdp": 6077.80,
            },
        ),
        (
            LOSS_KEPT,
            CONTEXT,
            {"keeps": 2, "slots": 16_384},
            {
                "all-gather context": 176.16,
                "all-gather fsdp": 2894.19,
                "all-to-all fsdp": 5.90,
                "reduce-scatter context": 176.16,
                "reduce-scatter fsdp": 5788.39,
            },
        ),
        (
            LOSS_KEPT,
            TENSOR,
            {"keeps": 2, "language": "7B"},
            {
                "all-gather fsdp": 3314.20,
                "all-reduce tensor": 7398.75,
                "all-to-all fsdp": 55.05,
                "reduce-scatter fsdp": 6628.39,
            },
        ),
    ],
    ids=str,
)
def test_programs_send_what_was_compiled(function, mesh, sections, compiled_mb):
    """Index arrays and totals below a megabyte are left out.

    The compiled text has a branch for each share of a row that conditions may take, of which a
    device runs one, so predicted sends that depend on the data count once per branch. The head runs
    as often as the data require, and its sends are left out.
    """
    _, programs = drawing(mesh, **sections)
    sends = program_sends(programs, program_of(programs, function))
    branches = len(SHARES) if function == DRAW else 0
    sent = {
        " ".join((operation, *axes)): size / 1e6
        for (operation, axes), size in ring_bytes(
            dataclasses.replace(send, times=send.times * (branches if send.by_data else 1))
            for send in sends
        ).items()
        if size > 1e6
    }
    assert sent == pytest.approx(compiled_mb, rel=0.02)


def test_freezing_takes_and_sends_less():
    trained, frozen = (drawing(FSDP, frozen=components)[1] for components in ((), ("diffusion",)))
    sent = [
        sum(send.ring_bytes for send in program_sends(programs, program_of(programs, DRAW)))
        for programs in (trained, frozen)
    ]
    assert sent[0] > sent[1] > 0
    assert programs_peak(trained).bytes > programs_peak(frozen).bytes


def test_the_largest_program_may_be_the_generator():
    _, programs = drawing(FSDP, remat="dots")
    peak = programs_peak(programs)
    assert peak.program == ProgramName(DRAW, "diffusion", 8192)
    assert {name.function for name in programs.jobs} >= {DRAW, STATES, LOSS}


@pytest.mark.parametrize("keeps", [0, 2])
def test_a_decoder_that_is_read_has_a_program_for_its_states(keeps):
    _, programs = drawing((("data", 2),), shapes="tiny", slots=512, keeps=keeps)
    losses = (LOSS, LOSS_KEPT) if keeps else (LOSS,)
    expected = {"language": (STATES, *losses, "evaluate"), "diffusion": (DRAW, "evaluate")}
    jobs = [name for name in programs.jobs if name.capacity]
    for phase, names in expected.items():
        assert programs.functions_of(phase).names == names
        assert tuple(name.function for name in jobs if name.subject == phase) == names


def test_conditions_take_the_smallest_share_that_holds_them():
    random = np.random.default_rng(0)
    shapes = DiffusionConfig(**SHAPES["tiny"], streams=2)
    for capacity in (64, 128, 512, 4096):
        plan = SimpleNamespace(
            microbatches=3,
            microbatch=random.integers(0, 3, 20),
            rank=random.integers(0, 4, 20),
            capacity=np.full(3, capacity),
            span=np.ones(3, int),
        )
        items = SimpleNamespace(tokens=random.integers(1, 20, 20))
        expected = []
        for microbatch in range(3):
            totals = [
                sum(
                    tokens
                    for tokens, item_microbatch, item_rank in zip(
                        items.tokens, plan.microbatch, plan.rank, strict=True
                    )
                    if (item_microbatch, item_rank) == (microbatch, rank)
                )
                for rank in range(4)
            ]
            # The reference: the smallest share of a row that holds the conditions of the fullest
            # rank
            fitting = [1 / n for n in (1, 2, 4, 8, 16) if capacity / n >= max(totals)]
            expected.append(min(fitting, default=1))
        for weights in (shapes, DiffusionConfig(**SHAPES["tiny"], conditioning="cross")):
            shares = Drawing(weights).shares(plan, SimpleNamespace(ranks=4), items)
            assert shares.tolist() == expected
        joint = dataclasses.replace(Drawing(shapes), shapes=DiffusionConfig(**SHAPES["tiny"]))
        # A joint stream has its conditions in the row, and reserves no share
        assert not joint.shares(plan, SimpleNamespace(ranks=4), items).any()


def test_a_second_stream_more_segments_and_text_take_longer():
    device = Device(CLUSTERS["h100"], 0.5)

    def seconds(programs, beside=0.0):
        phase = PhaseSeconds(programs, "diffusion", device)
        ((function, passes),) = phase._calls(0)
        return phase._call(function, passes, 8192, 1, (0.0, 0.0), beside).seconds

    baseline = seconds(drawing(FSDP)[1])
    assert seconds(drawing(FSDP, segments=256)[1]) > baseline
    crossed = drawing(FSDP, choices=CROSS)[1]
    two_streams = drawing(FSDP, choices=STREAMS)[1]
    for programs in (crossed, two_streams):
        assert seconds(programs, 1.0) > seconds(programs, 0.5) > seconds(programs, 0.125) > baseline
    stream_extra, cross_extra = (
        seconds(programs, 1.0) - seconds(programs) for programs in (two_streams, crossed)
    )
    assert cross_extra < stream_extra / 3, "keys and values are two of twelve matrices"


def test_the_decoder_runs_for_states_and_again_with_its_backward_pass():
    device = Device(CLUSTERS["h100"], 0.5)
    phase = PhaseSeconds(drawing(FSDP)[1], "language", device)
    (states, forward), (loss, forward_backward) = phase._calls(0)
    assert (states, loss) == (STATES, LOSS)
    states_call, loss_call = (
        phase._call(name, passes, 8192, 1, (0.0, 0.0), 0.0)
        for name, passes in ((states, forward), (loss, forward_backward))
    )
    # States run the layers once, without logits. The loss runs them forward, again for remat, and
    # backward, which costs two forward passes.
    assert 0 < states_call.flops < loss_call.flops / 3
    assert states_call.seconds < loss_call.seconds / 3


def test_a_decoder_that_keeps_residuals_runs_forward_once():
    device = Device(CLUSTERS["h100"], 0.5)
    phase = PhaseSeconds(drawing(FSDP, keeps=2)[1], "language", device)
    calls = [phase._calls(microbatch) for microbatch in range(3)]
    assert calls[0] == calls[1]
    flops = [
        [phase._call(*call, 8192, 1, (0.0, 0.0), 0.0).flops for call in passes]
        for passes in calls[1:]
    ]
    (states, kept_loss), (last_states, recomputed_loss) = flops
    assert calls[2][1][0] == LOSS and calls[1][1][0] == LOSS_KEPT
    assert states == last_states
    # Both programs of the loss compute the logits
    assert kept_loss + states == pytest.approx(recomputed_loss)


@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_what_a_decoder_leaves_is_what_its_program_gives(remat):
    """With remat `none`, the program keeps a little less than is counted, hence the 3 %."""
    _, programs = drawing(FSDP, remat=remat, keeps=2)
    name = program_of(programs, STATES)
    job = programs.jobs[name]
    residuals = device_bytes(job.result) - device_bytes([job.arguments[n] for n in job.donated])
    counted = residual_bytes(programs.functions.model, name)
    assert counted == pytest.approx(residuals, rel=0.03)
    parts = programs_peak(programs).parts
    assert parts["kept for backward"] == 2 * counted
