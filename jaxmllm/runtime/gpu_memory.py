"""Share of a GPU's memory that a run takes. Imports no jax, so that planning for absent devices
need not import it either."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

# Share that JAX reserves when it starts, and from which it serves programs. The rest is for memory
# that JAX does not manage: the driver, graphs of kernels, and NCCL, some GB on a large GPU. JAX's
# default is 0.75, which leaves 20 of 80 GB unused.
TAKEN_SHARE: Final = 0.9
# JAX refuses to start if both are set
VARIABLES: Final = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def take_gpu_memory(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let JAX reserve `TAKEN_SHARE` of every GPU, unless the environment sets the share; call it
    before anything asks JAX for devices."""
    if not any(environment.get(name) for name in VARIABLES):
        environment[VARIABLES[0]] = str(TAKEN_SHARE)
