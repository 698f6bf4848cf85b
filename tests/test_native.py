"""The native engine against the reference: same rollout, same order of minibatches, every instruction set."""

import itertools
import math
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from sb3_fp16 import PPOFP16, SHARP, Precision, kernels
from sb3_fp16.buffers import RolloutBufferFP16
from sb3_fp16.engines.eager import EagerEngine
from sb3_fp16.engines.native import NativeEngine
from sb3_fp16.rounding import FORMATS
from sb3_fp16.sharp import ROOT_ROUNDING, SHARING, WRITEBACK
from tests.test_engines import collected

_cpu = pytest.importorskip("sb3_fp16._cpu")
ISAS = [isa for isa in ("portable", "avx2", "avx512") if _cpu.supports(isa)]
HALVES = np.arange(2**16, dtype=np.uint16)


@pytest.fixture(autouse=True)
def reference_in_torch(monkeypatch):
    """The reference's optimizer step is not the native engine's own."""
    monkeypatch.delitem(kernels.MODULES, "cpu")


def both(toy_env, isa="portable", updates=1, seed=0, **settings):
    """The same model trained by each engine; their parameters before and after, and the models."""
    models = [collected(PPOFP16, toy_env(), **settings) for _ in range(2)]
    models[0].use_engine(EagerEngine(models[0].policy, models[0].batch_size))
    models[1].use_engine(NativeEngine(models[1].policy, models[1].batch_size, isa))
    before = models[0].policy.parameters_to_vector()
    for model in models:
        np.random.seed(seed)
        with pytest.MonkeyPatch.context() as patch:
            if model.engine.name == "native":  # it must not fall back
                patch.delattr(EagerEngine, "_losses")
            for _ in range(updates):
                model.train()
    assert [model.engine.name for model in models] == ["eager", "native"]
    return before, *models


def distance(before, eager, native):
    """RMS difference of the parameters in units of their RMS movement."""
    a, b = eager.policy.parameters_to_vector(), native.policy.parameters_to_vector()
    moved = np.sqrt(((a - before) ** 2).mean())
    assert moved > 0
    return np.sqrt(((a - b) ** 2).mean()) / moved


def logged(model):
    return {key: value for key, value in model.logger.name_to_value.items() if key.startswith("train/")}


BOUNDS = {"fp16": 0.05, "fp32": 1e-3}
ACTIONS = {
    "box": spaces.Box(-1, 1, (3,)),
    "discrete": spaces.Discrete(5),
    "multidiscrete": spaces.MultiDiscrete([3, 2, 4]),
    "multibinary": spaces.MultiBinary(4),
}
PRESETS = sorted(Precision.presets)
ACTIVATIONS = [nn.Tanh, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, partial(nn.GELU, "tanh"), partial(nn.ELU, 0.5)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize(
    "net_arch", [[], [7], [1, 5], [64, 64], [100, 33, 512], {"pi": [64], "vf": [9, 17]}, {"pi": [], "vf": [16]}]
)
@pytest.mark.parametrize("obs_dim", [1, 3, 17])
def test_twenty_minibatches(toy, isa, precision, net_arch, obs_dim):
    settings = {"n_steps": 320, "n_epochs": 4, "policy_kwargs": {"net_arch": net_arch}}
    before, eager, native = both(partial(toy, obs_dim=obs_dim), isa, precision=precision, **settings)
    assert distance(before, eager, native) < BOUNDS[precision]
    ours = logged(native)
    for key, value in logged(eager).items():
        assert ours[key] == pytest.approx(value, rel=0.02, abs=2e-3, nan_ok=True), key


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("actions", ACTIONS)
def test_every_preset_with_every_head(toy, isa, precision, actions):
    """With an entropy bonus, whose gradient depends on the state where actions are discrete."""
    settings = {"n_steps": 320, "n_epochs": 4, "ent_coef": 0.05, "batch_size": 60, "learning_rate": 1e-3}
    if precision == "naive-fp16":  # which divides by second moments that are zero, and amplifies whatever differs
        settings |= {"n_epochs": 1, "learning_rate": 1e-4}
    before, eager, native = both(partial(toy, ACTIONS[actions]), isa, precision=precision, **settings)
    assert distance(before, eager, native) < BOUNDS.get(precision, 0.05)
    ours = logged(native)
    for key, value in logged(eager).items():
        assert ours[key] == pytest.approx(value, rel=0.02, abs=2e-3, nan_ok=True), key
    dtype = native.precision.dtype
    assert {p.dtype for p in native.policy.parameters()} == {dtype}
    of_state = {v.dtype for s in native.policy.optimizer.state.values() for k, v in s.items() if k.endswith("moment")}
    assert of_state <= {dtype}


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_range_vf": 0.1, "ent_coef": 0.02, "clip_range": 0.01},
        {"normalize_advantage": False, "vf_coef": 1.3, "max_grad_norm": 0.01},
        {"batch_size": 50, "policy_kwargs": {"optimizer_kwargs": {"weight_decay": 0.1, "eps": 1e-4}}},
    ],
)
@pytest.mark.parametrize("actions", ["box", "discrete"])
def test_naive_half_precision(toy, actions, settings):
    settings = {"n_steps": 256, "learning_rate": 1e-4, **settings}
    before, eager, native = both(partial(toy, ACTIONS[actions]), precision="naive-fp16", **settings)
    assert distance(before, eager, native) < 0.1  # it divides by second moments that are zero
    ours = logged(native)
    for key, value in logged(eager).items():
        assert ours[key] == pytest.approx(value, rel=0.05, abs=2e-3, nan_ok=True), key


