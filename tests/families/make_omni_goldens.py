"""Makes the goldens of Qwen3-Omni: random tiny checkpoints and what the reference computes of texts
with pictures, clips and videos. make_goldens.py calls this file.

FOLDER/NAME/inputs.npz     input_ids, attention_mask, labels [B, T], input_features [clips, M, F],
                           feature_attention_mask [clips, F], pixel_values and pixel_values_videos
                           [patches, numbers], image_grid_thw and video_grid_thw [media, 3],
                           video_second_per_grid [videos]
FOLDER/NAME/reference.npz  valid [B, T], logits [B, T, V], loss (mean over the learned next tokens)
FOLDER/NAME/gradients.npz  gradients of the loss, by key of the tensor, except key biases of the
                           audio tower
FOLDER/NAME/processed.npz  for some clips that lie beside a longer one: sound_I [N] in 16 bits, and
                           the processor's mel_I [F, M] and number of tokens, tokens_I
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.golden_files import write_numbers
from tests.families.make_heard_goldens import (
    CLIP,
    HEARD_ALL,
    HEARS,
    PICTURE,
    SEEN,
    SEES,
    VIDEO,
    random_sound,
)

ROTARY = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
TEXT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "rope_parameters": ROTARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "depth": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
AUDIO = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "num_mel_bins": 10,
    "downsample_hidden_size": 8,
    "output_dim": 16,
    "n_window_infer": 200,  # two chunks of one second
}
# The talker, which speaks. It is only carried through from file to file.
TALKER_TEXT = {
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
TALKER = {
    "text_config": TALKER_TEXT
    | {"moe_intermediate_size": 4, "num_experts": 2, "num_experts_per_tok": 1}
    | {"shared_expert_intermediate_size": 4},
    "code_predictor_config": TALKER_TEXT | {"num_code_groups": 2},
    "num_code_groups": 2,
    "thinker_hidden_size": 16,
    "spatial_merge_size": 2,
}
WAVES = {
    "codebook_size": 8,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_quantizers": 2,
    "upsample_rates": [2],
    "upsampling_ratios": [2],
    "decoder_dim": 4,
}
# name -> (model_type, sizes of text, of vision, of audio, whether embedding and head are one
# matrix, dtype)
Sizes = dict[str, Any]
OMNI: dict[str, tuple[str, Sizes, Sizes, Sizes, bool, str]] = {
    "qwen3_omni_moe": ("qwen3_omni_moe", TEXT, VISION, AUDIO, False, "bfloat16"),
}
# Other sizes, tied and without a talker. These have no goldens, and are compared only with the
# reference itself.
LIVE = {
    "qwen3_omni_moe-thinker": (
        "qwen3_omni_moe_thinker",
        TEXT
        | {"hidden_size": 24, "num_experts": 6, "attention_bias": True, "head_dim": 16}
        | {"rope_parameters": ROTARY | {"mrope_section": [4, 2, 2]}},
        VISION | {"out_hidden_size": 24, "depth": 3, "deepstack_visual_indexes": [0, 2]},
        AUDIO | {"output_dim": 24, "num_mel_bins": 17, "n_window_infer": 300},
        True,
        "bfloat16",
    )
}
# Other kernels require sizes that no test here has.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
POSITIONS_PER_SECOND = 13
# Clips at 16 kHz: three chunks, the last one cut; one chunk; less than a chunk; less than a token.
SAMPLES = {"long": 35_111, "whole": 16_000, "odd": 7_777, "short": 481}
PROCESSED = ("short",)  # those in processed.npz
CELLS = {"tall": (3, 2), "small": (1, 1), "wide": (1, 4)}  # rows and columns of merged cells
CLIPS = {"quick": (3, 2, 1), "slow": (2, 1, 2)}  # of videos: groups of frames, rows and columns
SECONDS = {"quick": 0.3, "slow": 1.7}  # from one group of frames to the next
# Per text: numbers of tokens, and media. Some texts have media of one kind, the last has all kinds.
TEXTS = (
    (9,),
    (2, "tall", 4),
    (3, "small", 1, "wide", 3),
    (2, "odd", 5),
    (2, "quick", 4),
    (1, "short", 3, "slow", 2, "small", 1, "long", 2, "quick", 3, "whole", 4),
)


def make_omni(
    folder: Path,
    kind: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    audio: dict[str, Any],
    tied: bool,
    dtype: str,
    seed: int,
) -> None:
    """Makes one random checkpoint, and what the reference computes of it in float32."""
    import torch
    import transformers as t

    torch.manual_seed(seed)
    model = _model(kind, text, vision, audio, tied)
    for parameter in model.parameters():
        is_scale = parameter.ndim == 1 and parameter.mean() > 0.5  # a norm's scale, whose mean is 1
        torch.nn.init.normal_(parameter, float(is_scale), 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="30KB")
    thinker = t.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, **EAGER
    )
    random = np.random.default_rng(seed)
    extractor = t.WhisperFeatureExtractor(feature_size=audio["num_mel_bins"], chunk_length=300)
    sounds = {name: random_sound(random, count) for name, count in SAMPLES.items()}
    inputs = _texts(random, text["vocab_size"], extractor, sounds, folder)
    output = thinker(**{key: torch.tensor(value) for key, value in inputs.items()})
    output.loss.backward()
    logits, loss = (value.detach().numpy() for value in (output.logits, output.loss))
    gradients: dict[str, np.ndarray] = {}
    for key, parameter in thinker.named_parameters():
        if "audio_tower" in key and key.endswith("k_proj.bias"):
            continue  # The gradient is 0: softmax does not see what all keys share.
        gradients |= _as_stored(kind, key, parameter.grad.numpy())
    write_numbers(folder, inputs, logits, loss, gradients)
    if folder.name in OMNI:
        short_sounds = [sounds[name] for name in PROCESSED]
        np.savez_compressed(folder / "processed.npz", **_processed(extractor, short_sounds))


def _model(
    kind: str, text: dict[str, Any], vision: dict[str, Any], audio: dict[str, Any], tied: bool
) -> Any:
    """A random thinker, or a whole model with a talker and a vocoder."""
    import transformers as t

    thinker = {
        "text_config": text,
        "vision_config": vision,
        "audio_config": audio,
        "audio_start_token_id": HEARS,
        "audio_end_token_id": HEARD_ALL,
        "audio_token_id": CLIP,
        "vision_start_token_id": SEES,
        "vision_end_token_id": SEEN,
        "image_token_id": PICTURE,
        "video_token_id": VIDEO,
        "position_id_per_seconds": POSITIONS_PER_SECOND,
        "tie_word_embeddings": tied,
    }
    if kind == "qwen3_omni_moe_thinker":
        config = t.Qwen3OmniMoeThinkerConfig(**thinker)
        return t.Qwen3OmniMoeThinkerForConditionalGeneration(config)
    config = t.Qwen3OmniMoeConfig(
        thinker_config=thinker, talker_config=TALKER, code2wav_config=WAVES
    )
    return t.Qwen3OmniMoeForConditionalGeneration(config)


def _as_stored(kind: str, key: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """A gradient by the keys that files use for the parameter with this name in memory."""
    key = key.replace("model.language_model.", "model.")
    for tower in ("model.audio_tower.", "model.visual."):
        key = key.replace(tower, tower.removeprefix("model."))
    expert_values = experts_as_stored(key, values)
    prefix = "thinker." if kind == "qwen3_omni_moe" else ""
    return {f"{prefix}{name}": value for name, value in expert_values.items()}


def experts_as_stored(key: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Splits joined expert matrices, by the keys of the tensors in files.

    The reference joins the experts of a layer, and two of their matrices; files hold each one."""
    experts, separator, name = key.partition(".experts.")
    if not separator:
        return {key: values}
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    return {
        f"{experts}.experts.{expert}.{matrix_name}.weight": matrix
        for expert, expert_values in enumerate(values)
        for matrix_name, matrix in zip(names, np.split(expert_values, len(names)), strict=True)
    }


