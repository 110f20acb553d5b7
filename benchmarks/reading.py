"""Reading a published folder into shardings: seconds, bytes and memory of each process.

    python -m benchmarks.reading [--gigabytes 2] [--processes 1 2] [--devices 8] [--dtype bfloat16] [--json PATH]

The folder is generated: a decoder like that of Qwen2.5 in bfloat16, in five files with an index. It
is read as by a run with `mesh.fsdp` over all devices, by one process and by two with half of the
devices each. Arrays of CPU devices are in the memory of the host; they are not counted as extra.

    disk      bytes that the kernel read from the files for a process, over the bytes of all
              tensors; none of them are in memory when reading begins. Pages hold neighbouring rows:
              processes of one machine share them, and where rows are split, processes of several
              machines each read whole pages
    asked     bytes that a process asks of the files, in the types stored there, over the bytes of
              all tensors
    extra     the most anonymous memory, sampled every few milliseconds, in addition to that before
              reading and to the arrays that are on devices already; over the bytes of the largest
              tensor
    mapped    the most mapped pages of the files, over the bytes of the largest tensor: the kernel
              may take them back at any time
    both      the largest sum of the two at one time, over the bytes of the largest tensor
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxmllm.config.schema import ComponentsConfig, LanguageConfig, ModelConfig
from jaxmllm.families.lines import Index, Line
from jaxmllm.families.model_folder import INDEX, ModelFolder
from jaxmllm.families.weight_files import write_tensors
from jaxmllm.models.compose import build_model
from jaxmllm.phases import LANGUAGE
from jaxmllm.runtime.distributed import initialize_distributed
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.training.folder_parameters import read_folder
from sharding.mesh import make_mesh

FILES = 5  # files of the generated folder
LAYERS = 16

PAGE = os.sysconf("SC_PAGE_SIZE")
SAMPLED_EVERY = 0.005  # seconds between samples of the memory
COUNTED = ("processes", "process", "devices", "seconds", "asked", "disk")
GENERATOR = "numpy default_rng(seed): 16 random bits per number, exponents cut to numbers below 2"
COLUMNS = [
    *("processes", "process", "devices", "seconds", "asked of folder", "disk of folder"),
    *("extra MB", "of largest tensor", "mapped MB", "of largest tensor"),
    *("both MB", "of largest tensor"),
]


# ---------------------------------------------------------------------------- a folder


def sizes_of(gigabytes: float) -> dict[str, int]:
    """The sizes in config.json for a folder of about so many gigabytes."""
    # Sides of matrices are multiples of `unit`, which is 17 for a folder of two gigabytes
    unit = max(1, round(17 * math.sqrt(gigabytes / 2)))
    return {
        "vocab_size": 4096 * unit,
        "hidden_size": 128 * unit,
        "intermediate_size": 352 * unit,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }


def make_folder(folder: Path, gigabytes: float, seed: int) -> None:
    """Write config.json, an index and files of random tensors."""
    folder.mkdir(parents=True)
    sizes = sizes_of(gigabytes) | {"model_type": "qwen2", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(sizes))
    tensors = [*shapes_of(sizes).items()]
    random = np.random.default_rng(seed)
    weight_map: dict[str, str] = {}
    total = sum(math.prod(shape) for _, shape in tensors)
    written = 0
    file_index = 0
    pending: dict[str, Any] = {}
    for tensor_index, (key, shape) in enumerate(tensors):
        # Clearing the top bit of the exponent leaves numbers below 2, none infinite
        bits = random.integers(0, 2**16, shape, np.uint16) & 0xBFFF
        pending[key] = bits.view(ml_dtypes.bfloat16)
        written += math.prod(shape)
        if written >= total * (file_index + 1) / FILES or tensor_index == len(tensors) - 1:
            name = f"model-{file_index + 1:05}-of-{FILES:05}.safetensors"
            write_tensors(folder / name, pending)
            weight_map |= dict.fromkeys(pending, name)
            pending = {}
            file_index = file_index + 1
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def shapes_of(sizes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a folder, by key."""
    width = sizes["hidden_size"]
    mlp = sizes["intermediate_size"]
    kv_width = width * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    shapes = {"model.embed_tokens.weight": (sizes["vocab_size"], width)}
    for layer in range(sizes["num_hidden_layers"]):
        layer_shapes = {
            "self_attn.q_proj.weight": (width, width),
            "self_attn.q_proj.bias": (width,),
            "self_attn.k_proj.weight": (kv_width, width),
            "self_attn.k_proj.bias": (kv_width,),
            "self_attn.v_proj.weight": (kv_width, width),
            "self_attn.v_proj.bias": (kv_width,),
            "self_attn.o_proj.weight": (width, width),
            "mlp.gate_proj.weight": (mlp, width),
            "mlp.up_proj.weight": (mlp, width),
            "mlp.down_proj.weight": (width, mlp),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    return shapes | {"model.norm.weight": (width,)}


# ---------------------------------------------------------------------------- one process


class Memory:
    """The most memory that a process takes inside `sampled`, in bytes: `extra`, `mapped`,
    `both`."""

    def __init__(self) -> None:
        self.extra = self.mapped = self.both = 0
        self._ends = threading.Event()

    @contextmanager
    def sampled(self) -> Iterator[Memory]:
        """A context in which a thread samples memory, relative to the memory at its start."""
        baseline = _memory()
        thread = threading.Thread(target=self._sample, args=baseline)
        thread.start()
        try:
            yield self
        finally:
            self._ends.set()
            thread.join()

    def _sample(self, anonymous: int, mapped: int) -> None:
        """Update the maxima until the end; the arguments are the memory before reading."""
        while not self._ends.wait(SAMPLED_EVERY):
            on_devices = device_bytes()
            memory = _memory()
            extra = memory[0] - anonymous - on_devices
            self.extra = max(self.extra, extra)
            self.mapped = max(self.mapped, memory[1] - mapped)
            self.both = max(self.both, extra + memory[1] - mapped)


def _memory() -> tuple[int, int]:
    """Resident bytes of this process, (anonymous, mapped)."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * PAGE, shared * PAGE


def device_bytes() -> int:
    """Bytes of all buffers on the devices of this process."""
    buffers = {}  # by address, because several arrays may share a buffer
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


@contextmanager
def counted() -> Iterator[list[int]]:
    """A list that gets the bytes of every slice that is asked of a folder meanwhile, in the type of
    its tensor."""
    read = Line.read
    slice_bytes = []

    def counting(
        line: Line, tensor: NDArray[Any], shape: tuple[int, ...], index: Index
    ) -> NDArray[Any]:
        values = read(line, tensor, shape, index)
        slice_bytes.append(values.nbytes)
        return values

    with mock.patch.object(Line, "read", counting):
        yield slice_bytes


def _from_disk() -> int:
    """Bytes that the kernel has read for this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def forget(folder: Path) -> None:
    """Make the kernel drop its cached pages of the files."""
    for path in folder.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())  # the kernel drops only pages that are written
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, dtype: str) -> dict[str, Any]:
    """The record of this process: what reading takes when all processes read onto all devices."""
    model_folder = ModelFolder.open(folder)
    sizes = [tensor.size for tensor in model_folder.tensors.values()]
    language = LanguageConfig(**model_folder.family.section(model_folder.config))
    mesh = make_mesh({"data": 1, "fsdp": jax.device_count()})
    vocabulary = model_folder.config.number("vocab_size")
    model = build_model(ModelConfig(language=language), vocabulary, ComponentsConfig(), mesh)
    abstract = model.abstract(dtype)[LANGUAGE]
    with Memory().sampled() as memory, counted() as slice_bytes:
        start = time.perf_counter()
        disk_before = _from_disk()
        parameters = jax.block_until_ready(read_folder(str(folder), abstract))
        seconds = time.perf_counter() - start
        disk = _from_disk() - disk_before
    del parameters
    return {
        "processes": jax.process_count(),
        "process": jax.process_index(),
        "devices": jax.local_device_count(),
        "seconds": seconds,
        "asked": sum(slice_bytes) / sum(sizes),
        "disk": disk / sum(sizes),
        "extra_bytes": memory.extra,
        "mapped_bytes": memory.mapped,
        "both_bytes": memory.both,
        "largest_tensor_bytes": max(sizes),
        "folder_bytes": sum(sizes),
    }


