"""Lines, which say how a parameter lies in the tensors of files.

Any slice that is read equals the same slice of the whole parameter, and is written back bit for
bit. The reference computes every element's place in the files by index arithmetic."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.families.by_type import FAMILIES
from jaxmllm.families.lines import Line

# A size for every letter of every line. Different sizes tell most swapped axes apart.
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
    """The whole parameter, element by element. Joined axes count their last letter fastest."""
    parameter = np.empty(shape)
    for parameter_index in np.ndindex(shape):
        letter_index = {}
        for axis, flat_index in zip(line.parameter, parameter_index, strict=True):
            letters = axis.split()
            sizes = [LETTERS[letter] for letter in letters]
            letter_index |= dict(zip(letters, np.unravel_index(flat_index, sizes), strict=True))
        letter_index |= {
            letter: LETTERS[letter] - 1 - letter_index[letter] for letter in line.backward
        }
        index = []
        for group in line.tensor:
            flat_index = 0
            for letter in group:
                flat_index = flat_index * LETTERS[letter] + letter_index[letter]
            index.append(flat_index)
        axis = line.part_axis
        index[axis] += line.part * math.prod(LETTERS[letter] for letter in line.tensor[axis])
        parameter[parameter_index] = tensors[
            line.key.format(layer=letter_index.get("layer"), expert=letter_index.get("expert"))
        ][tuple(index)]
    return parameter


@pytest.mark.parametrize("text", LINES)
@settings(max_examples=5)
@given(data=st.data())
def test_a_slice_is_read_and_written_like_the_whole(text, data):
    line = Line.of(text, LETTERS)
    shape = tuple(math.prod(LETTERS[letter] for letter in axis.split()) for axis in line.parameter)
    random = np.random.default_rng(0)
    tensors = {key: random.standard_normal(line.tensor_shape(shape)) for key in line.keys(shape)}
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape]
    slices = tuple(slice(begin, max(begin + 1, end)) for begin, end in bounds)
    values = np.empty([piece.stop - piece.start for piece in slices])
    for key, target, tensor_slice in line.pieces(shape, slices):
        values[target] = line.read(tensors[key], shape, tensor_slice)
    np.testing.assert_array_equal(values, whole_of(line, tensors, shape)[slices])
    banded = np.full_like(values, np.nan)
    band_numbers = data.draw(st.integers(1, 100))
    for key, target, tensor_slice in line.pieces(shape, slices):
        for band, band_slice in line.bands(shape, tensor_slice, band_numbers):
            banded[target][band] = line.read(tensors[key], shape, band_slice)
    np.testing.assert_array_equal(banded, values)
    index = tuple(  # Writing takes joined axes whole.
        slice(0, size) if " " in axis else piece
        for axis, size, piece in zip(line.parameter, shape, slices, strict=True)
    )
    values = whole_of(line, tensors, shape)[index]
    written_tensors = {key: np.zeros_like(tensor) for key, tensor in tensors.items()}
    for key, target, tensor_slice in line.pieces(shape, index):
        view = line.view(written_tensors[key], shape, tensor_slice)
        view[...] = values[target].reshape(view.shape)
    untouched = np.ones(shape, bool)
    untouched[index] = False
    np.testing.assert_array_equal(
        whole_of(line, written_tensors, shape),
        np.where(untouched, 0, whole_of(line, tensors, shape)),
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
    """Bands have at most 20 numbers, whichever part of the first axis is read."""
    line = Line.of(text)
    axes = line.parameter[len(line.stacked) :]
    full_slices = {axis: slice(None) for axis in axes}
    index = tuple((full_slices | {"v": slice(7, 31)}).values())
    bands = [band_slices[axes.index("v")] for _, band_slices in line.bands(shape, index, 20)]
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