def _texts(
    random: np.random.Generator,
    vocabulary: int,
    extractor: Any,
    sounds: Mapping[str, np.ndarray],
    folder: Path,
) -> dict[str, np.ndarray]:
    """Texts in which media alternate with tokens. No token of media is learned."""
    rows = []
    clips = []
    images = []
    videos = []
    seconds = []
    for text in TEXTS:
        ids: list[int] = []
        for piece in text:
            if isinstance(piece, int):
                ids += random.integers(VIDEO + 1, vocabulary, piece).tolist()
            elif piece in SAMPLES:
                clips.append(sounds[piece])
                ids += [HEARS, *[CLIP] * tokens_of(len(sounds[piece])), HEARD_ALL]
            elif piece in CELLS:
                height, width = CELLS[piece]
                images.append(random.integers(0, 256, (8 * height, 8 * width, 3)).astype(np.uint8))
                ids += [SEES, *[PICTURE] * height * width, SEEN]
            else:
                frames, height, width = CLIPS[piece]
                shape = (2 * frames, 8 * height, 8 * width, 3)
                videos.append(random.integers(0, 256, shape).astype(np.uint8))
                seconds.append(SECONDS[piece])
                ids += [SEES, *[VIDEO] * frames * height * width, SEEN]
        rows.append(ids)
    length = max(map(len, rows))
    ids = np.array([row + [0] * (length - len(row)) for row in rows])
    mask = np.arange(length) < np.array([len(row) for row in rows])[:, None]
    extracted = extractor(
        [clip / 32768 for clip in clips],
        sampling_rate=16_000,
        return_attention_mask=True,
        padding=True,
        truncation=False,
        return_tensors="np",
    )
    inputs = {
        "input_ids": ids,
        "attention_mask": mask.astype(np.int64),
        "labels": np.where(mask & ~np.isin(ids, (CLIP, PICTURE, VIDEO)), ids, -100),
        "input_features": extracted["input_features"],
        "feature_attention_mask": extracted["attention_mask"].astype(np.int64),
        "video_second_per_grid": np.array(seconds, np.float32),
    }
    return inputs | _patches(folder, extractor, images, videos)


