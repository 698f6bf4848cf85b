"""The paper's figures beside ours, computed from the committed results (paper Sec. 4)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import ablations, boundary, gpu, learning, performance, stages, state_bytes, stress
from benchmarks.comparison import Rows, Scores, in_brackets, spread_of
from benchmarks.learning import SEEDS
from benchmarks.runner import curve_of, read_csv
from benchmarks.timing import Array


class Found(NamedTuple):
    """
    What the results say of a claim.

    :param ours: our figure, as text
    :param agrees: whether it supports the paper's
    """

    ours: str
    agrees: bool


class Claim(NamedTuple):
    """
    One of the paper's.

    :param section: of the paper
    :param what: is claimed
    :param paper: its figure
    :param ours: from the results; None while runs are missing
    :param reason: the most likely one why ours differs, for a claim that does
    """

    section: str
    what: str
    paper: str
    ours: Callable[[], Found | None]
    reason: str = ""


# 4.1


def norms() -> Found | None:
    """Gradient norms of the stress inputs."""
    rows = read_csv(stress.FILE)
    if not rows:
        return None
    naive, ours, total = (int(rows[0][name]) for name in ("naive_finite", "ours_finite", "norms"))
    return Found(f"{total - naive} of {total}; {ours} of {total}", (naive, ours) == (0, total))


def residual_error() -> Found | None:
    """Log-ratios of Hopper's policies."""
    rows = _complete(stages.FILE, len(stages.SEEDS), env="Hopper-v5")
    if rows is None:
        return None
    absolute, residual = (_values(rows, f"ratio {way}") for way in ("absolute_fp16", "residual_twosum"))
    factor = float(np.median(absolute / residual))
    text = f"{np.median(absolute):.2e}; {np.median(residual):.1e}; {factor:.0f} times smaller"
    return Found(text, bool(5e-4 < np.median(absolute) < 2e-3 and factor > 10))


def _optimizers(what: str) -> list[Array] | None:
    """A figure of Adam in FP16 and of the paper's SHARP, shape (runs, updates) each; None while runs are missing."""
    rows = _complete(stages.FILE, len(stages.SEEDS) * len(stages.ENVS))
    return None if rows is None else [_values(rows, f"{of} {what}") for of in ("Adam in FP16", "paper")]


def second_moments() -> Found | None:
    """Zeros."""
    if (found := _optimizers("zeroed")) is None:
        return None
    adam, sharp = found
    text = f"{_span(100 * adam)} %; {_span(100 * sharp, '.2g')} %"
    return Found(text, bool(np.median(adam) > 0.5 and np.median(sharp) < 0.01))


def step_sizes() -> Found | None:
    """Size of a step over that of FP32's Adam."""
    if (found := _optimizers("update")) is None:
        return None
    adam, sharp = found
    text = f"{_span(adam, '.0f')}; {_span(sharp, '.2f')}"
    return Found(text, bool(np.median(adam) > 10 and abs(np.median(sharp) - 1) < 0.1))


def swallowed() -> Found | None:
    """Updates that round-to-nearest drops, early and late."""
    rows = _complete(stages.FILE, len(stages.SEEDS) * len(stages.ENVS))
    if rows is None:
        return None
    early, *_, late = 100 * _values(rows, "stuck nearest").mean(axis=0)
    text = f"{early:.0f} % after {stages.AFTER[0]} rollouts, {late:.0f} % after {stages.AFTER[-1]}"
    return Found(text, bool(late > 50 and late > early + 10))


# 4.2


def _aucs(*modules: str) -> list[Array] | None:
    """Of the seeds of the paper's method with some modules, NaN for a crash; None while runs are missing."""
    found = []
    for names in modules:
        rows = _complete(ablations.FILE, len(SEEDS), setting=f"paper {names}" if names else "none")
        if rows is None:
            return None
        found.append(np.array([float(row["return_auc"]) for row in rows]))
    return found


def _worth(auc: Array) -> float:
    """Mean, with a crash worse than any return."""
    return float(np.nan_to_num(auc, nan=-np.inf).mean())


def taken_away() -> Found | None:
    """All, without A and without B."""
    auc = _aucs("ABC", "BC", "AC")
    if auc is None:
        return None
    every, *others = map(_worth, auc)
    return Found("; ".join(map(spread_of, auc)), every > max(others))


