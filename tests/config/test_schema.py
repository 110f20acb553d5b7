"""Configs: overrides, YAML, and errors that name the key, the rule and the value."""

import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jaxmllm.config import schema
from jaxmllm.config.read import dump_config, load_config, parse_config
from jaxmllm.config.schema import Config, ConfigError, Section
from sharding.mesh import mesh_shape

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

MINIMAL = """
run: {directory: runs/x, steps: 10}
model:
  language: {width: 64, layers: 2, heads: 4, kv_heads: 2, head_size: 16, mlp_width: 128}
  vision: {width: 32, layers: 1, heads: 2, mlp_width: 64}
data:
  sources: [{name: a, path: a.jsonl}]
  batch_size: 8
optimizer: {learning_rate: 0.001}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def refusal(path: Path, *overrides: str) -> str:
    """The one error of loading a file with overrides."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert ": : " not in str(caught.value), (
        "sections of the whole config have no name before theirs"
    )
    return str(caught.value)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_every_config_of_the_repository_is_valid_and_says_how_to_run_it(config):
    load_config(config)
    head = config.read_text().split("\n\n")[0:4]
    assert f"--config configs/{config.name}" in "\n".join(
        line for line in head if line.startswith("#")
    )


def test_sections_have_one_place_to_be_imported_from():
    """All sections are imported from schema.py, whichever file of config/ defines them."""
    folders = ("jaxmllm", "sharding", "launch", "benchmarks", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    for file in (file for file in files if "config" not in file.parts):
        assert not re.search(
            r"jaxmllm\.config\.(section|\w+_sections)\b", file.read_text(encoding="utf-8")
        ), file
    sections = [
        member
        for member in vars(schema).values()
        if isinstance(member, type) and issubclass(member, Section)
    ]
    assert {section.__name__ for section in sections} <= set(schema.__all__)


def test_there_are_configs():
    assert {"quickstart.yaml", "real-small.yaml"} <= {config.name for config in CONFIGS}


def test_defaults_and_lists(path):
    config = load_config(path)
    assert config.model.encoders == ("vision",)
    assert config.model.language.vocab_size == "auto"
    assert config.data.sources[0].path == "a.jsonl"
    assert config.data.sources[0].weight == 1.0
    assert isinstance(config.data.sources, tuple)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer.learning_rat=1.0",
            "unknown key 'optimizer.learning_rat'; did you mean 'optimizer.learning_rate'?",
        ),
        ("optimiser={}", "unknown key 'optimiser'; did you mean 'optimizer'?"),
        (
            "model.vision.patchsize=3",
            "unknown key 'model.vision.patchsize'; did you mean 'model.vision.patch_size'?",
        ),
        ("phases.vison.block=3", "unknown key 'phases.vison'; did you mean 'phases.vision'?"),
        (
            "components.projector.visions.freeze=true",
            "unknown key 'components.projector.visions'; did you mean 'components.projector.vision'?",
        ),
        (
            "data.sources=[{name: a, path: b, wieght: 1.0}]",
            "unknown key 'data.sources.0.wieght'; did you mean 'data.so",
        ),
        ("optimizer.learning-rate=1.0", "unknown key 'optimizer.learning-rate'; did you mean"),
        ("checkpoint.zzz=3", "unknown key 'checkpoint.zzz'; valid here: every, keep"),
        (
            "evaluation.interval=5",
            "unknown key 'evaluation.interval'; valid here: at_start, every, examples",
        ),
    ],
)
def test_unknown_keys_name_the_nearest_valid_one(path, override, message):
    assert message in refusal(path, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=many", "run.steps: must be a valid integer (got 'many')"),
        ("run.steps='64'", "run.steps: must be a valid integer (got '64')"),
        ("run.steps=1.5", "run.steps: must be a valid integer (got 1.5)"),
        ("run.steps=true", "run.steps: must be a valid integer (got True)"),
        ("run.steps=0", "run.steps: must be greater than 0 (got 0)"),
        ("run.steps=", "run.steps: must be a valid integer (got None)"),
        ("run.directory=5", "run.directory: must be a valid string (got 5)"),
        (
            "optimizer.learning_rate=.nan",
            "optimizer.learning_rate: must be a finite number (got nan)",
        ),
        (
            "optimizer.schedule=linear",
            "optimizer.schedule: must be 'cosine' or 'constant' (got 'linear')",
        ),
        ("logging.tensorboard=1", "logging.tensorboard: must be a valid boolean (got 1)"),
        (
            "phases.vision.capacities=abc",
            "phases.vision.capacities: must be a valid list or 'auto' (got 'abc')",
        ),
        (
            "model.language.vocab_size=-3",
            "model.language.vocab_size: must be greater than 0 or 'auto' (got -3)",
        ),
        (
            "components.vision.layout={heads: tensor}",
            "components.vision.layout.heads: must be a valid list",
        ),
        ("data=3", "data: must be a mapping (got 3)"),
        ("model.language.heads=3", "model.language: heads (3) must be a multiple of kv_heads (2)"),
        ("model.language.head_size=15", "model.language: head_size (15) must be even"),
        (
            "model.language.rope_sections=[1, 2, 3]",
            "rope_sections (1, 2, 3) must add up to head_size / 2 = 8",
        ),
        ("model.language.rope_sections=[-1, 4, 5]", "rope_sections (-1, 4, 5) must add up to head"),
        ("pipeline.split_backward=3", "pipeline.split_backward: must be a valid boolean or 'auto'"),
        ("model.language.rope_interleaved=true", "it orders rope_sections; set them, or leave it"),
        (
            "model.language={width: 64, layers: 2, heads: 4, kv_heads: 2, head_size: 16, mlp_width: 128, "
            "rope_sections: [1, 3, 4], rope_interleaved: true}",
            "rope_sections (1, 3, 4): with rope_interleaved every third of 8 pairs is of height",
        ),
        (
            "model.vision.deepstack_layers=[1]",
            "must be layers 0 .. 0 in ascending order, each once",
        ),
        (
            "model.vision={width: 32, layers: 1, heads: 2, mlp_width: 64, deepstack_layers: [0], "
            "projector: {grouping: mean}}",
            "projector.grouping (mean): those of deepstack_layers concatenate features",
        ),
        ("model.vision.projector.bias=false", "the two matrices of a projector have biases"),
        ("model.vision.projector.norm_epsilon=0.1", "norm_epsilon (0.1): there is no norm"),
        ("model.vision.class_token=true", "class_token (True): it has a learned position, and ro"),
        ("data.images.resize=tiles", "data.images.resize (tiles): towers with a class token see"),
        ("data.images.max_tiles=2", "max_tiles (2): with resize (area) an image is not cut"),
        ("model.vision.width=36", "model.vision: width (36) must be a multiple of 4 * heads (2)"),
        ("model.vision.heads=3", "model.vision: width (32) must be a multiple of heads (3)"),
        ("mesh.fsdp=0", "mesh.fsdp: must be greater than 0 or -1 (got 0)"),
        ("mesh.data=-2", "mesh.data: must be greater than 0 or -1 (got -2)"),
        ("mesh.tensor=-1", "mesh: data and tensor are -1, but only one axis can take the rest"),
        (
            "components.projector.vision.attention=jax",
            "components.projector.vision: attention (jax): a projector has",
        ),
        (
            "model.audio={width: 32, layers: 1, heads: 2, mlp_width: 64, chunk_frames: 20}",
            "chunk_frames (20) must be",
        ),
        (
            "model.audio={width: 32, layers: 1, heads: 2, mlp_width: 64, window_chunks: 2}",
            "window_chunks (2): with attention (clip), tokens see the whole clip; leave it out, or se",
        ),
        (
            "model.audio={width: 32, layers: 1, heads: 2, mlp_width: 64, stem_channels: 4, stem_strides: [1, 2]}",
            "stem_strides ([1, 2]): with stem_channels there are three strides of 2; leave it out",
        ),
        (
            "model.audio={width: 32, layers: 1, heads: 2, mlp_width: 64, stem_channels: 4, silence: stem}",
            "silence (stem): convolutions along time and mels (stem_channels) take zeros after a cl",
        ),
        (
            "model.audio={width: 33, layers: 1, heads: 1, mlp_width: 64, positions: sinusoidal}",
            "width (33): sinusoidal positions are a sine and a cosine",
        ),
        (
            "model.audio={width: 2, layers: 1, heads: 1, mlp_width: 64, positions: sinusoidal}",
            "width (2): sinusoidal positions are",
        ),
    ],
)
def test_ill_typed_values_name_the_key_the_type_and_the_value(path, override, message):
    assert message in refusal(path, override)


