"""The scripts of the paper's experiments, on short runs and on rows that are made up."""

import numpy as np
import pytest
import torch as th

from benchmarks import ablations, boundary, claims, learning, performance, stages
from benchmarks.gpu import Shape
from benchmarks.learning import SEEDS, TASKS
from benchmarks.runner import curve_of, make_model, write_csv
from sb3_fp16 import Precision


def made_up(method, env="Hopper-v5", seed=0, auc=100.0, crash="", **more):
    curve = "0:1.0 16384:3.0 32768:5.0"
    row = {"env": env, "method": method, "seed": str(seed), "return_auc": str(auc), "final_return": str(2 * auc)}
    return row | {"curve": curve, "stuck_fraction": "0.5", "crash": crash} | more


def crashed(row):
    return row | {"crash": "it did", "return_auc": "nan", "final_return": "nan", "curve": "0:1.0"}


# Long runs


@pytest.mark.parametrize("method", ["sb3", "fp16"])
def test_a_short_run(method):
    row = learning.trained(method, "Pendulum-v1", 0, 4096, 2048, 2)
    steps, returns = curve_of(row)
    np.testing.assert_array_equal(steps, [0, 2048, 4096])
    assert row["return_auc"] == pytest.approx(np.trapezoid(returns, steps) / 4096, abs=0.1)
    assert (row["crash"], row["ended_at"]) == ("", 4096)
    assert np.isnan(row["stuck_fraction"]) == (method == "sb3")


@pytest.mark.parametrize("fails", ["raises", "not finite"])
def test_a_crash_is_a_row(fails, monkeypatch):
    def failing(*arguments, **settings):
        model = make_model(*arguments, **settings)
        learn = model.learn

        def learn_and_fail(steps, callback):
            learn(2048, callback)
            if fails == "raises":
                raise RuntimeError("gradients\n were not finite")
            with th.no_grad():
                model.policy.value_net.bias.fill_(th.nan)

        model.learn = learn_and_fail
        return model

    monkeypatch.setattr(learning, "make_model", failing)
    row = learning.trained("fp16", "Pendulum-v1", 0, 4096, 2048, 1)
    assert np.isnan(row["return_auc"])
    assert np.isnan(row["final_return"])
    assert row["ended_at"] == 2048
    told = {"raises": "RuntimeError: gradients were", "not finite": "ValueError: value_net.bias is"}[fails]
    assert row["crash"] == f"{told} not finite"
    assert len(curve_of(row)[0]) == 2  # what was seen until then


def test_a_crash_before_anything_is_evaluated_is_a_row(monkeypatch):
    def failing(self):
        raise ValueError("at once")

    monkeypatch.setattr(learning.Evaluations, "evaluate", failing)
    row = learning.trained("fp16", "Pendulum-v1", 0, 2048, 2048, 1)
    assert np.isnan(row["return_auc"])
    assert (row["curve"], row["crash"]) == ("", "ValueError: at once")


def test_a_mistake_in_the_code_is_no_crash(monkeypatch):
    monkeypatch.setattr(learning.Evaluations, "evaluate", lambda self: None.nothing)
    with pytest.raises(AttributeError):
        learning.trained("fp16", "Pendulum-v1", 0, 2048, 2048, 1)


def test_evaluations_start_in_the_same_states(monkeypatch):
    def starts(method):
        model, found = make_model(method, "Pendulum-v1", 3), []
        evaluations = learning.Evaluations("Pendulum-v1", 3, 1, 2)
        evaluations.model = model
        reset = evaluations.env.reset
        monkeypatch.setattr(evaluations.env, "reset", lambda: found.append(reset()) or found[-1])
        evaluations.evaluate()
        for _ in range(method == "fp16"):  # wherever the environments' generators are by now
            reset()
        evaluations.evaluate()
        return np.array(found)

    one, two = starts("fp32"), starts("fp16")
    np.testing.assert_array_equal(one, two)
    assert len(np.unique(one.reshape(-1, 3), axis=0)) == 4


