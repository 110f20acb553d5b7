"""Partition into stages: costs under freezing, cuts against brute force, layouts, and errors."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.pipeline.cuts import cut, cut_in_rounds, partition
from sharding.pipeline.layer_costs import Layer, LayerCost, chain_work, chunk_costs, layer_costs
from sharding.pipeline.ring import Chain, PipelineError


def model(vision: bool, projector: bool, language: bool, **shape) -> dict[str, list[Layer]]:
    """Three tower layers and a projector; an embedding, two blocks and a head. Every
    forward pass costs 10."""

    def run(component: str, count: int, trainable: bool) -> list[Layer]:
        return [Layer(component, 10, trainable=trainable, **shape) for _ in range(count)]

    return {
        "vision": run("vision", 3, vision) + run("projector.vision", 1, projector),
        "language": run("language", 4, language),
    }


# ---------------------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("trained", "encoder", "projector", "language"),
    [
        ((False, True, False), 0, 1, 1),
        ((False, True, True), 0, 1, 2),
        ((True, True, False), 2, 2, 1),
        ((True, True, True), 2, 2, 2),
    ],
    ids=["alignment", "encoder frozen", "language frozen", "all trained"],
)
def test_backward_passes_by_what_is_frozen(trained, encoder, projector, language):
    """Costs of backward passes in units of a forward pass, without recomputation. Of the tower,
    layers count that have another before them."""

    def gradients(cost: LayerCost) -> int:
        return cost.input_grad + cost.weight_grad

    costs = layer_costs(model(*trained))
    assert gradients(costs["vision"][1]) == gradients(costs["vision"][2]) == 10 * encoder
    assert gradients(costs["vision"][3]) == 10 * projector
    assert {gradients(cost) for cost in costs["language"]} == {10 * language}
    for chain in costs.values():
        assert all(cost.recompute == (10 if gradients(cost) else 0) for cost in chain)
    recomputed = layer_costs(model(*trained, linear_again=1, attention_again=1))
    for name, chain in costs.items():
        for cost, recomputed_cost in zip(chain, recomputed[name], strict=True):
            assert gradients(recomputed_cost) == gradients(cost) + (10 if gradients(cost) else 0)
            assert (recomputed_cost.input_grad > 0) == (cost.input_grad > 0)


def test_a_chunk_that_keeps_inputs_alone_does_not_run_its_last_layer_again():
    """Except for the chunk that ends with a projector or head, which reads what
    the last layer yields."""
    ends = Layer("language", 1)
    recomputed = Layer("language", 10, attention=4, linear_again=1, attention_again=1)
    half_recomputed = replace(recomputed, linear_again=Fraction(1, 2), attention_again=0)
    chain = Chain("language", (0, 1, 2), (2, 1, 1))
    for layer, expected in (
        (recomputed, [1 + 14, 0, 14 + 1]),
        (half_recomputed, [1 + 28, 14, 14 + 1]),
    ):
        costs = layer_costs({"language": [ends, layer, layer, layer, layer, ends]})["language"]
        assert [chunk.recompute for chunk in chunk_costs(chain, costs)] == expected
    assert costs[2].input_grad + costs[2].weight_grad == 10 + 10 + 5 * 2 + 5


def test_the_first_trained_layer_has_no_input_gradient():
    first_layer, second_layer = layer_costs(model(True, True, True))["vision"][:2]
    assert (first_layer.input_grad, first_layer.weight_grad, first_layer.recompute) == (0, 10, 10)
    assert (second_layer.input_grad, second_layer.weight_grad, second_layer.recompute) == (
        10,
        10,
        10,
    )


def test_a_model_that_learns_nothing_has_no_backward_pass():
    for costs in layer_costs(model(False, False, False)).values():
        assert all(cost.backward == 0 and cost.forward == 10 for cost in costs)


@pytest.mark.parametrize("trainable", [False, True])
def test_attention_costs_two_and_a_half_forward_passes_on_the_way_back(trainable):
    """4 units of attention cost 10 on the way back, whether or not the
    layer's weights are trained."""
    trained_before = Layer("language", 1, trainable=True)
    layer = Layer("language", 10, attention=4, trainable=trainable)
    _, cost = layer_costs({"language": [trained_before, layer]})["language"]
    assert (cost.forward, cost.input_grad, cost.recompute) == (14, 10 + 10, 14)
    assert cost.weight_grad == (10 if trainable else 0)
    (first_cost,) = layer_costs({"language": [layer]})["language"]
    assert (first_cost.input_grad, first_cost.weight_grad) == (0, 20 if trainable else 0)


