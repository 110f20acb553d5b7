"""Small towers and a language model for the executor, their batches, and the same
step without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from sharding.gradient import Params
from sharding.mesh import make_mesh
from sharding.pipeline.executor.component import Component, Inputs, Outputs, TableArrays
from sharding.pipeline.executor.executor import make_executor
from sharding.pipeline.graph import ChainWork, Graph, Pool, Workload
from sharding.pipeline.ring import Chain, Ring
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.schedules.schedule import Schedule
from sharding.pipeline.slots import keep_residuals, slots_needed
from sharding.pipeline.table import Table, make_table
from sharding.pipeline.table_spec import TableSpec
from sharding.pipeline.validator import validate

REPLICAS = 2
VOCABULARY = 11
PATCHES, TEXT = (4, 2), (8, 5)  # positions of a row, by its class
WIDTHS = {"vision": 8, "audio": 12, "language": 16}
SLOTS = PATCHES[0] // 2  # tokens of an encoder row of the first class on a replica


def layer(params: Params, x, row):
    """A layer that mixes positions as well, and divides by a value of the row, so that no
    microbatch can pass for another."""
    weights = params.trained | params.frozen
    frozen = params.frozen
    mixed = jnp.cumsum(x, axis=-2) / jnp.arange(1.0, x.shape[-2] + 1)[:, None]
    hidden = jax.nn.silu(mixed @ weights["up"]) * frozen["scale"] / row["level"][..., None]
    return x + hidden @ weights["down"]


def encoder() -> Component:
    """An encoder: patches times a stem, layers, and a projection of pairs of positions."""

    def first(outer: Params, row, media):
        return row["patches"] @ (outer.trained | outer.frozen)["stem"]

    def last(outer: Params, x, row):
        pairs = x.reshape(*x.shape[:-2], x.shape[-2] // 2, -1)
        return jnp.tanh(pairs @ (outer.trained | outer.frozen)["project"])

    return Component(first, layer, last)


def language() -> Component:
    """A language model whose rows replace some embeddings by tokens of encoders, and which sums a
    loss and the number of right predictions."""

    def first(outer: Params, row, media):
        """Embeddings of a row's text, with tokens of encoders in their place where
        the row asks for them."""
        x = jnp.take((outer.trained | outer.frozen)["embed"], row["ids"], axis=0)
        for encoder_index, tokens in enumerate(media):
            if not tokens.shape[0]:
                continue
            flat = jnp.moveaxis(tokens, 0, 1).reshape(tokens.shape[1], -1, tokens.shape[-1])
            index = row["media"][encoder_index]
            received = jnp.take_along_axis(flat, jnp.maximum(index, 0)[..., None], axis=1)
            x = jnp.where((index >= 0)[..., None], received, x)
        return x

    def last(outer: Params, x, row):
        logits = x @ (outer.trained | outer.frozen)["head"]
        loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), row["targets"][..., None], axis=-1)
        return jnp.sum(loss) / 100, {
            "right": jnp.sum(logits.argmax(-1) == row["targets"]).astype(jnp.float32)
        }

    return Component(first, layer, last)


def components(ring: Ring, policy: Callable[..., bool] | None = None) -> tuple[Component, ...]:
    """The components of a ring. With a policy, layers keep for their backward pass only what it
    names; without, everything."""
    plain = (*(encoder() for _ in ring.encoders), language())
    if policy is None:
        return plain
    return tuple(
        replace(component, layer=jax.checkpoint(component.layer, policy=policy))
        for component in plain
    )


@dataclass(frozen=True)
class Trained:
    """Which parts of a component are trained."""

    first: bool = True
    layers: bool = True
    last: bool = True


ALL = Trained()
NONE = Trained(False, False, False)
HEAD = Trained(False, False, True)


def parameters(
    ring: Ring, trained: tuple[Trained, ...], seed: int = 0
) -> tuple[tuple[Params, ...], tuple[Params, ...]]:
    """Stacked layers [layers of the whole component, ...] and the parameters outside of
    them, each by component."""
    keys = iter(jax.random.split(jax.random.key(seed), 100))

    def matrix(*shape: int):
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    layers = []
    outer = []
    for chain, parts_trained in zip(ring.chains, trained, strict=True):
        layer_count = sum(chain.layers)
        width = WIDTHS[chain.name]
        weights = {
            "up": matrix(layer_count, width, 2 * width),
            "down": matrix(layer_count, 2 * width, width),
        }
        scale = {"scale": 1 + 0.1 * matrix(layer_count, 1, 2 * width)[:, 0]}
        layers.append(
            Params(weights, scale) if parts_trained.layers else Params({}, weights | scale)
        )
        if chain == ring.reader:
            first_weights = {"embed": matrix(VOCABULARY, width)}
            last_weights = {"head": matrix(width, VOCABULARY)}
        else:
            first_weights = {"stem": matrix(5, width)}
            last_weights = {"project": matrix(2 * width, WIDTHS["language"])}
        ends = [(first_weights, parts_trained.first), (last_weights, parts_trained.last)]
        merged = [
            {k: v for end, is_trained in ends if is_trained == wanted for k, v in end.items()}
            for wanted in (True, False)
        ]
        outer.append(Params(*merged))
    return tuple(layers), tuple(outer)


def rows(
    ring: Ring, workload: Workload, sizes: tuple[int, ...], fan: tuple[int, ...], seed: int = 0
):
    """Rows of all components by class, padded to `sizes` microbatches each. Every encoder token
    that a microbatch reads replaces one position of its text."""
    random = np.random.default_rng(seed)
    encoder_rows = []
    for work, size in zip(workload.chains, sizes[:-1], strict=False):
        encoder_rows.append(
            tuple(
                {
                    "patches": random.normal(size=(size, REPLICAS, patches, 5)).astype(np.float32),
                    "level": random.uniform(1, 2, (size, REPLICAS, 1)).astype(np.float32),
                }
                for patches in PATCHES[: classes_of(work)]
            )
        )
    texts = TEXT[: classes_of(workload.chains[-1])]
    media = [
        [np.full((sizes[-1], REPLICAS, text), -1, np.int32) for _ in ring.encoders]
        for text in texts
    ]
    for microbatch, inputs in enumerate(workload.inputs):
        row_class, row = workload.chains[-1].rows[microbatch]
        next_place = [0] * len(ring.encoders)
        for encoder_, row_read in inputs:
            readers = [
                reader
                for reader, read in enumerate(workload.inputs)
                if (encoder_, row_read) in read
            ]
            # With deferral two microbatches read one encoder row, and each takes some of its
            # tokens.
            tokens = PATCHES[workload.chains[encoder_].rows[row_read][0]] // 2
            taken_tokens = (
                range(tokens) if len(readers) == 1 else [readers.index(microbatch) % tokens]
            )
            for replica in range(REPLICAS):
                for token in taken_tokens:
                    position = random.integers(TEXT[row_class])
                    media[row_class][encoder_][row, replica, position] = (
                        next_place[encoder_] * SLOTS + token
                    )
            next_place[encoder_] += 1
    rows_of_text = tuple(
        {
            "ids": random.integers(0, VOCABULARY, (sizes[-1], REPLICAS, text)).astype(np.int32),
            "targets": random.integers(0, VOCABULARY, (sizes[-1], REPLICAS, text)).astype(np.int32),
            "level": random.uniform(1, 2, (sizes[-1], REPLICAS, 1)).astype(np.float32),
            "media": tuple(media_of_class),
        }
        for text, media_of_class in zip(texts, media, strict=True)
    )
    return (*encoder_rows, rows_of_text)


def classes_of(work: ChainWork) -> int:
    """Number of row classes of a chain's work: one where no class is given."""
    return 1 if work.row_class is None else len(TEXT)


