"""No key of the config is without effect: each key is listed here with something that it changes.

    EFFECTS     observed without training: parameters, traced programs, plans, lengths, rates
    RUN         observed in the run folder or the reader of a run
    ELSEWHERE   observed by the test that is named

An effect may also be a refusal that names the key. A new key without an entry fails
`test_every_key_of_the_schema_is_listed`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import BaseModel

from jaxmllm.balance.stages.plan import plan_pipeline
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config
from jaxmllm.config.strict_yaml import write_text
from jaxmllm.data.media.generated import Generated
from jaxmllm.data.media.modalities import modalities, row_formats
from jaxmllm.data.text.load import load_tokenizer
from jaxmllm.models.compose import build_model
from jaxmllm.models.mllm import MLLM
from jaxmllm.models.rows import (
    abstract_encoder_rows,
    abstract_generator_rows,
    abstract_language_rows,
    abstract_pool,
)
from jaxmllm.setup.build import build_run, draw_rule
from jaxmllm.setup.prepare import RunInputs, prepare, vocabulary
from jaxmllm.setup.row_memory import kept_residuals
from jaxmllm.setup.row_shapes import attention_spec, largest_row
from jaxmllm.setup.sizing import pipeline_sizes, plan_spec, sizing_inputs
from jaxmllm.setup.spans import mesh_spans, spans_of_phases
from jaxmllm.training import loop
from jaxmllm.training.generator_functions import GeneratorFunctions
from jaxmllm.training.objectives.flow import TIME_BANDS, FlowSums
from jaxmllm.training.objectives.tokens import Sums
from jaxmllm.training.optimizer import clip_scale, learning_rate, make_optimizer
from jaxmllm.training.run import USER_ERRORS, Run
from jaxmllm.training.step_functions import StepFunctions
from sharding.mesh import make_mesh, mesh_shape
from sharding.parameters import gathered, map_rows, row_axes
from tests.support import tiny_config
from tests.training.drawing import make_pictures

MESH = make_mesh({"data": 2, "fsdp": 2, "context": 1, "tensor": 2})
NO_ENCODERS = {"vision": None, "audio": None}
CAPACITY = 256  # slots of the rows that programs are traced for


# ---------------------------------------------------------------------------- what can be seen


@dataclass(frozen=True)
class Scene:
    """What observers may look at beside a config: a sample, an empty folder, uncompiled inputs."""

    data: Path
    folder: Path
    base: Path  # config file

    @functools.cached_property
    def inputs(self) -> RunInputs:
        return prepare(load_config(self.base), MESH)

    @functools.cached_property
    def drawing(self) -> RunInputs:
        """The same with a generator and pictures for it to learn from."""
        path = make_pictures(self.folder, examples=64, shown=False)
        source = f"data.sources=[{{name: drawn, path: {path}}}]"
        return prepare(load_config(self.base, [*DRAWS, source, "data.evaluation=[]"]), MESH)

    @functools.cached_property
    def staged(self) -> RunInputs:
        """The same on one rank of a pipeline."""
        config = load_config(self.base, STAGED)
        return prepare(config, make_mesh(config.mesh_sizes, jax.devices()[:2]))


Observer = Callable[[Config, Scene], Any]


@functools.lru_cache(maxsize=4)
def model_of(config: str) -> MLLM:
    """The model of a config, which is passed as JSON so that it can be cached."""
    parsed = Config.model_validate_json(config)
    size = vocabulary(parsed, load_tokenizer(parsed.data))
    return build_model(parsed.model, size, parsed.components, MESH)


def model(config: Config) -> MLLM:
    return model_of(config.model_dump_json(by_alias=True))


def weights(config: Config, _: Scene) -> Any:
    """Shapes, types and shardings of all parameters."""
    leaves = jax.tree.leaves_with_path(model(config).abstract(config.run.param_dtype))
    return [
        (jax.tree_util.keystr(path), leaf.shape, leaf.dtype, str(leaf.sharding))
        for path, leaf in leaves
    ]


def decoder_weights(config: Config, scene: Scene) -> Any:
    """The same without encoders, which are slower to build."""
    return weights(
        config.model_copy(update={"model": config.model.model_copy(update=NO_ENCODERS)}), scene
    )


def text_of(function: Callable[..., Any], *arguments: Any) -> str:
    """The jaxpr of a traced function with its constants; addresses of objects are left out."""
    traced = jax.make_jaxpr(function)(*arguments)
    constants = [
        np.asarray(value).tobytes() for value in traced.consts if not hasattr(value, "eqns")
    ]
    return re.sub(r"0x[0-9a-f]+", "", f"{traced} {constants}")


def token_positions(config: Config, _: Scene) -> Any:
    """The positions of an image of 4 x 4 tokens in a text."""
    positions, following = modalities(config.model, config.data)["vision"].token_positions(
        (1, 4, 4), 0
    )
    return positions.tolist(), following


def step_of(config: Config) -> StepFunctions:
    return StepFunctions(model(config), config.optimizer, config.decay_steps, 1)


def encoder(phase: str) -> Observer:
    """The gradient of a phase's tower and projector."""

    def observe(config: Config, _: Scene) -> str:
        mllm = model(config)
        row_format = modalities(config.model, config.data)[phase].format
        block = getattr(config.phases, phase).block
        layout = mllm.layout(phase)
        rows = abstract_encoder_rows(
            layout, CAPACITY, row_format, block, phase in config.model.windows
        )
        params = {name: mllm.abstract("float32")[name] for name in (phase, f"projector.{phase}")}

        def loss(params: Any, rows: Any) -> Any:
            return mllm.project(
                params, phase, mllm.features(params, phase, rows), rows.places
            ).sum()

        return text_of(jax.grad(loss), params, rows)

    return observe