def test_the_learning_rate_falls_over_the_horizon(monkeypatch):
    rates = []

    def keep(*arguments, **settings):
        model = make_model(*arguments, **settings)
        rates.extend(model.lr_schedule(progress) for progress in (1.0, 0.5, 0.0))
        raise ArithmeticError("enough")

    monkeypatch.setattr(learning, "make_model", keep)
    for horizon in (None, 8192):
        with pytest.raises(ArithmeticError):
            learning.trained("fp16", "Pendulum-v1", 0, 2048, horizon=horizon)
    np.testing.assert_allclose(rates, [3e-4, 1.5e-4, 0, 3e-4, 0.875 * 3e-4, 0.75 * 3e-4])


def test_the_plan_of_long_runs():
    runs = learning.wanted(learning.METHODS)
    assert len(runs) == len(set(runs)) == 6 * 5 * 5 + 2 * 5
    assert {seed for _, _, seed in runs[:30]} == {0}
    assert all(method == "sb3" for _, method, _ in runs[150:])
    assert learning.wanted(["fp32"]) == [(env, "fp32", seed) for seed in SEEDS for env in TASKS]


def learning_rows(better="paper"):
    """All runs of all tasks, one method ahead of the others by as much everywhere."""
    rng = np.random.default_rng(0)
    return [
        made_up(method, env, seed, auc=round(10.0 * (place + 1) + rng.normal() + 5 * (method == better), 3))
        for place, env in enumerate(TASKS)
        for seed in SEEDS
        for method in learning.METHODS
    ]


def test_tables_of_long_runs():
    rows = learning_rows()
    assert rows[0]["method"] == "fp32"
    rows[0] = crashed(rows[0])
    lines = learning.table(rows).splitlines()
    assert len(lines) == 2 + len(TASKS)
    assert ", 1 crashed |" in lines[2]
    assert "seeds" not in lines[2]
    assert "4 seeds" in learning.table([row for row in rows if row["seed"] != "0"])
    ranks = learning.ranks_table(rows).splitlines()
    assert len(ranks) == 2 + 8
    assert "| with `paper` | 30 | `paper` | 1.00 | 30 |" in ranks
    pairs = learning.pairs_table(rows).splitlines()
    assert len(pairs) == 2 + 6
    assert pairs[2].startswith("| `paper` | `fp32` | 30 of 30 | +0.")
    assert "| Crash 1" in learning.sb3_table(rows)
    assert len(learning.sb3_table([row for row in rows if row["method"] != "sb3"]).splitlines()) == 2


def test_picture_of_long_runs(tmp_path):
    rows = learning_rows()
    rows[0] = crashed(rows[0])
    steps, curves = learning._curves([row for row in rows if row["env"] == TASKS[0]])
    np.testing.assert_array_equal(steps, [0, 16384, 32768])
    np.testing.assert_array_equal(curves["fp32"][0], [1, 1, 1])  # the lowest, from where it crashed on
    np.testing.assert_array_equal(curves["fp32"][1], [1, 3, 5])
    learning.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    learning.draw(rows[:3], tmp_path / "few.png")


# Modules


def test_modules_are_the_ones_of_the_paper():
    for base in ("paper", "fp16"):
        assert ablations.with_modules(base, "ABC") == Precision.presets[base]
        without = {name: ablations.with_modules(base, "ABC".replace(name, "")) for name in "ABC"}
        assert not without["A"].global_scalars
        assert without["B"].log_ratio == "absolute-stored"
        assert without["C"].optimizer == "adam"
        for name, precision in without.items():
            kept = {key: value for key, value in precision.to_dict().items() if key not in ablations.WITHOUT[name]}
            assert kept.items() <= Precision.presets[base].to_dict().items()
    naive = ablations.with_modules("paper", "").to_dict()
    preset = Precision.presets["naive-fp16"].to_dict()
    decisive = ("storage", "compute", "global_scalars", "log_ratio", "optimizer", "gradient_scaling")
    assert {key: naive[key] for key in decisive} == {key: preset[key] for key in decisive}
    assert len(set(ablations.SETTINGS.values())) == len(ablations.SETTINGS) == 11


