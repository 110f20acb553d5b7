"""What families of dense decoders have in common: keys of config.json and names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmllm.families.family import Family, Variant
from jaxmllm.families.folder_config import FolderConfig

ATTENTION = "model.layers.{layer}.self_attn"
MLP = "model.layers.{layer}.mlp"
PARAMETERS = {
    "embedding": "model.embed_tokens.weight: v d -> v d",
    "layers.attention.query": f"{ATTENTION}.q_proj.weight: (h k) d -> layer d h k",
    "layers.attention.query_bias": f"{ATTENTION}.q_proj.bias: (h k) -> layer h k",
    "layers.attention.query_norm.scale": f"{ATTENTION}.q_norm.weight: k -> layer k",
    "layers.attention.key": f"{ATTENTION}.k_proj.weight: (g k) d -> layer d g k",
    "layers.attention.key_bias": f"{ATTENTION}.k_proj.bias: (g k) -> layer g k",
    "layers.attention.key_norm.scale": f"{ATTENTION}.k_norm.weight: k -> layer k",
    "layers.attention.value": f"{ATTENTION}.v_proj.weight: (g k) d -> layer d g k",
    "layers.attention.value_bias": f"{ATTENTION}.v_proj.bias: (g k) -> layer g k",
    "layers.attention.out": f"{ATTENTION}.o_proj.weight: d (h k) -> layer h k d",
    "layers.attention.out_bias": f"{ATTENTION}.o_proj.bias: d -> layer d",
    "layers.attention_norm.scale": "model.layers.{layer}.input_layernorm.weight: d -> layer d",
    "layers.mlp.gate": f"{MLP}.gate_proj.weight: f d -> layer d f",
    "layers.mlp.up": f"{MLP}.up_proj.weight: f d -> layer d f",
    "layers.mlp.down": f"{MLP}.down_proj.weight: d f -> layer f d",
    "layers.mlp_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight: d -> layer d",
    "norm.scale": "model.norm.weight: d -> d",
    "head": "lm_head.weight: v d -> d v",
}
BASE = "model."  # before the keys of all but the head
LANGUAGE = {path: line.removeprefix(BASE) for path, line in PARAMETERS.items()}
COPIES = {"embedding": "lm_head.weight: v d -> v d"}  # where the head is tied
FREQUENCIES = ("model.layers.*.self_attn.rotary_emb.inv_freq",)  # follow from config.json
NO_NAMES: Mapping[str, str] = {}
LAYER_TYPES = ("full_attention", "sliding_attention")
SCALED_BY = {  # rope_type -> its keys
    "linear": ("factor",),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
    ),
}


def decoder_family(
    name: str,
    kind: str,
    section: Callable[[FolderConfig], dict[str, Any]],
    lines: Mapping[str, str] = LANGUAGE,
    variants: tuple[Variant, ...] = (),
) -> Family:
    """The family of folders that hold a decoder alone. Folders of a base model, which has no head,
    have keys without `model.`.

    Args:
      kind: `model_type` of config.json.
      section: returns the keys of `model.language`.
      lines: lines of the parameters, without `model.`.
      variants: variants of these lines.
    """
    return Family(
        name,
        kind,
        section,
        lines,
        COPIES,
        FREQUENCIES,
        prefixes=(BASE, ""),
        unprefixed=("head",),
        variants=variants,
    )


def dense_decoder(
    config: FolderConfig, windowed: Sequence[bool] = (), **own: Any
) -> dict[str, Any]:
    """The keys of `model.language`.

    Args:
      windowed: whether each layer attends in windows of `sliding_window`; if not given, none does.
      own: keys that the family sets in its own way.
    """
    config.expect("hidden_act", "silu")
    config.expect("mlp_bias", False)
    config.expect("attention_dropout", 0.0)
    config.expect("partial_rotary_factor", 1.0)
    width = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    theta, scaling = _theta_and_scaling(config)
    language: dict[str, Any] = {
        "vocab_size": config.count("vocab_size"),
        "width": width,
        "layers": config.count("num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", heads),
        "head_size": config.count("head_dim", width // heads),
        "mlp_width": config.count("intermediate_size"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": config.flag("tie_word_embeddings"),
        "norm_epsilon": float(config.number("rms_norm_eps", 1e-6)),
    }
    # The schema takes a window only where some layer attends in it.
    if any(windowed):
        language["window"] = config.count("sliding_window", 4096)
        language["full_layers"] = [layer for layer, narrow in enumerate(windowed) if not narrow]
    return language | own


def head_variant(key: str) -> Variant:
    """The variant of folders that have a head, or a copy of a tied one, under another key."""
    return Variant(
        {"head": f"{key}: v d -> d v"},
        lambda section, shapes: key in shapes,
        copies={"embedding": f"{key}: v d -> v d"},
    )


def windows_by_layer(config: FolderConfig) -> tuple[bool, ...]:
    """Whether each layer attends in windows: `layer_types`, in older files `max_window_layers`."""
    layers = config.count("num_hidden_layers")
    in_use = config.flag("use_sliding_window") and config.values.get("sliding_window", 4096)
    if config.get("layer_types") is None:
        first_windowed = config.number("max_window_layers", 28) if in_use else layers
        return tuple(layer >= first_windowed for layer in range(layers))
    return windows_by_type(config, in_use)


def windows_by_type(config: FolderConfig, in_use: bool = True) -> tuple[bool, ...]:
    """Whether each layer attends in windows, as `layer_types` says. Refuses windowed layers where
    windows are not in use."""
    layers = config.count("num_hidden_layers")
    types = config.get("layer_types")
    known = LAYER_TYPES if in_use else LAYER_TYPES[:1]
    if not isinstance(types, list) or len(types) != layers or not {*types} <= {*known}:
        config.refuse(
            f"has layer_types {types!r}", f"{layers} of {' or '.join(known)} are understood"
        )
    return tuple(kind == LAYER_TYPES[1] for kind in types)


def rotary_record(config: FolderConfig, kinds: Mapping[str, str] = NO_NAMES) -> dict[str, Any]:
    """A file's record of rotary positions, with `rope_theta` and `rope_type`: `rope_parameters`, or
    in older files `rope_theta` and `rope_scaling`.

    Args:
      kinds: other names of rope types -> the usual ones.

    Raises `FolderError` for records of single kinds of layers, and where both spellings are there
    and differ.
    """
    theta = config.number("rope_theta", 10_000.0)
    records = []
    for key in ("rope_scaling", "rope_parameters"):
        rotary = config.get(key) or {}  # an empty record hides no other
        if not isinstance(rotary, dict) or any(
            isinstance(value, dict) for value in rotary.values()
        ):
            config.refuse(
                f"has rotary parameters {rotary!r}", "one record for all layers is understood"
            )
        if rotary:
            kind = rotary.get("rope_type", rotary.get("type", "default"))
            base = float(FolderConfig(config.path, rotary).number("rope_theta", theta))
            given = {key: x for key, x in rotary.items() if x is not None and key != "type"}
            records.append(given | {"rope_theta": base, "rope_type": kinds.get(str(kind), kind)})
    if any(record != records[0] for record in records):
        config.refuse(
            f"has rope_scaling {records[0]!r} and rope_parameters {records[1]!r}",
            "they differ, and libraries read one or the other; leave one of them out",
        )
    return records[0] if records else {"rope_theta": float(theta), "rope_type": "default"}


def _theta_and_scaling(config: FolderConfig) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) of the record of all layers."""
    record = rotary_record(config)
    theta = record["rope_theta"]
    kind = record["rope_type"]
    if kind == "default":
        return theta, None
    if kind not in SCALED_BY:
        cure = f"there are default, {', '.join(SCALED_BY)}"
        if kind == "dynamic":
            cure += "; up to max_position_embeddings it is default: write that if no text is longer"
        config.refuse(f"has rope_type {kind!r}", cure)
    for key in ("mscale", "mscale_all_dim", "partial_rotary_factor"):
        if record.get(key) not in (None, 1.0):
            config.refuse(f"has {key} {record[key]!r}", "this decoder has none")
    scaling = {key: record[key] for key in SCALED_BY[kind] if record.get(key) is not None}
    positions = "original_max_position_embeddings"
    if positions in SCALED_BY[kind] and positions not in scaling:
        scaling[positions] = config.number("max_position_embeddings")
    # The reference divides the multiplier of mscale by that of mscale_all_dim: both keys are 1
    # here, so the quotient is 1, too.
    if kind == "yarn" and record.get("mscale") and record.get("mscale_all_dim"):
        scaling.setdefault("attention_factor", 1.0)
    return theta, {"kind": kind, **scaling}