def language(config: Config, _: Scene) -> str:
    """The gradient of the decoder's loss."""
    mllm = model(config)
    step = step_of(config)
    windows = "language" in config.model.windows
    rows = abstract_language_rows(
        mllm.layout("language"), CAPACITY, 8, config.phases.language.block, windows
    )
    ranks = mllm.layout("language").ranks
    width = config.model.language.width
    media = jax.ShapeDtypeStruct((ranks, CAPACITY, width), np.float32)
    valid = jax.ShapeDtypeStruct((ranks, CAPACITY), np.float32)

    def loss(params: Any, *arguments: Any) -> Any:
        return step.language_loss(params, *arguments)[0]

    return text_of(
        jax.grad(loss), {"language": mllm.abstract("float32")["language"]}, rows, media, valid
    )


def generator(config: Config, _: Scene) -> str:
    """The gradient of the loss of drawn patches."""
    mllm = model(config)
    row_format = modalities(config.model, config.data)["diffusion"].format
    layout = mllm.layout("diffusion")
    block = config.phases.diffusion.block
    crossed = "diffusion" in config.model.crossed
    rows = abstract_generator_rows(layout, CAPACITY, 8, row_format, block, crossed=crossed)
    width = config.model.language.width
    params = {name: mllm.abstract("float32")[name] for name in ("projector.language", "diffusion")}
    functions = GeneratorFunctions(
        dataclasses.replace(step_of(config), objective=config.objective), "diffusion"
    )
    pool = abstract_pool(layout, CAPACITY, width, np.float32)
    zero = jax.ShapeDtypeStruct((), np.int32)
    source_sums = jax.ShapeDtypeStruct((layout.ranks, 1), np.float32)
    scale = jax.ShapeDtypeStruct((), np.float32)
    time_sums = jax.ShapeDtypeStruct((layout.ranks, TIME_BANDS), np.float32)
    sums = FlowSums(source_sums, source_sums, time_sums, time_sums)
    arguments = (params, rows, pool, zero, scale, params, sums)
    trained, _ = mllm.trainable.split(params)
    return text_of(functions.draw_loss_and_grad, *arguments[:5], trained, arguments[6])


def draws(config: Config, _: Scene) -> Any:
    """What is drawn at random per item: noise, time and hidden conditions."""
    rule = draw_rule(config)
    return rule and [rule.of(step, "id", 0, 9) for step in range(32)]


def objective(config: Config, _: Scene) -> str:
    """The loss and the usable gradients of an update, from given sums of losses."""
    mllm = model(config)
    step = dataclasses.replace(step_of(config), objective=config.objective)
    params = mllm.abstract("float32")
    state = jax.eval_shape(step.init, params)
    trained, _ = mllm.trainable.split(params)
    array = jax.ShapeDtypeStruct((1, 1), np.float32)
    sums = Sums(array, array, array, array, FlowSums(*(array,) * 4))
    planned, failed = (jax.ShapeDtypeStruct((), dtype) for dtype in (np.float32, np.int32))
    return text_of(step.update, state, trained, sums, planned, failed)


def reductions(config: Config, _: Scene) -> str:
    """How each component adds up the gradient of a sharded parameter over devices."""
    texts = []
    axes = ("embed", None)
    for name, component in model(config).components.items():
        layout = component.layout
        inside = layout.inside(*row_axes(layout))

        def gradient(weight: Any, inside: Any = inside, dtype: Any = component.dtype) -> Any:
            return jax.grad(lambda w: gathered(inside, w, axes, dtype).sum(dtype=np.float32))(
                weight
            )

        shard = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=layout.sharding(axes))
        texts.append(f"{name}: {text_of(map_rows(layout, gradient, (shard,), shard), shard)}")
    return "\n".join(texts)


def trained(config: Config, _: Scene) -> Any:
    return model(config).trainable


def scales(config: Config, _: Scene) -> Any:
    """The learning rate of each component, as the update multiplies it."""
    return {
        name: component.settings.learning_rate_scale
        for name, component in model(config).components.items()
    }


def averaged(config: Config, _: Scene) -> Any:
    """Whose parameters are averaged, and how."""
    return model(config).ema


def adapter_scales(config: Config, _: Scene) -> Any:
    """The factor of the products of adapters' matrices, by component."""
    return {name: component.adapter_scale for name, component in model(config).components.items()}


def rates(config: Config, _: Scene) -> Any:
    rate = functools.partial(learning_rate, config.optimizer, config.decay_steps)
    return jax.vmap(rate)(jnp.arange(config.run.steps)).tolist()