def test_only_what_passes_the_gate_goes_on(monkeypatch):
    asked = []

    def trained(precision, env, seed, steps, every, horizon=None):
        asked.append((steps, horizon))
        crash = "not finite" if getattr(precision, "optimizer", "") == "adam" else ""
        return {"steps": steps, "return_auc": 1.0, "crash": crash}

    monkeypatch.setattr(ablations, "trained", trained)
    row = ablations.run("none", 0)
    assert (row["passed_gate"], row["steps"]) == (False, ablations.GATE)
    row = ablations.run("paper ABC", 1)
    assert (row["passed_gate"], row["steps"]) == (True, ablations.STEPS)
    assert asked == [(ablations.GATE, ablations.STEPS)] * 2 + [(ablations.STEPS, None)]


def ablation_rows():
    rows = []
    for seed in SEEDS:
        for setting, auc in {"fp32": 500, "paper ABC": 600, "paper BC": 300, "paper C": 200, "paper AC": 400}.items():
            rows.append(made_up("", seed=seed, auc=auc + seed, setting=setting, passed_gate="True"))
        for setting in ("none", "paper AB"):
            rows.append(crashed(made_up("", seed=seed, setting=setting, passed_gate="False")))
    return rows


def test_table_of_modules():
    lines = ablations.paper_table(ablation_rows()).splitlines()
    assert lines[2] == "| reference | FP32 | 5 of 5 | 500 501 502 503 504 | 502 ± 2 | 1004 ± 3 |"
    assert "| taken away | without C | 0 of 5 | Crash Crash Crash Crash Crash | –, 5 crashed | –, 5 crashed |" in lines
    assert [line.split("|")[2].strip() for line in lines[7:]] == ["naive", "C", "A and C", "all"]
    assert ablations.fp16_table(ablation_rows()).count("\n") == 3  # what does not depend on the preset


# Exponent and significand


def test_formats_are_the_papers_method_but_for_their_bits():
    for kind, name in boundary.FORMATS.items():
        precision = Precision.presets[name]
        assert precision.format.significand_bits == int(kind.removeprefix("E5M"))
        assert precision.to_dict() | {"storage": "fp16"} == Precision.presets["paper"].to_dict()


def test_tables_of_formats(monkeypatch, tmp_path):
    brain = [made_up("bf16", seed=seed, auc=50.0) for seed in SEEDS]
    half = [made_up("paper", seed=seed, auc=100.0 + seed) for seed in SEEDS]
    write_csv(tmp_path / "learning.csv", half)
    monkeypatch.setattr(learning, "FILE", tmp_path / "learning.csv")
    table = boundary.exponent_table(brain)
    assert "| 50 ± 0 | 102 ± 2 | 49 % | 0 of 5 |" in table
    assert "bf16-sr" not in table
    write_csv(tmp_path / "learning.csv", [crashed(half[0]), *half[1:]])
    assert "| 50 ± 0 | 102 ± 1, 1 crashed | 49 % | 1 of 5 |" in boundary.exponent_table(brain)
    rows = [made_up("", seed=seed, auc=60.0, format="E5M9") for seed in SEEDS]
    rows[1] = crashed(rows[1])
    text = boundary.significand_table(rows)
    assert "| E5M9 | 60 Crash 60 60 60 | 60 ± 0, 1 crashed | 120 ± 0, 1 crashed | 50 % |" in text
    boundary.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5_000


# Stages


@pytest.fixture(scope="module")
def stage_row():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "STEPS", 6144)
        patch.setattr(stages, "AFTER", (1, 2))
        return stages.run("Pendulum-v1", 0)


def values(row, column):
    return np.array([float(x) for x in row[column].split()])


def test_stages_of_a_short_run(stage_row):
    assert all(len(values(stage_row, f"{path} {stage}")) == 2 for path in stages.PATHS for stage in stages.STAGES)
    for stage in ("advantage_std", "policy_loss", "log_ratio"):
        assert (values(stage_row, f"naive-fp16 {stage}") > 2 * values(stage_row, f"paper {stage}")).all(), stage
    assert (values(stage_row, "fp16 log_ratio") <= values(stage_row, "paper log_ratio")).all()
    assert (values(stage_row, "ratio absolute_fp16") > 5 * values(stage_row, "ratio residual_twosum")).all()
    assert (values(stage_row, "ratio residual_fp32") < 1e-6).all()
    assert (values(stage_row, "Adam in FP16 zeroed") > 0.2).all()
    assert (values(stage_row, "paper zeroed") < 0.01).all()
    assert (values(stage_row, "stuck nearest") > values(stage_row, "stuck stochastic")).all()


