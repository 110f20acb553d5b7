"""Programs of a step, phase by phase: one compiled set serves every composition of a batch, every
subset of encoders and every choice of trained components.

The reference for gradients is the same step on one device (the fixture `alone`).
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmllm.balance.records import RowClass
from jaxmllm.runtime.compilations import CompilationCounter
from jaxmllm.training.programs.base import ProgramName
from jaxmllm.training.programs.phased import PhaseBuffers
from jaxmllm.training.step_functions import KeptResiduals
from tests.cluster.programs import tiny
from tests.support import EXHAUSTIVE, assemble, assert_close, tiny_config

KINDS = [(), ("vision",), ("audio",), ("vision", "audio")]
# The programs of a step in the order in which each reads what the one before it wrote
PHASED = [
    "encode",
    "deliver",
    "language_loss_and_grad",
    "deliver_back",
    "encode_grad",
    "add_replicas",
    "update",
]


@pytest.fixture(scope="module")
def mixed(setups, by_example):
    return setups(by_example(mesh={"data": 2, "fsdp": 2, "tensor": 2}), 8)


# ---------------------------------------------------------------------------- compositions


def test_batches_of_every_composition_use_the_same_programs(mixed):
    """Fifty steps: each kind by itself, each pair of kinds, then random batches of random size."""
    pools = {kind: mixed.of_kind(kind) for kind in KINDS}
    rng = np.random.default_rng(1)
    batches = [pool[:12] for pool in pools.values()]
    batches += [pools[a][:6] + pools[b][:6] for a, b in itertools.combinations(KINDS, 2)]
    while len(batches) < 50:
        drawn_kinds = rng.permutation(len(KINDS))[: rng.integers(1, 5)]
        members = [i for kind in drawn_kinds for i in pools[KINDS[kind]]]
        batches.append(rng.permutation(members)[: rng.integers(1, 33)].tolist())
    state = mixed.programs.init(0)
    # The first step also compiles transfers, which the counter below would report
    state, _ = mixed.programs.train(state, mixed.put(mixed.step([0, 1])))
    counter = CompilationCounter()
    shapes = set()
    for batch in batches:
        step = mixed.step(batch)
        shapes.add(tuple(len(rows) for rows in step.rows.values()))
        state, metrics = mixed.programs.train(state, mixed.put(step))
        metrics = jax.device_get(metrics)
        assert np.isfinite(metrics["loss"]) and metrics["skipped"] == 0
        assert metrics["targets_by_source"].sum() == step.targets
    assert len(shapes) >= 8  # many different numbers of microbatches ...
    assert counter.names == []  # ... and no further program
    counter.close()
    assert state.step == 51


def test_bytes_of_keys_and_values_that_shared_rows_gather(mixed):
    """A gathered slot carries keys and values (2 arrays) of 4-byte numbers per layer, KV head and
    head dimension.

    Audio slots are frames, four of which make one token of the tower, hence the division by 4.
    """
    slots = {f"{phase}/gathered_slots": 1000 for phase in mixed.spec.phases}
    assert mixed.programs.route_metrics(slots) == {
        "vision/gathered_bytes": 1000 * 2 * 4 * 1 * 2 * 8,
        "audio/gathered_bytes": 1000 / 4 * 2 * 4 * 1 * 2 * 8,
        "language/gathered_bytes": 1000 * 2 * 4 * 2 * 2 * 8,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_one_kind_trains_what_it_uses(mixed, kind):
    step = mixed.step(mixed.of_kind(kind)[:12])
    assert {phase for phase, rows in step.rows.items() if rows} == {"language", *kind}
    result = mixed.gradients(step)
    moving = {
        name for name, g in result.grads.items() if any(np.any(leaf) for leaf in jax.tree.leaves(g))
    }
    assert moving == {"language", *kind, *(f"projector.{phase}" for phase in kind)}


# ---------------------------------------------------------------------------- subsets of encoders


@pytest.mark.slow
@pytest.mark.parametrize(
    "encoders",
    [
        (),
        pytest.param(("vision",), marks=EXHAUSTIVE),
        pytest.param(("audio",), marks=EXHAUSTIVE),
    ],
)
def test_models_with_fewer_encoders_learn(data, tmp_path, encoders):
    """Models without one or both encoders compile, and their loss falls on a batch they repeat."""
    kinds = {
        "text",
        *({"picture"} if "vision" in encoders else ()),
        *({"sound"} if "audio" in encoders else ()),
    }
    lines = (data / "train.jsonl").read_text().splitlines(keepends=True)
    source = tmp_path / "train.jsonl"
    source.write_text(
        "".join(line for line in lines if any(f'"source": "{kind}"' in line for kind in kinds))
    )
    tree = tiny_config(data, mesh={"data": 2})
    tree["data"]["sources"] = [{"name": "part", "path": str(source), "root": str(data)}]
    tree["data"]["evaluation"] = tree["data"]["sources"]
    tree["model"] = {name: tree["model"][name] for name in (*encoders, "language")}
    setup = assemble(tree, 2)
    assert set(setup.params) == {
        "language",
        *encoders,
        *(f"projector.{phase}" for phase in encoders),
    }
    assert set(setup.corpus.sources) == kinds
    batch = setup.put(setup.step(range(len(setup.corpus))[:16]))
    state = setup.programs.init(0)
    losses = []
    for _ in range(8):
        state, metrics = setup.programs.train(state, batch)
        losses.append(float(metrics["loss"]))
    # The batch repeats, so that right gradients lower its loss
    assert losses[-1] < losses[0] - 0.5, losses


# ---------------------------------------------------------------------------- freezing

FROZEN = {"freeze": True}
FREEZES = {
    "encoders": {"vision": FROZEN, "audio": FROZEN},
    "language": {"language": FROZEN},
    "all-but-projectors": {"vision": FROZEN, "audio": FROZEN, "language": FROZEN},
    "one-modality": {"audio": FROZEN, "projector": {"audio": FROZEN}},
}
EXAMPLES = range(16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "freeze",
    [
        "language",
        pytest.param("all-but-projectors", marks=EXHAUSTIVE),
        *(pytest.param(name, marks=EXHAUSTIVE) for name in ("encoders", "one-modality")),
    ],
)
def test_frozen_components_stay_and_the_others_do_not_notice(setups, by_example, alone, freeze):
    """Frozen components stay bit for bit; gradients of the others are those with nothing frozen."""
    settings = FREEZES[freeze]
    frozen = {name for name in settings if name != "projector"}
    frozen |= {f"projector.{name}" for name in settings.get("projector", ())}
    setup = setups(by_example(components=settings), 1)
    programs = setup.programs
    step = setup.step(EXAMPLES)

    all_grads = alone.gradients(alone.step(EXAMPLES)).grads
    grads = setup.gradients(step).grads
    assert grads.keys() == all_grads.keys() - frozen
    assert_close(grads, {name: all_grads[name] for name in grads}, 1e-5)

    state = programs.init(0)
    before = jax.device_get(state.params)
    for _ in range(2):
        state, _ = programs.train(state, programs.put(step))
    after = jax.device_get(state.params)
    for name in before:
        unchanged = [
            np.array_equal(a, b)
            for a, b in zip(*map(jax.tree.leaves, (before[name], after[name])), strict=True)
        ]
        assert all(unchanged) if name in frozen else not any(unchanged), name

    # Backward programs exist only where the tower or the projector of a phase is trained
    backward = {name.subject for name in programs.compiled if name.function == "encode_grad"}
    assert backward == {
        phase for phase in ("vision", "audio") if {phase, f"projector.{phase}"} - frozen
    }
    returning = {name.subject for name in programs.compiled if name.function == "deliver_back"}
    assert returning == {programs.exchange_owner[phase] for phase in backward}
    for phase in ("vision", "audio"):
        assert programs.functions.keeps_features(phase) == (
            phase in frozen and f"projector.{phase}" not in frozen
        )


def test_a_frozen_towers_backward_starts_from_its_features(setups, by_example):
    """The projector's backward program takes the kept features in place of pixels."""
    programs = setups(by_example(components=FREEZES["encoders"]), 1).programs
    capacity = programs.spec.phases["vision"].capacities[0]
    width = programs.functions.model.config.vision.width
    kept_input = programs.compiled[ProgramName("encode_grad", "vision", capacity)].in_avals[0][1]
    assert kept_input.features.shape == (1, capacity, width)


