"""The graph of a batch: which operations there are, what they wait for, and which
workloads are refused."""

import dataclasses

import numpy as np
import pytest

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import ChainWork, Kind, Pool, Workload
from sharding.pipeline.ring import Chain, PipelineError, Ring
from tests.sharding.pipeline.models import ALL, HEAD, NONE, ring_of, workload_of


def work(
    depths: int, microbatches: int, forward: int = 2, back: int = 2, weight: int = 3
) -> ChainWork:
    """Work of a chain whose operations of one kind all take equally long."""
    ones = np.ones((depths, microbatches), np.int64)
    return ChainWork(ones * forward, ones * forward, ones * back, ones * weight)


RING = Ring(2, (Chain("vision", (0, 1), (1, 1)), Chain("language", (0, 1), (1, 1))))
DEFERRED = Workload((work(2, 2), work(2, 2)), (((0, 0), (0, 1)), ((0, 1),)))


def edges(graph):
    """Every pair (operation, one that waits for it), by name."""
    pairs = set()
    for n in range(graph.size):
        for successor in [op for op, _ in graph.successors[n]] + [
            op for *_, op in graph.returns[n]
        ]:
            pairs.add((graph.name(n), graph.name(successor)))
    return pairs


def test_what_waits_for_what():
    """All edges of a workload whose second encoder row is read by both language microbatches."""
    waits = edges(build_graph(RING, DEFERRED, fused=False))
    expected = set()
    for m in (0, 1):
        for chain in ("vision", "language"):
            first_chunk, second_chunk = (f"of {chain} chunk {d}, microbatch {m}" for d in (0, 1))
            expected |= {
                (f"forward {first_chunk}", f"forward {second_chunk}"),
                (f"backward {second_chunk}", f"backward {first_chunk}"),
            }
            expected |= {
                (f"forward {chunk}", f"backward {chunk}") for chunk in (first_chunk, second_chunk)
            }
    for encoder_row, m in ((0, 0), (1, 0), (1, 1)):
        tower = f"of vision chunk 1, microbatch {encoder_row}"
        text = f"of language chunk 0, microbatch {m}"
        expected |= {
            (f"forward {tower}", f"forward {text}"),
            (f"backward {text}", f"backward {tower}"),
        }
    assert waits == expected


def test_the_last_language_forward_is_part_of_its_backward():
    separate, fused = (build_graph(RING, DEFERRED, fused=fused) for fused in (False, True))
    assert separate.size - fused.size == 2
    n = fused.number[Kind.BACKWARD, 1, 1, 0]
    assert fused.duration[n] == 2 + 2 + 3
    predecessor = fused.number[Kind.FORWARD, 1, 0, 0]
    assert (n, 1) in fused.successors[predecessor]


def test_split_backwards():
    """A weight gradient waits for its input gradient alone, and nothing waits for it."""
    graph = build_graph(RING, DEFERRED, split=True, fused=False)
    for chain in (0, 1):
        input_gradient, weight_gradient = (
            graph.number[kind, chain, 1, 0] for kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
        )
        assert (graph.duration[input_gradient], graph.duration[weight_gradient]) == (2 + 2, 3)
        assert (
            graph.successors[input_gradient][0] == (weight_gradient, 1)
            or (weight_gradient, 1) in graph.successors[input_gradient]
        )
        assert not graph.successors[weight_gradient]
    assert Kind.BACKWARD not in graph.kind
    assert graph.rank_work.sum() == build_graph(RING, DEFERRED, fused=False).rank_work.sum()


@pytest.mark.parametrize(
    ("trained", "backward"),
    [
        ((HEAD, NONE), {0: {1}, 1: {0, 1}}),
        ((NONE, ALL), {1: {0, 1}}),
        ((NONE, NONE), {}),
        ((NONE, HEAD), {1: {1}}),
    ],
)
def test_frozen_chunks_have_no_backward(trained, backward):
    ring = ring_of("chain", 4, heads=tuple(parts_trained == HEAD for parts_trained in trained))
    graph = build_graph(ring, workload_of(ring, 3, trained))
    backward_depths: dict[int, set[int]] = {}
    for kind, chain, depth in zip(graph.kind, graph.chain, graph.depth, strict=True):
        if kind == Kind.BACKWARD:
            backward_depths.setdefault(chain, set()).add(depth)
    assert backward_depths == backward


def test_tokens_travel_as_far_as_they_must():
    ring = ring_of("parallel", 4, ("vision", "audio"))
    assert [ring.delivery_hops(encoder) for encoder in (0, 1)] == [2, 1]
    graph = build_graph(ring, workload_of(ring, 4, (ALL,) * 3, seed=1))
    for encoder, hops in ((0, 2), (1, 1)):
        n = graph.number[Kind.FORWARD, encoder, 0, 0]
        assert {ticks for _, ticks in graph.successors[n] if graph.chain[_] == 2} == {hops}
    two_hop_buffers = [buffer for buffer in graph.buffers if buffer.hops == 2]
    assert {(buffer.pool, buffer.rank) for buffer in two_hop_buffers} == {
        (Pool.TOKENS, 2),
        (Pool.TOKEN_GRADIENT, 0),
    }


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload((work(2, 2),), ((), ())), "1 components for a ring of 2"),
        (Workload((work(1, 2), work(2, 2)), ((), ())), "1 chunks for vision, which has 2"),
        (Workload((work(2, 2, 0), work(2, 2)), ((), ())), "duration 0"),
        (
            Workload((work(2, 1), work(2, 2)), ((),)),
            "inputs of 1 language microbatches, of which there are 2",
        ),
        (Workload((work(2, 1), work(2, 1)), (((0, 0), (0, 0)),)), "twice"),
        (Workload((work(2, 1), work(2, 1)), (((0, 0), (0, 1)),)), "does not exist"),
        (Workload((work(2, 1), work(2, 1)), (((1, 0),),)), "does not exist"),
        (
            Workload((work(2, 2), work(2, 1)), (((0, 1),),)),
            "no language microbatch consumes row 0",
        ),
        (Workload((work(2, 1), work(2, 1, 1, 0, 0)), (((0, 0),),)), "which has no backward"),
    ],
)
def test_workloads_that_cannot_be(workload, message):
    with pytest.raises(PipelineError, match=message):
        build_graph(RING, workload)


def test_gradients_need_something_to_come_from():
    first_only = ChainWork(
        *(
            np.array(durations, np.int64)
            for durations in ([[1], [1]], [[1], [1]], [[1], [0]], [[0], [0]])
        )
    )
    with pytest.raises(
        PipelineError, match="chunk 0 of vision has a backward for microbatch 0, but chunk 1"
    ):
        build_graph(RING, Workload((first_only, work(2, 1)), (((0, 0),),)))
    ring = Ring(2, (dataclasses.replace(RING.chains[0], head_only=True), RING.chains[1]))
    with pytest.raises(PipelineError, match="only after its last layer"):
        build_graph(ring, DEFERRED)


def test_every_operation_takes_the_overhead_once():
    plain, with_overhead = (
        build_graph(RING, DEFERRED, split=True, overhead=overhead) for overhead in (0, 7)
    )
    assert with_overhead.duration == tuple(duration + 7 for duration in plain.duration)