def test_naive_half_precision_diverges_alike(toy):
    """Advantages that are all the same: their deviation is 0, and so is FP16's 1e-8."""
    models = [collected(PPOFP16, toy(), precision="naive-fp16") for _ in range(2)]
    models[0].use_engine(EagerEngine(models[0].policy, 64))
    assert models[1].engine.name == "native"
    for model in models:
        model.rollout_buffer.advantages[:] = 1
        before = model.policy.parameters_to_vector()
        with pytest.raises(ValueError, match="Adam made parameters infinite or NaN in fp16; the last good"):
            model.train()
        np.testing.assert_array_equal(model.policy.parameters_to_vector(), before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["fp16", "fp32", "bf16-sr", "e5m6", "amp-fp16"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_activation(toy, isa, precision, activation):
    kwargs = {"activation_fn": activation, "net_arch": [33, 20]}
    settings = {"n_steps": 256, "n_epochs": 4, "batch_size": 50, "learning_rate": 1e-3, "policy_kwargs": kwargs}
    before, eager, native = both(toy, isa, precision=precision, **settings)
    assert distance(before, eager, native) < BOUNDS.get(precision, 0.05)


@pytest.mark.parametrize("precision", ["fp16", "paper", "bf16-sr", "fp32", "amp-fp16"])
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("net_arch", [[], [7], [100, 64, 512]], ids=str)
def test_heads_on_every_shape(toy, precision, actions, net_arch):
    settings = {"n_steps": 150, "n_epochs": 4, "batch_size": 64, "policy_kwargs": {"net_arch": net_arch}}
    before, eager, native = both(partial(toy, ACTIONS[actions]), precision=precision, ent_coef=0.01, **settings)
    assert distance(before, eager, native) < BOUNDS.get(precision, 0.05)


def test_masked_choices(toy):
    """A bias of −inf, as users mask actions with."""
    models = [collected(PPOFP16, toy(spaces.Discrete(4)), precision="fp32", ent_coef=0.01) for _ in range(2)]
    models[0].use_engine(EagerEngine(models[0].policy, 64))
    for model in models:
        model.policy.action_net.bias.data[1] = -np.inf
        model.set_random_seed(0)
        model.learn(192)
    eager, native = (model.policy.parameters_to_vector() for model in models)
    np.testing.assert_allclose(native, eager, atol=1e-5)
    assert np.isneginf(native).sum() == 1


def test_many_choices_keep_the_log_probability_alone(toy):
    """More logits than a rollout stores."""
    before, eager, native = both(partial(toy, spaces.Discrete(300)), n_epochs=4, ent_coef=0.01)
    assert native.rollout_buffer.behaviour is None
    assert distance(before, eager, native) < 0.05


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 50},
        {"batch_size": 10**9},
        {"batch_size": 63, "clip_range_vf": 0.1, "ent_coef": 0.02},
        {"normalize_advantage": False, "vf_coef": 1.3, "max_grad_norm": 0.01},
        {"clip_range": 0.005, "learning_rate": 3e-3},
        {"clip_range": 1.5},
        {"policy_kwargs": {"log_std_init": -1.5}},
        {"policy_kwargs": {"optimizer_kwargs": {"weight_decay": 0.1, "eps": 1e-5}}},
    ],
)
def test_settings(toy, precision, settings):
    before, eager, native = both(toy, precision=precision, n_steps=256, n_epochs=3, **settings)
    assert distance(before, eager, native) < BOUNDS[precision]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("sharing", "root", "write"), list(itertools.product(SHARING, ROOT_ROUNDING, WRITEBACK)))