def test_one_trained_encoder_sends_gradients_through_language_but_not_through_the_other():
    chains = {
        "vision": [Layer("vision", 10, trainable=False)] * 2,
        "audio": [Layer("audio", 10, trainable=True)] * 2,
        "language": [Layer("language", 10, trainable=False)] * 2,
    }
    costs = layer_costs(chains)
    assert [cost.backward for cost in costs["vision"]] == [0, 0]
    assert [cost.input_grad for cost in costs["audio"]] == [0, 10]
    assert [(cost.input_grad, cost.weight_grad) for cost in costs["language"]] == [(10, 0), (10, 0)]


# ---------------------------------------------------------------------------- cuts


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_cuts_are_the_best_of_all(costs, data):
    """The smallest maximum, then the smallest sum of squares, of all cuts into as many stages."""
    stages = data.draw(st.integers(1, len(costs)))
    candidates = [
        (0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1)
    ]

    def loads(bounds):
        return [sum(costs[a:b]) for a, b in pairwise(bounds)]

    def worth(bounds):
        return max(loads(bounds)), sum(load**2 for load in loads(bounds))

    best = [bounds for bounds in candidates if worth(bounds) == min(map(worth, candidates))]
    # Among equal cuts the longer stages are the first ones, or with rounds the last ones.
    assert cut(costs, stages) == max(best, key=lambda bounds: bounds[::-1])
    assert cut_in_rounds(costs, stages, 1) == min(best, key=lambda bounds: bounds[::-1])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_cuts_in_rounds_are_the_best_of_all(costs, data):
    """Ranks run in lockstep, so the sum over rounds of the costliest chunk
    of each must be least."""
    stages = data.draw(st.integers(1, len(costs)))
    rounds = data.draw(st.integers(1, len(costs) // stages))
    chunks = stages * rounds
    candidates = [
        (0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), chunks - 1)
    ]

    def worth(bounds):
        loads = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        limits = [max(loads[start : start + stages]) for start in range(0, chunks, stages)]
        return sum(limits), sum(limit**2 for limit in limits)

    chosen = cut_in_rounds(costs, stages, rounds)
    assert chosen in candidates and worth(chosen) == min(map(worth, candidates))


def test_what_does_not_divide_evenly_makes_one_round_larger():
    """80 blocks and a head on 16 stages in three rounds: the longest chunks of the rounds
    have six units together."""
    bounds = cut_in_rounds([10] * 80 + [14], 16, 3)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert (
        sum(max(sizes[start_chunk : start_chunk + 16]) for start_chunk in (0, 16, 32)) == 6
        and sum(sizes) == 81
    )
    assert cut_in_rounds([10] * 21 + [32], 16, 1) == (*range(10), 11, 13, 15, 17, 19, 21, 22)


@st.composite
def partly_frozen(draw):
    """Two chains of a stem, blocks, and a projector or head, any of which may be frozen."""
    chains = {}
    for name in ("vision", "language"):
        layers = draw(
            st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=3, max_size=6)
        )
        chains[name] = [Layer(name, cost, trainable=trained) for cost, trained in layers]
    return chains


@settings(max_examples=300, deadline=None)
@given(partly_frozen(), st.sampled_from(["chain", "parallel"]), st.integers(2, 4))
def test_stages_are_the_best_of_all_whatever_is_frozen(layers, layout, stages):
    """Against every way to cut the blocks: a stem goes with the first block, a projector with the
    last, and the head is a unit by itself."""
    costs = layer_costs(layers)
    units = {}
    for name, chain in costs.items():
        stem, *blocks, last = [cost.total for cost in chain]
        blocks[0] += stem
        units[name] = [*blocks, last] if name == "language" else blocks
        units[name][-1] += 0 if name == "language" else last
    if stages > min(len(layers[name]) - 2 for name in layers):
        return
    ring = partition(layers, stages, layout)
    ranks = [0] * stages
    for chain in ring.chains:
        for rank, cost in zip(chain.stages, chunk_costs(chain, costs[chain.name]), strict=True):
            ranks[rank] += cost.total

    def slowest(loads, count):
        inner = combinations(range(1, len(loads)), count - 1)
        candidates = ((0, *between, len(loads)) for between in inner)
        return min(max(sum(loads[a:b]) for a, b in pairwise(bounds)) for bounds in candidates)

    if layout == "chain":
        least_load = slowest(units["vision"] + units["language"], stages)
    else:
        splits = ((count, stages - count) for count in range(1, stages))
        least_load = min(
            max(slowest(units[name], count) for name, count in zip(units, split, strict=True))
            for split in splits
            if all(count <= len(layers[name]) - 2 for name, count in zip(units, split, strict=True))
        )
    # No layer here keeps its input alone, so no chunk is spared the recomputation of its last
    # layer.
    assert max(ranks) == least_load