def test_what_fp32_sees_is_what_fp32_sees():
    model = make_model("fp32", "Pendulum-v1", 0, n_steps=128).learn(128)
    start = stages.on_the_grid(stages.twin_of(model, stages.SINGLE))
    weights = {name: weight.clone() for name, weight in start.policy.state_dict().items()}
    assert all(bool((weight == weight.half().float()).all()) for weight in weights.values())
    one, two = (stages.Arithmetic(start, "fp32", model.rollout_buffer) for _ in range(2))
    rows = np.arange(64)
    epoch = np.arange(128)
    found = stages.errors(one.sees(rows, epoch, weights), two.sees(rows, epoch, weights))
    assert set(found) == set(stages.STAGES)
    assert set(found.values()) == {0.0}
    assert stages.errors(one.sees(rows, epoch, weights), two.sees(rows + 64, epoch, weights))["norm"] > 0.01


def test_clipping_is_decided_in_minibatches():
    model = make_model("fp32", "Pendulum-v1", 0, n_steps=128).learn(128)
    single, naive = (stages.Arithmetic(model, name, model.rollout_buffer) for name in ("fp32", "naive-fp16"))
    d = th.tensor([0.3, 0.3, -0.3, -0.3]).repeat(32)  # beyond the bounds of both sides
    advantages = th.cat([th.tensor([1.0, -1.0]).repeat(32), th.tensor([5.0, 3.0]).repeat(32)])
    expected = th.tensor([True, False, False, True]).repeat(32)  # in the second, 3 is below the mean
    assert (single._clipped(d, advantages) == expected).all()
    assert (naive._clipped(d, advantages.half()) == expected).all()


def test_stages_take_the_learning_rate_of_the_update(monkeypatch):
    seen = []
    monkeypatch.setattr(stages, "AFTER", (2,))
    watch = stages._Watch()
    monkeypatch.setattr(
        watch, "_along_an_update", lambda start, *_: seen.append(start.update_settings()) or [{"x": 1.0}]
    )
    monkeypatch.setattr(watch, "_optimizers", lambda *_: {})
    model = make_model("fp32", "Pendulum-v1", 0, **stages.annealed() | {"n_steps": 128})
    model.learn(512, callback=watch)
    assert seen[0].learning_rate == pytest.approx(3e-4 * (1 - 256 / 512))


def test_the_papers_rollout_has_its_correction():
    model = make_model("fp32", "Pendulum-v1", 0, n_steps=128).learn(128)
    paper, fp16 = (stages.Arithmetic(model, name, model.rollout_buffer).rollout for name in ("paper", "fp16"))
    assert fp16.corrections is None
    c = paper.corrections.astype(float)
    assert 1e-6 < np.abs(c).mean() < 1e-2


def test_tables_of_stages(stage_row, tmp_path):
    rows = [stage_row | {"env": env} for env in stages.ENVS for _ in range(2)]
    assert len(stages.table(rows).splitlines()) == 2 + len(stages.STAGES)
    assert len(stages.ratios_table(rows).splitlines()) == 2 + len(stages.ENVS)
    assert len(stages.ratios_table(rows[:2]).splitlines()) == 2 + 1
    assert len(stages.optimizers_table(rows).splitlines()) == 2 + 4
    assert "nan" not in stages.table(rows) + stages.ratios_table(rows) + stages.optimizers_table(rows)
    norm = next(line for line in stages.table(rows).splitlines() if line.startswith("| gradient norm"))
    assert norm.startswith(
        "| gradient norm, relative error | not finite [not finite, not finite] | "
    )  # Pendulum's is large
    assert norm.count("not finite") == 3
    stages.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5_000


# Performance


def test_times_and_bytes(monkeypatch):
    monkeypatch.setattr(performance, "use_one_core", lambda: None)
    monkeypatch.setitem(performance.EPOCHS, 8, 1)
    times = performance.times_of(Shape(8, 512), 2)
    assert len(times) == len(performance.MEASURED)
    assert all(ms > 0 for ms, _ in times)
    assert times[performance.MEASURED.index("fp32")][1] == 1
    assert performance.MEASURED[0] == "sb3"
    fp32, paper = (performance.optimizer_bytes(method, 64) for method in ("fp32", "paper"))
    assert 1 - paper / fp32 == pytest.approx(0.728, abs=0.002)  # paper Sec. 4.4


