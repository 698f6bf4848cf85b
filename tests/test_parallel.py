"""Two processes that train one model, on one machine: ``tests/ranks.py`` says what they do."""

import copy
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from filelock import FileLock
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from sb3_fp16 import PPOFP16, Precision, distributed
from sb3_fp16.buffers import RolloutBufferFP16
from sb3_fp16.distributed import LostRankError, Peer
from sb3_fp16.engines.eager import EagerEngine
from sb3_fp16.engines.parallel import ParallelEngine, agree, fingerprints
from sb3_fp16.normalization import SharedStatistics
from tests import ranks
from tests.ranks import PRECISIONS, SETTINGS, make_model, same_samples, watch

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(*arguments):
    """Two ranks without torchrun, which would end the second as soon as the first is gone."""
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", *map(str, arguments)],
            env={**os.environ, **given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            **pipes,
        )
        for rank in (0, 1)
    ]


def both(processes, timeout=300):
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=timeout))
    finally:
        for process in processes:
            process.kill()
    pairs = zip(processes, outputs, strict=True)
    return [SimpleNamespace(stdout=out, stderr=err, code=process.returncode) for process, (out, err) in pairs]


def reference(precision):
    """A rollout of four environments, and what one process makes of it; 20 minibatches."""
    model = make_model(4, precision)
    train, model.train = model.train, lambda: None
    model.learn(4 * 32)
    model.train = train
    given = copy.deepcopy((model.get_parameters(), model.rollout_buffer))
    model.use_engine(EagerEngine(model.policy, model.batch_size))
    samples = []
    watch(model.engine, "_normalize", lambda _, advantages: samples.append(advantages.double()))
    return given, {**same_samples(model, model.rollout_buffer), "advantages": samples}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What both ranks have seen of every scenario; pytest's own workers share it."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    folder = tmp_path_factory.getbasetemp() if worker is None else tmp_path_factory.getbasetemp().parent
    folder = folder / "ranks"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            references = {}
            for precision in PRECISIONS:
                given, references[precision] = reference(precision)
                (folder / f"{precision}.pickle").write_bytes(pickle.dumps(given))
            (folder / "references.pickle").write_bytes(pickle.dumps(references))
            for rank, done in enumerate(both(start("--folder", folder))):
                (folder / f"rank{rank}.out").write_text(done.stdout)
                assert done.code == 0, done.stderr
    found = [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in (0, 1)]
    references = pickle.loads((folder / "references.pickle").read_bytes())
    return SimpleNamespace(folder=folder, references=references, of=lambda name: results(found, name))


def results(found, name):
    """Of both ranks; an error of one is the test's."""
    for rank in found:
        if isinstance(rank[name], Exception):
            raise rank[name]
    return [rank[name] for rank in found]


