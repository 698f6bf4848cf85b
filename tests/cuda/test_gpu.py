"""On a CUDA device: what the simulator cannot show, and that what it shows is so. ``pytest -m gpu``."""

import gc
import itertools
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO

from sb3_fp16 import PPOFP16, SHARP, kernels
from sb3_fp16.engines.graph import _Update
from sb3_fp16.sharp import ROOT_ROUNDING, SHARING, WRITEBACK
from tests.cuda.test_graph import BOUNDS, PRESETS, agree, both
from tests.stepping import SHAPES, assert_same_bits, compare, trained
from tests.test_engines import collected
from tests.test_native import ACTIONS, logged

DEVICE = "cuda"
ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:You are trying to run:UserWarning")]


@pytest.fixture(autouse=True)
def _gpu():
    if not th.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    if DEVICE not in kernels.MODULES:
        pytest.skip("sb3_fp16._cuda is not built")


def filled(toy_env, **settings):
    """A model on the device with one rollout, its update to be run."""
    settings = {"n_steps": 160, "n_epochs": 3, "batch_size": 60, "device": DEVICE, **settings}
    model = collected(PPOFP16, toy_env(), **settings)
    assert model.engine.name == "graph"
    return model


def updated(model, seed=0):
    np.random.seed(seed)
    model.train()
    return model


def tensors(model):
    """All that an update changes, by name."""
    found = {f"parameter {i}": p.data for i, p in enumerate(model.policy.parameters())}
    for i, p in enumerate(model.policy.parameters()):
        found |= {f"{name} {i}": x for name, x in model.policy.optimizer.state[p].items()}
    return found | model.engine.state_dict()


