"""Clusters by name and from files, and the errors of files that describe none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxmllm.cluster.clusters import CLUSTERS, ClusterError, cluster_of
from jaxmllm.runtime.hardware import table_flops


@pytest.mark.parametrize("name", CLUSTERS)
def test_records_are_complete(name):
    cluster = cluster_of(name)
    assert cluster.name == name and cluster.source
    assert cluster.peak() == (table_flops(cluster.device_kind, "bfloat16") or cluster.peak_flops)
    assert cluster.budget == 0.9 * cluster.memory
    # Links between nodes are no faster than those within one, and memory is faster than either
    assert cluster.between_nodes.bytes_per_second <= cluster.in_node.bytes_per_second
    assert cluster.in_node.rate("all-gather") < cluster.memory_bandwidth


def test_peaks_are_those_of_the_table():
    assert cluster_of("h100").peak() == 989.5e12
    assert cluster_of("a100").peak("float32") == 19.5e12
    assert cluster_of("v5e").peak() == 197e12
    with pytest.raises(ClusterError, match=r"no peak for float64.*peak_flops"):
        cluster_of("h100").peak("float64")


def test_a_file_says_what_differs(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("like: a100\nmemory: 64e9\ntaken_share: 0.9\n")
    cluster = cluster_of(str(file))
    assert cluster.name == "mine" and cluster.budget == pytest.approx(57.6e9)
    assert cluster.in_node == cluster_of("a100").in_node


def test_a_file_says_what_differs_in_nested_keys(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("like: a100\nefficiency: {share: 0.5}\nin_node: {hop_seconds: 1e-3}\n")
    cluster = cluster_of(str(file))
    original = cluster_of("a100")
    assert cluster.efficiency == original.efficiency.model_copy(update={"share": 0.5})
    assert cluster.in_node == original.in_node.model_copy(update={"hop_seconds": 1e-3})


def test_a_peak_that_a_file_names_takes_the_place_of_the_tables(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("like: a100\npeak_flops: 156e12\n")
    cluster = cluster_of(str(file))
    assert cluster.peak() == 156e12
    assert cluster.peak("float32") == pytest.approx(19.5e12 / 2)
    file.write_text("like: a100\ndevice_kind: another\npeak_flops: 156e12\n")
    assert cluster_of(str(file)).peak("float32") == 156e12


def test_a_file_is_named_from_the_folder_of_the_one_that_names_it(tmp_path):
    (tmp_path / "base.yaml").write_text("like: a100\nmemory: 64e9\n")
    (tmp_path / "mine.yaml").write_text("like: base.yaml\n")
    assert cluster_of(str(tmp_path / "mine.yaml")).memory == 64e9


def test_a_file_that_is_like_itself_is_named(tmp_path):
    first_file = tmp_path / "first.yaml"
    second_file = tmp_path / "second.yaml"
    first_file.write_text(f"like: {second_file}\n")
    second_file.write_text(f"like: {first_file}\n")
    with pytest.raises(ClusterError, match=r"first.yaml: like: it would take from itself"):
        cluster_of(str(first_file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("like: a10\n", r"there is no cluster 'a10'; did you mean a100\?"),
        ("memory: 64e9\n", "memory_bandwidth: Field required"),
        ("like: h100\nmemory: -1\n", "memory: Input should be greater than 0"),
        ("like: h100\nmemory: .nan\n", "memory: Input should be a finite number"),
        (
            "like: h100\nmemory_bandwidth: .inf\n",
            "memory_bandwidth: Input should be a finite number",
        ),
        ("like: h100\nnode_devices: 0\n", "node_devices: Input should be greater than 0"),
        ("like: h100\ntaken_share: 1.5\n", "taken_share: Input should be less than or equal to 1"),
        ("like: h100\nmemroy: 1\n", "memroy: Extra inputs"),
        ("like: h100\nin_node: fast\n", "in_node"),
        ("- h100\n", "must hold a mapping"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ClusterError, match=message) as raised:
        cluster_of(str(file))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there():
    with pytest.raises(ClusterError, match="does not exist"):
        cluster_of("nowhere/mine.yaml")


def test_the_room_imports_no_jax():
    code = (
        "import importlib, pkgutil, sys, jaxmllm.cluster as room\n"
        "for one in pkgutil.iter_modules(room.__path__): importlib.import_module(f'{room.__name__}.{one.name}')\n"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
