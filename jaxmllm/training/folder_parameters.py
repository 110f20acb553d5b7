"""Parameters of a published folder, read into shards: each process reads what its devices hold.

The host holds one slice at a time, and reads it once for all devices that hold the same slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxmllm.families.model_folder import Fit, ModelFolder
from jaxmllm.families.weight_files import FolderError
from jaxmllm.phases import LANGUAGE
from jaxmllm.runtime.agreement import agreed_problem
from jaxmllm.trainable import leaves_by_path


def read_folder(
    source: str, abstract: Mapping[str, Any], component: str = LANGUAGE
) -> dict[str, Any]:
    """The parameters of a component in a published folder.

    Raises `FolderError` in every process if the tensors are not those of this component.

    Args:
      abstract: shapes, types and shardings of the parameters, as nested dicts.
    """
    problem = None
    arrays = None
    try:
        leaves = dict(leaves_by_path(abstract))
        folder = ModelFolder.open(source, component)
        fit = folder.check({path: leaf.shape for path, leaf in leaves.items()})
        arrays = {path: _read_parameter(fit, path, leaf) for path, leaf in leaves.items()}
    except FolderError as error:
        problem = str(error)
    # Every process gets here, even after a failure, because the others wait for its answer.
    if problem := agreed_problem(problem):
        raise FolderError(problem)
    assert arrays is not None
    tree: dict[str, Any] = unflatten_dict(arrays, sep=".")
    return tree


def _read_parameter(fit: Fit, path: str, leaf: Any) -> jax.Array:
    """One parameter, slice by slice."""
    # The devices of this process that hold each slice, by its (start, stop) in every dimension
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(
            extent.indices(size)[:2] for extent, size in zip(index, leaf.shape, strict=True)
        )
        devices.setdefault(bounds, []).append(device)
    pieces = []
    for bounds, holders in devices.items():
        values = fit.part(path, tuple(slice(*pair) for pair in bounds), np.dtype(leaf.dtype))
        pieces += [jax.device_put(values, device) for device in holders]
        jax.block_until_ready(pieces[-1])  # else all slices would be on the host at once
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)
