"""Methods compared over tasks and seeds: ranks, wins, paired differences with stratified intervals (paper Sec. 4.3)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from benchmarks.timing import Array
from sb3_fp16.audit.statistics import Interval

Rows = Sequence[Mapping[str, Any]]


class Scores(NamedTuple):
    """
    Return AUC of several methods on the pairs of task and seed that all of them have finished.

    :param methods: names
    :param pairs: tasks and seeds, in the order of the columns
    :param auc: NaN for a run that crashed; shape (methods, pairs)
    """

    methods: tuple[str, ...]
    pairs: list[tuple[str, str]]
    auc: Array

    @classmethod
    def of(cls, rows: Rows, methods: Sequence[str]) -> "Scores":
        """
        Of results.

        :param rows: one per run, with the columns env, method, seed and return_auc
        :param methods: to be compared
        """
        runs: dict[str, dict[tuple[str, str], float]] = {method: {} for method in methods}
        for row in rows:
            if row["method"] in runs:
                runs[row["method"]][row["env"], str(row["seed"])] = float(row["return_auc"])
        complete = [pair for pair in runs[methods[0]] if all(pair in of_method for of_method in runs.values())]
        auc = np.array([[of_method[pair] for pair in complete] for of_method in runs.values()])
        return cls(tuple(methods), complete, auc)

    def on(self, env: str) -> "Scores":
        """
        One task's part.

        :param env: task
        """
        return Scores(self.methods, [pair for pair in self.pairs if pair[0] == env], self.of_task(env))

    def of_task(self, env: str) -> Array:
        """
        AUC on one task.

        :param env: task
        :return: shape (methods, seeds)
        """
        return self.auc[:, [pair[0] == env for pair in self.pairs]]

    @property
    def tasks(self) -> list[str]:
        """Those with a pair."""
        return list(dict.fromkeys(env for env, _ in self.pairs))

    def ranks(self) -> Array:
        """In each pair, 1 for the highest AUC and last for runs that crashed; ties share the mean. Shape as AUC's."""
        ranks: Array = stats.rankdata(-np.nan_to_num(self.auc, nan=-np.inf), axis=0)
        return ranks

    def firsts(self) -> Array:
        """Pairs in which each method alone has the highest AUC, shape (methods,)."""
        counts: Array = (self.ranks() == 1).sum(axis=1)
        return counts

    def wins(self, method: str, other: str) -> int:
        """
        Pairs in which one method's AUC exceeds another's.

        :param method: one
        :param other: another; a run of it that crashed loses to one that did not
        """
        own, theirs = (np.nan_to_num(self.auc[self.methods.index(name)], nan=-np.inf) for name in (method, other))
        return int((own > theirs).sum())

    def normalised_difference(self, method: str, other: str) -> Interval:
        """
        Mean over tasks of the difference of Ã = (A − A_min)/(A_max − A_min), extremes of all methods and seeds.

        Runs that crashed have Ã = 0.

        :param method: one
        :param other: another
        """
        differences = []
        for env in self.tasks:
            auc = self.of_task(env)
            low, high = np.nanmin(auc), np.nanmax(auc)
            scaled = np.nan_to_num((auc - low) / (high - low))
            differences.append(scaled[self.methods.index(method)] - scaled[self.methods.index(other)])
        return stratified(differences)


def stratified(differences: Sequence[Array], resamples: int = 10_000) -> Interval:
    """
    Mean over tasks of the mean over seeds, and the 95 % percentile interval of a bootstrap within each task.

    :param differences: of pairs, shape (seeds,) per task; NaN ends where no task has two
    :param resamples: how many
    """
    value = float(np.mean([x.mean() for x in differences]))
    if min(map(len, differences)) < 2:
        return Interval(value, np.nan, np.nan)

    def mean_of_means(*tasks: Array, axis: int = -1) -> Array:
        means: Array = np.mean([x.mean(axis=axis) for x in tasks], axis=0)
        return means

    found = stats.bootstrap(
        differences, mean_of_means, n_resamples=resamples, method="percentile", vectorized=True, rng=0
    )
    return Interval(value, float(found.confidence_interval.low), float(found.confidence_interval.high))


def interquartile_mean(values: Array) -> Array:
    """
    Mean without the lowest and the highest quarter of the runs, rounded down: of five, of the middle three.

    :param values: shape (runs, ...)
    """
    means: Array = stats.trim_mean(values, 0.25, axis=0)
    return means


def spread_of(values: Array) -> str:
    """
    Mean and standard deviation of the runs that did not crash, and how many did, as text.

    :param values: NaN for a crash, shape (runs,)
    """
    finite = values[~np.isnan(values)]
    text = f"{finite.mean():.0f}" if len(finite) else "–"
    text += f" ± {finite.std(ddof=1):.0f}" if len(finite) > 1 else ""
    return text + (f", {len(values) - len(finite)} crashed" if len(finite) < len(values) else "")


def in_brackets(interval: Interval, digits: int = 3) -> str:
    """
    As text.

    :param interval: with its value
    :param digits: after the point
    """
    value, low, high = ("–" if np.isnan(x) else f"{x:+.{digits}f}" for x in interval)
    return f"{value} [{low}, {high}]"