def test_features_lie_in_memory_from_one_pass_to_the_other(setups, by_example, monkeypatch):
    """A frozen tower keeps features per microbatch; the backward pass frees them one by one, and
    evaluation keeps none.
    """
    setup = setups(by_example(components=FREEZES["encoders"]), 1)
    programs = setup.programs
    step = setup.step(range(96))
    # Live arrays are told apart by shape: no other array of a step has this one
    shape = (
        1,
        programs.spec.phases["vision"].capacities[0],
        programs.functions.model.config.vision.width,
    )
    microbatches = len(step.rows["vision"])
    assert microbatches > 1
    counts = []
    call = programs._call

    def counted(function, subject="", *names):
        if function in ("language_loss_and_grad", "evaluate", "update") or (
            (function, subject) == ("encode_grad", "vision")
        ):
            count = sum(array.shape == shape for array in jax.live_arrays())
            counts.append((function, count))
        return call(function, subject, *names)

    monkeypatch.setattr(programs, "_call", counted)
    programs.train(programs.init(0), setup.put(step))
    forward = [("language_loss_and_grad", microbatches)] * len(step.rows["language"])
    backward = [("encode_grad", microbatches - m) for m in range(microbatches)]
    assert counts == [*forward, *backward, ("update", 0)]
    counts.clear()
    programs.evaluate(setup.params, setup.put(step))
    assert counts == [("evaluate", 0)] * len(step.rows["language"])


