"""Values in anonymous shared memory: arrays reach another process without a copy, and no memory can
outlive the processes.

    value --pickle--> bytes, arrays --share--> one block of memory
                                                  | its descriptor, over a socket
    value, whose arrays are views  <--attach--  the same block

A block has no name: it is freed when the last process that holds it ends, however that happens, and
it does not count against a limit on /dev/shm. Pickle is safe here because both ends are processes
of one run, and no file ever holds a pickle.
"""

from __future__ import annotations

import array
import itertools
import mmap
import os
import pickle
import socket
import tempfile
from typing import Any

from jaxmllm.arrays import round_up

ALIGNMENT = 64  # bytes: every array starts at a cache line, so that XLA on CPU can read it in place
WORD = array.array("q").itemsize


def share(value: Any) -> int:
    """Descriptor of a new block that holds `value`; the caller closes it after sending it. Raises
    `OSError` if memory runs out."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
    header = array.array("q", [len(views), *(view.nbytes for view in views)])
    offsets, size = _buffer_layout(header[1:])
    descriptor = _anonymous_file()
    try:
        os.ftruncate(descriptor, size)
        for view, offset in zip((memoryview(header).cast("B"), *views), (0, *offsets), strict=True):
            # With `pwrite`, a lack of memory is an `OSError`; with a mapping, it is a SIGBUS.
            _write(descriptor, view, offset)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def attach(descriptor: int) -> Any:
    """The value of a block. Closes the descriptor; the memory stays for as long as the value's
    arrays do.

    Arrays are writable, but no other process sees the changes.
    """
    try:
        block = mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    view = memoryview(block)
    buffer_count = view[:WORD].cast("q")[0]
    sizes = view[WORD : WORD * (buffer_count + 1)].cast("q").tolist()
    offsets, _ = _buffer_layout(sizes)
    pickled, *buffers = (
        view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)
    )
    return pickle.loads(pickled, buffers=buffers)


def send(connection: socket.socket, descriptor: int) -> None:
    """Send a block through a Unix socket. Raises `OSError` when the other end is closed."""
    socket.send_fds(connection, [b"\0"], [descriptor])


def receive(connection: socket.socket) -> int:
    """Wait for a block's descriptor. Raises `EOFError` or `OSError` if the other end is closed, and
    `OSError` if no descriptor is left."""
    message, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not message:
        raise EOFError("the other end of the socket is closed")
    if not descriptors:
        raise OSError(
            "no descriptor is left to receive a block of memory; raise the limit of open files (ulimit -n)"
        )
    return descriptors[0]


def _buffer_layout(sizes: Any) -> tuple[list[int], int]:
    """Offsets of the buffers after the header, and the size of the block."""
    # number of buffers, sizes | pickle | array | array | ..
    # Each buffer begins at the first multiple of ALIGNMENT at or after the end of the one before.
    ends = itertools.accumulate(
        (WORD * (len(sizes) + 1), *sizes), lambda end, size: round_up(end, ALIGNMENT) + size
    )
    *ends_before, size = ends
    return [round_up(end, ALIGNMENT) for end in ends_before], size


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("jaxmllm")
    # Systems without memfd: a temporary file without a name serves as well
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(descriptor: int, view: memoryview, offset: int) -> None:
    while view.nbytes:  # the system writes at most 2 GB at a time
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written
