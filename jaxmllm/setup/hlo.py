"""What a compiled program sends between devices, read from the HLO text that XLA prints of it.

    text --parse--> instructions of every computation
         --executed--> those that run, and how often --collectives--> Collectives

Loops count as often as XLA says (`known_trip_count`) or, where it does not, as their condition
does. Fusions, calls, branches and asynchronous pairs are followed. Bytes are those of one device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxmllm.arrays import Longs

# Bytes that each device sends in the usual ring or pairwise algorithm, in sizes of the whole array,
# for groups of n devices
SENT = {
    "all-gather": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    # At most: the data decide how much of the operand is sent
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,
}
PAIRS = "collective-permute"
START = "-start"
NAME = r"%?([\w.\-]+)"
HEADER = re.compile(rf"^(ENTRY )?{NAME} (?:\(.*\) -> .*)?\{{$")
INSTRUCTION = re.compile(rf"^\s+(?:ROOT )?{NAME} = ")
OPCODE = re.compile(r"\s*([\w\-]+)\(")
ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
COMMENT = re.compile(r"/\*.*?\*/")
INDEX = re.compile(r"\bindex=(\d+)")
CONDITION = re.compile(rf"\bcondition={NAME}")
BODY = re.compile(rf"\bbody={NAME}")
# Opcodes that pass on their first operand
SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert")
CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=" + NAME)
CALLED_LISTS = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
SCOPE = re.compile(r'\bop_name="([^"]*)"')
TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')
# Groups of devices, listed or as a reshaped range: ={{0,1},{2,3}}, =[groups,size]<=[shape]T(order)
LISTED = re.compile(r"=\{((?:\{[\d,]*\},?)*)\}")
IOTA = re.compile(r"=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH = re.compile(r"=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*(?:\([\d,]*\))?)\))? \{([^}]*)\}")
MESH_AXIS = re.compile(r"'?([\w.]+)'?=(\d+)")
# An axis, or the middle part of an axis cut in three: its name, the outer part's size, its own size
MESH_PART = re.compile(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?")
MESH_ORDER = re.compile(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?$")
# Bits of the types that `_bit_width` cannot tell from their names
NARROW = {"pred": 8, "c64": 64, "c128": 128, "token": 0, "opaque": 0}


class HloError(ValueError):
    """A text that is not understood: XLA prints something new."""


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str  # of its result, tuples in parentheses
    operands: tuple[str, ...]  # names, or the value of a constant
    attributes: str  # the rest of the line
    root: bool = False  # whether its computation returns it

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that run when this instruction does: once, or once per trip of a loop."""
        if self.opcode.endswith(("-done", "-update")):
            return ()  # these name a computation that the start has begun
        attributes = QUOTED.sub("", self.attributes)
        kinds = CALLED.findall(attributes)
        # In other instructions `to_apply` is the function that combines two numbers
        names = [name for kind, name in kinds if kind != "to_apply" or self.opcode == "call"]
        for names_in_list in CALLED_LISTS.findall(attributes):
            names += [name.strip(" %") for name in names_in_list.split(",") if name.strip()]
        return tuple(names)

    @property
    def known_trips(self) -> int | None:
        """How often a loop's body runs, where XLA says it."""
        known = TRIPS.search(self.attributes)
        return int(known[1]) if known else None

    @property
    def index(self) -> int | None:
        """The element of a tuple that it takes; none for other instructions."""
        index = INDEX.search(self.attributes)
        return int(index[1]) if index and self.opcode == "get-tuple-element" else None

    @property
    def scope(self) -> str:
        """The place in the traced program that it comes from; empty where XLA does not say."""
        scope = SCOPE.search(self.attributes)
        return scope[1] if scope else ""

    @property
    def target(self) -> str:
        """The function that a custom call calls; empty for other instructions."""
        target = TARGET.search(self.attributes)
        return target[1] if target else ""

    @property
    def collective(self) -> str | None:
        """The operation of a collective or of its start; none for its end and for anything else."""
        operation = self.opcode.removesuffix(START)
        return operation if operation in SENT else None


