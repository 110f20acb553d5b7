"""Data and model of a run, before anything is compiled."""

import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError, SourceConfig
from jaxmllm.data.text.tokenizers import ByteTokenizer
from jaxmllm.setup.prepare import VOCABULARY_MULTIPLE, under_root, vocabulary
from tests.support import tiny_config


def test_paths_of_a_source_stand_under_the_root_of_the_data():
    plain = SourceConfig(name="a", path="train.jsonl")
    with_media = SourceConfig(name="a", path="sub/train.jsonl", root="/media", weight=2.0)
    assert under_root(None, with_media) == with_media
    assert under_root("/data", plain) == plain.model_copy(update={"path": "/data/train.jsonl"})
    assert under_root("/data", with_media).path == "/data/sub/train.jsonl"
    assert under_root("/data", with_media).root == "/media", "an absolute path stays as it is"
    assert under_root("/data", with_media).weight == 2.0


def test_a_vocabulary_holds_all_tokens(tmp_path):
    tokenizer = ByteTokenizer()

    def rows(size: int | str) -> int:
        return vocabulary(
            parse_config(tiny_config(tmp_path, model__language__vocab_size=size)), tokenizer
        )

    assert rows("auto") % VOCABULARY_MULTIPLE == 0
    assert 0 <= rows("auto") - tokenizer.vocab_size < VOCABULARY_MULTIPLE
    assert rows(tokenizer.vocab_size) == tokenizer.vocab_size
    with pytest.raises(
        ConfigError, match=rf"is 100, but the tokenizer has {tokenizer.vocab_size} tokens; raise it"
    ):
        rows(100)
