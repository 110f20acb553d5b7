"""Running averages of trained parameters (`components.*.ema`): what evaluations and drawing use.

    average += max(1 - ema, 9 / (10 + steps before)) * (parameter - average)        after every update

They begin at the parameters, and steps are those of the run, whenever they begin. The second term lets go of
these soon, whatever `ema` is: early on, the average is over about the last ninth of all updates, as with the
decay min(ema, (1 + k) / (10 + k)) of TensorFlow's moving averages. An update that is skipped moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxmllm.trainable import Params


def averaged_dtype(param_dtype: Any) -> jnp.dtype:
    """Of the averages of parameters of type `param_dtype`: small steps are lost in fewer bits than float32 has."""
    return jnp.dtype(jnp.promote_types(param_dtype, jnp.float32))


def first_averages(trained: Params, ema: Mapping[str, float]) -> Params:
    """Averages before the first update: copies of the trained parameters of components with an `ema`."""
    return {
        name: jax.tree.map(lambda p: jnp.copy(p).astype(averaged_dtype(p.dtype)), trained[name])
        for name in sorted(ema)
    }


def moved_averages(
    averages: Params,
    trained: Params,
    ema: Mapping[str, float],
    updates: Int[Array, ""],
    usable: Bool[Array, ""],
) -> Params:
    """Averages after an update that gave the parameters `trained`.

    Args:
      updates: steps of the run before it.
      usable: whether it was not skipped.
    """
    early = 9 / (10 + updates)

    def component(name: str) -> Any:
        share = jnp.where(usable, jnp.maximum(1 - ema[name], early), 0)
        return jax.tree.map(
            lambda average, p: average + share.astype(average.dtype) * (p - average),
            averages[name],
            trained[name],
        )

    return {name: component(name) for name in averages}


def with_averages(params: Params, averages: Params) -> Params:
    """The parameters with averages, of some of them, in their place."""
    return params | {
        name: with_averages(params[name], average) if isinstance(average, dict) else average
        for name, average in averages.items()
    }
