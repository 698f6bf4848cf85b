"""
Two implementations of one recurrent policy: what rounding makes of the order of accumulation, over a sequence.

The experiment of "BF16 vs. FP16 in RL Fine-Tuning" (2026), section "A controlled numerical experiment": a residual MLP
of four blocks with SiLU and RMSNorm, width 256, 8192 tokens, the recurrent matrix scaled by 0.9/sqrt(256) and the head
so that logits have a standard deviation of 14. The rollout multiplies matrices in chunks of 64 (``split_k``), the
trainer in one call of BLAS. 128 responses of 2,048 tokens for each of three sampling seeds; every token is scored by
both on the same prefix.

What the document leaves open, and how it is here:

- one step: x = embedding + h·R; per block x ← x + SiLU(RMSNorm(x)·U)·D; h = RMSNorm(x), logits = h·H. h is the state.
- U and D are square; all weights are normal, embeddings with deviation 1, U and D with 1/sqrt(256); RMSNorm has no
  gain.
- rounding points: weights, and the result of each matrix product, SiLU, RMSNorm and addition.
- a response starts from a state of zeros and one token drawn at random.
- KL and d are computed from δ = logits(π) − logits(μ) in FP64, so that normalisers of nearly equal distributions don't
  cancel: log(Z_π/Z_μ) = log1p(Σ μ·expm1(δ)).

Intervals are of responses; the model is one. Another BLAS or CPU gives other small differences and, in time, other
tokens. ``python -m benchmarks.recurrent_toy`` takes about a quarter of an hour on one core; conditions that are in the
results files are not repeated. ``--quick`` shows in seconds whether it runs, and writes nothing.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch as th
from torch import Tensor

from benchmarks.runner import RESULTS, pyplot, read_csv, versions, write_csv
from benchmarks.split_k import split_k
from sb3_fp16.audit.statistics import (
    Interval,
    SequenceRow,
    StepStatistics,
    bootstrap,
    probability_slices,
    sequence_statistics,
)

Array = np.ndarray[Any, np.dtype[Any]]
Product = Callable[[Tensor, Tensor], Tensor]
Row = dict[str, Any]

FILE = RESULTS / "recurrent_toy.csv"
SEQUENCES_FILE = RESULTS / "recurrent_toy_sequences.csv"
SEEDS, RESPONSES, TOKENS = (0, 1, 2), 128, 2048
HORIZONS = tuple(2**power for power in range(4, 12))
# Mean |d| is reported by the probability of the sampled token: slices and where each ends.
SLICES = {"below_1_percent": 0.01, "1_to_10_percent": 0.1, "10_to_50_percent": 0.5, "above_50_percent": np.inf}


@dataclass(frozen=True)
class Size:
    """
    Of the model.

    :param vocabulary: tokens
    :param width: of the residual stream, the hidden layers and the state
    :param blocks: residual ones
    """

    vocabulary: int = 8192
    width: int = 256
    blocks: int = 4


class Condition(NamedTuple):
    """
    What is stored in which format.

    :param name: in tables
    :param body: weights and results below the head
    :param head: its weights, and the logits
    """

    name: str
    body: th.dtype
    head: th.dtype


CONDITIONS = {
    "fp32": Condition("FP32", th.float32, th.float32),
    "fp16": Condition("FP16", th.float16, th.float16),
    "bf16": Condition("BF16", th.bfloat16, th.bfloat16),
    "bf16_fp32_head": Condition("BF16, FP32 head", th.bfloat16, th.float32),
}


class Weights(NamedTuple):
    """
    FP32 tensors, their values in the formats of a condition.

    :param embedding: shape (vocabulary, width)
    :param recurrent: shape (width, width)
    :param up: shape (blocks, width, width)
    :param down: shape (blocks, width, width)
    :param head: shape (width, vocabulary)
    """

    embedding: Tensor
    recurrent: Tensor
    up: Tensor
    down: Tensor
    head: Tensor

    @classmethod
    def draw(cls, size: Size, seed: int = 0) -> "Weights":
        """The initialisation, in FP32."""
        g = th.Generator().manual_seed(seed)
        width, scale = size.width, size.width**-0.5
        return cls(
            th.randn(size.vocabulary, width, generator=g),
            th.randn(width, width, generator=g) * 0.9 * scale,
            th.randn(size.blocks, width, width, generator=g) * scale,
            th.randn(size.blocks, width, width, generator=g) * scale,
            th.randn(width, size.vocabulary, generator=g) * 14 * scale,
        )

    def cast(self, condition: Condition) -> "Weights":
        """What both implementations share."""
        *body, head = self
        embedding, recurrent, up, down = (stored(weight, condition.body) for weight in body)
        return Weights(embedding, recurrent, up, down, stored(head, condition.head))


def stored(values: Tensor, storage: th.dtype) -> Tensor:
    """FP32 values rounded to the nearest of a format, in FP32 again."""
    return values.to(storage).float()


def rms_norm(values: Tensor) -> Tensor:
    """RMSNorm without gain, in FP32."""
    return values * th.rsqrt(values.square().mean(dim=1, keepdim=True) + 1e-6)


def step(
    weights: Weights, condition: Condition, product: Product, tokens: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """
    One implementation reads one token.

    :param weights: cast to the condition
    :param condition: of the rounding points
    :param product: how it multiplies matrices
    :param tokens: shape (responses,)
    :param state: shape (responses, width)
    :return: logits of the next token, shape (responses, vocabulary), and the state after this one
    """

    def rounded(values: Tensor) -> Tensor:
        return stored(values, condition.body)

    stream = rounded(weights.embedding[tokens] + rounded(product(state, weights.recurrent)))
    for up, down in zip(weights.up, weights.down, strict=True):
        hidden = rounded(product(rounded(rms_norm(stream)), up))
        stream = rounded(stream + rounded(product(rounded(th.nn.functional.silu(hidden)), down)))
    state = rounded(rms_norm(stream))
    return stored(product(state, weights.head), condition.head), state


class Scored(NamedTuple):
    """
    Sampled tokens as both implementations see them; each of shape (responses,) or (responses, tokens).

    :param d: log π − log μ of the token
    :param kl: KL(μ‖π) over the whole vocabulary
    :param log_prob: log μ of the token, in nats
    :param entropy: of μ, in nats
    :param state_gap: norm of the difference of their states, relative to that of the rollout's
    """

    d: Array
    kl: Array
    log_prob: Array
    entropy: Array
    state_gap: Array


def sample_and_score(rollout: Tensor, trainer: Tensor, uniform: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """
    Next tokens from the rollout's distribution, by inversion, and what both say of them, in FP64.

    :param rollout: logits, shape (responses, vocabulary)
    :param trainer: logits of the same prefixes
    :param uniform: FP64 draws in [0, 1), shape (responses, 1)
    :return: tokens; d, KL, log μ and entropy, each of shape (responses,)
    """
    logits = rollout.double()
    change = trainer.double() - logits
    logits -= logits.amax(dim=1, keepdim=True)
    mu = logits.exp()
    total = mu.sum(dim=1, keepdim=True)
    mu /= total
    cumulative = mu.cumsum(dim=1)
    tokens = th.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_(max=mu.shape[1] - 1)
    ratio = th.from_numpy(np.expm1(change.numpy()))  # torch's own takes ten times as long
    normaliser = (mu * ratio).sum(dim=1).log1p()
    d = change.gather(1, tokens)[:, 0] - normaliser
    kl = normaliser - (mu * change).sum(dim=1)
    log_total = total.log()[:, 0]
    log_prob = logits.gather(1, tokens)[:, 0] - log_total
    return tokens[:, 0], (d, kl, log_prob, log_total - (mu * logits).sum(dim=1))


def respond(
    weights: Weights,
    condition: Condition,
    seed: int,
    responses: int,
    tokens: int,
    rollout: Product = split_k,
    trainer: Product = th.mm,
) -> Scored:
    """
    Sample responses from the rollout; the trainer reads along.

    :param weights: not cast yet
    :param condition: storage of both
    :param seed: of the first tokens and the sampling
    :param responses: side by side
    :param tokens: of each
    :param rollout: how it multiplies matrices
    :param trainer: how it does
    :return: arrays of shape (responses, tokens)
    """
    rng = np.random.default_rng(seed)
    weights = weights.cast(condition)
    vocabulary, width = weights.embedding.shape
    read = th.from_numpy(rng.integers(vocabulary, size=responses))
    mine = theirs = th.zeros(responses, width)
    # Allocated at once: what is kept of every step, between blocks of 8 MB that are not, would fragment the heap.
    columns = th.empty(len(Scored._fields), responses, tokens, dtype=th.float64)
    for token in range(tokens):
        rollout_logits, mine = step(weights, condition, rollout, read, mine)
        trainer_logits, theirs = step(weights, condition, trainer, read, theirs)
        read, scored = sample_and_score(rollout_logits, trainer_logits, th.from_numpy(rng.random((responses, 1))))
        gap = (mine.double() - theirs.double()).norm(dim=1) / mine.double().norm(dim=1)
        columns[:, :, token] = th.stack((*scored, gap))
    return Scored(*columns.numpy())


def pooled(runs: Sequence[Scored]) -> Scored:
    """Responses of several seeds as one sample."""
    return Scored(*(np.concatenate(column) for column in zip(*runs, strict=True)))


def columns(name: str, interval: Interval) -> Row:
    """Value and ends of an interval as columns."""
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def token_row(scored: Scored) -> Row:
    """Single tokens of one condition; intervals over whole responses."""
    steps = StepStatistics.of(scored.d, scored.kl)
    slices = probability_slices(scored.d, scored.log_prob, [-np.inf, *np.log(list(SLICES.values()))])
    return {
        "responses": len(scored.d),
        "tokens": scored.d.shape[1],
        "mean_abs": steps.mean_abs,
        "zero_fraction": steps.zero_fraction,
        "std": steps.std,
        **columns("kl", bootstrap(scored.kl.mean(axis=1), np.mean)),
        "k1": steps.k1,
        "k3": steps.k3,
        "ratio_minus_1": steps.mean_ratio - 1,
        "ratio_error": steps.mean_ratio_error,
        "entropy": float(scored.entropy.mean()),
        # The first quarter is the transient from equal states.
        "state_gap": float(scored.state_gap[:, scored.d.shape[1] // 4 :].mean()),
        **{f"mean_abs_{name}": row.mean_abs for name, row in zip(SLICES, slices, strict=True)},
        **{f"share_{name}": row.count / steps.count for name, row in zip(SLICES, slices, strict=True)},
    }


def sequence_rows(scored: Scored) -> list[Row]:
    """Sums over prefixes of one condition; no response ends by itself."""
    return [
        _sequence_row(row, bootstrap(scored.state_gap[:, row.horizon - 1], np.mean))
        for row in sequence_statistics(scored.d, [t for t in HORIZONS if t <= scored.d.shape[1]], scored.kl)
    ]


def _sequence_row(row: SequenceRow, state_gap: Interval) -> Row:
    return {
        "horizon": row.horizon,
        "sequences": row.sequences,
        **columns("mean", row.mean),
        **columns("std", row.std),
        **columns("rms", row.rms),
        "predicted_mean": row.predicted_mean,
        "predicted_rms": row.predicted_rms,
        "cumulative_kl": row.cumulative_kl,
        "covariance_share": row.covariance_share,
        **columns("state_gap", state_gap),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Tokens as Markdown.

    :param rows: of the results file
    """
    lines = [
        "| condition | mean \\|d\\| | d = 0 | KL per token | E[e^d] − 1 | entropy, nats | state discrepancy |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [
            CONDITIONS[row["condition"]].name,
            f"{float(row['mean_abs']):.3g}",
            f"{100 * float(row['zero_fraction']):.2g} %",
            _with_interval(row, "kl"),
            f"{float(row['ratio_minus_1']):.1e} ± {float(row['ratio_error']):.1e}",
            f"{float(row['entropy']):.3f}",
            f"{float(row['state_gap']):.2e}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def slice_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Mean |d| by the probability of the sampled token as Markdown.

    :param rows: of the results file
    """
    heads = ["condition", *(f"p {name.replace('_percent', ' %').replace('_', ' ')}" for name in SLICES)]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * len(SLICES)]
    for row in rows:
        cells = [f"{float(row[f'mean_abs_{name}']):.3g}" for name in SLICES]
        lines.append(f"| {CONDITIONS[row['condition']].name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sequence_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Sums over the longest prefix as Markdown.

    :param rows: of the sequences' results file
    """
    longest = max(int(row["horizon"]) for row in rows)
    lines = [
        f"| condition, T = {longest} | E[S] | −Σ KL | SD(S) | RMS(S) | predicted RMS | Var(S) / Σ Var(d) |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if int(row["horizon"]) == longest:
            cells = [
                CONDITIONS[row["condition"]].name,
                _with_interval(row, "mean"),
                f"{-float(row['cumulative_kl']):.3g}",
                _with_interval(row, "std"),
                _with_interval(row, "rms"),
                f"{float(row['predicted_rms']):.3g}",
                f"{float(row['covariance_share']):.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    value, low, high = (float(row[name + end]) for end in ("", "_low", "_high"))
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """
    Mean and standard deviation of S_T against T, measured with intervals, and as single tokens predict them.

    :param rows: of the sequences' results file
    :param path: of the picture
    """
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    for colour, (name, condition) in enumerate(CONDITIONS.items()):
        of_condition = [row for row in rows if row["condition"] == name]
        horizons, mean, rms = (_numbers(of_condition, key) for key in ("horizon", "predicted_mean", "predicted_rms"))
        predictions = {"mean": -_numbers(of_condition, "cumulative_kl"), "std": np.sqrt(rms**2 - mean**2)}
        for axes, (key, predicted) in zip((left, right), predictions.items(), strict=True):
            low, value, high = (_numbers(of_condition, key + end) for end in ("_low", "", "_high"))
            axes.plot(horizons, value, "o", color=f"C{colour}", markersize=4, label=condition.name)
            axes.fill_between(horizons, low, high, color=f"C{colour}", alpha=0.2)
            axes.plot(horizons, predicted, "--", color=f"C{colour}", linewidth=1)
    left.set(ylabel="E[S]; dashed: −Σ KL", xlabel="T, tokens")
    left.set_xscale("log", base=2)
    left.set_yscale("symlog", linthresh=1e-3)
    right.set(ylabel="SD(S); dashed: √T·σ", xlabel="T, tokens", yscale="log")
    right.set_xscale("log", base=2)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _numbers(rows: Sequence[Mapping[str, Any]], key: str) -> Array:
    return np.array([float(row[key]) for row in rows])


def measure(name: str, seeds: Sequence[int], responses: int, tokens: int, size: Size | None = None) -> Scored:
    """
    One condition, its seeds pooled.

    :param name: of the condition
    :param seeds: of the sampling; the weights are the same for all
    :param responses: per seed
    :param tokens: of each response
    :param size: of the model; None for the document's
    """
    weights = Weights.draw(size or Size())
    return pooled([respond(weights, CONDITIONS[name], seed, responses, tokens) for seed in seeds])


def named(name: str, row: Row) -> Row:
    """A row of a file: condition first, numbers to six digits, versions last."""
    numbers = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()}
    return {"condition": name, **numbers, **versions()}


def main() -> None:
    """Run what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description="two implementations of one recurrent policy")
    parser.add_argument("--quick", action="store_true", help="16 responses of 128 tokens, one seed; writes nothing")
    quick = parser.parse_args().quick
    th.set_num_threads(1)
    rows: list[Mapping[str, Any]] = [] if quick else list(read_csv(FILE))
    sequences: list[Mapping[str, Any]] = [] if quick else list(read_csv(SEQUENCES_FILE))
    done = {row["condition"] for row in rows}
    for name in CONDITIONS:
        if name in done:
            continue
        seeds = SEEDS[:1] if quick else SEEDS
        scored = measure(name, seeds, 16, 128) if quick else measure(name, seeds, RESPONSES, TOKENS)
        sequences = [row for row in sequences if row["condition"] != name]  # of a run that stopped between the files
        sequences += [named(name, row) for row in sequence_rows(scored)]
        rows.append(named(name, {"seeds": " ".join(map(str, seeds)), **token_row(scored)}))
        if not quick:
            write_csv(SEQUENCES_FILE, sequences)
            write_csv(FILE, rows)
        print(f"{len(rows)} of {len(CONDITIONS)} conditions", flush=True)
    print(table(rows), slice_table(rows), sequence_table(sequences), sep="\n\n")


if __name__ == "__main__":
    main()