def test_every_sharp_mode(toy, isa, sharing, root, write):
    """State after some steps: the same formats, and the same numbers but where a gradient was rounded otherwise."""
    modes = {"input_sharing": sharing, "hidden_sharing": sharing, "root_rounding": root, "writeback": write}
    precision = Precision(log_std_writeback=write, **modes)
    before, eager, native = both(toy, isa, precision=precision, n_epochs=4, policy_kwargs={"net_arch": [24]})
    assert distance(before, eager, native) < 0.05
    for p, q in zip(eager.policy.parameters(), native.policy.parameters(), strict=True):
        ours, theirs = native.policy.optimizer.state[q], eager.policy.optimizer.state[p]
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name].dtype == value.dtype
            difference = (ours[name].double() - value.double()).norm()
            assert difference <= 0.02 * value.double().norm() + (1e-4 if name == "carry" else 0), name


@pytest.mark.parametrize("sharing", ["row", "rank1"])
def test_rows_far_from_their_layers(toy, sharing):
    """One row of gradients dwarfs the others: its root is clipped from above, theirs from below."""
    precision = Precision(input_sharing=sharing, hidden_sharing=sharing)
    settings = {"precision": precision, "n_steps": 128, "n_epochs": 4, "policy_kwargs": {"net_arch": [32, 64]}}
    models = [collected(PPOFP16, toy(), **settings) for _ in range(2)]
    models[0].use_engine(EagerEngine(models[0].policy, 64))
    for model in models:
        with th.no_grad():
            model.policy.value_net.weight[:, 3] = 30
            model.policy.value_net.weight[:, 4:] *= 0.01
    hidden = models[0].policy.mlp_extractor.value_net[2].weight
    before = hidden.detach().float().clone()
    for model in models:
        np.random.seed(0)
        model.train()
    eager, native = (model.policy.mlp_extractor.value_net[2].weight.detach().float() for model in models)
    moved = (eager - before).square().mean(1).sqrt()
    assert moved[3] > 3 * moved[10]
    assert ((native - eager).square().mean(1).sqrt() < 0.1 * moved.clamp_min(1e-5)).all()


@pytest.mark.parametrize("decoupled", [False, True])
def test_sharps_weight_decay(toy, decoupled):
    kwargs = {"optimizer_class": SHARP, "optimizer_kwargs": {"weight_decay": 0.3, "decoupled_weight_decay": decoupled}}
    before, eager, native = both(toy, n_epochs=10, policy_kwargs=kwargs)
    assert distance(before, eager, native) < 0.05


@pytest.mark.parametrize("isa", ISAS)
def test_an_unchanged_policy_has_a_log_ratio_of_zero_whatever_the_batch(toy, isa):
    """Learning rate 0: all batch sizes see the same policy, and statistics equal to the last bit."""
    seen = set()
    for batch_size in (64, 7, 1):
        model = collected(PPOFP16, toy(), learning_rate=0.0, batch_size=64, normalize_advantage=False)
        model.batch_size = batch_size
        model.use_engine(NativeEngine(model.policy, batch_size, isa))
        model.train()
        seen.add(logged(model)["train/clip_fraction"])
        assert logged(model)["train/approx_kl"] < 1e-6
    assert seen == {0.0}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", BOUNDS)