@dataclass(frozen=True)
class Execution:
    """An instruction that runs.

    `trips` is the product of the trips of the loops around it. It is `exact` unless the data end
    one of them (which counts as one trip) or a branch decides (all sides of which count).
    """

    instruction: Instruction
    arrays: tuple[tuple[str, int], ...]  # of a collective: type and bytes of every operand
    trips: int
    exact: bool


@dataclass(frozen=True)
class Module:
    """The computations of a program by name, and the name of the one that runs."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str

    def executed(self) -> Iterator[Execution]:
        """All instructions that run, those of called computations once for each call."""
        yield from self._executions(self.entry, 1, True)

    def _executions(self, computation: str, trips: int, exact: bool) -> Iterator[Execution]:
        instructions = self.computations[computation]
        shapes = {instruction.name: instruction.shape for instruction in instructions}
        for instruction in instructions:
            arrays: list[tuple[str, int]] = []
            if instruction.collective:
                for operand in _sent_operands(instruction):
                    if operand not in shapes:
                        raise HloError(f"{instruction.name} reads {operand}, which is not there")
                    arrays += array_bytes(shapes[operand])
            yield Execution(instruction, tuple(arrays), trips, exact)
            if instruction.collective:
                continue  # an asynchronous one may name a computation that holds it once more
            inner = self._trips(instruction, computation)
            inner_trips = 1 if inner is None else inner
            known = exact and inner is not None
            for name in instruction.called:
                if name not in self.computations:
                    raise HloError(f"{instruction.name} calls {name}, which is not there")
                yield from self._executions(name, trips * inner_trips, known)

    def _trips(self, instruction: Instruction, computation: str) -> int | None:
        """How often an instruction runs what it calls; none where the data decide."""
        if instruction.opcode == "conditional":
            return None
        if instruction.opcode != "while":
            return 1
        known = instruction.known_trips
        return self._counted_trips(instruction, computation) if known is None else known

    def _counted_trips(self, loop: Instruction, computation: str) -> int | None:
        """Trips of a loop whose condition is `counter < constant`, whose counter begins at a
        constant and grows by 1."""
        condition = CONDITION.search(loop.attributes)
        body = BODY.search(loop.attributes)
        if not condition or not body:
            return None
        comparison = self._root_instruction(condition[1])
        returned = self._root_instruction(body[1])
        if comparison.opcode != "compare" or "direction=LT" not in comparison.attributes:
            return None
        # The counter is an element of the tuple that the loop carries: `position` finds its first
        # value in the loop's operand, and its next value in what the body returns.
        counter, limit = (self._definition(name, condition[1]) for name in comparison.operands)
        end = _constant_value(limit)
        if counter is None or counter.index is None or end is None or returned.opcode != "tuple":
            return None
        position = counter.index
        initial = self._definition(loop.operands[0], computation)
        if initial is None or initial.opcode != "tuple":
            return None
        begin = _constant_value(self._definition(initial.operands[position], computation))
        step = self._definition(returned.operands[position], body[1])
        if begin is None or step is None or step.opcode != "add":
            return None
        operands = [self._definition(name, body[1]) for name in step.operands]
        indices = {operand.index for operand in operands if operand} - {None}
        steps = {_constant_value(operand) for operand in operands} - {None}
        return max(end - begin, 0) if indices == {position} and steps == {1} else None

    def _root_instruction(self, computation: str) -> Instruction:
        return next(line for line in self.computations[computation] if line.root)

    def _definition(self, name: str, computation: str) -> Instruction | None:
        """The instruction of a name or, for a copy, the instruction that is copied."""
        lines = {line.name: line for line in self.computations[computation]}
        line = lines.get(name)
        while line is not None and line.opcode in SAME:
            line = lines.get(line.operands[0])
        return line


def _constant_value(line: Instruction | None) -> int | None:
    """The value of an integer constant; none for anything else."""
    if line is None or line.opcode != "constant" or not line.shape.startswith(("s32[]", "s64[]")):
        return None
    return int(line.operands[0])


def _sent_operands(instruction: Instruction) -> tuple[str, ...]:
    """Operands that are sent. A ragged exchange also has offsets and the receiver's buffer."""
    ragged = instruction.collective == "ragged-all-to-all"
    return instruction.operands[:1] if ragged else instruction.operands