def assert_same_bits(one, other, where=""):
    assert type(one) is type(other), where
    if isinstance(one, th.Tensor):
        assert one.dtype == other.dtype, where
        assert one.shape == other.shape, where
        bits = (x.contiguous().reshape(-1).view(th.uint8) for x in (one, other))
        assert th.equal(*bits), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same_bits(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same_bits(a, b, f"{where}/{i}")
    else:
        assert one == other, where


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ranks_have_the_same_bits(seen, precision):
    one, other = seen.of(f"identical {precision}")
    assert one["engine"] == other["engine"] == "parallel"
    assert_same_bits(one["state"], other["state"])
    assert one["steps"] == other["steps"] == 3 * 4 * 32
    totals = [a + b for a, b in zip(one["rows"], other["rows"], strict=True)]
    assert set(totals) == {6, 2}
    assert one["rows"] != other["rows"]
    assert 0 in other["rows"], "some minibatch must leave a rank without samples"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_ranks_are_one_process_with_all_environments(seen, precision):
    """
    Gradients within a unit of the format of the largest part that is summed in their row, as each part is rounded and
    then the sum; after 20 minibatches parameters within 5 % of their movement.
    """
    one, other = seen.of(f"against one {precision}")
    (start_at, _), want = pickle.loads((seen.folder / f"{precision}.pickle").read_bytes()), seen.references[precision]
    assert len(one["norms"]) == len(want["norms"]) == 20
    assert_same_bits(one["state"]["scales"], want["state"]["scales"])
    unit = 2.0 ** -min(20, Precision.of(precision).format.significand_bits)
    for i, (got, exact) in enumerate(zip(one["gradients"][0], want["gradients"][0], strict=True)):
        parts = sum(found["own"][0][i].double().abs() for found in (one, other))
        bound = unit * parts.reshape(len(parts), -1).amax(1, keepdim=True) + 1e-7
        assert ((got.double() - exact.double()).abs().reshape(len(parts), -1) <= bound).all()
    moved, apart = [], []
    for name, before in start_at["policy"].items():
        moved.append((want["state"]["policy"][name].double() - before.double()).flatten())
        apart.append((want["state"]["policy"][name].double() - one["state"]["policy"][name].double()).flatten())
    moved, apart = (float(th.cat(parts).square().mean().sqrt()) for parts in (moved, apart))
    assert apart <= 0.05 * moved
    assert moved > 1e-4
    for name in ("value_loss", "policy_gradient_loss", "entropy_loss", "grad_norm", "loss"):
        assert one["logs"][f"train/{name}"] == pytest.approx(want["logs"][f"train/{name}"], rel=2e-2, abs=2e-4), name
    for name in ("approx_kl", "clip_fraction"):
        assert one["logs"][f"train/{name}"] == pytest.approx(want["logs"][f"train/{name}"], rel=0.1, abs=2e-4), name
    assert one["logs"]["train/skipped_steps"] == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_reductions_match_float64(seen, precision):
    """Advantage statistics of every minibatch, sums of gradients, and the norm of every step."""
    found, want = seen.of(f"against one {precision}"), seen.references[precision]
    kind = Precision.of(precision).format
    for mean, std, advantages in zip(*found[0]["moments"], want["advantages"], strict=True):
        assert float(mean) == pytest.approx(float(advantages.mean()), rel=1e-6, abs=1e-7)
        assert float(std) == pytest.approx(float(advantages.std()), rel=1e-6)
    assert_same_bits(found[0]["moments"], found[1]["moments"])
    scales = found[0]["state"]["scales"]
    for step, norm in enumerate(found[0]["norms"]):
        squares = th.zeros(len(scales), dtype=th.float64)
        parts = zip(found[0]["own"][step], found[1]["own"][step], found[0]["gradients"][step], strict=True)
        for i, (a, b, total) in enumerate(parts):
            exact = a.double() + b.double()
            if precision != "fp32":  # torch's Adam is handed clipped gradients
                assert ((total.double() - exact).abs() <= 0.5001 * kind.tick(exact.float())).all()
            squares[0 if i in of_policy(len(found[0]["own"][step])) else 1] += (
                kind.round(exact.float()).double().square().sum()
            )
        assert norm == pytest.approx(float((squares / scales.double().square()).sum().sqrt()), rel=1e-5)


def of_policy(count):
    """Which parameters of ``MlpPolicy`` are the policy network's: log_std, its two layers, the action head."""
    assert count == 13
    return {0, 1, 2, 3, 4, 9, 10}


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(seen):
    one, other = seen.of("not_finite")
    assert_same_bits(one["states"], other["states"])
    before, skipped, after = one["states"]
    assert_same_bits(before["policy"], skipped["policy"])
    assert_same_bits(before["optimizer"]["state"], skipped["optimizer"]["state"])
    assert skipped["scales"].tolist() == [before["scales"][0] / 2, before["scales"][1]]
    assert one["skipped"] == other["skipped"] == [1]
    assert any(not th.equal(after["policy"][name], x) for name, x in before["policy"].items())


def test_target_kl_stops_all_ranks_at_the_same_minibatch(seen):
    one, other = seen.of("target_kl")
    assert 1 < one["epochs"] == other["epochs"] < 50
    assert one["steps"]["step"] == other["steps"]["step"]
    assert_same_bits(one["state"], other["state"])


def test_rank_0_saves_and_all_go_on(seen):
    one, other = seen.of("save_and_load")
    assert [path.name for path in seen.folder.glob("by_rank_*")] == ["by_rank_0.zip"]
    assert_same_bits(one["saved"], one["loaded"])
    assert_same_bits(one["saved"], other["saved"])
    assert_same_bits(one["state"], other["state"])
    assert one["steps"] == other["steps"] == 4 * 4 * 32
    assert one["updates"] == 4 * SETTINGS["n_epochs"]
    assert other["quiet"] == (0, None)
    assert one["quiet"][0] == 1


def test_one_process_goes_on_with_what_two_have_trained(seen):
    model = PPOFP16.load(seen.folder / "by_rank_0.zip", ranks.make_envs(4), device="cpu")
    assert_same_bits(ranks.state_of(model), seen.of("save_and_load")[0]["saved"])
    assert model.engine.name != "parallel"
    assert model.num_timesteps == 2 * 4 * 32
    model.verbose, model.tensorboard_log = 0, None
    model.learn(4 * 32, reset_num_timesteps=False)
    assert model.num_timesteps == 3 * 4 * 32


def test_all_ranks_start_from_rank_0(seen):
    one, other = seen.of("takes_over")
    assert any(not th.equal(x, other["before"]["policy"][name]) for name, x in one["before"]["policy"].items())
    assert_same_bits(one["after"], other["after"])
    assert_same_bits(one["before"]["policy"], other["after"]["policy"])
    assert_same_bits(one["before"]["optimizer"]["state"], other["after"]["optimizer"]["state"])
    assert other["before"]["optimizer"]["param_groups"][0]["seed"] == 8
    assert other["after"]["optimizer"]["param_groups"][0]["seed"] == 0
    assert other["after"]["scales"].tolist() == [2.0**10 / 2, 2.0**5 / 2]
    assert one["steps"] == other["steps"] == 2 * 4 * 32
    assert one["updates"] == other["updates"] == SETTINGS["n_epochs"]


def test_a_model_made_before_the_ranks_met_joins_them(seen):
    one, other = seen.of("early")
    assert one["before"] != one["after"] == other["after"] == "parallel"
    assert one["scales"] == [2.0**10, 2.0**5]
    assert_same_bits(one["state"], other["state"])


@pytest.mark.parametrize("name", ["model", "script"])
def test_ranks_differ_in_seeds(seen, toy, name):
    one, other = (found[name] for found in seen.of("seeds"))
    for what in ("observations", "actions"):
        rows = np.concatenate([one[what], other[what]])
        assert len(np.unique(rows, axis=0)) == 5, what
    for a, b in zip(one["noise"], other["noise"], strict=True):
        assert a != b
    alone = make_vec_env(toy, n_envs=5, seed=3).reset()
    np.testing.assert_array_equal(np.concatenate([one["observations"], other["observations"]]), alone)


def test_steps_rates_and_episodes_are_those_of_all_ranks(seen):
    one, other = seen.of("counting")
    assert one["seen"] == other["seen"] == [(4 * n, 4 * n) for n in range(1, 65)]
    assert one["steps"] == 2 * 4 * 32
    assert one["last"] == other["last"] == 0
    assert one["episodes"] == other["episodes"]
    assert len(one["episodes"]) == 4 * (64 // 20)


def test_a_callback_of_any_rank_ends_training_of_all(seen):
    one, other = seen.of("stops")
    assert one["updates"] == other["updates"] == 1
    assert one["steps"] == other["steps"] == 2 * 4 * 32
    assert_same_bits(one["state"], other["state"])


def test_statistics_of_vec_normalize_are_those_of_all_ranks(seen):
    one, other = seen.of("normalized")
    for name in ("obs_rms", "ret_rms"):
        for field in ("mean", "var", "count"):
            a, b = (getattr(found["first"][name], field) for found in (one, other))
            np.testing.assert_array_equal(a, b)
    for a, b in zip(one["frozen"], other["frozen"], strict=True):
        np.testing.assert_array_equal(a, b)
    shown = np.concatenate([one["shown"], other["shown"]]).astype(np.float64)
    exact = RunningMeanStd(shape=(3,))
    exact.update(shown)
    found = one["first"]["obs_rms"]
    assert found.count == pytest.approx(exact.count, rel=1e-12)
    # SB3 averages each step's observations in FP32, so that their number per rank shows.
    np.testing.assert_allclose(found.mean, exact.mean, atol=1e-7)
    np.testing.assert_allclose(found.var, exact.var, rtol=1e-6)
    assert one["first"]["ret_rms"].count == pytest.approx(2 * 4 * 32 + 1e-4)
    np.testing.assert_array_equal(one["frozen"][0], found.mean)
    np.testing.assert_array_equal(one["frozen"][1], found.var)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("precision", "Rank 1 has precision 'paper', but rank 0 has 'fp16'"),
        ("network", r"Rank 1 has parameter mlp_extractor.policy_net.0.weight \(\(32, 3\).*rank 0 has \(\(64, 3\)"),
        ("n_steps", "Rank 1 has n_steps 16, but rank 0 has 32"),
        ("schedule", "Rank 1 has at progress 0 .*learning_rate=1e-05"),
        ("frozen", "Rank 1 has parameter action_net.bias .*frozen.*trained"),
        ("total", "Rank 1 has total_timesteps 129, but rank 0 has 128"),
    ],
)
def test_a_rank_that_trains_another_model_is_refused_by_name(seen, name, says):
    for _ in range(2):
        with pytest.raises(ValueError, match=says):
            seen.of(f"refused {name}")