def unpipelined(ring: Ring, workload: Workload, fan: tuple[int, ...], layers, outer, rows):
    """(loss, sums) and the gradients of everything trained, microbatch by
    microbatch in plain Python."""
    model = components(ring)

    def run(trained):
        """Loss and sums as a function of all trained parameters."""
        weights = [Params(t, p.frozen) for t, p in zip(trained[0], layers, strict=True)]
        outers = [Params(t, p.frozen) for t, p in zip(trained[1], outer, strict=True)]

        def through(c: int, m: int, media):
            row_class, index = workload.chains[c].rows[m]
            row = jax.tree.map(lambda leaf: leaf[index], rows[c][row_class])
            x = model[c].first(outers[c], row, media)
            for index in range(sum(ring.chains[c].layers)):
                x = model[c].layer(jax.tree.map(lambda leaf, n=index: leaf[n], weights[c]), x, row)
            return model[c].last(outers[c], x, row)

        tokens = [
            [through(c, m, ()) for m in range(workload.chains[c].shape[1])]
            for c in range(len(model) - 1)
        ]
        loss = 0.0
        sums = {"right": 0.0}
        for m, inputs in enumerate(workload.inputs):
            media = []
            for c, read_count in enumerate(fan):
                tokens_read = [padded(tokens[c][row_read]) for e, row_read in inputs if e == c]
                tokens_read += [jnp.zeros((REPLICAS, SLOTS, WIDTHS["language"]))] * (
                    read_count - len(tokens_read)
                )
                media.append(
                    jnp.stack(tokens_read)
                    if tokens_read
                    else jnp.zeros((0, REPLICAS, SLOTS, WIDTHS["language"]))
                )
            row_loss, row_sums = through(len(model) - 1, m, tuple(media))
            loss = loss + row_loss
            sums = jax.tree.map(jnp.add, sums, row_sums)
        return loss, sums

    trained = [[p.trained for p in layers], [p.trained for p in outer]]
    return jax.value_and_grad(run, has_aux=True)(trained)


