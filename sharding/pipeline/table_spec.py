"""The format of all schedule tables of one compiled program: slots, wires, and columns of a row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sharding.pipeline.graph import Kind, Pool, PoolKey, Slots
from sharding.pipeline.ring import Ring

IDLE = 0  # the action of a rank that waits
OPERATION_COLUMNS = (
    "action",
    "chunk",
    "layers",
    "first",
    "last",
    "microbatch",
    "row_class",
    "row",
    "input",
    "gradient",
    "read_residual",
    "write_residual",
    "pending",
    "output",
    "features",
    "count_loss",
)


def action_of(chain: int, kind: Kind | int) -> int:
    """The action of an operation's row."""
    return 1 + len(Kind) * chain + kind


def operation_of(action: int) -> tuple[int, int]:
    """(chain, kind) of an action that is not `IDLE`."""
    return divmod(action - 1, len(Kind))


@dataclass(frozen=True)
class Wire:
    """One kind of edge of the ring, for one pool of one component: from each rank to the next (up)
    or to the one before."""

    pool: Pool
    chain: int
    up: bool

    @property
    def name(self) -> str:
        """The wire's name in column names."""
        return f"{self.pool.name.lower()}.{self.chain}"

    @property
    def pool_key(self) -> PoolKey:
        """The pool whose slots the wire reads and fills."""
        return self.pool, self.chain


@dataclass(frozen=True)
class TableSpec:
    """Everything that the tables of one compiled program share.

    `rows_read` is, for each chain but the last, the most rows that one microbatch of its reader
    consumes; `ticks` is the most ticks of a table; `row_classes` is the number of classes that the
    rows of each component have, or empty: one class each.
    """

    ring: Ring
    slots: Slots
    ticks: int
    rows_read: tuple[int, ...]
    row_classes: tuple[int, ...] = ()

    @cached_property
    def wires(self) -> tuple[Wire, ...]:
        """All wires; pools whose values never leave their rank have none."""
        wires = []
        for c, chain in enumerate(self.ring.chains):
            if len(set(chain.stages)) > 1:
                wires += [Wire(Pool.INPUT, c, up=True), Wire(Pool.GRADIENT, c, up=False)]
        for encoder in range(len(self.ring.encoders)):
            if self.ring.delivery_hops(encoder):
                wires += [
                    Wire(Pool.TOKENS, encoder, up=True),
                    Wire(Pool.TOKEN_GRADIENT, encoder, up=False),
                ]
        return tuple(wires)

    @cached_property
    def columns(self) -> dict[str, int]:
        """Number of each column of a row, by name; the value -1 in a row means none.

        action: 0, or 1 + 4 * component + kind.
        chunk: number on its rank; layers, first, last: of the chunk.
        row_class, row: class of the microbatch's row, and its number among rows of that class.
        input, gradient: slots that are read.
        read_residual: slot of residuals read instead of recomputed; write_residual: slot for
          residuals that are kept.
        pending: slot of what a weight gradient needs.
        output: slot of a result that stays on the rank.
        features: input slot whose value the last layer's output replaces.
        count_loss: whether the operation adds to loss and sums.
        tokens, grad_slot, grad_is_first: for each consumed encoder row the slot of its tokens, the
          slot of the sum that its gradient is added to, and whether it is the sum's first term.
        receive, send: slots by wire.
        """
        names = [*OPERATION_COLUMNS]
        for what in ("tokens", "grad_slot", "grad_is_first"):
            for encoder, rows_read in enumerate(self.rows_read):
                names += [f"{what}.{encoder}.{index}" for index in range(rows_read)]
        for what in ("receive", "send"):
            names += [f"{what}.{wire.name}" for wire in self.wires]
        return {name: column for column, name in enumerate(names)}

    def classes(self, chain: int) -> int:
        """How many classes the rows of a component have."""
        return self.row_classes[chain] if self.row_classes else 1

    def room(self, pool: Pool, chain: int) -> int:
        """Number of slots of a pool on each rank, 0 where the tables have none."""
        return self.slots.get((pool, chain), 0)
