"""The benchmark of GPU attention: its counts, and its measurements by interpreted kernels."""

import pytest

from benchmarks import attention_gpu


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["attention_gpu"])
    assert attention_gpu.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("documents", "tiles"), [(1, 36), (2, 20), (8, 8)])
def test_counts_visible_tiles(documents, tiles):
    assert attention_gpu.equal_documents(128, documents, 16)[1] == tiles


@pytest.mark.parametrize("causal", [True, False])
def test_measures_and_compares_what_cudnn_sees_too(causal, monkeypatch):
    """At small sizes, interpreted, with XLA's dense form in place of cuDNN's."""
    dense = attention_gpu.jax.nn.dot_product_attention
    monkeypatch.setattr(
        attention_gpu.jax.nn,
        "dot_product_attention",
        lambda *x, is_causal, **_: dense(*x, is_causal=is_causal),
    )
    monkeypatch.setattr(attention_gpu, "CALLS", 1)
    shape = attention_gpu.Shape(heads=2, key_heads=1, size=16, block=16, causal=causal)
    inputs = attention_gpu.random_inputs((0,), 64, shape)
    mask, tiles = attention_gpu.equal_documents(64, 2, shape.block, causal)
    expected = attention_gpu.in_float32(mask, inputs)
    attends = attention_gpu.attends(mask, 2)
    names = ("gpu", "packed", "cudnn")
    compiled = attention_gpu.compile_all([(attends[name], inputs) for name in names])
    for name, passes in zip(names, compiled, strict=True):
        measured = attention_gpu.measure(passes, inputs, 1)
        assert measured.same_bits == {"forward": True, "backward": True}
        error = attention_gpu.errors(measured.results, expected)
        assert all(0 < x < 0.02 for x in error.values()), (name, error)
        row = attention_gpu.record(name, 64, 2, tiles, measured, error, shape)
        assert sorted(row) == sorted(attention_gpu.COLUMNS)
        assert row["backward TFLOP/s"] == pytest.approx(
            10 * 2 * 16 * 16**2 * tiles / measured.seconds["backward"] / 1e12
        )