def padded(tokens):
    """Tokens of a row of any class, padded to as many as a row of the first class has."""
    return jnp.pad(tokens, ((0, 0), (0, SLOTS - tokens.shape[1]), (0, 0)))


def stacked(ring: Ring, c: int, tree):
    """Leaves [layers, ...] of a whole component as [S, K, L, ...], with zeros where a chunk has
    fewer layers than the largest."""
    chain = ring.chains[c]
    starts = np.cumsum([0, *chain.layers])

    def stack(leaf):
        """One leaf [layers, ...] as [S, K, L, ...]."""
        out = np.zeros(
            (ring.stages, chain.chunks_per_rank, max(1, *chain.layers), *leaf.shape[1:]), leaf.dtype
        )
        for depth, stage in enumerate(chain.stages):
            layer_count = chain.layers[depth]
            out[stage, chain.local(depth), :layer_count] = leaf[
                starts[depth] : starts[depth] + layer_count
            ]
        return out

    return jax.tree.map(stack, tree)


def inputs(ring: Ring, layers, outer, rows) -> Inputs:
    """Inputs of the executor from parameters and rows of the plain step."""
    return Inputs(
        tuple(stacked(ring, c, component_layers) for c, component_layers in enumerate(layers)),
        outer,
        rows,
    )


# ---------------------------------------------------------------------------- rings and workloads


