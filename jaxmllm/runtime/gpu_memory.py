"""How much of a GPU's memory a run takes. Imports no jax, so that planning for devices that are not there need not."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

# What JAX takes when it starts, of which it gives programs theirs. The rest is for what does not ask JAX: the driver,
# graphs of kernels, and NCCL, some GB on a large GPU. JAX's own is 0.75, which leaves 20 of 80 GB to nobody.
TAKEN_SHARE: Final = 0.9
# JAX refuses both at once
VARIABLES: Final = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def take_gpu_memory(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let JAX take `TAKEN_SHARE` of every GPU, unless the environment says what it takes; call it before anything asks
    JAX for devices."""
    if not any(environment.get(name) for name in VARIABLES):
        environment[VARIABLES[0]] = str(TAKEN_SHARE)