def test_all_problems_are_reported_at_once_with_the_file(path):
    path.write_text(MINIMAL.replace("batch_size: 8", "batch: 8"))
    message = refusal(path, "run.steps=x", "model.vision.heads=-1")
    assert message.startswith(f"{path}: ")
    for problem in (
        "missing key 'data.batch_size'",
        "unknown key 'data.batch'; did you mean 'data.batch_size'?",
        "run.steps: must be a valid integer",
        "model.vision.heads: must be greater than 0",
    ):
        assert problem in message


def test_overrides_reach_scalars_lists_sections_and_absent_sections(path):
    config = load_config(
        path,
        [
            "optimizer.learning_rate=3e-4",
            "mesh.fsdp=2",
            "phases.vision.capacities=[1024, 128]",
            "components.vision.layout.heads=[tensor]",
            "data.sources=[{name: b, path: 'b=c.jsonl', weight: 2}]",
            "model.vision=null",
            "run.seed=1",
            "run.seed=2",
        ],
    )
    assert config.optimizer.learning_rate == 3e-4
    assert config.mesh.fsdp == 2
    assert config.phases.vision.capacities == (1024, 128)
    assert config.components.vision.layout == {"heads": ["tensor"]}
    assert (config.data.sources[0].path, config.data.sources[0].weight) == ("b=c.jsonl", 2.0)
    assert config.model.encoders == ()
    assert config.run.seed == 2  # the last one wins


