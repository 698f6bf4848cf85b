"""The GPU benchmark's functions at tiny sizes on a CPU, kernels in the simulator; its figures mean nothing there."""

import pytest
import torch as th

from benchmarks import gpu, tables
from benchmarks.runner import read_csv, write_csv

WAITS = []
DEVICE = gpu.Device("cpu", lambda: WAITS.append(None))
SIZES = {"METHODS": ("fp32", "fp16"), "ENVS": 4, "ROLLOUT": 16, "EPOCHS": 1, "BATCHES": (8, 16), "WIDTHS": (8,)}


@pytest.fixture(autouse=True)
def _tiny(on_cpu, monkeypatch):
    for name, value in SIZES.items():
        monkeypatch.setattr(gpu, name, value)


def test_a_rollout_has_at_least_two_minibatches():
    assert [gpu.Shape(8, batch).samples for batch in (8, 16)] == [16, 32]


def test_update_rows_and_table(tmp_path, monkeypatch):
    shapes = [gpu.Shape(8, batch) for batch in gpu.BATCHES]
    WAITS.clear()
    one = gpu.update_times(shapes, 2, DEVICE)
    assert len(WAITS) > 2 * 2 * (2 + 2)  # after each piece of work
    two = [row | {"ms": 3 * row["ms"], "ms_ratio": 3 * row["ms_ratio"]} for row in one]
    rows = gpu.summarized([one, two, one], repeats=2)
    write_csv(tmp_path / "rows.csv", rows)
    kept = read_csv(tmp_path / "rows.csv")
    assert [(row["batch_size"], row["method"]) for row in kept] == [
        (batch, method) for batch in ("8", "16") for method in ("sb3", "fp32", "fp16")
    ]
    for row, measured in zip(rows, one, strict=True):
        assert row["captures"] == (row["method"] != "sb3")
        assert row["processes"] == 3
        assert row["ms_median"] == pytest.approx(measured["ms"], rel=1e-3)
        assert row["ms_max"] == pytest.approx(3 * measured["ms"], rel=1e-3)
        assert row["minibatches"] == 2
        if row["method"] == "fp32":
            assert measured["ms_ratio"] == measured["device_ms_ratio"] == row["device_ms_ratio_to_fp32_max"] == 1
        assert (row["device_ms_median"] == "") == (row["method"] == "sb3")
    assert {"gpu", "driver", "cuda", "date", "commit", "python", "torch", "stable_baselines3"} <= set(rows[0])
    lines = gpu.update_table(kept).splitlines()
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {8}
    assert lines[3].startswith("| 8 | 8 | `fp32` | 1.00 | 1.00 to 3.00 | 1.00 | 1.00 to 1.00 |")
    monkeypatch.setitem(tables.PAGES[tables.DETAILS], "gpu_update", (tmp_path / "rows.csv", gpu.update_table))
    assert gpu.update_table(kept) in tables.filled(tables.DETAILS)


def test_ratios_are_to_the_same_repeat():
    columns = gpu.medians("ms", gpu.np.array([[1.0, 2.0], [10.0, 5.0], [4.0, 4.0]]))
    assert columns[1] == {"ms": 4000.0, "ms_ratio": 1.0}


def test_memory_rows_and_table(monkeypatch):
    for name, value in (("memory_allocated", 2**20), ("max_memory_allocated", 3 * 2**20)):
        monkeypatch.setattr(th.cuda, name, lambda value=value: value)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(th.cuda, name, lambda: None)
    rows = [
        row for m in ("sb3", "fp32", "fp16") for row in gpu.memory_of(m, [gpu.Shape(w, 8) for w in (8, 32)], DEVICE)
    ]
    by_case = {(row["width"], row["method"]): row for row in rows}
    adam, sharp = (by_case[32, method]["optimizer_bytes"] for method in ("fp32", "fp16"))
    assert by_case[32, "sb3"]["optimizer_bytes"] == adam
    assert adam > 3 * sharp
    assert {(row["peak_mib"], row["before_mib"]) for row in rows} == {(3.0, 1.0)}
    assert [by_case[8, method]["captures"] for method in ("sb3", "fp32", "fp16")] == [0, 1, 1]
    lines = gpu.memory_table(rows).splitlines()
    assert {line.count("|") for line in lines} == {7}
    assert lines[2].endswith("| 3.00 | 1.00 | 1.00 |")


def test_the_policy_stays_where_it_is_and_every_weight_is_stepped():
    model = gpu.made("fp16", gpu.Shape(8, 8), DEVICE)
    before = model.policy.parameters_to_vector()
    for _ in range(3):
        model.train()
    assert abs(model.policy.parameters_to_vector() - before).max() < 2e-3
    assert model.logger.name_to_value["train/skipped_steps"] == 0
    assert int(model.policy.optimizer.state[model.policy.value_net.bias]["step"]) == 6


def test_it_refuses_to_run_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(th.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu", "--quick"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no CUDA device" in capsys.readouterr().err


def test_tables_take_up_results_once_there_are_any():
    registered = {name for page in tables.PAGES.values() for name in page}
    for name, part in gpu.PARTS.items():
        assert (f"gpu_{name}" in registered) == part.file.exists()
        assert f"<!-- gpu_{name} -->\n" in tables.DETAILS.read_text()
