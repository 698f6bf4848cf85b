"""The import direction of the package, and promises of its metadata."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sb3_fp16"

# Each room may import from the rows above it, and `engines` inside itself.
ROWS = (
    {"rounding", "kernels", "distributed"},
    {"precision"},
    {"scalars", "residuals", "sharp"},
    {"buffers", "layers", "distributions"},
    {"policies"},
    {
        "engines",
        "engines.contract",
        "engines.eager",
        "engines.native_plan",
        "engines.native_actor",
        "engines.native",
        "engines.graph",
        "engines.parallel",
    },
    {"saving", "normalization"},
    {"learners"},
    {"ppo"},
    {"__init__"},
    {"audit.statistics", "audit.twin"},
    {"audit.sticking", "audit.optimizer", "audit.mismatch"},
    {"audit.ranges"},
    {"audit.measurements"},
    {"audit.verdicts", "audit.tables"},
    {"audit.report"},
    {"audit.pictures"},
    {"audit.callback", "audit.__main__"},
    {"audit"},
    {"zoo", "export"},
    {"__main__"},
)


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports at top level or below."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module)
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_room_has_its_row():
    assert {room_of(path) for path in FILES} == set().union(*ROWS)


@pytest.mark.parametrize("path", FILES, ids=room_of)
def test_imports_point_one_way(path):
    room = room_of(path)
    row = next(i for i, rooms in enumerate(ROWS) if room in rooms)
    allowed = set().union(*ROWS[:row])
    if room.startswith("engines"):
        allowed |= ROWS[row]
    ours = {name.removeprefix("sb3_fp16.") for name in imports_of(path) if name.startswith("sb3_fp16.")}
    assert ours <= allowed, f"{room} may not import {ours - allowed}"


@pytest.mark.parametrize("room", ["rounding", "scalars", "sharp"])
def test_numerics_know_nothing_of_reinforcement_learning(room):
    names = imports_of(PACKAGE / f"{room}.py")
    assert not any(name.split(".")[0] in ("stable_baselines3", "gymnasium", "rl_zoo3") for name in names)


def test_import_needs_no_development_dependency():
    code = "import sys, sb3_fp16; print([m for m in ('rl_zoo3', 'matplotlib', 'mujoco') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    import stable_baselines3  # noqa: F401  # what SB3 itself imports is not ours to avoid

    loaded = ast.literal_eval(done.stdout.strip())
    assert set(loaded) <= {"matplotlib"}


def test_an_installation_has_every_package():
    named = re.search(r"^packages = (\[.*\])$", (PACKAGE.parent / "pyproject.toml").read_text(), flags=re.M)
    there = {".".join(path.parent.relative_to(PACKAGE.parent).parts) for path in PACKAGE.rglob("__init__.py")}
    assert there == {name for name in ast.literal_eval(named[1]) if (PACKAGE.parent / name.replace(".", "/")).is_dir()}


def test_audits_are_imported_where_they_are_asked_for():
    code = "import sys, sb3_fp16; print('sb3_fp16.audit' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_version_is_the_metadatas():
    from importlib.metadata import version

    import sb3_fp16

    assert sb3_fp16.__version__ == version("sb3_fp16")