@pytest.mark.parametrize("axis", ["data", "fsdp", "context", "tensor"])
def test_any_one_axis_of_the_mesh_takes_the_rest(path, axis):
    sizes = load_config(path, ["mesh.data=2", f"mesh.{axis}=-1", "pipeline.stages=2"]).mesh_sizes
    assert mesh_shape(sizes, 32)[list(sizes).index(axis)] == (16 if axis == "data" else 8)


@pytest.mark.parametrize("remat", ["none", "dots", "[mlp, attention]"])
def test_what_is_computed_again_may_be_said_with_stages(path, remat):
    overrides = [f"components.language.remat={remat}", "pipeline.stages=2"]
    assert load_config(path, overrides).components.language.remat != "full"


@pytest.mark.parametrize(
    ("component", "value", "message"),
    [
        ("language", "halves", "remat: must be 'none', 'dots' or 'full' or a valid list"),
        ("language", "[mlp, heads]", "must be 'attention', 'projections' or 'mlp' (got 'heads')"),
        ("language", "[]", "remat: must be 'none', 'dots', 'full' or different names"),
        ("language", "[mlp, mlp]", "different names of what is kept (got ['mlp', 'mlp'])"),
        ("projector.vision", "[attention]", "remat (['attention']): of these values a projector"),
    ],
)
def test_what_is_kept_has_names(path, component, value, message):
    assert load_config(
        path, ["components.audio.remat=[attention, mlp]"]
    ).components.audio.remat == (
        "attention",
        "mlp",
    )
    assert message in refusal(path, f"components.{component}.remat={value}")


def test_with_stages_the_compiler_adds_gradients(path):
    for component in ("language", "projector.vision"):
        for key, value in (("reduce_dtype", "compute"), ("reduce", "step")):
            setting = f"components.{component}.{key}={value}"
            load_config(path, [setting])
            assert f"components.{component}.{key} ({value}): with pipeline.stages" in refusal(
                path, setting, "pipeline.stages=2"
            )


DRAWS = "model.diffusion={width: 32, layers: 1, heads: 2, mlp_width: 64}"


