"""Lines of parameters: any slice is what lies at its place in the whole, and is written back bit for bit."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.families.by_type import FAMILIES
from jaxmllm.families.lines import Line

LETTERS = {"layer": 3, "d": 6, "h": 4, "k": 2, "g": 2, "f": 5, "v": 7, "e": 4, "expert": 2}
LETTERS |= {"c": 3, "p": 2, "q": 4, "r": 3, "s": 2, "t": 3, "m": 5, "i": 2, "j": 2, "n": 3}
LETTERS |= {"one": 1, "two": 2, "pair": 3}
LINES = sorted(
    {line for family in FAMILIES.values() for line in family.parameters.values()}
    | {line for family in FAMILIES.values() for line in family.copies.values()}
    | {
        line
        for family in FAMILIES.values()
        for variant in family.variants
        for line in variant.lines.values()
    }
)


def whole_of(line: Line, tensors: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """The parameter, element by element: the index of a joined axis counts its last letter fastest."""
    whole = np.empty(shape)
    for place in np.ndindex(shape):
        at = {}
        for axis, number in zip(line.parameter, place, strict=True):
            letters = axis.split()
            sizes = [LETTERS[letter] for letter in letters]
            at |= dict(zip(letters, np.unravel_index(number, sizes), strict=True))
        at |= {letter: LETTERS[letter] - 1 - at[letter] for letter in line.backward}
        index = []
        for group in line.tensor:
            number = 0
            for letter in group:
                number = number * LETTERS[letter] + at[letter]
            index.append(number)
        axis = line.part_axis
        index[axis] += line.part * math.prod(LETTERS[letter] for letter in line.tensor[axis])
        whole[place] = tensors[line.key.format(layer=at.get("layer"), expert=at.get("expert"))][
            tuple(index)
        ]
    return whole


@pytest.mark.parametrize("text", LINES)
@settings(max_examples=5)
@given(data=st.data())
def test_a_slice_is_read_and_written_like_the_whole(text, data):
    line = Line.of(text, LETTERS)
    shape = tuple(math.prod(LETTERS[letter] for letter in axis.split()) for axis in line.parameter)
    random = np.random.default_rng(0)
    tensors = {key: random.standard_normal(line.tensor_shape(shape)) for key in line.keys(shape)}
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape]
    cut = tuple(slice(first, max(first + 1, last)) for first, last in bounds)
    part = np.empty([piece.stop - piece.start for piece in cut])
    for key, place, of_tensor in line.pieces(shape, cut):
        part[place] = line.read(tensors[key], shape, of_tensor)
    np.testing.assert_array_equal(part, whole_of(line, tensors, shape)[cut])
    in_bands = np.full_like(part, np.nan)
    numbers = data.draw(st.integers(1, 100))
    for key, place, of_tensor in line.pieces(shape, cut):
        for band, of_band in line.bands(shape, of_tensor, numbers):
            in_bands[place][band] = line.read(tensors[key], shape, of_band)
    np.testing.assert_array_equal(in_bands, part)
    index = tuple(  # what is written has joined axes whole
        slice(0, size) if " " in axis else piece
        for axis, size, piece in zip(line.parameter, shape, cut, strict=True)
    )
    part = whole_of(line, tensors, shape)[index]
    written = {key: np.zeros_like(tensor) for key, tensor in tensors.items()}
    for key, place, of_tensor in line.pieces(shape, index):
        view = line.view(written[key], shape, of_tensor)
        view[...] = part[place].reshape(view.shape)
    outside = np.ones(shape, bool)
    outside[index] = False
    np.testing.assert_array_equal(
        whole_of(line, written, shape), np.where(outside, 0, whole_of(line, tensors, shape))
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.weight d -> d", "not of the form"),
        ("a.weight: (h k) d -> d h", "same letters on both sides"),
        ("a.weight: d d -> d", "each once"),
        ("a.{layer}.weight: d -> d", "go with layer and expert as the first axes"),
        ("a.weight: layer d -> d layer", "go with layer and expert as the first axes"),
        ("a.{layer}.{expert}.weight: d -> expert layer d", "as the first axes"),
        ("a.weight: d c -> (c d)", "nothing says the size of c, d"),
    ],
)
def test_a_line_that_does_more_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        Line.of(text)


@pytest.mark.parametrize(
    ("text", "shape", "step"),
    [
        ("a.weight: v d -> v d", (50, 4), 5),
        ("a.weight: v d -> d v", (4, 50), 5),
        ("a.weight[1/2]: v d -> v d", (50, 4), 5),
        ("a.weight[1/2, axis 1]: v d -> v d", (50, 4), 2),
        ("a.{layer}.weight: (v k) d -> layer d v k", (3, 2, 50, 2), 5),
    ],
)
def test_bands_reach_over_few_numbers(text, shape, step):
    """Of 20 numbers, whatever part of the first axis is read."""
    line = Line.of(text)
    axes = line.parameter[len(line.stacked) :]
    everything = {axis: slice(None) for axis in axes}
    index = tuple((everything | {"v": slice(7, 31)}).values())
    bands = [of_band[axes.index("v")] for _, of_band in line.bands(shape, index, 20)]
    assert [(band.start, band.stop) for band in bands] == [
        (begin, min(begin + step, 31)) for begin in range(7, 31, step)
    ]


def test_joined_axes_are_read_whole():
    line = Line.of("a.weight: d c p -> (p c) d", {"c": 3, "p": 2})
    tensor = np.arange(24).reshape(4, 3, 2)
    with pytest.raises(ValueError, match=r"the axis \(p c\) is read whole"):
        line.view(tensor, (6, 4), (slice(0, 3), slice(0, 4)))
    with pytest.raises(ValueError, match=r"an axis of 5 is not \(p c\)"):
        line.tensor_shape((5, 4))
