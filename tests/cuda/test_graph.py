"""The graph engine against the reference, its kernels in the simulator: all of it but the capture itself."""

import copy
import math
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from torch import nn
from torch.overrides import TorchFunctionMode

from sb3_fp16 import PPOFP16, SHARP, Precision, kernels
from sb3_fp16.engines.eager import EagerEngine
from sb3_fp16.engines.graph import GraphEngine, _capture_stream, _full_sums, _Update, why_no_graph
from tests.test_engines import collected
from tests.test_native import ACTIONS, ACTIVATIONS, distance, logged

PRESETS = ("fp16", "paper", "bf16", "bf16-sr", "fp32", "amp-fp16", "amp-bf16")
BOUNDS = {"fp32": 2e-3}


def both(toy_env, updates=1, **settings):
    """The same model trained by each engine; parameters before, and the models."""
    models = [collected(PPOFP16, toy_env(), **settings) for _ in range(2)]
    models[0].use_engine(EagerEngine(models[0].policy, models[0].batch_size))
    models[1].use_engine(GraphEngine(models[1].policy, models[1].batch_size))
    before = models[0].policy.parameters_to_vector()
    for model in models:
        np.random.seed(0)
        with pytest.MonkeyPatch.context() as patch:
            if model.engine.name == "graph":  # it must not fall back
                patch.delattr(EagerEngine, "_losses")
            for _ in range(updates):
                model.train()
    assert [model.engine.name for model in models] == ["eager", "graph"]
    return before, *models


def agree(before, eager, graph, bound=0.05):
    assert distance(before, eager, graph) < bound
    ours = logged(graph)
    for key, value in logged(eager).items():
        assert ours[key] == pytest.approx(value, rel=0.02, abs=2e-3, nan_ok=True), key
    for a, b in zip(eager.policy.parameters(), graph.policy.parameters(), strict=True):
        ours, theirs = graph.policy.optimizer.state[b], eager.policy.optimizer.state[a]
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype
            assert ours[name].shape == theirs[name].shape
        assert int(ours["step"]) == int(theirs["step"])


@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("actions", ["box", "discrete", "multidiscrete"])
def test_every_preset_with_every_head(toy, precision, actions, on_cpu):
    settings = {"n_steps": 160, "n_epochs": 2, "ent_coef": 0.05, "batch_size": 60, "learning_rate": 1e-3}
    agree(*both(partial(toy, ACTIONS[actions]), precision=precision, **settings), BOUNDS.get(precision, 0.05))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_every_activation(toy, precision, activation, on_cpu):
    settings = {"n_steps": 64, "n_epochs": 2, "policy_kwargs": {"activation_fn": activation, "net_arch": [9, 20]}}
    agree(*both(toy, precision=precision, **settings), BOUNDS.get(precision, 0.05))


@pytest.mark.parametrize("net_arch", [[], [7], {"pi": [30], "vf": [9, 17]}, {"pi": [], "vf": [16]}])
@pytest.mark.parametrize("obs_dim", [1, 17])
def test_shapes(toy, net_arch, obs_dim, on_cpu):
    settings = {"n_steps": 70, "n_epochs": 2, "batch_size": 33, "policy_kwargs": {"net_arch": net_arch}}
    agree(*both(partial(toy, obs_dim=obs_dim), **settings))


@pytest.mark.parametrize("precision", ["fp16", "amp-bf16"])
@pytest.mark.parametrize(
    "settings",
    [
        {"clip_range_vf": 0.1, "ent_coef": 0.02, "clip_range": 0.01},
        {"normalize_advantage": False, "vf_coef": 1.3, "max_grad_norm": 0.01},
        {"batch_size": 1000, "policy_kwargs": {"optimizer_kwargs": {"weight_decay": 0.1, "eps": 1e-4}}},
    ],
)
def test_settings(toy, precision, settings, on_cpu):
    agree(*both(toy, precision=precision, n_steps=100, n_epochs=2, **settings))


