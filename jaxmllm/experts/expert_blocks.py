"""The MLPs of own experts (those of this device), block by block: the kernel of every platform.

    chosen --sort by expert--> pairs --blocks of one expert each--> a loop that runs as often as there are blocks

A pair is a token and an expert that it chose. The number of blocks is data: an expert that no token
chose costs nothing, one that all tokens chose has as many blocks as it needs, and one compilation
serves every routing. Rows of tokens are gathered, and results added, inside the loop, so memory is
linear in tokens * width.

Letters: N tokens, k experts of a token, E own experts, D width, F MLP width, P = N k pairs, b rows of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SMALLEST_BLOCK, LARGEST_BLOCK = 32, 256  # rows


class Matrices(NamedTuple):
    """The matrices of own experts' gated MLPs (arXiv 2002.05202), or their gradients or axes."""

    gate: Any  # [E, D, F]
    up: Any  # [E, D, F]
    down: Any  # [E, F, D]


Sums = tuple[Array, Array, Matrices | None]  # gradients of x, weights and matrices


class Blocks(NamedTuple):
    """Pairs sorted by expert and cut into blocks of b, in which every expert begins a new block."""

    pairs: Int[Array, " P+b"]  # token * k + choice; those of own experts first
    expert: Int[Array, " B"]  # of each block
    begin: Int[Array, " B"]  # index of its first pair in `pairs`
    end: Int[Array, " B"]  # index after its last pair
    number: Int[Array, ""]  # of blocks that have pairs; B is the most there can be


