"""Calibration: its fit to known coefficients, checks of its file, and its effect on a run."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import jax
import numpy as np
import pytest
import yaml

from jaxmllm.balance.costs.calibration import Coefficients, Fill, load_calibration
from jaxmllm.balance.costs.flops import ItemCost, PhaseTime
from jaxmllm.balance.records import RowClass
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.config.read import load_config, parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.setup.prepare import prepare
from jaxmllm.setup.sizing import plan_spec
from jaxmllm.setup.spans import mesh_spans
from jaxmllm.tools import calibrate
from jaxmllm.tools.calibrate import fills, fit
from jaxmllm.tools.sample_data import make_sample
from sharding.mesh import abstract_mesh, make_mesh
from tests.support import assemble, assert_same, tiny_config
from tests.training.drawing import drawing_config, make_pictures

KNOWN = Coefficients(row=2e-3, slot=3e-6, linear=5e-7, quadratic=2e-9, residual=0)
FLOPS = ItemCost(1000, 3)
# Rows of two capacities, which are needed to tell the cost per row from the cost per slot
ROWS = [fill for capacity in (4096, 512) for fill in fills(RowClass(capacity), 8, 64)]


def close(found: Coefficients, tolerance: float) -> bool:
    """Whether all coefficients are those of `KNOWN`, up to a relative tolerance."""
    names = ("row", "slot", "linear", "quadratic")
    return all(
        getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=tolerance) for name in names
    )


# ---------------------------------------------------------------------------- the fit


def test_rows_are_filled_in_every_way():
    assert len(set(ROWS)) == len(ROWS)
    for fill in ROWS:
        assert (
            fill.length % 8 == 0
            and 0 < fill.items * fill.length <= fill.capacity
            and fill.items <= 64
        )
    assert {fill.items for fill in ROWS} == {1, 2, 4, 8, 16, 32, 64}
    assert {fill.items * fill.length for fill in ROWS if fill.items == 1} == {
        4096,
        2048,
        1024,
        512,
        256,
        128,
    }
    assert max(fill.items for fill in fills(RowClass(4096), 8, 5)) == 4


def test_rows_of_several_ranks_are_filled_as_wholes():
    single = fills(RowClass(4096), 8, 64)
    shared = fills(RowClass(1024, 4), 8, 64)
    assert [fill.length for fill in shared] == [fill.length for fill in single]
    for single_fill, shared_fill in zip(single, shared, strict=True):
        assert (shared_fill.capacity, shared_fill.span) == (1024, 4)
        assert shared_fill.used(FLOPS) == tuple(flops / 4 for flops in single_fill.used(FLOPS))


def test_the_fit_recovers_known_coefficients():
    coefficients = fit({fill: KNOWN.seconds(fill, FLOPS) for fill in ROWS}, FLOPS)
    assert close(coefficients, 1e-4) and coefficients.residual < 1e-5


def test_the_fit_bears_noise():
    noise = np.random.default_rng(0).normal(1, 0.02, len(ROWS))
    coefficients = fit(
        {
            fill: KNOWN.seconds(fill, FLOPS) * factor
            for fill, factor in zip(ROWS, noise, strict=True)
        },
        FLOPS,
    )
    assert close(coefficients, 0.15) and 0.01 < coefficients.residual < 0.03


def test_with_one_capacity_the_row_is_told_by_its_slots():
    coefficients = fit(
        {fill: KNOWN.seconds(fill, FLOPS) for fill in ROWS if fill.capacity == 512}, FLOPS
    )
    # Rows of one size cannot separate the cost per row from the cost per slot: the slots take both
    assert coefficients.row == 0 and coefficients.slot * 512 == pytest.approx(
        KNOWN.row + KNOWN.slot * 512, rel=1e-4
    )
    assert coefficients.linear == pytest.approx(KNOWN.linear, rel=1e-4)


def test_no_coefficient_is_negative():
    """Rows that get faster the more they hold are noise, and must not make items a gain."""
    coefficients = fit(
        {fill: 1e-3 * (2 - fill.items * fill.length / fill.capacity) for fill in ROWS}, FLOPS
    )
    assert (
        coefficients.linear == coefficients.quadratic == 0
        and coefficients.row > 0
        and coefficients.residual > 0.1
    )


def test_the_planner_gets_whole_femtoseconds():
    coefficients = Coefficients(
        row=1.5e-3, slot=2.5e-9, linear=1.1e-9, quadratic=1.7e-14, residual=0
    )
    assert coefficients.time(FLOPS) == PhaseTime(ItemCost(3_600_000, 17), row=1_500_000_000_000)


# ---------------------------------------------------------------------------- the file


def content(**changes) -> dict:
    """A calibration of the tiny model, with changes by key.

    Levels of a key are separated by "__", and None removes the key.
    """
    coefficients = {"row": 1e-3, "slot": 1e-9, "linear": 1e-9, "quadratic": 1e-9, "residual": 0.01}
    phase = {
        "dtype": "float32",
        "capacities": [512],
        "flops": {"linear": 1, "quadratic": 1},
        "forward": coefficients,
        "training": coefficients,
    }
    calibration = {
        **dict.fromkeys(("package", "jax", "jaxlib", "platform", "device", "date"), "some"),
        "mesh": {"data": 2},
        "phases": {name: json.loads(json.dumps(phase)) for name in ("vision", "audio", "language")},
    }
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        section = calibration
        for name in parents:
            section = section[name]
        if value is None:
            del section[leaf]
        else:
            section[leaf] = value
    return calibration


def written(path, **changes):
    path.write_text(json.dumps(content(**changes)))
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"phases__audio": None}, "lacks phases.audio (it has: vision, language)"),
        ({"phases__vision__training__quadratic": -1e-9}, "phases.vision.training.quadratic: "),
        ({"phases__vision__training__quadratic": "fast"}, "phases.vision.training.quadratic: "),
        ({"phases__vision__training__linear": None}, "phases.vision.training.linear: "),
        ({"phases__vision__speed": 1}, "phases.vision.speed: "),
        (
            {"phases__audio__training": dict.fromkeys(Coefficients.model_fields, 0.0)},
            "phases.audio.training: ",
        ),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path, changes, said):
    path = written(tmp_path / "bad.json", **changes)
    with pytest.raises(ConfigError) as error:
        load_calibration(path, ("vision", "audio", "language"))
    text = str(error.value)
    assert said in text and "\n" not in text
    assert f"balance.calibration: {path}" in text and "jaxmllm calibrate" in text


@pytest.mark.parametrize("text", [None, "{", "[]", b"\xff\xfe"])
def test_what_is_no_calibration_at_all_is_refused(tmp_path, text):
    path = tmp_path / "absent.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"absent\.json.*jaxmllm calibrate"):
        load_calibration(path, ("language",))


def test_the_file_must_know_only_the_phases_of_the_model(tmp_path):
    path = written(tmp_path / "file.json", phases__audio=None)
    assert load_calibration(path, ("vision", "language")).phases["vision"].time.row == 10**12


def test_another_device_or_model_is_said(tmp_path):
    measured = load_calibration(written(tmp_path / "file.json"), ("language",))
    same_flops = {"language": ItemCost(1, 1)}
    other_flops = {"language": ItemCost(1, 2)}
    assert measured.differences("some", same_flops) == measured.differences(None, same_flops) == []
    assert (
        "'some'" in measured.differences("TPU", same_flops)[0]
        and "'TPU'" in measured.differences("TPU", same_flops)[0]
    )
    assert "language" in measured.differences("some", other_flops)[0]
    (dtype,) = measured.differences("some", same_flops, {"language": "bfloat16"})
    assert dtype == "was measured in float32, but phase language computes in bfloat16"
    (mesh,) = measured.differences("some", same_flops, mesh=measured.mesh | {"tensor": 4})
    assert mesh == "was measured with rows split by nothing, but this run's are by {'tensor': 4}"
    more_rows = measured.mesh | {"data": 64, "stage": 2}
    assert not measured.differences("some", same_flops, {"language": "float32"}, more_rows)


# ---------------------------------------------------------------------------- in a run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    make_sample(folder, train=48, test=4)
    return folder


def silent(data, **changes) -> dict:
    """`tiny_config` without audio, which compiles sooner."""
    tree = tiny_config(data, data__max_rejected=1.0, **changes)
    del tree["model"]["audio"], tree["phases"]["audio"]
    return tree


@pytest.fixture(scope="module")
def command(data, tmp_path_factory):
    """A config file, and the calibration that `jaxmllm calibrate` made from it."""
    folder = tmp_path_factory.mktemp("calibration")
    tree = silent(
        data,
        mesh={"data": 4, "fsdp": 2},
        components={"vision": {"freeze": True}},
        phases__language__spans=[2],
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    out = folder / "made" / "calibration.json"
    arguments = ["--config", str(folder / "config.yaml"), "--out", str(out), "--repeats", "1"]
    # A calibration that the command replaces is not read, so it may be absent
    assert calibrate.main([*arguments, "balance.calibration=absent.json"]) == 0
    return folder / "config.yaml", out


@pytest.mark.slow
def test_the_command_measures_every_phase(command):
    measured = load_calibration(command[1], ("vision", "language"))
    assert (measured.platform, measured.device) == ("cpu", jax.devices()[0].device_kind)
    assert measured.mesh["data"] == 4 and measured.jax == jax.__version__
    for phase in measured.phases.values():
        full_row = Fill(phase.capacities[0], 1, phase.capacities[0])
        assert (
            phase.forward.seconds(full_row, phase.flops) > 0
            and 0 < phase.training.seconds(full_row, phase.flops) < 10
        )
    lines = calibrate.table(measured)
    assert [line[:2] for line in lines] == [
        [p, n] for p in measured.phases for n in ("forward", "training")
    ]


@pytest.mark.slow
def test_a_calibration_changes_costs_and_leaves_flops_alone(command, caplog):
    """FLOPs remain what MFU counts, whatever the planner balances by."""
    path, calibration = command
    inputs = None
    specs = []
    for overrides in ([], [f"balance.calibration={calibration}"]):
        config = load_config(path, overrides)
        inputs = prepare(config, make_mesh(config.mesh.model_dump(), spans=mesh_spans(config)))
        with caplog.at_level(logging.WARNING):
            specs.append(plan_spec(config, inputs))
    assert not caplog.records  # the device and the model are those of the calibration
    uncalibrated, calibrated = specs
    items = inputs.corpus.gather(np.arange(16))
    statistics = [plan_step(items, spec).statistics for spec in specs]
    for name, measured in load_calibration(calibration, uncalibrated.phases).phases.items():
        cost = measured.time
        phase = calibrated.phases[name]
        assert phase.cost == cost.item
        assert phase.cost != uncalibrated.phases[name].cost
        assert (
            phase.flops == uncalibrated.phases[name].flops
            and uncalibrated.phases[name].model_flops is None
        )
        assert statistics[0][f"{name}/flops"] == statistics[1][f"{name}/flops"] > 0


@pytest.mark.slow
def test_models_that_draw_are_measured_and_balanced_by_it(tmp_path):
    make_pictures(tmp_path)
    tree = drawing_config(tmp_path, mesh={"data": 4, "fsdp": 2})
    config = tmp_path / "config.yaml"
    out = tmp_path / "calibration.json"
    config.write_text(yaml.safe_dump(tree))
    assert calibrate.main(["--config", str(config), "--out", str(out), "--repeats", "1"]) == 0
    measured = load_calibration(out, ("vision", "language", "diffusion")).phases
    for phase in measured.values():
        half_row = Fill(phase.capacities[0], 1, phase.capacities[0] // 2)
        forward, training = (
            coefficients.seconds(half_row, phase.flops)
            for coefficients in (phase.forward, phase.training)
        )
        assert 0 < forward < training < 10
    calibrated = parse_config(tree | {"balance": {"calibration": str(out)}})
    inputs = prepare(calibrated, make_mesh(calibrated.mesh.model_dump()))
    specs = plan_spec(calibrated, inputs).phases
    assert {name: phase.cost for name, phase in specs.items()} == {
        name: phase.time.item for name, phase in measured.items()
    }


@pytest.mark.slow
def test_a_poor_fit_is_said(command, capsys):
    measured = load_calibration(command[1], ("vision", "language"))
    for residual, warned in ((0.01, False), (0.5, True)):
        phase = measured.phases["vision"]
        phase = phase.model_copy(
            update={"training": phase.training.model_copy(update={"residual": residual})}
        )
        calibrate.show(measured.model_copy(update={"phases": {"vision": phase}}), "title")
        assert ("fit of vision is poor" in capsys.readouterr().out) == warned


@pytest.mark.slow
def test_another_device_warns_where_there_is_one(command, tmp_path, caplog):
    calibration = json.loads(command[1].read_text())
    foreign = tmp_path / "other.json"
    foreign.write_text(json.dumps(calibration | {"device": "TPU v9"}))
    config = load_config(command[0], [f"balance.calibration={foreign}"])
    for mesh, warnings in (
        (make_mesh({"data": 8, "fsdp": 1, "tensor": 1}, spans=(2,)), 1),
        (abstract_mesh({"data": 8}, 8, spans=(2,)), 0),
    ):
        inputs = prepare(config, mesh)
        caplog.clear()
        plan_spec(config, inputs)
        assert [("TPU v9" in record.message) for record in caplog.records] == [True] * warnings


@pytest.mark.slow
def test_user_errors_are_told_in_one_line(command, capsys):
    assert calibrate.main(["--config", str(command[0]), "data.batchsize=3"]) == 2
    assert calibrate.main(["--config", str(command[0]), "mesh.data=3"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "data.batch_size" in errors[0] and "mesh" in errors[1]
    with pytest.raises(SystemExit):
        calibrate.main(["--config", str(command[0]), "--repeats", "0"])


@pytest.mark.slow
def test_loss_and_gradients_do_not_notice(data, tmp_path):
    """Run the same programs on plans by FLOPs and by a calibration that counts attention alone."""
    setup = assemble(silent(data, mesh={"data": 2}), 2)
    quadratic_alone = dict.fromkeys(Coefficients.model_fields, 0.0) | {"quadratic": 1e-9}
    path = written(
        tmp_path / "file.json",
        **{f"phases__{name}__training": quadratic_alone for name in setup.spec.phases},
    )
    config = parse_config(silent(data, mesh={"data": 2}, balance={"calibration": str(path)}))
    inputs = prepare(config, make_mesh(config.mesh.model_dump(), jax.devices()[:2]))
    calibrated_phases = plan_spec(config, inputs).phases
    compiled_sizes = {
        name: (phase.classes, phase.max_segments) for name, phase in setup.spec.phases.items()
    }
    # Keep the compiled sizes, so that both plans run on the same programs
    phases = {
        name: replace(phase, classes=compiled_sizes[name][0], max_segments=compiled_sizes[name][1])
        for name, phase in calibrated_phases.items()
    }
    by_flops = setup.step(range(16))
    by_time = setup.step(range(16), phases=phases)
    assert by_flops.digest != by_time.digest
    assert_same(setup.gradients(by_time), setup.gradients(by_flops), 1e-5)