# ---------------------------------------------------------------------------- all processes


def run(folder: Path, processes: int, devices: int, dtype: str) -> list[dict[str, Any]]:
    """The record of each process, when all share `devices` devices. Raises `CalledProcessError`."""
    arguments = [
        sys.executable,
        "-m",
        "benchmarks.reading",
        "--folder",
        str(folder),
        "--dtype",
        dtype,
    ]
    with tempfile.TemporaryDirectory() as scratch:
        forget(folder)
        command = ["-m", "launch.local", "--processes", str(processes)]
        command += ["--devices", str(devices // processes), "--", *arguments, "--into", scratch]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        return [json.loads(path.read_text()) for path in sorted(Path(scratch).iterdir())]


def main() -> None:
    parser = measuring_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--processes", type=positive_int, nargs="+", default=[1, 2])
    parser.add_argument("--devices", type=positive_int, default=8)
    parser.add_argument(
        "--dtype", default="bfloat16", help="type of the parameters (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="read this folder instead of a made one")
    parser.add_argument(
        "--into",
        type=Path,
        help="folder where one process writes its record (used by the command itself)",
    )
    options = parser.parse_args()
    if uneven := [count for count in options.processes if options.devices % count]:
        parser.error(f"--processes {uneven[0]} cannot share --devices {options.devices} evenly")
    if options.into is not None:
        initialize_distributed()
        record = measure(options.folder, options.dtype)
        (options.into / f"{jax.process_index()}.json").write_text(json.dumps(record))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / "folder"
        if options.folder is None:
            make_folder(folder, options.gigabytes, options.seed)
        records = [
            record
            for processes in options.processes
            for record in run(folder, processes, options.devices, options.dtype)
        ]
    rows = []
    for record in records:
        largest_bytes = record["largest_tensor_bytes"]
        row = [record[key] for key in COUNTED]
        for key in ("extra_bytes", "mapped_bytes", "both_bytes"):
            row += [record[key] / 1e6, record[key] / largest_bytes]
        rows.append(row)
    size = records[0]["folder_bytes"] / 1e9
    print_table(f"Reading a folder of {size:.2f} GB as {options.dtype}", COLUMNS, rows)
    write_json(
        options.json,
        "reading",
        options.seed,
        GENERATOR,
        dtype=options.dtype,
        folder=options.folder and str(options.folder),
        rows=records,
    )


if __name__ == "__main__":
    main()