def test_a_model_that_draws_has_what_its_losses_need(path):
    config = load_config(path, [DRAWS])
    assert config.model.phases == ("vision", "language", "diffusion")
    assert "objective: it says how the losses of a model that draws" in refusal(
        path, "objective.diffusion.shift=4.0"
    )
    assert load_config(path, [DRAWS, "pipeline.stages=2"]).pipeline.stages == 2
    assert "nothing to keep" in refusal(path, DRAWS, "phases.diffusion.kept_residuals=1")
    keeps_one = "phases.language.kept_residuals=1"
    assert load_config(path, [DRAWS, keeps_one]).phases.language.kept_residuals == 1
    assert "pipeline.kept_residuals says" in refusal(path, DRAWS, keeps_one, "pipeline.stages=2")
    assert "at least 8 numbers in a head" in refusal(path, DRAWS, "model.diffusion.heads=8")
    frozen = "components.diffusion={freeze: true, ema: 0.9}"
    assert "components.diffusion: ema (0.9): the component is frozen" in refusal(
        path, DRAWS, frozen
    )
    no_loss = "objective={language: {weight: 0}, diffusion: {weight: 0}}"
    assert "objective.diffusion.weight: must be greater than 0" in refusal(path, DRAWS, no_loss)
    for message, *keys in (
        ("rope_sections (4, 2, 1) must add up to half of width / heads", "rope_sections=[4, 2, 1]"),
        ("and be at least 0", "rope_sections=[-1, 2, 7]"),
        ("padded_conditions (512): with conditioning: joint", "padded_conditions=512"),
        ("rope_origin (centre): with cond", "conditioning=cross", "rope_origin=centre"),
        (
            "condition_positions (diagonal): with",
            "conditioning=cross",
            "condition_positions=diagonal",
        ),
        ("streams (2): with conditioning: cross", "conditioning=cross", "streams=2"),
        ("modulation (shared): with streams: 2", "streams=2", "modulation=shared"),
        ("qk_norm_over (heads): without", "qk_norm=false", "qk_norm_over=heads"),
        ("projector (folder): without from", "projector=folder"),
    ):
        assert message in refusal(path, DRAWS, *(f"model.diffusion.{key}" for key in keys))


def test_latents_and_pixels_have_sections_of_their_own(path):
    latents = (DRAWS, "model.diffusion.channels=4", "model.diffusion.patch_size=2")
    config = load_config(path, [*latents, "data.latents.mean=[1, 2, 3, 4]"])
    assert config.model.diffusion.patch_features == 16
    for message, keys in {
        "the model draws no latents; set model.diffusion.channels": (DRAWS, "data.latents.std=[2]"),
        "data.generated: it is about pixels": (*latents, "data.generated.max_pixels=4096"),
        "data.latents.mean: 3 numbers, but one": (*latents, "data.latents.mean=[1, 2, 3]"),
        "greater than 0": (*latents, "data.latents.std=[0]"),
        "data.latents.max_frames (128): shortened clips": (
            *latents,
            "data.latents.shorten=true",
            "model.diffusion.patch_frames=3",
        ),
        "folder_fps (8): without fps": (DRAWS, "data.generated.folder_fps=8"),
    }.items():
        assert message in refusal(path, *keys)


def test_videos_are_seen_where_the_tower_says_so(path):
    with_videos = ("model.vision.videos=true", "model.vision.patch_frames=2")
    assert load_config(path, [*with_videos, "data.videos.fps=2"]).data.videos.min_frames == 4
    for message, keys in {
        "data.videos: no videos are read; leave it out, or set model.vision": (
            "data.videos.fps=2",
        ),
        "min_frames (9) is more than max_frames (8)": (
            *with_videos,
            "data.videos={fps: 2, min_frames: 9, max_frames: 8}",
        ),
        "sampling (ends): without fps all frames": (*with_videos, "data.videos.sampling=ends"),
        "positions_per_second (4): with times (text)": (
            *with_videos,
            "data.videos={times: text, positions_per_second: 4}",
        ),
        "data.videos.max_frames (1) is less than one patch": (
            *with_videos,
            "data.videos.max_frames=1",
        ),
        "model.vision.class_token: tiles of images have one": (
            *with_videos,
            "model.vision.class_token=true",
            "model.vision.positions=table",
            "model.vision.position_grid=4",
            "data.images={resize: square, min_pixels: 3136, max_pixels: 3136}",
        ),
        "model.language.media_positions (line): groups of frames": (
            *with_videos,
            "model.language.media_positions=line",
        ),
        "data.videos.bounds (video): with data.images.resize (area)": (
            *with_videos,
            "data.videos.bounds=video",
        ),
        "data.videos.max_pixels (602112): with model.vision.positions (table)": (
            *with_videos,
            "model.vision.positions=table",
            "model.vision.position_grid=4",
            "data.images={resize: square, min_pixels: 3136, max_pixels: 3136}",
        ),
    }.items():
        assert message in refusal(path, *keys)


