"""Random folders drawn by the reference, with other sizes and spellings than the goldens have.

The model's numbers are compared with the reference's, and folders are written back byte for byte.
"""

import jax
import pytest

from jaxmllm.tools.convert import main as convert
from jaxmllm.tools.convert import to_orbax
from tests.families.redraw import FAMILIES, draw
from tests.support import EXHAUSTIVE, needs
from tests.tools.test_convert import check, on_one_device

SEEDS = (101, 202)


@needs("torch", "transformers")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "qwen3" else EXHAUSTIVE)
        for name in FAMILIES
    ],
)
def test_folders_of_other_sizes_are_those_of_the_reference(name, seed, tmp_path):
    folder = tmp_path / name
    draw(folder, name, seed)
    check(on_one_device(folder, folder / "inputs.npz"), folder)
    # One device, because the random widths need not divide among more.
    to_orbax(folder, tmp_path / "run", "float32", jax.devices()[:1])
    arguments = ["to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--source", str(folder)]
    assert convert(arguments) == 0
    for file in folder.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