def test_losses_and_norm_far_from_the_behaviour_policy(toy, isa, precision):
    """Learning rate 0 and a policy that has moved away from its rollout: every term of the objective counts."""
    settings = {"learning_rate": 0.0, "ent_coef": 0.02, "clip_range": 0.5, "clip_range_vf": 0.4, "batch_size": 48}
    models = [collected(PPOFP16, toy(), n_steps=256, precision=precision, **settings) for _ in range(2)]
    for model in models:
        generator = th.Generator().manual_seed(0)
        with th.no_grad():
            for p in model.policy.parameters():
                p += (0.05 * th.randn(p.shape, generator=generator)).to(p.dtype)
            model.policy.log_std += 0.3
    models[0].use_engine(EagerEngine(models[0].policy, 48))
    models[1].use_engine(NativeEngine(models[1].policy, 48, isa))
    for model in models:
        np.random.seed(0)
        model.train()
    eager, native = (logged(model) for model in models)
    assert eager["train/approx_kl"] > 0.05
    for key in ("policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl", "loss", "grad_norm"):
        assert native[f"train/{key}"] == pytest.approx(eager[f"train/{key}"], rel=1e-3, abs=2e-5), key
    assert native["train/clip_fraction"] == pytest.approx(eager["train/clip_fraction"], abs=0.01)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["fp16", "paper", "fp32", "amp-bf16-sr"])
def test_more_threads_change_no_bit(toy, isa, precision):
    models = []
    for threads in (1, 3):
        kwargs = {"net_arch": [400, 333]}
        model = collected(PPOFP16, toy(), n_steps=256, precision=precision, n_epochs=2, policy_kwargs=kwargs)
        model.use_engine(NativeEngine(model.policy, model.batch_size, isa))
        np.random.seed(0)
        th.set_num_threads(threads)
        try:
            model.train()
        finally:
            th.set_num_threads(1)
        models.append(model)
    one, three = (model.policy.parameters_to_vector() for model in models)
    np.testing.assert_array_equal(one, three)
    assert logged(models[0]) == logged(models[1])


@pytest.mark.parametrize("precision", BOUNDS)
def test_target_kl_stops_alike_and_leaves_the_same_random_state(toy, precision):
    settings = {"target_kl": 2e-3, "n_epochs": 50, "learning_rate": 3e-3, "n_steps": 256}
    _, eager, native = both(toy, precision=precision, **settings)
    assert logged(native)["train/n_updates"] == logged(eager)["train/n_updates"] < 50
    np.random.seed(0)
    eager.train()
    a = np.random.rand()
    np.random.seed(0)
    native.train()
    assert np.random.rand() == a


def test_overflow_skips_alike(toy):
    _, eager, native = both(toy, n_epochs=3)
    for model in (eager, native):
        model.engine.gradient_scale.scales = th.tensor([2.0**40, 2.0**7])
        before = model.policy.parameters_to_vector()
        model.n_epochs = 1
        model.train()
        np.testing.assert_array_equal(model.policy.parameters_to_vector(), before)
        assert logged(model)["train/skipped_steps"] == 1
        assert np.isnan(logged(model)["train/grad_norm"])
    for name, value in eager.engine.state_dict().items():
        assert th.equal(value, native.engine.state_dict()[name]), name


def test_actions_of_another_type_than_the_rollout(toy):
    """A Box of integers, which rollouts store as they are."""
    model = collected(PPOFP16, toy(spaces.Box(-5, 5, (2,), np.int32)))
    twin = collected(PPOFP16, toy(spaces.Box(-5, 5, (2,), np.int32)))
    twin.use_engine(EagerEngine(twin.policy, 64))
    before = model.policy.parameters_to_vector()
    np.random.seed(0)
    with pytest.warns(UserWarning, match="leaves updates to torch"):
        model.train()
    np.random.seed(0)
    twin.train()
    assert distance(before, twin, model) < 0.05


