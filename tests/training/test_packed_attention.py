"""Steps with cuDNN's rule of attention: rows carry the runs of documents to the kernel.

The reference is attention by the ids of documents.
"""

import jax
import numpy as np
import pytest

TOWERS = ("vision", "audio", "language")


def narrow(attention: str) -> dict:
    """Changes of a config for this attention, in bfloat16, with rows of one rank."""
    components = {name: {"compute_dtype": "bfloat16", "attention": attention} for name in TOWERS}
    one_rank = {f"phases__{name}__spans": [1] for name in TOWERS}
    return {"components": components, "model__language__bidirectional": [], **one_rank}


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 20])
def test_documents_as_runs_train_as_documents_by_ids(setups, by_example, window):
    """Targets are equal; losses and gradients agree up to rounding."""
    windowed = {} if window is None else {"model__language__window": window}
    mesh = {"data": 2, "fsdp": 2}
    (runs, run_result), (ids, id_result) = (
        (setup, setup.gradients(setup.step(range(48))))
        for setup in (
            setups(by_example(mesh=mesh, **narrow(kernel), **windowed), 4)
            for kernel in ("cudnn", "jax")
        )
    )
    assert all("runs" in row for rows in runs.step(range(48)).rows.values() for row in rows)
    assert not any("runs" in row for rows in ids.step(range(48)).rows.values() for row in rows)
    np.testing.assert_array_equal(run_result.targets, id_result.targets)
    # Both paths round to bfloat16 (2^-9), but in a different order
    np.testing.assert_allclose(run_result.loss, id_result.loss, rtol=1e-2)
    for name, expected in id_result.grads.items():
        flat_grads = [
            np.concatenate([np.ravel(np.float64(leaf)) for leaf in jax.tree.leaves(tree)])
            for tree in (run_result.grads[name], expected)
        ]
        assert (
            np.linalg.norm(flat_grads[0] - flat_grads[1]) < 0.02 * np.linalg.norm(flat_grads[1]) > 0
        ), name