def assert_same(a, b):
    """Bit for bit, wherever they lie."""
    a, b = tensors(a), tensors(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert th.equal(a[name].cpu(), b[name].cpu()), name


def alike(toy_env, **settings):
    """Two models with the same rollout."""
    one, two = (filled(toy_env, **settings) for _ in range(2))
    for name, array in one.rollout_buffer.arrays().items():
        assert array.tobytes() == two.rollout_buffer.arrays()[name].tobytes(), name
    assert_same(one, two)
    return one, two


# --- the engine ---


def test_ppo_picks_the_graph_engine(toy, capsys):
    model = PPOFP16("MlpPolicy", toy(), device=DEVICE, verbose=1)
    assert model.engine.name == "graph"
    line = "Using precision fp16 and the graph engine (the complete update is one CUDA graph)"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("actions", ["box", "discrete", "multidiscrete"])
def test_every_preset_with_every_head_is_the_references(toy, precision, actions):
    settings = {"n_steps": 160, "n_epochs": 2, "ent_coef": 0.05, "batch_size": 60, "learning_rate": 1e-3}
    models = both(partial(toy, ACTIONS[actions]), precision=precision, device=DEVICE, **settings)
    agree(*models, BOUNDS.get(precision, 0.05))
    assert models[2].engine.recorded == 1


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize(
    "settings",
    [
        {"policy_kwargs": {"net_arch": [100, 33, 512]}},
        {"policy_kwargs": {"net_arch": {"pi": [], "vf": [16]}}},
        {"clip_range_vf": 0.1, "normalize_advantage": False, "vf_coef": 1.3},
        {"policy_kwargs": {"optimizer_kwargs": {"weight_decay": 0.1, "eps": 1e-4}}},
    ],
)
def test_shapes_and_settings(toy, precision, settings):
    models = both(partial(toy, obs_dim=17), precision=precision, device=DEVICE, n_steps=100, n_epochs=2, **settings)
    agree(*models)


@pytest.mark.parametrize("precision", PRESETS)
def test_a_replay_is_its_launches_one_by_one(toy, precision, monkeypatch):
    replayed, launched = alike(toy, precision=precision)
    updated(updated(replayed, 1), 2)
    monkeypatch.setattr(_Update, "_capture", lambda update, work: work)
    updated(updated(launched, 1), 2)
    assert replayed.engine.recorded == launched.engine.recorded == 1
    assert_same(replayed, launched)
    assert logged(replayed) == pytest.approx(logged(launched), rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("precision", PRESETS)
def test_two_replays_from_one_state_give_the_same_bits(toy, precision):
    model = updated(filled(toy, precision=precision))
    before = {name: x.clone() for name, x in tensors(model).items()}
    results = []
    for _ in range(2):
        for name, x in tensors(model).items():
            x.copy_(before[name])
        model.engine.load_state_dict({name: before[name] for name in model.engine.state_dict()})
        updated(model)
        results.append({name: x.clone() for name, x in tensors(model).items()})
    assert model.engine.recorded == 1
    assert all(th.equal(results[0][name], results[1][name]) for name in before)
    assert not th.equal(before["parameter 1"], results[0]["parameter 1"])


def test_the_current_stream_is_respected(toy):
    """What was enqueued there before the update, however slow, comes before it, also where the graph is captured."""
    usual, other = alike(toy)
    for parameter in usual.policy.parameters():
        parameter.data.mul_(0.5)
    updated(updated(usual))
    th.cuda.synchronize()
    with th.cuda.stream(th.cuda.Stream()):
        th.cuda._sleep(100_000_000)
        for parameter in other.policy.parameters():
            parameter.data.mul_(0.5)
        updated(updated(other))
    assert other.engine.recorded == 1
    assert_same(usual, other)


def test_a_graph_may_be_replayed_on_another_stream_than_it_was_captured_from(toy):
    usual, other = alike(toy)
    updated(updated(usual))
    updated(other)
    with th.cuda.stream(th.cuda.Stream()):
        updated(other)
    assert_same(usual, other)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_target_kl_stops_alike(toy, precision):
    settings = {"precision": precision, "n_steps": 320, "target_kl": 0.002, "learning_rate": 2e-3, "device": DEVICE}
    before, eager, graph = both(toy, **settings)
    assert 0 < eager._n_updates < 10
    assert eager._n_updates == graph._n_updates
    agree(before, eager, graph)


def test_overflow_skips_alike(toy):
    settings = {"n_steps": 256, "n_epochs": 3, "learning_rate": 1e-3, "device": DEVICE}
    _, eager, graph = both(partial(toy, reward_scale=3e4), **settings)
    counts = [logged(model)["train/skipped_steps"] for model in (eager, graph)]
    assert counts[0] == counts[1] > 0
    for name, value in eager.engine.state_dict().items():
        assert th.equal(graph.engine.state_dict()[name], value), name


def test_new_graphs_take_no_more_memory(toy):
    """Each stream that products were captured on keeps a workspace for good."""
    model, sizes = updated(filled(toy)), []
    for number in range(6):
        model.n_epochs = 1 + number % 2
        updated(model)
        gc.collect()
        sizes.append(th.cuda.memory_allocated())
    assert model.engine.recorded == 7
    assert sizes[-1] <= sizes[1]


def test_it_learns(toy):
    settings = {"n_steps": 128, "n_epochs": 2, "gamma": 0.0, "learning_rate": 3e-3, "seed": 0}
    model = PPOFP16("MlpPolicy", toy(), device=DEVICE, **settings)
    model.learn(128 * 12)
    returns = [episode["r"] for episode in model.ep_info_buffer]
    assert np.mean(returns[-10:]) > np.mean(returns[:10])
    assert model.engine.recorded == 1


# --- files and devices ---


@pytest.mark.parametrize("precision", ["fp16", "paper", "fp32"])
def test_a_model_goes_on_on_the_cpu_and_back(toy, precision, tmp_path):
    settings = {"n_steps": 64, "n_epochs": 2, "seed": 0, "precision": precision}
    model = PPOFP16("MlpPolicy", toy(), device=DEVICE, **settings).learn(128)
    model.save(tmp_path / "gpu")
    on_host = PPOFP16.load(tmp_path / "gpu", env=toy(), device="cpu")
    assert {p.device.type for p in on_host.policy.parameters()} == {"cpu"}
    assert_same(model, on_host)
    before = on_host.policy.parameters_to_vector()
    on_host.learn(64, reset_num_timesteps=False)
    assert (on_host.policy.parameters_to_vector() != before).any()
    on_host.save(tmp_path / "cpu")
    back = PPOFP16.load(tmp_path / "cpu", env=toy(), device=DEVICE)
    assert_same(on_host, back)
    back.learn(64, reset_num_timesteps=False)
    assert back.engine.recorded == 1
    assert int(back.policy.optimizer.state[back.policy.value_net.bias]["step"]) == 8
    PPO.load(tmp_path / "gpu", env=toy(), device="cpu").learn(64)


def test_parameters_pass_between_models_on_different_devices(toy):
    model = updated(filled(toy))
    on_host = PPOFP16("MlpPolicy", toy(), device="cpu")
    on_host.set_parameters(model.get_parameters(), device="cpu")
    assert_same(model, on_host)
    other = PPOFP16("MlpPolicy", toy(), device=DEVICE)
    other.set_parameters(on_host.get_parameters(), device=DEVICE)
    assert_same(model, other)


def test_a_policy_may_visit_the_cpu(toy):
    stayed, moved = alike(toy)
    updated(updated(stayed))
    updated(moved).policy.to("cpu")
    assert moved.predict(np.zeros(3, np.float32))[0].shape == (2,)
    moved.policy.to(DEVICE)
    updated(moved)
    assert_same(stayed, moved)


def test_a_second_device(toy):
    if th.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device")
    current = th.cuda.current_device()
    before, eager, graph = both(toy, updates=2, n_epochs=2, n_steps=160, batch_size=60, device=f"{DEVICE}:1")
    agree(before, eager, graph)
    assert {x.device.index for x in tensors(graph).values()} == {1}
    assert th.cuda.current_device() == current


# --- SHARP by itself ---


@pytest.mark.parametrize("root_rounding", ROOT_ROUNDING)
@pytest.mark.parametrize("writeback", WRITEBACK)
@pytest.mark.parametrize("sharing", SHARING)
def test_kernels_are_torchs(sharing, writeback, root_rounding, monkeypatch):
    modes = {"sharing": sharing, "writeback": writeback, "root_rounding": root_rounding}
    compare(th.float16, monkeypatch, share=0.005, device=DEVICE, **modes)


@pytest.mark.parametrize(
    ("dtype", "extra"),
    [
        (th.float16, {"weight_decay": 0.1}),
        (th.float16, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        (th.float16, {"significand_bits": 6}),
        (th.bfloat16, {"scale": 1e25}),
        (th.bfloat16, {"scale": 1e-25, "eps": 1e-30}),
        (th.float32, {"state_dtype": th.bfloat16}),
    ],
)
def test_kernels_are_torchs_in_every_format(dtype, extra, monkeypatch):
    compare(dtype, monkeypatch, share=0.005, device=DEVICE, **extra)


def assert_bits_of_the_simulator(dtype, **settings):
    assert_same_bits(*(trained(dtype, device=device, **settings) for device in (DEVICE, "cpu")))


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("dtype", [th.float16, th.bfloat16, th.float32])
def test_steps_have_the_simulators_bits(dtype, sharing, on_cpu):
    for writeback, root_rounding in itertools.product(WRITEBACK, ROOT_ROUNDING):
        modes = {"sharing": sharing, "writeback": writeback, "root_rounding": root_rounding}
        assert_bits_of_the_simulator(dtype, shapes=SHAPES[:8], **modes)
    assert_bits_of_the_simulator(dtype, sharing=sharing, weight_decay=0.1)
    assert_bits_of_the_simulator(dtype, sharing=sharing, shapes=[(3, 17), (5,)] * 30)


def test_a_users_graph_may_hold_a_step():
    """Gradients of elementwise operations, whose bits do not depend on where they are computed."""

    def made():
        generator = th.Generator().manual_seed(0)
        drawn = [th.randn(shape, generator=generator).half().to(DEVICE) for shape in ((40, 50), (50,), (6, 40))]
        weights = [x.clone().requires_grad_() for x in drawn]
        return weights, SHARP(weights, lr=th.tensor(1e-2, device=DEVICE), seed=3)

    def step(weights, optimizer):
        optimizer.zero_grad()
        sum((weight.float() - 3).square().sum() for weight in weights).backward()
        optimizer.step(coefficient=0.5)

    weights, optimizer = made()
    stream = th.cuda.Stream()
    with th.cuda.stream(stream):
        for _ in range(3):
            step(weights, optimizer)
    th.cuda.current_stream().wait_stream(stream)
    graph = th.cuda.CUDAGraph()
    with th.cuda.graph(graph):
        step(weights, optimizer)
    for number in range(5):
        if number == 3:
            optimizer.param_groups[0]["lr"].fill_(1e-3)  # which lies on the device
        graph.replay()
    eager_weights, eager = made()
    for number in range(8):
        if number == 6:
            eager.param_groups[0]["lr"].fill_(1e-3)
        step(eager_weights, eager)
    assert {int(state["step"]) for state in optimizer.state.values()} == {8}
    for ours, theirs in zip(weights, eager_weights, strict=True):
        assert th.equal(ours, theirs)
        assert all(th.equal(value, optimizer.state[ours][name]) for name, value in eager.state[theirs].items())
    assert optimizer.pop_statistics() == eager.pop_statistics()


# --- accesses ---

# Launches one by one, so that each tensor may have memory of its own, at whose end an access beyond it is seen.
ONE_UPDATE = """
from sb3_fp16 import PPOFP16
from sb3_fp16.engines.graph import _Update
from tests.conftest import Toy
from tests.test_engines import collected
_Update._capture = lambda update, work: work
settings = {"n_steps": 40, "batch_size": 24, "device": "cuda", "policy_kwargs": {"net_arch": [20]}}
for precision in ("fp16", "fp32"):
    model = collected(PPOFP16, Toy(obs_dim=17), precision=precision, **settings)
    model.train()
    assert model.engine.recorded == 1
"""


def test_the_sanitizer_finds_nothing():
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("compute-sanitizer is not there")
    options = ["--error-exitcode", "9", "--report-api-errors", "no", "--kernel-regex", "kns=sb3_fp16"]
    program = [sys.executable, "-W", "ignore", "-c", ONE_UPDATE]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    settings = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    tools = ("memcheck", "racecheck")
    running = [subprocess.Popen([found, "--tool", tool, *options, *program], **settings) for tool in tools]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for tool, process, output in zip(tools, running, outputs, strict=True):
        assert process.returncode == 0, (tool, output[-4000:])
        assert "ERROR SUMMARY: 0 errors" in output or "0 hazards displayed" in output, (tool, output[-4000:])