def shrunk(state):
    state["exp_avg" if "exp_avg" in state else "first_moment"] = th.zeros(1)


def retyped(state):
    state["step"] = state["step"].to(th.int32)


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("change", [shrunk, retyped])
def test_state_that_does_not_fit_is_not_read_as_memory(toy, precision, change):
    model = collected(PPOFP16, toy(), precision=precision)
    model.train()
    change(model.policy.optimizer.state[model.policy.value_net.weight])
    refused = pytest.raises((ValueError, RuntimeError)) if change is shrunk else nullcontext()
    with pytest.warns(UserWarning, match="leaves updates to torch"), refused:
        model.train()


@pytest.mark.parametrize("name", ["values", "log_probs", "behaviour", "actions"])
def test_rollouts_that_lack_an_array_or_hold_impossible_actions(toy, name):
    model = collected(PPOFP16, toy(spaces.Discrete(3)), precision="fp32" if name == "log_probs" else "fp16")
    if name == "actions":
        model.rollout_buffer.actions[:] = 7
    else:
        setattr(model.rollout_buffer, name, None)
    with pytest.warns(UserWarning, match="leaves updates to torch"), pytest.raises(Exception):  # noqa: B017, PT011
        model.train()


def test_parameters_may_be_replaced_by_another_thread(toy):
    model = collected(PPOFP16, toy(), precision="fp32", n_epochs=200)
    parameters, done = model.get_parameters(), threading.Event()

    def replace():
        while not done.is_set():
            model.set_parameters(parameters)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an update may find a state half replaced, and leave it to torch
            for _ in range(5):
                with suppress(RuntimeError, KeyError, ValueError):
                    model.train()
    finally:
        done.set()
        thread.join()
    assert np.isfinite(model.policy.parameters_to_vector()).all()


def test_an_incomplete_rollout_is_refused(toy):
    model = PPOFP16("MlpPolicy", toy(), n_steps=64, device="cpu")
    model.set_logger(Logger(None, []))
    with (
        pytest.warns(UserWarning, match="leaves updates to torch"),
        pytest.raises(AssertionError, match="not complete"),
    ):
        model.train()


class Reversed(RolloutBufferFP16):
    def get(self, batch_size=None):
        yield from reversed(list(super().get(batch_size)))


def test_a_rollout_of_the_users_own_is_read_through_its_methods(toy):
    model = collected(PPOFP16, toy(), rollout_buffer_class=Reversed, n_steps=128)
    with pytest.warns(UserWarning, match="leaves updates to torch"):
        model.train()


def test_what_cannot_recover_is_an_error_and_changes_nothing(toy):
    model = collected(PPOFP16, toy(), n_epochs=60, normalize_advantage=False)
    assert model.engine.name == "native"
    model.rollout_buffer.advantages[3] = np.nan
    before = model.policy.parameters_to_vector()
    with pytest.raises(ValueError, match="steps in a row"):
        model.train()
    np.testing.assert_array_equal(model.policy.parameters_to_vector(), before)


