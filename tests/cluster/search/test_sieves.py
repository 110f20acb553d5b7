"""The search for layouts: its result against planning every layout, its bytes against those of
planned layouts, and its errors where no layout fits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.omni import omni_config
from jaxmllm.cluster.clusters import CLUSTERS
from jaxmllm.cluster.device_peak import programs_peak
from jaxmllm.cluster.search.chosen_config import chosen_config
from jaxmllm.cluster.search.layouts import EQUAL, SearchResult, program_words, ranked
from jaxmllm.cluster.search.legal_layouts import FEWER_LAYERS, least_capacity
from jaxmllm.cluster.search.mesh_choices import MeshChoice
from jaxmllm.cluster.search.no_layout import why_none
from jaxmllm.cluster.search.step_bytes import StepBytes, parameter_numbers
from jaxmllm.config.read import config_tree, parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.setup.build import phased_programs
from jaxmllm.setup.row_memory import state_bytes
from jaxmllm.tools.plan_inputs import make_planner
from tests.support import EXHAUSTIVE

H100 = CLUSTERS["h100"]


# Given rows need not be sized, which is what takes longest in a search
ROWS = {
    phase: {"capacities": [slots], "spans": [1]}
    for phase, slots in {"vision": 16384, "audio": 16384, "language": 12288}.items()
}


def planner(devices=8, cluster=H100, batch=32, **sections):
    config = omni_config("tiny", data={"batch_size": batch}, phases=ROWS, **sections)
    return make_planner(config, cluster, devices, 0)


@pytest.fixture(scope="module")
def searched():
    searcher = planner(4, mesh={"context": 1})
    return searcher, searcher.search(4)


def test_every_layout_is_accounted_for(searched):
    _, result = searched
    assert result.considered == len(result.estimates) + sum(result.rejected.values())
    # Six splits of four devices over data, fsdp and tensor; the three with tensor may have encoders
    # over it
    assert (result.considered, result.meshes) == (9, 6)
    assert any("kv_heads of language, 2" in reason for reason in result.rejected)


def test_plans_are_of_the_fastest_layouts_and_stay_in_memory(searched):
    searcher, result = searched
    assert result.ranked[0].seconds <= min(layout.seconds for layout in result.ranked) * (1 + EQUAL)
    for layout in result.ranked:
        assert layout.peak.bytes <= searcher.budget
        low, high = layout.ends
        assert low <= layout.seconds * (1 + 1e-9) and layout.seconds <= high * (1 + 1e-9)


def test_the_same_search_finds_the_same(searched):
    _, result = searched
    repeated = planner(4, mesh={"context": 1}).search(4)
    assert [(layout.choice, layout.seconds) for layout in repeated.ranked] == [
        (layout.choice, layout.seconds) for layout in result.ranked
    ]


def test_plans_over_memory_are_struck_out_with_their_program(monkeypatch):
    """Peaks of layouts that use an axis in `oversized` are raised to twice the budget."""
    searcher = planner(2, mesh={"context": 1, "tensor": 1})
    oversized = {"data"}

    def peak(programs, **options):
        estimated = programs_peak(programs, **options)
        axes = {axis for axis, size in programs.mesh.shape.items() if size > 1}
        extra = {"more": 2 * int(searcher.budget)} if axes & oversized else {}
        return replace(estimated, parts={**estimated.parts, **extra})

    monkeypatch.setattr("jaxmllm.cluster.search.whole_plans.programs_peak", peak)
    result = searcher.search(2)
    assert [planned.choice.fsdp for planned in result.ranked] == [2]
    ((layout, why),) = result.struck
    assert layout.choice.data == 2 and why.startswith("over memory by 7")
    assert result.rejected[f"over memory in {program_words(layout.peak.program)}"] == 1
    oversized.add("fsdp")
    with pytest.raises(ConfigError, match=r"nothing fits 2 devices .* over by .* GB in \w+"):
        searcher.search(2)


def test_the_first_bytes_are_those_of_planned_layouts(searched):
    searcher, result = searched
    for layout in result.ranked:
        step_bytes = searcher.legal.step_bytes(layout.config, layout.programs.functions.model)
        sieved = max(
            step_bytes.peak(
                phase, max(spec.capacities), getattr(layout.config.components, phase).remat
            )
            for phase, spec in layout.spec.phases.items()
        )
        # These are known only once rows are sized
        needs_rows = ("pools", "pool_gradients", "kept for backward")
        planned = sum(size for name, size in layout.peak.parts.items() if name not in needs_rows)
        assert sieved - step_bytes.pools == pytest.approx(planned, rel=0.01)


def test_shared_rows_are_priced_by_the_links_of_the_cluster():
    """The plan names the price, so that a run of it, which knows no links, has the same rows."""
    slow_link = H100.in_node.model_copy(update={"bytes_per_second": 20e9})
    gather_costs = {}
    for name, cluster in (("slow", H100.model_copy(update={"in_node": slow_link})), ("h100", H100)):
        searcher = planner(2, cluster, mesh={"data": 2})
        balance = chosen_config(searcher.search(2).ranked[0]).balance
        assert balance.flops_per_gathered_byte == {"h100": 1000.0, "slow": 18000.0}[name]
        gather_costs[name] = {sizing.name: sizing.gather_cost for sizing in searcher.inputs}
    for phase, cost in gather_costs["slow"].items():
        assert cost == pytest.approx(18 * gather_costs["h100"][phase], rel=1e-2)
    unpriced = [
        planner(2, balance={"flops_per_gathered_byte": 4000.0}),
        planner(2, balance={"mode": "none"}),
        planner(2, CLUSTERS["cpu"]),
    ]
    prices = [searcher.config.balance.flops_per_gathered_byte for searcher in unpriced]
    assert prices == [4000.0, "auto", "auto"]


def test_mfu_is_told_by_the_peak_that_the_config_says():
    assert planner(2, logging={"peak_flops": 1e12}).device.logged_peak == 1e12
    assert planner(2).device.logged_peak == H100.peak()


@pytest.mark.parametrize(("kept", "halved"), [("auto", True), (0, False)])
def test_rows_whose_residuals_have_no_room_are_planned_half_as_large(monkeypatch, kept, halved):
    """Kept residuals save running the tower again, unless the config says to keep none."""
    rows = {"spans": [1], "block": 32, "row_classes": 1, "kept_residuals": kept}
    monkeypatch.setitem(ROWS, "vision", rows)
    cluster = H100.model_copy(update={"memory": 6e8, "taken_share": 1.0})
    towers = {"vision": {"remat": "none"}}
    searcher = planner(1, cluster, 16, mesh={"data": 1}, components=towers)
    (estimate,) = searcher.estimates(1).estimates
    largest_rows = searcher.whole._planned(estimate)
    planned = searcher.whole.planned(estimate)
    slots = [max(layout.spec.phases["vision"].capacities) for layout in (largest_rows, planned)]
    residuals = [layout.config.phases.vision.kept_residuals for layout in (largest_rows, planned)]
    assert (slots[1] <= slots[0] / 2) == halved and residuals == [0, int(halved)]
    assert (planned.seconds < 0.9 * largest_rows.seconds) == halved
    assert planned.peak.bytes <= searcher.budget


def test_rows_that_just_fit_are_legal(monkeypatch):
    """Even where rows of the next power of two would not fit."""
    monkeypatch.setitem(ROWS, "language", {"capacities": [24576], "spans": [1]})
    choice = MeshChoice(1, 1, 1, 1)
    layout = planner(1).legal.of(choice, SearchResult())
    step_bytes = planner(1).legal.step_bytes(layout.config, layout.model)
    peaks = {
        sizing.name: step_bytes.peak(sizing.name, least_capacity(sizing), "full")
        for sizing in layout.inputs
    }
    assert max(peaks, key=peaks.get) == "language"
    for memory, fits in ((peaks["language"], True), (peaks["language"] - 1, False)):
        cluster = H100.model_copy(update={"memory": memory, "taken_share": 1.0})
        assert (planner(1, cluster).legal.of(choice, SearchResult()) is not None) == fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "sections"),
    [
        (8, {"pipeline": {"stages": 1}}),
        pytest.param(16, {"pipeline": {"stages": 1}}, marks=EXHAUSTIVE),
        pytest.param(8, {}, marks=EXHAUSTIVE),
    ],
)
def test_the_fastest_plan_is_that_of_all_layouts(devices, sections):
    """Against planning every legal layout, not only the most promising ones."""
    searcher = planner(devices, **sections)
    result = searcher.search(devices)
    plans = [searcher._planned(estimate, result) for estimate in result.estimates]
    best = min(plan.seconds for plan in plans if plan is not None)
    assert min(plan.seconds for plan in result.ranked) <= 1.01 * best


@pytest.mark.slow
@pytest.mark.parametrize("better", ["memory", "memory_bandwidth", "peak_flops", "links"])
def test_better_hardware_never_makes_the_best_plan_slower(searched, better):
    """Within 1 %: the sizes of rows are chosen for the hardware, from a few candidates."""

    def fastest(**changes):
        cluster = H100.model_copy(update=peak_by_number | changes)
        return min(
            plan.seconds for plan in planner(4, cluster, mesh={"context": 1}).search(4).ranked
        )

    peak_by_number = {"device_kind": "", "peak_flops": H100.peak()}
    link = H100.in_node
    rates = {key: 2 * getattr(link, key) for key in ("bytes_per_second", "reduced_per_second")}
    changes = {
        "memory": {"memory": 2 * H100.memory},
        "memory_bandwidth": {"memory_bandwidth": 2 * H100.memory_bandwidth},
        "peak_flops": {"peak_flops": 2 * H100.peak()},
        "links": {"in_node": link.model_copy(update=rates)},
    }
    baseline = min(plan.seconds for plan in searched[1].ranked)
    assert fastest(**changes[better]) <= 1.01 * baseline


def test_stages_are_estimated_with_what_they_wait_for():
    plain = planner(4, mesh={"context": 1}).estimates(4)
    staged = planner(8, mesh={"context": 1}, pipeline={"stages": 2}).estimates(8)
    assert staged.considered == len(staged.estimates) + sum(staged.rejected.values())
    by_choice = {estimate.choice: estimate for estimate in plain.estimates}
    for estimate in staged.estimates:
        parts = estimate.parts
        assert parts["bubble"] > 0 and parts["sends"] > 0 and "exchange" not in parts
        rows = estimate.rows["language"].microbatches
        layers = sum(seconds for name, seconds in parts.items() if "/" in name)
        assert parts["bubble"] == pytest.approx(layers / rows)
        unstaged = by_choice[replace(estimate.choice, stages=1)]
        assert parts["update"] == pytest.approx(unstaged.parts["update"] / 2)


def test_meshes_that_split_rows_and_layers_alike_are_counted():
    """Meshes that split them differently are still planned."""
    config = planner(4).config
    rules = {"layers": ["fsdp"], "embed": ["data"]}
    language = config.components.language.model_copy(update={"layout": rules})
    components = config.components.model_copy(update={"language": language})
    mesh = config.mesh.model_copy(update={"context": 1, "tensor": 1})
    changed = {"components": components, "mesh": mesh}
    result = SearchResult()
    searcher = make_planner(config.model_copy(update=changed), H100, 4, 0)
    legal = [searcher.legal.of(MeshChoice(data, 4 // data, 1, 1), result) for data in (1, 2, 4)]
    assert [layout is not None for layout in legal] == [False, False, True]
    assert any("layout.layers" in reason for reason in result.rejected)


def test_stages_are_open_and_what_refuses_them_is_counted():
    result = planner(4).estimates(4)
    assert result.considered == len(result.estimates) + sum(result.rejected.values())
    assert {estimate.choice.stages for estimate in result.estimates} == {1, 2, 4}
    refused = planner(4, balance={"mode": "none"}).estimates(4)
    assert {estimate.choice.stages for estimate in refused.estimates} == {1}
    # Two devices per stage form four meshes, and one device per stage forms one
    (refused_meshes,) = (count for why, count in refused.rejected.items() if "balance.mode" in why)
    assert refused_meshes == 5
    assert planner(8).legal.of(MeshChoice(1, 1, 1, 1, stages=8), result) is None
    assert result.rejected[FEWER_LAYERS] == 1


def test_beside_others_only_stages_that_may_be_faster_are_planned(monkeypatch):
    """By stand-ins: estimates make two stages look fast and four slow, and planning is recorded."""
    searcher = planner(4)
    planned = []

    def whole(estimate):
        planned.append(estimate.choice.stages)
        seconds = {1: 1.0, 2: 0.7, 4: 0.8}[estimate.choice.stages]
        peak = SimpleNamespace(bytes=0)
        return SimpleNamespace(choice=estimate.choice, seconds=seconds, peak=peak)

    def estimates(devices):
        result = type(searcher).estimates(searcher, devices)
        seconds_of_stages = {2: 0.5, 4: 1.5}
        result.estimates = [
            replace(estimated, seconds=seconds_of_stages.get(estimated.choice.stages, 0.9))
            for estimated in result.estimates
        ]
        return result

    monkeypatch.setattr(searcher.whole, "planned", whole)
    monkeypatch.setattr(searcher.closed_form, "refined", lambda estimate: estimate)
    object.__setattr__(searcher, "estimates", estimates)
    result = searcher.search(4)
    assert planned.count(2) == 2 and planned.count(4) == 0 and planned.count(1) >= 4
    assert result.ranked[0].choice.stages == 2


def test_stages_that_cannot_be_planned_are_counted_with_their_reason(monkeypatch):
    searcher = planner(8, mesh={"context": 1, "tensor": 1, "data": 2}, pipeline={"stages": 2})

    def refused(estimate, *_):
        raise ConfigError("example 7 does not fit the pipeline by itself; raise something")

    monkeypatch.setattr("jaxmllm.cluster.search.whole_plans.planned_in_stages", refused)
    with pytest.raises(ConfigError, match=r"no layout in stages on 8 .* example 7 .* raise some"):
        searcher.search(8)
    result = searcher.estimates(8)
    assert searcher._planned_whole(result.estimates, 4, result) == []
    reason = "in stages: example 7 does not fit the pipeline by itself"
    assert result.rejected[reason] == len(result.estimates)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("devices", "stages"), [(8, 2), (16, 4)])
def test_stages_take_about_what_was_estimated_and_stay_in_memory(devices, stages):
    mesh = {"context": 1, "tensor": 1, "data": 2}
    searcher = planner(devices, mesh=mesh, pipeline={"stages": stages})
    result = searcher.search(devices)
    for layout in result.ranked:
        assert 0.5 < layout.seconds / layout.even_seconds < 2.5
        assert layout.peak.bytes <= searcher.budget and layout.peak.parts["program"] > 0


def test_state_is_that_of_the_sizing_of_rows():
    averaged = {"language": {"ema": 0.9}}
    searcher = planner(mesh={"data": 2, "fsdp": 2, "tensor": 2}, components=averaged)
    estimate = searcher.estimates(8).estimates[0]
    counted = StepBytes(estimate.config, estimate.model, 0, parameter_numbers(searcher.model)).state
    assert counted == state_bytes(estimate.config, estimate.model)


def test_devices_that_share_cores_take_as_long_as_one():
    """In closed form, the devices together compute what one device does, at the same rate."""
    mesh = {"fsdp": 1, "context": 1, "tensor": 1}
    one, four = (
        planner(devices, CLUSTERS["cpu"], mesh=mesh).estimates(devices).estimates[0]
        for devices in (1, 4)
    )
    for phase in ROWS:
        part = f"{phase}/compute"
        assert four.parts[part] == pytest.approx(one.parts[part], rel=0.01)


def test_no_phase_of_two_passes_keeps_residuals_in_closed_form(monkeypatch):
    """What a decoder of a generator keeps depends on a device's memory, and is not yet known."""
    config = omni_config("tiny", data={"batch_size": 8}, mesh={"fsdp": 1, "context": 1})
    tree = config_tree(config)
    tree["model"]["diffusion"] = {"width": 64, "layers": 2, "heads": 4, "mlp_width": 128}
    tree["model"]["diffusion"] |= {"channels": 4, "patch_size": 2}
    tree["phases"] = ROWS | {"diffusion": {"capacities": [8192], "spans": [1]}}
    searcher = make_planner(parse_config(tree), H100, 1, 0)
    kept = []

    def programs(*arguments):
        made = phased_programs(*arguments)
        kept.append(made.kept_residuals)
        return made

    monkeypatch.setattr("jaxmllm.cluster.search.closed_form.phased_programs", programs)
    searcher.estimates(1)
    assert kept == [{"vision": 0, "audio": 0, "language": 0}]


