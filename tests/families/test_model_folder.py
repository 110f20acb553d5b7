"""Folders of published models.

A good folder is written back as it was. What is wrong with a bad one is told in one line."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.families.by_type import family_of
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.model_folder import INDEX, ModelFolder, write_folder
from jaxmllm.families.resolved import resolved
from jaxmllm.families.weight_files import FolderError, write_tensors
from tests.support import tiny_config

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(path.name for path in GOLDENS.iterdir())


Turn = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def shapes_of(folder: ModelFolder) -> dict[str, tuple[int, ...]]:
    """The parameter shapes of the decoder that the folder's config describes."""
    language = folder.family.section(folder.config)
    sizes = {
        "v": language["vocab_size"],
        "d": language["width"],
        "h": language["heads"],
        "g": language["kv_heads"],
        "k": language["head_size"],
        "f": language["mlp_width"],
        "e": (experts := language.get("experts") or {}).get("count"),
        "expert": experts.get("count"),
        "layer": language["layers"],
    }
    absent = set()
    if not language.get("post_norms"):
        absent |= {"layers.post_attention_norm.scale", "layers.post_mlp_norm.scale"}
    for choice, names in {
        "qkv_bias": ("query_bias", "key_bias", "value_bias"),
        "out_bias": ("out_bias",),
        "qk_norm": ("query_norm.scale", "key_norm.scale"),
    }.items():
        if not language.get(choice):
            absent |= {f"layers.attention.{name}" for name in names}
    if language["tie_embeddings"]:
        absent.add("head")
    return {
        path: tuple(sizes[letter] for letter in line.parameter)
        for path, line in folder.family.lines.items()
        if path not in absent
    }


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDENS / "qwen2", tmp_path / "copy"))


def change_config(folder: Path, **values) -> None:
    """Changes values of config.json; "absent" removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def change_header(path: Path, change) -> None:
    """Changes the JSON header of a safetensors file, whose tensors stay where they are."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def add_tensor(path: Path, key: str, values: np.ndarray) -> None:
    """Appends a tensor to a safetensors file."""
    content = path.read_bytes()
    end = len(content) - 8 - int.from_bytes(content[:8], "little")
    offsets = [end, end + values.nbytes]
    entry = {"dtype": "F32", "shape": [*values.shape], "data_offsets": offsets}
    change_header(path, lambda header: header.update({key: entry}))
    with path.open("ab") as stream:
        stream.write(values.tobytes())


def copy_in_one_file(source: Path, folder: Path, turn: Turn) -> Path:
    """Copies a folder into one file of weights, with the tensors that `turn` makes of the source's."""
    shutil.copytree(source, folder)
    arrays = {k: np.array(tensor.array()) for k, tensor in ModelFolder.open(source).tensors.items()}
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / INDEX).unlink()
    write_tensors(folder / "model.safetensors", turn(arrays))
    return folder


def file_of(folder: Path, key: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][key]


# ---------------------------------------------------------------------------- good ones


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_written_as_it_was(name, tmp_path):
    folder = ModelFolder.open(GOLDENS / name)
    shapes = shapes_of(folder)
    fit = folder.check(shapes)

    def values(path: str) -> np.ndarray:
        return fit.whole(path, np.float32)

    assert write_folder([(fit, values)], tmp_path / "out") == ()
    for file in (GOLDENS / name).iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_tensors_that_follow_from_the_config_are_carried_through(copy, tmp_path):
    embedding = ModelFolder.open(copy).tensors["model.embed_tokens.weight"]
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    add_tensor(embedding.file, key, np.arange(2, dtype=np.float32))
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"][key] = embedding.file.name
    (copy / INDEX).write_text(json.dumps(index))
    folder = ModelFolder.open(copy)
    fit = folder.check(shapes_of(folder))
    zeros = {path: np.zeros(shape, np.float32) for path, shape in fit.shapes.items()}
    write_folder([(fit, zeros.__getitem__)], tmp_path / "out")
    written_tensors = ModelFolder.open(tmp_path / "out").tensors
    np.testing.assert_array_equal(written_tensors[key].array(), [0, 1])
    assert not written_tensors["model.embed_tokens.weight"].array().any()


