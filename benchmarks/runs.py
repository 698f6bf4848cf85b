"""Many runs, each a row of a results file: those that are missing, on all cores of one machine or on a cluster."""

import argparse
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from joblib import Parallel, delayed, parallel_config

from benchmarks.runner import read_csv, write_csv
from benchmarks.timing import Row


class Workers(NamedTuple):
    """
    Who does the runs.

    :param jobs: processes on this machine; one per core by default
    :param scheduler: address of a Dask scheduler, whose workers do them instead; they import this checkout
    """

    jobs: int | None = None
    scheduler: str | None = None

    @contextmanager
    def at_work(self) -> Generator[None]:
        """Have joblib use them."""
        if self.scheduler is None:
            with parallel_config("loky", n_jobs=self.jobs or -1):
                yield
            return
        from distributed import Client

        client: Any = Client(self.scheduler)  # type: ignore[no-untyped-call]
        with client, parallel_config("dask", wait_for_workers_timeout=60):
            yield


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """
    The options that all scripts with many runs share.

    :param description: of the script
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--jobs", type=int, help="runs at a time on this machine; one per core by default")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="of a Dask cluster, to run there instead")
    return parser


def workers_of(arguments: argparse.Namespace) -> Workers:
    """
    As asked for.

    :param arguments: that ``parser_of`` has parsed
    """
    return Workers(arguments.jobs, arguments.scheduler)


def run_missing(
    file: Path,
    columns: Sequence[str],
    wanted: Sequence[tuple[Any, ...]],
    run: Callable[..., Row],
    workers: Workers | None = None,
) -> list[Row]:
    """
    Runs that a results file lacks, each a row of it as soon as it has finished; those in it are not repeated.

    :param file: with one row per run
    :param columns: what names a run, the arguments of ``run``
    :param wanted: their values, in the order that runs start and rows are kept in
    :param run: gives a row; of a module, as other processes import it
    :param workers: one process per core by default
    :return: all rows
    """
    order = {tuple(map(str, values)): place for place, values in enumerate(wanted)}

    def place(row: Row) -> int:
        return order.get(tuple(str(row[column]) for column in columns), len(order))

    rows: list[Row] = list(read_csv(file))
    done = {place(row) for row in rows}
    missing = [delayed(_imported(run))(*values) for number, values in enumerate(wanted) if number not in done]
    with (workers or Workers()).at_work():
        for row in Parallel(return_as="generator_unordered", batch_size=1)(missing):
            rows.append(row)
            rows.sort(key=place)
            write_csv(file, rows)
            print(f"{len(rows)} of {len(wanted)} runs", flush=True)
    return rows


def _imported(run: Callable[..., Row]) -> Callable[..., Row]:
    """A script's own function from its module: ``__main__`` would be sent by value, with all that it refers to."""
    if run.__module__ != "__main__":
        return run
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "started without -m"
    imported: Callable[..., Row] = getattr(import_module(spec.name), run.__name__)
    return imported