def test_measured_shapes_are_a_table(monkeypatch, tmp_path):
    shapes = [Shape(8, 64), Shape(8, 512)]
    monkeypatch.setattr(performance, "SHAPES", shapes)
    monkeypatch.setattr(performance, "FILE", tmp_path / "performance.csv")
    answers = {
        performance.times_of: lambda *_: [(2.0, 0.5 + i) for i in range(len(performance.MEASURED))],
        performance.optimizer_bytes: lambda *_: 2**20,
        performance.memory_of: lambda *_: 3.0,
    }
    asked = []
    monkeypatch.setattr(performance, "in_new_process", lambda work, *of: asked.append(of) or answers[work](*of))
    monkeypatch.setattr("sys.argv", ["performance", "--processes", "2"])
    performance.main()
    first = len(asked)
    performance.main()
    assert len(asked) == first  # all there
    lines = performance.table(performance.read_csv(performance.FILE)).splitlines()
    assert lines[2] == "| 8 | 64 | SB3's PPO | 0.50 | 0.50 to 0.50 | 1.00 | 3.0 |"
    assert len(lines) == 2 + 2 * len(performance.MEASURED)


# The page


def test_every_disagreement_has_a_reason():
    for claim in claims.CLAIMS:
        found = claim.ours()
        assert found is None or found.agrees or claim.reason, claim.what


def test_claims_follow_the_results(monkeypatch, tmp_path):
    def given(module, rows):
        write_csv(tmp_path / f"{module.__name__}.csv", rows)
        monkeypatch.setattr(module, "FILE", tmp_path / f"{module.__name__}.csv")

    given(learning, learning_rows("paper"))
    assert claims.ranks("paper")().agrees
    assert claims.ranks("paper")().ours.startswith("1.00, ")
    assert claims.pairs("paper")() == ("30, 30, 30 of 30", True)
    assert claims.difference("paper", "amp-fp16")().agrees
    assert not claims.difference("paper", "fp32")().agrees
    assert claims.best_tasks().agrees
    assert not claims.ranks("fp16")().agrees
    rows = learning_rows("paper")
    place = next(i for i, row in enumerate(rows) if (row["method"], row["env"]) == ("paper", "Walker2d-v5"))
    given(learning, [*rows[:place], crashed(rows[place]), *rows[place + 1 :]])
    assert not claims.best_tasks().agrees  # a crash is no best
    close = [
        row | ({"return_auc": str(seed + place)} if row["method"] in ("sb3", "fp32") else {})
        for place, seed, row in ((TASKS.index(row["env"]), int(row["seed"]), row) for row in rows)
    ]
    given(learning, close)
    assert claims.same_as_sb3().agrees
    given(learning, [row | ({"curve": "0:2.0 1:3.0"} if row["method"] == "sb3" else {}) for row in close])
    assert not claims.same_as_sb3().agrees  # they did not start alike
    given(learning, learning_rows("amp-bf16"))
    assert not claims.ranks("paper")().agrees
    assert not claims.best_tasks().agrees
    given(learning, learning_rows()[:-3])
    assert claims.ranks("fp16")() is None
    given(ablations, ablation_rows())
    assert claims.taken_away() == ("602 ± 2; 302 ± 2; 402 ± 2", True)
    assert claims.crashes().agrees
    assert claims.put_back() == ("202 ± 2; 402 ± 2; 602 ± 2", True)
    assert not claims.endpoints().agrees
    for setting, supports in (("paper ABC", False), ("paper BC", True), ("paper AC", True)):
        given(
            ablations,
            [crashed(row) if row["setting"] == setting and row["seed"] == "0" else row for row in ablation_rows()],
        )
        assert claims.taken_away().agrees == supports, setting
        assert not claims.put_back().agrees or setting == "paper BC"
        assert "1 crashed" in claims.taken_away().ours
    given(ablations, ablation_rows()[1:])
    assert claims.put_back() is not None
    given(ablations, ablation_rows()[2:])
    assert claims.put_back() is None
    monkeypatch.setattr(stages, "FILE", tmp_path / "none.csv")
    assert claims.second_moments() is None
    assert "not run yet" in claims.table()