def updates(config: Config, _: Scene) -> Any:
    """Three AdamW updates of a gradient of norm 3, which clipping scales."""
    optimizer = make_optimizer(config.optimizer)
    params = {"kernel": jnp.ones(2)}

    def after(state: Any, grad: Any) -> Any:
        scale = clip_scale(jnp.float32(3.0), config.optimizer.clip_norm)
        new, state = optimizer.update({"kernel": scale * grad}, state, params)
        return state, new["kernel"]

    grads = jnp.array([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2]])
    return jax.lax.scan(after, optimizer.init(params), grads)[1].tolist()


def lengths(config: Config, _: Scene) -> str:
    """Everything that the names of length indexes depend on."""
    return repr(modalities(config.model, config.data))


def condition_positions(config: Config, _: Scene) -> Any:
    """Positions of the texts that condition pictures."""
    modality = modalities(config.model, config.data)["diffusion"]
    assert isinstance(modality, Generated)
    return modality.condition_positions((1, 4, 6), 3).tolist(), modality.first_time(3)


def formats(config: Config, _: Scene) -> str:
    """How items are laid out in rows."""
    return repr(row_formats(modalities(config.model, config.data)))


def clip_parts(config: Config, _: Scene) -> Any:
    """Which slots of a clip attend to one another."""
    parts = modalities(config.model, config.data)["audio"].apart((64,))
    return None if parts is None else parts.tolist()


def examples(config: Config, _: Scene) -> Any:
    """The data: sources, their files and lengths, what is learned, order and size of batches."""
    inputs = prepare(config, MESH)
    indexes = [
        (index.name, repr(index.source), index.targets.tolist(), len(index.rejected))
        for corpus in inputs.corpora
        for index in corpus.indexes
    ]
    # Weights of sources for training act through the order below
    weights = [corpus.weights for corpus in inputs.corpora[1:]]
    return (
        indexes,
        weights,
        [inputs.order[i] for i in range(64)],
        [len(batch.examples) for batch in inputs.samples],
    )


def cache_files(config: Config, scene: Scene) -> Any:
    prepare(config, MESH)
    return sorted(path.name for path in scene.folder.iterdir())


def plan(config: Config, scene: Scene) -> Any:
    """The spec of a step's plan (rows, pools, exchange) and of its attention."""
    inputs = scene.drawing if config.model.generators else scene.inputs
    spec = plan_spec(config, inputs)
    return repr((spec, attention_spec(config, inputs.model, inputs.corpus.formats, spec)))


def limits(config: Config, _: Scene) -> Any:
    """The longest item that fits any row, by phase."""
    formats = row_formats(modalities(config.model, config.data))
    return [
        largest_row(config, phase, formats, 1, span=1, fitting=1 << 20)
        for phase in config.model.phases
    ]


def kept(config: Config, scene: Scene) -> Any:
    """How many microbatches of two-pass phases keep what their backward pass needs."""
    mllm = (scene.drawing if config.model.generators else scene.inputs).model
    return kept_residuals(config, mllm, dict.fromkeys(mllm.phases, CAPACITY))


def shared(config: Config, _: Scene) -> Any:
    """How many ranks may share a row, by phase."""
    mesh = make_mesh({"data": 4, "fsdp": 2}, spans=mesh_spans(config))
    size = vocabulary(config, load_tokenizer(config.data))
    return spans_of_phases(config, build_model(config.model, size, config.components, mesh))


def prices(config: Config, scene: Scene) -> Any:
    """The cost of gathering for shared rows, as the choice of rows counts it."""
    inputs = scene.inputs
    longest = {phase: inputs.corpus.longest(phase) for phase in inputs.model.phases}
    sizing = sizing_inputs(config, inputs.model, inputs.corpus.formats, longest, inputs.spans)
    return [phase.gather_cost for phase in sizing]


def stages(config: Config, scene: Scene) -> Any:
    """Sizes of a pipeline with its attention, and the schedule of a batch."""
    inputs = scene.staged
    sizes = pipeline_sizes(config, inputs)
    planned = plan_pipeline(inputs.samples[0], sizes.spec, sizes.training)
    return (
        repr(sizes.training.tables),
        repr(sizes.spec),
        repr(attention_spec(config, inputs.model, inputs.corpus.formats, sizes.spec)),
        sizes.training.microbatches,
        planned.digest(inputs.samples[0].examples),
    )


def mesh(config: Config, _: Scene) -> Any:
    return list(zip(config.mesh_sizes, mesh_shape(config.mesh_sizes, 8), strict=True))


# ---------------------------------------------------------------------------- every key


QUICK = (
    decoder_weights,
    trained,
    scales,
    adapter_scales,
    averaged,
    rates,
    updates,
    lengths,
    limits,
    mesh,
    draws,
)


@dataclass(frozen=True)
class Effect:
    """A value of a key that changes what an observer sees; both configs have the keys `given`."""

    seen: Observer
    value: str
    given: tuple[str, ...] = ()


def effects(
    section: str, seen: Observer, given: tuple[str, ...] = (), **values: str
) -> dict[str, Effect]:
    return {f"{section}.{name}": Effect(seen, value, given) for name, value in values.items()}