@dataclass(frozen=True)
class Collective:
    """What one collective moves of one element type.

    `groups` are the devices that exchange something, [groups, devices of a group], or the pairs
    (source, target) of a permute, as positions in the mesh. `bytes` are those of the array once it
    is gathered, or before it is reduced, scattered or sent.
    """

    operation: str
    dtype: str  # as XLA names it: f32, bf16
    bytes: int  # of the whole array
    groups: tuple[tuple[int, ...], ...]
    trips: int
    exact: bool  # see `Execution`
    scope: str

    @cached_property
    def group_size(self) -> int:
        """Devices that exchange something."""
        return len(self.groups[0])

    @property
    def total_bytes(self) -> int:
        """Bytes of all trips."""
        return self.bytes * self.trips

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in all trips, in a ring."""
        return self.total_bytes * SENT[self.operation](self.group_size)


# ---------------------------------------------------------------------------- reading


def parse(text: str) -> Module:
    """The computations of an HLO module's text.

    Raises:
      HloError: there is no entry, or a line of a computation is not understood.
    """
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    entry = None
    # `current` collects the instructions of a computation. It is None between computations, where
    # all lines but headers are skipped.
    for line in text.splitlines():
        if line.startswith("}"):
            current = None
        elif current is None:
            header = None if line.startswith("HloModule") else HEADER.match(line)
            if header:
                current = computations[header[2]] = []
                entry = header[2] if header[1] else entry
        elif line.strip():
            # The shape of a long tuple contains comments that number its elements.
            current.append(_read_instruction(COMMENT.sub("", line)))
    if entry is None:
        raise HloError("the text has no ENTRY computation: it is no HLO module")
    return Module({name: tuple(lines) for name, lines in computations.items()}, entry)


def _read_instruction(line: str) -> Instruction:
    head = INSTRUCTION.match(line)
    if head is None:
        raise HloError(f"no instruction in {line.strip()[:200]!r}")
    begin = head.end()
    end = _closing_index(line, begin) if line[begin] == "(" else line.index(" ", begin)
    opcode = OPCODE.match(line, end)
    if opcode is None:
        raise HloError(f"no operation in {line.strip()[:200]!r}")
    closed = _closing_index(line, opcode.end() - 1)
    operands = _split_operands(line[opcode.end() : closed - 1])
    # Some versions of XLA print an operand's shape before its name
    names = tuple(operand.split()[-1].lstrip("%") for operand in operands)
    root = line.lstrip().startswith("ROOT ")
    return Instruction(head[1], opcode[1], line[begin:end], names, line[closed:], root)


def _closing_index(line: str, begin: int) -> int:
    """The index after the parenthesis that closes the one at `begin`."""
    depth = 0
    for index in range(begin, len(line)):
        depth += (line[index] == "(") - (line[index] == ")")
        if not depth:
            return index + 1
    raise HloError(f"a parenthesis is not closed in {line.strip()[:200]!r}")


def _split_operands(operands: str) -> list[str]:
    """The operands of a list, split at the commas outside of all brackets."""
    pieces = [""]
    depth = 0
    for character in operands:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece for piece in pieces if piece.strip()]


def array_bytes(shape: str) -> list[tuple[str, int]]:
    """Element type and bytes of each array of a shape, those of tuples one after another."""
    return [
        (dtype, -(-_bit_width(dtype) * math.prod(_integers(sizes)) // 8))
        for dtype, sizes in ARRAY.findall(shape)
    ]


def _bit_width(dtype: str) -> int:
    if dtype in NARROW:
        return NARROW[dtype]
    bits = re.match(r"(?:bf|f|s|u)(\d+)", dtype)  # f8e4m3fn has 8
    if bits is None:
        raise HloError(f"how many bits has {dtype}?")
    return int(bits[1])


def collectives(module: Module, devices: int) -> list[Collective]:
    """What a program sends, in the order of the text: one record for each collective that runs and
    each element type that it sends. Collectives whose groups are single devices move nothing and
    are left out: XLA's CPU backend keeps them, other backends remove them.

    Args:
      devices: number that the program runs on; a collective without groups is among all of them.

    Raises:
      HloError: the devices of a collective are written in an unknown way.
    """
    sent = []
    for execution in module.executed():
        instruction = execution.instruction
        operation = instruction.collective
        if operation is None:
            continue
        groups = device_groups(instruction.attributes, operation, devices)
        if len(groups[0]) == 1:
            continue
        bytes_of: dict[str, int] = {}
        for dtype, size in execution.arrays:
            bytes_of[dtype] = bytes_of.get(dtype, 0) + size
        # The operands of an all-gather are the shares of the devices
        factor = len(groups[0]) if operation == "all-gather" else 1
        sent += [
            Collective(
                operation=operation,
                dtype=dtype,
                bytes=size * factor,
                groups=groups,
                trips=execution.trips,
                exact=execution.exact,
                scope=instruction.scope,
            )
            for dtype, size in bytes_of.items()
        ]
    return sent


# ---------------------------------------------------------------------------- devices


def device_groups(attributes: str, operation: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The devices of a collective, from the attributes of its instruction; see `Collective`."""
    key = "source_target_pairs" if operation == PAIRS else "replica_groups"
    start = attributes.find(key)
    if start < 0:
        raise HloError(f"a {operation} without {key}: {attributes[:200]!r}")
    listing = attributes[start + len(key) :]
    if listed := LISTED.match(listing):
        groups = [_integers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1])]
        # An empty list means one group of all devices.
        return tuple(group for group in groups if group) or (tuple(range(devices)),)
    if iota := IOTA.match(listing):
        order = _iota_devices(iota[3], iota[4])
        return _rows(order.reshape(int(iota[1]), int(iota[2])))
    if mesh := MESH.match(listing):
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    raise HloError(f"devices of a {operation}: {listing[:200]!r}")


