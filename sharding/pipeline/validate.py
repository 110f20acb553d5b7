"""Proof that a table computes a batch: an executor of labels instead of arrays.

Everything a slot can hold has a label that says what it is, such as the input of chunk 2 of vision, microbatch 5. The
table is run with labels, every read is compared with what the operation must read, and the first one that differs is
reported. It shares nothing with what made the table but the graph of operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from sharding.pipeline.graph import Graph, Kind, PipelineError, Pool
from sharding.pipeline.table import IDLE, Table

Place = tuple[Pool, int, int, int]  # pool, component, rank, slot


class Label(NamedTuple):
    """What a slot holds: `users` are the language microbatches whose shares a token gradient has."""

    what: str
    chain: int
    depth: int
    microbatch: int
    users: frozenset[int] = frozenset()


def validate(table: Table, graph: Graph) -> None:
    """Prove that a table does every operation of a graph once, each with the right slots.

    Raises `PipelineError` with the first violation: its tick, rank and operation, and what it found where.
    """
    if table.spec.ring != graph.ring:
        raise PipelineError("the table is for another ring than the operations")
    if not 0 <= table.count <= table.spec.ticks or len(table.rows) != table.spec.ticks:
        raise PipelineError(f"the table has {table.count} of {len(table.rows)} rows, room is for {table.spec.ticks}")
    proof = _Proof(table, graph)
    for tick in range(table.count):
        proof.run(tick)
    for n in range(graph.size):
        if n not in proof.done:
            raise PipelineError(f"the table leaves out {graph.name(n)}")


class _Proof:
    def __init__(self, table: Table, graph: Graph):
        self.table, self.graph, self.spec, self.ring = table, graph, table.spec, graph.ring
        self.done: dict[int, int] = {}
        self.holds: dict[Place, Label] = {}
        self.users: dict[tuple[int, int], frozenset[int]] = {}
        for microbatch, inputs in enumerate(graph.workload.inputs):
            for pair in inputs:
                self.users[pair] = self.users.get(pair, frozenset()) | {microbatch}
        self.where = ""

    def run(self, tick: int) -> None:
        results: list[tuple[Pool, int, Label] | None] = []
        rows = [
            dict(zip(self.spec.columns, self.table.rows[tick, rank].tolist(), strict=True))
            for rank in range(self.ring.stages)
        ]
        for rank, row in enumerate(rows):
            self.where = f"tick {tick}, rank {rank}"
            results.append(None if row["action"] == IDLE else self._operate(tick, rank, row))
        wires = range(len(self.spec.wires))
        sent = [[self._send(tick, rank, row, results[rank], wire) for wire in wires] for rank, row in enumerate(rows)]
        for rank, row in enumerate(rows):
            self.where = f"tick {tick}, rank {rank}"
            for number, wire in enumerate(self.spec.wires):
                slot = row[f"receive.{wire.name}"]
                if slot < 0:
                    continue
                source = (rank - 1 if wire.up else rank + 1) % self.ring.stages
                label = sent[source][number]
                if label is None or not self.table.moves[tick, number]:
                    self._fail(f"receives {wire.name} into slot {slot}, but rank {source} sends nothing on it")
                self._write((wire.pool, wire.chain, rank, slot), label)

    def _operate(self, tick: int, rank: int, row: dict[str, int]) -> tuple[Pool, int, Label] | None:
        """Check one operation; its result as (pool, component, label) if it may leave the rank."""
        c, kind = divmod(row["action"] - 1, len(Kind))
        if not 0 <= c < len(self.ring.chains):
            self._fail(f"has action {row['action']}, which does not exist")
        chain, m = self.ring.chains[c], row["microbatch"]
        depths = [d for d in range(chain.depth) if (chain.stages[d], chain.local(d)) == (rank, row["chunk"])]
        if not depths:
            self._fail(f"has chunk {row['chunk']} of {chain.name}, which it does not hold")
        d = depths[0]
        n = self.graph.number.get((kind, c, d, m))
        if n is None:
            self._fail(f"does a {Kind(kind).name.lower()} of {chain.name} chunk {d}, microbatch {m}: not in this batch")
        self.where += f", {self.graph.name(n)}"
        if n in self.done:
            self._fail(f"was done before, in tick {self.done[n]}")
        self.done[n] = tick
        first, last = d == 0, d == chain.depth - 1
        expected = {"layers": chain.layers[d], "first": first, "last": last, "tally": self._tallies(kind, c, d, m)}
        for column, value in expected.items():
            if row[column] != int(value):
                self._fail(f"has {column} {row[column]} instead of {int(value)}")
        language = c == len(self.ring.chains) - 1
        if kind == Kind.WEIGHT_GRADIENT:
            self._read((Pool.PENDING, c, rank, row["pending"]), Label("pending", c, d, m))
            return None
        forward = self.graph.number.get((Kind.FORWARD, c, d, m))
        if first and language:
            self._read_tokens(rank, m, row)
        if kind == Kind.FORWARD:
            if not first:
                self._read((Pool.INPUT, c, rank, row["input"]), Label("input", c, d, m))
            if row["features"] >= 0:
                self._write((Pool.INPUT, c, rank, row["features"]), Label("features", c, d, m))
            if row["keep"] >= 0:
                self._write((Pool.RESIDUAL, c, rank, row["keep"]), Label("residual", c, d, m))
            if last and language:
                return None
            label = Label("tokens", c, d, m) if last else Label("input", c, d + 1, m)
            return self._leave(rank, row, (Pool.TOKENS if last else Pool.INPUT, c, label))
        if forward is not None and self.done.get(forward, tick) >= tick:
            self._fail("comes before its forward")
        if row["kept"] >= 0:
            self._read((Pool.RESIDUAL, c, rank, row["kept"]), Label("residual", c, d, m))
        elif chain.head_only and forward is not None:
            self._read((Pool.INPUT, c, rank, row["input"]), Label("features", c, d, m))
        elif not first:
            self._read((Pool.INPUT, c, rank, row["input"]), Label("input", c, d, m))
        if not last:
            self._read((Pool.GRADIENT, c, rank, row["gradient"]), Label("gradient", c, d, m))
        elif not language:
            place = (Pool.TOKEN_GRADIENT, c, rank, row["gradient"])
            self._read(place, Label("token gradient", c, d, m, self.users[c, m]))
        if row["pending"] >= 0 and kind == Kind.INPUT_GRADIENT:
            self._write((Pool.PENDING, c, rank, row["pending"]), Label("pending", c, d, m))
        if first and language:
            self._share(rank, m, row)
        if first:
            return None
        return self._leave(rank, row, (Pool.GRADIENT, c, Label("gradient", c, d - 1, m)))

    def _tallies(self, kind: int, c: int, d: int, m: int) -> bool:
        """Loss and sums count once: in the last language forward, or in the backward that takes its place."""
        if c < len(self.ring.chains) - 1 or d < self.ring.language.depth - 1 or kind == Kind.WEIGHT_GRADIENT:
            return False
        return kind == Kind.FORWARD or (Kind.FORWARD, c, d, m) not in self.graph.number

    def _consumed(self, m: int) -> Iterator[tuple[int, int, int]]:
        """(encoder, place, sub-microbatch) of all that a language microbatch consumes."""
        places = [0] * len(self.ring.encoders)
        for encoder, sub in self.graph.workload.inputs[m]:
            yield encoder, places[encoder], sub
            places[encoder] += 1

    def _read_tokens(self, rank: int, m: int, row: dict[str, int]) -> None:
        wanted = set()
        for encoder, place, sub in self._consumed(m):
            column = f"tokens.{encoder}.{place}"
            wanted.add(column)
            self._read((Pool.TOKENS, encoder, rank, row[column]), self._tokens(encoder, sub))
        for column, value in row.items():
            if column.startswith("tokens.") and column not in wanted and value >= 0:
                self._fail(f"reads slot {value} as {column}, which this microbatch does not have")

    def _share(self, rank: int, m: int, row: dict[str, int]) -> None:
        for encoder, at, sub in self._consumed(m):
            slot = row[f"share.{encoder}.{at}"]
            if slot < 0:
                continue
            place = (Pool.TOKEN_GRADIENT, encoder, rank, slot)
            depth, held = self.ring.chains[encoder].depth - 1, self.holds.get(place)
            if row[f"fresh.{encoder}.{at}"] == 1:
                users = frozenset({m})
            elif held and held[:4] == ("token gradient", encoder, depth, sub):
                users = held.users | {m}
            else:
                self._fail(f"adds to {self._name(place)}, which holds {self._describe(held)}")
            self._write(place, Label("token gradient", encoder, depth, sub, users))

    def _tokens(self, encoder: int, sub: int) -> Label:
        return Label("tokens", encoder, self.ring.chains[encoder].depth - 1, sub)

    def _leave(self, rank: int, row: dict[str, int], result: tuple[Pool, int, Label]) -> tuple[Pool, int, Label] | None:
        """A result that stays goes into its slot here."""
        if row["output"] >= 0:
            self._write((result[0], result[1], rank, row["output"]), result[2])
            return None
        return result

    def _send(
        self, tick: int, rank: int, row: dict[str, int], result: tuple[Pool, int, Label] | None, number: int
    ) -> Label | None:
        wire = self.spec.wires[number]
        slot = row[f"send.{wire.name}"]
        if slot >= 0:
            self.where = f"tick {tick}, rank {rank}"
            place = (wire.pool, wire.chain, rank, slot)
            self._check_slot(place)
            return self.holds.get(place)
        return result[2] if result is not None and result[:2] == (wire.pool, wire.chain) else None

    def _read(self, place: Place, label: Label) -> None:
        self._check_slot(place)
        if self.holds.get(place) != label:
            found = self._describe(self.holds.get(place))
            self._fail(f"needs {self._describe(label)} in {self._name(place)}, which holds {found}")

    def _write(self, place: Place, label: Label) -> None:
        self._check_slot(place)
        self.holds[place] = label

    def _check_slot(self, place: Place) -> None:
        slots = self.spec.slots.get(place[:2], 0)
        if not 0 <= place[3] < slots:
            self._fail(f"uses {self._name(place)}, of which there are {slots}")

    def _name(self, place: Place) -> str:
        pool, chain, _, slot = place
        return f"{pool.name.lower().replace('_', ' ')} slot {slot} of {self.ring.chains[chain].name}"

    def _describe(self, label: Label | None) -> str:
        if label is None:
            return "nothing"
        name = self.ring.chains[label.chain].name
        users = f" from language microbatches {sorted(label.users)}" if label.users else ""
        return f"the {label.what} of {name} chunk {label.depth}, microbatch {label.microbatch}{users}"

    def _fail(self, what: str) -> NoReturn:
        raise PipelineError(f"{self.where}: {what}")
