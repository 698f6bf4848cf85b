"""
What an audit costs, and what it says of runs in several precisions: the tables and pictures of docs/audit.md.

``python -m benchmarks.audit``; ``--parts cost`` or ``runs`` for one of them.
"""

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from benchmarks.runner import PAPER_SETTINGS, RESULTS, make_model, read_csv, versions, write_csv
from benchmarks.timing import Row, collected, in_turn, spread, use_one_core
from sb3_fp16.audit import AuditCallback

ENV = "Hopper-v5"
COST_STEPS, REPEATS = 20_480, 5
RUN_STEPS, EVERY = 102_400, 10
PRECISIONS = ("fp16", "paper", "bf16", "bf16-sr")
COST_FILE, RUNS_FILE = RESULTS / "audit_cost.csv", RESULTS / "audit_runs.csv"
IMAGES = Path(__file__).parent.parent / "docs" / "images"
# Columns of the runs' table: of all rows with this section, subject and measure the first and last.
_SHOWN = {
    "updates that change nothing": ("iteration", "all weights", "unchanged"),
    "weights that an iteration moves": ("iteration", "all weights", "moved"),
    "movement kept": ("iteration", "all weights", "retained"),
    "SHARP's step to Adam's": ("shadow", "SHARP", "ratio"),
    "its cosine": ("shadow", "SHARP", "cosine"),
    "FP16 Adam's step to Adam's": ("shadow", "Adam in FP16", "ratio"),
}


def cost() -> None:
    """Training with and without, in turn, the two fastest engines and SB3's own."""
    use_one_core()
    rows: list[Row] = []
    for method in ("fp16", "fp32", "sb3"):
        callbacks: dict[str, BaseCallback | None] = {
            "none": None,
            "default": AuditCallback(),
            "every rollout": AuditCallback(every=1, budget=0.3),
        }
        models = [collected(make_model(method, ENV, 0, **PAPER_SETTINGS)) for _ in callbacks]
        works = [
            partial(model.learn, COST_STEPS, callback, reset_num_timesteps=False)
            for model, callback in zip(models, callbacks.values(), strict=True)
        ]
        seconds = in_turn(works, REPEATS)
        for name, times in zip(callbacks, seconds.T, strict=True):
            more = 100 * (times / seconds[:, 0] - 1)
            row = {"method": method, "audits": name, "steps": COST_STEPS, "repeats": REPEATS}
            rows.append({**row, **spread("seconds", times), **spread("more_percent", more), **versions()})
    write_csv(COST_FILE, rows)


def runs() -> None:
    """A run in each precision, audited as it goes: rows, and pictures of two."""
    rows: list[Row] = []
    for precision in PRECISIONS:
        with tempfile.TemporaryDirectory() as folder:
            callback = AuditCallback(folder, every=EVERY, minibatches=32, budget=0.5)
            make_model(precision, ENV, 0, **PAPER_SETTINGS).learn(RUN_STEPS, callback)
            found: list[Row] = [dict(row) for row in read_csv(Path(folder) / "audit.csv")]
            for audit in callback.audits:
                way = audit.own_writeback
                shares = {"unchanged": audit.unchanged} | ({} if way is None else {"retained": way.retained})
                kept = {"timesteps": audit.timesteps, "section": "iteration", "subject": "all weights"}
                found += [{**kept, "measure": name, "value": value} for name, value in shares.items()]
            shutil.copy(Path(folder) / "audit.png", IMAGES / f"audit_{precision}.png")
        rows += [{"env": ENV, "precision": precision, **row} for row in found]
    write_csv(RUNS_FILE, rows)


def cost_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Seconds and what audits add, as Markdown.

    :param rows: of the results file
    """
    lines = ["| training | audits | seconds, median | more, median | min to max |", "|---|---|---:|---:|---:|"]
    for row in rows:
        low, high = (f"{float(row[f'more_percent_{end}']):.0f}" for end in ("min", "max"))
        more = f"{float(row['more_percent_median']):.0f} % | {low} to {high} %" if row["audits"] != "none" else " | "
        lines.append(f"| {row['method']} | {row['audits']} | {float(row['seconds_median']):.1f} | {more} |")
    return "\n".join(lines)


def runs_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    First and last audit of each run as Markdown.

    :param rows: of the results file
    """
    lines = [f"| precision | {' | '.join(_SHOWN)} |", "|---|" + "---:|" * len(_SHOWN)]
    for precision in PRECISIONS:
        cells = []
        for section, subject, measure in _SHOWN.values():
            wanted = {"precision": precision, "section": section, "subject": subject, "measure": measure}
            found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
            found.sort(key=lambda row: int(row["timesteps"]))
            cells.append(" to ".join(f"{float(row['value']):.3g}" for row in (found[0], found[-1])))
        lines.append(f"| `{precision}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=("cost", "runs"), default=["cost", "runs"])
    parts = parser.parse_args().parts
    if "cost" in parts:
        cost()
        print(cost_table(read_csv(COST_FILE)))
    if "runs" in parts:
        runs()
        print(runs_table(read_csv(RUNS_FILE)))


if __name__ == "__main__":
    main()
