"""Running averages of trained parameters (`components.*.ema`): what evaluations and drawing use.

    average += max(1 - ema, 9 / (10 + steps before)) * (parameter - average)        after every update

Averages begin as copies of the parameters. Steps are those of the run, even if averages begin later
in it. The second term makes averages soon forget where they began, whatever `ema` is: early on, the
average is over about the last ninth of all updates, as with the decay min(ema, (1 + k) / (10 + k))
of TensorFlow's moving averages. A skipped update moves no average.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxmllm.trainable import Params


def averaged_dtype(param_dtype: Any) -> jnp.dtype:
    """Type of the averages of parameters of type `param_dtype`: fewer bits than float32 has would
    lose small steps."""
    return jnp.dtype(jnp.promote_types(param_dtype, jnp.float32))


def first_averages(trained: Params, ema: Mapping[str, float]) -> Params:
    """Averages before the first update: copies of trained parameters, of components with `ema`."""
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
      updates: steps of the run before this update.
      usable: whether the update was not skipped.
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
    """The parameters, with averages in place of those that have any."""
    replaced = {}
    for name, average in averages.items():
        if isinstance(average, dict):
            replaced[name] = with_averages(params[name], average)
        else:
            replaced[name] = average
    return params | replaced