SHAPES = {"width": "64", "layers": "3", "heads": "1", "mlp_width": "64"}
MIXTURE = ("model.language.experts={{count: 4, per_token: 2}}",)
DRAWS = ("model.diffusion={width: 32, layers: 2, heads: 2, mlp_width: 48, patch_size: 4}",)
LATENTS = (*DRAWS, "model.diffusion.channels=4")
READ_APART = (*DRAWS, "model.diffusion.conditioning=cross")
NORMS = {"rope_theta": "100.0", "norm_epsilon": "0.01"}
NORMED = ("model.vision.projector.norm=layer",)
NORMED_SOUND = ("model.audio.projector.norm=zero_centred_rms",)
DECODER_WINDOWS = ("model.language.window=16",)
LINEAR = ("model.language.rope_scaling={{kind: linear, factor: 2}}",)
BY_TURNS = (
    "model.language.rope_scaling={{kind: llama3, factor: 2, original_max_position_embeddings: 64, "
    "low_freq_factor: 1, high_freq_factor: 4}}",
)
YARN = (
    "model.language.rope_scaling={{kind: yarn, factor: 2, original_max_position_embeddings: 4096}}",
)
RESAMPLED = ("model.vision.positions=resampled", "model.vision.position_grid=4")
TABLE = ("model.vision.positions=table", "model.vision.position_grid=4")
TABLE += ("data.images.resize=square", "data.images.min_pixels=3136", "data.images.max_pixels=3136")
TILES = (*TABLE, "model.vision.class_token=true", "data.images.resize=tiles")
FIXED_AREA = ("data.images.min_pixels=7056", "data.images.max_pixels=7056")
VIDEOS = ("model.vision.videos=true", "data.images.resize=smart")
WINDOWED = ("model.vision.layers=2", "model.vision.window=4")
STAGED = ("pipeline.stages=2", "pipeline.layout=chain", "mesh.data=1", "data.batch_size=8")
SOURCES = "data.{split}=[{{name: a, path: {data}/train.jsonl}}, {{{first}}}]"
PLAIN = "name: b, path: {data}/train.jsonl, format: jsonl, root: {data}, weight: 1.0, targets: assistant"
CHANGED = {
    "name": PLAIN.replace("name: b", "name: c"),
    "path": PLAIN.replace("{data}/train", "{data}/test"),
    "format": PLAIN.replace("format: jsonl", "format: absent"),
    "root": PLAIN.replace("root: {data}", "root: {data}/.."),
    "weight": PLAIN.replace("1.0", "3.0"),
    "targets": PLAIN.replace("assistant", "all"),
}
RELATIVE = ("data.root={data}", "data.sources=[{name: a, path: train.jsonl}]", "data.evaluation=[]")
INCOMPLETE = (
    "data.max_rejected=1.0",
    "data.sources=[{name: a, path: {data}/train.jsonl, root: {data}/..}]",
)
LENIENT = ("data.max_rejected=1.0",)


def sources(split: str) -> dict[str, Effect]:
    """The keys of a source in a list of two, which only the second of them changes."""
    both_sources = (*LENIENT, SOURCES.replace("{split}", split).replace("{first}", PLAIN))
    values = {
        key: SOURCES.replace("{split}", split).replace("{first}", text)
        for key, text in CHANGED.items()
    }
    return {
        f"data.{split}.*.{key}": Effect(examples, value.partition("=")[2], both_sources)
        for key, value in values.items()
    }


def sums(config: Config, _: Scene) -> Any:
    """Where gradients add up over the microbatches of a step."""
    mllm = model(config)
    trained, _ = mllm.trainable.split(mllm.abstract("float32"))
    return repr(mllm.gradient_sums(trained, np.float32))


def component(name: str, seen: Observer, given: tuple[str, ...] = ()) -> dict[str, Effect]:
    """The keys of `components.NAME`; `seen` observes the numbers and programs that it computes."""
    section = f"components.{name}"
    remat = "dots" if not name.startswith("projector") else "full"
    pattern = "[layers.mlp.*]" if not name.startswith("projector") else "[mlp.up]"
    entries = effects(section, trained, given, freeze="true", train=pattern) | effects(
        section, scales, given, learning_rate_scale="0.5"
    )
    entries |= effects(section, averaged, given, ema="0.99")
    entries |= effects(section, weights, given, layout="{mlp: [], heads: []}")
    narrow_compute = (*given, f"{section}.compute_dtype=bfloat16")
    entries |= effects(section, reductions, narrow_compute, reduce_dtype="compute")
    entries |= effects(section, sums, given, reduce="step")
    entries |= effects(section, seen, given, experts="ragged_dot")
    values = {"compute_dtype": "bfloat16", "remat": remat, "attention": "gpu"}
    return entries | effects(section, seen, given, **values)


def adapter(name: str, given: tuple[str, ...] = ()) -> dict[str, Effect]:
    """The keys of an adapter of a component, and those of how it is trained."""
    section = f"model.adapters.{name}"
    given = (*given, f"{section}={{rank: 2, alpha: 4}}", f"components.{name}.freeze=true")
    entries = effects(section, weights, given, rank="4", parameters="[layers.mlp.*]")
    entries |= effects(section, adapter_scales, given, alpha="8")
    section = f"components.adapter.{name}"
    entries |= effects(section, trained, given, freeze="true", train='["*.b"]')
    entries |= effects(section, averaged, given, ema="0.99")
    return entries | effects(section, scales, given, learning_rate_scale="0.5")


