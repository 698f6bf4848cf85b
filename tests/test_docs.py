"""README and docs say what the code and the committed results say."""

import re
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.runner import read_csv

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_code_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.sub(r"total_timesteps=[\d_]+", "total_timesteps=2048", BLOCKS[number])
    exec(compile(code, f"README block {number}", "exec"), {})


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


def test_paper_map_names_code_and_tests_that_exist():
    text = (ROOT / "docs" / "paper_map.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    package = "".join(path.read_text() for path in (ROOT / "sb3_fp16").rglob("*.py"))
    names = re.findall(r"`([^`]+)`", text)
    assert len(names) > 30
    for name in names:
        if name.endswith(".py"):
            assert (ROOT / name).exists(), name
        elif name.startswith("test_"):
            assert f"def {name}(" in tests, name
        else:
            last = name.split(".")[-1]
            assert re.search(rf"(def|class) {last}\b|\"{last}\"", package), name


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
