"""The tokenizer of a run, with or without a chat template."""

from __future__ import annotations

from jaxmllm.config.schema import CHATML, DataConfig
from jaxmllm.data.text.template_tokenizer import TemplateTokenizer
from jaxmllm.data.text.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer


def load_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer of section `data`: a file, or else bytes. Raises `TokenizerError`."""
    if data.tokenizer is None:
        return ByteTokenizer()
    if data.chat_template == CHATML:
        return FileTokenizer(data.tokenizer)
    return TemplateTokenizer(data.tokenizer, data.chat_template, data.chat_date)