def endpoints() -> Found | None:
    """Standard deviation of final returns: all, without A, without B."""
    rows = [_complete(ablations.FILE, len(SEEDS), setting=f"paper {names}") for names in ("ABC", "BC", "AC")]
    if any(of is None for of in rows):
        return None
    deviations = [np.std([float(row["final_return"]) for row in of or ()], ddof=1) for of in rows]
    every, *others = (np.inf if np.isnan(deviation) else float(deviation) for deviation in deviations)
    return Found(_listed(deviations, ".0f"), every < min(others))


def crashes() -> Found | None:
    """Without C, and naive."""
    auc = _aucs("AB", "")
    if auc is None:
        return None
    return Found("; ".join(map(spread_of, auc)), bool(np.isnan(auc).all()))


def put_back() -> Found | None:
    """C, A and C, all."""
    auc = _aucs("C", "AC", "ABC")
    if auc is None:
        return None
    one, two, three = map(_worth, auc)
    return Found("; ".join(map(spread_of, auc)), -np.inf < one < two < three)


# 4.3


def _scores(ours: str) -> Scores | None:
    scores = Scores.of(read_csv(learning.FILE), (*learning.OTHERS, ours))
    return scores if len(scores.pairs) == len(learning.TASKS) * len(SEEDS) else None


def ranks(ours: str) -> Callable[[], Found | None]:
    """
    Mean rank, and pairs ranked first.

    :param ours: ``paper`` or ``fp16``
    """

    def found() -> Found | None:
        scores = _scores(ours)
        if scores is None:
            return None
        order = [scores.methods.index(method) for method in (ours, *learning.OTHERS)]
        means, firsts = scores.ranks().mean(axis=1)[order], scores.firsts()[order]
        text = f"{_listed(means, '.2f')}; first in {_listed(firsts, 'd')}"
        return Found(text, bool(means[0] < means[1:].min() and firsts[0] > firsts[1:].max()))

    return found


def pairs(ours: str) -> Callable[[], Found | None]:
    """
    Pairs with the higher AUC.

    :param ours: ``paper`` or ``fp16``
    """

    def found() -> Found | None:
        scores = _scores(ours)
        if scores is None:
            return None
        wins = [scores.wins(ours, other) for other in learning.OTHERS]
        return Found(f"{_listed(wins, 'd')} of {len(scores.pairs)}", min(wins) >= 20 / 30 * len(scores.pairs))

    return found


def difference(ours: str, other: str) -> Callable[[], Found | None]:
    """
    Of normalised AUC.

    :param ours: ``paper`` or ``fp16``
    :param other: what it is compared with
    """

    def found() -> Found | None:
        scores = _scores(ours)
        if scores is None:
            return None
        interval = scores.normalised_difference(ours, other)
        agrees = interval.low > 0 if other == "amp-fp16" else interval.low <= 0 <= interval.high
        return Found(in_brackets(interval), agrees)

    return found


def best_tasks() -> Found | None:
    """Tasks on which the paper's method has the highest mean AUC."""
    scores = _scores("paper")
    if scores is None:
        return None
    worth = {env: [_worth(auc) for auc in scores.of_task(env)] for env in scores.tasks}
    best = [env.removesuffix("-v5") for env, of in worth.items() if scores.methods[int(np.argmax(of))] == "paper"]
    agrees = {"Walker2d", "Humanoid", "InvertedDoublePendulum"} <= set(best)
    return Found(", ".join(best) or "none", agrees)


def same_as_sb3() -> Found | None:
    """Our FP32 against SB3's PPO."""
    scores = Scores.of(read_csv(learning.FILE), ("sb3", "fp32"))
    if len(scores.pairs) < len(learning.TASKS_OF_SB3) * len(SEEDS):
        return None
    interval = scores.normalised_difference("fp32", "sb3")
    starts = {(r["method"], r["env"], r["seed"]): curve_of(r)[1, 0] for r in read_csv(learning.FILE)}
    own, theirs = (
        np.array([starts[(method, pair[0], pair[1])] for pair in scores.pairs]) for method in ("fp32", "sb3")
    )
    same = np.isclose(own, theirs, rtol=1e-3, atol=0.1)
    text = f"{in_brackets(interval)}; same return before training in {same.sum()} of {len(same)}"
    return Found(text, bool(same.all()) and interval.low <= 0 <= interval.high and interval.high - interval.low < 0.5)


