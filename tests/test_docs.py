"""README and docs say what the code and the committed results say."""

import contextlib
import io
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

import sb3_fp16
from benchmarks import tables
from benchmarks.runner import read_csv
from docs import figures, lines

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts]
# A Python block, and the text block right after it if there is one: what it prints.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", flags=re.S | re.M)
SECTIONS = ["Notes", "Can I use?", "Example", "Results", "How to replicate", "Parameters"]
TIMESTEPS = 2048


class Block(NamedTuple):
    name: str
    code: str
    printed: str | None


BLOCKS = [
    Block(f"{page.relative_to(ROOT)} {number}", *match.groups())
    for page in (ROOT / "README.md", *PAGES)
    for number, match in enumerate(BLOCK.finditer(page.read_text()))
]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # on the page about deploying
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_code_runs_and_prints_what_the_page_says(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shortened = re.sub(
        r"total_timesteps=([\d_]+)", lambda match: f"total_timesteps={min(int(match[1]), TIMESTEPS)}", block.code
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(shortened, block.name, "exec"), {"__name__": "page"})
    assert block.printed in (None, printed.getvalue())


def test_every_block_of_code_is_found():
    assert len(BLOCKS) > 25
    for page in (ROOT / "README.md", *PAGES):
        text = page.read_text()
        assert len(BLOCK.findall(text)) == len(re.findall(r"^ *```+ *py", text, flags=re.M)), page.name


def pages_below(page: Path) -> set[Path]:
    """Those that a page's tables of contents lead to, and itself."""
    found = {page}
    for toctree in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(), flags=re.S | re.M):
        entries = [line for line in toctree.splitlines() if line and not line.startswith(":")]
        found = found.union(*(pages_below(page.parent / f"{entry}.md") for entry in entries))
    return found


def test_every_page_is_reached_from_the_index():
    assert pages_below(DOCS / "index.md") == set(PAGES)


def test_pages_of_classes_have_sb3s_order_and_leave_none_out():
    documented = ""
    for page in sorted((DOCS / "modules").glob("*.md")):
        text = page.read_text()
        documented += text
        assert re.findall(r"^## (.*)$", text, flags=re.M) == SECTIONS, page.name
    names = {*sb3_fp16.__all__, "RolloutBufferFP16", "Audit", "AuditCallback"} - {"__version__"}
    for name in names:
        assert re.search(rf"autoclass:: sb3_fp16[\w.]*\.{name}$", documented, flags=re.M), name


@pytest.mark.skipif(
    not all(map(find_spec, ("sphinx", "myst_parser", "furo", "sphinx_copybutton"))), reason="Sphinx is not installed"
)
def test_sphinx_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", DOCS, tmp_path / "html"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.relative_to(tmp_path / "html") for path in (tmp_path / "html").rglob("*.html")} >= {
        page.relative_to(DOCS).with_suffix(".html") for page in PAGES
    }
    # What SB3 says of the parameters that a class shares with its own.
    assert "Discount factor" in (tmp_path / "html" / "modules" / "ppo_fp16.html").read_text()


def test_pictures_of_the_numerics_show_what_their_page_says():
    moved = {way: float(figures.written_back(way, 200, 4096)[-1].mean()) / 2e-4 for way in figures.WRITEBACKS}
    assert moved["nearest"] == 0
    assert all(moved[way] == pytest.approx(1, abs=0.02) for way in ("stochastic", "dithered", "residual"))
    assert moved["swallowed"] > 1.5
    assert [figures.norms(x)[0] for x in (1.7e-4, 4.0)] == [0, float("inf")]
    assert all(figures.norms(x) == pytest.approx((1, 1), rel=0.01) for x in (0.01, 3.9))
    assert figures.norms(6e4)[1] == pytest.approx(1, rel=1e-5)
    small, large = figures.log_ratio_error(1e-3), figures.log_ratio_error(0.1)
    assert large["absolute_fp16"] < 2 * small["absolute_fp16"], "whatever its size"
    assert large["residual_twosum"] > 50 * small["residual_twosum"], "in proportion"
    assert small["residual_fp32"] < 1e-9
    assert figures.stored_size(1.5e-4, None) == 0
    assert figures.stored_size(1.5e-4, 2.0**16) == pytest.approx(1, rel=1e-3)
    reached = {rounding: figures.decay(rounding, 8000)[-1] for rounding in ("nearest", "stochastic", "dithered")}
    assert reached["nearest"] > 3e-3
    assert all(reached[rounding] == pytest.approx(1e-3, rel=0.1) for rounding in ("stochastic", "dithered"))


def test_pictures_of_the_numerics_are_drawn(tmp_path):
    figures.main(tmp_path)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in figures.IMAGES.glob("numerics_*.png")}
    text = (DOCS / "guide" / "numerics.md").read_text()
    assert all(f"images/{name}" in text for name in drawn)


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_the_committed_results(page):
    assert tables.filled(page) == page.read_text()


def test_readme_figures_of_the_stress_test():
    rows = read_csv(ROOT / "benchmarks" / "results" / "stress.csv")
    ratios = sorted(float(row["mae_ratio"]) for row in rows)
    median = (ratios[4] + ratios[5]) / 2
    claim = f"{median:.0f} times smaller in FP16 ({ratios[0]:.0f} to {ratios[-1]:.0f} over ten seeds)"
    assert claim in " ".join(README.split())
    assert max(float(row["residual_fp32"]) for row in rows) < 1e-8
    assert {(row["norms"], row["naive_finite"], row["ours_finite"]) for row in rows} == {("24", "0", "24")}


def test_paper_map_leads_to_lines_and_tests():
    text = lines.PAGE.read_text()
    assert lines.located(text) == text, "make format puts the lines right"
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", text, flags=re.M)
    rows = [row for row in rows if row[0] not in ("paper", "statement")]
    assert len(rows) > 35
    for statement, where, checked in rows:
        assert len(lines.REFERENCE.findall(where)) == len(re.findall("`[^`]+`", where)) / 2 > 0, statement
        names = re.findall(r"`(\w+)`", checked)
        assert names, statement
        assert all(f"def {name}(" in tests for name in names), statement
    assert len(lines.REFERENCE.findall(text)) >= len(rows) + 6
    assert all(f"def {name}(" in tests for name in re.findall(r"`(test_\w+)`", text))


def test_a_line_that_is_gone_or_not_the_only_one_is_named():
    for code, found in (("no such line", 0), ("import", 2)):
        with pytest.raises(ValueError, match=rf"docs/lines.py has {found} lines with '{code}'"):
            lines.located(f"`docs/lines.py:1` `{code}`")
    assert lines.located("`docs/lines.py:1` `def located(`") != "`docs/lines.py:1` `def located(`"


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *PAGES, ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