def test_of_equal_times_the_mesh_of_fewer_axes_is_preferred():
    layouts = [
        SimpleNamespace(seconds=seconds, choice=SimpleNamespace(axes=axes, __lt__=None))
        for seconds, axes in ((1.0, 3), (1.009, 2), (1.011, 1), (1.005, 2))
    ]
    order = [(layout.seconds, layout.choice.axes) for layout in ranked(layouts)]
    assert order == [(1.005, 2), (1.009, 2), (1.0, 3), (1.011, 1)]


def test_where_nothing_fits_the_closest_is_named_and_what_would_do():
    # The state is 0.5M parameters of 16 bytes each: it fits on 8 devices, but not on one
    small_cluster = H100.model_copy(update={"memory": 4e7, "taken_share": 1.0})
    with pytest.raises(
        ConfigError, match=r"nothing fits 1 devices .* over by .* GB in \w+; \d+ devices would do"
    ):
        planner(1, small_cluster).search(1)


def test_of_more_devices_the_first_layout_that_fits_answers(monkeypatch):
    """Layouts after it are not looked at, and none is estimated in closed form."""
    small_cluster = H100.model_copy(update={"memory": 4e7, "taken_share": 1.0})
    searcher = planner(1, small_cluster)
    result = searcher.estimates(1)
    considered = []
    legal_of = searcher.legal.of

    def counted(choice, result):
        considered.append((choice.devices, layout := legal_of(choice, result)))
        return layout

    monkeypatch.setattr(searcher.legal, "of", counted)
    monkeypatch.setattr(searcher.closed_form, "estimate", None)
    line = why_none(searcher, result, 1)
    *refused, (devices, fitting) = considered
    assert fitting is not None and not any(layout for _, layout in refused)
    assert line.endswith(f"; {devices} devices would do")


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ({"data": -1, "fsdp": 1}, r"; leave the axes open with mesh={}, and \d devices would do$"),
        ({"data": 4, "fsdp": 1, "context": 1, "tensor": 1}, "; leave the axes open with mesh={}"),
    ],
)
def test_where_fixed_axes_leave_no_room_the_line_says_so(mesh, says):
    """More replicas do not help, since each holds as many bytes."""
    small_cluster = H100.model_copy(update={"memory": 4e7, "taken_share": 1.0})
    mesh = {"context": 1, "tensor": 1} | mesh
    with pytest.raises(ConfigError, match=says):
        planner(4, small_cluster, mesh=mesh, pipeline={"stages": 1}).search(4)