def test_schedules_need_no_new_graph_and_other_changes_do(toy, on_cpu):
    model = collected(PPOFP16, toy(), n_steps=64, n_epochs=1, clip_range_vf=0.2)
    engine = GraphEngine(model.policy, model.batch_size)
    model.use_engine(engine)
    model.train()
    model.lr_schedule, model.clip_range = lambda _: 1e-4, lambda _: 0.05
    model.clip_range_vf = lambda _: 0.1
    model.train()
    assert engine.recorded == 1
    assert float(engine._update.lr) == pytest.approx(1e-4)
    assert engine._update.clip.tolist() == pytest.approx([math.log(0.95), math.log(1.05), 0.1])
    for change in (
        lambda: setattr(model, "n_epochs", 2),
        lambda: setattr(model, "ent_coef", 0.1),
        lambda: model.policy.optimizer.param_groups[0].update(eps=1e-3),
        lambda: setattr(model.policy.action_net.weight, "data", model.policy.action_net.weight.data.clone()),
        lambda: model.policy.optimizer.load_state_dict(copy.deepcopy(model.policy.optimizer.state_dict())),
        lambda: setattr(model.policy.mlp_extractor.policy_net, "1", nn.LeakyReLU()),
        lambda: setattr(model.policy.mlp_extractor.policy_net[1], "negative_slope", 0.2),
    ):
        recorded = engine.recorded
        change()
        model.train()
        assert engine.recorded == recorded + 1
        model.train()
        assert engine.recorded == recorded + 1


class Capture(TorchFunctionMode):
    """What launches may do inside a capture: read nothing from the device, bring nothing to it."""

    TRANSFERS = ("tolist", "item", "cpu", "numpy", "tensor", "as_tensor", "from_numpy", "nonzero")
    CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function.__name__ not in (*self.TRANSFERS, *self.CONVERSIONS), function.__name__
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("actions", ["box", "multidiscrete"])
def test_launches_keep_the_rules_of_a_capture(toy, precision, actions, on_cpu, monkeypatch):
    """The same memory each time, too: what was allocated inside would belong to the graph."""

    def rehearse_and_capture(update, work):
        def addresses():
            gradients = [p.gradient.data_ptr() for p in update.parameters]
            return [gradients, update.optimizer.workspace.data_ptr(), update.loss_room.data_ptr()]

        update.stopped.fill_(True)
        update._launch(0, 0, update.batch)
        before = addresses()
        with Capture():
            work()
        assert addresses() == before
        return work

    monkeypatch.setattr(_Update, "_capture", rehearse_and_capture)
    model = collected(PPOFP16, toy(ACTIONS[actions]), precision=precision, target_kl=0.1, clip_range_vf=0.2)
    model.use_engine(GraphEngine(model.policy, model.batch_size))
    model.train()
    assert model.engine.recorded == 1


def test_captures_are_rehearsed_and_on_a_stream_of_the_policys_device(monkeypatch):
    """What no simulator runs, with stand-ins for torch's part in it."""
    events, device, of_torch = [], th.device("cuda", 1), signature(th.cuda.graph.__init__)

    @contextmanager
    def entered(name, *arguments):
        events.append((f"enter {name}", *arguments))
        yield
        events.append(f"leave {name}")

    def graph(*arguments, **settings):
        bound = of_torch.bind(None, *arguments, **settings).arguments
        assert bound["capture_error_mode"] == "thread_local"
        return entered("graph", bound["stream"])

    stands_in = {"CUDAGraph": lambda: SimpleNamespace(replay="replay"), "device": partial(entered, "device")}
    for name, value in {**stands_in, "graph": graph, "Stream": lambda device: ("stream on", device)}.items():
        monkeypatch.setattr(th.cuda, name, value)
    update = SimpleNamespace(device=device, stopped=th.tensor(False), batch=60, samples=160, module=SimpleNamespace())
    update._launch = lambda number, start, count: events.append(("launch", count, bool(update.stopped)))
    update.module.statistics, update._statistics = "statistics", dict
    update._call = lambda function, settings: events.append(function)
    _capture_stream.cache_clear()
    for _ in range(2):
        events.clear()
        assert _Update._capture(update, lambda: events.append("work")) == "replay"
        assert set(events[:2]) == {("launch", 60, True), ("launch", 40, True)}
        stream = ("enter graph", ("stream on", device))
        assert events[2:] == ["statistics", ("enter device", device), stream, "work", "leave graph", "leave device"]
    assert _capture_stream.cache_info().misses == 1
    _capture_stream.cache_clear()