def test_a_user_can_interrupt_between_minibatches(toy, monkeypatch):
    model = collected(PPOFP16, toy(), n_epochs=50_000)
    assert model.engine.name == "native"
    rows = model.rollout_buffer.minibatch_rows()
    model.rollout_buffer.minibatch_rows = lambda: rows
    update = _cpu.update

    def update_and_interrupt(*args):
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
        return update(*args)

    monkeypatch.setattr(_cpu, "update", update_and_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            model.train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert np.isfinite(model.policy.parameters_to_vector()).all()
    steps = int(model.policy.optimizer.state[model.policy.log_std]["step"])
    assert steps > 0
    assert int(model.engine.gradient_scale.good_steps) == steps % 2000, "the gradient scale knows of the steps taken"


class OwnActivation(nn.Module):
    def forward(self, x):
        return x.clamp(-1, 1)


class OwnDistribution(ActorCriticPolicy):
    def _get_action_dist_from_latent(self, latent_pi):
        return super()._get_action_dist_from_latent(latent_pi)


class OwnFeatures(ActorCriticPolicy):
    def extract_features(self, obs, features_extractor=None):
        return super().extract_features(obs, features_extractor)


class ExtraParameters(ActorCriticPolicy):
    def _build(self, lr_schedule):
        self.extra = nn.Linear(3, 3)
        super()._build(lr_schedule)


class SharedLayer(ActorCriticPolicy):
    def _build_mlp_extractor(self):
        super()._build_mlp_extractor()
        self.mlp_extractor.value_net[0] = self.mlp_extractor.policy_net[0]


class Parametrized(ActorCriticPolicy):
    def _build_mlp_extractor(self):
        super()._build_mlp_extractor()
        nn.utils.parametrizations.weight_norm(self.mlp_extractor.policy_net[0])


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class OwnLinear(ActorCriticPolicy):
    def _build_mlp_extractor(self):
        super()._build_mlp_extractor()
        self.mlp_extractor.policy_net[0] = Doubling(3, 64)


class OwnSHARP(SHARP):
    pass


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"precision": Precision(log_ratio="absolute-stored")}, "log-probabilities in storage format"),
        ({"policy": ExtraParameters}, "there are others"),
        ({"policy": SharedLayer}, "layers share parameters"),
        ({"policy": Parametrized}, "ParametrizedLinear is no native layer"),
        ({"policy": OwnLinear, "precision": "fp32"}, "Doubling is no native layer"),
        ({"policy_kwargs": {"optimizer_class": OwnSHARP}}, "OwnSHARP is not native"),
        ({"policy_kwargs": {"optimizer_kwargs": {"significand_bits": 5}}}, "SHARP is not native"),
        ({"policy_kwargs": {"share_features_extractor": False}}, None),
        ({"precision": "naive-fp16"}, None),
        ({"precision": Precision(global_scalars=False, gradient_scaling="off")}, "without module A"),
        ({"precision": Precision(storage="fp32", round_actions=False)}, "sharp on fp32 storage"),
        ({"precision": Precision(optimizer="adam")}, "adam on fp16 storage"),
        ({"policy_kwargs": {"activation_fn": OwnActivation}}, "OwnActivation is no native layer"),
        ({"policy_kwargs": {"optimizer_class": th.optim.SGD}}, "SGD"),
        ({"use_sde": True}, "StateDependentNoiseFP16"),
        ({"policy": OwnDistribution}, "overrides _get_action_dist_from_latent"),
        ({"policy": OwnFeatures}, "overrides extract_features"),
    ],
)
def test_why_another_engine_serves(toy, capsys, settings, reason):
    model = PPOFP16(**{"policy": "MlpPolicy", "env": toy(), "device": "cpu", "verbose": 1, **settings})
    printed = capsys.readouterr().out
    assert model.engine.name == ("native" if reason is None else "eager")
    assert (reason or "one C++ call per update") in printed


@pytest.mark.parametrize("change", ["frozen", "strided", "betas", "root rounding", "advantages", "step hook"])
def test_changes_after_the_choice_are_seen(toy, change):
    """An engine that was chosen for the policy as it was must not read memory that is no longer that."""
    models = [collected(PPOFP16, toy()) for _ in range(2)]
    for model in models:
        assert model.engine.name == "native"
        weight, seen = model.policy.mlp_extractor.policy_net[2].weight, []
        if change == "frozen":
            weight.requires_grad_(False)
        elif change == "root rounding":
            model.train()
            model.policy.optimizer.param_groups[0]["root_rounding"] = "fp32"
        elif change == "advantages":
            model.rollout_buffer.advantages = model.rollout_buffer.advantages.astype(np.float32) * 2
        elif change == "step hook":
            model.policy.optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
        elif change == "strided":
            weight.data = weight.data.t().contiguous().t()
        else:
            model.policy.optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    kept = weight.detach().clone()
    before = models[0].policy.parameters_to_vector()
    models[1].use_engine(EagerEngine(models[1].policy, 64))
    for model in models:
        np.random.seed(0)
        left_to_torch = change != "betas" and model is models[0]
        with pytest.warns(UserWarning, match="leaves updates to torch") if left_to_torch else nullcontext():
            model.train()
    assert distance(before, *models) < 0.05
    assert bool(seen) == (change == "step hook")
    assert th.equal(kept, models[0].policy.mlp_extractor.policy_net[2].weight) == (change == "frozen")