def test_cuts_of_costs_whose_squares_no_word_holds():
    """Squares of 10**15 exceed 64 bits."""
    assert cut([10**15, 10**15, 3 * 10**15, 10**15], 3) == (0, 2, 3, 4)


# ---------------------------------------------------------------------------- layouts


def chains(**costs: list[int]) -> dict[str, list[Layer]]:
    """Frozen chains whose blocks have the given costs, and whose stem and head cost nothing."""
    return {
        name: [
            Layer(name, cost, parameters=min(cost, 1), trainable=False)
            for cost in [0, *block_costs, 0]
        ]
        for name, block_costs in costs.items()
    }


def loads(found, layers: dict[str, list[Layer]]) -> tuple[int, ...]:
    """Cost of each rank, after a check that every block lies in one chunk."""
    assert [chain.name for chain in found.chains] == list(layers)
    for chain in found.chains:
        assert sum(chain.layers) == len(layers[chain.name]) - 2
    costs = layer_costs(layers)
    ranks = [0] * found.stages
    for chain in found.chains:
        for rank, cost in zip(chain.stages, chunk_costs(chain, costs[chain.name]), strict=True):
            ranks[rank] += cost.total
    assert sum(ranks) == sum(
        layer.linear for chain_layers in layers.values() for layer in chain_layers
    )
    return tuple(ranks)


def chain_of(found, name: str):
    return next(chain for chain in found.chains if chain.name == name)


def test_a_chain_runs_over_the_ranks_once():
    """Vision and language share the middle rank."""
    layers = chains(vision=[2] * 3, language=[3] * 3)
    ring = partition(layers, 3, "chain")
    assert loads(ring, layers) == (4, 5, 6)
    vision, language = ring.chains
    assert (vision.stages, vision.layers) == ((0, 1), (2, 1))
    assert (language.stages, language.layers) == ((1, 2), (1, 2))


def test_cuts_by_parameters_ignore_cost():
    layers = chains(vision=[9, 9], language=[1, 1])
    assert loads(partition(layers, 2, "chain", cut_by="parameters"), layers) == (18, 2)
    assert loads(partition(layers, 2, "chain"), layers) == (9, 11)


def test_segments_lay_every_chain_over_all_ranks():
    """The language model has two chunks per rank where it costs about twice as much as vision."""
    layers = chains(vision=[2] * 4, language=[2] * 9)
    ring = partition(layers, 2, "segments")
    loads(ring, layers)
    assert (chain_of(ring, "vision").stages, chain_of(ring, "vision").layers) == ((0, 1), (2, 2))
    assert chain_of(ring, "language").stages == (0, 1, 0, 1), "T = 8 and 18: two chunks a rank"
    assert chain_of(partition(layers, 2, "segments", chunks={"language": 1}), "language").depth == 2
    small_ring = partition(chains(vision=[1] * 2, language=[9] * 2), 2, "segments")
    assert chain_of(small_ring, "language").depth == 2, "no more layers"


def test_rows_of_a_microbatch_count_in_cuts_but_not_in_chunks_a_rank():
    layers = chains(vision=[2] * 4, language=[4] * 6)
    ring = partition(layers, 2, "segments", rows={"vision": 5})
    assert [chain.depth for chain in ring.chains] == [2, 6], "a row of language is three of vision"
    assert [
        chain.depth for chain in partition(layers, 4, "parallel", rows={"vision": 6}).chains
    ] == [2, 2]
    assert [chain.depth for chain in partition(layers, 4, "parallel").chains] == [1, 3]
    assert partition(layers, 2, "chain", rows={"vision": 9}).chains[1].stages == (1,)
    by_parameters = partition(layers, 2, "chain", rows={"vision": 9}, cut_by="parameters")
    assert [chain.stages for chain in by_parameters.chains] == [(0,), (0, 1)], (
        "ten blocks, five a rank"
    )


def test_a_tiny_encoder_does_not_cut_the_others_to_pieces():
    layers = chains(vision=[5] * 4, audio=[1] * 4, language=[5] * 9)
    assert [chain.depth for chain in partition(layers, 2, "segments").chains] == [2, 2, 4]


