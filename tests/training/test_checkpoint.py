"""Checkpoints: whole or absent, readable on any mesh, refused when they do not fit."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmllm.config import Config, parse_config
from jaxmllm.training.checkpoint import CheckpointError, Checkpoints, check_compatible, read_config, write_config

ROOT = Path(__file__).parents[2]


def host_params(width: int = 16) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "language": {"w": rng.normal(size=(8, width)).astype(jnp.bfloat16), "scale": rng.normal(size=8).astype("f4")},
        "projector": {"vision": {"w": rng.normal(size=(16, 8)).astype(np.float32)}},
    }


def make_state(shape: tuple[int, int], params: dict[str, Any], step: int = 0) -> dict[str, Any]:
    """A state on a mesh of `shape`: matrices sharded over both axes, vectors and scalars replicated."""
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def place(leaf: Any) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(mesh, P("fsdp", "tensor") if leaf.ndim == 2 else P()))

    placed = jax.tree.map(place, params)
    moments = optax.adamw(1e-3).init(jax.tree.map(lambda leaf: leaf + 1, placed))
    return {
        "params": placed,
        "optimizer": jax.tree.map(place, moments),
        "step": place(np.asarray(step, np.int32)),
        "skipped": place(np.asarray(0, np.int32)),
    }


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def assert_same(restored: Any, expected: Any) -> None:
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize("shape", [(8, 1), (2, 4), (1, 1)])
def test_restores_on_another_mesh(tmp_path: Path, shape: tuple[int, int]) -> None:
    saved = make_state((4, 2), host_params(), step=7)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step is None
        assert checkpoints.save(7, saved)
        assert not checkpoints.save(7, saved), "the same step is not written twice"
    target = make_state(shape, jax.tree.map(np.zeros_like, host_params()))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step == 7
        restored = checkpoints.restore(abstract(target))
    assert_same(restored, saved)
    for left, right in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert left.sharding.is_equivalent_to(right.sharding, left.ndim)


def test_double_precision(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        saved = {"params": {"language": {"w": jnp.linspace(0, 1, 9, dtype=jnp.float64) / 3}}}
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            checkpoints.save(1, saved)
            assert_same(checkpoints.restore(abstract(saved)), saved)


def test_a_saved_state_may_be_donated(tmp_path: Path) -> None:
    state = make_state((4, 2), {"language": {"w": np.zeros((512, 512), np.float32)}})
    update = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    expected = jax.tree.map(np.array, state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(0, state)
        for _ in range(5):
            state = update(state)
        restored = checkpoints.restore(abstract(state))
    assert_same(restored, expected)


def test_keeps_the_latest(tmp_path: Path) -> None:
    state = make_state((8, 1), host_params())
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (3, 6, 9, 12):
            checkpoints.save(step, state | {"step": jnp.int32(step)})
        checkpoints.wait()
        assert checkpoints.steps == [9, 12]
        assert int(checkpoints.restore(abstract(state), step=9)["step"]) == 9
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["12", "9"]


def test_a_killed_save_leaves_the_last_complete_one(tmp_path: Path) -> None:
    program = """
        import os, signal, sys
        import jax.numpy as jnp
        from jaxmllm.training.checkpoint import Checkpoints
        checkpoints = Checkpoints(sys.argv[1], keep=3)
        checkpoints.save(1, {"w": jnp.full((4096, 4096), 1.0)})
        checkpoints.wait()
        checkpoints.save(2, {"w": jnp.full((4096, 4096), 2.0)})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], env=environment)
    assert killed.returncode == -signal.SIGKILL
    leftovers = [entry.name for entry in tmp_path.iterdir() if entry.name != "1"]
    assert len(leftovers) == 1 and leftovers[0].startswith("2."), "the kill came in the middle of a save"
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        assert checkpoints.steps == [1]
        template = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=jnp.zeros(()).sharding)}
        assert float(checkpoints.restore(template)["w"].min()) == 1.0
        checkpoints.save(2, {"w": jnp.full((4096, 4096), 3.0)})
        assert float(checkpoints.restore(template)["w"].min()) == 3.0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2"], "leftovers are swept away"


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, make_state((8, 1), host_params()))
        wide = host_params(width=32)
        del wide["projector"]
        wide["language"]["scale"] = wide["language"]["scale"].astype(jnp.bfloat16)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(abstract(make_state((8, 1), wide)))
    text = str(caught.value)
    assert f"checkpoint {tmp_path / '5'} does not fit the model of this config (9 arrays differ)" in text
    assert "optimizer.0.mu.language.w: saved bfloat16[8, 16], this model has bfloat16[8, 32]" in text
    assert "optimizer.0.mu.language.scale: saved float32[8], this model has bfloat16[8]" in text
    assert "optimizer.0.mu.projector.vision.w: saved float32[16, 8], this model has nothing" in text
    assert "... and 4 more" in text
    assert "set run.directory to a new folder" in text