MIXTURE = "model.language.experts={count: 4, per_token: 2}"


def test_experts_and_what_they_do_without(path):
    for overrides in (
        [],
        [DRAWS],
        [DRAWS, "pipeline.stages=2"],
        [DRAWS, "objective.language.weight=0"],
    ):
        config = load_config(path, [MIXTURE, "objective.experts.balance=0.1", *overrides])
        assert config.model.language.experts and bool(config.model.generators) == bool(overrides)
    for changes, message in (
        ((MIXTURE, "model.language.experts.per_token=5"), "more than all experts, count (4)"),
        (
            (MIXTURE, DRAWS, "pipeline.stages=2", "objective.language.weight=0"),
            "pipeline.stages (2): what a router of model.language.experts adds goes with the loss",
        ),
        ((MIXTURE, "components.language.remat=[attention, mlp]"), "computed again in any case"),
        (("components.language.experts=ragged_dot",), "the decoder has no experts; leave it out"),
        (("objective.experts.router_z=0.1",), "objective.experts: the decoder has no experts"),
        (("components.projector.vision.experts=jax",), "only the decoder may have experts"),
        (
            (MIXTURE, "model.language.activation=gelu_tanh"),
            "activation (gelu_tanh): a decoder with",
        ),
        ((MIXTURE, "model.language.post_norms=true"), "post_norms (True): a decoder with experts"),
    ):
        assert message in refusal(path, *changes)


YARN = "model.language.rope_scaling={kind: yarn, factor: 4, original_max_position_embeddings: 64}"


def test_positions_of_windows(path):
    local = "model.language.window_rope_theta=100"
    windows = (local, "model.language.window=8")
    without_multiplier = "model.language.rope_scaling.attention_factor=1.0"
    assert (
        load_config(path, [*windows, YARN, without_multiplier]).model.language.window_rope_theta
        == 100
    )
    assert "window_rope_theta (100): no layer attends in windows" in refusal(path, local)
    assert "rope_scaling (kind 'yarn') also multiplies" in refusal(path, *windows, YARN)


def test_yarn_needs_a_base_of_frequencies(path):
    base_of_one = "model.language.rope_theta=1"
    assert "rope_theta (1): with rope_scaling of kind 'yarn' it must be" in refusal(
        path, base_of_one, YARN
    )
    assert load_config(path, [base_of_one]).model.language.rope_theta == 1


def test_a_frozen_decoder_that_nothing_trains_through_has_no_loss(path):
    frozen = [
        f"components.{name}.freeze=true" for name in ("language", "vision", "projector.vision")
    ]
    message = "the loss of text trains nothing; set it to 0"
    assert message in refusal(path, DRAWS, *frozen)
    adapter = "{rank: 2, alpha: 2.0}"
    adapted = ("components.diffusion.freeze=true", f"model.adapters.diffusion={adapter}")
    assert message in refusal(path, DRAWS, *frozen, *adapted)
    load_config(path, [DRAWS, *frozen, f"model.adapters.language={adapter}"])
    load_config(path, [DRAWS, *frozen[:2]])
    load_config(path, [DRAWS, *frozen, "objective.language.weight=0.0"])