def test_what_no_memory_would_hold_has_no_number_of_devices():
    tiny = H100.model_copy(update={"memory": 1e5})
    with pytest.raises(ConfigError, match="up to 64 devices would not do: freeze components"):
        planner(1, tiny, mesh={"context": 1, "tensor": 1}, pipeline={"stages": 1}).search(1)


def test_rows_that_no_mesh_can_have_are_the_error(monkeypatch):
    """Neither other numbers of devices nor other batch sizes would help."""
    monkeypatch.setitem(ROWS, "language", {"capacities": [12300], "spans": [1]})
    for batch in (32, 4):  # with 4, some meshes have more ranks than examples
        with pytest.raises(ConfigError, match=r"^phases.language.capacities: 12300 is not a mul"):
            planner(8, batch=batch).search(8)


def test_devices_that_no_mesh_has_and_batches_that_are_too_small_are_named():
    searcher = planner(13, batch=4, mesh={"context": 1})
    with pytest.raises(ConfigError, match=r"data.batch_size \(4\): .* raise it to 13"):
        searcher.search(13)
    fixed = planner(6, mesh={"data": 1, "context": 1, "fsdp": 1})
    with pytest.raises(ConfigError, match=r"no mesh of 6 devices is legal .* say --devices 2"):
        fixed.search(6)


@pytest.mark.parametrize(
    ("devices", "batch", "mesh", "says"),
    [
        (8, 4, {"fsdp": 8}, r"more ranks; leave the axes open with mesh={}, or raise it to 8 or"),
        (6, 32, {"tensor": 3}, r"is legal \(.*\); leave the axes open with mesh={}$"),
    ],
)
def test_axes_that_are_fixed_are_named_where_open_ones_would_do(devices, batch, mesh, says):
    searcher = planner(devices, batch=batch, mesh=mesh)
    with pytest.raises(ConfigError, match=says):
        searcher.search(devices)
    assert planner(devices, batch=batch).estimates(devices).estimates
