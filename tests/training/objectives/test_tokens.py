"""Cross-entropy of tokens in chunks: losses, hits, gradients and sums by source.

The references are `dense`, which computes every token's logits in NumPy, and loops over segments.
Compiled programs are inspected for the work, memory and communication that chunks are meant to
save.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmllm.models.language import OutputHead
from jaxmllm.setup.hlo import collectives, parse
from jaxmllm.training.objectives.tokens import (
    Sums,
    chunk_size,
    failed_examples,
    slots_with_target,
    sums_by_source,
    token_losses,
)
from sharding.mesh import make_mesh
from sharding.rules import make_layout

RANKS = 4
SLOTS = 64
WIDTH = 16
VOCABULARY = 50
WEIGHT = 0.3  # of the losses in the objective
UNTIED = ("embed", "vocab")
TIED = ("vocab", "embed")
SPLIT = make_layout(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
WHOLE = make_layout(make_mesh({"data": 1}, jax.devices()[:1]))
LAYOUTS = {
    "whole": WHOLE,
    "tensor": SPLIT,
    "context": make_layout(make_mesh({"data": 2, "fsdp": 2, "context": 2})),
    "spans": make_layout(make_mesh({"data": 4, "tensor": 2}, spans=(1, 2, 4))).spanned(4),
    "spans_of_shards": make_layout(make_mesh({"data": 2, "fsdp": 4}, spans=(1, 2))).spanned(2),
    "copies": make_layout(
        make_mesh({"fsdp": 4, "tensor": 2}), {"embed": ["fsdp", "tensor"], "vocab": []}
    ),
}
FILLED = ("ragged", "all", "none", "one")


def draw(seed=0, ranks=RANKS, slots=SLOTS, vocabulary=VOCABULARY, scale=1.0, filled="ragged"):
    """Hidden states, head and targets; their share differs by rank, or is as `filled` says."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, vocabulary, (ranks, slots))
    share = {"ragged": rng.random((ranks, 1)), "all": 1}.get(filled, 0)
    targets[rng.random(targets.shape) >= share] = -1
    if filled == "one":
        targets[-1, 5] = 7
    hidden = rng.standard_normal((ranks, slots, WIDTH)) * scale
    return hidden, rng.standard_normal((WIDTH, vocabulary)), targets


def dense(hidden, head, targets):
    """Losses, hits and both gradients from the complete logits, token by token."""
    losses = np.zeros(targets.shape)
    hits = np.zeros(targets.shape, bool)
    d_hidden = np.zeros_like(hidden)
    d_head = np.zeros_like(head)
    for i in zip(*np.nonzero(targets >= 0), strict=True):
        logits = hidden[i] @ head
        probability = np.exp(logits - logits.max())
        probability /= probability.sum()
        losses[i] = logits.max() - logits[targets[i]] + np.log(np.exp(logits - logits.max()).sum())
        hits[i] = logits.argmax() == targets[i]
        d_logits = WEIGHT * (probability - np.eye(len(logits))[targets[i]])
        d_hidden[i], d_head = head @ d_logits, d_head + np.outer(hidden[i], d_logits)
    return losses, hits, d_hidden, d_head


def as_parameter(head, axes):
    return head if axes == UNTIED else head.T


def vjp(inputs, chunk, layout, dtype, axes=UNTIED):
    """Losses, hits and both gradients of the sum of losses; the head's gradient is [D, V]."""
    hidden, head, targets = inputs

    @jax.jit
    def run(hidden, matrix, targets):
        def objective(hidden, matrix):
            total, *results = token_losses(hidden, OutputHead(matrix, axes), targets, chunk, layout)
            return WEIGHT * total, results

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(hidden, matrix)

    matrix = as_parameter(head.astype(dtype), axes)
    matrix = jax.device_put(matrix, layout.sharding(axes))
    (d_hidden, d_matrix), (losses, hits) = run(hidden.astype(dtype), matrix, targets)
    assert d_matrix.sharding.is_equivalent_to(matrix.sharding, 2)
    return losses, hits, d_hidden, as_parameter(d_matrix, axes)