@pytest.mark.parametrize("allowed", [True, False])
def test_products_settings_are_the_users_again(allowed):
    matmul, name = th.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"
    before = getattr(matmul, name), getattr(matmul, f"{name}_split_k", None)
    given = (allowed, allowed) if before[1] is not None else allowed  # newer torch: two settings in one
    setattr(matmul, name, given)
    try:
        with _full_sums():
            assert getattr(matmul, name) is False
        assert (getattr(matmul, name), getattr(matmul, f"{name}_split_k", None)) == (allowed, before[1] and allowed)
    finally:
        setattr(matmul, name, before if before[1] is not None else before[0])


def test_a_step_of_sharp_keeps_the_rules_of_a_capture(on_cpu):
    weights = [th.randn(20, 30).half().requires_grad_(), th.randn(20).half().requires_grad_()]
    optimizer = SHARP(weights)
    for number in range(3):
        for weight in weights:
            weight.grad = th.randn(weight.shape).half()
        with Capture() if number else nullcontext():
            optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


def test_each_update_draws_its_minibatches_as_the_reference_does(toy, on_cpu):
    states = []
    for engine in (EagerEngine, GraphEngine):
        model = collected(PPOFP16, toy(), n_steps=96, n_epochs=3)
        model.use_engine(engine(model.policy, model.batch_size))
        np.random.seed(3)
        model.train()
        model.train()
        states.append(np.random.get_state()[1])
    assert (states[0] == states[1]).all()


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_target_kl_stops_alike(toy, precision, on_cpu):
    settings = {"precision": precision, "n_steps": 320, "n_epochs": 10, "target_kl": 0.002, "learning_rate": 2e-3}
    before, eager, graph = both(toy, **settings)
    assert 1 < eager._n_updates < 10
    assert eager._n_updates == graph._n_updates
    agree(before, eager, graph)
    for model in (eager, graph):  # a stop ends one update, and not the next
        np.random.seed(1)
        model.train()
    assert math.isfinite(logged(graph)["train/approx_kl"])
    assert eager._n_updates == graph._n_updates


def test_overflow_skips_alike(toy, on_cpu):
    _, eager, graph = both(partial(toy, reward_scale=3e4), n_steps=256, n_epochs=3, learning_rate=1e-3)
    counts = [logged(model)["train/skipped_steps"] for model in (eager, graph)]
    assert counts[0] == counts[1] > 0
    assert th.equal(eager.engine.gradient_scale.scales, graph.engine.gradient_scale.scales)
    for name in ("good_steps", "skipped_steps", "skips_at_floor"):
        ours, theirs = (getattr(model.engine.gradient_scale, name) for model in (graph, eager))
        assert int(ours) == int(theirs)


def test_an_unchanged_policy_has_a_small_log_ratio(toy, on_cpu):
    """Exactly 0 where products do not depend on the batch."""
    model = collected(PPOFP16, toy(), n_steps=64, n_epochs=1, learning_rate=0.0)
    model.use_engine(GraphEngine(model.policy, model.batch_size))
    model.train()
    assert abs(logged(model)["train/approx_kl"]) < 1e-5
    assert logged(model)["train/clip_fraction"] == 0


