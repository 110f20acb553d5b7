"""Builds the graph of a batch's operations from a ring and the work of the batch: which operation
waits for which, and which values need slots."""

from __future__ import annotations

import numpy as np

from sharding.pipeline.graph import Buffer, ChainWork, Graph, Kind, Pool, Workload
from sharding.pipeline.ring import PipelineError, Ring

NONE = -1  # there is no such operation
# Of one component, by chunk and microbatch: the number of an operation, or NONE
Numbers = list[list[int]]


def build_graph(
    ring: Ring,
    workload: Workload,
    *,
    split: bool = False,
    fused: bool = True,
    overhead: int = 0,
) -> Graph:
    """The operations of a workload on a ring, and what each waits for.

    split: backward operations with both gradients become an INPUT_GRADIENT operation (recompute and
    input gradient) and a WEIGHT_GRADIENT operation on the same rank, which nothing waits for.
    fused: the last language chunk has no forward operation where it has a backward, which computes
    the forward pass anyway and yields the loss.
    overhead: time that every operation, and so every tick, takes in addition to its work.
    Raises `PipelineError` when workload and ring do not fit, or when an operation would wait for a
    gradient that no operation computes.
    """
    _check_workload(ring, workload)
    return _GraphBuilder(ring, workload, split, fused, overhead).build()


# ---------------------------------------------------------------------------- checks


def _check_workload(ring: Ring, workload: Workload) -> None:
    if len(workload.chains) != len(ring.chains):
        raise PipelineError(
            f"work of {len(workload.chains)} components for a ring of {len(ring.chains)}",
        )
    consumed = set()
    for chain_number, chain in enumerate(ring.chains):
        _check_chain(ring, workload, chain_number)
        microbatches = workload.chains[chain_number].shape[1]
        inputs = workload.inputs_of(chain_number)
        if len(inputs) != microbatches:
            raise PipelineError(
                f"inputs of {len(inputs)} {chain.name} microbatches, of which there are {microbatches}",
            )
        for microbatch in range(microbatches):
            _check_inputs(ring, workload, chain_number, microbatch)
            consumed |= set(inputs[microbatch])
    # Every row of an encoder must be read, unless its chain may have rows without a reader.
    for encoder, chain in enumerate(ring.encoders):
        for sub in range(workload.chains[encoder].shape[1]):
            if (encoder, sub) not in consumed and not chain.optional:
                reader = ring.chains[ring.readers[encoder]].name
                raise PipelineError(f"no {reader} microbatch consumes row {sub} of {chain.name}")


def _check_chain(ring: Ring, workload: Workload, number: int) -> None:
    chain = ring.chains[number]
    work = workload.chains[number]
    if work.shape[0] != chain.depth:
        raise PipelineError(
            f"work of {work.shape[0]} chunks for {chain.name}, which has {chain.depth}",
        )
    if work.shape[1] and work.forward.min() < 1:
        raise PipelineError(
            f"{chain.name} has a forward operation of duration {work.forward.min()}; at least 1",
        )
    backward = (work.input_gradient + work.weight_gradient) > 0
    # [D - 1, M]: a chunk's gradient comes from the chunk after it, which must go back too.
    orphans = backward[:-1] & ~backward[1:]
    if orphans.any():
        depth, microbatch = np.argwhere(orphans)[0]
        raise PipelineError(
            f"chunk {depth} of {chain.name} has a backward for microbatch {microbatch}, but chunk {depth + 1}, "
            f"where its gradient comes from, has none",
        )
    if chain.head_only and backward[:-1].any():
        raise PipelineError(
            f"{chain.name} is trained only after its last layer, but earlier chunks go backward",
        )


