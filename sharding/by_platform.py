"""One of several functions, chosen by the platform that a program is for.

JAX knows the platform only when it lowers a program, perhaps for devices of another machine, so it
traces all the functions, one after the other. Where the caller knows the platform, only that
platform's function is traced, which saves a third of the time that tracing a step's programs takes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

# Part of the keys of JAX's caches: nothing traced for one platform is reused for another
_platform = jax.make_user_context(None)


def traced_for(mesh: jax.sharding.Mesh) -> AbstractContextManager[None]:
    """A context in which everything that is traced will run on the devices of a mesh only."""
    context: AbstractContextManager[None] = _platform(_lowering_platform(mesh))
    return context


def traced_platform() -> str | None:
    """The platform of `traced_for`: `cpu` or `tpu`; None where it is not known, as on GPUs."""
    platform: str | None = _platform.value
    return platform


def by_platform(*operands: Any, default: Callable[..., Any], **own: Callable[..., Any]) -> Any:
    """The result of the platform's own function or, where it has none, of `default`.

    Args:
      own: functions by the name of the platform to lower for: `cpu`, `cuda`, `rocm` or `tpu`.
    """
    platform = _platform.value
    if platform is None and own:
        return jax.lax.platform_dependent(*operands, default=default, **own)
    return own.get(platform, default)(*operands)


def _lowering_platform(mesh: jax.sharding.Mesh) -> str | None:
    """The platform that JAX lowers for, or None where it is not known.

    Devices of CUDA and of ROCm both call themselves `gpu`. Their client tells them apart in a
    private attribute, which JAX's lowering reads; if JAX removes it, all functions are traced.
    """
    device = mesh.devices.flat[0]
    platform = getattr(device.client, "_raw_platform", device.platform)
    return None if platform == "gpu" else platform