@pytest.mark.parametrize(
    ("scenario", "kind", "says"),
    [
        ("comes_apart", RuntimeError, r"come apart: action_net.bias.* of rank 1 differ from rank 0's"),
        ("changed_settings", ValueError, "Rank 1 has n_epochs 2, but rank 0 has 5"),
        ("own_buffer", ValueError, "OwnBuffer draws samples in its own way"),
    ],
)
def test_ranks_that_part_ways_end_alike(seen, scenario, kind, says):
    for rank in (0, 1):
        error = pickle.loads((seen.folder / f"rank{rank}.pickle").read_bytes())[scenario]
        assert type(error) is kind
        assert re.search(says, str(error))


def test_parameters_that_any_rank_uses_have_a_gradient(seen):
    one, other = seen.of("parts_that_no_sample_uses")
    assert one["present"] == other["present"]
    unused = {name for name, is_present in one["present"].items() if not is_present}
    assert unused == {"mlp_extractor.never.weight", "mlp_extractor.never.bias"}
    assert_same_bits(one["state"], other["state"])


def test_a_step_reads_nothing_from_the_device(seen):
    """But for the decision of ``fp32`` and which parameters took part, where a rank has no samples: not here."""
    for found in seen.of("stays_on_its_device"):
        assert found["read"] == []


