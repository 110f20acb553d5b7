"""Bytes that a device holds, from abstract shapes and shardings; nothing is compiled.

between programs    parameters, optimizer state, gradients, pools and their gradients: `resident`
a program's own     its arguments and results: `program_bytes`, equal to what its compiler says
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmllm.training.programs.base import Job, Programs


@dataclass(frozen=True)
class Resident:
    """Bytes of one device between the programs of a step, by what they are."""

    parameters: int
    optimizer: int  # moments, counts of updates, and running averages
    gradients: int  # sums over microbatches, of one replica
    pools: int  # of encoder outputs, one of each kind
    pool_gradients: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class ProgramBytes:
    """Bytes of a program's arguments and results on one device."""

    arguments: int
    outputs: int
    aliased: int  # of the outputs, those that may take the place of arguments


def device_bytes(tree: Any) -> int:
    """Bytes of a device's shards of a tree of abstract arrays."""
    import jax

    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def resident(programs: Programs) -> Resident:
    """Bytes that a device holds throughout a step.

    Where a step needs several pools of a kind, or evaluation has its own, each takes the same
    again.
    """
    pools = getattr(programs, "pools", {})
    state = programs.state
    return Resident(
        parameters=device_bytes(state.params),
        optimizer=device_bytes(state) - device_bytes(state.params),
        gradients=device_bytes(getattr(programs, "accumulators", programs.trained)),
        pools=device_bytes(pools),
        pool_gradients=device_bytes([pool.tokens for pool in pools.values()]),
    )


def program_bytes(job: Job) -> ProgramBytes:
    """Bytes of the arguments and results of one of `Programs.jobs`. Arguments that it does not read
    are not counted, because they are not passed."""
    import jax

    traced = jax.make_jaxpr(job.function)(*job.arguments)
    used = {id(variable) for equation in traced.jaxpr.eqns for variable in equation.invars}
    used |= {id(variable) for variable in traced.jaxpr.outvars}
    read = [
        leaf
        for leaf, variable in zip(jax.tree.leaves(job.arguments), traced.jaxpr.invars, strict=True)
        if id(variable) in used
    ]
    return ProgramBytes(
        arguments=device_bytes(read),
        outputs=device_bytes(job.result),
        aliased=device_bytes([job.arguments[index] for index in job.donated]),
    )
