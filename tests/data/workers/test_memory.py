"""Values cross from process to process bit by bit, and their shared memory is freed with them."""

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
    received = attach(share(array))
    assert received.dtype == array.dtype and received.shape == array.shape
    np.testing.assert_array_equal(received, array, strict=True)


def test_nested_values_come_back_through_a_socket():
    value = {
        "rows": [{name: array} for name, array in ARRAYS.items()],
        "counts": (1, 2.5, "x", None),
    }
    sender, receiver = socket.socketpair()
    with sender, receiver:
        descriptor = share(value)
        send(sender, descriptor)
        os.close(descriptor)
        received = attach(receive(receiver))
    assert received["counts"] == value["counts"]
    for row, expected in zip(received["rows"], value["rows"], strict=True):
        assert row.keys() == expected.keys()
        jax.tree.map(np.testing.assert_array_equal, row, expected)


def test_systems_without_anonymous_memory_use_files_without_names(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    received = attach(share(ARRAYS))
    jax.tree.map(np.testing.assert_array_equal, received, ARRAYS)
    assert not os.listdir(tmp_path)


def test_a_closed_socket_is_an_error_and_not_a_wait():
    receiver, sender = socket.socketpair()
    with receiver:
        sender.close()
        with pytest.raises(EOFError):
            receive(receiver)


def test_arrays_are_aligned_and_their_readers_own():
    descriptor = share([np.arange(3, dtype=np.int8), np.arange(5, dtype=np.int8)])
    arrays = attach(os.dup(descriptor))
    other_arrays = attach(descriptor)
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in (*arrays, *other_arrays))
    # Both readers map the same memory, yet a write of one is private to it.
    arrays[1][:] = -1
    assert other_arrays[1].tolist() == [0, 1, 2, 3, 4]


def test_memory_and_descriptors_last_as_long_as_the_arrays():
    def held() -> tuple[int, int]:
        """The numbers of open descriptors and of mapped segments."""
        gc.collect()
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(
            "jaxmllm"
        )

    held_before = held()
    arrays = attach(share([np.zeros(1 << 20, np.uint8), np.arange(9)]))
    assert held()[1] > held_before[1]
    # A view keeps the memory alive as long as the array itself would.
    view = arrays[1][3:]
    del arrays
    assert view.tolist() == [3, 4, 5, 6, 7, 8] and held()[1] > held_before[1]
    del view
    assert held() == held_before


def test_what_cannot_be_sent_leaves_no_memory():
    descriptors_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((AttributeError, TypeError)):
        share([np.zeros(9), lambda: None])
    assert len(os.listdir("/proc/self/fd")) == descriptors_before


def test_device_arrays_outlive_the_memory_they_were_put_from():
    """XLA on CPU reads aligned numpy arrays in place, so the memory must stay until the device
    array goes."""
    expected = [np.full(1 << 16, value, np.float32) for value in range(8)]
    on_device = []
    for array in expected:
        (received,) = attach(share([array]))
        on_device.append(jax.device_put(received))
        del received
    gc.collect()
    # New shared memory, which would take the pages of any array that was freed too early.
    later_shares = [attach(share(np.full(1 << 18, -1, np.int8))) for _ in range(8)]
    for array, expected_array in zip(on_device, expected, strict=True):
        np.testing.assert_array_equal(array, expected_array)
    assert len(later_shares) == 8
