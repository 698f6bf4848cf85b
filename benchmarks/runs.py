"""Many runs, each a row of a results file: those that are missing, on all cores of one machine or on a cluster."""

import argparse
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from joblib import Parallel, delayed, parallel_config

from benchmarks.runner import read_csv, write_csv
from benchmarks.timing import Row

Run = tuple[Any, ...]


class Workers(NamedTuple):
    """
    Who does the runs.

    :param jobs: processes on this machine; one per core by default
    :param scheduler: address of a Dask scheduler, whose workers do them instead; they import this checkout
    """

    jobs: int | None = None
    scheduler: str | None = None

    @contextmanager
    def at_work(self, module: str) -> Generator[None]:
        """
        Have joblib use them.

        :param module: that they must be able to import
        :raises ValueError: for a cluster on which runs would share a process, or that lacks the checkout
        """
        if self.scheduler is None:
            with parallel_config("loky", n_jobs=self.jobs or -1):
                yield
            return
        from distributed import Client

        client: Any = Client(self.scheduler)  # type: ignore[no-untyped-call]
        with client, parallel_config("dask", wait_for_workers_timeout=60):
            client.wait_for_workers(1, timeout=60)
            if set(client.nthreads().values()) != {1}:  # random numbers are a process's, not a thread's
                raise ValueError(f"Start the workers at {self.scheduler} with --nthreads 1: a run needs a process.")
            try:
                client.run(import_module, module)
            except ImportError as error:
                raise ValueError(f"Start the workers at {self.scheduler} in this checkout: {error}.") from error
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
    wanted: Sequence[Run],
    run: Callable[..., Row],
    workers: Workers | None = None,
    asked: Sequence[Run] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[dict[str, str]]:
    """
    Runs that a results file lacks, each a row of it as soon as it has finished; those in it are not repeated.

    A run that raises costs no other one: the rest is done first.

    :param file: with one row per run
    :param columns: what names a run, the arguments of ``run``
    :param wanted: all values that they may have, in the order that runs start and rows are kept in
    :param run: gives a row; of a module, as other processes import it
    :param workers: one process per core by default
    :param asked: those of ``wanted`` to be run; all by default
    :param settings: columns that are the same in all rows; a file with others is refused
    :return: all rows, as they are in the file
    :raises ValueError: if the file is of other settings
    :raises RuntimeError: after all others, if runs have raised, naming them
    """
    order = {tuple(map(str, values)): place for place, values in enumerate(wanted)}
    settings = settings or {}

    def place(row: Mapping[str, Any]) -> int:
        return order.get(tuple(str(row[column]) for column in columns), len(order))

    kept = read_csv(file)
    for name, value in settings.items():
        other = next((row[name] for row in kept if row[name] != str(value)), value)
        if other != value:
            raise ValueError(f"{file} has rows of {name} {other}, these runs are of {value}: move it away first.")
    done = {place(row) for row in kept}
    missing = [values for values in (wanted if asked is None else asked) if order[tuple(map(str, values))] not in done]
    tried, failed = partial(_tried, _imported(run)), []
    with (workers or Workers()).at_work(_imported(run).__module__):
        calls = [delayed(tried)(values) for values in missing]
        for values, row, error in Parallel(return_as="generator_unordered", batch_size=1)(calls):
            if row is None:
                print(f"{values} failed:\n{error}", file=sys.stderr, flush=True)
                failed.append(values)
                continue
            rows: list[Row] = [*read_csv(file), {**row, **settings}]  # another script may have added some
            rows.sort(key=place)
            write_csv(file, rows)
            print(f"{len(rows)} of {len(wanted)} runs", flush=True)
    if failed:
        raise RuntimeError(f"{len(failed)} runs failed, as told above: {', '.join(map(str, failed))}")
    return read_csv(file)


def _tried(run: Callable[..., Row], values: Run) -> tuple[Run, Row | None, str]:
    """A run's row, or what it raised."""
    try:
        return values, run(*values), ""
    except Exception:
        return values, None, traceback.format_exc()


def _imported(run: Callable[..., Row]) -> Callable[..., Row]:
    """A script's own function from its module: ``__main__`` would be sent by value, with all that it refers to."""
    if run.__module__ != "__main__":
        return run
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "started without -m"
    imported: Callable[..., Row] = getattr(import_module(spec.name), run.__name__)
    return imported