# 4.4


def state_saved() -> Found | None:
    """Optimizer state of the paper's SHARP."""
    rows = [row for row in read_csv(state_bytes.FILE) if row["precision"] == "paper"]
    if not rows:
        return None
    saved = [float(row["saved_percent"]) for row in rows]
    last = f"{float(rows[-1]['adam_mib']):.2f} to {float(rows[-1]['sharp_mib']):.2f} MiB"
    agrees = max(saved) > 74.8 and min(saved) > 71.6 and last == "64.70 to 16.23 MiB"
    return Found(f"{min(saved):.1f} to {max(saved):.1f} %; {last}", agrees)


def fp32_share() -> Found | None:
    """FP32 elements of the training state."""
    rows = read_csv(state_bytes.FILE)
    if not rows:
        return None
    largest = max(float(row["fp32_percent"]) for row in rows)
    return Found(f"at most {largest:.3f} %", largest < 0.1)


def _speed(rows: Rows, column: str) -> Array:
    """Of the paper's method over FP32's, by width and batch."""
    return 1 / np.array([float(row[column]) for row in rows if row["method"] == "paper"])


def gpu_update() -> Found | None:
    """The paper's method against FP32 on a GPU."""
    speed = _speed(read_csv(gpu.PARTS["update"].file), "ms_ratio_to_fp32_median")
    return Found(f"{_span(speed, '.2f')}x", int((speed > 1.16).sum()) >= len(speed) - 1) if len(speed) else None


def gpu_peak() -> Found | None:
    """Peak memory on a GPU at width 2048."""
    rows = [row for row in read_csv(gpu.PARTS["memory"].file) if row["width"] == "2048"]
    if not rows:
        return None
    peaks = {row["method"]: float(row["peak_mib"]) for row in rows}
    saved = 100 * (1 - peaks["paper"] / peaks["fp32"])
    return Found(f"{saved:.1f} %, {peaks['fp32']:.2f} to {peaks['paper']:.2f} MiB", saved > 40)


def cpu_update() -> Found | None:
    """The paper's method against FP32 on a CPU."""
    rows = read_csv(performance.FILE)
    if len(rows) < len(performance.SHAPES) * len(performance.MEASURED):
        return None
    speed = _speed(rows, "ratio_to_fp32_median")
    return Found(f"{_span(speed, '.2f')}x", int((speed > 1.16).sum()) >= len(speed) - 1)


def cpu_memory() -> Found | None:
    """Memory of a model and its update against FP32's on a CPU."""
    rows = read_csv(performance.FILE)
    if len(rows) < len(performance.SHAPES) * len(performance.MEASURED):
        return None
    peaks = {(r["width"], r["batch_size"], r["method"]): float(r["peak_mib_median"]) for r in rows}
    saved = [1 - peaks[str(w), str(b), "paper"] / peaks[str(w), str(b), "fp32"] for w, b in performance.SHAPES]
    return Found(f"up to {100 * max(saved):.1f} %", max(saved) > 0.4)


# 4.5


def in_bf16() -> Found | None:
    """AUC that BF16 retains."""
    rows = [*read_csv(boundary.EXPONENT_FILE), *read_csv(learning.FILE)]
    scores = Scores.of(rows, ("bf16", "paper"))
    if len(scores.pairs) < len(learning.TASKS) * len(SEEDS):
        return None
    shares = np.array([boundary.retained(scores, env) for env in scores.tasks])
    return Found(f"{_span(shares)} %", bool(shares.min() > 0 and shares.max() < 90))


def significands() -> Found | None:
    """Mean AUC from E5M10 to E5M5."""
    rows = _complete(boundary.SIGNIFICAND_FILE, len(SEEDS) * len(boundary.FORMATS))
    if rows is None:
        return None
    auc = [np.array([float(r["return_auc"]) for r in rows if r["format"] == kind]) for kind in boundary.FORMATS]
    ten, nine, eight, seven, *short = map(_worth, auc)
    agrees = (
        nine > 0.5 * ten and nine > max(eight, seven) and max(eight, seven) > max(short) and max(short) < 0.25 * ten
    )
    return Found("; ".join(map(spread_of, auc)), agrees)