def test_rank_0_alone_prints_logs_and_saves(seen):
    one, other = seen.of("output")
    assert (one["evaluated"], other["evaluated"]) == (2, 0)
    assert (one["audits"], other["audits"]) == (1, 0)
    assert one["calls"] == other["calls"] == 64
    assert {path.name for path in (seen.folder / "output").iterdir()} >= {
        "best_model.zip",
        "evaluations.npz",
        "audit.csv",
    }
    printed, silent = ((seen.folder / f"rank{rank}.out").read_text() for rank in (0, 1))
    assert "Using precision fp16 and the parallel engine (one of 2 ranks)" in printed
    assert "total_timesteps" in printed
    assert "parallel" not in silent
    assert "total_timesteps" not in silent
    assert silent.count("Using cpu device") == 1, "by the model that was made before the ranks met"
    assert len(list((seen.folder / "logs").glob("*/events*"))) == 3, "one for each call of learn"


@pytest.mark.parametrize("how", ["rollout", "update"])
def test_a_killed_rank_ends_the_other_with_a_clear_error(tmp_path, how):
    processes = start(f"lost {how}", "--folder", tmp_path)
    processes[1].wait(timeout=120)
    gone = time.monotonic()
    survivor, killed = both(processes)
    assert time.monotonic() - gone < 20
    assert killed.code == -signal.SIGKILL
    assert survivor.code == 1
    last = survivor.stderr.strip().splitlines()[-1]
    assert (
        f"LostRankError: Rank 0 of 2 stops, it waits for another in vain: rank 1 (process {processes[1].pid})" in last
    )
    assert survivor.stderr.count("Traceback") == 1


def test_a_rank_that_hangs_ends_the_other_in_time(tmp_path):
    processes = start("lost hangs", "--folder", tmp_path, "--timeout", 4)
    try:
        _, errors = processes[0].communicate(timeout=120)
    finally:
        processes[1].kill()  # it is stopped, and would never end
        processes[1].communicate()
    assert processes[0].returncode == 1
    assert re.search("LostRankError: .*which one is not known.*timeout.*4000ms", errors.strip().splitlines()[-1])