def phase(name: str, given: tuple[str, ...] = ()) -> dict[str, Effect]:
    """The keys of `phases.NAME`."""
    section = f"phases.{name}"
    entries = effects(
        section, plan, given, capacities="[1024]", row_classes="4", max_segments="99", block="64"
    )
    return (
        entries
        | effects(section, limits, given, max_capacity="640")
        | effects(section, kept, given, kept_residuals="3")
        | effects(section, shared, given, spans="[1, 4]")
    )


EFFECTS: dict[str, Effect] = {
    **effects("model.language", decoder_weights, **SHAPES | {"heads": "8"}, vocab_size="384"),
    **effects(
        "model.language",
        decoder_weights,
        qkv_bias="true",
        out_bias="true",
        qk_norm="true",
        post_norms="true",
        tie_embeddings="true",
    ),
    **effects(
        "model.language",
        decoder_weights,
        ("model.language.rope_sections=null",),
        head_size="16",
        kv_heads="4",
    ),
    **effects("model.language", language, **NORMS, rope_sections="[1, 2, 1]", loss_chunk="64"),
    **effects("model.language", language, rope_interleaved="true"),
    **effects(
        "model.language",
        language,
        activation="gelu_tanh",
        attention_scale="0.5",
        norm="zero_centred_rms",
        scale_embedding="true",
    ),
    **effects("model.language", language, DECODER_WINDOWS, window_rope_theta="100.0"),
    **effects("model.language", plan, bidirectional="[]"),
    **effects("model.language", token_positions, media_positions="line"),
    **effects("model.language.rope_scaling", language, LINEAR, kind="yarn", factor="4"),
    **effects(
        "model.language.rope_scaling",
        language,
        BY_TURNS,
        original_max_position_embeddings="16",
        low_freq_factor="2",
        high_freq_factor="8",
    ),
    **effects(
        "model.language.rope_scaling",
        language,
        YARN,
        beta_fast="200",
        beta_slow="0.5",
        truncate="false",
        attention_factor="2",
    ),
    **effects("model.language", language, window="4"),
    **effects("model.language", language, ("model.language.window=4",), full_layers="[1]"),
    **effects("model.vision", weights, **SHAPES, merge="4", patch_size="7"),
    **effects("model.vision", encoder("vision"), **NORMS, gelu="exact"),
    **effects("model.vision", weights, norm="layer", key_bias="false", qkv_bias="false"),
    **effects("model.vision", weights, qk_norm="true", layer_scale="true", last_norm="false"),
    **effects("model.vision", weights, TABLE, class_token="true"),
    **effects("model.vision", weights, patch_frames="2", patch_bias="false", gated_mlp="true"),
    **effects("model.vision", weights, deepstack_layers="[0]"),
    **effects("model.vision", formats, ("model.vision.patch_frames=2",), videos="true"),
    **effects("model.vision.projector", weights, mlp_width="24", linear="true"),
    **effects("model.vision.projector", encoder("vision"), gelu="exact"),
    **effects("model.vision.projector", weights, grouping="mean", norm="layer"),
    **effects("model.vision.projector", encoder("vision"), NORMED, norm_epsilon="0.1"),
    **effects(
        "model.vision.projector", weights, ("model.vision.projector.linear=true",), bias="false"
    ),
    **effects("model.vision", weights, RESAMPLED, position_grid="3"),
    **effects("model.vision", encoder("vision"), RESAMPLED, positions="table"),
    **effects(
        "model.vision", encoder("vision"), pixel_mean="[0.5, 0.4, 0.3]", pixel_std="[0.5, 0.4, 0.3]"
    ),
    **effects("model.vision", encoder("vision"), ("model.vision.layers=2",), window="4"),
    **effects("model.vision", encoder("vision"), WINDOWED, full_layers="[1]"),
    **effects("model.audio", weights, **SHAPES, merge="4", mel_bins="16"),
    **effects("model.audio", encoder("audio"), **NORMS, chunk_frames="64", gelu="exact"),
    **effects("model.audio", weights, norm="layer", key_bias="false", positions="table"),
    **effects("model.audio", weights, qkv_bias="false", qk_norm="true", layer_scale="true"),
    **effects("model.audio", encoder("audio"), stem_strides="[1, 2]"),
    **effects("model.audio", lengths, silence="heard", pool="2"),
    **effects("model.audio", clip_parts, attention="chunk"),
    **effects("model.audio", clip_parts, ("model.audio.attention=chunk",), window_chunks="2"),
    **effects("model.audio", weights, stem_channels="4"),
    **effects("model.audio.projector", weights, mlp_width="24", linear="true"),
    **effects("model.audio.projector", encoder("audio"), gelu="exact"),
    **effects("model.audio.projector", weights, grouping="mean", norm="layer"),
    **effects("model.audio.projector", encoder("audio"), NORMED_SOUND, norm_epsilon="0.1"),
    **effects(
        "model.audio.projector", weights, ("model.audio.projector.linear=true",), bias="false"
    ),
    **effects("model.diffusion", weights, DRAWS, **SHAPES | {"heads": "4"}, patch_size="7"),
    **effects("model.diffusion", weights, DRAWS, modulation="shared", qk_norm="false"),
    **effects("model.diffusion", weights, DRAWS, output_modulation="vectors", norm="layer"),
    **effects("model.diffusion", weights, DRAWS, attention_bias="true", qk_norm_over="heads"),
    **effects("model.diffusion", weights, DRAWS, conditioning="cross", pooled_conditions="true"),
    **effects("model.diffusion", weights, DRAWS, edge_distances="true", streams="2"),
    **effects("model.diffusion", weights, DRAWS, projector_layers="normed_linear"),
    **effects("model.diffusion", condition_positions, DRAWS, condition_positions="diagonal"),
    **effects("model.diffusion", generator, READ_APART, padded_conditions="8"),
    **effects("model.diffusion", generator, DRAWS, **NORMS, rope_sections="[4, 2, 2]"),
    **effects("model.diffusion", lengths, DRAWS, rope_origin="centre"),
    **component("diffusion", generator, DRAWS),
    **component("projector.language", generator, DRAWS),
    **effects("model.diffusion", weights, DRAWS, patch_frames="2", channels="4"),
    **adapter("diffusion", DRAWS),
    **effects("data.generated", lengths, DRAWS, min_pixels="1000", max_pixels="10000"),
    **effects("data.generated", lengths, DRAWS, max_frames="2", shorten="true", fps="4"),
    **effects("data.generated", lengths, DRAWS, sound="ignore"),
    **effects("data.generated", lengths, (*DRAWS, "data.generated.fps=4"), folder_fps="8"),
    **effects("data.latents", lengths, LATENTS, mean="[1]", std="[2]", max_frames="2"),
    **effects("data.latents", lengths, LATENTS, shorten="true"),
    **effects("data.generated", lengths, DRAWS, resize="square", kernel="bilinear"),
    **phase("diffusion", (*DRAWS, "phases.diffusion.row_classes=1")),
    **effects("objective.language", objective, DRAWS, weight="0.5"),
    **effects("objective.diffusion", objective, DRAWS, weight="0.5"),
    **effects("objective.diffusion", generator, DRAWS, prediction="sample"),
    **effects(
        "objective.diffusion",
        draws,
        DRAWS,
        times="uniform",
        shift="4.0",
        shift_patches="4",
        condition_drop="0.5",
    ),
    **component("vision", encoder("vision")),
    **component("audio", encoder("audio")),
    **component("projector.vision", encoder("vision")),
    **component("projector.audio", encoder("audio")),
    **component("language", language),
    **adapter("vision"),
    **adapter("audio"),
    **adapter("language"),
    **effects("components.language", language, MIXTURE, experts="ragged_dot"),
    **effects("model.language.experts", decoder_weights, MIXTURE, count="8"),
    **effects("model.language.experts", language, MIXTURE, per_token="1", renormalise="true"),
    **sources("sources"),
    **sources("evaluation"),
    **effects("data", examples, batch_size="4", tokenizer="absent.json"),
    **effects("data", examples, RELATIVE, root="{data}/.."),
    **effects("data", examples, INCOMPLETE, max_rejected="0.0"),
    **effects("data", cache_files, index_cache="{folder}"),
    **effects("data.images", lengths, min_pixels="1000", max_pixels="10000"),
    **effects("data.images", lengths, FIXED_AREA, resize="fill", kernel="lanczos"),
    **effects("data.videos", lengths, VIDEOS, fps="2", max_frames="2", folder_fps="8"),
    **effects("data.videos", lengths, VIDEOS, min_pixels="1000", max_pixels="10000"),
    **effects("data.videos", lengths, VIDEOS, bounds="video", times="text"),
    **effects("data.videos", lengths, VIDEOS, positions_per_second="4", sound="ignore"),
    **effects(
        "data.videos", lengths, (*VIDEOS, "data.videos.fps=1"), sampling="ends", min_frames="2"
    ),
    **effects("data.images", lengths, TILES, min_tiles="2", max_tiles="3"),
    **effects(
        "data.audio",
        lengths,
        sample_rate="8000",
        window_length="200",
        hop_length="80",
        max_seconds="4.0",
    ),
    **phase("vision"),
    **phase("audio"),
    **phase("language"),
    **effects("phases.language", kept, DRAWS, kept_residuals="3"),
    **effects("balance", plan, mode="none", pool_slots="4096", pair_slots="64", exchange="ragged"),
    **effects("balance", plan, ranks_per_node="2", calibration="absent.json"),
    **effects(
        "balance",
        shared,
        ("phases.language.spans=auto", "balance.ranks_per_node=2"),
        spans_cross_nodes="true",
    ),
    **effects("balance", prices, flops_per_gathered_byte="4000.0"),
    **effects("mesh", mesh, ("mesh.data=-1",), data="2", fsdp="2", context="2", tensor="2"),
    **effects("pipeline", mesh, ("pipeline.layout=chain",), stages="2"),
    **effects(
        "pipeline", stages, STAGED, layout="parallel", schedule="gpipe", split_backward="true"
    ),
    **effects("pipeline", stages, STAGED, microbatches="3", kept_residuals="2"),
    **effects(
        "pipeline", stages, STAGED, microbatches_in_flight="2", encoder_rows_per_microbatch="5"
    ),
    **effects(
        "optimizer", rates, ("optimizer.schedule=cosine",), learning_rate="0.5", warmup_steps="2"
    ),
    **effects(
        "optimizer", rates, ("optimizer.schedule=cosine",), final_scale="0.9", decay_steps="40"
    ),
    **effects("optimizer", rates, schedule="cosine"),
    **effects(
        "optimizer",
        updates,
        beta1="0.5",
        beta2="0.5",
        epsilon="0.1",
        weight_decay="0.1",
        clip_norm="0.5",
    ),
    **effects("run", decoder_weights, param_dtype="bfloat16"),
    **effects("run", examples, seed="1"),
}