def test_training_goes_on_from_a_file(toy, tmp_path, on_cpu):
    model = collected(PPOFP16, toy(), n_steps=64, n_epochs=2, precision="fp32")
    model.use_engine(GraphEngine(model.policy, model.batch_size))
    model.train()
    model.save(tmp_path / "model")
    other = PPOFP16.load(tmp_path / "model", env=toy())
    assert all(th.equal(a, b) for a, b in zip(model.policy.parameters(), other.policy.parameters(), strict=True))
    steps = {int(state["step"]) for state in other.policy.optimizer.state.values()}
    assert steps == {2}
    PPO.load(tmp_path / "model", env=toy()).learn(64)
    assert copy.deepcopy(model.policy.state_dict()).keys() == other.policy.state_dict().keys()


def test_it_learns(toy, on_cpu):
    model = PPOFP16("MlpPolicy", toy(), n_steps=128, n_epochs=2, gamma=0.0, learning_rate=3e-3, seed=0, device="cpu")
    model.use_engine(GraphEngine(model.policy, model.batch_size))
    model.learn(128 * 12)
    returns = [episode["r"] for episode in model.ep_info_buffer]
    assert np.mean(returns[-10:]) > np.mean(returns[:10])
    assert model.engine.recorded == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"precision": "e5m7"}, "study"),
        ({"precision": "naive-fp16"}, "study"),
        ({"precision": "amp-bf16-sr"}, "stochastic copies"),
        ({"policy_kwargs": {"optimizer_kwargs": {"betas": (0.9, 0.9999999)}}}, "no kernel steps SHARP"),
        ({"policy_kwargs": {"activation_fn": nn.Softplus}}, "Softplus"),
        ({"use_sde": True}, "StateDependentNoise"),
    ],
)
def test_why_another_engine_serves(toy, settings, reason, on_cpu):
    model = PPOFP16("MlpPolicy", toy(), **settings)
    assert reason in why_no_graph(model.policy)
    model.use_engine(GraphEngine(model.policy, model.batch_size))
    with pytest.warns(UserWarning, match="The graph engine leaves updates to torch"):
        model.learn(64 if model.n_steps <= 64 else 1)
    assert model._n_updates > 0


def test_where_no_graph_can_be_made_torch_goes_on(toy, on_cpu, monkeypatch):
    model = collected(PPOFP16, toy(), n_steps=64)
    model.use_engine(GraphEngine(model.policy, model.batch_size))
    with monkeypatch.context() as patch:
        patch.setattr("sb3_fp16.engines.graph._Update._capture", lambda *_: (_ for _ in ()).throw(RuntimeError("full")))
        with pytest.warns(UserWarning, match="no graph could be made: full"):
            model.train()
    before = model.policy.parameters_to_vector()
    model.train()  # without another try, or another warning
    assert model.engine.recorded == 0
    assert (model.policy.parameters_to_vector() != before).any()


def test_other_heads_and_devices_have_their_reason(toy, on_cpu, monkeypatch):
    model = PPOFP16("MlpPolicy", toy(spaces.MultiBinary(3)))
    assert "Bernoulli" in why_no_graph(model.policy)
    model = PPOFP16("MlpPolicy", toy())
    assert why_no_graph(model.policy) is None
    monkeypatch.delitem(kernels.MODULES, "cpu")
    assert "_cuda was not built" in why_no_graph(model.policy)


def test_the_workspace_is_named(toy, on_cpu):
    model = collected(PPOFP16, toy(), n_steps=64)
    model.use_engine(GraphEngine(model.policy, model.batch_size))
    assert model.engine.workspace() == {}
    model.train()
    workspace = model.engine.workspace()
    assert set(workspace) == {"rollout on the device", "gradients", "activations and signals"}
    assert workspace["gradients"] == sum(p.numel() for p in model.policy.parameters()) // 2


def test_every_preset_is_served_or_has_a_reason(toy, on_cpu):
    served = {
        name for name in Precision.presets if why_no_graph(PPOFP16("MlpPolicy", toy(), precision=name).policy) is None
    }
    assert served == set(PRESETS)
