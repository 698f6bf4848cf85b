"""Many runs: on all cores, on a cluster, after a kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.runner import read_csv
from benchmarks.runs import Workers, parser_of, run_missing, workers_of

ROOT = Path(__file__).parent.parent
WANTED = [("b", 1), ("a", 2), ("a", 3)]


def double(name, number):
    return {"name": name, "number": number, "value": 2 * number, "process": os.getpid()}


def slow_double(name, number):
    time.sleep(0.05 if number == 1 else 60)
    return double(name, number)


def test_only_missing_runs_are_run(tmp_path):
    file = tmp_path / "runs.csv"
    file.write_text("name,number,value,process\na,2,kept,0\n")
    rows = run_missing(file, ("name", "number"), WANTED, double, Workers(jobs=2))
    assert [(row["name"], str(row["number"]), str(row["value"])) for row in rows] == [
        ("b", "1", "2"),
        ("a", "2", "kept"),
        ("a", "3", "6"),
    ]
    kept = read_csv(file)
    assert [row["value"] for row in kept] == ["2", "kept", "6"]
    assert str(os.getpid()) not in {row["process"] for row in kept}


def test_a_cluster_runs_them(tmp_path):
    distributed = pytest.importorskip("distributed")
    file = tmp_path / "runs.csv"
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        wanted = [("a", number) for number in range(8)]
        rows = run_missing(file, ("name", "number"), wanted, double, Workers(scheduler=cluster.scheduler_address))
        workers = {worker.pid for worker in cluster.workers.values()}
    assert [row["value"] for row in rows] == [2 * number for _, number in wanted]
    assert {row["process"] for row in rows} <= workers
    assert [row["value"] for row in read_csv(file)] == [str(2 * number) for _, number in wanted]


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
    assert [row["value"] for row in read_csv(file)] == ["2"]
    rows = run_missing(file, ("name", "number"), WANTED, double, Workers(jobs=2))
    assert [str(row["value"]) for row in rows] == ["2", "4", "6"]
    assert rows[0]["process"] == read_csv(file)[0]["process"]


def test_options_name_workers():
    arguments = parser_of("what for").parse_args(["--jobs", "3", "--scheduler", "tcp://host:8786"])
    assert workers_of(arguments) == Workers(3, "tcp://host:8786")
    assert workers_of(parser_of("").parse_args([])) == Workers()