RUN = {  # changes of a run of three steps; see `left_by`
    "run.directory": ("elsewhere", ()),
    "run.steps": ("2", ()),
    "data.workers": ("1", ()),
    "data.prefetch": ("1", ()),
    "checkpoint.every": ("1", ()),
    "checkpoint.keep": ("1", ("checkpoint.every=1",)),
    "logging.every": ("2", ()),
    "logging.tensorboard": ("true", ()),
    "logging.examples": ("true", ()),
    "profile.steps": ("1", ("profile.start=1",)),
    "profile.start": ("9", ("profile.steps=1",)),
    "evaluation.every": ("1", ()),
    "evaluation.at_start": ("true", ()),
}

ELSEWHERE = {
    "run.compilation_cache": "runtime/test_compilation_cache.py::test_programs_are_kept_where_they_shall_be",
    "model.from": "training/test_initial.py::test_parameters_are_read_on_any_mesh",
    "data.chat_template": "data/text/test_template_tokenizer.py::test_dates_and_files_change_the_fingerprint",
    "data.chat_date": "data/text/test_template_tokenizer.py::test_dates_and_files_change_the_fingerprint",
    "model.vision.from": "training/test_composed_run.py::test_parts_of_three_folders_train_and_go_back",
    "model.audio.from": "training/test_composed_run.py::test_parts_of_three_folders_train_and_go_back",
    "model.diffusion.from": "training/test_composed_run.py::test_a_generator_of_a_folder_trains_and_draws",
    "model.diffusion.projector": "training/test_composed_run.py::test_a_generator_of_a_folder_trains_and_draws",
    "data.max_failed_media": "training/test_loop.py::test_run_stops_past_the_limit_of_undecodable_media",
    "optimizer.max_skipped": "training/test_loop.py::test_run_stops_after_too_many_skipped_updates",
    "objective.experts.balance": "training/test_mixtures.py::test_losses_of_the_router_have_their_gradients",
    "objective.experts.router_z": "training/test_mixtures.py::test_losses_of_the_router_have_their_gradients",
    "balance.check_every": "runtime/test_hosts.py::test_plans_are_compared_however_far_apart_the_processes_are",
    "distributed.start_timeout": "runtime/test_hosts.py::test_a_process_that_does_not_answer_is_named",
    "distributed.peer_timeout": "runtime/test_hosts.py::test_a_silent_process_ends_the_others",
    "pipeline.deferral": "balance/stages/test_deferral.py::test_deferral_is_the_best_of_all_pairings_and_subsets",
    "pipeline.flops_per_tick": "balance/stages/test_trials.py::test_what_a_tick_takes_besides_makes_chunks_fewer",
    "pipeline.rollouts": "sharding/pipeline/schedules/test_search.py::test_more_rollouts_find_more",
    "logging.wandb": "runtime/test_metrics.py::test_wandb_run_continues",
    "logging.peak_flops": "training/test_loop.py::test_times_of_a_run_are_those_of_its_steps",
    "evaluation.examples": "data/test_batches.py::test_evaluation_visits_every_example_once",
}