def _patches(
    folder: Path, extractor: Any, images: list[np.ndarray], videos: list[np.ndarray]
) -> dict[str, np.ndarray]:
    """Writes the file that says how media are read, and returns the inputs for pictures and videos."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=8 * 8, max_pixels=8 * 8 * 12)
    values = extractor.to_dict() | processor.to_dict()
    (folder / "preprocessor_config.json").write_text(json.dumps(values, indent=2))
    processed = processor(images=images, return_tensors="np")
    patches = []
    grids = []
    for video in videos:
        # Process each frame as a picture, which the processor repeats in time, and keep one copy.
        frames = processor(images=[*video], return_tensors="np")
        pictures = frames["pixel_values"].reshape(len(video) // 2, 2, -1, 3, 2, 16)
        patch_pairs = np.stack([pictures[:, 0, :, :, 0], pictures[:, 1, :, :, 0]], axis=3)
        patches.append(patch_pairs.reshape(-1, 3 * 2 * 16))
        grids.append([len(video) // 2, *frames["image_grid_thw"][0, 1:]])
    return {
        "pixel_values": processed["pixel_values"],
        "image_grid_thw": processed["image_grid_thw"],
        "pixel_values_videos": np.concatenate(patches),
        "video_grid_thw": np.array(grids),
    }


def _processed(extractor: Any, sounds: list[np.ndarray]) -> dict[str, Any]:
    """What the processor makes of each clip beside one a second longer, without the clip's own
    silence."""
    arrays: dict[str, Any] = {}
    for i, sound in enumerate(sounds):
        longer = np.zeros(len(sound) + 16_000)
        extracted = extractor(
            [sound / 32768, longer],
            sampling_rate=16_000,
            return_attention_mask=True,
            padding=True,
            truncation=False,
        )
        frames = int(np.sum(extracted["attention_mask"][0]))
        mel = np.asarray(extracted["input_features"][0])[:, :frames].T
        arrays |= {f"sound_{i}": sound, f"mel_{i}": mel, f"tokens_{i}": tokens_of(len(sound))}
    return arrays


def tokens_of(samples: int) -> int:
    """The number of tokens of a clip, as the reference counts them."""
    # A chunk is 100 frames of 10 ms. Three convolutions of stride 2 leave 13 tokens of it.
    chunks, last_chunk = divmod(-(-samples // 160), 100)
    for _ in range(3):
        last_chunk = (last_chunk - 1) // 2 + 1
    return 13 * chunks + last_chunk
