"""The arrows of docs/ARCHITECTURE.md: which package may import which."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARROWS = {
    "jaxmllm/train.py": {"jaxmllm.config.schema", "jaxmllm.runtime", "jaxmllm.training"},
    "jaxmllm/training": {
        "jaxmllm.config.schema",
        "jaxmllm.balance",
        "jaxmllm.data",
        "jaxmllm.models",
        "jaxmllm.runtime",
        "sharding",
    },
    "jaxmllm/runtime": {"jaxmllm.config.schema"},
    "jaxmllm/models": {"jaxmllm.config.schema", "jaxmllm.balance", "jaxmllm.data", "sharding"},
    "jaxmllm/data": {"jaxmllm.config.schema", "jaxmllm.balance"},
    "jaxmllm/balance": {"jaxmllm.config.schema"},
    "jaxmllm/tools/balance_report.py": {  # a command of its own, not used by the others
        "jaxmllm.config.schema",
        "jaxmllm.data",
        "jaxmllm.models",
        "jaxmllm.training",
        "sharding",
    },
    "jaxmllm/balance/stages/plan.py": {"jaxmllm.config.schema", "sharding"},  # schedules are not ours alone
    "jaxmllm/balance/stages/sizes.py": {"jaxmllm.config.schema", "sharding"},
    "jaxmllm/tools/calibrate.py": {  # a command, too
        "jaxmllm.config.schema",
        "jaxmllm.data",
        "jaxmllm.runtime",
        "jaxmllm.training",
    },
    "jaxmllm/tools/timeline.py": {"jaxmllm.config.schema", "sharding"},  # the same
    "jaxmllm/config/schema.py": {"jaxmllm.config.strict_yaml"},
    "jaxmllm/config/strict_yaml.py": set(),
    "sharding": set(),
}


def files(part: str) -> list[Path]:
    """Python files of a part, without those that have arrows of their own."""
    path = ROOT / part
    return [path] if path.suffix else sorted(set(path.rglob("*.py")) - {ROOT / other for other in ARROWS})


def imports(nodes) -> set[str]:
    """Dotted names that some nodes import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("part", ARROWS)
def test_imports_follow_the_arrows(part):
    own = ".".join(part.removesuffix(".py").split("/")[:2])
    for file in files(part):
        for name in imports(ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
            package = ".".join(name.split(".")[: 1 if name.startswith("sharding") else 2])
            if package.startswith(("jaxmllm", "sharding", "launch", "benchmarks", "tests")) and package != own:
                assert package in ARROWS[part], f"{file} imports {name}"


def test_every_package_has_its_arrows():
    parts = {*ROOT.glob("jaxmllm/*.py"), *(path.parent for path in ROOT.glob("jaxmllm/*/__init__.py"))}
    arrows = {ROOT / part for part in ARROWS if part.startswith("jaxmllm")} | {ROOT / "jaxmllm/__init__.py"}
    assert {path for path in arrows if path.is_dir() or path.parent == ROOT / "jaxmllm"} == parts


@pytest.mark.parametrize("part", ["jaxmllm/balance", "jaxmllm/data"])
def test_worker_processes_stay_light(part):
    """What they import of ours never imports jax at module level."""
    for file in sorted((ROOT / part).rglob("*.py")):
        names = imports(ast.parse(file.read_text(encoding="utf-8")).body)
        heavy = {name for name in names if name.split(".")[0] in ("jax", "flax")}
        assert not heavy, f"{file} imports {heavy}"