@pytest.mark.parametrize("isa", ISAS)
def test_halves_load_exactly(isa):
    floats = _cpu.load(isa, "fp16", HALVES)
    exact = HALVES.view(np.float16).astype(np.float32)
    number = ~np.isnan(exact)  # what a NaN carries is nobody's business
    np.testing.assert_array_equal(floats[number].view(np.uint32), exact[number].view(np.uint32))
    assert np.isnan(floats[~number]).all()


INFINITE_HALF, INFINITE_FLOAT = 0x7C00, 0x7F800000  # words; those above are NaNs
NEGATIVE = np.uint32(2**31)
NUMBERS = HALVES[: INFINITE_HALF + 1].view(np.float16).astype(np.float32).view(np.uint32)  # halves from 0 to infinity


def nearest_halves():
    """
    Words of the first and the last float that round to each half from 0 to infinity; these intervals hold every word
    from 0 to INFINITE_FLOAT once. They end at the midpoints of neighbouring halves, which are floats themselves; a
    midpoint belongs to the even neighbour.
    """
    exact = NUMBERS.view(np.float32).astype(np.float64)
    exact[-1] = 65536  # overflow begins where it would round to the next half, were there one
    midpoints = ((exact[1:] + exact[:-1]) / 2).astype(np.float32).view(np.uint32).astype(np.int64)
    first = np.concatenate([[0], midpoints + HALVES[1 : INFINITE_HALF + 1] % 2])
    return first, np.concatenate([first[1:] - 1, [INFINITE_FLOAT]])


def rounded(isa, words):
    return _cpu.rounded(isa, "fp16", words.view(np.float32)).view(np.uint32)


