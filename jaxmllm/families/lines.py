"""Lines of text that say where a parameter is stored in the tensors of a published checkpoint.

    model.layers.{layer}.self_attn.q_proj.weight: (h k) d -> layer d h k

The tensor with this key has two axes, the first of them h and k joined; the parameter has four, and
its first one counts the tensors. Where every expert of a layer has a tensor of its own, the key has
{expert} as well, and the parameter begins with "layer expert". A line only permutes, groups and
stacks. So any slice of the parameter is a view of the tensors, and reading and writing are
assignments from and to that view.

    patch_embedding.weight: d c p q -> (p q c) d

Here the parameter has two axes, and the view of the tensor four: it is reshaped when it is read or
written. The sizes of letters that are joined in a parameter must be given.

    attn.qkv.weight[1/3]: (h k) d -> layer d h k

A tensor that joins several parameters along its first axis has a line for each of them: this one is
for the second of three. Where they are joined along another axis, the line gives its number:

    experts.gate_up_proj[0/2, axis 2]: e d f -> layer e d f

A letter with a minus counts backward in the tensor: this one begins with the end of the parameter.

    norm_out.linear.bias: (-n d) -> n d
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

STACKED = ("layer", "expert")  # axes that count tensors, in this order
_LINE_FORM = re.compile(
    r"(?P<key>[^\s\[]+)(?:\[(?P<part>\d+)/(?P<parts>\d+)(?:, axis (?P<axis>\d+))?\])?: "
    r"(?P<tensor>.+) -> (?P<parameter>.+)"
)
_AXIS = re.compile(r"\(([-\w ]+)\)|(-?\w+)")

Index = tuple[slice, ...]  # into a parameter


def full_index(shape: tuple[int, ...]) -> Index:
    """The slice that is the whole parameter."""
    return tuple(slice(0, size) for size in shape)


def _axes(text: str) -> tuple[str, ...]:
    """The axes on one side of a line; the letters of a group are separated by spaces."""
    # A pair for each axis: (letters, "") for a group in parentheses, ("", letter) for any other
    return tuple(group or letter for group, letter in _AXIS.findall(text))


@dataclass(frozen=True)
class Line:
    """One line: a key, of one tensor or one per layer or expert; axes of tensor and parameter."""

    key: str
    tensor: tuple[tuple[str, ...], ...]  # axes, each a group of letters
    parameter: tuple[str, ...]  # axes; letters that are joined in one are separated by spaces
    joined: Mapping[str, int] = field(default_factory=dict)  # sizes of joined letters
    part: int = 0  # which of the `parts` of the tensor holds the parameter
    parts: int = 1
    part_axis: int = 0  # axis of the tensor along which the parts are joined
    backward: frozenset[str] = frozenset()  # letters that count backward in the tensor

    @classmethod
    def of(cls, text: str, sizes: Mapping[str, int] | None = None) -> Line:
        """Parse a line. Raises ValueError for one that does more than permute, group and stack.

        Args:
          sizes: sizes of letters, at least of those that are joined in the parameter.
        """
        match = _LINE_FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not of the form 'key: axes -> axes'")
        signed = [axis.split() for axis in _axes(match["tensor"])]
        tensor = tuple(tuple(letter.removeprefix("-") for letter in group) for group in signed)
        backward = {letter[1:] for letter in itertools.chain(*signed) if letter.startswith("-")}
        parameter = _axes(match["parameter"])
        joined = " ".join(axis for axis in parameter if " " in axis).split()
        # The parameter's shape gives all sizes, but of joined letters only the product.
        if missing := [letter for letter in joined if letter not in (sizes or {})]:
            raise ValueError(f"{text!r}: nothing says the size of {', '.join(missing)}")
        line = cls(
            match["key"],
            tensor,
            parameter,
            joined={letter: (sizes or {})[letter] for letter in joined},
            part=int(match["part"] or 0),
            parts=int(match["parts"] or 1),
            part_axis=int(match["axis"] or 0),
            backward=frozenset(backward),
        )
        line._check(text)
        return line

    def _check(self, text: str) -> None:
        """Raise ValueError unless the line, parsed from `text`, is one that can be followed."""
        if self.part >= self.parts:
            raise ValueError(f"{text!r}: parts of a tensor are counted from 0")
        axis = self.part_axis
        if axis and (axis >= len(self.tensor) or len(self.tensor[axis]) > 1):
            raise ValueError(f"{text!r}: there is no axis {axis} of one letter to part")
        if self.parameter[: len(self.stacked)] != self.stacked or {*STACKED} & {*self.letters}:
            raise ValueError(
                f"{text!r}: {{layer}} and {{expert}} in the key go with layer and expert as the first axes"
            )
        letters = sorted(itertools.chain(*self.tensor))
        if letters != sorted(self.letters) or len({*letters}) < len(letters):
            raise ValueError(f"{text!r} must have the same letters on both sides, each once")

    @property
    def stacked(self) -> tuple[str, ...]:
        """Axes of the parameter that count tensors."""
        return tuple(name for name in STACKED if f"{{{name}}}" in self.key)

    @property
    def letters(self) -> tuple[str, ...]:
        """Letters of the parameter that each tensor has, too; joined letters count one by one."""
        return tuple(" ".join(self.parameter[len(self.stacked) :]).split())

    def keys(self, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Keys of all tensors of a parameter."""
        return tuple(self._tensor_key(place) for place in np.ndindex(shape[: len(self.stacked)]))

    def _tensor_key(self, place: tuple[int, ...]) -> str:
        """The key of one tensor."""
        key = self.key
        for name, number in zip(self.stacked, place, strict=True):
            key = key.replace(f"{{{name}}}", str(number))
        return key

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each tensor of a parameter."""
        sizes = [*self._part_shape(shape)]
        sizes[self.part_axis] *= self.parts
        return tuple(sizes)

    def _part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the part of each tensor that holds the parameter."""
        sizes = self._letter_sizes(shape)
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.tensor)

    def pieces(self, shape: tuple[int, ...], index: Index) -> Iterator[tuple[str, Any, Index]]:
        """The parts of a slice of a parameter that each tensor holds: (key, place in the slice,
        slice of one tensor)."""
        axes = len(self.stacked)
        counted = [range(*extent.indices(size)) for extent, size in zip(index, shape, strict=True)]
        for place in np.ndindex(*map(len, counted[:axes])):
            tensor = tuple(numbers[offset] for numbers, offset in zip(counted, place, strict=False))
            yield self._tensor_key(tensor), (*place, ...), index[axes:]

    def view(self, tensor: NDArray[Any], shape: tuple[int, ...], index: Index) -> NDArray[Any]:
        """A slice of what one tensor holds of a parameter: a view of the tensor with an axis for
        each of `letters`.

        Args:
          tensor: contiguous, in its own shape.
          shape: shape of the whole parameter.
          index: a slice of each axis after those that count tensors. Joined axes are taken whole.
        """
        sizes = self._letter_sizes(shape)
        order = list(itertools.chain(*self.tensor))
        # The part is cut out before the axes are split: `sizes` are those of the parameter alone.
        if self.parts > 1:
            length = self._part_shape(shape)[self.part_axis]
            part_slice = slice(self.part * length, (self.part + 1) * length)
            tensor = tensor[(slice(None),) * self.part_axis + (part_slice,)]
        split = tensor.reshape([sizes[letter] for letter in order])
        # `Fit.fill` writes through the view, so a copy would lose the numbers. Empty arrays share
        # nothing.
        assert np.shares_memory(split, tensor) or not tensor.size, "a view, not a copy"
        split = np.flip(split, tuple(order.index(letter) for letter in self.backward))
        view = split.transpose([order.index(letter) for letter in self.letters])
        return view[self._index_by_letter(shape, index)]

    def read(self, tensor: NDArray[Any], shape: tuple[int, ...], index: Index) -> NDArray[Any]:
        """As `view`, in the axes of the parameter. May copy, so slices may also cut joined axes."""
        stacked_axes = len(self.stacked)
        # Joined axes are viewed whole and cut after they are reshaped; the others are cut at once.
        joined = [" " in axis for axis in self.parameter[stacked_axes:]]
        outer = tuple(
            slice(None) if is_joined else extent
            for is_joined, extent in zip(joined, index, strict=True)
        )
        inner = tuple(
            extent if is_joined else slice(None)
            for is_joined, extent in zip(joined, index, strict=True)
        )
        axes = zip(shape[stacked_axes:], outer, strict=True)
        sizes = [len(range(*extent.indices(size))) for size, extent in axes]
        return self.view(tensor, shape, outer).reshape(sizes)[inner]

    def bands(
        self, shape: tuple[int, ...], index: Index, numbers: int
    ) -> Iterator[tuple[Index, Index]]:
        """A slice of one tensor, cut into bands along the tensor's first axis: (place in the slice,
        slice of the tensor).

        Args:
          shape: shape of the whole parameter.
          index: a slice of each axis after those that count tensors.
          numbers: how many numbers of the tensor a band may stretch over. A band has at least one
            index of the first axis. A first axis that is joined in the parameter is not cut.
        """
        letter = self.tensor[0][0]
        axes = self.parameter[len(self.stacked) :]
        everything = (slice(None),) * len(index)
        if letter not in axes:
            yield everything, index
            return
        axis = axes.index(letter)
        length = self._letter_sizes(shape)[letter]
        lower, upper, _ = index[axis].indices(length)
        # Numbers of the tensor from one index of the axis to the next
        stride = math.prod(self._part_shape(shape)) // max(1, length)
        if self.part_axis:
            stride *= self.parts
        step = max(1, numbers // max(1, stride))
        for begin in range(lower, upper, step):
            end = min(begin + step, upper)
            yield (
                (*everything[:axis], slice(begin - lower, end - lower), *everything[axis + 1 :]),
                (*index[:axis], slice(begin, end), *index[axis + 1 :]),
            )

    def tensors(self, values: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The tensors of a whole parameter, by key, where they hold nothing else."""
        tensors = {}
        for key, place, index in self.pieces(values.shape, full_index(values.shape)):
            tensors[key] = np.empty(self.tensor_shape(values.shape), values.dtype)
            self.view(tensors[key], values.shape, index)[...] = values[place]
        return tensors

    def _index_by_letter(self, shape: tuple[int, ...], index: Index) -> Index:
        slices: list[slice] = []
        stacked_axes = len(self.stacked)
        for axis, size, extent in zip(
            self.parameter[stacked_axes:], shape[stacked_axes:], index, strict=True
        ):
            letters = axis.split()
            if len(letters) > 1 and extent.indices(size) != (0, size, 1):
                raise ValueError(f"{self.key}: the axis ({axis}) is read whole, not {extent}")
            slices += [extent] if len(letters) == 1 else [slice(None)] * len(letters)
        return tuple(slices)

    def _letter_sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        if len(shape) != len(self.parameter):
            raise ValueError(f"{self.key}: a parameter of shape {shape} has not {self.parameter}")
        sizes = dict(self.joined)
        for axis, size in zip(self.parameter, shape, strict=True):
            letters = axis.split()
            if len(letters) == 1:
                sizes[axis] = size
            elif math.prod(sizes[letter] for letter in letters) != size:
                raise ValueError(f"{self.key}: an axis of {size} is not ({axis})")
        return sizes