def test_missing_and_damaged_checkpoints(tmp_path: Path) -> None:
    state = {"w": jnp.ones((4, 4))}
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        with pytest.raises(CheckpointError, match=r"does not hold a checkpoint \(steps there: none\)"):
            checkpoints.restore(abstract(state))
        checkpoints.save(1, state)
        checkpoints.save(2, state)
        with pytest.raises(CheckpointError, match=r"does not hold checkpoint 3 \(steps there: \[1, 2\]\)"):
            checkpoints.restore(abstract(state), step=3)
    for file in (tmp_path / "2").rglob("manifest.ocdbt"):
        file.write_bytes(b"torn")
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        with pytest.raises(CheckpointError, match=r"cannot be read: .* delete that folder to resume from step 1"):
            checkpoints.restore(abstract(state))


# ---------------------------------------------------------------------------- config


def make_config(directory: str = "runs/a", **changes: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"directory": directory, "steps": 10},
        "model": {"language": dict(width=8, layers=1, heads=2, kv_heads=1, head_size=4, mlp_width=16)},
        "data": {"sources": [{"name": "s", "path": "s.jsonl"}], "batch_size": 4},
        "optimizer": {"learning_rate": 1e-3},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return parse_config(tree)


def test_config_survives_the_run_folder(tmp_path: Path) -> None:
    config = make_config(components__vision__layout={"batch": ["data", "tensor"]}, optimizer__epsilon=1e-12)
    assert read_config(tmp_path) is None
    write_config(tmp_path / "run", config)
    assert read_config(tmp_path / "run") == config
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    "change",
    [
        {"directory": "runs/b"},
        {"run__steps": 99},
        {"mesh__fsdp": 2},
        {"data__workers": 3},
        {"phases__vision__capacities": [256]},
        {"balance__mode": "none"},
        {"components__projector__vision__remat": "none"},
        {"components__vision__layout": {"batch": ["data"]}},
        {"logging__every": 5},
        {"model__language__loss_chunk": 64},
    ],
)
def test_what_may_change_on_resume(change: dict[str, Any]) -> None:
    check_compatible(make_config(), make_config(**change))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"run__seed": 3}, "run.seed: 0 in the run, 3 now"),
        ({"data__batch_size": 8}, "data.batch_size: 4 in the run, 8 now"),
        ({"data__tokenizer": "t.json"}, "data.tokenizer: None in the run, 't.json' now"),
        ({"data__images__max_pixels": 1000}, "data.images.max_pixels: 1048576 in the run, 1000 now"),
        ({"data__sources": [{"name": "s", "path": "z.jsonl"}]}, "data.sources.0.path: 's.jsonl' in the run, 'z.jsonl'"),
        ({"model__language__qk_norm": True}, "model.language.qk_norm: False in the run, True now"),
        ({"components__audio__freeze": True}, "components.audio.freeze: False in the run, True now"),
        ({"optimizer__learning_rate": 0.5}, "optimizer.learning_rate: 0.001 in the run, 0.5 now"),
        ({"run__param_dtype": "float64"}, "run.param_dtype: 'float32' in the run, 'float64' now"),
    ],
)
def test_what_may_not_change_on_resume(change: dict[str, Any], line: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_compatible(make_config(), make_config(**change))
    assert line in str(caught.value)
    assert "runs/a/config.yaml" in str(caught.value)


def test_a_source_more_is_named() -> None:
    sources = [{"name": "s", "path": "s.jsonl"}, {"name": "t", "path": "t.jsonl"}]
    with pytest.raises(CheckpointError, match=r"data\.sources\.1\.name: absent in the run, 't' now"):
        check_compatible(make_config(), make_config(data__sources=sources))