def _mesh_groups(axes: str, order: str | None, grouped: str) -> tuple[tuple[int, ...], ...]:
    """Groups along some axes, or parts of axes, of a mesh that the text describes."""
    sizes = {name: int(size) for name, size in MESH_AXIS.findall(axes)}
    devices = np.arange(math.prod(sizes.values()))
    if order:
        iota = MESH_ORDER.match(order)
        devices = _iota_devices(iota[1], iota[2]) if iota else np.array(_integers(order))
    # Every axis as [outer, grouped, inner] parts
    cuts_of_axes = [(name, outer, length) for name, outer, length in MESH_PART.findall(grouped)]
    shape: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        cuts = sorted(
            (int(outer or 1), int(length or size))
            for part_of, outer, length in cuts_of_axes
            if part_of == name
        )
        before = 1
        for outer, length in cuts:
            shape += [outer // before, length]
            inside.append(len(shape) - 1)
            before = outer * length
        shape.append(size // before)
    outside = [dimension for dimension in range(len(shape)) if dimension not in inside]
    group = math.prod(shape[dimension] for dimension in inside)
    return _rows(devices.reshape(shape).transpose(outside + inside).reshape(-1, group))


def _iota_devices(shape: str, order: str | None) -> Longs:
    """The numbers 0, 1, .. in a shape, flattened after its dimensions are reordered."""
    sizes = _integers(shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return (numbers.transpose(_integers(order)) if order else numbers).reshape(-1)


def _integers(listed: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in listed.split(",") if digits)


def _rows(groups: Longs) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, groups.tolist()))


def mesh_axes(collective: Collective, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh along which a collective moves something, in the mesh's order.

    Groups that hold only some of the devices along these axes have "part of" before the first.

    Args:
      sizes: of the mesh's axes, outermost first.
    """
    devices = np.array(collective.groups)
    coordinates = np.stack(np.unravel_index(devices, tuple(sizes.values())), axis=-1)
    differ = (coordinates != coordinates[:, :1]).any(axis=(0, 1))  # [axes]
    axes = tuple(axis for axis, differs in zip(sizes, differ, strict=True) if differs)
    if collective.operation == PAIRS or not axes:
        return axes
    covers_axes = math.prod(sizes[axis] for axis in axes) == collective.group_size
    return axes if covers_axes else (f"part of {axes[0]}", *axes[1:])