def test_files_that_may_hold_old_weights_are_left_out(copy, tmp_path):
    (copy / "pytorch_model.bin").write_bytes(b"old")
    (copy / "tokenizer.json").write_text("{}")
    folder = ModelFolder.open(copy)
    fit = folder.check(shapes_of(folder))
    zeros = {path: np.zeros(shape, np.float32) for path, shape in fit.shapes.items()}
    assert write_folder([(fit, zeros.__getitem__)], tmp_path / "out") == ("pytorch_model.bin",)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_old_and_new_spellings_are_one(copy):
    def language() -> dict:
        config = FolderConfig.read(copy)
        return family_of(config).section(config)

    # The old spelling leaves out layer_types, and has torch_dtype for dtype.
    change_config(copy, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4})
    new_section = language()
    change_config(
        copy,
        rope_parameters="absent",
        rope_theta=5e4,
        rope_scaling={"type": "linear", "factor": 4.0},
        layer_types="absent",
        torch_dtype="float32",
        dtype="absent",
    )
    assert language() == new_section
    assert (
        new_section["rope_scaling"] == {"kind": "linear", "factor": 4.0}
        and new_section["rope_theta"] == 5e4
    )


@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl", "qwen3_vl"])
def test_an_empty_record_of_rotary_positions_hides_no_other(name):
    config = FolderConfig.read(GOLDENS / name)
    section = family_of(config).section
    text = {**config.values.get("text_config", config.values)}
    scaling = {"rope_type": "linear", "factor": 4.0, "mrope_section": [2, 1, 1]}
    scaling |= {"mrope_interleaved": True}
    text |= {"rope_theta": 5e4, "rope_scaling": scaling}

    def read(rope_parameters: object) -> dict:
        changed_text = text | {"rope_parameters": rope_parameters}
        return section(config.updated(**changed_text, text_config=changed_text))

    # The new record is empty, null, or says the same as the old one.
    combined = scaling | {"rope_theta": 5e4}
    for language in (
        read({}),
        read(None),
        read(combined),
        read(combined | {"attention_factor": None}),
    ):
        assert language["rope_scaling"] == {"kind": "linear", "factor": 4.0}
        assert language["rope_theta"] == 5e4 and language.get("rope_sections", [2, 1, 1]) == [
            2,
            1,
            1,
        ]
    for changed in ({"rope_theta": 1e4}, {"rope_type": "default"}, {"factor": 2.0}):
        with pytest.raises(FolderError, match=r"has rope_scaling .* they differ"):
            read(combined | changed)


def test_records_that_call_the_usual_frequencies_otherwise_are_equal():
    config = FolderConfig.read(GOLDENS / "qwen2_5_vl")
    sections = {"mrope_section": [2, 1, 1]}
    text = config.values.get("text_config", config.values) | {
        "rope_scaling": {"type": "mrope"} | sections,
        "rope_parameters": {"rope_type": "default"} | sections,
    }
    language = family_of(config).section(config.updated(**text, text_config=text))
    assert language["rope_sections"] == [2, 1, 1] and language.get("rope_scaling") is None


def test_windows_of_older_files(copy):
    change_config(
        copy, layer_types="absent", use_sliding_window=True, sliding_window=7, max_window_layers=1
    )
    config = FolderConfig.read(copy)
    language = family_of(config).section(config)
    assert language["window"] == 7 and language["full_layers"] == [0]


