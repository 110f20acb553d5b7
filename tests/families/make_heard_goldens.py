"""Makes the goldens of published families that hear sounds, some of which read pictures, too.

They are random tiny checkpoints and what the reference computes of texts with clips.
make_goldens.py calls this file.

FOLDER/NAME/inputs.npz     input_ids, attention_mask, labels [B, T], input_features [clips, M, F],
                           feature_attention_mask [clips, F]; with pictures pixel_values
                           [patches, numbers], image_grid_thw [pictures, 3]
FOLDER/NAME/reference.npz  valid [B, T], logits [B, T, V], loss (mean over the learned next tokens)
FOLDER/NAME/gradients.npz  gradients of the loss, by key of the tensor
FOLDER/NAME/processed.npz  for some: sound_I [N] in 16 bits, and the processor's mel_I [F, M] and
                           number of tokens, tokens_I
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.golden_files import write_numbers

AUDIO = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 12,
    "max_source_positions": 50,  # chunks of one second
}
TEXT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "window_size": 16,  # two merged cells
    "out_hidden_size": 24,
    "fullatt_block_indexes": [1],
}
ROTARY = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 1]}
IN_OMNI = TEXT | {"hidden_size": 24, "rope_parameters": ROTARY}
HEARING = AUDIO | {"n_window": 10, "output_dim": 24}  # chunks of 20 frames
# The talker, which speaks. It is only carried through from file to file.
TALKER = {
    "vocab_size": 16,
    "embedding_size": 24,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rope_parameters": ROTARY | {"mrope_section": [1, 1, 2]},
}
WAVES = {
    "dit_config": {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "emb_dim": 8,
        "head_dim": 8,
        "num_embeds": 9,
        "mel_dim": 4,
        "enc_emb_dim": 4,
        "enc_dim": 4,
        "enc_channels": [8, 8, 8, 8, 24],
        "enc_attention_channels": 4,
        "enc_se_channels": 4,
        "look_ahead_layers": [0],
        "look_backward_layers": [0],
    },
    "bigvgan_config": {
        "mel_dim": 4,
        "upsample_initial_channel": 16,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
        "upsample_rates": [2],
        "upsample_kernel_sizes": [4],
    },
}
# name -> (model_type, text section, whether its config.json says that embedding and head are one
# matrix, dtype). The reference never ties the two matrices of Qwen2-Audio.
HEARD: Mapping[str, tuple[str, dict[str, Any], bool, str]] = {
    "qwen2_audio": ("qwen2_audio", TEXT, False, "bfloat16"),
    "qwen2_audio-untied": ("qwen2_audio", TEXT | {"rms_norm_eps": 1e-5}, True, "bfloat16"),
    "qwen2_5_omni": ("qwen2_5_omni", IN_OMNI, False, "bfloat16"),
    "qwen2_5_omni-thinker": ("qwen2_5_omni_thinker", IN_OMNI, True, "bfloat16"),
}
PROCESSED = ("qwen2_audio", "qwen2_5_omni")  # those with a processed.npz
HEARS, HEARD_ALL, CLIP, SEES, SEEN, PICTURE, VIDEO = range(3, 10)  # tokens
SAMPLES = {"whole": 16_000, "odd": 7_777, "even": 3_200, "short": 481}  # lengths of clips at 16 kHz
CELLS = {"tall": (3, 2), "wide": (2, 5)}  # rows and columns of merged cells of pictures
# Per text: numbers of tokens, clips, and pictures where the family sees any.
TEXTS = (
    (6, "odd", 4, "short", "tall", 3),
    (9,),
    (2, "whole", 5, "wide", "even", 2),
)


def make_heard(
    folder: Path, kind: str, text: dict[str, Any], tied: bool, dtype: str, seed: int
) -> None:
    """Makes one random checkpoint, and what the reference computes of it in float32."""
    import torch
    from transformers import WhisperFeatureExtractor

    torch.manual_seed(seed)
    sees = kind != "qwen2_audio"
    model, model_class = _model(kind, text, tied)
    for parameter in model.parameters():
        is_scale = parameter.ndim == 1 and parameter.mean() > 0.5  # a norm's scale, whose mean is 1
        torch.nn.init.normal_(parameter, float(is_scale), 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="20KB")
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    # The reference freezes some position embeddings; the goldens need their gradients, too.
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    extractor = WhisperFeatureExtractor(
        feature_size=AUDIO["num_mel_bins"], chunk_length=2 if sees else 1
    )
    random = np.random.default_rng(seed)
    inputs, sounds = _texts(random, text["vocab_size"], extractor, folder, sees)
    output = model(**{key: torch.tensor(value) for key, value in inputs.items()})
    output.loss.backward()
    logits, loss = (value.detach().numpy() for value in (output.logits, output.loss))
    gradients = {
        stored_key(kind, key): parameter.grad.numpy()
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    write_numbers(folder, inputs, logits, loss, gradients)
    if folder.name in PROCESSED:
        np.savez_compressed(folder / "processed.npz", **_processed(extractor, sounds))


def _model(kind: str, text: dict[str, Any], tied: bool) -> tuple[Any, Any]:
    """A model, and the class that reads the part of its checkpoint that takes these inputs."""
    import transformers as t

    if kind == "qwen2_audio":
        config = t.Qwen2AudioConfig(
            audio_config=AUDIO | {"model_type": "qwen2_audio_encoder"},
            text_config=text | {"model_type": "qwen2", "tie_word_embeddings": tied},
            tie_word_embeddings=tied,
            audio_token_index=CLIP,
        )
        model_class = t.Qwen2AudioForConditionalGeneration
        return model_class(config), model_class
    thinker = {
        "text_config": text,
        "vision_config": VISION,
        "audio_config": HEARING,
        "audio_start_token_id": HEARS,
        "audio_end_token_id": HEARD_ALL,
        "audio_token_index": CLIP,
        "vision_start_token_id": SEES,
        "vision_end_token_id": SEEN,
        "image_token_index": PICTURE,
        "video_token_index": VIDEO,
        "tie_word_embeddings": tied,
    }
    model_class = t.Qwen2_5OmniThinkerForConditionalGeneration
    if kind == "qwen2_5_omni_thinker":
        return model_class(t.Qwen2_5OmniThinkerConfig(**thinker)), model_class
    sections = {"thinker_config": thinker, "talker_config": TALKER, "token2wav_config": WAVES}
    return t.Qwen2_5OmniForConditionalGeneration(t.Qwen2_5OmniConfig(**sections)), model_class


def stored_key(kind: str, key: str) -> str:
    """The key that files use for the parameter with this name in memory."""
    if kind == "qwen2_audio":
        key = key.replace("model.language_model.", "language_model.model.")
        key = key.replace("lm_head.", "language_model.lm_head.")
        return key if key.startswith("language_model.") else key.removeprefix("model.")
    key = key.replace("model.language_model.", "model.")
    for tower in ("model.audio_tower.", "model.visual."):
        key = key.replace(tower, tower.removeprefix("model."))
    return f"thinker.{key}" if kind == "qwen2_5_omni" else key


def _texts(
    random: np.random.Generator, vocabulary: int, extractor: Any, folder: Path, sees: bool
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Texts in which media alternate with tokens, and the clips. No token of media is learned."""
    rows = []
    sounds = []
    images = []
    for text in TEXTS:
        ids: list[int] = []
        for piece in text:
            if isinstance(piece, int):
                ids += random.integers(VIDEO + 1, vocabulary, piece).tolist()
            elif piece in SAMPLES:
                sounds.append(random_sound(random, SAMPLES[piece]))
                ids += [HEARS, *[CLIP] * tokens_of(SAMPLES[piece]), HEARD_ALL]
            elif sees:
                height, width = CELLS[piece]
                images.append(random.integers(0, 256, (8 * height, 8 * width, 3)).astype(np.uint8))
                ids += [SEES, *[PICTURE] * height * width, SEEN]
        rows.append(ids)
    length = max(map(len, rows))
    ids = np.array([row + [0] * (length - len(row)) for row in rows])
    mask = np.arange(length) < np.array([len(row) for row in rows])[:, None]
    extracted = extractor(
        [sound / 32768 for sound in sounds],
        sampling_rate=16_000,
        return_attention_mask=True,
        padding="max_length",
        return_tensors="np",
    )
    inputs = {
        "input_ids": ids,
        "attention_mask": mask.astype(np.int64),
        "labels": np.where(mask & ~np.isin(ids, (CLIP, PICTURE)), ids, -100),
        "input_features": extracted["input_features"],
        "feature_attention_mask": extracted["attention_mask"].astype(np.int64),
    }
    return inputs | _processors(folder, extractor, images), sounds


