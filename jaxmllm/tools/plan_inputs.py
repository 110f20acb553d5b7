"""The input of planning: a config with what it leaves open, devices of a cluster, and lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmllm.balance.costs.calibration import load_calibration
from jaxmllm.balance.records import Mode
from jaxmllm.cluster.clusters import Cluster
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.cluster.search.cluster_mesh import cluster_mesh, with_gather_price, with_nodes
from jaxmllm.cluster.search.layouts import LengthsOf
from jaxmllm.cluster.search.mesh_choices import AXES, MeshChoice
from jaxmllm.cluster.search.sieves import Planner
from jaxmllm.config.read import config_tree, parse_config
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.data.batches import Segment
from jaxmllm.data.text.load import load_tokenizer
from jaxmllm.setup.prepare import trained_model
from jaxmllm.setup.sizing import model_flops
from jaxmllm.tools.plan_lengths import DataLengths, MadeUpLengths, planned_steps
from jaxmllm.tools.workload import DEFAULT_MIX
from sharding.mesh import mesh_shape


def make_planner(
    config: Config,
    cluster: Cluster,
    devices: int,
    seed: int | None,
    steps: Sequence[int] | None = None,
    mix: Mapping[str, float] = DEFAULT_MIX,
    history: Sequence[Segment] = (),
    priced: bool = True,
) -> Planner:
    """A planner on a config's data, or (with a seed) on generated lengths.

    Args:
      steps: numbers of the batches of the data that are planned; None: the first few.
      mix: weights of the tasks of generated lengths.
      history: batch sizes and weights of the data's steps up to these; empty: always those of the
        config.
      priced: whether rows that ranks share have the price of the cluster where the config names
        none, instead of that of a run.

    Raises:
      ConfigError: the config cannot be planned.
      ClusterError: the cluster has no peak.
    """
    config = with_nodes(config, cluster, devices)
    logged_peak = config.logging.peak_flops
    device = Device(
        cluster,
        cluster.efficiency.share,
        dtype=_product_dtype(config),
        said_peak=None if logged_peak == "auto" else logged_peak,
    )
    if priced:
        config = with_gather_price(config, device)
    tokenizer = load_tokenizer(config.data)
    # The model is built for its shapes alone, so all devices are on the axis `data`; the planner
    # searches for the mesh.
    sizes = dict.fromkeys(AXES, 1) | {"data": devices}
    mesh = cluster_mesh(config, sizes, cluster)
    open_config = config.model_copy(update={"components": _default_layouts(config)})
    model = trained_model(open_config, tokenizer, mesh)
    lengths: LengthsOf = (
        DataLengths(tokenizer, steps or range(planned_steps(config.data.batch_size)), history)
        if seed is None
        else MadeUpLengths(seed, mix)
    )
    planner = Planner(config, model, device, lengths)
    _check_calibration(planner, devices)
    return planner


def _default_layouts(config: Config) -> Any:
    """Components with default layouts, because shapes are made on a mesh that has only `data`."""
    towers = {
        name: getattr(config.components, name).model_copy(update={"layout": {}})
        for name in config.model.phases
    }
    return config.components.model_copy(update=towers)


def _product_dtype(config: Config) -> str:
    """Compute dtype of the decoder's products."""
    return str(config.components.language.compute_dtype)


def _check_calibration(planner: Planner, devices: int) -> None:
    """Raise `ConfigError` for a calibration that was measured on something else."""
    path = planner.config.balance.calibration
    if path is None:
        return
    flops = model_flops(planner.config, planner.model)
    calibration = load_calibration(path, flops)
    kind = planner.cluster.device_kind or None
    dtypes = {phase: getattr(planner.config.components, phase).compute_dtype for phase in flops}
    differences = calibration.differences(kind, flops, dtypes)
    measured = math.prod(calibration.mesh.values())
    if measured != devices:
        differences.append(f"was measured on {measured} devices, but there are {devices}")
    if differences:
        raise ConfigError(
            f"balance.calibration: {path} {' and '.join(differences)}; calibrate there, or set balance.calibration=null"
        )


def notes(planner: Planner) -> list[str]:
    """Lines about the batches that the user should know."""
    empty = [phase for phase, load in planner.loads.items() if not load.slots]
    return [
        f"no {phase} items in the sampled batches: its rows are as small as they may be; sample data that have some, "
        f"or leave model.{phase} out"
        for phase in empty
    ]


def settle(config: Config, devices: int, mode: Mode) -> tuple[Config, MeshChoice]:
    """The config with only rows left open, and its mesh.

    Raises:
      ConfigError: this mode does not have the config's rows.
      MeshError: the config's mesh has another number of devices.
    """
    sizes = config.mesh_sizes
    shape = dict(zip(sizes, mesh_shape(sizes, devices), strict=True))
    data, fsdp, context, tensor = (shape[axis] for axis in AXES)
    choice = MeshChoice(data, fsdp, context, tensor, stages=config.pipeline.stages)
    tree = config_tree(config)
    tree["mesh"] = choice.sizes
    tree["balance"]["mode"] = mode
    return parse_config(tree, "the config"), choice
