"""Many runs: on all cores, on a cluster, after a kill."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.runner import read_csv, write_csv
from benchmarks.runs import Workers, parser_of, run_missing, workers_of

ROOT = Path(__file__).parent.parent
WANTED = [("b", 1), ("a", 2), ("a", 3)]


def double(name, number):
    return {"name": name, "number": number, "value": 2 * number, "process": os.getpid()}


def doubtful(name, number):
    if number == 2:
        raise TypeError("two is not allowed")
    return double(name, number)


def slow_double(name, number):
    time.sleep(0.05 if number == 1 else 60)
    return double(name, number)


def test_only_missing_runs_are_run(tmp_path):
    file = tmp_path / "runs.csv"
    file.write_text("name,number,value,process\na,2,kept,0\n")
    rows = run_missing(file, ("name", "number"), WANTED, double, Workers(jobs=2))
    assert [(row["name"], row["number"], row["value"]) for row in rows] == [
        ("b", "1", "2"),
        ("a", "2", "kept"),
        ("a", "3", "6"),
    ]
    assert rows == read_csv(file)
    assert str(os.getpid()) not in {row["process"] for row in rows}


def test_a_run_that_raises_costs_no_other(tmp_path, capfd):
    file = tmp_path / "runs.csv"
    with pytest.raises(RuntimeError, match=r"1 runs failed, as told above: \('a', 2\)"):
        run_missing(file, ("name", "number"), WANTED, doubtful, Workers(jobs=1))
    assert "two is not allowed" in capfd.readouterr().err
    assert [row["value"] for row in read_csv(file)] == ["2", "6"]


def test_some_runs_may_be_asked_for(tmp_path, capfd):
    file = tmp_path / "runs.csv"
    file.write_text("name,number,value\na,2,kept\n")  # fewer columns than new rows have
    run_missing(file, ("name", "number"), WANTED, double, Workers(jobs=1), asked=[("a", 3), ("a", 2)])
    assert [(row["number"], row["value"], row["process"] != "") for row in read_csv(file)] == [
        ("2", "kept", False),
        ("3", "6", True),
    ]
    assert "2 of 3 runs" in capfd.readouterr().out


def test_results_of_other_settings_are_refused(tmp_path):
    file = tmp_path / "runs.csv"
    run_missing(file, ("name", "number"), WANTED[:1], double, Workers(jobs=1), settings={"steps": 10})
    assert read_csv(file)[0]["steps"] == "10"
    with pytest.raises(ValueError, match="rows of steps 10, these runs are of 20"):
        run_missing(file, ("name", "number"), WANTED, double, Workers(jobs=1), settings={"steps": 20})
    run_missing(file, ("name", "number"), WANTED, double, Workers(jobs=1), settings={"steps": 10})
    assert len(read_csv(file)) == 3


def added_meanwhile(file, name, number):
    """A run during which another script writes to the same file."""
    rows = read_csv(file)
    write_csv(file, [*rows, {"name": "other", "number": number}])
    return double(name, number)


def test_what_another_script_writes_stays(tmp_path):
    file = tmp_path / "runs.csv"
    run = partial(added_meanwhile, file)
    run.__module__, run.__name__ = __name__, "run"
    run_missing(file, ("name", "number"), WANTED, run, Workers(jobs=1))
    assert sorted(row["name"] for row in read_csv(file)) == ["a", "a", "b", "other", "other", "other"]


def test_a_cluster_on_which_runs_would_share_a_process_is_refused(tmp_path):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as cluster:
        workers = Workers(scheduler=cluster.scheduler_address)
        with pytest.raises(ValueError, match="--nthreads 1"):
            run_missing(tmp_path / "runs.csv", ("name", "number"), WANTED, double, workers)


def test_a_cluster_runs_them(tmp_path):
    distributed = pytest.importorskip("distributed")
    file = tmp_path / "runs.csv"
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        wanted = [("a", number) for number in range(8)]
        rows = run_missing(file, ("name", "number"), wanted, double, Workers(scheduler=cluster.scheduler_address))
        workers = {worker.pid for worker in cluster.workers.values()}
        lacking = Workers(scheduler=cluster.scheduler_address).at_work("elsewhere")
        with pytest.raises(ValueError, match="in this checkout: No module named 'elsewhere'"), lacking:
            pass
    assert [row["value"] for row in rows] == [str(2 * number) for _, number in wanted]
    assert {int(row["process"]) for row in rows} <= workers


def test_a_kill_loses_only_what_was_under_way(tmp_path):
    file = tmp_path / "runs.csv"
    code = f"""
from pathlib import Path
from benchmarks.runs import Workers, run_missing
from tests.test_runs import WANTED, slow_double
run_missing(Path({str(file)!r}), ("name", "number"), WANTED, slow_double, Workers(jobs=2))
"""
    script = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    deadline = time.time() + 60
    while not file.exists() and time.time() < deadline:
        time.sleep(0.1)
    os.killpg(script.pid, signal.SIGKILL)
    script.wait()
    first = read_csv(file)
    assert [row["value"] for row in first] == ["2"]
    rows = run_missing(file, ("name", "number"), WANTED, double, Workers(jobs=2))
    assert [row["value"] for row in rows] == ["2", "4", "6"]
    assert rows[0]["process"] == first[0]["process"]


def test_options_name_workers():
    arguments = parser_of("what for").parse_args(["--jobs", "3", "--scheduler", "tcp://host:8786"])
    assert workers_of(arguments) == Workers(3, "tcp://host:8786")
    assert workers_of(parser_of("").parse_args([])) == Workers()
