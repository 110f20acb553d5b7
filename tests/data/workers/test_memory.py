"""Values cross from process to process bit by bit, and their memory goes when they do."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmllm.data.workers.memory import ALIGNMENT, attach, receive, send, share

ARRAYS = {
    "float32": np.arange(7, dtype=np.float32),
    "float64": np.array([np.nan, np.inf, -0.0]),
    "float16": np.ones((2, 1, 3), np.float16),
    "int32": np.arange(12, dtype=np.int32).reshape(3, 4),
    "int64": np.array([2**62, -1]),
    "int8": np.array([-128], np.int8),
    "uint8": np.arange(255, dtype=np.uint8),
    "uint16": np.array([65535], np.uint16),
    "bool": np.array([[True, False, True]]),
    "complex64": np.array([1j], np.complex64),
    "text": np.array(["a", "bcd"]),
    "empty": np.zeros(0, np.int32),
    "empty bool": np.zeros((3, 0, 2), np.bool_),
    "scalar": np.array(5, np.int32),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(10)[::3],
    "read-only": np.broadcast_to(np.int32(1), (4, 4)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_every_kind_of_array_comes_back(name):
    array = ARRAYS[name]
    found = attach(share(array))
    assert found.dtype == array.dtype and found.shape == array.shape
    np.testing.assert_array_equal(found, array, strict=True)


def test_nested_values_come_back_through_a_socket():
    value = {
        "rows": [{name: array} for name, array in ARRAYS.items()],
        "counts": (1, 2.5, "x", None),
    }
    here, there = socket.socketpair()
    with here, there:
        descriptor = share(value)
        send(here, descriptor)
        os.close(descriptor)
        found = attach(receive(there))
    assert found["counts"] == value["counts"]
    for row, expected in zip(found["rows"], value["rows"], strict=True):
        assert row.keys() == expected.keys()
        jax.tree.map(np.testing.assert_array_equal, row, expected)


def test_systems_without_anonymous_memory_use_files_without_names(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = attach(share(ARRAYS))
    jax.tree.map(np.testing.assert_array_equal, found, ARRAYS)
    assert not os.listdir(tmp_path)


def test_a_closed_socket_is_an_error_and_not_a_wait():
    here, there = socket.socketpair()
    with here:
        there.close()
        with pytest.raises(EOFError):
            receive(here)


def test_arrays_are_aligned_and_their_readers_own():
    descriptor = share([np.arange(3, dtype=np.int8), np.arange(5, dtype=np.int8)])
    one, other = attach(os.dup(descriptor)), attach(descriptor)
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in (*one, *other))
    one[1][:] = -1
    assert other[1].tolist() == [0, 1, 2, 3, 4]


def test_memory_and_descriptors_last_as_long_as_the_arrays():
    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(
            "jaxmllm"
        )

    before = held()
    arrays = attach(share([np.zeros(1 << 20, np.uint8), np.arange(9)]))
    assert held()[1] > before[1]
    part = arrays[1][3:]
    del arrays
    assert part.tolist() == [3, 4, 5, 6, 7, 8] and held()[1] > before[1]
    del part
    assert held() == before


def test_what_cannot_be_sent_leaves_no_memory():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((AttributeError, TypeError)):
        share([np.zeros(9), lambda: None])
    assert len(os.listdir("/proc/self/fd")) == before


def test_device_arrays_outlive_the_memory_they_were_put_from():
    """XLA on CPU reads aligned numpy arrays in place."""
    expected = [np.full(1 << 16, number, np.float32) for number in range(8)]
    on_device = []
    for array in expected:
        (found,) = attach(share([array]))
        on_device.append(jax.device_put(found))
        del found
    gc.collect()
    noise = [attach(share(np.full(1 << 18, -1, np.int8))) for _ in range(8)]
    for array, wanted in zip(on_device, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)
    assert len(noise) == 8
