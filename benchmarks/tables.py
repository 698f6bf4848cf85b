"""
Put the committed results into README.md and docs; ``--check`` only says whether they are there.

``python -m benchmarks.tables``
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    ablations,
    audit,
    boundary,
    claims,
    cpu,
    fidelity,
    finetuning,
    gpu,
    halfcheetah,
    learning,
    performance,
    recurrent_toy,
    split_k,
    stages,
    state_bytes,
    sticking,
    stress,
    sweep,
    zoo,
)
from benchmarks.runner import read_csv

ROOT = Path(__file__).parent.parent
README, DETAILS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
PICTURES: dict[str, tuple[Path, Callable[..., None]]] = {
    "halfcheetah": (halfcheetah.FILE, halfcheetah.draw),
    "learning": (learning.FILE, learning.draw),
    "significand": (boundary.SIGNIFICAND_FILE, boundary.draw),
    "stages": (stages.FILE, stages.draw),
    "recurrent_toy": (recurrent_toy.SEQUENCES_FILE, recurrent_toy.draw),
    "remedies": (finetuning.FILE, finetuning.draw),
    "sweep": (sweep.FILE, sweep.draw),
}
Tables = dict[str, tuple[Path, Callable[..., str]]]
# On the README and on the pages of the classes.
OF_PPO: Tables = {
    "halfcheetah": (halfcheetah.FILE, halfcheetah.table),
    **{name: (cpu.PARTS[name].file, cpu.PARTS[name].table) for name in ("update", "end_to_end")},
}
OF_SHARP: Tables = {"state_bytes": (state_bytes.FILE, state_bytes.table)}
# Results file and what makes Markdown of its rows, by the page and the name in its marks.
PAGES: dict[Path, Tables] = {
    README: {**OF_PPO, **OF_SHARP},
    ROOT / "docs" / "modules" / "ppo_fp16.md": OF_PPO,
    ROOT / "docs" / "modules" / "sharp.md": OF_SHARP,
    DETAILS: {
        **{
            name: (cpu.PARTS[name].file, cpu.PARTS[name].table)
            for name in ("floor", "tasks", "widths", "scaling", "memory")
        },
        **{f"gpu_{name}": (part.file, part.table) for name, part in gpu.PARTS.items() if part.file.exists()},
    },
    ROOT / "docs" / "reproduction.md": {
        "claims": (stress.FILE, claims.table),  # and all others
        "stages": (stages.FILE, stages.table),
        "stages_ratios": (stages.FILE, stages.ratios_table),
        "stages_optimizers": (stages.FILE, stages.optimizers_table),
        "ablations_paper": (ablations.FILE, ablations.paper_table),
        "ablations_fp16": (ablations.FILE, ablations.fp16_table),
        "learning": (learning.FILE, learning.table),
        "learning_ranks": (learning.FILE, learning.ranks_table),
        "learning_pairs": (learning.FILE, learning.pairs_table),
        "learning_sb3": (learning.FILE, learning.sb3_table),
        "performance": (performance.FILE, performance.table),
        **{f"boundary_{name}": (part.file, part.table) for name, part in boundary.PARTS.items()},
    },
    ROOT / "docs" / "rl_zoo.md": {"zoo": (zoo.FILE, zoo.table)},
    ROOT / "docs" / "audit.md": {
        "audit_runs": (audit.RUNS_FILE, audit.runs_table),
        "audit_cost": (audit.COST_FILE, audit.cost_table),
    },
    ROOT / "docs" / "precision.md": {
        **{f"sticking_{name}": (part.file, part.table) for name, part in sticking.PARTS.items()},
        "fidelity": (fidelity.FILE, fidelity.table),
        "sweep": (sweep.FILE, sweep.table),
        "sweep_confirmation": (sweep.FILE, sweep.confirmation),
        "split_k": (split_k.FILE, split_k.table),
        "recurrent_toy": (recurrent_toy.FILE, recurrent_toy.table),
        "recurrent_toy_sequences": (recurrent_toy.SEQUENCES_FILE, recurrent_toy.sequence_table),
        "recurrent_toy_slices": (recurrent_toy.FILE, recurrent_toy.slice_table),
    },
}


def filled(page: Path) -> str:
    """
    The text of a page with each table made anew from its results file.

    :param page: with marks ``<!-- name --> ... <!-- end -->``
    :raises ValueError: if it lacks one
    """
    text = page.read_text()
    for name, (file, table) in PAGES[page].items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, mark, rest = text.partition(start)
        if not mark or end not in rest:
            raise ValueError(f"{page.name} has no place for the table {name}: {start}{end}")
        rows = read_csv(file)
        text = before + start + (table(rows) if rows else "No results yet.") + "\n" + rest[rest.index(end) :]
    return text


def main() -> None:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is not up to date")
    check = parser.parse_args().check
    for page in PAGES:
        text = filled(page)
        if not check:
            page.write_text(text)
        elif text != page.read_text():
            sys.exit(f"{page.name} is not what the results give: run benchmarks.tables")
    if not check:
        for name, (file, draw) in PICTURES.items():
            if file.exists():
                draw(read_csv(file), ROOT / "docs" / "images" / f"{name}.png")


if __name__ == "__main__":
    main()
