"""Published generators against the reference, through reader, rows and model.

The reference is diffusers: its velocities and gradients are in generator_goldens/. Folders are also
written back as they were."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import (
    ComponentConfig,
    ComponentsConfig,
    Config,
    ConfigError,
    DiffusionConfig,
    ProjectorComponents,
    ProjectorConfig,
)
from jaxmllm.data.media.generated import patches_of
from jaxmllm.data.media.latents import GeneratedLatents
from jaxmllm.data.rows.masks import AttentionSpec, finish_generator_row
from jaxmllm.families.model_folder import INDEX, OF_GENERATORS, ModelFolder, write_folder
from jaxmllm.families.resolved import resolved
from jaxmllm.families.weight_files import FolderError
from jaxmllm.models.compose import build_model
from jaxmllm.models.mllm import MLLM
from jaxmllm.models.rows import GeneratorRows
from jaxmllm.trainable import leaves_by_path
from jaxmllm.training.folder_parameters import read_folder
from sharding.mesh import make_mesh
from tests.families.test_tower_goldens import ROUNDING, by_key
from tests.support import EXHAUSTIVE, needs, tiny_config

GOLDENS = Path(__file__).parent / "generator_goldens"
NAMES = sorted(path.name for path in GOLDENS.iterdir())
COMPONENTS = ("diffusion", "projector.language")
BLOCK = 32


def config_of(folder: Path, place: Path, width: int | None = None, **generator) -> Config:
    """A run with this generator, and a decoder as wide as the text states that the generator reads."""
    tree = tiny_config(place)
    folder_config = json.loads((folder / "config.json").read_text())
    state_width = folder_config.get("text_dim", folder_config.get("joint_attention_dim"))
    language = tree["model"]["language"] | {"width": width or state_width}
    generator = {"from": str(folder), "projector": "folder"} | generator
    tree["model"] = {"language": language, "diffusion": generator}
    tree["objective"] = {"language": {"weight": 0.0}}
    del tree["data"]["images"], tree["data"]["audio"]
    return parse_config(resolved(tree))


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, relative to the largest expected entry."""
    return float(np.abs(found - wanted).max(initial=0) / np.abs(wanted).max(initial=ROUNDING))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_velocities_and_gradients_are_the_references(name, tmp_path):
    """All items lie packed in one row. Zeros fill up their texts, and one item has no text."""
    check_golden(GOLDENS / name, tmp_path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=EXHAUSTIVE) for name in NAMES])
def test_the_mesh_changes_nothing(name, tmp_path):
    check_golden(GOLDENS / name, tmp_path, {"data": 2, "context": 2, "tensor": 2})


@pytest.mark.slow
@pytest.mark.exhaustive
@needs("torch", "diffusers")
def test_generators_that_are_drawn_anew(tmp_path):
    """Compares with the reference live, with another seed and other dimensions.

    The reference also reads strictly what is written. It computes in float64: gradients of key
    biases are what is left of terms that cancel, and its own float32 is off by more than 1e-4 of
    them.
    """
    import diffusers
    from safetensors.torch import load_file

    from tests.families.make_generator_goldens import MODELS
    from tests.families.make_generator_goldens import main as make

    make(tmp_path, tuple(MODELS), seed=3, dtype="float64")
    for name, (kind, _) in MODELS.items():
        check_golden(tmp_path / name, tmp_path)
        write_again(tmp_path / name, tmp_path / "written" / name)
        reference = getattr(diffusers, kind)
        values = load_file(tmp_path / "written" / name / OF_GENERATORS)
        config = reference.load_config(tmp_path / "written" / name)
        reference.from_config(config).load_state_dict(values, strict=True)
        original = load_file(tmp_path / name / OF_GENERATORS)
        assert original.keys() == values.keys()
        assert all((original[key] == values[key]).all() for key in original)