def test_yarn_whose_multipliers_cancel(copy):
    """With both keys, the reference takes their quotient in place of 0.1 ln(factor) + 1."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for keys, factor in (
        ({}, None),
        ({"mscale": 1.0}, None),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.2}, 1.2),
    ):
        change_config(copy, rope_parameters=yarn | keys)
        config = FolderConfig.read(copy)
        assert family_of(config).section(config)["rope_scaling"].get("attention_factor") == factor


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, 7),
        ({"use_sliding_window": True, "sliding_window": "absent"}, 4096),
        ({"use_sliding_window": True, "sliding_window": None}, None),
        ({"use_sliding_window": False, "sliding_window": 7}, None),
    ],
)
def test_windows_of_qwen3_moe_are_of_all_layers(tmp_path, keys, window):
    folder = Path(shutil.copytree(GOLDENS / "qwen3_moe", tmp_path / "copy"))
    change_config(folder, **keys)
    config = FolderConfig.read(folder)
    language = family_of(config).section(config)
    assert language.get("window") == window and not language.get("full_layers")


@pytest.mark.parametrize(("name", "usual"), [("mistral", 8), ("qwen3_moe", 4), ("llama", 16)])
def test_key_value_heads_that_a_file_does_not_say(name, usual):
    """The default is the reference's number. Null means the number of heads, whatever the family."""
    config = FolderConfig.read(GOLDENS / name)
    values = {key: value for key, value in config.values.items() if key != "num_key_value_heads"}
    for said, heads in ({}, usual), ({"num_key_value_heads": None}, 16):
        config_without = FolderConfig(config.path, values | said | {"num_attention_heads": 16})
        assert family_of(config).section(config_without)["kv_heads"] == heads


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_scaling_begins_at_all_positions_unless_the_file_says_otherwise(copy, kind):
    factors = {"factor": 4.0} | {f"{pace}_freq_factor": 1.0 for pace in ("low", "high")}
    change_config(copy, rope_parameters={"rope_type": kind} | factors, max_position_embeddings=4096)
    config = FolderConfig.read(copy)
    scaling = family_of(config).section(config)["rope_scaling"]
    assert scaling["original_max_position_embeddings"] == 4096


def test_one_file_is_read_before_an_index(copy, tmp_path):
    """Transformers reads such a folder in the same way. What is not read is not written."""
    single_file = copy_in_one_file(copy, tmp_path / "one", dict)
    shutil.copy(single_file / "model.safetensors", copy)
    folder = ModelFolder.open(copy)
    assert [file.path.name for file in folder.files] == ["model.safetensors"]
    fit = folder.check(shapes_of(folder))
    skipped = write_folder([(fit, lambda path: fit.whole(path, np.float32))], tmp_path / "out")
    assert INDEX in skipped and len(skipped) == 1 + len([*copy.glob("model-*")])
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe-weighted", "gemma3"])
def test_a_folder_of_the_base_model_is_read(name, tmp_path):
    """Keys of a base model begin without `model.`. Adapters name its modules as if a head lay
    beside it."""
    folder = ModelFolder.open(GOLDENS / name)
    shapes = shapes_of(folder)
    copied = copy_in_one_file(
        GOLDENS / name,
        tmp_path / "base",
        lambda arrays: {k.removeprefix("model."): v for k, v in arrays.items()},
    )
    base = ModelFolder.open(copied)
    assert "embed_tokens.weight" in base.tensors
    fits = [opened.check(shapes) for opened in (folder, base)]
    for path in shapes:
        np.testing.assert_array_equal(*(fit.whole(path, np.float32) for fit in fits))
    path = "layers.attention.query"
    assert base.family.module_line(path) == folder.family.module_line(path)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSPC])
def test_room_is_taken_before_anything_is_written(copy, tmp_path, monkeypatch, code):
    """Writing to a mapped file without room would end the process.

    File systems that cannot reserve room are written to without a reservation."""

    def refuse(*arguments: int) -> None:
        raise OSError(code, os.strerror(code))

    folder = ModelFolder.open(copy)
    fit = folder.check(shapes_of(folder))
    component_weights = [(fit, lambda path: fit.whole(path, np.float32))]
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    if code == errno.ENOSPC:
        with pytest.raises(OSError, match=r"No space left on device: .*out/model"):
            write_folder(component_weights, tmp_path / "out")
        return
    write_folder(component_weights, tmp_path / "out")
    for path in copy.glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("equal", [True, False])