def test_routers_of_a_decoder_that_nothing_trains_through_have_no_loss(path):
    frozen = [
        f"components.{name}.freeze=true" for name in ("language", "vision", "projector.vision")
    ]
    overrides = [DRAWS, MIXTURE, "objective.language.weight=0.0", *frozen]
    router_loss = "objective.experts.balance=0.1"
    assert "what its routers add trains nothing" in refusal(path, *overrides, router_loss)
    load_config(path, overrides)
    load_config(path, [*overrides[:-1], router_loss])


def test_with_stages_media_run_where_their_texts_are_read(path):
    for key, value in (("mode", "tokens"), ("pool_slots", "64"), ("exchange", "ragged")):
        override = f"balance.{key}={value}"
        # Alone, the key is fine
        load_config(path, [override])
        message = f"balance.{key} ({value}): with pipeline.stages (4)"
        assert message in refusal(path, override, "pipeline.stages=4")


def test_residuals_are_kept_where_there_is_something_to_keep(path):
    keeps_two = "phases.vision.kept_residuals=2"
    assert load_config(path, [keeps_two]).phases.vision.kept_residuals == 2
    assert "pipeline.kept_residuals says what is kept" in refusal(
        path, keeps_two, "pipeline.stages=4"
    )
    assert "nothing to keep" in refusal(path, "phases.language.kept_residuals=1")


def test_an_override_fills_a_section_left_empty(path):
    path.write_text(MINIMAL + "mesh:\n")
    assert load_config(path, ["mesh.tensor=2"]).mesh.tensor == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps", "override 'run.steps' is not of the form dotted.key=value"),
        ("=3", "override '=3' is not of the form dotted.key=value"),
        ("run.steps.x=3", "run.steps is a value, not a section"),
        ("data.sources.0.name=x", "data.sources is a list; give the whole list as its value"),
        ("run=[1", "override 'run=[1': the value is not valid YAML"),
    ],
)
def test_malformed_overrides(path, override, message):
    assert message in refusal(path, override)


@pytest.mark.parametrize("text", ["2e-3", "2E-3", "0.2e-2", ".002", "+2e-3", "0.002"])
def test_scientific_notation_is_a_number(path, text):
    assert load_config(path, [f"optimizer.learning_rate={text}"]).optimizer.learning_rate == 0.002
    path.write_text(MINIMAL.replace("0.001", text))
    assert load_config(path).optimizer.learning_rate == 0.002


def test_names_that_merely_look_numeric_stay_text(path):
    config = load_config(path, ["run.directory=1e-layer", "data.tokenizer=2026-11-21"])
    assert (config.run.directory, config.data.tokenizer) == ("1e-layer", "2026-11-21")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_the_dumped_config_reads_back_equal(config, tmp_path):
    resolved = load_config(
        config, ["components.vision.layout.batch=[data, fsdp]", "phases.audio.capacities=[256]"]
    )
    dumped = tmp_path / "config.yaml"
    dumped.write_text(dump_config(resolved))
    assert load_config(dumped) == resolved


@given(
    rate=st.floats(min_value=1e-300, max_value=1e300),
    directory=st.text(min_size=1),
    seed=st.integers(0, 2**53),
    capacities=st.lists(st.integers(1, 2**31), min_size=1, max_size=3),
)
def test_any_values_survive_a_dump(rate, directory, seed, capacities):
    tree = yaml.safe_load(MINIMAL)
    tree["optimizer"]["learning_rate"] = rate
    tree["run"] |= {"directory": f"runs/{directory}", "seed": seed}
    tree["phases"] = {"audio": {"capacities": capacities}}
    config = parse_config(tree)
    assert config.optimizer.learning_rate == rate
    assert config.phases.audio.capacities == tuple(capacities)
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_records_are_frozen(path):
    config = load_config(path)
    with pytest.raises(ValidationError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]
    assert isinstance(config, Config)