CLAIMS = (
    Claim("3", "FP32 elements of the training state", "below 0.1 %", fp32_share),
    Claim("4.1", "norms of 24 large gradients: not finite by squaring in FP16; finite when scaled", "24; 24", norms),
    Claim(
        "4.1",
        "Hopper, error of log π/π₀ in FP16: absolute; from differences of parameters",
        "1.07e-3; 4.7e-5; 23 times smaller",
        residual_error,
    ),
    Claim("4.1", "second moments that are zero: Adam in FP16; as shared roots", "64.55 %; 0.58 %", second_moments),
    Claim("4.1", "size of a step over FP32 Adam's: Adam in FP16; roots", "124.07; 1.0722", step_sizes),
    Claim("4.1", "updates that change no FP16 weight become many later in training", "no figure", swallowed),
    Claim("4.2", "AUC of all modules; without A; without B", "highest; lower; lower", taken_away),
    Claim("4.2", "standard deviation of final returns of the same", "lowest; higher; higher", endpoints),
    Claim("4.2", "without C; none of them", "Crash; Crash", crashes),
    Claim("4.2", "AUC of C; A and C; all", "293.3; 465.8; 618.3", put_back),
    Claim(
        "4.3",
        "mean rank of the paper's method, FP32, AMP-FP16, AMP-BF16",
        "1.90, 2.83, 2.63, 2.63; first in 17, 7, 5, 1",
        ranks("paper"),
    ),
    Claim("4.3", "the same with `fp16`", "–", ranks("fp16")),
    Claim("4.3", "higher AUC than FP32, AMP-FP16, AMP-BF16", "20, 21, 22 of 30", pairs("paper")),
    Claim("4.3", "the same with `fp16`", "–", pairs("fp16")),
    Claim("4.3", "normalised AUC over AMP-FP16", "0.208 [0.026, 0.371]", difference("paper", "amp-fp16")),
    Claim("4.3", "the same over FP32", "not told apart: includes 0", difference("paper", "fp32")),
    Claim("4.3", "the same over AMP-BF16", "not told apart: includes 0", difference("paper", "amp-bf16")),
    Claim(
        "4.3", "tasks with the highest mean AUC", "Walker2d, Humanoid, InvertedDoublePendulum among them", best_tasks
    ),
    Claim("4.3", "our `fp32` is SB3's PPO: normalised AUC over it", "–", same_as_sb3),
    Claim("4.4", "optimizer state saved; at width 2048", "71.7 to 74.9 %; 64.70 to 16.23 MiB", state_saved),
    Claim("4.4", "update against FP32's on a GPU, nine configurations", "1.16 to 2.03x in eight", gpu_update),
    Claim("4.4", "the same on a CPU", "–", cpu_update),
    Claim("4.4", "peak memory saved on a GPU, width 2048", "44.5 %, 181.89 to 101.01 MiB", gpu_peak),
    Claim("4.4", "memory saved on a CPU", "–", cpu_memory),
    Claim("4.5", "AUC that BF16 retains, by task", "10.7 to 79.6 %", in_bf16),
    Claim("4.5", "AUC of E5M10, M9, M8, M7, M6, M5", "M9 learns, M8 and M7 less, M6 and M5 little", significands),
)


def table(_: Rows = ()) -> str:
    """Every claim as Markdown; it reads the results files of all of them."""
    lines = ["| section | what | paper | here | agrees |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        found = claim.ours()
        here, agrees = ("not run yet", "") if found is None else (found.ours, "yes" if found.agrees else "no")
        note = f": {claim.reason}" if agrees == "no" else ""
        lines.append(f"| {claim.section} | {claim.what} | {claim.paper} | {here} | {agrees}{note} |")
    return "\n".join(lines)


def _complete(file: Any, runs: int, **having: str) -> list[dict[str, str]] | None:
    """Rows of a results file with given values; None while there are fewer than there will be."""
    rows = [row for row in read_csv(file) if all(row[name] == value for name, value in having.items())]
    return rows if len(rows) >= runs else None


def _values(rows: Sequence[Mapping[str, Any]], column: str) -> Array:
    """Numbers of a column of lists, shape (rows, numbers)."""
    return np.array([[float(x) for x in row[column].split()] for row in rows])


def _span(values: Array, digits: str = ".1f") -> str:
    return f"{values.min():{digits}} to {values.max():{digits}}"


def _listed(values: Sequence[Any] | Array, digits: str) -> str:
    return ", ".join(f"{value:{digits}}" for value in values)