# ---------------------------------------------------------------------------- pools


def test_a_step_holds_two_kinds_of_pools_at_a_time(alone, monkeypatch):
    """Live pools are counted by their shape whenever a program is about to run."""
    programs = alone.programs
    assert set(programs.exchange_owner.values()) == {"vision"}  # audio shares its pools
    shapes = {owner: programs.pools[owner].tokens.shape for owner in ("vision", "language")}
    assert len(set(shapes.values())) == 2, "one kind is told from the other"
    held_by_function: dict[str, set[str]] = {}
    call = programs._call

    def counted(function, *names):
        live_shapes = [array.shape for array in jax.live_arrays()]
        live_pools = [
            phase
            for phase, shape in shapes.items()
            for live_shape in live_shapes
            if live_shape == shape
        ]
        # A round's buffer may have the shape of a pool
        if function not in ("zero", "hop", "deliver", "hop_back", "deliver_back"):
            assert sorted(set(live_pools)) == sorted(live_pools), (
                "one of each kind, whatever it holds"
            )
        held_by_function.setdefault(function, set()).update(live_pools)
        return call(function, *names)

    step = alone.step(EXAMPLES)
    assert max(step.pools["language"]) == 0 and all(step.rows.values())
    batch = alone.put(step)
    state = programs.init(0)
    jax.block_until_ready(state)
    monkeypatch.setattr(programs, "_call", counted)
    state, _ = programs.train(state, batch)
    both_pools = {"vision", "language"}
    assert held_by_function["encode"] == {"vision"}
    # One rank alone has no hops
    assert held_by_function["deliver"] == held_by_function["deliver_back"] == both_pools
    assert held_by_function["language_loss_and_grad"] == {"language"}
    assert held_by_function["encode_grad"] == {"vision"}
    assert held_by_function["update"] == set()


# ---------------------------------------------------------------------------- dispatch


class WaitedError(Exception):
    """The host asked for what a device computes."""


def test_a_step_is_dispatched_whole_and_waits_for_nothing(alone, monkeypatch):
    """No program's output is read on the host during a step.

    The runtime may then start a program as soon as its inputs are there, and the host is free to
    plan the next batch.
    """
    programs = alone.programs
    batch = alone.put(alone.step(EXAMPLES))
    state = programs.init(0)
    jax.block_until_ready((state, batch.rows))
    array_type = type(jnp.zeros(1))
    called = []
    call = programs._call

    def refuse(*_):
        raise WaitedError

    def noted(function, *names):
        called.append(function)
        return call(function, *names)

    with monkeypatch.context() as patch:
        patch.setattr(array_type, "_value", property(refuse))
        patch.setattr(array_type, "block_until_ready", refuse)
        # The patch refuses each way to wait for an array; without it nothing would be proved
        for wait in (jax.block_until_ready, jax.device_get, float):
            with pytest.raises(WaitedError):
                wait(jnp.ones(()))
        patch.setattr(programs, "_call", noted)
        state, metrics = programs.train(state, batch)
    order = [name for name, _ in itertools.groupby(called) if name != "zero"]
    assert order == sorted(order, key=PHASED.index) and {"encode", "deliver", "encode_grad"} <= {
        *order
    }
    assert np.isfinite(jax.device_get(metrics)["loss"])