def test_a_second_tensor_of_a_tied_head(copy, tmp_path, equal):
    """The second tensor is compared with the embedding and written back; one that differs is
    refused."""
    folder = ModelFolder.open(copy)
    embedding = folder.tensors["model.embed_tokens.weight"]
    second_head = np.array(embedding.array())
    second_head[3, 4] += not equal
    add_tensor(embedding.file, "lm_head.weight", second_head)
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = embedding.file.name
    (copy / INDEX).write_text(json.dumps(index))
    fit = ModelFolder.open(copy).check(shapes_of(folder))

    def values(path: str) -> np.ndarray:
        return fit.whole(path, np.float32)

    if equal:
        write_folder([(fit, values)], tmp_path / "out")
        name = embedding.file.name
        assert (tmp_path / "out" / name).read_bytes() == (copy / name).read_bytes()
    else:
        with pytest.raises(FolderError, match=r"lm_head.weight of .* set tie_word_embeddings: fal"):
            values("embedding")


# ---------------------------------------------------------------------------- bad ones


def refusal(folder: Path) -> str:
    """The one-line message with which a folder is refused."""
    with pytest.raises(FolderError) as caught:
        opened = ModelFolder.open(folder)
        opened.check(shapes_of(opened))
    text = str(caught.value)
    assert "\n" not in text and str(folder) in text
    return text


KEY = "model.layers.1.mlp.up_proj.weight"


def test_missing_and_extra_keys_are_named(copy):
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["new.weight"] = index["weight_map"].pop(KEY)
    change_header(file_of(copy, KEY), lambda header: header.update({"new.weight": header.pop(KEY)}))
    (copy / INDEX).write_text(json.dumps(index))
    text = refusal(copy)
    assert f"{KEY} is missing: [24, 16]" in text and "new.weight [24, 16] belongs to no" in text


def test_a_misshapen_key_is_named(copy):
    change_header(file_of(copy, KEY), lambda header: header[KEY].update(shape=[12, 32]))
    assert f"{KEY} has [12, 32], not [24, 16]" in refusal(copy)


def test_a_tensor_of_another_kind_of_number_is_named(copy):
    change_header(file_of(copy, KEY), lambda header: header[KEY].update(dtype="F8_E4M3"))
    assert f"{KEY} is F8_E4M3, none of F64, F32" in refusal(copy)


def test_an_index_that_names_an_absent_file(copy):
    file_of(copy, KEY).unlink()
    assert "which is not there; copy the folder again" in refusal(copy)


def test_a_truncated_file(copy):
    path = file_of(copy, KEY)
    path.write_bytes(path.read_bytes()[:-8])
    assert f"{path} is truncated: " in refusal(copy)


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x05" + bytes(7) + b"nojso"])
def test_a_file_that_is_none(copy, content):
    file_of(copy, KEY).write_bytes(content)
    assert "is no safetensors file" in refusal(copy)


def test_no_weights(copy):
    (copy / INDEX).unlink()
    assert "save the model as safetensors" in refusal(copy)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"model_type": "gemma9"},
            "has model_type 'gemma9'; there are llama, mistral, qwen2, qwen3, qwen3_moe",
        ),
        ({"model_type": "absent"}, "has model_type None"),
        ({"quantization_config": {"quant_method": "awq"}}, r"a quantization_config \(awq\)"),
        ({"hidden_act": "gelu"}, "has hidden_act 'gelu'; 'silu' alone is supported"),
        ({"hidden_size": "absent"}, "has no 'hidden_size'"),
        ({"hidden_size": "wide"}, "it must be a number"),
        ({"num_hidden_layers": 2.0}, r"has num_hidden_layers 2\.0; it must be a whole number abov"),
        ({"num_attention_heads": 0}, "has num_attention_heads 0; it must be a whole number above "),
        ({"rope_parameters": {"rope_theta": "x"}}, "has rope_theta 'x'; it must be a number"),
        ({"tie_word_embeddings": 1}, "it must be true or false"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "has rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "it is default: write that if no text is"),
        ({"rope_parameters": {"full_attention": {}}}, "one record for all layers"),
        ({"layer_types": ["linear_attention"] * 2}, "2 of full_attention are understood"),
        ({"attention_dropout": 0.1}, "has attention_dropout 0.1"),
    ],
)
def test_a_config_that_cannot_be(copy, values, words):
    change_config(copy, **values)
    with pytest.raises(FolderError, match=words):
        resolved({"model": {"from": str(copy)}})


