import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmllm.training.objectives.tokens import (
    Sums,
    chunk_size,
    failed_examples,
    sums_by_source,
    token_losses,
)
from sharding.mesh import make_mesh
from sharding.rules import make_layout

RANKS, SLOTS, WIDTH, VOCABULARY = 4, 64, 16, 50
SPLIT = make_layout(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
WHOLE = make_layout(make_mesh({"data": 1}, jax.devices()[:1]))


def draw(seed=0, ranks=RANKS, slots=SLOTS, vocabulary=VOCABULARY, scale=1.0):
    """hidden, head, targets (a third -1) and the cotangent of the losses."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, vocabulary, (ranks, slots))
    targets[rng.random(targets.shape) < 1 / 3] = -1
    hidden = rng.standard_normal((ranks, slots, WIDTH)) * scale
    return (
        hidden,
        rng.standard_normal((WIDTH, vocabulary)),
        targets,
        rng.standard_normal((ranks, slots)),
    )


def dense(hidden, head, targets, d_losses):
    """Losses, hits and both gradients from the whole matrix of logits, token by token."""
    losses, hits = np.zeros(targets.shape), np.zeros(targets.shape, bool)
    d_hidden, d_head = np.zeros_like(hidden), np.zeros_like(head)
    for i in zip(*np.nonzero(targets >= 0), strict=True):
        logits = hidden[i] @ head
        probability = np.exp(logits - logits.max())
        probability /= probability.sum()
        losses[i] = logits.max() - logits[targets[i]] + np.log(np.exp(logits - logits.max()).sum())
        hits[i] = logits.argmax() == targets[i]
        d_logits = d_losses[i] * (probability - np.eye(len(logits))[targets[i]])
        d_hidden[i], d_head = head @ d_logits, d_head + np.outer(hidden[i], d_logits)
    return losses, hits, d_hidden, d_head


def vjp(inputs, chunk, layout, dtype):
    hidden, head, targets, d_losses = inputs

    @jax.jit
    def run(hidden, head, targets, d_losses):
        losses, pullback, hits = jax.vjp(
            lambda h, w: token_losses(h, w, targets, chunk, layout), hidden, head, has_aux=True
        )
        return losses, hits, *pullback(d_losses)

    wide = jnp.promote_types(dtype, jnp.float32)
    return run(hidden.astype(dtype), head.astype(dtype), targets, d_losses.astype(wide))


@pytest.mark.parametrize("layout", [WHOLE, SPLIT], ids=["whole", "split"])
def test_equals_dense_cross_entropy_in_float64(layout):
    with jax.enable_x64(True):
        for got, want in zip(vjp(draw(), 16, layout, np.float64), dense(*draw()), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [8, SLOTS])
def test_chunks_do_not_matter(chunk):
    for got, want in zip(vjp(draw(1), chunk, SPLIT, np.float32), dense(*draw(1)), strict=True):
        assert got.dtype in (np.float32, bool)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_bfloat16_sums_in_float32():
    inputs = draw(2)
    losses, hits, d_hidden, d_head = vjp(inputs, 16, SPLIT, jnp.bfloat16)
    assert losses.dtype == np.float32 and d_hidden.dtype == d_head.dtype == jnp.bfloat16
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in inputs[:2]]
    want = dense(*rounded, *inputs[2:])
    # The inputs were rounded, the sums are not
    np.testing.assert_allclose(losses, want[0], atol=1e-5)
    assert (np.asarray(hits) == want[1]).mean() > 0.99
    for got, expected in ((d_hidden, want[2]), (d_head, want[3])):
        np.testing.assert_allclose(
            np.asarray(got, np.float64), expected, rtol=0, atol=0.02 * abs(expected).max()
        )


def test_large_logits_do_not_overflow():
    hidden, head, targets, d_losses = draw(3, scale=1e3)
    got = vjp((hidden, head, targets, d_losses), 16, WHOLE, np.float32)
    assert all(np.isfinite(x).all() for x in got)
    np.testing.assert_allclose(
        got[0], dense(hidden, head, targets, d_losses)[0], rtol=1e-4, atol=1e-2
    )


def test_tokens_without_a_target_have_neither_loss_nor_gradient():
    hidden, head, targets, d_losses = draw(4)
    targets[:2] = -1
    hidden[:2] = 1e30  # nor may they spoil the others, whatever they are
    losses, hits, d_hidden, d_head = vjp((hidden, head, targets, d_losses), 16, SPLIT, np.float32)
    masked = targets < 0
    assert not losses[masked].any() and not hits[masked].any() and not d_hidden[masked].any()
    want = dense(hidden[2:], head, targets[2:], d_losses[2:])[3]
    np.testing.assert_allclose(d_head, want, rtol=0, atol=2e-5)


# ---------------------------------------------------------------------------- memory and communication


def compiled_gradient(slots, vocabulary, chunk, layout):
    shapes = (
        jax.ShapeDtypeStruct((layout.ranks, slots, WIDTH), np.float32, sharding=layout.rows),
        jax.ShapeDtypeStruct(
            (WIDTH, vocabulary), np.float32, sharding=layout.sharding((None, "vocab"))
        ),
        jax.ShapeDtypeStruct((layout.ranks, slots), np.int32, sharding=layout.rows),
    )

    def loss(hidden, head, targets):
        return token_losses(hidden, head, targets, chunk, layout)[0].sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile()


def test_the_logits_of_a_row_never_exist():
    slots, vocabulary, chunk = 2048, 150_000, 16
    program = compiled_gradient(slots, vocabulary, chunk, WHOLE)
    logits = slots * vocabulary * 4
    head = WIDTH * vocabulary * 4
    assert (
        program.memory_analysis().temp_size_in_bytes
        < 6 * (chunk * vocabulary * 4 + head)
        < logits / 8
    )
    text = program.as_text()
    assert f"{chunk},{vocabulary}]" in text and f"{slots},{vocabulary}]" not in text


def test_the_heads_gradient_is_reduced_once():
    """Not in the loop over chunks: it is the largest array of the program."""
    text = compiled_gradient(64, 1000, 16, SPLIT).as_text()
    reduced = [
        line for line in text.splitlines() if f"[{WIDTH},500]" in line and "all-reduce(" in line
    ]
    assert len(reduced) == 1 and "while/body" not in reduced[0]
    assert "16,1000]" not in text, "logits stay split over the vocabulary"


@pytest.mark.parametrize(
    ("capacity", "largest", "size"),
    [(64, 16, 16), (64, 100, 64), (96, 64, 48), (4096, 500, 256), (7, 3, 1)],
)
def test_chunk_size_is_the_largest_divisor_that_fits(capacity, largest, size):
    assert chunk_size(capacity, largest) == size


# ---------------------------------------------------------------------------- sums


def draw_rows(seed, segments_per_row=6, sources=3):
    """losses, hits, counted, segments and the source of each segment; some segments are empty or without target."""
    rng = np.random.default_rng(seed)
    segments = np.sort(rng.integers(0, segments_per_row, (RANKS, SLOTS)), axis=1)
    segments[1] = 0
    source_of = rng.integers(0, sources, (RANKS, segments_per_row))
    for row, own in zip(segments, source_of, strict=True):
        own[row.max() :] = -1
    counted = (rng.random(segments.shape) < 0.5) & (segments > 0) & (segments != 3)
    hits = (rng.random(segments.shape) < 0.9) & counted
    hits[segments == 2] = counted[segments == 2]
    losses = np.where(counted, rng.random(segments.shape), 0).astype(np.float32)
    return losses, hits, counted, segments.astype(np.int32), source_of.astype(np.int32)


@pytest.mark.parametrize("layout", [WHOLE, SPLIT], ids=["one_rank", "four_ranks"])
def test_sums_by_source_equal_a_loop(layout):
    arrays = [x[: layout.ranks] for x in draw_rows(0)]
    losses, hits, counted, segments, source_of = arrays
    want = Sums(*np.zeros((4, layout.ranks, 3)))
    for rank in range(layout.ranks):
        for number, source in enumerate(source_of[rank], start=1):
            own = counted[rank] & (segments[rank] == number)
            if own.any():
                want.loss[rank, source] += losses[rank][own].sum(dtype=float)
                want.targets[rank, source] += own.sum()
                want.exact[rank, source] += hits[rank][own].all()
                want.examples[rank, source] += 1
    got = jax.jit(sums_by_source, static_argnums=(0, 1))(layout, 3, *arrays)
    assert want.exact.sum() < want.examples.sum() and want.exact.any()
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-6)
    for name in ("targets", "exact", "examples"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    assert got.loss.sharding.is_equivalent_to(layout.rows, 2)


def test_a_failure_spreads_over_its_example_alone():
    segments = np.zeros((RANKS, SLOTS), np.int32)
    segments[:, 4:20], segments[:, 20:50] = 1, 2
    segments[2, 50:60] = 3
    failed = np.zeros(segments.shape, bool)
    failed[0, 30], failed[2, 59], failed[2, 4] = True, True, True
    got = jax.jit(failed_examples, static_argnums=(0, 3))(SPLIT, failed, segments, 3)
    want = np.zeros_like(failed)
    want[0, 20:50], want[2, 4:20], want[2, 50:60] = True, True, True
    np.testing.assert_array_equal(got, want)