@pytest.mark.parametrize("axes", [UNTIED, TIED], ids=["head", "embedding"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("filled", FILLED)
def test_equals_dense_cross_entropy_in_float64(filled, layout, axes):
    inputs = draw(filled=filled)
    with jax.enable_x64(True):
        for got, want in zip(
            vjp(inputs, 16, layout, np.float64, axes), dense(*inputs), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [8, 24, SLOTS])
def test_chunks_do_not_matter(chunk):
    # The head's gradient adds up some hundred terms of order 1 in float32
    for got, want in zip(vjp(draw(1), chunk, SPLIT, np.float32), dense(*draw(1)), strict=True):
        assert got.dtype in (np.float32, bool)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_bfloat16_sums_in_float32():
    inputs = draw(2)
    losses, hits, d_hidden, d_head = vjp(inputs, 16, SPLIT, jnp.bfloat16)
    assert losses.dtype == np.float32 and d_hidden.dtype == d_head.dtype == jnp.bfloat16
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in inputs[:2]]
    expected = dense(*rounded, inputs[2])
    # The inputs are rounded to bfloat16, the sums are not
    np.testing.assert_allclose(losses, expected[0], atol=1e-5)
    # Rounding may change the largest of two close logits
    assert (np.asarray(hits) == expected[1]).mean() > 0.99
    for actual, gradient in ((d_hidden, expected[2]), (d_head, expected[3])):
        np.testing.assert_allclose(
            np.asarray(actual, np.float64), gradient, rtol=0, atol=0.02 * abs(gradient).max()
        )


def test_large_logits_do_not_overflow():
    """Logits of thousands would overflow `exp` if the largest one were not subtracted."""
    inputs = draw(3, scale=1e3)
    got = vjp(inputs, 16, WHOLE, np.float32)
    assert all(np.isfinite(x).all() for x in got)
    np.testing.assert_allclose(got[0], dense(*inputs)[0], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("garbage", [1e30, np.inf, np.nan])
def test_tokens_without_a_target_may_hold_anything(garbage):
    """Padding may be infinite or NaN: the result is the same as with zeros."""
    hidden, head, targets = draw(4)
    targets[:2] = -1
    masked = targets < 0
    hidden[masked] = garbage
    losses, hits, d_hidden, d_head = vjp((hidden, head, targets), 16, SPLIT, np.float32)
    assert not losses[masked].any() and not hits[masked].any() and not d_hidden[masked].any()
    # The reference sees zeros, because NaN would spread through its sums
    hidden[masked] = 0
    want = dense(hidden, head, targets)
    for got, expected in zip((losses, hits, d_hidden, d_head), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("tokens, chunk", [(12, 4), (12, 5), (12, 12)])
def test_slots_with_a_target_come_first(tokens, chunk):
    targets = np.array([-1, 3, 0, -1, -1, 5, 7, -1, 2, -1, -1, 1])
    slots, positions, count = slots_with_target(jnp.asarray(targets), chunk)
    (expected,) = np.nonzero(targets >= 0)
    assert count == len(expected) and slots.size % chunk == 0
    np.testing.assert_array_equal(slots[:count], expected)
    # Slots past the last target point behind the row
    np.testing.assert_array_equal(slots[count:], tokens)
    np.testing.assert_array_equal(np.asarray(positions)[expected], np.arange(count))
    assert (np.asarray(positions)[targets < 0] >= slots.size).all()


# ---------------------------------------------------------------------------- work, memory, communication


def compiled(slots, vocabulary, chunk, layout, axes=UNTIED, wanted=(0, 1), dtype=np.float32):
    """The compiled loss with its gradients by hidden states (0) and head (1), as `wanted`."""
    matrix = (WIDTH, vocabulary) if axes == UNTIED else (vocabulary, WIDTH)
    shapes = (
        jax.ShapeDtypeStruct((layout.groups, slots, WIDTH), dtype, sharding=layout.rows),
        jax.ShapeDtypeStruct(matrix, np.float32, sharding=layout.sharding(axes)),
        jax.ShapeDtypeStruct((layout.groups, slots), np.int32, sharding=layout.rows),
    )

    def loss(hidden, matrix, targets):
        return token_losses(hidden, OutputHead(matrix, axes), targets, chunk, layout).total

    def run(*arguments):
        if not wanted:
            return loss(*arguments)
        total, grads = jax.value_and_grad(loss, argnums=wanted)(*arguments)
        shardings = [leaf.sharding for leaf in shapes]
        return total, [
            jax.lax.with_sharding_constraint(grad, shardings[argument])
            for grad, argument in zip(grads, wanted, strict=True)
        ]

    return jax.jit(run).lower(*shapes).compile()


@pytest.mark.parametrize("axes", [UNTIED, TIED], ids=["head", "embedding"])
def test_neither_logits_of_a_row_nor_a_second_table_exist(axes):
    slots = 2048
    vocabulary = 150_000
    chunk = 16
    program = compiled(slots, vocabulary, chunk, WHOLE, axes)
    logits = chunk * vocabulary * 4
    head = WIDTH * vocabulary * 4
    # Besides the returned gradient: one chunk's product and the running sum, as large as the head
    assert program.memory_analysis().temp_size_in_bytes < 6 * logits + 2.5 * head
    text = program.as_text()
    # Only arrays of a chunk's logits are in the program
    assert f"{chunk},{vocabulary}]" in text and f"{slots},{vocabulary}]" not in text


@pytest.mark.parametrize("wanted, products", [((), 1), ((0,), 2), ((1,), 2), ((0, 1), 3)])
def test_nothing_is_computed_twice_or_for_nobody(wanted, products):
    """The loss takes one product with the head, and each gradient one more from the same logits."""
    text = compiled(64, 1000, 16, WHOLE, wanted=wanted).as_text()
    product_lines = [line for line in text.splitlines() if re.search(r" dot\(|matmul", line)]
    assert len(product_lines) == products


@pytest.mark.parametrize("axes", [UNTIED, TIED], ids=["head", "embedding"])
def test_the_heads_gradient_goes_to_those_who_hold_it_once(axes):
    """The gradient is reduced and scattered over `fsdp`, then added up over replicas.

    Nothing else that is sent is as large.
    """
    vocabulary = 1000
    text = compiled(256, vocabulary, 16, SPLIT, axes, dtype=jnp.bfloat16).as_text()
    assert "16,1000]" not in text, "logits stay split over the vocabulary"
    head_shard = WIDTH * vocabulary // 2  # elements on a device, with half of the vocabulary
    transfers = [
        (sent.operation, sent.dtype, sent.bytes, sent.group_size, sent.trips)
        for sent in collectives(parse(text), 8)
        if sent.bytes >= head_shard * 2 // 2
    ]
    # XLA's CPU backend may gather bfloat16 arrays in float32
    assert sorted(transfers) == [
        (
            "all-gather",
            transfers[0][1],
            head_shard * (2 if transfers[0][1] == "bf16" else 4),
            2,
            1,
        ),
        ("all-reduce", "f32", head_shard * 4 // 2, 2, 1),
        ("reduce-scatter", "f32", head_shard * 4, 2, 1),
    ]


def test_any_number_of_targets_runs_in_one_program():
    """The number of targets is data: no other number compiles another program."""
    layout = SPLIT
    run = jax.jit(
        lambda hidden, matrix, targets: token_losses(
            hidden, OutputHead(matrix, UNTIED), targets, 16, layout
        )
    )
    for filled in FILLED:
        hidden, head, targets = draw(filled=filled)
        run(hidden.astype(np.float32), head.astype(np.float32), targets)
    assert run._cache_size() == 1


@pytest.mark.parametrize(
    ("tokens", "largest", "size"),
    [(64, 16, 16), (64, 100, 64), (4096, 500, 500), (4096, 4096, 512), (1024, 512, 128), (7, 3, 3)],
)
def test_chunks_are_an_eighth_of_a_row_or_as_large_as_is_allowed(tokens, largest, size):
    assert chunk_size(tokens, largest) == size


# ---------------------------------------------------------------------------- sums


def draw_rows(seed, segments_per_row=6, sources=3):
    """Losses, hits, counted tokens, segments and the source of each segment.

    Some segments are empty, segment 3 has no target, and segment 2 is predicted without an error.
    """
    rng = np.random.default_rng(seed)
    segments = np.sort(rng.integers(0, segments_per_row, (RANKS, SLOTS)), axis=1)
    segments[1] = 0
    source_of = rng.integers(0, sources, (RANKS, segments_per_row))
    for row, row_sources in zip(segments, source_of, strict=True):
        row_sources[row.max() :] = -1
    counted = (rng.random(segments.shape) < 0.5) & (segments > 0) & (segments != 3)
    hits = (rng.random(segments.shape) < 0.9) & counted
    hits[segments == 2] = counted[segments == 2]
    losses = np.where(counted, rng.random(segments.shape), 0).astype(np.float32)
    return losses, hits, counted, segments.astype(np.int32), source_of.astype(np.int32)


@pytest.mark.parametrize("layout", [WHOLE, SPLIT], ids=["one_rank", "four_ranks"])
def test_sums_by_source_equal_a_loop(layout):
    arrays = [x[: layout.ranks] for x in draw_rows(0)]
    losses, hits, counted, segments, source_of = arrays
    expected = Sums(*np.zeros((4, layout.ranks, 3)))
    for rank in range(layout.ranks):
        for number, source in enumerate(source_of[rank], start=1):
            in_segment = counted[rank] & (segments[rank] == number)
            if in_segment.any():
                expected.loss[rank, source] += losses[rank][in_segment].sum(dtype=float)
                expected.targets[rank, source] += in_segment.sum()
                expected.exact[rank, source] += hits[rank][in_segment].all()
                expected.examples[rank, source] += 1
    actual = jax.jit(sums_by_source, static_argnums=(0, 1))(layout, 3, *arrays)
    assert expected.exact.sum() < expected.examples.sum() and expected.exact.any()
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-6)
    for name in ("targets", "exact", "examples"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)
    assert actual.loss.sharding.is_equivalent_to(layout.rows, 2)


def test_a_failure_spreads_over_its_example_alone():
    """A failed token fails the slots of its segment in its row, and no others."""
    segments = np.zeros((RANKS, SLOTS), np.int32)
    segments[:, 4:20], segments[:, 20:50] = 1, 2
    segments[2, 50:60] = 3
    failed = np.zeros(segments.shape, bool)
    failed[0, 30], failed[2, 59], failed[2, 4] = True, True, True
    got = jax.jit(failed_examples, static_argnums=(0, 3))(SPLIT, failed, segments, 3)
    want = np.zeros_like(failed)
    want[0, 20:50], want[2, 4:20], want[2, 50:60] = True, True, True
    np.testing.assert_array_equal(got, want)