# ---------------------------------------------------------------------------- in a run's config


def test_a_run_takes_shapes_and_tokenizer(copy, tmp_path):
    tree = tiny_config(tmp_path)
    tree["model"] = {"from": str(copy)}
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .* has no tokenizer\.json; name the"):
        resolved(tree)
    (copy / "tokenizer.json").write_text("{}")
    config = parse_config(resolved(tree))
    assert config.data.tokenizer == str(copy / "tokenizer.json")
    assert config.model.language.width == 16 and config.model.language.qkv_bias
    tree["model"]["language"] = {"loss_chunk": 64}
    assert parse_config(resolved(tree)).model.language.loss_chunk == 64
    tree["model"]["language"] = {"width": 32}
    with pytest.raises(ConfigError, match=r"model\.language\.width is 32, but .* says 16; leave"):
        resolved(tree)
    tree["model"]["language"] = {"window": 8}  # the folder says nothing of a window
    with pytest.raises(ConfigError, match=r"model\.language\.window is 8, but .* says None; lea"):
        resolved(tree)


def test_other_sources_are_left_alone(tmp_path):
    tree = tiny_config(tmp_path)
    tree["model"]["from"] = str(tmp_path)
    assert resolved(tree) == tree
    assert resolved({"model": None}) == {"model": None}
    with pytest.raises(ConfigError, match=r"language is missing, and model\.from: .*absent has no"):
        resolved({"model": {"from": str(tmp_path / "absent")}})


def test_a_run_takes_the_chat_template(copy, tmp_path):
    """The template comes with the tokenizer that it was written for, unless the config names
    another."""
    (copy / "tokenizer.json").write_text("{}")
    tree = tiny_config(tmp_path)
    tree["model"] = {"from": str(copy)}

    def template(**values):
        return resolved(tree | {"data": tree["data"] | values})["data"].get("chat_template")

    assert template() is None and template(tokenizer=None, chat_template=None) is None
    files = {"tokenizer_config.json": json.dumps({"eos_token": "<eos>"})}
    files["processor_config.json"] = json.dumps({"chat_template": "a"})
    for name, text in files.items():
        (copy / name).write_text(text)
    assert template() == str(copy / "processor_config.json")
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": "b"}))
    assert template() == str(copy / "tokenizer_config.json")
    (copy / "chat_template.jinja").write_text("c")
    assert template() == str(copy / "chat_template.jinja")
    assert template(chat_template="chatml") == "chatml"
    assert template(chat_template=None) == str(copy / "chat_template.jinja")
    assert template(tokenizer=str(copy / "tokenizer.json")) is None
    (copy / "chat_template.jinja").unlink()
    (copy / "tokenizer_config.json").write_text("{")
    with pytest.raises(FolderError, match=r"tokenizer_config\.json cannot be read: .*; copy the"):
        template()


def test_all_goldens_of_families_take_less_than_four_megabytes():
    folders = [GOLDENS, *(GOLDENS.with_name(f"{kind}_goldens") for kind in ("moving", "tower"))]
    sizes = [file.stat().st_size for folder in folders for file in folder.rglob("*.*")]
    assert len(sizes) > 200 and sum(sizes) < 4e6
