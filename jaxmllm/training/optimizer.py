"""AdamW over the trainable components, with one schedule scaled per component.

Each component has an optimizer state of its own, with its own count of updates: a component that is
unfrozen in the middle of a run begins with zero moments and the bias correction of a first update,
and the others are not affected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxmllm.config.schema import OptimizerConfig

MOMENTS = 2  # arrays that the optimizer keeps for each trained parameter
UNDECAYED = ("bias", "scale", "embedding", "class_token")  # endings of parameter names


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Adam with decoupled weight decay (arXiv 1711.05101) for one component, before the learning
    rate is applied."""
    return optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=_decay_mask),
    )


def init_optimizer(config: OptimizerConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizer state by component; `params` are the parameters of the trainable components."""
    return {
        name: make_optimizer(config).init(component) for name, component in sorted(params.items())
    }


def optimizer_updates(
    config: OptimizerConfig,
    grads: Mapping[str, Any],
    state: Mapping[str, Any],
    params: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(updates, new state) by component, of the components that `grads` names."""
    update = make_optimizer(config).update
    updated = {name: update(grads[name], state[name], params[name]) for name in grads}
    updates = {name: component_updates for name, (component_updates, _) in updated.items()}
    new_state = {name: component_state for name, (_, component_state) in updated.items()}
    return updates, new_state


def learning_rate(
    config: OptimizerConfig, decay_steps: int, step: Int[Array, ""]
) -> Float[Array, ""]:
    """Learning rate of a step: linear warm-up, then constant or a cosine decay. The decay reaches
    `final_scale` at step `decay_steps` (or just after a longer warm-up) and stays there."""
    peak = config.learning_rate
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        after = optax.cosine_decay_schedule(
            peak, max(1, decay_steps - config.warmup_steps), config.final_scale
        )
    warmup = optax.linear_schedule(
        peak / max(1, config.warmup_steps), peak, max(1, config.warmup_steps)
    )
    return jnp.asarray(optax.join_schedules([warmup, after], [config.warmup_steps])(step))


def clip_scale(norm: Float[Array, ""], limit: float | None) -> Float[Array, ""]:
    """Factor that brings gradients with the global norm `norm` to a norm of at most `limit`."""
    if limit is None:
        return jnp.ones_like(norm)
    return jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))


def _decay_mask(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: not str(path[-1].key).endswith(UNDECAYED), params)
