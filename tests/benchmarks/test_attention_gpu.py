import numpy as np
import pytest

from benchmarks import attention_gpu


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["attention_gpu"])
    assert attention_gpu.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("documents", "tiles"), [(1, 36), (2, 20), (8, 8)])
def test_counts_visible_tiles(documents, tiles):
    assert attention_gpu.equal_documents(128, documents, 16)[1] == tiles


def test_measures_and_compares_what_cudnn_sees_too(monkeypatch):
    """Small, interpreted, with the dense form of XLA in place of cuDNN's."""
    dense = attention_gpu.jax.nn.dot_product_attention
    monkeypatch.setattr(
        attention_gpu.jax.nn, "dot_product_attention", lambda *x, **y: dense(*x, is_causal=True)
    )
    monkeypatch.setattr(attention_gpu, "CALLS", 1)
    inputs = attention_gpu.random_inputs(np.random.default_rng(0), 64, 2, 1, 16)
    mask, tiles = attention_gpu.equal_documents(64, 2, 16)
    wants = attention_gpu.in_float32(mask, inputs)
    attends = attention_gpu.attends(mask, 2)
    for name in ("gpu", "packed", "cudnn"):
        seconds, results = attention_gpu.measure(attends[name], inputs, 1)
        error = attention_gpu.errors(results, wants)
        assert all(0 < x < 0.02 for x in error.values()), (name, error)
        row = attention_gpu.record(name, 64, 2, tiles, seconds, error)
        assert sorted(row) == sorted(attention_gpu.COLUMNS)
        assert row["backward TFLOP/s"] == pytest.approx(
            10 * 32 * 128 * 128**2 * tiles / seconds["backward"] / 1e12
        )