def _check_inputs(ring: Ring, workload: Workload, reader: int, microbatch: int) -> None:
    inputs = workload.inputs_of(reader)[microbatch]
    where = f"{ring.chains[reader].name} microbatch {microbatch}"
    if len(set(inputs)) < len(inputs):
        raise PipelineError(f"{where} names a row twice: {inputs}")
    for encoder, sub in inputs:
        if not (encoder in ring.feeding(reader) and 0 <= sub < workload.chains[encoder].shape[1]):
            raise PipelineError(
                f"{where} consumes row {sub} of chain {encoder}, which does not exist",
            )
        trained = _goes_back(workload.chains[encoder], -1, sub)
        if trained and not _goes_back(workload.chains[reader], 0, microbatch):
            raise PipelineError(
                f"row {sub} of {ring.chains[encoder].name} waits for a gradient from {where}, "
                "which has no backward",
            )


def _goes_back(work: ChainWork, depth: int, microbatch: int) -> bool:
    return bool(work.input_gradient[depth, microbatch] + work.weight_gradient[depth, microbatch])


# ---------------------------------------------------------------------------- operations and buffers


class _GraphBuilder:
    """Collects the columns of a graph.

    Numbers of operations by component, chunk and microbatch (`NONE`: no such operation) are
    `forward`, `back` (the one that computes the input gradient), `weight` (a weight gradient by
    itself), and `entry` (the first to read the chunk's input: the forward, or the backward where
    the two are fused).
    """

    def __init__(self, ring: Ring, workload: Workload, split: bool, fused: bool, overhead: int):
        self.ring = ring
        self.workload = workload
        self.split = split
        self.fused = fused
        self.overhead = overhead
        self.operations: list[
            tuple[int, int, int, int, int, int]
        ] = []  # kind, chain, depth, microbatch, rank, time
        self.buffers: list[Buffer] = []
        # By encoder and row: the microbatches of its reader that read it.
        self.consumers: list[list[list[int]]] = [
            [[] for _ in range(work.shape[1])] for work in workload.chains
        ]
        for reader in range(len(ring.chains)):
            for microbatch, consumed in enumerate(workload.inputs_of(reader)):
                for encoder, sub in consumed:
                    self.consumers[encoder][sub].append(microbatch)
        # By chain and row: whether any gradient reaches the result of its last chunk.
        self.wanted: list[list[bool]] = [[True] * work.shape[1] for work in workload.chains]
        # Readers have greater numbers than the chains they read, so their entries are made first.
        for c, reader in reversed(list(enumerate(ring.readers))):
            if not ring.has_loss(c):
                self.wanted[c] = [
                    any(self.wanted[reader][user] for user in users) for users in self.consumers[c]
                ]
        # First and last group of the rows of every chain
        self.groups: list[list[tuple[int, int]]] = self._row_groups()
        self.forward: list[Numbers] = []
        self.entry: list[Numbers] = []
        self.back: list[Numbers] = []
        self.weight: list[Numbers] = []

    def build(self) -> Graph:
        for chain in range(len(self.ring.chains)):
            self._number_operations(chain)
        size = len(self.operations)
        self.successors: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self.returns: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
        for chain in range(len(self.ring.chains)):
            self._connect_chunks(chain)
        for encoder in range(len(self.ring.encoders)):
            self._connect_reader(encoder)
        kind, chain_column, depth, microbatch, stage, duration = zip(*self.operations, strict=True)
        return Graph(
            ring=self.ring,
            workload=self.workload,
            kind=kind,
            chain=chain_column,
            depth=depth,
            microbatch=microbatch,
            stage=stage,
            duration=duration,
            waits=self._wait_counts(),
            group=tuple(self._operation_group(*operation[:4]) for operation in self.operations),
            successors=tuple(map(tuple, self.successors)),
            returns=tuple(map(tuple, self.returns)),
            buffers=tuple(self.buffers),
        )

    def _wait_counts(self) -> tuple[int, ...]:
        waits = [0] * len(self.operations)
        for edges in self.successors:
            for follower, _ in edges:
                waits[follower] += 1
        for shares in self.returns:
            for _, _, follower in shares:
                waits[follower] += 1
        return tuple(waits)

    def _number_operations(self, c: int) -> None:
        """Give the operations of one component their numbers."""
        work = self.workload.chains[c]
        forward_time = work.forward.tolist()
        recompute_time = work.recompute.tolist()
        input_time = work.input_gradient.tolist()
        weight_time = work.weight_gradient.tolist()
        depths, microbatches = work.shape

        def no_operations() -> Numbers:
            return [[NONE] * microbatches for _ in range(depths)]

        forward = no_operations()
        entry = no_operations()
        back = no_operations()
        weight = no_operations()
        fused = depths - 1 if self.fused and c == len(self.ring.chains) - 1 else NONE
        for d in range(depths):
            for m in range(microbatches):
                x_time = input_time[d][m] if self.wanted[c][m] else 0
                w_time = weight_time[d][m] if self.wanted[c][m] else 0
                # The fused operation starts from the chunk's input: the forward pass takes the
                # recompute's place.
                if d == fused and x_time + w_time:
                    again = forward_time[d][m]
                else:
                    forward[d][m] = self._add_operation(Kind.FORWARD, c, d, m, forward_time[d][m])
                    again = recompute_time[d][m]
                if self.split and x_time and w_time:
                    back[d][m] = self._add_operation(Kind.INPUT_GRADIENT, c, d, m, again + x_time)
                    weight[d][m] = self._add_operation(Kind.WEIGHT_GRADIENT, c, d, m, w_time)
                elif x_time + w_time:
                    back[d][m] = self._add_operation(
                        Kind.BACKWARD, c, d, m, again + x_time + w_time
                    )
                entry[d][m] = forward[d][m] if forward[d][m] != NONE else back[d][m]
        self.forward.append(forward)
        self.entry.append(entry)
        self.back.append(back)
        self.weight.append(weight)

    def _add_operation(self, kind: Kind, c: int, d: int, m: int, duration: int) -> int:
        stage = self.ring.chains[c].stages[d]
        self.operations.append((int(kind), c, d, m, stage, duration + self.overhead))
        return len(self.operations) - 1

    def _operation_group(self, kind: int, c: int, d: int, m: int) -> int:
        """The group of an operation: the first that needs its row or, of a backward, the last."""
        first_group, last_group = self.groups[c][m]
        return first_group if kind == Kind.FORWARD else last_group

    def _row_groups(self) -> list[list[tuple[int, int]]]:
        """First and last group of every row of every chain. A group is a language microbatch with
        the rows that it reads, or a row that nothing reads; such a row comes after the groups of
        microbatches that read no later rows."""
        chains = len(self.ring.chains)
        # (latest row that the group needs of a chain with unread rows, or -1; whether the group is
        # that row alone; chain; row)
        keys: list[tuple[int, bool, int, int]] = []
        unread = {
            (c, m)
            for c, users_of in enumerate(self.consumers[:-1])
            for m, users in enumerate(users_of)
            if not users
        }
        alone = {c for c, _ in unread}
        for m, consumed in enumerate(self.workload.inputs):
            latest = max((sub for c, sub in consumed if c in alone), default=-1)
            keys.append((latest, False, chains - 1, m))
        # Sorted, unread row m comes after every microbatch that reads none later than m. Where
        # every row is read, all keys begin with -1, and group m is microbatch m.
        keys += [(m, True, c, m) for c, m in unread]
        group_of = {(c, m): group for group, (*_, c, m) in enumerate(sorted(keys))}
        groups: list[list[tuple[int, int]]] = [[] for _ in range(chains)]
        # Readers first: a row lasts from the first group of its readers to their last.
        for c in reversed(range(chains)):
            for m in range(self.workload.chains[c].shape[1]):
                if (c, m) in group_of:
                    group = group_of[c, m]
                    groups[c].append((group, group))
                else:
                    of_users = [groups[self.ring.readers[c]][user] for user in self.consumers[c][m]]
                    first_group = min(first for first, _ in of_users)
                    last_group = max(last for _, last in of_users)
                    groups[c].append((first_group, last_group))
        return groups

    def _connect_chunks(self, c: int) -> None:
        """Edges and buffers inside one component."""
        chain = self.ring.chains[c]
        depths, microbatches = self.workload.chains[c].shape
        for d in range(depths):
            for m in range(microbatches):
                forward = self.forward[c][d][m]
                back = self.back[c][d][m]
                weight = self.weight[c][d][m]
                rank = chain.stages[d]
                if forward != NONE and back != NONE:
                    self.successors[forward].append((back, 1))
                if weight != NONE:
                    self.successors[back].append((weight, 1))
                    self.buffers.append(Buffer(Pool.PENDING, c, d, m, rank, (back,), (weight,)))
                if d:
                    self._connect_to_chunk_before(c, d, m)
                elif d == depths - 1 and chain.head_only and forward != NONE and back != NONE:
                    # A single chunk of which only the head is trained: its features wait for the
                    # backward.
                    self.buffers.append(Buffer(Pool.INPUT, c, d, m, rank, (forward,), (back,)))

    def _connect_to_chunk_before(self, c: int, d: int, m: int) -> None:
        """Edges and buffers of activations from chunk d - 1 to chunk d, and of their gradient."""
        stages = self.ring.chains[c].stages
        ticks = max(1, self.ring.hops(stages[d - 1], stages[d]))
        back = self.back[c][d][m]
        entry = self.entry[c][d][m]
        sender = self.forward[c][d - 1][m]
        self.successors[sender].append((entry, ticks))
        # Only the last reader is named: the backward, whose number is greater than the forward's,
        # or the forward where there is no backward (-1).
        self.buffers.append(Buffer(Pool.INPUT, c, d, m, stages[d], (sender,), (max(entry, back),)))
        receiver = self.back[c][d - 1][m]
        if receiver != NONE:
            self.successors[back].append((receiver, ticks))
            self.buffers.append(
                Buffer(Pool.GRADIENT, c, d - 1, m, stages[d - 1], (back,), (receiver,)),
            )

    def _connect_reader(self, c: int) -> None:
        """Edges and buffers between an encoder and the first chunk of its reader."""
        hops = self.ring.delivery_hops(c)
        depth = self.ring.chains[c].depth - 1
        source = self.ring.chains[c].stages[-1]
        reader = self.ring.readers[c]
        target = self.ring.chains[reader].stages[0]
        for sub, users in enumerate(self.consumers[c]):
            if not users:
                continue
            forward = self.forward[c][-1][sub]
            back = self.back[c][-1][sub]
            entries = [self.entry[reader][0][m] for m in users]
            user_backs = [self.back[reader][0][m] for m in users]
            for entry in entries:
                self.successors[forward].append((entry, max(1, hops)))
            # A backward's number is greater than its forward's, and NONE is less than both.
            readers = tuple(max(pair) for pair in zip(entries, user_backs, strict=True))
            self.buffers.append(
                Buffer(Pool.TOKENS, c, depth, sub, target, (forward,), readers, hops),
            )
            writers = tuple(user_back for user_back in user_backs if user_back != NONE)
            if back == NONE or not writers:
                continue
            for user_back in writers:
                self.returns[user_back].append((c, sub, back))
            # Shares are summed in a slot of the reader's rank. With hops the sum is sent from there
            # to a slot of the encoder's rank, where it waits for the backward.
            summed = Buffer(
                Pool.TOKEN_GRADIENT,
                c,
                depth,
                sub,
                target,
                writers,
                () if hops else (back,),
            )
            self.buffers.append(summed)
            if hops:
                self.buffers.append(
                    Buffer(Pool.TOKEN_GRADIENT, c, depth, sub, source, writers, (back,), hops),
                )
