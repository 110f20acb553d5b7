"""One of several functions, by the platform that a program is for.

JAX knows the platform only when it lowers a program, perhaps for devices of another machine, and so traces all of
them, one after the other. Where the caller knows it, the one that counts is traced alone, which saves a third of the
time that tracing the programs of a step takes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

# Part of what JAX caches by: nothing that was traced for one platform is found for another
_platform = jax.make_user_context(None)


def traced_for(mesh: jax.sharding.Mesh) -> AbstractContextManager[None]:
    """A context in which all that is traced runs on the devices of a mesh, and nowhere else."""
    context: AbstractContextManager[None] = _platform(_lowering_platform(mesh))
    return context


def by_platform(*operands: Any, default: Callable[..., Any], **own: Callable[..., Any]) -> Any:
    """The result of the platform's own function, or of the default.

    Args:
      own: by the name of a platform to lower for: `cpu`, `cuda`, `rocm` or `tpu`.
    """
    platform = _platform.value
    if platform is None and own:
        return jax.lax.platform_dependent(*operands, default=default, **own)
    return own.get(platform, default)(*operands)


def _lowering_platform(mesh: jax.sharding.Mesh) -> str | None:
    """What JAX lowers for; None where that cannot be told.

    Devices call themselves `gpu`, be they CUDA's or ROCm's. Their client says which, in an attribute that JAX's
    lowering reads and that is private to it; should it go, all functions are traced.
    """
    device = mesh.devices.flat[0]
    platform = getattr(device.client, "_raw_platform", device.platform)
    return None if platform == "gpu" else platform
