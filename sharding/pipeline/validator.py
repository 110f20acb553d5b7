"""Proof that a table computes a batch: an executor of labels instead of arrays.

Every value that a slot can hold has a label that says what it is, such as the input of chunk 2 of
vision, microbatch 5. The table is run with labels, every read is compared with the label that the
operation must read, and the first difference is reported. The proof shares only the graph of
operations with the code that made the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from sharding.pipeline.graph import Graph, Kind, Pool
from sharding.pipeline.ring import Chain, PipelineError
from sharding.pipeline.table import Table
from sharding.pipeline.table_spec import IDLE, operation_of

SlotKey = tuple[Pool, int, int, int]  # pool, component, rank, slot
RowValues = dict[str, int]  # the row of one rank in one tick, by column


class Label(NamedTuple):
    """The value that a slot holds. `users` are the language microbatches whose shares the sum of a
    token gradient contains."""

    what: str
    chain: int
    depth: int
    microbatch: int
    users: frozenset[int] = frozenset()


class Result(NamedTuple):
    """The result of an operation, which may leave its rank."""

    pool: Pool
    chain: int
    label: Label


class Operation(NamedTuple):
    """An operation as its row describes it."""

    kind: int
    c: int  # component
    d: int  # depth of its chunk
    m: int  # microbatch
    chain: Chain
    first: bool
    last: bool
    language: bool  # whether it is of the last chain, which delivers to no other

    @property
    def key(self) -> tuple[int, int, int]:
        """Component, chunk and microbatch, as its labels have them."""
        return self.c, self.d, self.m


def validate(table: Table, graph: Graph) -> None:
    """Prove that a table does every operation of a graph once, each with the right slots.

    Raises `PipelineError` for the first violation, with its tick, rank and operation, and what the
    slot in question holds.
    """
    if table.spec.ring != graph.ring:
        raise PipelineError("the table is for another ring than the operations")
    if not 0 <= table.count <= table.spec.ticks or len(table.rows) != table.spec.ticks:
        raise PipelineError(
            f"the table has {table.count} of {len(table.rows)} rows, room is for {table.spec.ticks}",
        )
    proof = _Proof(table, graph)
    for tick in range(table.count):
        proof.run(tick)
    for n in range(graph.size):
        if n not in proof.done:
            raise PipelineError(f"the table leaves out {graph.name(n)}")


class _Proof:
    """The run of a table with labels: those that slots hold, and the operations done so far."""

    def __init__(self, table: Table, graph: Graph):
        self.table = table
        self.graph = graph
        self.spec = table.spec
        self.ring = graph.ring
        # (component, rank, number of the chunk on its rank) -> depth
        self.depths = {
            (c, rank, chain.local(d)): d
            for c, chain in enumerate(self.ring.chains)
            for d, rank in enumerate(chain.stages)
        }
        self.done: dict[int, int] = {}  # tick of each operation
        self.held: dict[SlotKey, Label] = {}
        # By (encoder, encoder row): the microbatches that return gradients of its tokens.
        self.users: dict[tuple[int, int], frozenset[int]] = {}
        for reader in range(len(self.ring.chains)):
            for microbatch, inputs in enumerate(graph.workload.inputs_of(reader)):
                key = (reader, 0, microbatch)
                if (Kind.BACKWARD, *key) in graph.number or (
                    Kind.INPUT_GRADIENT,
                    *key,
                ) in graph.number:
                    for pair in inputs:
                        self.users[pair] = self.users.get(pair, frozenset()) | {microbatch}
        self.where = ""  # for messages: the tick and rank, and the operation once it is known

    def run(self, tick: int) -> None:
        rows = [
            dict(zip(self.spec.columns, self.table.rows[tick, rank].tolist(), strict=True))
            for rank in range(self.ring.stages)
        ]
        results: list[Result | None] = []
        for rank, row in enumerate(rows):
            self.where = f"tick {tick}, rank {rank}"
            results.append(
                None if row["action"] == IDLE else self._check_operation(tick, rank, row)
            )
        wires = range(len(self.spec.wires))
        # All ranks send before any of them receives: a slot may be sent and filled in the same
        # tick.
        sent = []
        for rank, row in enumerate(rows):
            sent.append([self._send(tick, rank, row, results[rank], wire) for wire in wires])
        for rank, row in enumerate(rows):
            self.where = f"tick {tick}, rank {rank}"
            self._receive(tick, rank, row, sent)

    # ------------------------------------------------------------------------ wires

    def _send(
        self,
        tick: int,
        rank: int,
        row: RowValues,
        result: Result | None,
        number: int,
    ) -> Label | None:
        wire = self.spec.wires[number]
        slot = row[f"send.{wire.name}"]
        if slot >= 0:
            self.where = f"tick {tick}, rank {rank}"
            key = (wire.pool, wire.chain, rank, slot)
            self._check_slot(key)
            return self.held.get(key)
        if result is None or (result.pool, result.chain) != wire.pool_key:
            return None
        return result.label

    def _receive(
        self,
        tick: int,
        rank: int,
        row: RowValues,
        sent: list[list[Label | None]],
    ) -> None:
        for wire_number, wire in enumerate(self.spec.wires):
            slot = row[f"receive.{wire.name}"]
            if slot < 0:
                continue
            source = (rank - 1 if wire.up else rank + 1) % self.ring.stages
            label = sent[source][wire_number]
            # 0 if no rank sends on the wire in this tick, else 1 + class of the largest row sent.
            active = self.table.wire_active[tick, wire_number]
            if label is None or not active:
                self._fail(
                    f"receives {wire.name} into slot {slot}, but rank {source} sends nothing on it",
                )
            row_class, _ = self.graph.row_of(label.chain, label.microbatch)
            # Class 0 has the largest rows, so a wire for one class also carries rows of every
            # higher number.
            if active > row_class + 1:
                self._fail(
                    f"receives {self._describe(label)}, of a row of class {row_class}, but {wire.name} "
                    f"carries rows of class {active - 1}",
                )
            self._write((wire.pool, wire.chain, rank, slot), label)

    # ------------------------------------------------------------------------ operations

    def _check_operation(self, tick: int, rank: int, row: RowValues) -> Result | None:
        """Check one operation, and return its result if that leaves the rank."""
        operation = self._identify_operation(tick, rank, row)
        if operation.kind == Kind.WEIGHT_GRADIENT:
            self._read(
                (Pool.PENDING, operation.c, rank, row["pending"]),
                Label("pending", *operation.key),
            )
            return None
        if operation.first and self.ring.feeding(operation.c):
            self._read_tokens(rank, operation.c, operation.m, row)
        if operation.kind == Kind.FORWARD:
            return self._check_forward(rank, row, operation)
        return self._check_backward(tick, rank, row, operation)

    def _identify_operation(self, tick: int, rank: int, row: RowValues) -> Operation:
        c, kind = operation_of(row["action"])
        if not 0 <= c < len(self.ring.chains):
            self._fail(f"has action {row['action']}, which does not exist")
        chain = self.ring.chains[c]
        m = row["microbatch"]
        # A row counts the chunks of its own rank, the graph those of the whole chain.
        d = self.depths.get((c, rank, row["chunk"]))
        if d is None:
            self._fail(f"has chunk {row['chunk']} of {chain.name}, which it does not hold")
        n = self.graph.number.get((kind, c, d, m))
        if n is None:
            self._fail(
                f"does a {Kind(kind).name.lower()} of {chain.name} chunk {d}, microbatch {m}: not in this batch",
            )
        self.where += f", {self.graph.name(n)}"
        if n in self.done:
            self._fail(f"was done before, in tick {self.done[n]}")
        self.done[n] = tick
        operation = Operation(
            kind=kind,
            c=c,
            d=d,
            m=m,
            chain=chain,
            first=d == 0,
            last=d == chain.depth - 1,
            language=c == len(self.ring.chains) - 1,
        )
        # Ring and graph decide the other columns that describe the operation.
        row_class, row_number = self.graph.row_of(c, m)
        expected = {
            "row_class": row_class,
            "row": row_number,
            "layers": chain.layers[d],
            "first": operation.first,
            "last": operation.last,
            "count_loss": self._counts_loss(operation),
        }
        for column, value in expected.items():
            if row[column] != int(value):
                self._fail(f"has {column} {row[column]} instead of {int(value)}")
        return operation

    def _check_forward(self, rank: int, row: RowValues, operation: Operation) -> Result | None:
        c = operation.c
        # The input is read before features are written, because they replace it in its slot.
        if not operation.first:
            self._read((Pool.INPUT, c, rank, row["input"]), Label("input", *operation.key))
        if row["features"] >= 0:
            self._write((Pool.INPUT, c, rank, row["features"]), Label("features", *operation.key))
        if row["write_residual"] >= 0:
            self._write(
                (Pool.RESIDUAL, c, rank, row["write_residual"]),
                Label("residual", *operation.key),
            )
        # The last chunk of the last chain yields a loss, and nothing that needs a slot.
        if operation.last and operation.language:
            return None
        if operation.last:
            return self._write_or_return(
                rank, row, Result(Pool.TOKENS, c, Label("tokens", *operation.key))
            )
        return self._write_or_return(
            rank,
            row,
            Result(Pool.INPUT, c, Label("input", c, operation.d + 1, operation.m)),
        )

    def _check_backward(
        self,
        tick: int,
        rank: int,
        row: RowValues,
        operation: Operation,
    ) -> Result | None:
        c = operation.c
        m = operation.m
        forward = self.graph.number.get((Kind.FORWARD, *operation.key))
        # A forward that has not been done counts as done in this tick, which is too late.
        if forward is not None and self.done.get(forward, tick) >= tick:
            self._fail("comes before its forward")
        if row["read_residual"] >= 0:
            self._read(
                (Pool.RESIDUAL, c, rank, row["read_residual"]),
                Label("residual", *operation.key),
            )
        elif operation.chain.head_only and forward is not None:
            self._read((Pool.INPUT, c, rank, row["input"]), Label("features", *operation.key))
        elif not operation.first:
            self._read((Pool.INPUT, c, rank, row["input"]), Label("input", *operation.key))
        if not operation.last:
            self._read((Pool.GRADIENT, c, rank, row["gradient"]), Label("gradient", *operation.key))
        elif not operation.language and (c, m) in self.users:
            label = Label("token gradient", *operation.key, self.users[c, m])
            self._read((Pool.TOKEN_GRADIENT, c, rank, row["gradient"]), label)
        elif row["gradient"] >= 0:
            self._fail(f"reads gradient slot {row['gradient']}, but nothing returns one")
        if row["pending"] >= 0 and operation.kind == Kind.INPUT_GRADIENT:
            self._write((Pool.PENDING, c, rank, row["pending"]), Label("pending", *operation.key))
        if operation.first and self.ring.feeding(c):
            self._add_token_gradients(rank, c, m, row)
        if operation.first:
            return None
        return self._write_or_return(
            rank,
            row,
            Result(Pool.GRADIENT, c, Label("gradient", c, operation.d - 1, m)),
        )

    def _counts_loss(self, operation: Operation) -> bool:
        """Whether an operation must count loss and sums: the forward of the last chunk of a chain
        that has a loss, or the backward that takes its place."""
        if not (operation.last and self.ring.has_loss(operation.c)):
            return False
        if operation.kind == Kind.WEIGHT_GRADIENT:
            return False
        fused = (Kind.FORWARD, *operation.key) not in self.graph.number
        return operation.kind == Kind.FORWARD or fused

    def _write_or_return(self, rank: int, row: RowValues, result: Result) -> Result | None:
        """The result if it leaves its rank; if it stays, it is written into its slot at once."""
        if row["output"] >= 0:
            self._write((result.pool, result.chain, rank, row["output"]), result.label)
            return None
        return result

    # ------------------------------------------------------------------------ tokens

    def _consumed_rows(self, c: int, m: int) -> Iterator[tuple[int, int, int]]:
        """(encoder, index among the consumed rows of that encoder, encoder row) for each row that
        microbatch m of reader c consumes."""
        indices = [0] * len(self.ring.encoders)
        for encoder, sub in self.graph.workload.inputs_of(c)[m]:
            yield encoder, indices[encoder], sub
            indices[encoder] += 1

    def _read_tokens(self, rank: int, c: int, m: int, row: RowValues) -> None:
        expected = set()
        for encoder, index, sub in self._consumed_rows(c, m):
            column = f"tokens.{encoder}.{index}"
            expected.add(column)
            depth = self.ring.chains[encoder].depth - 1
            self._read(
                (Pool.TOKENS, encoder, rank, row[column]),
                Label("tokens", encoder, depth, sub),
            )
        for column, slot in row.items():
            if column.startswith("tokens.") and column not in expected and slot >= 0:
                self._fail(f"reads slot {slot} as {column}, which this microbatch does not have")

    def _add_token_gradients(self, rank: int, c: int, m: int, row: RowValues) -> None:
        for encoder, index, sub in self._consumed_rows(c, m):
            slot = row[f"grad_slot.{encoder}.{index}"]
            if slot < 0:  # frozen: the encoder needs no gradient
                continue
            key = (Pool.TOKEN_GRADIENT, encoder, rank, slot)
            depth = self.ring.chains[encoder].depth - 1
            label = self.held.get(key)
            if row[f"grad_is_first.{encoder}.{index}"] == 1:
                users = frozenset({m})
            elif label and label[:4] == ("token gradient", encoder, depth, sub):
                users = label.users | {m}
            else:
                self._fail(f"adds to {self._slot_name(key)}, which holds {self._describe(label)}")
            self._write(key, Label("token gradient", encoder, depth, sub, users))

    # ------------------------------------------------------------------------ slots

    def _read(self, key: SlotKey, expected: Label) -> None:
        self._check_slot(key)
        if self.held.get(key) != expected:
            held = self._describe(self.held.get(key))
            self._fail(
                f"needs {self._describe(expected)} in {self._slot_name(key)}, which holds {held}",
            )

    def _write(self, key: SlotKey, label: Label) -> None:
        self._check_slot(key)
        self.held[key] = label

    def _check_slot(self, key: SlotKey) -> None:
        pool, chain, _, slot = key
        slots = self.spec.room(pool, chain)
        if not 0 <= slot < slots:
            self._fail(f"uses {self._slot_name(key)}, of which there are {slots}")

    def _slot_name(self, key: SlotKey) -> str:
        pool, chain, _, slot = key
        return f"{pool.words} slot {slot} of {self.ring.chains[chain].name}"

    def _describe(self, label: Label | None) -> str:
        if label is None:
            return "nothing"
        name = self.ring.chains[label.chain].name
        users = ""
        if label.users:
            reader = self.ring.chains[self.ring.readers[label.chain]].name
            users = f" from {reader} microbatches {sorted(label.users)}"
        return (
            f"the {label.what} of {name} chunk {label.depth}, microbatch {label.microbatch}{users}"
        )

    def _fail(self, what: str) -> NoReturn:
        raise PipelineError(f"{self.where}: {what}")
