"""A dropless mixture of experts: its cost against one dense MLP of equal FLOPs, and against
jax.lax.ragged_dot.

    python -m benchmarks.experts [--json PATH]

Float32 tokens go through `k` of E gated MLPs. Routing is `balanced`: each expert is chosen equally
often, by tokens spread over the batch; or `all-to-one`: every token chooses the same k experts. The
dense form is one such MLP on tokens * k rows that are stored in order: no routing, no gathering, no
sums by token. `of dense` is the seconds of the dense form over those of the experts; `training` is
forward and backward, for tokens, weights and matrices. `MiB` is what the compiled training program
takes in addition to its arguments and results. `ragged` are milliseconds of ragged_dot, which on
CPUs computes E dense products and is left out where these are too many.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import median_seconds
from jaxmllm.config.schema import ExpertKernel
from jaxmllm.experts.expert_blocks import Matrices, block_rows
from jaxmllm.experts.experts import experts
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.output import print_table, write_json
from sharding.mesh import make_mesh
from sharding.rules import make_layout

ROUTINGS = ("balanced", "all-to-one")
# ragged_dot is run if its dense products take at most this many FLOPs in the forward pass
RAGGED_FLOPS = 2.5e11
Form = tuple[str, str]  # kernel and routing
PASSES = ("forward", "training")
COLUMNS = [
    *("experts", "k", "routing", "block", "forward ms", "of dense", "training ms", "of dense"),
    *("MiB", "dense MiB", "ragged forward", "ragged training"),
]
GENERATOR = "numpy default_rng([seed, experts, k]): normal tokens and matrices, uniform weights"


def choose(random: np.random.Generator, tokens: int, count: int, k: int, routing: str) -> Any:
    """The experts that each token chooses: int32 [tokens, k]."""
    if routing == "all-to-one":
        return np.tile(np.arange(k, dtype=np.int32), (tokens, 1))
    # Token i of a random order takes k experts from i * k on, so all are chosen equally often
    begin = random.permutation(tokens)[:, None] * k
    return ((begin + np.arange(k)) % count).astype(np.int32)


def dense_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def programs(
    function: Callable[..., jax.Array], inputs: tuple[Any, ...], wanted: tuple[int, ...]
) -> dict[str, Any]:
    """The compiled forward pass, and the compiled forward and backward pass.

    Args:
      wanted: indices of the inputs whose gradients are computed.
    """

    def loss(*inputs: Any) -> tuple[jax.Array, jax.Array]:
        out = function(*inputs)
        return out.sum(), out

    gradients = jax.grad(loss, argnums=wanted, has_aux=True)
    return {
        name: jax.jit(run).lower(*inputs).compile()
        for name, run in (("forward", function), ("training", gradients))
    }


def measure(
    seed: int, tokens: int, width: int, mlp_width: int, count: int, k: int, repeats: int
) -> list[dict[str, Any]]:
    """One record per routing; all forms are timed in the same rounds."""
    random = np.random.default_rng([seed, count, k])

    def normal(*shape: int) -> jax.Array:
        values = random.standard_normal(shape, dtype=np.float32) * shape[-2] ** -0.5
        return jnp.asarray(values)

    x = normal(1, tokens, width)
    rows = normal(tokens * k, width)
    weights = jnp.asarray(random.random((1, tokens, k), dtype=np.float32))
    in_shape = (count, width, mlp_width)
    out_shape = (count, mlp_width, width)
    matrices = Matrices(normal(*in_shape), normal(*in_shape), normal(*out_shape))
    dense_matrices = tuple(matrix[0] for matrix in matrices)
    layout = make_layout(make_mesh({"data": 1}, jax.devices()[:1]))
    flops = 6 * tokens * k * width * mlp_width * count
    kernels: tuple[ExpertKernel, ...] = ("jax", "ragged_dot") if flops <= RAGGED_FLOPS else ("jax",)
    arguments: dict[Form, tuple[Any, ...]] = {("dense", ""): (rows, *dense_matrices)}
    forms = {("dense", ""): programs(dense_mlp, (rows, *dense_matrices), (0, 1, 2, 3))}
    for routing in ROUTINGS:
        # The routing is an argument: the compiler would sort a constant one at compile time
        chosen_experts = jnp.asarray(choose(random, tokens, count, k, routing))[None]
        for kernel in kernels:
            run = partial(experts, layout=layout, kernel=kernel)
            arguments[kernel, routing] = x, chosen_experts, weights, matrices
            forms[kernel, routing] = programs(run, arguments[kernel, routing], (0, 2, 3))
    functions = {
        (*form, name): partial(passes[name], *arguments[form])
        for form, passes in forms.items()
        for name in PASSES
    }
    seconds = median_seconds(functions, repeats)

    def mebibytes(*form: Any) -> float:
        memory = forms[form]["training"].memory_analysis()
        return float(memory.temp_size_in_bytes / 2**20)

    records = []
    for routing in ROUTINGS:
        record: dict[str, Any] = {"experts": count, "k": k, "routing": routing}
        record["block"] = block_rows(tokens * k, count)
        for name in PASSES:
            jax_seconds = seconds["jax", routing, name]
            record[f"{name}_ms"] = 1e3 * jax_seconds
            record[f"{name}_of_dense"] = seconds["dense", "", name] / jax_seconds
        record["temporary_mib"] = mebibytes("jax", routing)
        record["dense_mib"] = mebibytes("dense", "")
        for name in PASSES:
            ragged_seconds = seconds.get(("ragged_dot", routing, name))
            record[f"ragged_dot_{name}_ms"] = (
                None if ragged_seconds is None else 1e3 * ragged_seconds
            )
        records.append(record)
    return records


def main() -> None:
    parser = measuring_parser(__doc__)
    parser.add_argument("--tokens", type=positive_int, default=4096)
    parser.add_argument("--width", type=positive_int, default=512)
    parser.add_argument("--mlp-width", type=positive_int, default=256)
    parser.add_argument("--experts", type=positive_int, nargs="+", default=[8, 64, 128])
    parser.add_argument("--k", type=positive_int, nargs="+", default=[2, 8])
    parser.add_argument("--repeats", type=positive_int, default=5)
    options = parser.parse_args()
    sizes = options.tokens, options.width, options.mlp_width
    records = [
        record
        for count in options.experts
        for k in options.k
        for record in measure(options.seed, *sizes, count, k, options.repeats)
    ]
    print_table(
        f"{options.tokens} tokens of width {options.width}, experts of {options.mlp_width}, float32",
        COLUMNS,
        [list(record.values()) for record in records],
    )
    write_json(
        options.json,
        "experts",
        options.seed,
        GENERATOR,
        tokens=options.tokens,
        width=options.width,
        mlp_width=options.mlp_width,
        repeats=options.repeats,
        rows=records,
    )


if __name__ == "__main__":
    main()
