"""The count of compilations: one per shape, including those ahead of time."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmllm.runtime.compilations import CompilationCounter


def test_one_compilation_per_shape_and_none_for_repeats() -> None:
    inputs = [jax.device_put(np.ones(size, np.float32)) for size in (4, 4, 6, 4, 6)]
    counter = CompilationCounter()
    double = jax.jit(lambda x: x * 2)
    counts = []
    for x in inputs:
        double(x).block_until_ready()
        counts.append(counter.count)
    assert counts == [1, 1, 2, 2, 2]

    def triple(x: jax.Array) -> jax.Array:
        return x * 3

    compiled = jax.jit(triple).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()
    assert counter.count == 3
    for _ in range(3):
        compiled(inputs[0]).block_until_ready()
    assert counter.count == 3
    assert counter.names[-1] == "jit(triple)"
    assert counter.seconds > 0
    counter.close()
    jax.jit(lambda x: x - 1)(inputs[0])
    assert counter.count == 3
