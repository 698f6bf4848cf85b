"""
Optimizer state of SHARP against FP32 Adam, and the FP32 share of the training state, counted on real models.

Observations of 17 and actions of 6 numbers, two networks of two hidden layers (paper Sec. 4.4).
``python -m benchmarks.state_bytes``
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.runner import RESULTS, make_model, versions, write_csv
from sb3_fp16 import PPOFP16

WIDTHS, PRECISIONS = (64, 512, 2048), ("paper", "fp16")
FILE = RESULTS / "state_bytes.csv"


def measure(precision: str, width: int) -> dict[str, Any]:
    """One row: bytes of m and w, of FP32 Adam's two moments, and the FP32 share after one step of the environment."""
    model = make_model(precision, "HalfCheetah-v5", seed=0, policy_kwargs={"net_arch": [width, width]})
    assert isinstance(model, PPOFP16)
    report = model.precision_report()
    sharp = report["optimizer first_moment"].bytes + report["optimizer root_second_moment"].bytes
    adam = 2 * 4 * report["parameters"].elements
    return {
        "precision": precision,
        "width": width,
        "adam_bytes": adam,
        "sharp_bytes": sharp,
        "saved_percent": round(100 * (1 - sharp / adam), 2),
        "adam_mib": round(adam / 2**20, 2),
        "sharp_mib": round(sharp / 2**20, 2),
        "fp32_elements": sum(row.fp32_elements for row in report.state),
        "fp32_percent": round(100 * report.fp32_share, 5),
        **versions(),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    The counts as Markdown.

    :param rows: of the results file
    """
    lines = ["| precision | width | FP32 Adam, MiB | SHARP, MiB | saved | FP32 share of all state |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        sizes = f"{float(row['adam_mib']):.2f} | {float(row['sharp_mib']):.2f} | {row['saved_percent']} %"
        lines.append(f"| `{row['precision']}` | {row['width']} | {sizes} | {float(row['fp32_percent']):.5f} % |")
    return "\n".join(lines)


def main() -> None:
    """Count, write, print."""
    rows = [measure(precision, width) for precision in PRECISIONS for width in WIDTHS]
    write_csv(FILE, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
