"""The benchmark of reading folders: processes read their shares, and no more."""

import pytest

from benchmarks.reading import FILES, main, make_folder, measure, run
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.weight_files import write_tensors


def test_a_made_folder_is_one_of_a_model(tmp_path):
    make_folder(tmp_path / "folder", 0.002, seed=0)
    folder = ModelFolder.open(tmp_path / "folder")
    assert len(folder.files) == FILES
    assert folder.family.section(folder.config)["layers"] == 16


def test_bytes_are_those_of_the_files_types(tmp_path):
    """Even if parameters have another dtype."""
    make_folder(tmp_path / "folder", 0.0001, seed=0)
    tensors = ModelFolder.open(tmp_path / "folder").tensors
    for file in {tensor.file for tensor in tensors.values()}:
        tensors_of_file = {key: tensor for key, tensor in tensors.items() if tensor.file == file}
        write_tensors(
            file, {key: stored.array().astype("float32") for key, stored in tensors_of_file.items()}
        )
    assert measure(tmp_path / "folder", "bfloat16")["asked"] == pytest.approx(1, abs=0.01)


@pytest.mark.slow
def test_processes_read_their_shares(tmp_path):
    """One process reads everything once, and each of two reads half."""
    make_folder(tmp_path / "folder", 0.002, seed=0)
    (single,) = run(tmp_path / "folder", 1, 8, "bfloat16")
    assert single["asked"] == pytest.approx(1, abs=0.01)
    processes = run(tmp_path / "folder", 2, 8, "bfloat16")
    assert [process["devices"] for process in processes] == [4, 4]
    for process in processes:
        assert process["asked"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("sizes", ["--processes 3", "--processes 2 --devices 1"])
def test_processes_that_cannot_share_the_devices(sizes, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reading", *sizes.split()])
    with pytest.raises(SystemExit):
        main()
    assert "cannot share --devices" in capsys.readouterr().err