def block_rows(pairs: int, experts: int) -> int:
    """b, the rows of a block: `pairs` / `experts`, rounded up to a power of two, within bounds.

    An expert's last block is half empty on average, so smaller blocks would waste less; but every
    block reads the matrices of its expert, which takes as long as the products of some 80 rows.

    Args:
      pairs: of the tokens of all devices that share the experts.
      experts: of all these devices, because the pairs are spread among them.
    """
    rows = max(pairs // experts, 1)
    return min(max(1 << (rows - 1).bit_length(), SMALLEST_BLOCK), LARGEST_BLOCK)


def list_blocks(chosen: Int[Array, "N k"], experts: int, rows: int) -> Blocks:
    """The blocks of own experts, 0 .. experts - 1; other numbers in `chosen` are left out."""
    expert = chosen.reshape(-1)
    is_own = (expert >= 0) & (expert < experts)
    # Pairs of other devices' experts are sorted after all own ones, where no block begins.
    expert = jnp.where(is_own, expert, experts)
    pairs = jnp.argsort(expert, stable=True).astype(jnp.int32)
    pairs_per_expert = (expert[:, None] == jnp.arange(experts)).sum(axis=0, dtype=jnp.int32)
    blocks = -(-pairs_per_expert // rows)
    block_ends = jnp.cumsum(blocks)
    first_pairs = jnp.cumsum(pairs_per_expert) - pairs_per_expert
    # B: an expert with p pairs has at most p // rows + 1 blocks.
    index = jnp.arange(expert.size // rows + experts, dtype=jnp.int32)
    block_expert = jnp.searchsorted(block_ends, index, side="right").astype(jnp.int32)
    block_expert = jnp.minimum(block_expert, experts - 1)  # in range also after the last block
    # block_ends - blocks is the number of each expert's first block.
    begin = first_pairs[block_expert] + rows * (index - (block_ends - blocks)[block_expert])
    end = jnp.minimum(begin + rows, (first_pairs + pairs_per_expert)[block_expert])
    # A block always reads `rows` pairs. Without room after the last pair, dynamic_slice would move
    # its start to the left, and the block would read another expert's pairs.
    return Blocks(jnp.pad(pairs, (0, rows)), block_expert, begin, end, block_ends[-1])


def forward(
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    matrices: Matrices,
    all_experts: int,
) -> Float[Array, "N D"]:
    """Weighted sum of own experts' outputs for each token, in at least float32; zero for a token
    that chose no own expert.

    Args:
      chosen: different experts for each token; those outside 0 .. E - 1 are not computed here.
      all_experts: number of experts that tokens choose among, own ones and those of other devices.
    """
    k = chosen.shape[1]
    rows = block_rows(chosen.size, all_experts)
    blocks = list_blocks(chosen, len(matrices.gate), rows)
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def add_block(index: Array, out: Array) -> Array:
        pairs, live = _pairs_of_block(blocks, index, rows)
        # A token's experts differ and a block has one expert, so it has each token at most once.
        tokens = _unique_places(pairs // k, live, len(x))
        gate, up, down = (matrix[blocks.expert[index]] for matrix in matrices)
        inputs = _rows(x, tokens)
        hidden = jax.nn.silu(inputs @ gate) * (inputs @ up)
        outputs = jnp.matmul(hidden, down, preferred_element_type=wide)
        # What follows the block's last pair does not belong to it: its weight is 0, and its places
        # are past the end, where nothing is added.
        weight = jnp.where(live, weights.reshape(-1)[pairs], 0).astype(wide)
        return _add_at(out, tokens, weight[:, None] * outputs)

    return jax.lax.fori_loop(0, blocks.number, add_block, jnp.zeros(x.shape, wide))


def backward(
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    matrices: Matrices,
    d_out: Float[Array, "N D"],
    all_experts: int,
    wants_matrices: bool = True,
) -> tuple[Float[Array, "N D"], Float[Array, "N k"], Matrices | None]:
    """Gradients of x, weights and, if wanted, matrices, in at least float32; computes the gate and
    up products again."""
    k = chosen.shape[1]
    rows = block_rows(chosen.size, all_experts)
    blocks = list_blocks(chosen, len(matrices.gate), rows)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    flat_weights = weights.reshape(-1).astype(wide)
    zero_x = jnp.zeros(x.shape, wide)
    zero_weights = jnp.zeros(flat_weights.shape, wide)
    zero_matrices = None
    if wants_matrices:
        zero_matrices = Matrices(*(jnp.zeros(matrix.shape, wide) for matrix in matrices))
    begin = zero_x, zero_weights, zero_matrices

    def add_block(index: Array, sums: Sums) -> Sums:
        d_x, d_weights, d_matrices = sums
        pairs, live = _pairs_of_block(blocks, index, rows)
        tokens = _unique_places(pairs // k, live, len(x))
        expert = blocks.expert[index]
        gate, up, down = (matrix[expert] for matrix in matrices)
        inputs = _rows(x, tokens)
        d_outputs = _rows(d_out, tokens)
        gated, act_vjp = jax.vjp(jax.nn.silu, inputs @ gate)
        raised = inputs @ up
        hidden = gated * raised
        weight = jnp.where(live, flat_weights[pairs], 0)[:, None]
        d_hidden = jnp.matmul(d_outputs, down.T, preferred_element_type=wide)
        # A weight's gradient is d_out . output, where output = hidden @ down: so d_hidden . hidden.
        d_weight = (d_hidden * hidden).sum(axis=1)
        d_hidden = (d_hidden * weight).astype(x.dtype)
        (d_gated,) = act_vjp(d_hidden * raised)
        d_raised = d_hidden * gated
        d_inputs = jnp.matmul(d_gated, gate.T, preferred_element_type=wide)
        d_inputs += jnp.matmul(d_raised, up.T, preferred_element_type=wide)
        if d_matrices is not None:
            d_outputs = (weight * d_outputs).astype(x.dtype)
            factors = Matrices((inputs, d_gated), (inputs, d_raised), (hidden, d_outputs))
            added = []
            for d_matrix, (left, right) in zip(d_matrices, factors, strict=True):
                product = jnp.matmul(left.T, right, preferred_element_type=wide)
                added.append(d_matrix.at[expert].add(product))
            d_matrices = Matrices(*added)
        pair_slots = _unique_places(pairs, live, len(d_weights))
        return _add_at(d_x, tokens, d_inputs), _add_at(d_weights, pair_slots, d_weight), d_matrices

    d_x, d_weights, d_matrices = jax.lax.fori_loop(0, blocks.number, add_block, begin)
    return d_x, d_weights.reshape(weights.shape), d_matrices


def _pairs_of_block(blocks: Blocks, index: Array, rows: int) -> tuple[Array, Array]:
    """`rows` pairs from the beginning of a block, and which of them belong to it."""
    begin = blocks.begin[index]
    pairs = jax.lax.dynamic_slice_in_dim(blocks.pairs, begin, rows)
    return pairs, begin + jnp.arange(rows) < blocks.end[index]


def _unique_places(indices: Array, live: Array, length: int) -> Array:
    """`indices`, with distinct indices past the end where there is no pair, because all indices of
    a block must be unique (`unique_indices`)."""
    return jnp.where(live, indices, length + jnp.arange(len(indices), dtype=indices.dtype))


def _rows(x: Array, indices: Array) -> Array:
    return x.at[indices].get(mode="fill", fill_value=0, unique_indices=True)


def _add_at(total: Array, indices: Array, values: Array) -> Array:
    return total.at[indices].add(values, mode="drop", unique_indices=True)
