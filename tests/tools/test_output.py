"""Tables in text and HTML, pages around a picture, and records of what was measured."""

import json

from jaxmllm.tools.arguments import measuring_parser
from jaxmllm.tools.output import (
    Page,
    html_table,
    new_figure,
    print_table,
    write_json,
    write_picture,
)

ROWS = [["a<b", 0.123456, None], ["[mlp]", 7, "8 %"]]


def test_cells_are_the_same_in_text_and_html(capsys):
    print_table("Title of [mlp]", ["name", "share", "rest"], ROWS, left_aligned=1)
    printed = capsys.readouterr().out
    page = html_table(["name", "share", "rest"], ROWS, left_aligned=1)
    assert "Title of [mlp]" in printed
    for cell in ("0.123", "-", "[mlp]", "7", "8 %"):
        assert cell in printed and f"<td>{cell}</td>" in page
    assert "a<b" in printed and "a&lt;b" in page


def test_a_page_holds_its_picture(tmp_path):
    page = Page(
        title="a & b",
        heading="A",
        introduction="<p>said</p>",
        picture="a square",
        body="<p>end</p>",
    )
    line = write_picture(tmp_path / "new", "drawing", new_figure(1.0, head=0.2), page)
    text = (tmp_path / "new" / "drawing.html").read_text()
    assert (
        line == f"wrote {tmp_path / 'new' / 'drawing.png'} and {tmp_path / 'new' / 'drawing.html'}"
    )
    assert (
        "<title>a &amp; b</title>" in text
        and "<p>said</p>" in text
        and "data:image/png;base64," in text
    )
    assert (tmp_path / "new" / "drawing.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_says_what_it_was_measured_on(tmp_path):
    path = (
        measuring_parser("what it does")
        .parse_args(["--json", str(tmp_path / "made" / "x.json")])
        .json
    )
    write_json(path, "name", 3, "from the seed", results=[1])
    record = json.loads(path.read_text())
    assert {"python", "jax", "jaxlib", "numpy"} == set(record["versions"])
    assert (record["benchmark"], record["seed"], record["results"]) == ("name", 3, [1])


def test_without_a_path_nothing_is_written():
    write_json(None, "name", 0, "nowhere")
