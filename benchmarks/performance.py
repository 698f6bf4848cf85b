"""
Complete updates on a CPU: time, optimizer state and memory in all over widths and minibatches (paper Sec. 4.4, Tables 1
and 2, which are of a GPU; ``benchmarks.gpu`` has those).

Observations of 17 and actions of 6 numbers, two networks of two hidden layers, one core and one thread of torch, a
rollout of random numbers of 2048 samples or two minibatches. Times are ratios to ``fp32`` in turn with it, medians and
ranges over five processes. ``python -m benchmarks.performance [--processes 2]``, about half an hour
"""

import argparse
from itertools import product

import numpy as np

from benchmarks.comparison import Rows
from benchmarks.cpu import peak_of
from benchmarks.gpu import BATCHES, METHODS, NAMES, WIDTHS, Shape, with_rollout
from benchmarks.runner import RESULTS, read_csv, state_bytes, versions, write_csv
from benchmarks.timing import Row, cells, in_new_process, in_turn, spread, use_one_core

MEASURED = ("sb3", *METHODS)
SHAPES = [Shape(*sizes) for sizes in product(WIDTHS, BATCHES)]
EPOCHS = {64: 10, 512: 1, 2048: 1}
"""By width: larger networks take long enough for one."""
PROCESSES, REPEATS = 5, 3
FILE = RESULTS / "performance.csv"


def times_of(shape: Shape, repeats: int) -> list[tuple[float, float]]:
    """
    Milliseconds of an update, and the ratio to what ``fp32`` took in the same repeat, medians, per method.

    :param shape: of the updates
    :param repeats: of all methods in turn
    """
    use_one_core()
    models = [with_rollout(method, shape, EPOCHS[shape.width], "cpu") for method in MEASURED]
    for model in models:
        model.train()
    seconds = in_turn([model.train for model in models], repeats)
    ratios = seconds / seconds[:, [MEASURED.index("fp32")]]
    return [
        (float(1e3 * ms), float(ratio)) for ms, ratio in zip(np.median(seconds, 0), np.median(ratios, 0), strict=True)
    ]


def optimizer_bytes(method: str, width: int) -> int:
    """
    Of a model's optimizer state, counted on its tensors.

    :param method: ``sb3`` or a precision
    :param width: of both hidden layers
    """
    model = with_rollout(method, Shape(width, 512), 1, "cpu")
    model.train()
    return state_bytes(model)["optimizer state"]


def memory_of(method: str, shape: Shape) -> float:
    """
    MiB that a model takes at most in all: weights, gradients, optimizer state, rollout and workspace of an update.

    :param method: ``sb3`` or a precision
    :param shape: of the update
    """
    use_one_core()
    with_rollout(method, Shape(8, 64), 1, "cpu").train()  # loads all code
    return peak_of(lambda: with_rollout(method, shape, 1, "cpu").train())


def measure(shape: Shape, processes: int) -> list[Row]:
    """
    One row per method.

    :param shape: of the updates
    :param processes: whose medians are taken, each with its own repeats
    """
    times = np.array([in_new_process(times_of, shape, REPEATS) for _ in range(processes)])
    rows = []
    for i, method in enumerate(MEASURED):
        peaks = [in_new_process(memory_of, method, shape) for _ in range(processes)]
        rows.append(
            {
                **shape._asdict(),
                "method": method,
                **spread("ms", times[:, i, 0]),
                **spread("ratio_to_fp32", times[:, i, 1]),
                "optimizer_mib": round(in_new_process(optimizer_bytes, method, shape.width) / 2**20, 4),
                **spread("peak_mib", np.array(peaks)),
                "processes": processes,
                "repeats": REPEATS,
                **versions(),
            }
        )
    return rows


def table(rows: Rows) -> str:
    """
    Ratios to FP32 and MiB as Markdown; absolute times belong to one machine and stay in the results file.

    :param rows: of the results file
    """
    lines = [
        "| width | batch | method | update / `fp32`'s, median | min to max | optimizer state, MiB | all memory, MiB |"
    ]
    lines.append("|---:|---:|---|---:|---:|---:|---:|")
    for row in rows:
        start = f"| {row['width']} | {row['batch_size']} | {NAMES[row['method']]}"
        sizes = f"{float(row['optimizer_mib']):.2f} | {float(row['peak_mib_median']):.1f}"
        lines.append(f"{start} | {cells(row, 'ratio_to_fp32', 2)} | {sizes} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the shapes that are missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=PROCESSES, help="per shape")
    processes = parser.parse_args().processes
    for shape in SHAPES:
        rows: list[Row] = list(read_csv(FILE))
        if {(row["width"], row["batch_size"]) for row in rows}.isdisjoint({tuple(map(str, shape))}):
            write_csv(FILE, rows + measure(shape, processes))
            print(f"width {shape.width}, minibatches of {shape.batch_size}", flush=True)
    print(table(read_csv(FILE)))


if __name__ == "__main__":
    main()