def test_parallel_gives_each_chain_the_ranks_it_needs():
    layers = chains(vision=[3] * 4, audio=[1] * 3, language=[4] * 9)
    ring = partition(layers, 6, "parallel")
    assert [chain.stages for chain in ring.chains] == [(0, 1), (2,), (3, 4, 5)], (
        "a fourth would not hasten language"
    )
    assert max(loads(ring, layers)) == 12


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(3, 8),
)
def test_no_split_of_ranks_beats_the_one_chosen(vision, audio, language, stages):
    """Against all ways to give each of three chains some ranks and to cut
    it into as many chunks."""
    costs = [vision, audio, language]
    if stages > sum(map(len, costs)):
        return

    def slowest(layers, count):
        candidates = (
            (0, *inner, len(layers)) for inner in combinations(range(1, len(layers)), count - 1)
        )
        return min(max(sum(layers[a:b]) for a, b in pairwise(bounds)) for bounds in candidates)

    splits = [
        (a, b, c)
        for a in range(1, len(vision) + 1)
        for b in range(1, len(audio) + 1)
        for c in range(1, len(language) + 1)
        if a + b + c == stages
    ]
    least_load = min(max(map(slowest, costs, split)) for split in splits)
    layers = chains(vision=vision, audio=audio, language=language)
    ring = partition(layers, stages, "parallel")
    assert max(loads(ring, layers)) == least_load


def test_stems_and_projectors_stay_with_a_block_and_heads_may_stand_alone():
    layers = {
        "vision": [Layer("vision", cost, trainable=False) for cost in (5, 1, 1, 5)],
        "language": [Layer("language", cost, trainable=False) for cost in (5, 1, 1, 9)],
    }
    ring = partition(layers, 2, "segments")
    assert [chain.layers for chain in ring.chains] == [(1, 1), (2, 0)]
    assert loads(ring, layers) == (6 + 7, 6 + 9)


@pytest.mark.parametrize(
    ("trained", "expected"),
    [((False, True, False), [True, False]), ((True, True, True), [False, False])],
)
def test_a_chain_trained_behind_its_last_block_only_says_so(trained, expected):
    assert [
        chain.head_only for chain in partition(model(*trained), 2, "segments").chains
    ] == expected


def test_a_model_without_encoders():
    layers = chains(language=[1] * 4)
    for layout in ("chain", "segments", "parallel"):
        assert loads(partition(layers, 2, layout), layers) == (2, 2)


def test_work_of_a_chain_is_that_of_its_layers_in_every_microbatch():
    """Three microbatches; the second trains the projector and the language model alone."""
    layers = [model(True, True, True), model(False, True, True), model(True, True, True)]
    layout = partition(layers[0], 2, "chain")
    costs = [layer_costs(per_microbatch)["vision"] for per_microbatch in layers]
    chain = chain_of(layout, "vision")
    work = chain_work(chain, costs)
    assert work.shape == (chain.depth, 3)
    assert work.forward.sum(axis=0).tolist() == [40, 40, 40], "stem, two blocks, projector"
    for microbatch, per_microbatch in enumerate(costs):
        for depth, cost in enumerate(chunk_costs(chain, per_microbatch)):
            chunk_work = [
                times[depth, microbatch]
                for times in (work.forward, work.input_gradient, work.weight_gradient)
            ]
            assert chunk_work == [cost.forward, cost.input_grad, cost.weight_grad]
            assert work.recompute[depth, microbatch] == cost.recompute
    with pytest.raises(PipelineError, match="vision has 2 layers in its chunks, but costs of 3"):
        chain_work(chain, [costs[0][:3]])


# ---------------------------------------------------------------------------- errors


def test_more_stages_than_layers_are_refused_with_both_counts():
    """Every layout has its own limit of stages."""
    layers = chains(vision=[1] * 3, language=[1] * 8)
    with pytest.raises(
        PipelineError, match=r"pipeline\.stages = 4, but 'vision' has 3 layers.*'segments'"
    ):
        partition(layers, 4, "segments")
    with pytest.raises(PipelineError, match=r"pipeline\.stages = 12, but .*: 11 in all"):
        partition(layers, 12, "chain")
    with pytest.raises(
        PipelineError,
        match=r"pipeline\.stages = 12, but 'vision' has 3 layers and 'language' has 8",
    ):
        partition(layers, 12, "parallel")
    with pytest.raises(
        PipelineError, match=r"pipeline\.stages = 1, .* a rank for each of vision, language"
    ):
        partition(layers, 1, "parallel")
    with pytest.raises(PipelineError, match="2 layers cannot be cut into 3"):
        cut([1, 1], 3)
    with pytest.raises(
        PipelineError,
        match="3 chunks of 'language' on each of 3 stages, but 'language' has 8 layers",
    ):
        partition(layers, 3, "segments", chunks={"language": 3})
    with pytest.raises(PipelineError, match=r"pipeline\.stages = 0"):
        partition(layers, 0, "chain")
    with pytest.raises(PipelineError, match="a stem, a block, and a projector or head"):
        partition({"language": layers["language"][:2]}, 1, "chain")