def ring_of(
    layout: str, stages: int, encoders: tuple[str, ...] = ("vision",), heads: tuple[bool, ...] = ()
) -> Ring:
    """A ring laid out as cuts.py lays it, with one or two layers per chunk in turn."""
    encoder_count = len(encoders)
    names = (*encoders, "language")
    heads = heads or (False,) * len(names)
    if layout == "segments":
        stages_of_chains = [
            tuple(range(stages)) * (1 if name != "language" else 2 if stages < 8 else 1)
            for name in names
        ]
    elif layout == "chain":
        # The last encoder shares a rank with the language model where there are few ranks.
        first_language_rank = max(1, stages // 2)
        stages_of_chains = [tuple(range(first_language_rank))] * encoder_count + [
            tuple(range(min(first_language_rank, stages - 1), stages))
        ]
    else:
        stages_of_chains = [(rank,) for rank in range(encoder_count)] + [
            tuple(range(encoder_count, stages))
        ]
    chains = [
        Chain(name, chain_stages, tuple(1 + depth % 2 for depth in range(len(chain_stages))), head)
        for name, chain_stages, head in zip(names, stages_of_chains, heads, strict=True)
    ]
    return Ring(stages, tuple(chains))


def workload_of(
    ring: Ring,
    microbatches: int,
    trained: tuple[Trained, ...] | None = None,
    seed: int = 0,
    most: int | tuple[int, ...] = 2,
    defer: bool = True,
    classes: bool = False,
) -> Workload:
    """A workload with random numbers of encoder rows, none for some microbatches.

    `most` is the largest number of rows of each encoder that one microbatch reads anew. With
    `defer` some rows feed the next microbatch as well; with `classes` every row is of one of two
    classes, at random.
    """
    most = most if isinstance(most, tuple) else (most,) * len(ring.encoders)
    random = np.random.default_rng(seed)
    trained = trained or (ALL,) * len(ring.chains)
    inputs: list[list[tuple[int, int]]] = [[] for _ in range(microbatches)]
    counts = []
    for encoder_ in range(len(ring.encoders)):
        row_number = 0
        for m in range(microbatches):
            for _ in range(random.integers(0, most[encoder_] + 1)):
                inputs[m].append((encoder_, row_number))
                if defer and m + 1 < microbatches and random.random() < 0.4:
                    inputs[m + 1].append((encoder_, row_number))
                row_number += 1
        counts.append(row_number)
    encoder_trained = any(parts_trained != NONE for parts_trained in trained[:-1])
    works = []
    for chain, parts_trained, row_count in zip(
        ring.chains, trained, (*counts, microbatches), strict=True
    ):
        shape = (chain.depth, row_count)
        forward = random.integers(1, 4, (chain.depth, 1)) + np.zeros(shape, np.int64)
        # The language model has input gradients where an encoder is trained, even if it is frozen
        # itself.
        returns_gradients = encoder_trained and chain == ring.reader
        input_gradient = np.zeros(shape, np.int64) + int(
            parts_trained.layers or parts_trained.first or returns_gradients
        )
        weight_gradient = input_gradient * int(parts_trained.layers)
        if parts_trained.last:
            weight_gradient[-1] = 1
        row_class = random.integers(0, len(TEXT), row_count) if classes else None
        works.append(
            ChainWork(
                forward,
                forward * (input_gradient > 0),
                forward * input_gradient,
                weight_gradient * forward,
                row_class,
            )
        )
    return Workload(tuple(works), tuple(map(tuple, inputs)))


def padded_table_of(graph: Graph) -> Table:
    """A greedy table with two slots for residuals of the language model, and three
    idle ticks at its end."""
    schedule = greedy(graph)
    slots = slots_needed([schedule]) | {(Pool.RESIDUAL, 1): 2}
    schedule = keep_residuals(schedule, slots)
    classes = tuple(map(classes_of, graph.workload.chains))
    reads = (4,) * len(graph.ring.encoders)
    return make_table(
        schedule, TableSpec(graph.ring, slots, len(schedule.ticks) + 3, reads, classes)
    )


# ---------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Program:
    """A compiled executor with what it needs to run a schedule and to compare
    it with the plain step."""

    spec: TableSpec
    trained: tuple[Trained, ...]
    sizes: tuple[int, ...]
    run: Callable[[TableArrays, Inputs], Outputs]
    layers: tuple[Params, ...]
    outer: tuple[Params, ...]
    put: Callable[[Inputs], Inputs] = lambda inputs: inputs

    def check(self, schedule: Schedule, seed: int = 0) -> None:
        """Run a schedule on the rows of a seed: loss, sums and every gradient must
        equal the plain step's."""
        workload = schedule.graph.workload
        ring = self.spec.ring
        table = make_table(schedule, self.spec)
        validate(table, schedule.graph)
        batch = rows(ring, workload, self.sizes, self.spec.rows_read, seed)
        (loss, sums), (layers, outer) = unpipelined(
            ring, workload, self.spec.rows_read, self.layers, self.outer, batch
        )
        outputs = self.run(
            TableArrays.of(table), self.put(inputs(ring, self.layers, self.outer, batch))
        )
        np.testing.assert_allclose(outputs.loss, loss, rtol=1e-5)
        np.testing.assert_allclose(outputs.sums[-1]["right"], sums["right"])
        expected = (
            tuple(stacked(ring, c, component_layers) for c, component_layers in enumerate(layers)),
            tuple(outer),
        )
        for got, want in zip(
            jax.tree.leaves((outputs.layers, outputs.outer)), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(
                got, want, rtol=1e-5, atol=1e-5 * float(np.abs(want).max() + 1e-3)
            )


def program(
    ring: Ring,
    trained: tuple[Trained, ...],
    sizes: tuple[int, ...],
    slots: int = 16,
    fan: int = 4,
    pools: tuple[Pool, ...] = (),
    ticks: int = 400,
    policy: Callable[..., bool] | None = None,
    classes: bool = False,
) -> Program:
    """An executor on the first devices, with `slots` slots in every pool; of the optional `pools`,
    residuals have 2. With `classes`, it has rows of two classes."""
    counts = {
        (pool, c): slots for pool in Pool for c in range(len(ring.chains)) if pool < Pool.RESIDUAL
    }
    for c, member in enumerate(trained[:-1]):
        if member == NONE:
            del counts[Pool.TOKEN_GRADIENT, c]
    del counts[Pool.TOKENS, len(ring.chains) - 1], counts[Pool.TOKEN_GRADIENT, len(ring.chains) - 1]
    counts |= {
        (pool, c): slots if pool == Pool.PENDING else 2
        for pool in pools
        for c in range(len(ring.chains))
    }
    row_classes = (len(TEXT),) * len(ring.chains) if classes else ()
    spec = TableSpec(ring, counts, ticks, (fan,) * len(ring.encoders), row_classes)
    mesh = make_mesh({"stage": ring.stages}, jax.devices()[: ring.stages])
    component_classes = tuple(
        (member,) * spec.classes(c) for c, member in enumerate(components(ring, policy))
    )
    run = jax.jit(make_executor(spec, component_classes, mesh))
    return Program(spec, trained, sizes, run, *parameters(ring, trained))
