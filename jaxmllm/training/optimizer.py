"""AdamW over the trainable components, with one schedule scaled per component."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxmllm.config import OptimizerConfig

UNDECAYED = ("bias", "scale", "embedding")  # endings of parameter names


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Adam with decoupled weight decay (arXiv 1711.05101), before the learning rate is applied."""
    return optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=_decayed),
    )


def learning_rate(config: OptimizerConfig, steps: int, step: Int[Array, ""]) -> Float[Array, ""]:
    """Linear warm-up, then constant or cosine decay to `final_scale` at the last step."""
    peak = config.learning_rate
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        after = optax.cosine_decay_schedule(peak, max(1, steps - config.warmup_steps), config.final_scale)
    warmup = optax.linear_schedule(peak / max(1, config.warmup_steps), peak, max(1, config.warmup_steps))
    return jnp.asarray(optax.join_schedules([warmup, after], [config.warmup_steps])(step))


def clip_by_norm(grads: Any, norm: Float[Array, ""], limit: float | None) -> Any:
    """Scale gradients so that their global norm, given, is at most `limit`."""
    if limit is None:
        return grads
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


def _decayed(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: not str(path[-1].key).endswith(UNDECAYED), params)