@pytest.mark.parametrize("isa", ISAS)
def test_floats_round_to_the_nearest_half(isa):
    """
    Both ends of every interval that rounds to one half, and a float inside. It settles all floats if the rounding is
    monotone, and it is: F16C's by IEEE 754; ours adds and masks words, or adds a constant in FP32, and the branches
    meet at ends of intervals. The slow test below presumes nothing.
    """
    first, last = nearest_halves()
    inside = first + ((last - first) * np.random.default_rng(0).random(len(first))).astype(np.int64)
    words, expected = np.concatenate([first, last, inside]).astype(np.uint32), np.tile(NUMBERS, 3)
    words, expected = np.concatenate([words, words | NEGATIVE]), np.concatenate([expected, expected | NEGATIVE])
    np.testing.assert_array_equal(rounded(isa, words), expected)
    halves = np.zeros(len(words), np.uint16)
    stored = np.abs(expected.view(np.float32)) < np.inf
    _cpu.store(isa, "fp16", words[stored].view(np.float32), halves[: stored.sum()])
    np.testing.assert_array_equal(
        halves[: stored.sum()], expected[stored].view(np.float32).astype(np.float16).view(np.uint16)
    )
    with np.errstate(over="ignore", under="ignore"):  # the intervals are numpy's, too
        numpys = words.view(np.float32).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(numpys.view(np.uint32), expected)
    for start in range(0, len(words), 10_007):  # whatever is left over after whole registers
        for count in range(40):
            some = slice(start, start + count)
            np.testing.assert_array_equal(rounded(isa, words[some]), expected[some])
    nans = (np.arange(0x7F80, 0x8000)[:, None] * 2**16 + [1, 0x1FFF, 0x2000, 0xFFFF]).ravel().astype(np.uint32)
    assert np.isnan(rounded(isa, np.concatenate([nans, nans | NEGATIVE])).view(np.float32)).all()


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_all_floats_round_to_the_nearest_half(isa):
    """All 2^32 words."""
    first, last = nearest_halves()
    assert (first <= last).all()
    assert (last - first + 1).sum() == INFINITE_FLOAT + 1
    size = 2**20
    words = np.arange(size, dtype=np.uint32)
    for sign in (np.uint32(0), NEGATIVE):
        for start in range(0, 2**31, size):
            results = rounded(isa, words + (np.uint32(start) | sign))
            counts = np.clip(last + 1, start, start + size) - np.clip(first, start, start + size)
            expected = np.repeat(NUMBERS | sign, counts)
            numbers, nans = np.split(results, [len(expected)])
            assert np.array_equal(numbers, expected), hex(start)
            assert ((nans & 0x7FFFFFFF) > INFINITE_FLOAT).all(), hex(start)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("name", "bound"), [("tanh", 4e-7), ("exp", 3e-7), ("expm1", 5e-7), ("log", 3e-7), ("log1p", 3e-7)]
)
def test_elementary_functions(isa, name, bound):
    """Far below half a unit of FP16 (2.4e-4), and the same bits for every instruction set."""
    small = np.exp2(np.linspace(-24, 4, 200_000))
    x = np.concatenate([small, -small, np.linspace(-80, 80, 200_000)]).astype(np.float32)
    x = x[x > {"log": 0, "log1p": -1}.get(name, -np.inf)]
    ours = _cpu.elementwise(isa, name, x)
    exact = getattr(np, name)(x.astype(np.float64))
    assert np.max(np.abs(ours - exact) / np.maximum(np.abs(exact), 1e-30)) < bound
    np.testing.assert_array_equal(ours, _cpu.elementwise("portable", name, x))
    zero, below, above, nan = _cpu.elementwise(isa, name, np.array([0.0, -np.inf, np.inf, np.nan], np.float32))
    assert np.isnan(nan)
    if name in ("tanh", "exp", "expm1"):
        assert zero == (1 if name == "exp" else 0)
        assert below == pytest.approx({"tanh": -1, "exp": 0, "expm1": -1}[name], abs=1e-30)
    assert above == {"tanh": 1, "log": np.inf, "log1p": np.inf}.get(name, above)


@pytest.mark.parametrize("isa", ISAS)
def test_error_function(isa):
    x = np.concatenate([np.linspace(-6, 6, 100_000), np.exp2(np.linspace(-24, 2, 100_000))]).astype(np.float32)
    exact = np.array([math.erf(v) for v in x.tolist()])
    np.testing.assert_allclose(_cpu.elementwise(isa, "erf", x), exact, rtol=4e-7, atol=0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("storage", ["bf16", "e5m9", "e5m8", "e5m7", "e5m6", "e5m5"])
def test_other_formats_round_as_the_reference_does(isa, storage):
    words = np.random.default_rng(0).integers(0, 2**32, 1 << 20, dtype=np.uint32)
    bits = FORMATS[storage].significand_bits
    near_ties = (np.arange(2**16, dtype=np.uint32)[:, None] << 16) + (1 << (22 - bits)) + np.arange(-1, 2)
    for x in (words.view(np.float32), near_ties.astype(np.uint32).ravel().view(np.float32)):
        x = x[np.isfinite(x)]
        expected = FORMATS[storage].round(th.from_numpy(x)).float().numpy()
        np.testing.assert_array_equal(_cpu.rounded(isa, storage, x), expected)
    assert np.isnan(_cpu.rounded(isa, storage, np.array([np.nan], np.float32)))


def test_unknown_instruction_sets_are_refused():
    with pytest.raises(ValueError, match="does not support"):
        _cpu.rounded("sse9", "fp16", np.zeros(3, np.float32))


def test_without_the_native_module_everything_runs_on_torch():
    code = """
import sys, warnings
sys.modules["sb3_fp16._cpu"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from sb3_fp16 import PPOFP16
assert any("many times slower: " in str(w.message) for w in caught)
model = PPOFP16("MlpPolicy", "Pendulum-v1", n_steps=64, device="cpu").learn(64)
print(model.engine.name, model.engine.reason)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "eager sb3_fp16._cpu was not built"