STAGED_ELSEWHERE = {  # likewise with stages, by the last part of the key
    "row_classes": "balance/stages/test_trials.py::test_where_the_longest_example_is_rare_rows_have_several_classes",
    "check_every": ELSEWHERE["balance.check_every"],
}


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every leaf of the schema by dotted name; `*` stands for the entries of a list of sections."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        subsections = {child: many for child, many in sections(field.annotation)}
        for child, many in subsections.items():
            yield from keys(child, f"{key}.*." if many else f"{key}.")
        if not subsections:
            yield key


def sections(annotation: Any, many: bool = False) -> Iterable[tuple[type[BaseModel], bool]]:
    """The sections that a field may hold, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, many
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        listed = many or typing.get_origin(annotation) is tuple
        for argument in typing.get_args(annotation):
            yield from sections(argument, listed)


def test_every_key_of_the_schema_is_listed() -> None:
    listed = list(itertools.chain(EFFECTS, RUN, ELSEWHERE))
    schema = list(keys())
    assert len(schema) > 130 and len(set(schema)) == len(schema)
    assert sorted(set(schema) - set(listed)) == [], "name something that each of these keys changes"
    assert sorted(set(listed) - set(schema)) == [], "these are no keys (any more)"
    assert len(set(listed)) == len(listed)


def test_the_shown_elsewhere_are_shown() -> None:
    for reference in (*ELSEWHERE.values(), *STAGED_ELSEWHERE.values()):
        file, name = reference.split("::")
        tree = ast.parse((Path(__file__).parents[1] / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
            reference
        )


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "base.yaml"
    path.write_text(
        write_text(tiny_config(data, run={"directory": str(path.parent / "run"), "steps": 8}))
    )
    return path


@pytest.fixture(scope="module")
def scene(data: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(data, tmp_path_factory.mktemp("cache"), base)


@pytest.fixture(scope="module")
def observed(base: Path, scene: Scene) -> Callable[..., Any]:
    results: dict[Any, Any] = {}

    def observe(seen_by: Observer, *overrides: str) -> Any:
        """What an observer sees of a config, or the message with which the config is refused."""
        replacements = {
            "{data}": str(scene.data),
            "{folder}": str(scene.folder),
            "{{": "{",
            "}}": "}",
        }
        for name, replacement in replacements.items():
            overrides = tuple(text.replace(name, replacement) for text in overrides)
        if (seen_by, overrides) not in results:
            try:
                results[seen_by, overrides] = seen_by(load_config(base, overrides), scene)
            except (*USER_ERRORS, ValueError) as error:
                results[seen_by, overrides] = f"refused: {error}"
        return results[seen_by, overrides]

    return observe


def cases() -> Iterator[Any]:
    for key, effect in EFFECTS.items():
        yield pytest.param(key, marks=() if effect.seen in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("key", list(cases()))
def test_a_key_changes_something_or_is_refused(key: str, observed: Callable[..., Any]) -> None:
    effect = EFFECTS[key]
    before = observed(effect.seen, *effect.given)
    assert not str(before).startswith("refused: "), before
    # An entry of a list is changed by setting the list itself
    yaml_key = key.replace(".*", "").rpartition(".")[0] if ".*" in key else key
    after = observed(effect.seen, *effect.given, f"{yaml_key}={effect.value}")
    assert before != after
    if str(after).startswith("refused: "):
        assert key in after or key.rpartition(".")[2] in after, after


# On the one rank of `Scene.staged` these make no difference, so they are observed on more ranks
STAGED_EFFECTS = {
    "balance.ranks_per_node": Effect(shared, "2", ("phases.language.spans=auto",)),
}


def planned_keys() -> list[str]:
    """Keys that decide how a step is planned, except for the section `pipeline` itself."""
    chosen = (key for key in keys() if key.startswith(("phases.", "balance.")))
    return [key for key in chosen if key.rpartition(".")[2] not in STAGED_ELSEWHERE]


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key in planned_keys() if "diffusion" not in key])
def test_with_stages_a_key_changes_something_or_is_refused(
    key: str, observed: Callable[..., Any]
) -> None:
    effect = STAGED_EFFECTS.get(key, EFFECTS[key])
    seen = stages if effect.seen is plan else effect.seen
    before = observed(seen, *STAGED, *effect.given)
    assert not str(before).startswith("refused: "), before
    after = observed(seen, *STAGED, *effect.given, f"{key}={effect.value}")
    assert before != after
    if str(after).startswith("refused: "):
        assert key in after or key.rpartition(".")[2] in after, after


@pytest.mark.slow
def test_what_is_seen_does_not_change_by_itself(base: Path, scene: Scene) -> None:
    """Every observer is deterministic, otherwise each key would seem to have an effect."""
    drawing = (generator, draws, objective, condition_positions)
    overrides_of = {stages: STAGED} | dict.fromkeys(drawing, DRAWS)
    for seen in {effect.seen for effect in EFFECTS.values()}:
        overrides = overrides_of.get(seen, ())
        assert seen(load_config(base, overrides), scene) == seen(
            load_config(base, overrides), scene
        )


# ---------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def run(base: Path) -> Run:
    return build_run(load_config(base, ["run.steps=3", "logging.tensorboard=false"]))


def left_by(
    run: Run, folder: Path, config: Path, overrides: Iterable[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """What a run leaves in its folder, and the arguments that its reader was made with."""
    reader_arguments: list[tuple[int, ...]] = []

    class Recorder(loop.Loader):  # type: ignore[type-arg]
        def __init__(self, sources: Any, workers: int, prefetch: int, **more: Any) -> None:
            reader_arguments.append((workers, prefetch))
            super().__init__(sources, workers, prefetch, **more)

    monkeypatch.setattr(loop, "Loader", Recorder)
    directory = f"run.directory={folder}/run"
    changed_config = load_config(
        config, ["run.steps=3", "logging.tensorboard=false", directory, *overrides]
    )
    loop.train(dataclasses.replace(run, config=changed_config))
    (directory,) = {path.parent for path in folder.rglob("metrics.jsonl")}
    records = [
        json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()
    ]
    return (
        str(Path(directory).relative_to(folder)),
        sorted(path.name for path in Path(directory).iterdir()),
        sorted(path.name for path in (Path(directory) / "checkpoints").iterdir()),
        [(record["step"], "loss" in record) for record in records],
        any(path.is_file() for path in (Path(directory) / "profile").rglob("*")),
        reader_arguments,
    )


@pytest.mark.slow
def test_keys_of_a_run_change_what_it_leaves(
    run: Run, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result_by_overrides: dict[tuple[str, ...], Any] = {}
    for index, (key, (value, given)) in enumerate(RUN.items()):
        folders = [tmp_path / f"{index}.before", tmp_path / f"{index}.after"]
        for folder in folders:
            folder.mkdir()
        if given not in result_by_overrides:
            result_by_overrides[given] = left_by(run, folders[0], base, given, monkeypatch)
        value = f"{folders[1]}/elsewhere" if key == "run.directory" else value
        assert (
            left_by(run, folders[1], base, (*given, f"{key}={value}"), monkeypatch)
            != result_by_overrides[given]
        ), key