def test_a_file_that_is_missing_broken_or_not_a_mapping(tmp_path):
    path = tmp_path / "x.yaml"
    assert refusal(path) == f"config file {path} does not exist"
    path.write_text("run: [1,\n")
    assert f"config file {path} is not valid YAML" in refusal(path)
    assert "line 2" in refusal(path)
    path.write_text("- 1\n")
    assert "must hold a mapping of sections, not list" in refusal(path)
    path.write_text("")
    assert "must hold a mapping of sections, not NoneType" in refusal(path)
    path.write_text("!!python/object/apply:os.getcwd []\n")
    assert "is not valid YAML" in refusal(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sources=[]", "data.sources: must name at least one source"),
        ("data.sources=[{name: '', path: a}]", "data.sources.0.name: must be text, not empty and"),
        (
            'data.sources=[{name: s, path: "a\\nb"}]',
            "data.sources.0.path: must be text, not empty and",
        ),
        (
            "phases.vision.capacities=[]",
            "phases.vision.capacities: must be 'auto' or at least one number of slots",
        ),
        ("data.batch_size=99999999999", "data.batch_size: must be less than or equal to 1048576"),
        (
            "model.language.layers=99999999999",
            "model.language.layers: must be less than or equal to 10000",
        ),
        ("data.workers=99999999999", "data.workers: must be less than or equal to 1024"),
        ("data.prefetch=99999999999", "data.prefetch: must be less than or equal to 1024"),
        ("distributed.start_timeout=1e12", "distributed.start_timeout: must be less than or equal"),
        ("distributed.peer_timeout=1e10", "distributed.peer_timeout: must be less than or equal"),
        (
            "model.vision.window=99999999999",
            "model.vision.window: must be less than or equal to 1073741824",
        ),
        (
            "optimizer.learning_rate=.inf",
            "optimizer.learning_rate: must be a finite number (got inf)",
        ),
        (
            "optimizer.learning_rate=1e400",
            "optimizer.learning_rate: must be a finite number (got inf)",
        ),
        (
            "optimizer.weight_decay=.nan",
            "optimizer.weight_decay: must be a finite number (got nan)",
        ),
        (
            "components.vision.learning_rate_scale=.inf",
            "components.vision.learning_rate_scale: must be a finite",
        ),
        (
            "components.vision={freeze: true, ema: 0.9}",
            "components.vision: ema (0.9): the component is frozen",
        ),
        (
            "optimizer.learning_rate='1e5'",
            "optimizer.learning_rate: must be a valid number (got '1e5')",
        ),
        (
            'optimizer.learning_rate="1e5"',
            "optimizer.learning_rate: must be a valid number (got '1e5')",
        ),
        ("optimizer.warmup_steps=2147483648", "warmup_steps: must be less than 2147483648"),
        ("balance.pool_slots=2147483648", "balance.pool_slots: must be less than 2147483648 or"),
        ("run.seed=9223372036854775808", "run.seed: must be less than 9223372036854775808"),
        (
            f"run.seed={'9' * 5000}",
            "is not valid YAML: a number of 5000 characters is too long (line 1, column 1)",
        ),
        (f"run.directory={'[' * 2000}", "is not valid YAML: it is nested too deeply"),
        (
            "run={steps: 1, steps: 2}",
            "is not valid YAML: the key 'steps' stands here twice (line 1, column 12)",
        ),
        (f"run.steps={'x' * 9999}", "x ...)"),
        ("run.steps=010", "YAML reads 010 as an octal number, or one to base 60"),
        ("run.steps=1:30", "YAML reads 1:30 as an octal number, or one to base 60"),
        ("optimizer.learning_rate=1:30.5", "YAML reads 1:30.5 as an octal number, or one to"),
    ],
)
def test_values_that_no_run_can_have_are_refused_in_one_line(path, override, message):
    refused = refusal(path, override)
    assert message in refused
    assert "\n" not in refused


