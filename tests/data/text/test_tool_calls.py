"""Tools, calls of them and their answers: ids and what is learned.

Templates that write calls are tested, and others, which refuse them. The reference is a text
written out by hand, and transformers in the slow test."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from jaxmllm.data.text.conversation import Conversation, ConversationError, parse_conversation
from jaxmllm.data.text.render import render
from jaxmllm.data.text.template_tokenizer import TemplateTokenizer
from jaxmllm.data.text.tokenizers import ByteTokenizer
from tests.data.text.dialects import CHATML, NO_SYSTEM, Dialect, load

# Qwen's templates have this form.
CALLING = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) }}
    {%- if message.role == 'tool' %}
        {{- '\\n[' + message.name + ']' }}
    {%- endif %}
    {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function %}
        {{- '\\n<call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\\n</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
NAMES = {"eos_token": "<|im_end|>"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def call(city: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}} | more


ASK = {"role": "user", "content": "Rain?"}
TOLD = {"role": "tool", "name": "weather", "tool_call_id": "1", "content": "sunny"}
TALK = {
    "tools": TOOLS,
    "messages": [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [call('Größe "\n<b>', id="1")]},
        TOLD,
        {"role": "assistant", "content": "No.", "tool_calls": [call("A"), call([1, None])]},
        {"role": "assistant", "content": "Yes."},
    ],
}
SYSTEM = f"<|im_start|>system\nTools:\n{json.dumps(TOOLS[0])}<|im_end|>\n"
N = False
Y = True
WRITTEN = [
    (SYSTEM + "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n", N),
    ('<call>\n{"name": "weather", "arguments": {"city": "Größe \\"\\n<b>"}}\n</call><|im_end|>', Y),
    ("\n<|im_start|>user\n[weather]\nsunny<|im_end|>\n<|im_start|>assistant\n", N),
    ('No.\n<call>\n{"name": "weather", "arguments": {"city": "A"}}\n</call>\n<call>\n', Y),
    ('{"name": "weather", "arguments": {"city": [1, null]}}\n</call><|im_end|>', Y),
    ("\n<|im_start|>assistant\n", N),
    ("Yes.<|im_end|>", Y),
    ("\n", N),
]


def parse(record: dict[str, Any], targets: Any = "assistant") -> Conversation:
    def no_media(_: str) -> Any:
        raise AssertionError

    return parse_conversation(record, no_media, default_id="x", default_source="s", targets=targets)


def tokenizer(template: str, folder: Path) -> TemplateTokenizer:
    return load(Dialect(template, CHATML, NAMES).folder(folder))


def test_calls_are_learned_whole(tmp_path: Path) -> None:
    """A turn is learned from where the model begins to speak to its end, with the template's own
    words."""
    rendered = render(parse(TALK), tokenizer(CALLING, tmp_path), {}, [])
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoding = library.encode("".join(text for text, _ in WRITTEN), add_special_tokens=False)
    learned = np.array([is_learned for text, is_learned in WRITTEN for _ in text])
    token_learned = [
        bool(learned[start : max(end, start + 1)].any()) for start, end in encoding.offsets
    ]
    assert rendered.tokens.tolist() == encoding.ids
    assert [target >= 0 for target in rendered.targets.tolist()] == [*token_learned[1:], False]
    # Tools and arguments may be JSON in strings, and calls need not name their kind.
    function = {"name": "weather", "arguments": json.dumps({"city": 'Größe "\n<b>'})}
    answer = {"role": "assistant", "content": "", "tool_calls": [function]}
    record = {"tools": json.dumps(TOOLS), "messages": [ASK, answer, *TALK["messages"][2:]]}  # type: ignore[misc]
    rendered_again = render(parse(record), tokenizer(CALLING, tmp_path), {}, [])
    np.testing.assert_array_equal(rendered_again.targets, rendered.targets)


def test_what_is_spelled_in_calls_and_tools_is_text(tmp_path: Path) -> None:
    template_tokenizer = tokenizer(CALLING, tmp_path)
    end = template_tokenizer.control.ids["<|im_end|>"]
    answer = {"role": "assistant", "content": "", "tool_calls": [call("a<|im_end|>")]}
    tools = [{"function": {"name": "<|im_end|>", "description": "<|im_start|>"}}]
    rendered = render(
        parse({"tools": tools, "messages": [ASK, answer]}), template_tokenizer, {}, []
    )
    # One end per turn: the system's with the tools, the user's and the assistant's.
    assert rendered.tokens.tolist().count(end) == 3 and rendered.targets.tolist().count(end) == 1
    assert rendered.targets[rendered.targets >= 0][-1] == end


def test_with_targets_all_calls_are_learned_too(tmp_path: Path) -> None:
    rendered = render(parse(TALK, "all"), tokenizer(CALLING, tmp_path), {}, [])
    answers_rendered = render(parse(TALK), tokenizer(CALLING, tmp_path), {}, [])
    assert ((rendered.targets >= 0) >= (answers_rendered.targets >= 0)).all()
    assert (rendered.targets >= 0).sum() > (answers_rendered.targets >= 0).sum()


REWRITTEN = ("answers_unclear", "when its texts are marked")


@pytest.mark.parametrize(
    ("template", "record", "reason", "words"),
    [
        (NO_SYSTEM, TALK, "no_place", "no place for tool_calls"),
        (NO_SYSTEM, {"tools": TOOLS, "messages": [ASK, {"role": "assistant", "content": "a"}]}, "no_place", "tools"),
        (CALLING.replace("'<|im_start|>assistant\\n'", "''"), TALK, "answers_unclear", "begins or ends"),
        (CALLING.replace("call.name", "call.name | upper"), TALK, None, ""),
        (CALLING.replace("+ call.name", "+ ('' if call.name | length < 9 else '!') + call.name"), TALK, *REWRITTEN),
        (
            CALLING,
            {"messages": [ASK, {"role": "assistant", "tool_calls": [call("\U00100000")]}]},
            "private_characters",
            "100000",
        ),
    ],
)  # fmt: skip
def test_templates_without_a_place_for_calls(
    template: str, record: dict[str, Any], reason: str | None, words: str, tmp_path: Path
) -> None:
    template_tokenizer = tokenizer(template, tmp_path)
    if reason is None:
        assert len(render(parse(record), template_tokenizer, {}, []).tokens)
        return
    with pytest.raises(ConversationError, match=words) as caught:
        render(parse(record), template_tokenizer, {}, [])
    assert caught.value.reason == reason


def test_chatml_has_no_place_for_calls() -> None:
    with pytest.raises(ConversationError, match="chatml has no place") as caught:
        render(parse(TALK), ByteTokenizer(), {}, [])
    assert caught.value.reason == "no_place"


def nested(levels: int) -> dict[str, Any]:
    return {"b": nested(levels - 1)} if levels > 1 else {}


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ({"name": "a"}, "tool_calls must be a list or a string, not an object"),
        (["a"], "tool_calls must be a list of objects"),
        ([{"arguments": {}}], r"tool_calls\[0\] has no 'name'"),
        ([{"name": "", "arguments": {}}], "name is empty"),
        ([{"name": "a"}], "has no 'arguments'"),
        ([{"name": "a", "arguments": "b"}], "a string, but no JSON"),
        ([{"name": "a", "arguments": "[1]"}], "arguments must be an object, not a list"),
        ([{"name": "a", "arguments": {"b": "\ud800"}}], "not Unicode"),
        (
            [{"name": "a", "arguments": '{"b":' * 600 + "1" + "}" * 600}],
            "more than 100 levels deep",
        ),
        ([{"name": "a", "arguments": nested(101)}], "more than 100 levels deep"),
        ([{"function": "a"}], "function must be an object, not a string"),
    ],
)
def test_broken_calls(calls: Any, words: str) -> None:
    with pytest.raises(ConversationError, match=words):
        parse({"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": calls}]})


def test_content_is_left_out_beside_calls_alone() -> None:
    with pytest.raises(ConversationError, match="no 'content'"):
        parse({"messages": [ASK, {"role": "assistant", "tool_calls": []}]})


@pytest.mark.slow
def test_calls_against_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template_tokenizer = tokenizer(CALLING, tmp_path)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    expected = reference.apply_chat_template(TALK["messages"], tools=TOOLS, return_dict=True)
    assert render(parse(TALK), template_tokenizer, {}, []).tokens.tolist() == expected["input_ids"]
