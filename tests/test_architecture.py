"""The rooms of docs/ARCHITECTURE.md: which may import which.

File names must also be unique, and files that texts name must exist.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# At the bottom: the records in which rooms exchange data
RECORDS = {"config", "phases", "trainable", "arrays", "row_format"}
ARROWS = {  # from top to bottom: a room imports only rooms below it
    "jaxmllm/__main__.py": set(),  # imports the module of a verb by name
    "jaxmllm/tools": RECORDS
    | {
        "families",
        "runtime",
        "balance",
        "data",
        "models",
        "training",
        "setup",
        "sharding",
        "cluster",
    },
    "jaxmllm/cluster": RECORDS
    | {"runtime", "balance", "experts", "models", "training", "setup", "sharding"},
    "jaxmllm/train.py": {"config", "families", "runtime", "training", "setup"},
    "jaxmllm/setup": RECORDS
    | {"families", "runtime", "attention", "balance", "data", "models", "training", "sharding"},
    "jaxmllm/training": RECORDS | {"families", "runtime", "balance", "data", "models", "sharding"},
    "jaxmllm/models": {
        "config",
        "phases",
        "trainable",
        "attention",
        "experts",
        "row_format",
        "sharding",
    },
    "jaxmllm/data": RECORDS | {"attention", "balance"},
    "jaxmllm/balance": {"config", "phases", "arrays", "compiled", "sharding"},
    "jaxmllm/attention": {"config", "arrays", "compiled", "sharding"},
    "jaxmllm/experts": {"config", "sharding"},
    "jaxmllm/runtime": {"config"},
    "jaxmllm/families": {"config"},
    "jaxmllm/phases.py": {"config"},
    "jaxmllm/trainable.py": {"config"},
    "jaxmllm/config": set(),
    "jaxmllm/row_format.py": set(),
    "jaxmllm/arrays.py": set(),
    "jaxmllm/compiled.py": set(),
    "sharding": set(),
}
PLANNER = {  # the same for the rooms inside jaxmllm/balance
    "stages": {"sizes", "statistics", "rows", "records", "costs"},
    "sizes": {"step_plan", "statistics", "exchange", "rows", "records", "costs"},
    "validate_plan": {"exchange", "records"},
    "step_plan": {"statistics", "exchange", "rows", "records"},
    "statistics": {"rows", "records", "costs"},
    "exchange": {"rows", "records"},
    "rows": {"records"},
    "records": {"costs"},
    "costs": set(),
}
DATA = {  # and for the rooms inside jaxmllm/data
    "corpus": {"index", "sources", "text", "media", "printable"},
    "index": {"sources", "text", "media", "printable"},
    "batches": {"rows", "sources"},
    "sources": {"text", "media", "printable"},
    "rows": {"text", "media", "printable"},
    "text": {"media", "printable"},
    "media": {"printable"},
    "printable": set(),
    "workers": set(),
}
INNER = {"balance": PLANNER, "data": DATA}
OURS = ("jaxmllm", "sharding", "launch", "benchmarks", "tests")
# A benchmark may have the name of the file that it measures
MEASURED = {"ahead.py", "attention.py", "context.py", "diffusion.py", "experts.py"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MENTION = re.compile(
    r"(?<![\w./<{*$])-*((?:\w[\w-]*/)*\w[\w-]*\.py|(?:\w[\w-]*/)+\w[\w-]*\.(?:md|yaml|sh|png))\b"
)
FAMILY = re.compile(r"(?i)llama|mistral|qwen|siglip|whisper|gemma|internvl")
OF_USERS = {"configs/my.yaml", "configs/x.yaml"}


def files(room: str) -> list[Path]:
    """The Python files of a room, or the one file that it is."""
    path = ROOT / room
    return [path] if path.suffix else sorted(path.rglob("*.py"))


def imports(nodes) -> set[str]:
    """Dotted names that nodes of a syntax tree import."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(name: str) -> str:
    """The room that a dotted name lives in: `config` for `jaxmllm.config.schema.Config`."""
    package, *rest = name.split(".")
    return rest[0] if package == "jaxmllm" else package