# Aliases of aliases: ten levels of ten make ten billion values out of a few hundred bytes
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
for before, name in zip("abcdefghi", "bcdefghij", strict=True):
    BOMB += f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"run: \xff\n", "is not UTF-8: byte 5 is 0xff"),
        ("run: {}\n".encode("utf-16"), "is not UTF-8: byte 0 is 0xff"),
        (b"run: {}\nmodel: {}\nrun: {}\n", "the key 'run' stands here twice (line 3, column 1)"),
        (b"run: {steps: 1, seed: 0, steps: 2}\n", "the key 'steps' stands here twice (line 1"),
        (BOMB.encode(), "it has more than 100000 values, aliases written out"),
        (b"a: &a [*a]\n", "it contains itself (line 1"),
        (b"[" * 2000, "it is nested too deeply"),
        (b"a: 1" + b":1" * 50_000, "a number of 100001 characters is too long"),
        (b"a: !!binary aGVsbG8=\n", "no value of the kind !!binary is read here"),
        (
            b"a: !!python/object/apply:os.getcwd []\n",
            "no value of the kind !!python/object/apply:os.getcwd",
        ),
        (b"a: 1\n--- \nb: 2\n", "but found another document (line 2"),
        (b"a: 1\x00\n", "special characters are not allowed"),
        (b'a: "\\ud800"\n', "half of a surrogate pair is no text (line 1, column 4)"),
        (b"? [a]\n: 2\n", "unhashable key"),
        (b"a: " + b"x" * (1 << 20), "has 1048579 bytes, more than the 1048576 that are read"),
    ],
)
def test_files_that_are_no_config_are_refused_in_one_line(path, content, message):
    path.write_bytes(content)
    refused = refusal(path)
    assert message in refused and str(path) in refused
    assert "\n" not in refused


def test_a_pipe_or_a_folder_is_no_config(path):
    path.unlink()
    os.mkfifo(path)
    assert refusal(path) == f"config file {path} is no regular file"
    assert refusal(path.parent) == f"config file {path.parent} is no regular file"
    assert refusal(Path("/dev/zero")) == "config file /dev/zero is no regular file"


def test_aliases_and_merged_keys_are_read(path):
    rows = "phases:\n  vision: &rows {block: 64, row_classes: 2}\n  audio: *rows\n  language: {<<: *rows, block: 32}\n"
    path.write_text(MINIMAL + rows)
    phases = load_config(path).phases
    assert (phases.audio.block, phases.language.block, phases.language.row_classes) == (64, 32, 2)


def test_an_override_changes_nothing_else_that_an_alias_names(path):
    """An alias names the same mapping twice, so an override must not change it in place."""
    path.write_text(MINIMAL + "components: {vision: &tower {freeze: true}, audio: *tower}\n")
    components = load_config(path, ["components.vision.freeze=false"]).components
    assert (components.vision.freeze, components.audio.freeze) == (False, True)


def test_what_is_quoted_is_text_and_dates_are_text(path):
    config = load_config(
        path, ["run.directory='1e5'", "data.root=2026-11-21T10:00:00Z", "data.tokenizer=2026-1-5"]
    )
    assert config.run.directory == "1e5"
    assert (config.data.root, config.data.tokenizer) == ("2026-11-21T10:00:00Z", "2026-1-5")
    path.write_text(dump_config(config))
    assert load_config(path) == config


CUDNN = "components.{}.attention=cudnn", "components.{}.compute_dtype=bfloat16"


@pytest.mark.parametrize(
    ("phase", "changes", "message"),
    [
        (
            "language",
            ("components.language.compute_dtype=float32",),
            "it computes in bfloat16; set",
        ),
        ("language", (), "text would see vision in both directions; set model.language."),
        (
            "language",
            (
                "model.language.bidirectional=[]",
                "model.language.window=4",
                "model.language.full_layers=[0]",
            ),
            "all layers must have one window; leave model.language.full_layers out",
        ),
        (
            "language",
            ("model.language.head_size=18", "model.language.rope_sections=[5,2,2]"),
            "heads must have a mul",
        ),
        ("language", ("pipeline.stages=2",), "pipeline.stages has rows of its own"),
        (
            "vision",
            ("model.vision.window=2",),
            "windows of patches are more than a row has room for",
        ),
        (
            "audio",
            (
                "model.audio={width: 32, layers: 1, heads: 2, mlp_width: 64, attention: chunk, silence: unseen}",
            ),
            "chunks are more than a row has room for; set",
        ),
    ],
)
def test_what_cudnn_cannot_see_is_refused(path, phase, changes, message):
    cudnn = (change.format(phase) for change in CUDNN)
    assert f"components.{phase}.attention (cudnn): {message}" in refusal(path, *cudnn, *changes)