def _processors(folder: Path, extractor: Any, images: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Writes the files that say how media are read, and returns the inputs for pictures."""
    if not images:
        extractor.save_pretrained(folder)
        return {}
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=VISION["patch_size"], min_pixels=8 * 8, max_pixels=8 * 8 * 12
    )
    if folder.name == "qwen2_5_omni":  # published in one file
        values = extractor.to_dict() | processor.to_dict()
        (folder / "preprocessor_config.json").write_text(json.dumps(values, indent=2))
    else:
        sections = {
            "feature_extractor": extractor.to_dict(),
            "image_processor": processor.to_dict(),
        }
        (folder / "processor_config.json").write_text(json.dumps(sections, indent=2))
    processed = processor(images=images, return_tensors="np")
    return {name: processed[name] for name in ("pixel_values", "image_grid_thw")}


def _processed(extractor: Any, sounds: list[np.ndarray]) -> dict[str, Any]:
    """What the processor makes of clips that are loud to their ends, without the silence after
    them."""
    arrays: dict[str, Any] = {}
    for i, sound in enumerate(sounds):
        extracted = extractor(sound / 32768, sampling_rate=16_000, return_attention_mask=True)
        frames = int(np.sum(extracted["attention_mask"][0]))
        mel = np.asarray(extracted["input_features"][0])[:, :frames].T
        arrays |= {f"sound_{i}": sound, f"mel_{i}": mel, f"tokens_{i}": tokens_of(len(sound))}
    return arrays


def tokens_of(samples: int) -> int:
    """The number of tokens of a clip, as the processors of both families count them."""
    frames = -(-samples // 160)
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def random_sound(random: np.random.Generator, count: int) -> np.ndarray:
    """Two tones with noise, in 16 bits."""
    times = np.arange(count) / 16_000
    tones = np.sin(2 * np.pi * 440 * times) + np.sin(2 * np.pi * 1_234 * times)
    return (6_000 * tones + 800 * random.standard_normal(count)).astype(np.int16)