@pytest.mark.parametrize("room", ARROWS)
def test_imports_follow_the_arrows(room):
    name = Path(room).stem
    for file in files(room):
        for imported in imports(ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
            if imported.split(".")[0] in OURS and room_of(imported) != name:
                assert room_of(imported) in ARROWS[room], f"{file} imports {imported}"


@pytest.mark.parametrize("name", INNER)
def test_imports_follow_the_arrows_inside_a_room(name):
    folder = ROOT / "jaxmllm" / name
    arrows = INNER[name]
    assert {path.stem for path in folder.iterdir() if not path.stem.startswith("__")} == set(arrows)
    for file in sorted(folder.rglob("*.py")):
        room = file.relative_to(folder).parts[0].removesuffix(".py")
        for imported in imports(ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
            if imported.startswith(f"jaxmllm.{name}.") and imported.split(".")[2] != room:
                assert imported.split(".")[2] in arrows[room], f"{file} imports {imported}"


@pytest.mark.parametrize("arrows", [ARROWS, *INNER.values()])
def test_arrows_go_one_way(arrows):
    rooms = [Path(room).stem for room in arrows]
    for index, (room, below) in enumerate(arrows.items()):
        assert below <= set(rooms[index + 1 :]), (
            f"{room} imports a room that does not stand below it"
        )


def test_every_room_has_its_arrows():
    rooms = {
        *ROOT.glob("jaxmllm/*.py"),
        *(path.parent for path in ROOT.glob("jaxmllm/*/__init__.py")),
    }
    assert {ROOT / room for room in ARROWS} - {ROOT / "sharding"} == rooms - {
        ROOT / "jaxmllm/__init__.py"
    }


@pytest.mark.parametrize("part", ["jaxmllm/models", "jaxmllm/balance", "sharding"])
def test_no_room_but_its_own_knows_a_family(part):
    """Differences between families are data: choices in the config, lines in jaxmllm/families."""
    for file in sorted((ROOT / part).rglob("*.py")):
        families = FAMILY.findall(file.read_text(encoding="utf-8"))
        assert not families, f"{file} names {families}"


@pytest.mark.parametrize("part", ["jaxmllm/balance", "jaxmllm/data"])
def test_worker_processes_stay_light(part):
    """Modules that worker processes import never import jax at module level."""
    for file in sorted((ROOT / part).rglob("*.py")):
        names = imports(ast.parse(file.read_text(encoding="utf-8")).body)
        heavy_imports = {name for name in names if name.split(".")[0] in ("jax", "flax")}
        assert not heavy_imports, f"{file} imports {heavy_imports}"


@pytest.mark.parametrize("room", ["models", "experts", "attention", "balance", "data"])
def test_rooms_that_plan_and_compute_get_sections_of_the_config(room):
    for file in files(f"jaxmllm/{room}"):
        names = imports(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        assert "jaxmllm.config.schema.Config" not in names, f"{file} reads the whole config"


def texts() -> Iterator[tuple[Path, str]]:
    """Texts that people read: whole documents, scripts and configs, and
    docstrings and comments of code.

    The changelog is left out, since it tells of old names.
    """
    for file in all_files():
        if file.name == "CHANGELOG.md":
            continue
        if file.suffix in (".md", ".yaml", ".sh", ".toml") or file.name == "Makefile":
            yield file, file.read_text(encoding="utf-8")
        elif file.suffix == ".py":
            code = file.read_text(encoding="utf-8")
            nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, DOCUMENTED))
            tokens = tokenize.generate_tokens(io.StringIO(code).readline)
            comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
            yield file, "\n".join([*(ast.get_docstring(node) or "" for node in nodes), *comments])


def all_files() -> list[Path]:
    """All files that people write."""
    folders = (*OURS, "docs", "configs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(
        path
        for path in [*files, *ROOT.glob("*.*"), ROOT / "Makefile"]
        if "__pycache__" not in path.parts
    )


def test_files_of_one_name_have_one_subject():
    by_name = defaultdict(list)
    for room in ("jaxmllm", "sharding", "launch", "benchmarks"):
        for file in files(room):
            by_name[file.name].append(file.relative_to(ROOT).as_posix())
    del by_name["__init__.py"]
    for name, paths in by_name.items():
        rooms = [
            path for path in paths if not (name in MEASURED and path.startswith("benchmarks/"))
        ]
        assert len(rooms) == 1, f"{name} means several things: {', '.join(paths)}"


def test_every_file_that_a_text_names_exists():
    ends = {
        "/".join(file.parts[start:]) for file in all_files() for start in range(len(file.parts))
    }
    for file, text in texts():
        for name in MENTION.findall(text):
            assert name in ends or name in OF_USERS, (
                f"{file.relative_to(ROOT)} names {name}, which does not exist"
            )