# ---------------------------------------------------------------------------- kept residuals

MESHES = [{"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2}]


def keeping(remat: str, vision: int, audio: int, **phases):
    """Changes of a config whose encoders keep residuals."""
    return {
        "components": {phase: {"remat": remat} for phase in ("vision", "audio")},
        "phases__vision__kept_residuals": vision,
        "phases__audio__kept_residuals": audio,
        "phases__vision__capacities": [192],
    } | {f"phases__{key}": value for key, value in phases.items()}


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        pytest.param(MESHES[0], keeping("full", 1, 9), marks=EXHAUSTIVE),
        pytest.param(MESHES[1], keeping("none", 1, 1), marks=EXHAUSTIVE),
        pytest.param(MESHES[0], keeping("dots", 1, 0), marks=pytest.mark.slow),
        pytest.param(MESHES[1], keeping("full", 1, 2), marks=EXHAUSTIVE),
        pytest.param(MESHES[2], keeping("none", 1, 1), marks=EXHAUSTIVE),
        pytest.param(
            {"data": 4},
            keeping("none", 1, 2, vision__spans=[1, 4], audio__spans=[2]),
            marks=EXHAUSTIVE,
        ),
    ],
)
def test_kept_residuals_change_no_gradient(setups, by_example, alone, mesh, changes):
    """Some microbatches of a step keep their residuals, the others run forward again."""
    expected = alone.gradients(alone.step(range(48)))
    setup = setups(by_example(mesh=mesh, **changes), int(np.prod(list(mesh.values()))))
    step = setup.step(range(48))
    assert len(step.rows["vision"]) > setup.programs.kept_residuals["vision"]
    assert_close(setup.gradients(step).grads, expected.grads, 1e-5)


@pytest.mark.slow
def test_what_is_kept_is_not_computed_again(setups, by_example):
    """With all residuals kept, the backward pass has two matrix products per forward product."""
    programs = setups(by_example(mesh={"data": 1}, **keeping("none", 1, 9)), 1).programs

    def products(function: str) -> int:
        """Count the matrix products in the compiled text, as XLA's CPU backend writes them."""
        (name,) = (n for n in programs.jobs if n[:2] == (function, "vision"))
        text = programs.compiled[name].as_text()
        return len(re.findall(r" dot\(|__onednn\$matmul|custom-call.*matmul", text))

    forward = products("encode")
    assert forward > 4
    # Recomputing has the forward products as well; one product may remain for other reasons
    assert products("encode_grad_kept") <= products("encode_grad") - forward + 1


def test_timed_microbatches_keep_what_those_of_a_step_keep(monkeypatch):
    """Programs are not compiled here: a forward pass leaves a name in place of residuals."""
    kept = {"vision": {"kept_residuals": 1}, "audio": {"kept_residuals": 0}}
    _, programs = tiny(mesh={"data": 1}, devices=1, kept=kept)
    encode = lambda params, rows, pool, slot, failed: (pool, "residuals", failed)  # noqa: E731
    monkeypatch.setattr(programs, "_call", lambda *name: encode)
    failed = dict.fromkeys(programs.encoders)
    buffers = PhaseBuffers(pool=None, d_pool=None, gradients=None, sums=None, failed=failed)
    for phase, microbatches in (("vision", 1), ("audio", 0)):
        for microbatch in range(2):
            arguments = phase, programs.params, "rows", RowClass(16384, 1), buffers, microbatch
            saved = programs.forward(*arguments).saved
            assert isinstance(saved, KeptResiduals) == (microbatch < microbatches)


def test_phases_without_a_trained_tower_keep_nothing(setups, by_example):
    """`kept_residuals` has no effect on a frozen tower, whose features are kept anyway."""
    changes = {"components": FREEZES["encoders"], "phases__vision__kept_residuals": 3}
    programs = setups(by_example(**changes), 1).programs
    assert programs.kept_residuals == {}
    assert not any("kep" in name.function for name in programs.compiled)