def check_golden(
    folder: Path, place: Path, sizes: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Checks a golden, and returns the relative difference of each velocity and gradient."""
    model = model_of(config_of(folder, place), sizes or {"data": 1, "fsdp": 1})
    inputs, reference, gradients = (
        dict(np.load(folder / f"{file}.npz")) for file in ("inputs", "reference", "gradients")
    )
    packed = Packed.of(model, inputs, range(len(reference) // 3))
    # All ranks have the same row, and only the last one a loss.
    ranks = model.layout("diffusion").ranks
    rows, states, noisy, direction = packed.on(ranks)
    direction[:-1] = 0
    abstract = model.abstract("float32")
    params = {name: read_folder(str(folder), abstract[name], name) for name in COMPONENTS}

    def product(params, noisy, states):
        velocity = model.draw(params, "diffusion", rows, noisy, states)
        return (velocity * direction).sum(), velocity

    function = jax.jit(jax.value_and_grad(product, argnums=(0, 1, 2), has_aux=True))
    (_, velocity), (d_params, *d_inputs) = jax.device_get(function(params, noisy, states))
    velocity, d_noisy, d_states = (packed.back(leaf[-1]) for leaf in (velocity, *d_inputs))
    differences: dict[str, float] = {}
    for i, (conditions, patch_slots) in enumerate(packed.where):
        patches = {kind: reference[f"{kind}_{i}"] for kind in ("velocity", "latents_gradient")}
        patches = {kind: patches_in(model, latents) for kind, latents in patches.items()}
        differences[f"velocity {i}"] = relative(velocity[patch_slots], patches["velocity"])
        differences[f"latents {i}"] = relative(d_noisy[patch_slots], patches["latents_gradient"])
        differences[f"states {i}"] = relative(
            d_states[conditions], reference[f"states_gradient_{i}"]
        )
    key_gradients: dict[str, np.ndarray] = {}
    for name in COMPONENTS:
        shapes = {path: leaf.shape for path, leaf in leaves_by_path(params[name])}
        key_gradients |= by_key(ModelFolder.open(folder, name).check(shapes), d_params[name])
    assert key_gradients.keys() == gradients.keys()
    differences |= {
        key: relative(key_gradients[key], expected) for key, expected in gradients.items()
    }
    assert max(differences.values()) <= 1e-4, differences
    return differences


def model_of(config: Config, sizes: Mapping[str, int]) -> MLLM:
    mesh = make_mesh(dict(sizes), jax.devices()[: math.prod(sizes.values())])
    return build_model(config.model, 8, config.components, mesh)


def modality_of(generator: DiffusionConfig) -> GeneratedLatents:
    """The reader of latents with the sizes and positions of a generator, and without normalization."""
    assert generator.channels is not None
    return GeneratedLatents(
        generator.channels,
        generator.patch_frames,
        generator.patch_size,
        mean=(0.0,),
        std=(1.0,),
        max_frames=8,
        shorten=False,
        centred=generator.rope_origin == "centre",
        diagonal=generator.condition_positions == "diagonal",
        crossed=generator.conditioning == "cross",
    )


def patches_in(model: MLLM, latents: np.ndarray) -> np.ndarray:
    """Latents [channels, frames, height, width] as patches [slots, features]."""
    generator = model.config.diffusion
    frames = np.moveaxis(latents, 0, -1)
    return patches_of(frames, generator.patch_frames, generator.patch_size)


@dataclass(frozen=True)
class Packed:
    """Some items of a golden, packed in one row."""

    row: dict[str, Any]
    states: np.ndarray  # [1, C, D]; patches are [1, C, F]; all in the order of the row
    noisy: np.ndarray
    direction: np.ndarray
    # The slots of conditions and of patches, per item, before slots are dealt.
    where: list[tuple[slice, slice]]

    @classmethod
    def of(cls, model: MLLM, inputs: Mapping[str, np.ndarray], items: Iterable[int]) -> Packed:
        """Packs items behind one another, as the row builder places their conditions and patches."""
        generator = model.config.diffusion
        slots = 8 * BLOCK
        row = empty_row(slots, len(inputs) // 4, generator.patch_features)
        if generator.conditioning == "cross":
            row["readers"] = np.zeros((1, slots), np.int32)
        states = np.zeros((1, slots, model.config.language.width), np.float32)
        noisy, direction = np.zeros((2, 1, slots, generator.patch_features), np.float32)
        item_slots = []
        start = 0
        modality = modality_of(generator)
        for item_number, i in enumerate(items, 1):
            states_of_item = inputs[f"states_{i}"]
            patches = patches_in(model, inputs[f"latents_{i}"])
            conditions = slice(start, start + len(states_of_item))
            first_patch = start + modality.first_patch(len(states_of_item))
            patch_slots = slice(first_patch, first_patch + len(patches))
            stop = max(conditions.stop, patch_slots.stop)
            row["owners"][0, start:stop] = item_number
            row["readers" if modality.crossed else "segments"][0, conditions] = item_number
            row["segments"][0, patch_slots] = item_number
            row["conditions"][0, conditions] = np.arange(conditions.start, conditions.stop)
            _, frames, *sides = inputs[f"latents_{i}"].shape
            grid = (frames // generator.patch_frames, *(n // generator.patch_size for n in sides))
            row["positions"][0, conditions] = modality.condition_positions(
                grid, len(states_of_item)
            )
            row["positions"][0, patch_slots] = modality.positions(grid)
            row["positions"][0, patch_slots, 0] += modality.first_time(len(states_of_item))
            row["times"][0, item_number - 1] = inputs[f"time_{i}"]
            states[0, conditions], noisy[0, patch_slots] = states_of_item, patches
            direction[0, patch_slots] = patches_in(model, inputs[f"direction_{i}"])
            item_slots.append((conditions, patch_slots))
            start = stop
        part_counts = {"diffusion": model.layout("diffusion").parts}
        attention = AttentionSpec({"diffusion": BLOCK}, part_counts, crossed=model.config.crossed)
        finish_generator_row(row, attention, "diffusion")
        order = row["order"][0]
        return cls(row, states[:, order], noisy[:, order], direction[:, order], item_slots)

    def on(self, ranks: int) -> tuple[GeneratorRows, np.ndarray, np.ndarray, np.ndarray]:
        """Rows, states, noisy patches and directions, repeated on so many ranks."""
        arrays = self.row, self.states, self.noisy, self.direction
        row, *patch_arrays = jax.tree.map(lambda leaf: np.repeat(leaf, ranks, axis=0), arrays)
        return GeneratorRows.of(row), *patch_arrays

    def back(self, dealt: np.ndarray) -> np.ndarray:
        """Brings values of dealt slots back to packed order."""
        return dealt[np.argsort(self.row["order"][0])]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_packed_items_are_as_each_alone_in_double_precision(name, tmp_path):
    folder = GOLDENS / name
    config = config_of(folder, tmp_path)
    double = ComponentConfig(compute_dtype="float64")
    projectors = ProjectorComponents(language=ProjectorConfig(compute_dtype="float64"))
    components = ComponentsConfig(diffusion=double, projector=projectors)
    model = model_of(config.model_copy(update={"components": components}), {"data": 1, "fsdp": 1})
    inputs = dict(np.load(folder / "inputs.npz"))
    with jax.enable_x64(True):
        abstract = model.abstract("float64")
        params = {name: read_folder(str(folder), abstract[name], name) for name in COMPONENTS}

        def velocities(items: Iterable[int]) -> list[np.ndarray]:
            packed = Packed.of(model, inputs, items)
            rows, states, noisy, _ = packed.on(1)
            row_velocity = draw(
                params, rows, *(leaf.astype(np.float64) for leaf in (noisy, states))
            )
            return [np.asarray(row_velocity)[0, patch_slots] for _, patch_slots in packed.where]

        draw = jax.jit(
            lambda params, rows, noisy, states: model.draw(params, "diffusion", rows, noisy, states)
        )
        packed_velocities = velocities(range(3))
        for i, velocity in enumerate(packed_velocities):
            (single_velocity,) = velocities([i])
            assert single_velocity.dtype == np.float64
            # In float64 packing may only change rounding. A leak between items would be far larger.
            np.testing.assert_allclose(
                velocity, single_velocity, rtol=0, atol=1e-10 * np.abs(single_velocity).max()
            )


def empty_row(slots: int, segments: int, features: int) -> dict[str, np.ndarray]:
    """A row that is all padding."""
    return {
        "features": np.zeros((1, slots, features), np.float32),
        "owners": np.zeros((1, slots), np.int32),
        "segments": np.zeros((1, slots), np.int32),
        "positions": np.zeros((1, slots, 3), np.int32),
        "patches": np.full((1, slots), -1, np.int32),
        "conditions": np.full((1, slots), -1, np.int32),
        "noise": np.zeros((1, segments, 2), np.uint32),
        "times": np.zeros((1, segments), np.float32),
        "sources": np.zeros((1, segments), np.int32),
        "failed": np.zeros(1, np.int32),
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_written_as_it_was(name, tmp_path):
    write_again(GOLDENS / name, tmp_path / "out")
    for file in (GOLDENS / name).iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def write_again(folder: Path, out: Path) -> None:
    """Reads the parameters of a folder onto a mesh, and writes them into another folder."""
    config = config_of(folder, out.parent)
    mesh = make_mesh({"data": 1, "fsdp": 8})
    abstract = build_model(config.model, 8, config.components, mesh).abstract("float32")
    component_weights = []
    for component in COMPONENTS:
        shapes = {path: leaf.shape for path, leaf in leaves_by_path(abstract[component])}
        fit = ModelFolder.open(folder, component).check(shapes)
        params = dict(leaves_by_path(read_folder(str(folder), abstract[component], component)))
        component_weights.append((fit, lambda path, params=params: np.asarray(params[path])))
    assert write_folder(component_weights, out) == ()


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDENS / "wan", tmp_path / "copy"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"_class_name": "Other3DModel"}, "has model_type 'Other3DModel'; there are WanTransf"),
        ({"model_type": "qwen3"}, "'qwen3' and so no diffusion; name the folder in model.from"),
        ({"image_dim": 1280}, "has image_dim 1280; None alone is supported"),
        ({"cross_attn_norm": False}, "has cross_attn_norm False; True alone is supported"),
        ({"out_channels": 8}, "has out_channels 8; 4 alone is supported"),
        ({"patch_size": [1, 2, 4]}, r"has patch_size \[1, 2, 4\]; \[frames, side, side\] is und"),
    ],
)
def test_a_config_that_cannot_be(copy, tmp_path, values, words):
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(FolderError, match=words):
        config_of(copy, tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"guidance_embeds": True}, "has guidance_embeds True; False alone is supported"),
        ({"zero_cond_t": True}, "has zero_cond_t True; False alone is supported"),
        ({"use_layer3d_rope": True}, "has use_layer3d_rope True; False alone is supported"),
        ({"in_channels": 14}, "has in_channels 14; patches of 2 x 2 numbers have a multiple of 4"),
        ({"out_channels": 12}, "has out_channels 12; 3 alone is supported"),
        ({"axes_dims_rope": [2, 2, 2]}, r"has axes_dims_rope \[2, 2, 2\]; three even numbers that"),
        ({"axes_dims_rope": [2, 3, 3]}, r"has axes_dims_rope \[2, 3, 3\]; three even numbers that"),
    ],
)
def test_a_config_of_two_streams_that_cannot_be(tmp_path, values, words):
    path = Path(shutil.copytree(GOLDENS / "qwen-image", tmp_path / "copy")) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(FolderError, match=words):
        config_of(path.parent, tmp_path)


def test_what_the_folder_says_stands_in_the_config(copy, tmp_path):
    """The number of zeros that pad a text, and a new projector, are still the user's choice."""
    config = config_of(copy, tmp_path, 24, padded_conditions=None, projector="new")
    generator = config.model.diffusion
    assert (generator.patch_features, generator.sections) == (16, (2, 2, 2))
    assert config.model.crossed == {"diffusion": 0}
    assert config.model.tower_sources == {"diffusion": str(copy)}
    assert config_of(copy, tmp_path).model.crossed == {"diffusion": 512}
    with pytest.raises(ConfigError, match=r"model\.diffusion\.norm is 'rms', but .* says 'layer'"):
        config_of(copy, tmp_path, norm="rms")
    with pytest.raises(
        ConfigError, match=r"reads states of width 16, and model\.language\.width is 24"
    ):
        config_of(copy, tmp_path, 24)
    with pytest.raises(
        FolderError, match=r"and so no language; name the folder in model\.diffusion\.f"
    ):
        resolved({"model": {"from": str(copy)}})


def test_a_folder_of_several_files(copy, tmp_path):
    """Large models are published as several files with an index."""
    name = "diffusion_pytorch_model"
    single_file = copy / f"{name}.safetensors"
    shard = single_file.rename(copy / f"{name}-00001-of-00001.safetensors")
    (file,) = ModelFolder.open(GOLDENS / "wan", "diffusion").files
    index = {"weight_map": dict.fromkeys(file.tensors, shard.name)}
    (copy / f"{name}.safetensors.index.json").write_text(json.dumps(index))
    assert ModelFolder.open(copy, "diffusion").tensors.keys() == file.tensors.keys()
    shard.unlink()
    with pytest.raises(FolderError, match="which is not there; copy the folder again"):
        ModelFolder.open(copy, "diffusion")
    (copy / f"{name}.safetensors.index.json").unlink()
    with pytest.raises(FolderError, match=rf"has neither model\.safetensors nor {INDEX}"):
        ModelFolder.open(copy, "diffusion")
