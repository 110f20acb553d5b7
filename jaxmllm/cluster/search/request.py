"""The request to a search: a config on devices of a cluster, and what all sieves read of its
batches and model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jax.sharding import AbstractMesh

from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.cluster.clusters import Cluster
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.cluster.search.cluster_mesh import cluster_mesh
from jaxmllm.cluster.search.even_step import PhaseLoad, mean_loads
from jaxmllm.cluster.search.layouts import LengthsOf, Sampled
from jaxmllm.cluster.search.mesh_choices import MeshChoice
from jaxmllm.config.schema import Config
from jaxmllm.models.mllm import MLLM
from jaxmllm.setup.sizing import model_flops, sizing_inputs
from jaxmllm.setup.spans import Spans, spans_of_phases


@dataclass(frozen=True)
class Request:
    """A config to plan.

    Attributes:
      config: as the user gave it: what is set there stays.
      model: on any mesh.
      lengths: draws the batches' lengths, and keeps what it has drawn.
      as_run: rows are chosen as a run of the config would; otherwise for the cluster, as a config
        can express them.
    """

    config: Config
    model: MLLM
    device: Device
    lengths: LengthsOf
    as_run: bool = False

    @property
    def cluster(self) -> Cluster:
        return self.device.cluster

    @property
    def budget(self) -> float:
        return self.cluster.budget

    def mesh(self, config: Config, choice: MeshChoice) -> AbstractMesh:
        """A mesh of the cluster's devices, which need not exist."""
        return cluster_mesh(config, choice.mesh_sizes, self.cluster)

    @cached_property
    def sampled(self) -> Sampled:
        """Lengths where as many ranks hold a row together as may on a mesh of ranks alone: no
        layout allows more."""
        spans = spans_of_phases(self.config, self.model)
        return self.lengths(self.config, self.model, spans)

    @cached_property
    def loads(self) -> dict[str, PhaseLoad]:
        """The mean load of a batch, by phase."""
        return mean_loads(self.sampled.steps, model_flops(self.config, self.model))

    @cached_property
    def inputs(self) -> list[SizingInputs]:
        """Inputs to choosing sizes, on any mesh."""
        sampled = self.sampled
        return sizing_inputs(
            self.config, self.model, sampled.formats, sampled.longest, self.named_spans
        )

    @property
    def named_spans(self) -> Spans:
        spans = {phase: getattr(self.config.phases, phase).spans for phase in self.model.phases}
        return {phase: (1,) if named == "auto" else named for phase, named in spans.items()}
