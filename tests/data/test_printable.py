"""Texts in messages: one printable line each, with both ends of long ones."""

from pathlib import Path

import pytest

from jaxmllm.data.printable import MAX_SHOWN, shown


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x1b[31mred\x07\0", r"\x1b[31mred\x07\x00"),
        ("line\u2028paragraph\u2029next\x85end", r"line\u2028paragraph\u2029next\x85end"),
        ("gpj.\u202epicture", r"gpj.\u202epicture"),
        ("\udcff", r"\udcff"),
        ("Bilder/Straße 猫.png", "Bilder/Straße 猫.png"),
        (r"C:\new", r"C:\new"),
    ],
)
def test_a_message_is_one_printable_line(text: str, escaped: str) -> None:
    assert shown(text) == shown(Path(text) if "\0" not in text else text) == escaped
    # A message may be escaped twice: where it is made, and where it is printed.
    assert shown(escaped) == escaped
    assert len(shown(text).splitlines()) == 1
    shown(text).encode()


def test_long_texts_keep_both_ends() -> None:
    text = shown("/data/" + "x" * 10**6 + "\n.png")
    assert len(text) <= MAX_SHOWN + 10 and text.startswith("/data/x") and text.endswith(r"x\n.png")
