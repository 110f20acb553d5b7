"""The table of bytes on a device, against counts from shapes and shardings alone."""

import jax
import pytest

from benchmarks.thinker_bytes import MESHES, MODELS, PARTS, bytes_of, programs_of, thinker
from jaxmllm.setup.planning_mesh import planning_mesh
from jaxmllm.tools.generated_lengths import generated_lengths
from jaxmllm.training.programs.base import ProgramName
from tests.support import slow_cases

CASES = {f"{model}, {mesh}": (model, mesh) for model in MODELS for mesh in MESHES}
# Parameters with a vocabulary of 152,064 and without talkers
NUMBERS = {"qwen2.5-omni-7b": 8_931_806_720, "qwen3-omni-30b-a3b": 31_719_205_488}


def shard_numbers(leaf: jax.ShapeDtypeStruct) -> int:
    """How many numbers of a leaf one device holds, by the mesh axes of its spec."""
    shards = 1
    for axes in leaf.sharding.spec:
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            shards *= leaf.sharding.mesh.shape[axis]
    assert leaf.size % shards == 0
    return leaf.size // shards


@pytest.mark.parametrize(
    ("name", "mesh"), slow_cases(CASES, always=("qwen3-omni-30b-a3b, fsdp 4 x tensor 2",))
)
def test_sums_are_those_of_the_shapes(name, mesh):
    config = thinker(name, mesh)
    programs = programs_of(generated_lengths(config, planning_mesh(config), 0))
    counted = bytes_of(programs)
    assert counted.keys() == {*PARTS}
    leaves = jax.tree.leaves(programs.params)
    assert sum(leaf.size for leaf in leaves) == NUMBERS[name]
    parameters = sum(map(shard_numbers, leaves))
    assert counted["parameters"] == counted["gradients"] == 4 * parameters
    language = config.model.language
    by_expert = 0 if language.experts is None else 4 * language.layers * language.experts.count
    counters = counted["optimizer"] - 2 * counted["parameters"] - by_expert
    assert 0 <= counters < 100, "two moments, counts of tokens by expert, and of updates"
    # Nearly all parameters are split over all eight devices
    assert NUMBERS[name] / 8 <= parameters < 1.01 * NUMBERS[name] / 8
    kept_bytes = 0
    for phase in config.model.encoders:
        capacity, span = max(programs.spec.phases[phase].classes)
        _, leaves, _ = programs.jobs[ProgramName("encode", phase, capacity, span)].result
        residual_bytes = sum(
            shard_numbers(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves)
        )
        kept_bytes += max(programs.kept_residuals[phase], 1) * residual_bytes
    assert counted["kept"] == kept_bytes
