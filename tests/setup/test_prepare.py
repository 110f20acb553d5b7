"""The data and the model of a run, before anything is compiled."""

import json
import os
from pathlib import Path

import grain
import pytest
from PIL import Image

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError, SourceConfig
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.media.images import Images
from jaxmllm.data.text.tokenizers import ByteTokenizer
from jaxmllm.setup.prepare import (
    VOCABULARY_MULTIPLE,
    data_facts,
    sizing_samples,
    under_root,
    vocabulary,
)
from tests.support import tiny_config


def test_paths_of_a_source_stand_under_the_root_of_the_data():
    without_media = SourceConfig(name="a", path="train.jsonl")
    with_media = SourceConfig(name="a", path="sub/train.jsonl", root="/media", weight=2.0)
    assert under_root(None, with_media) == with_media
    assert under_root("/data", without_media) == without_media.model_copy(
        update={"path": "/data/train.jsonl"}
    )
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


def test_hosts_tell_records_and_media_of_equal_lengths_apart(tmp_path: Path) -> None:
    """Facts depend on what files hold, not on when they were written."""

    def facts(answer: str = "yes", mode: str = "L", seconds: int = 1) -> dict[str, str]:
        """Facts that hosts compare, for one record with one picture."""
        user = {"role": "user", "content": [{"type": "image", "image": "a.bmp"}]}
        record = {"messages": [user, {"role": "assistant", "content": answer}]}
        (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
        Image.new(mode, (16, 16)).save(tmp_path / "a.bmp")
        os.utime(tmp_path / "a.bmp", (seconds, seconds))
        source = SourceConfig(name="s", path=str(tmp_path / "a.jsonl"))
        images = {"vision": Images(8, 1, 64, 4096)}
        return data_facts(Corpus.open([source], ByteTokenizer(), images, progress=False), None)

    original = facts()
    assert facts(seconds=2) == original, "a copy"
    for changed in (facts(answer="no!"), facts(mode="RGB")):
        differing = {key for key in original if changed[key] != original[key]}
        assert differing == {"data of source 's'"}, "lengths are the same"


@pytest.mark.parametrize(
    ("examples", "batch_size", "batches"),
    [(1, 64, 8), (16, 64, 16), (128, 64, 128), (999, 1000, 16)],
)
def test_a_small_corpus_is_not_sampled_for_hundreds_of_epochs(
    examples: int, batch_size: int, batches: int, tmp_path: Path
) -> None:
    record = {"messages": [{"role": "assistant", "content": "yes"}]}
    (tmp_path / "a.jsonl").write_text((json.dumps(record) + "\n") * examples)
    source = SourceConfig(name="s", path=str(tmp_path / "a.jsonl"))
    corpus = Corpus.open([source], ByteTokenizer(), {}, progress=False)
    order = grain.MapDataset.range(examples).repeat()
    assert len(sizing_samples(order, corpus, batch_size)) == batches
