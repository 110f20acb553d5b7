"""Run a published model on token ids that another program prepared, with a run's rows and programs.

    INPUTS.npz: input_ids [B, T], attention_mask, labels --rows--> logits, loss, gradients by key

Arrays are named as the reference's arguments. Ids that the mask leaves out are not part of their
text. A label of -100 is no target; without labels every next token is a target.
prepared_pictures.py describes the arrays of pictures and videos, prepared_clips.py those of clips.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Ints, Longs
from jaxmllm.balance.costs.visible_pairs import NOTHING_KNOWN, VisiblePairs
from jaxmllm.balance.records import BatchItems, PhaseItems
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import Config, ConfigError, ModelConfig
from jaxmllm.data.media.modalities import modalities, row_formats
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.rows.fill import HostStep, StepFiller
from jaxmllm.data.text.render import Rendered
from jaxmllm.families.by_type import components_of, family_of
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.lines import full_index
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.resolved import resolved
from jaxmllm.models.compose import build_model
from jaxmllm.models.rows import LanguageRows, TokenPool
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.build import phased_programs
from jaxmllm.setup.exchange_layout import exchange_backend, exchange_grids, nodes_of_ranks
from jaxmllm.setup.sizing import sizing_inputs
from jaxmllm.setup.spans import node_spans, spans_of_phases
from jaxmllm.tools.prepared_clips import ARGUMENTS as OF_CLIPS
from jaxmllm.tools.prepared_clips import read_clips
from jaxmllm.tools.prepared_media import Places, Prepared, Spans, items_in, positions_of
from jaxmllm.tools.prepared_pictures import ARGUMENTS as OF_PICTURES
from jaxmllm.tools.prepared_pictures import VIDEOS as OF_VIDEOS
from jaxmllm.tools.prepared_pictures import read_pictures
from jaxmllm.trainable import leaves_by_path
from jaxmllm.training.folder_parameters import read_folder
from jaxmllm.training.programs.phased import PhasedPrograms
from jaxmllm.training.step_functions import media_slots
from sharding.mesh import make_mesh

ARGUMENTS = ("input_ids", "attention_mask", "labels")
TYPES = "mm_token_type_ids"  # marks tokens of media, where config.json names no ids for them
TYPES_IN_GEMMA = "token_type_ids"  # another name of the same argument
TYPE_OF = {"image": 1, "video": 2}  # values of `TYPES`
# Kinds of media that each encoder reads, as conversations call them
PARTS = {"vision": ("image", "video"), "audio": ("audio",)}
# By encoder: the names of its arguments, and the function that reads its items from them
MEDIA: dict[str, tuple[tuple[str, ...], Callable[..., tuple[Modality, tuple[Spans, ...]]]]] = {
    "vision": (OF_PICTURES, read_pictures),
    "audio": (OF_CLIPS, read_clips),
}
UNUSED = ("update", "evaluate", "totals")  # programs that nothing here runs
NO_TARGET = -100  # the label of a token that is no target


@dataclass(frozen=True)
class PreparedTexts:
    """Texts of token ids, which take the place of a corpus where steps are planned and rows filled.
    Each text is its own source, so `sources` of a row tell which texts it holds."""

    slots: tuple[Ints, ...]  # [L] columns of the inputs that hold each text
    tokens: tuple[Ints, ...]  # [L]
    targets: tuple[Ints, ...]  # [L] the next token, -1: none
    spans: tuple[Spans, ...]  # the media of each text
    modalities: Mapping[str, Modality] = field(default_factory=dict)
    pairs: VisiblePairs = NOTHING_KNOWN

    @classmethod
    def read(
        cls,
        path: Path,
        vocabulary: int,
        config: Config | None = None,
        placeholders: Mapping[str, int] = MappingProxyType({}),
        readers: Mapping[str, Modality] = MappingProxyType({}),
    ) -> PreparedTexts:
        """Read the texts of an .npz file.

        Raises `ConfigError` for a file that does not hold texts of this vocabulary.

        Args:
          config: config of a model that reads media; None: texts alone are read.
          placeholders: token ids that hold the places of media, by kind as in `PARTS`; media of
            other kinds are found by `TYPES`.
          readers: modalities that read media from files, by encoder.
        """
        arrays = read_arrays(path)
        if TYPES_IN_GEMMA in arrays:
            arrays[TYPES] = arrays.pop(TYPES_IN_GEMMA)
        _check_names(path, arrays, [*ARGUMENTS, *_media_arguments(config, placeholders)])
        ids = arrays["input_ids"]
        mask = arrays.get("attention_mask", np.ones_like(ids)).astype(bool)
        labels = arrays.get("labels", ids)
        _check_ids(path, ids, mask, labels, vocabulary)
        # The mask may leave out any columns, so a text is a list of columns, [L], not a slice.
        slots = tuple(np.flatnonzero(row).astype(np.int32) for row in mask)
        tokens = tuple(row[chosen].astype(np.int32) for row, chosen in zip(ids, slots, strict=True))
        targets = tuple(
            _next_tokens(row[chosen]) for row, chosen in zip(labels, slots, strict=True)
        )
        if not any((of_text >= 0).any() for of_text in targets):
            raise ConfigError(
                f"{path}: no token is a target, and so there is no loss; labels must say at least one behind the first "
                "token of a text"
            )
        if config is None:
            return cls(slots, tokens, targets, ((),) * len(slots))
        media, spans = _read_media(path, arrays, slots, config.model, placeholders, readers)
        return cls(slots, tokens, targets, spans, media, VisiblePairs.of_model(config.model))

    @property
    def members(self) -> tuple[tuple[str, float, Longs], ...]:
        return (("inputs", 1.0, np.arange(len(self.tokens))),)

    def source_of(self, i: int) -> int:
        return i

    def id(self, i: int) -> str:
        return str(i)

    def gather(self, examples: Longs) -> BatchItems:
        """Items of some texts in all phases."""
        length = np.array([len(self.tokens[i]) for i in examples], np.int64)
        numbers = np.arange(len(examples), dtype=np.int32)
        nothing = np.zeros_like(numbers)
        targets = sum(int((self.targets[i] >= 0).sum()) for i in examples)
        phases = {phase: self._encoder_items(phase, examples) for phase in self.modalities}
        media = [(phase, items.example, items.tokens) for phase, items in phases.items()]
        extra = self.pairs.of_sequences(len(examples), media)
        phases[LANGUAGE] = PhaseItems(length, length, numbers, nothing, nothing, extra)
        return BatchItems(np.asarray(examples, np.int64), targets, phases)

    def _encoder_items(self, phase: str, examples: Longs) -> PhaseItems:
        """Items of one encoder in some texts."""
        modality = self.modalities[phase]
        spans = []
        owners = []  # the text of each span, counted in `examples`
        for number, example in enumerate(examples):
            for span in items_in(self.spans[example], self.modalities):
                if span.phase == phase:
                    spans.append(span)
                    owners.append(number)
        shapes = [span.shape for span in spans]
        return PhaseItems(
            length=np.array([modality.length(shape) for shape in shapes], np.int64),
            real=np.array([modality.real(shape) for shape in shapes], np.int64),
            example=np.array(owners, np.int32),
            tokens=np.array([span.tokens for span in spans], np.int32),
            slot=np.array([span.slot for span in spans], np.int32),
            extra_squares=self.pairs.of_items(phase, np.array(shapes, np.int32).reshape(-1, 3)),
        )

    def example(self, i: int) -> Rendered:
        positions = positions_of(len(self.tokens[i]), self.spans[i], self.modalities)
        items = items_in(self.spans[i], self.modalities)
        return Rendered(self.tokens[i], self.targets[i], positions, items)


@dataclass(frozen=True)
class PreparedRun:
    """A published model: its parameters, and its programs, compiled for some texts."""

    folders: Mapping[str, ModelFolder]  # by component
    config: Config
    texts: PreparedTexts
    programs: PhasedPrograms
    params: dict[str, Any]

    @classmethod
    def of(
        cls,
        source: Path,
        inputs: Path,
        devices: Sequence[jax.Device] | None = None,
        **sections: Any,
    ) -> PreparedRun:
        """Read a published folder and inputs, and compile the programs.

        Raises `ConfigError` if folder, inputs and config do not fit each other, `MeshError` if the
        mesh does not fit the devices.

        Args:
          devices: the devices of the mesh; all, if not given.
          sections: sections of the config, as trees; by default parameters are split over all
            devices.
        """
        config = _config(source, inputs, sections)
        vocabulary = config.model.language.vocab_size
        assert vocabulary != "auto"
        folder = ModelFolder.open(source)
        placeholders = _placeholders(folder.config, config.model.encoders)
        mesh = make_mesh(config.mesh_sizes, devices, spans=node_spans(config, config.mesh_sizes))
        model = build_model(config.model, vocabulary, config.components, mesh)
        spans = spans_of_phases(config, model)
        readers = modalities(config.model, config.data)
        texts = PreparedTexts.read(inputs, vocabulary, config, placeholders, readers)
        batch = texts.gather(np.arange(len(texts.tokens)))
        longest = {phase: int(items.length.max()) for phase, items in batch.phases.items()}
        formats = row_formats(texts.modalities)
        # All texts are one batch, and sizes are chosen from it alone.
        spec = choose_sizes(
            [batch],
            sizing_inputs(config, model, formats, longest, spans),
            exchange_grids(model),
            config.balance,
            nodes_of_ranks(config, model),
            exchange_backend(config, model),
        )
        programs = phased_programs(config, model, formats, spec, len(texts.tokens))
        programs.jobs = {
            name: job for name, job in programs.jobs.items() if name.function not in UNUSED
        }
        programs.compile()
        abstract = programs.saved_state.params
        in_folder = [name for name in components_of(folder.config) if name in abstract]
        folders = {name: folder.of(name) for name in in_folder}
        params = {name: read_folder(str(source), abstract[name], name) for name in folders}
        return cls(folders, config, texts, programs, params)

    @cached_property
    def step(self) -> HostStep:
        """The rows of all texts."""
        return self.step_of(np.arange(len(self.texts.tokens)))

    def step_of(self, texts: Longs) -> HostStep:
        """The rows of some texts."""
        filler = StepFiller(
            self.texts, self.programs.spec, self.programs.local_share, self.programs.attention
        )
        return filler(0, texts)

    def loss_and_gradients(self) -> tuple[float, Iterator[tuple[str, NDArray[Any]]]]:
        """The mean loss over all targets, and its gradients as (key of a tensor, array)."""
        gradients, sums, _ = self.programs.gradients(self.params, self.programs.put(self.step))
        total, targets = (float(np.sum(jax.device_get(x))) for x in (sums.loss, sums.targets))
        return total / targets, self._gradients_by_key(gradients)

    def logits(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield (text, logits [L, V]) for every text."""
        batch = self.programs.put(self.step)
        pools = self.programs.media_pools(self.params, batch)
        for rows, host, span, pool in zip(
            batch.rows[LANGUAGE],
            *(
                of_phase[LANGUAGE]
                for of_phase in (self.step.rows, self.step.spans, self.step.pools)
            ),
            strict=True,
        ):
            logits = np.asarray(self._row_logits(span)(self.params, rows, pools[pool]))
            for group, sources in enumerate(host["sources"]):
                for segment, text in enumerate(sources.tolist(), start=1):
                    if text >= 0:
                        # The slots of a row may be dealt to parts; `order` restores the text
                        slots = np.flatnonzero(host["segments"][group] == segment)
                        order = np.argsort(host["order"][group][slots])
                        yield text, logits[group, slots[order]]

    def _row_logits(self, span: int) -> Callable[..., jax.Array]:
        """A compiled function of the logits [R, C, V] of rows that `span` ranks hold together."""
        model = self.programs.functions.spanned(LANGUAGE, span).model

        def logits(params: Any, rows: LanguageRows, pool: TokenPool) -> jax.Array:
            media, _ = media_slots(rows).take(model.layout(LANGUAGE), pool)
            hidden, head = model.hidden(params, rows, media)
            letters = "vd" if head.axes[0] == "vocab" else "dv"
            return jnp.einsum(f"rcd,{letters}->rcv", hidden, head.matrix)

        return jax.jit(logits)

    def _gradients_by_key(self, gradients: Mapping[str, Any]) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield gradients of all components as (key, tensor). A tensor that joins several
        parameters follows when all of its parts are filled in."""
        partial: dict[str, tuple[NDArray[Any], int]] = {}  # tensors, and how many parts they have
        for component, path, leaf in (
            (component, *of_path)
            for component, of_component in gradients.items()
            for of_path in leaves_by_path(of_component)
        ):
            line = self.folders[component].family.lines[path]
            shape = leaf.shape
            values = np.asarray(jax.device_get(leaf))
            for key, slices, index in line.pieces(shape, full_index(shape)):
                empty = np.empty(line.tensor_shape(shape), values.dtype)
                tensor, pieces_seen = partial.pop(key, (empty, 0))
                view = line.view(tensor, shape, index)
                view[...] = values[slices].reshape(view.shape)
                if pieces_seen + 1 == line.parts:
                    yield key, tensor
                else:
                    partial[key] = tensor, pieces_seen + 1


def _placeholders(folder: FolderConfig, encoders: Iterable[str]) -> dict[str, int]:
    """Token ids that hold the places of media in a published folder, by kind as in `PARTS`; kinds
    that it has no ids for are left out."""
    placeholders = {}
    for encoder in encoders:
        family = family_of(folder, encoder)
        finders = (family.placeholder, family.video_placeholder)
        # `PARTS` has one kind for audio, so the finder of videos is left over there.
        for kind, find in zip(PARTS[encoder], finders, strict=False):
            if find is not None:
                placeholders[kind] = find(folder)
    return placeholders


def _media_arguments(config: Config | None, placeholders: Mapping[str, int]) -> list[str]:
    """Names of the arguments that media of this model may have; arguments as in
    `PreparedTexts.read`."""
    if config is None:
        return []
    model = config.model
    names = [name for encoder in model.encoders for name in MEDIA[encoder][0]]
    kinds = [kind for encoder in model.encoders for kind in _kinds_read(model, encoder)]
    # Token ids mark the media of an encoder; where a kind has none, `TYPES` does.
    return names if placeholders.keys() >= {*kinds} else [*names, TYPES]


def _check_names(path: Path, arrays: Mapping[str, NDArray[Any]], known: Sequence[str]) -> None:
    """Raise `ConfigError` unless these are input_ids and other known arguments, none empty."""
    if "input_ids" not in arrays or not arrays.keys() <= {*known}:
        raise ConfigError(
            f"{path} holds {', '.join(sorted(arrays))}; it must hold input_ids, and may hold "
            f"{', '.join(known[1:])}"
        )
    if empty := [name for name, array in arrays.items() if not array.size]:
        raise ConfigError(
            f"{path}: {', '.join(empty)}: without an entry; leave out what is not there"
        )


def _check_ids(
    path: Path, ids: NDArray[Any], mask: NDArray[np.bool_], labels: NDArray[Any], vocabulary: int
) -> None:
    """Raise `ConfigError` unless token ids and labels are of this vocabulary, and the mask, of
    their shape, leaves a token of each text."""
    if ids.ndim != 2 or not ids.shape == mask.shape == labels.shape or not mask.any(1).all():
        raise ConfigError(
            f"{path}: {', '.join(ARGUMENTS)} must be of one shape [texts, tokens], no text empty (got "
            f"{[array.shape for array in (ids, mask, labels)]})"
        )
    if ids.dtype.kind not in "iu" or labels.dtype.kind not in "iu":
        raise ConfigError(
            f"{path}: input_ids and labels must be whole numbers (got {ids.dtype}, {labels.dtype})"
        )
    known_ids = (ids >= 0) & (ids < vocabulary)
    if not known_ids.all():
        raise ConfigError(
            f"{path}: input_ids must be 0 .. {vocabulary - 1} (got {ids[~known_ids][0]})"
        )
    known_labels = (labels == NO_TARGET) | (labels >= 0) & (labels < vocabulary)
    if not known_labels.all():
        raise ConfigError(
            f"{path}: labels must be 0 .. {vocabulary - 1}, or {NO_TARGET} (got {labels[~known_labels][0]})"
        )


def _next_tokens(labels: NDArray[Any]) -> Ints:
    """Targets [L] of a text with these labels [L]: a label is at the token itself, a target at the
    token before it."""
    following = np.append(labels[1:], NO_TARGET)
    return np.where(following == NO_TARGET, -1, following).astype(np.int32)


def _read_media(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    texts: Sequence[Ints],
    model: ModelConfig,
    placeholders: Mapping[str, int],
    readers: Mapping[str, Modality],
) -> tuple[dict[str, Modality], tuple[Spans, ...]]:
    """Modalities by encoder that hold the media, and the media of each text in reading order;
    arguments as in `PreparedTexts.read`."""
    media: dict[str, Modality] = {}
    spans: list[Spans] = [()] * len(texts)
    for encoder in model.encoders:
        _, read = MEDIA[encoder]
        section = getattr(model, encoder)
        places = {
            kind: _media_places(path, arrays, kind, placeholders.get(kind))
            for kind in _kinds_read(model, encoder)
        }
        prepared = Prepared(path, arrays, texts, places)
        media[encoder], of_texts = read(prepared, readers[encoder], section)
        spans = [(*before, *added) for before, added in zip(spans, of_texts, strict=True)]
    in_order = (tuple(sorted(of_text, key=lambda span: span.slot)) for of_text in spans)
    return media, tuple(in_order)


def _kinds_read(model: ModelConfig, encoder: str) -> list[str]:
    """Kinds of media that an encoder of this model reads."""
    section = getattr(model, encoder)
    return [kind for kind in PARTS[encoder] if kind != "video" or section.videos]


def _media_places(
    path: Path, arrays: Mapping[str, NDArray[Any]], kind: str, placeholder: int | None
) -> Places:
    """Tokens of one kind of media. Raises `ConfigError` if neither a placeholder nor `TYPES` marks
    them."""
    ids = arrays["input_ids"]
    if placeholder is not None:
        return Places("input_ids", ids == placeholder)
    types = arrays.get(TYPES)
    if types is None:
        raise ConfigError(
            f"{path} has media, but not {TYPES}; without it the reference gives them no places"
        )
    if types.shape != ids.shape:
        raise ConfigError(
            f"{path}: {TYPES} must be of the shape of input_ids, {list(ids.shape)} (got {list(types.shape)})"
        )
    return Places(TYPES, types == TYPE_OF[kind])


def _config(source: Path, inputs: Path, sections: Mapping[str, Any]) -> Config:
    """Config of a run of the folder's model, without encoders that the inputs have no media for."""
    arguments = read_arrays(inputs).keys()
    sees = "vision" in components_of(FolderConfig.read(source))
    videos = {"vision": {"videos": True}} if sees and not arguments.isdisjoint(OF_VIDEOS) else {}
    tree = resolved({"model": {"from": str(source), **videos}})
    silent = [encoder for encoder, (names, _) in MEDIA.items() if arguments.isdisjoint(names)]
    model = {name: section for name, section in tree["model"].items() if name not in silent}
    data = {"sources": [{"name": "inputs", "path": str(inputs)}], "batch_size": 1}
    run_sections: dict[str, Any] = {
        "run": {"directory": str(source), "steps": 1},
        "model": model,
        "data": tree.get("data", {}) | data,
        "optimizer": {"learning_rate": 1.0},
        "mesh": {"data": 1, "fsdp": -1},
    }
    return parse_config(run_sections | dict(sections))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file. Raises `ConfigError`."""
    if path.is_file() and not zipfile.is_zipfile(path):  # numpy would take it for a pickle
        raise ConfigError(f"{path} is no .npz file of arrays")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # a damaged file can fail anywhere in zip and npy
        raise ConfigError(f"{path} is no .npz file of arrays: {error}") from error


def differences(
    run: PreparedRun, reference: Path | None = None, gradients: Path | None = None
) -> dict[str, Any]:
    """What `jaxmllm convert verify` prints, except for its seconds: the loss and its difference,
    the largest difference of logits where `valid`, and by key the largest difference of a gradient
    over its largest entry. A difference is NaN where either side is.

    Raises `ConfigError` for files that do not hold what this run computes.
    """
    loss, by_key = run.loss_and_gradients()
    report: dict[str, Any] = {"family": run.folders[LANGUAGE].family.name, "loss": loss}
    if reference is not None:
        report |= _output_differences(run, loss, reference)
    if gradients is not None:
        report["gradients"] = _gradient_differences(by_key, gradients)
    return report


def _output_differences(run: PreparedRun, loss: float, reference: Path) -> dict[str, float]:
    """The largest difference of logits where `valid`, and the difference of losses if the file has
    one. Raises `ConfigError` for a file of other outputs."""
    expected = read_arrays(reference)
    if "logits" not in expected:
        raise ConfigError(f"{reference} holds {', '.join(sorted(expected))}; it must hold logits")
    tokens = 1 + max(int(slots[-1]) for slots in run.texts.slots)
    tokens = max([tokens, *expected["logits"].shape[1:2]])  # masked tokens may follow
    shape = (len(run.texts.slots), tokens, run.config.model.language.vocab_size)
    valid = expected.setdefault("valid", np.ones(shape[:2], bool)).astype(bool)
    for name, expected_shape in {"logits": shape, "valid": shape[:2], "loss": ()}.items():
        if name in expected:
            _check_numbers(reference, name, expected[name], expected_shape)
    largest = 0.0
    for text, logits in run.logits():
        slots = run.texts.slots[text]
        deviation = np.abs(logits - expected["logits"][text, slots])[valid[text, slots]]
        largest = float(np.maximum(largest, deviation.max(initial=0.0)))  # max() would drop NaN
    if "loss" not in expected:
        return {"logits": largest}
    return {"logits": largest, "loss_difference": abs(loss - float(expected["loss"]))}


def _gradient_differences(
    by_key: Iterable[tuple[str, NDArray[Any]]], reference: Path
) -> dict[str, float]:
    """By key, the largest difference of a gradient over its largest entry. Raises `ConfigError` for
    a file of other gradients."""
    expected = read_arrays(reference)
    report = {}
    for key, value in by_key:
        if key in expected:
            _check_numbers(reference, key, expected[key], value.shape)
            size = max(np.abs(expected[key]).max(), 1e-30)
            report[key] = float(np.abs(value - expected[key]).max() / size)
    if missing := sorted(expected.keys() - report.keys()):
        raise ConfigError(
            f"{reference} has gradients of {', '.join(missing)}, which are no tensors of the model"
        )
    return report


def _check_numbers(path: Path, name: str, array: NDArray[Any], shape: tuple[Any, ...]) -> None:
    """Raise `ConfigError` unless an array has this shape and holds numbers."""
    if array.shape != shape or array.dtype.kind not in "biuf":
        raise ConfigError(
            f"{path}: {name} must be numbers of shape {list(shape)} (got {array.dtype} {list(array.shape)})"
        )
