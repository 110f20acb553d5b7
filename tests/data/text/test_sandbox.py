"""Templates from anywhere: what they may do, and how a template that does more is ended."""

import threading
import time
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import SecurityError

from jaxmllm.data.text.sandbox import CLOSE, OPEN, RaisedError, Sandbox, run
from jaxmllm.data.text.template_limits import LimitError, Limits

# Small limits, so that the runaway templates below end in no time.
SMALL = Limits(steps=2000, characters=1 << 16, bits=1 << 10)


def written(source: str, marked: bool = False, limits: Limits = SMALL, **values: Any) -> str:
    """What a template of this source writes."""
    return run(Sandbox({}).from_string(source), values, marked, limits)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in [1, 2] if i > 1 %}{{ loop.index0 ~ loop.last }}{% else %}x{% endfor %}", "0True"),
        ("{% for a in [1, [2]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}", "12"),
        ("{% macro m(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call m(1) %}2{% endcall %}", "12"),
        ("{{ {'a': '<é>'} | tojson }}{{ [1] | tojson(indent=1) }}", '{"a": "<é>"}[\n 1\n]'),
        ("{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ dict(b=2).b }}", "22"),
        ("  {% if true %}\n  a\n  {%- endif %}\n", "  a"),
        ("{{ 'aba' | replace('a', 'c') }}{{ 'aba'.replace('a', 'c', 1) }}", "cbccba"),
        ("{{ [1, 2] | join(',') }}{{ ';'.join(['a', 'b']) }}{{ 'a\nb' | indent(1) }}", "1,2a;ba\n b"),
        ("{{ '%02d' | format(3) }}{{ '%s' % 'q' }}{{ '{:>2}'.format(1) }}{{ 5 % 3 }}", "03q 12"),
        ("{{ 2 ** 5 }}{{ 'ab' * 2 }}{{ 3 * 'a' }}{{ [1] * 2 }}", "32ababaaa[1, 1]"),
    ],
)  # fmt: skip
def test_what_templates_do(source: str, text: str) -> None:
    assert written(source) == text


def test_generation_is_marked_on_demand() -> None:
    source = "a{% set x %}{% generation %} b {% endgeneration %}{% endset %}{{ x | trim }}c"
    assert written(source) == "abc"
    assert written(source, marked=True) == f"a{OPEN} b {CLOSE}c"


# Each pass lets a string grow by the expression GROWN. 99 passes would exceed any memory.
GROWS = (
    "{% set ns = namespace(s='aa\n') %}{% for i in range(99) %}{% set ns.s = GROWN %}{% endfor %}"
)


@pytest.mark.parametrize(
    "grown",
    [
        "ns.s ~ ns.s",
        "ns.s + ns.s",
        "ns.s * 9",
        "ns.s.replace('a', ns.s)",
        "ns.s | replace('a', ns.s)",
        "ns.s.join([ns.s, ns.s, ns.s])",
        "[ns.s, ns.s, ns.s] | join(ns.s)",
        "ns.s | indent(999, true) ~ ns.s",
    ],
)
def test_values_do_not_grow_without_end(grown: str) -> None:
    with pytest.raises(LimitError, match="writes more than 65536 characters"):
        written(GROWS.replace("GROWN", grown))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for i in range(99) %}{% for j in range(99) %}{% endfor %}{% endfor %}", "2000 passes"),
        ("{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n }}{% endmacro %}{{ m(60) }}", "2000 passes"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself too deeply"),
        ("{% for i in range(999) %}{{ 'x' * 999 }}{% endfor %}", "writes more than 65536"),
        ("{{ 'x' * 99999999999 }}", "writes more than 65536"),
        ("{{ [1] * 99999999999 }}", "writes more than 65536"),
        ("{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}", "1024 bits"),
        ("{{ 2 ** 99999999999 }}", "1024 bits"),
        ("{{ '%99999999999d' % 1 }}", "fields of more than 9999"),
        ("{{ '%*d' % (99999999999, 1) }}", "fields of more than 9999"),
        ("{{ '%99999999999d' | format(1) }}", "fields of more than 9999"),
        ("{{ '{:99999999999}'.format(1) }}", "fields of more than 9999"),
        ("{{ 'x' | indent(99999999999) }}", "'indent' takes numbers up to 9999"),
        ("{{ [1] | batch(99999999999, 0) | list }}", "'batch' takes numbers up to 9999"),
        ("{{ [1] | tojson(indent=99999999999) }}", "'tojson' takes numbers up to 9999"),
    ],
)  # fmt: skip
def test_nothing_large_is_made(source: str, words: str) -> None:
    start = time.monotonic()
    with pytest.raises(LimitError, match=words):
        written(source)
    # Refusal takes no time. The bound only catches a template that is really run.
    assert time.monotonic() - start < 30


def test_time_is_bounded() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(LimitError, match=r"takes more than 0\.01 s"):
        written(source, limits=Limits(steps=1 << 40, seconds=0.01))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(a=1) }}",
        "{{ run.__globals__ }}",
        "{{ ''.center(9) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_attributes_are_out_of_reach(source: str) -> None:
    with pytest.raises(SecurityError, match="the attribute '"):
        written(source, messages=[{}], run=run)


def test_nothing_is_left_to_chance_or_the_disk() -> None:
    for source in ("{{ [1, 2] | random }}", "{{ lipsum() }}", "{{ strftime_now('%d') }}"):
        with pytest.raises(TemplateError):
            written(source)
    with pytest.raises(TypeError, match="no loader"):
        written("{% include 'a' %}")
    with pytest.raises(RaisedError, match=r"^no$"):
        written("{{ raise_exception('no') }}")


def test_each_thread_has_its_own_limits() -> None:
    # 1500 passes are within a thread's limit of 2000, but four threads make 6000 together.
    source = Sandbox({}).from_string("{% for i in range(1500) %}{{ i % 2 }}{% endfor %}")
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(run(source, {}, limits=SMALL)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["01" * 750] * 4
