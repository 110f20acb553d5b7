"""Small tokenizers and templates that behave like the ones of published models."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors

from jaxmllm.data.text.template_tokenizer import TemplateTokenizer

# The texts from which merges are learned. Line breaks run on over the ends of contents.
LEARNED = [
    "Be kind.\n\nWhat is this?\n\n\nA cat.\n",
    "Be kind. What is this? A cat, a red cat.",
    "user\nassistant\nsystem\nmodel\n<think>\n\n</think>\n\n",
    "1234 12 1 naïve\n\n\n\n",
] * 3

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Dialect:
    """A template, the special tokens of its tokenizer, and their names."""

    template: str
    special: tuple[str, ...]
    names: dict[str, Any]
    by_bytes: bool = True  # else by characters, like SentencePiece

    def folder(self, path: Path) -> Path:
        """Writes the files of a published folder."""
        path.mkdir(parents=True, exist_ok=True)
        tokenizer = (
            byte_tokenizer(self.special) if self.by_bytes else character_tokenizer(self.special)
        )
        tokenizer.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps(self.names))
        (path / "chat_template.jinja").write_text(self.template)
        return path


def load(folder: Path, **options: Any) -> TemplateTokenizer:
    return TemplateTokenizer(folder / "tokenizer.json", folder / "chat_template.jinja", **options)


def byte_tokenizer(special: tuple[str, ...]) -> tokenizers.Tokenizer:
    """A tokenizer of the kind of Qwen's and Llama's: a pattern splits words, then pairs of bytes
    merge."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(LEARNED, trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("<think>", "</think>")])
    if "<|begin_of_text|>" in special:
        begin = "<|begin_of_text|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return tokenizer


def character_tokenizer(special: tuple[str, ...]) -> tokenizers.Tokenizer:
    """A tokenizer of the kind of Gemma's and Mistral's.

    It writes ▁ for a space, puts one before the first word, and has bytes for unknown characters.
    """
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        special_tokens=["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    tokenizer.train_from_iterator(LEARNED, trainer)
    file = json.loads(tokenizer.to_str())
    # Bytes are words of the model, but no added tokens.
    file["added_tokens"] = [t for t in file["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(file))
    tokenizer.add_tokens([AddedToken("\n" * length, normalized=False) for length in (2, 3, 4)])
    return tokenizer


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
IMAGE = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
CONTEXT = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
BOTH = ("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>")
BOTH += ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
ALL = (*VISION, "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
NO_SYSTEM = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
DEFAULT_SYSTEM = (
    """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a test.<|im_end|>\\n' }}
{%- endif %}
"""
    + NO_SYSTEM
)
# Contents are texts, or lists of texts and pictures.
PICTURED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for content in message['content'] %}
            {%- if content['type'] == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}
                {{- content['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Contents may hold videos, too.
MOVING = PICTURED.replace(
    """            {%- else %}
                {{- content""",
    """            {%- elif content['type'] == 'video' %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- else %}
                {{- content""",
)
LOOP = "{%- for message in messages %}\n"
FIRST = """\
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are a test.<|im_end|>\\n' }}
    {%- endif %}
"""
WITH_SYSTEM = PICTURED.replace(LOOP, LOOP + FIRST)
HEARD = WITH_SYSTEM.replace(
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}",
    """{{- '<|vision_bos|><|IMAGE|><|vision_eos|>' }}
            {%- elif content['type'] == 'audio' %}
                {{- '<|audio_bos|><|AUDIO|><|audio_eos|>' }}""",
)
HEARD_PLAIN = MOVING.replace(
    "            {%- else %}\n                {{- content",
    """            {%- elif content['type'] == 'audio' %}
                {{- '<|audio_start|><|audio_pad|><|audio_end|>' }}
            {%- else %}
                {{- content""",
)
MOVING_BESIDE_SOUND = HEARD.replace(
    "            {%- else %}\n                {{- content",
    """            {%- elif content['type'] == 'video' %}
                {{- '<|vision_bos|><|VIDEO|><|vision_eos|>' }}
            {%- else %}
                {{- content""",
)
LINED = PICTURED.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\\n")
# Reasoning is written only after the last question.
REASONING = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- set thought = message.reasoning_content or '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
DATED = """\
{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday is ' + date + '.\\n\\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MERGED = """\
{{ bos_token }}
{%- set first = '' %}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- first if loop.first else '' }}
    {%- if message['content'] is string %}
        {{- message.content | trim }}
    {%- else %}
        {%- for item in message['content'] %}
            {{- '<start_of_image>' if item['type'] == 'image' else item['text'] | trim }}
        {%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
INSTRUCTED = """\
{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last and system else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""
GENERATION = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}"""

_QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
DIALECTS = {
    "qwen2.5": Dialect(DEFAULT_SYSTEM, CHATML + VISION, _QWEN),
    "qwen2.5-vl": Dialect(WITH_SYSTEM, CHATML + VISION, _QWEN),
    "qwen3-vl": Dialect(PICTURED, CHATML + VISION, _QWEN),
    "qwen2.5-vl-moving": Dialect(
        MOVING.replace(LOOP, LOOP + FIRST), (*CHATML, *VISION, "<|video_pad|>"), _QWEN
    ),
    "qwen3-vl-moving": Dialect(MOVING, (*CHATML, *VISION, "<|video_pad|>"), _QWEN),
    "qwen2.5-omni": Dialect(HEARD, CHATML + BOTH, _QWEN),
    "qwen2.5-omni-moving": Dialect(MOVING_BESIDE_SOUND, CHATML + BOTH, _QWEN),
    "qwen3-omni": Dialect(HEARD_PLAIN, CHATML + ALL, _QWEN),
    "internvl": Dialect(LINED, CHATML + CONTEXT, _QWEN),
    "qwen3": Dialect(REASONING, CHATML + VISION, _QWEN),
    "generation": Dialect(GENERATION, CHATML, _QWEN),
    "llama3.1": Dialect(
        DATED,
        _LLAMA,
        {
            "bos_token": {"__type": "AddedToken", "content": "<|begin_of_text|>", "special": True},
            "eos_token": "<|eot_id|>",
        },
    ),
    "gemma3": Dialect(
        MERGED,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", *IMAGE),
        {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
        by_bytes=False,
    ),
    "mistral": Dialect(
        INSTRUCTED,
        ("<s>", "</s>", "[INST]", "[/INST]"),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        by_bytes=False,
    ),
}