def test_torchrun_ends_all_ranks_of_which_one_is_killed(tmp_path):
    command = [
        *TORCHRUN,
        "--master-port",
        str(free_port()),
        "-m",
        "tests.ranks",
        "lost update",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert re.search(r"Root Cause(?s:.*)rank +: 1 (?s:.*)SIGKILL", done.stderr)


def test_the_example_trains_with_torchrun(tmp_path):
    command = [*TORCHRUN, "--master-port", str(free_port()), "examples/train_parallel.py", "--steps", "4096"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"return -\d+\.\d ± \d+\.\d after 4096 steps, one of 2 ranks", done.stdout.strip())


@pytest.mark.gpu
@pytest.mark.skipif(th.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_ranks_on_two_devices_have_the_same_bits(tmp_path):
    for done in both(start("on_devices", "--folder", tmp_path)):
        assert done.code == 0, done.stderr
    found = [pickle.loads((tmp_path / f"rank{rank}.pickle").read_bytes())["on_devices"] for rank in (0, 1)]
    assert_same_bits(found[0]["state"], found[1]["state"])
    assert [one["devices"] for one in found] == [{"cuda:0"}, {"cuda:1"}]
    assert "nccl" in found[0]["backend"]


def test_a_process_that_is_alone_is_as_it_was(toy, monkeypatch):
    code = (
        "import sys; from tests.ranks import make_model; make_model().learn(256);"
        "print([name for name in sys.modules if name in ('sb3_fp16.learners', 'sb3_fp16.engines.parallel')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert distributed.init() == distributed.rank() == 0
    distributed.barrier()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert distributed.init() == 0
    assert distributed.current() is None
    assert not th.distributed.is_initialized()


def test_what_cannot_start_says_why(monkeypatch):
    with pytest.raises(ValueError, match="device='tpu'"):
        distributed.init("tpu")
    with pytest.raises(ValueError, match="timeout=0"):
        distributed.init(timeout=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT"):
        distributed.init()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(th.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="Local rank 1 has no CUDA device of its own, as there are 1"):
        distributed.init()
    monkeypatch.setattr(th.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="as there are 0"):
        distributed.init("cuda")
    with pytest.raises(LostRankError, match=r"Rank 1 met no others at 127\.0\.0\.1"):
        distributed.init(timeout=1)


def test_a_peer_that_has_ended_is_known():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = Peer(socket.gethostname(), process.pid)
    assert not peer.has_ended
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not asked for its exit status yet
    assert peer.has_ended
    process.communicate()
    assert peer.has_ended
    assert not Peer("elsewhere", process.pid).has_ended


class Alone:
    """A group of one rank, for what needs no second."""

    rank, size = 0, 1

    def sum(self, tensor):
        return tensor

    def gather(self, value):
        return [value]

    def broadcast(self, value):
        return value


@pytest.mark.parametrize("precision", [*PRECISIONS, "amp-fp16", "amp-bf16-sr", "bf16-sr", "e5m7"])
def test_one_rank_is_the_reference(precision):
    """Bit for bit, as a sum over one rank changes nothing."""
    states, rollout = [], collected_rollout(precision)
    for kind in (EagerEngine, lambda *given: ParallelEngine(*given, Alone())):
        model = make_model(4, precision, normalize_advantage=False)
        model.use_engine(kind(model.policy, 32))
        states.append(same_samples(model, copy.deepcopy(rollout))["state"])
    assert_same_bits(*states)


def collected_rollout(precision):
    model = make_model(4, precision)
    model.train = lambda: None
    return model.learn(4 * 32).rollout_buffer


@pytest.mark.parametrize("samples", [1, 2])
def test_minibatches_of_one_sample_are_not_normalized(samples):
    model = make_model(1, batch_size=2)
    engine = ParallelEngine(model.policy, 2, Alone())
    rollout = collected_rollout("fp16")
    part = ranks.share_of(rollout, [0])
    normalized = []
    watch(engine, "_normalize", lambda result, given: normalized.append((given, result)))
    model.use_engine(engine)
    model.set_logger(ranks.RecordingLogger())
    model.rollout_buffer, model.batch_size, model.n_epochs = part, 31 if samples == 1 else 30, 1
    model.train()
    (_, first), (given, last) = normalized
    assert len(given) == samples
    assert th.isfinite(last).all()
    assert th.equal(given, last) == (samples == 1)
    assert float(first.mean()) == pytest.approx(0, abs=1e-5)


def test_what_has_no_parallel_form_is_refused_by_name(toy):
    naive = PPOFP16("MlpPolicy", toy(), precision="naive-fp16", device="cpu")
    with pytest.raises(ValueError, match="Precision naive-fp16 rounds every reduction"):
        ParallelEngine(naive.policy, 64, Alone())
    model = PPOFP16("MlpPolicy", toy(), device="cpu", policy_kwargs={"net_arch": [16]})
    model.policy.mlp_extractor.policy_net.add_module("norm", nn.BatchNorm1d(16))
    with pytest.raises(ValueError, match=r"mlp_extractor.policy_net.norm is a BatchNorm1d"):
        ParallelEngine(model.policy, 64, Alone())


def test_ranks_agree_or_the_difference_is_named():
    agree([{"a": 1, "b": math.nan}, {"a": 1, "b": math.nan}])
    with pytest.raises(ValueError, match="Rank 2 has b 3, but rank 0 has 2"):
        agree([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}])
    with pytest.raises(ValueError, match="Rank 1 has c 0, but rank 0 has none"):
        agree([{"a": 1}, {"a": 1, "c": 0}])
    with pytest.raises(ValueError, match=r"x\.\.\., but"):
        agree([{"a": "y"}, {"a": "x" * 1000}])


@pytest.mark.parametrize("dtype", [th.float16, th.bfloat16, th.float32, th.float64, th.int64, th.bool])
def test_fingerprints_see_any_one_bit(dtype):
    tensor = (th.randn(7, 5, generator=th.Generator().manual_seed(0)) * 4).to(dtype)
    (known,) = fingerprints([tensor])
    words = {1: th.int8, 2: th.int16, 4: th.int32, 8: th.int64}[tensor.element_size()]
    for element in range(35):
        for bit in range(8 * tensor.element_size() if dtype != th.bool else 1):
            other = tensor.clone().reshape(-1)
            mask = 1 << bit
            bits = other.view(words)
            bits[element] ^= (
                mask - (1 << 8 * tensor.element_size()) if mask == 1 << 8 * tensor.element_size() - 1 else mask
            )
            assert fingerprints([other.view(7, 5)])[0] != known
    swapped = tensor.clone()
    swapped[0, 0], swapped[0, 1] = tensor[0, 1].clone(), tensor[0, 0].clone()
    assert (fingerprints([swapped])[0] != known) == (tensor[0, 0] != tensor[0, 1])
    assert fingerprints([tensor.t().contiguous().t()])[0] == known, "whatever lies where"
    assert fingerprints([th.zeros(()), th.zeros(0)]).shape == (2,)


def test_statistics_merge_as_if_one_process_had_seen_all(toy):
    """Far from zero, over several exchanges, with dictionaries and nested wrappers; FP64 throughout."""
    generator = np.random.default_rng(0)
    envs = [VecNormalize(VecNormalize(DummyVecEnv([toy]))) for _ in range(3)]
    shared = [SharedStatistics(env) for env in envs]
    assert len(shared[0].running) == 4
    exact = [RunningMeanStd(shape=statistics.mean.shape) for statistics in shared[0].running]
    for exchange in range(4):
        for rank, one in enumerate(shared):
            for statistics, whole in zip(one.running, exact, strict=True):
                samples = 1e3 + generator.normal(size=(5 + rank + exchange, *statistics.mean.shape)) * 0.1
                statistics.update(samples)
                whole.update(samples)
        added = [one.added() for one in shared]
        for one in shared:
            one.merge(added)
    for one in shared:
        for statistics, whole, first in zip(one.running, exact, shared[0].running, strict=True):
            assert statistics.count == pytest.approx(whole.count, rel=1e-12)
            np.testing.assert_allclose(statistics.mean, whole.mean, rtol=1e-10)
            np.testing.assert_allclose(statistics.var, whole.var, rtol=1e-6)
            np.testing.assert_array_equal(statistics.var, first.var)
    before = shared[0].give()
    shared[0].merge([one.added() for one in shared])
    for statistics, known in zip(shared[0].running, before, strict=True):
        np.testing.assert_array_equal(statistics.mean, known.mean)
        np.testing.assert_array_equal(statistics.var, known.var)


def test_rows_of_samples_are_those_of_sb3(toy):
    buffer = RolloutBufferFP16(4, toy().observation_space, toy().action_space, device="cpu", n_envs=3)
    number_of = np.arange(12).reshape(3, 4).T.reshape(-1)  # step by step, where SB3 counts env by env
    np.testing.assert_array_equal(number_of[buffer.rows_of(np.arange(12))], np.arange(12))
