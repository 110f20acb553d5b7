"""Chips that are not attached: how to install their compilers, and the shapes of their hosts."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxmllm.setup import chips
from jaxmllm.setup.chips import CHIPS, ChipError, chip_devices, chip_of

WHEELS = any(map(chips._installed, chips.CUDA_PLUGINS))


@pytest.mark.parametrize(
    "name, extra", [("h100", "jaxmllm[ahead]"), ("v5p", "jaxmllm[tpu]"), ("v6e", "jaxmllm[tpu]")]
)
def test_a_missing_compiler_says_what_to_install(monkeypatch, name, extra):
    monkeypatch.setattr(chips, "_installed", lambda package: False)
    with pytest.raises(ChipError, match=re.escape(f"pip install '{extra}'")):
        chip_devices(chip_of(name), 8)


@pytest.mark.parametrize("same", [False, True])
def test_a_compiler_of_another_version_is_refused(monkeypatch, same):
    version = f"{jaxlib.__version__}+local" if same else "0.9.7"
    monkeypatch.setattr(chips, "_installed", lambda package: package == "jax_plugins.xla_cuda12")
    monkeypatch.setattr(chips, "_version", {"jax-cuda12-pjrt": version}.get)
    monkeypatch.setattr(
        chips.topologies, "get_topology_desc", lambda *names, **options: SimpleNamespace(devices=[])
    )
    if same:
        assert chip_devices(CHIPS["h100"], 8) == []
        return
    with pytest.raises(ChipError, match=r"jax-cuda12-pjrt of .* not 0\.9\.7: ") as caught:
        chip_devices(CHIPS["h100"], 8)
    message = str(caught.value)
    assert message.endswith("pip install 'jaxmllm[ahead]'") and "\n" not in message


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_a_compiler_that_jax_cannot_ask_says_what_to_install(monkeypatch, error):
    def refuse(*names, **options):
        raise error("topology not implemented for cuda\nmore of it")

    monkeypatch.setattr(chips, "_check_version", lambda chip: None)
    monkeypatch.setattr(chips, "_installed", lambda package: True)
    monkeypatch.setattr(chips.topologies, "get_topology_desc", refuse)
    with pytest.raises(ChipError, match="not implemented for cuda; install its compiler") as caught:
        chip_devices(CHIPS["h100"], 8)
    assert "\n" not in str(caught.value)


def test_unknown_chips_name_the_known_ones():
    with pytest.raises(ChipError, match="'a100'; chips: h100, v5p, v6e, cpu"):
        chip_of("a100")


@pytest.mark.parametrize("count, words", [(1, "1x1x1"), (8, "1x1x8"), (2560, "1x320x8")])
def test_hosts_of_gpus(count, words):
    assert chips._gpu_topology(CHIPS["h100"], count) == words


def test_half_a_host_besides_whole_ones_is_refused():
    with pytest.raises(ChipError, match="12 devices of h100 are no whole hosts of 8") as refusal:
        chips._gpu_topology(CHIPS["h100"], 12)
    assert str(refusal.value).endswith("; say 8 or 16")


@pytest.mark.parametrize(
    "name, count, words",
    [
        ("v5p", 4, "2x2x1"),
        ("v5p", 8, "2x2x2"),
        ("v5p", 16, "2x2x4"),
        ("v5p", 2048, "8x16x16"),
        ("v6e", 4, "2x2"),
        ("v6e", 8, "2x4"),
        ("v6e", 256, "16x16"),
    ],
)
def test_sides_of_slices(name, count, words):
    assert chips._torus(CHIPS[name], count) == words


@pytest.mark.parametrize("count", [2, 12])
def test_slices_that_are_not_built_are_refused(count):
    with pytest.raises(ChipError, match=f"{count} devices of v5p"):
        chips._torus(CHIPS["v5p"], count)


@pytest.mark.skipif(not WHEELS, reason="needs jaxmllm[ahead]")
def test_memory_has_no_limit(monkeypatch, capfd):
    """Near the limit of a device, XLA recomputes what it could keep, and
    complains only if that fails."""

    def products(x):
        # 16 matrices of 4 MB each
        products_of_rows = [jnp.sin(row)[:, None] * jnp.cos(row) for row in x]
        for array in [*products_of_rows, *products_of_rows]:
            x = x @ array
        return x

    def complaints():
        sharding = SingleDeviceSharding(chip_devices(CHIPS["h100"], 1)[0])
        x = jax.ShapeDtypeStruct((16, 1024), np.float32, sharding=sharding)
        jax.jit(products).lower(x).compile(compiler_options=dict(chips.UNTIMED))
        return capfd.readouterr().err.count("rematerialization")

    assert not complaints()
    monkeypatch.setattr(chips, "UNLIMITED_BYTES", 32 << 20)
    assert complaints()


@pytest.mark.skipif(not WHEELS, reason="needs jaxmllm[ahead]")
def test_gpus_that_are_not_there():
    devices = chip_devices(CHIPS["h100"], 16)
    assert [device.process_index for device in devices] == [0] * 8 + [1] * 8
    assert {device.platform for device in devices} == {"gpu"}
    assert "H100" in devices[0].device_kind
