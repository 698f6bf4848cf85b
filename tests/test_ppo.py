import inspect

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.dqn.policies import DQNPolicy
from torch import nn

from sb3_fp16 import PPOFP16, Precision
from sb3_fp16.buffers import RolloutBufferFP16

PRESETS = ("fp16", "paper", "fp32")


def test_arguments_are_sb3s_in_sb3s_order_plus_precision():
    ours, theirs = (list(inspect.signature(cls.__init__).parameters.values()) for cls in (PPOFP16, PPO))
    assert ours[:-1] == theirs
    assert (ours[-1].name, ours[-1].default) == ("precision", "fp16")


def test_positional_arguments_land_where_sb3_puts_them(toy):
    values = (1e-3, 128, 32, 3, 0.9, 0.8, 0.1, 0.3, False, 0.02, 0.4, 0.7)
    names = "learning_rate n_steps batch_size n_epochs gamma gae_lambda clip_range clip_range_vf normalize_advantage"
    names += " ent_coef vf_coef max_grad_norm"
    model = PPOFP16("MlpPolicy", toy(), *values, device="cpu")
    for name, value in zip(names.split(), values, strict=True):
        stored = getattr(model, name)
        assert (stored(1.0) if callable(stored) else stored) == value, name


@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("action_space", [None, spaces.Discrete(3)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_range_vf": 0.2, "ent_coef": 0.01, "target_kl": 0.05},
        {"normalize_advantage": False, "batch_size": 50},
        {"policy_kwargs": {"net_arch": [], "activation_fn": nn.ReLU, "ortho_init": False}},
        {"policy_kwargs": {"net_arch": {"pi": [5], "vf": [40, 9, 3]}, "activation_fn": nn.ELU, "log_std_init": -2.0}},
        {"policy_kwargs": {"share_features_extractor": False}, "gamma": 0.5, "gae_lambda": 1.0},
    ],
)
def test_trains_and_stays_finite(toy, precision, action_space, settings):
    model = PPOFP16(
        "MlpPolicy", toy(action_space), n_steps=128, n_epochs=2, seed=0, device="cpu", **settings, precision=precision
    )
    before = model.policy.parameters_to_vector()
    model.learn(256)
    after = model.policy.parameters_to_vector()
    assert np.isfinite(after).all()
    assert (before != after).mean() > 0.5
    assert {p.dtype for p in model.policy.parameters()} == {Precision.of(precision).dtype}
    action, _ = model.predict(np.zeros(3, dtype=np.float32))
    assert model.action_space.contains(action)


@pytest.mark.parametrize("precision", PRESETS)
def test_stored_dtypes(toy, precision):
    model = PPOFP16("MlpPolicy", toy(), n_steps=64, seed=0, device="cpu", precision=precision)
    model.learn(64)
    wanted = th.float32 if precision == "fp32" else th.float16
    for p in model.policy.parameters():
        assert p.dtype == wanted
        assert p.grad is None or p.grad.dtype == wanted
        state = model.policy.optimizer.state[p]
        moments = {k: v.dtype for k, v in state.items() if k not in ("step", "carry")}
        assert set(moments.values()) == {wanted}
        assert ("carry" in state) == (p is model.policy.log_std and precision != "fp32")
    floats = {n: a.dtype for n, a in model.rollout_buffer.arrays().items() if a.dtype.kind == "f"}
    assert set(floats.values()) == {np.dtype(np.float32 if precision == "fp32" else np.float16)}


@pytest.mark.parametrize("precision", ["fp16", "paper"])
def test_report_shows_an_fp32_share_below_a_thousandth(precision):
    model = PPOFP16("MlpPolicy", "HalfCheetah-v5", seed=0, device="cpu", precision=precision)
    model.n_steps = 2048
    report = model.precision_report()
    assert report.fp32_share < 1e-3
    assert report["optimizer carry"].fp32_elements == 6
    assert report["parameters"].bytes == 2 * 11_085
    assert report["optimizer first_moment"].bytes == 2 * 11_085
    kept = model.engine.keeps_gradients
    assert report["gradients"].bytes == (2 * 11_085 if kept else 0)
    assert sum(row.elements for row in report.workspace) >= 11_085
    assert "FP32 share" in str(report)
    fp32 = PPOFP16("MlpPolicy", "HalfCheetah-v5", seed=0, device="cpu", precision="fp32").precision_report()
    assert fp32.fp32_share > 0.9
    assert fp32["rollout"].bytes > 1.8 * report["rollout"].bytes


def test_presets_and_wrong_ones(toy):
    with pytest.raises(ValueError, match="Unknown precision 'fp61'; choose one of fp16, paper, bf16, "):
        PPOFP16("MlpPolicy", toy(), precision="fp61")
    with pytest.raises(ValueError, match="writeback='upwards' is not one of"):
        Precision(writeback="upwards")
    with pytest.raises(ValueError, match="Unknown Precision field 'storag'"):
        Precision.of({"storag": "fp16"})
    with pytest.raises(ValueError, match="mixed precision"):
        Precision(compute="fp16")
    with pytest.raises(ValueError, match="module A"):
        Precision(global_scalars=False)
    assert Precision.of(Precision(writeback="nearest").to_dict()) == Precision(writeback="nearest")
    assert [Precision.of(name).name for name in PRESETS] == list(PRESETS)
    assert Precision(writeback="nearest").name == "custom"


@pytest.mark.parametrize(
    "precision",
    [
        Precision(log_ratio="absolute"),
        Precision(log_ratio="residual-twosum"),
        Precision(round_actions=False),
        Precision(root_rounding="fp32", writeback="residual"),
        Precision(storage="fp32", round_actions=False),
        Precision(storage="fp32", round_actions=False, optimizer="adam", gradient_scaling="off"),
    ],
)
def test_any_cell_can_be_varied(toy, precision):
    model = PPOFP16("MlpPolicy", toy(), n_steps=64, seed=0, device="cpu", precision=precision)
    model.learn(128)
    assert np.isfinite(model.policy.parameters_to_vector()).all()
    assert model.precision.name == "custom"


def test_verbose_says_what_runs(toy, capsys):
    PPOFP16("MlpPolicy", toy(), device="cpu", verbose=1)
    assert "Using precision fp16 and the native engine (one C++ call per update" in capsys.readouterr().out
    PPOFP16("MlpPolicy", toy(spaces.Discrete(300)), device="cpu", verbose=1)
    assert "The log-ratio is absolute, in FP32: 300 logits" in capsys.readouterr().out


def test_same_seed_same_run_other_seed_other_run(toy):
    def run(seed):
        return PPOFP16("MlpPolicy", toy(), n_steps=64, seed=seed, device="cpu").learn(192).policy.parameters_to_vector()

    np.testing.assert_array_equal(run(1), run(1))
    assert (run(1) != run(2)).any()


def test_callbacks_that_predict_do_not_disturb_the_rollout(toy):
    """An EvalCallback acts between the policy's step and the buffer's: the stored behaviour must be the step's own."""
    evaluation = EvalCallback(Monitor(toy()), eval_freq=7, n_eval_episodes=1, verbose=0)

    class Reseed(BaseCallback):
        def _on_step(self):
            th.manual_seed(self.num_timesteps)
            return True

    def rollout(*callbacks):
        model = PPOFP16("MlpPolicy", toy(), n_steps=64, seed=0, device="cpu")
        model.train = lambda: None
        model.learn(64, callback=[*callbacks, Reseed()])
        return model.rollout_buffer

    plain, disturbed = rollout(), rollout(evaluation)
    np.testing.assert_array_equal(plain.behaviour[0], disturbed.behaviour[0])
    np.testing.assert_array_equal(plain.actions, disturbed.actions)


def test_timeouts_are_bootstrapped_with_a_finite_fp32_value(toy):
    model = PPOFP16("MlpPolicy", toy(), n_steps=40, batch_size=40, seed=0, device="cpu", gamma=0.5)
    model.policy.value_net.bias.data.fill_(1000.0)
    model.train = lambda: None
    model.learn(40)
    assert (model.rollout_buffer.rewards[[19, 39]] > 400).all()
    assert (model.rollout_buffer.rewards[:19] < 1).all()


def test_several_environments_and_stock_policy_class(toy):
    env = make_vec_env(lambda: toy(), n_envs=4, seed=0)
    model = PPOFP16(ActorCriticPolicy, env, n_steps=32, batch_size=32, seed=0, device="cpu").learn(256)
    assert model.rollout_buffer.observations.shape[:2] == (32, 4)
    assert np.isfinite(model.policy.parameters_to_vector()).all()


def test_unknown_policy_classes_and_double_precision_are_refused(toy):
    with pytest.raises(ValueError, match="derive it from ActorCriticPolicy"):
        PPOFP16(DQNPolicy, toy(), device="cpu")
    with pytest.raises(ValueError, match="precision"):
        PPOFP16("MlpPolicy", toy(), device="cpu", policy_kwargs={"precision": "paper"})


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_extreme_observations_and_rewards_are_counted_and_survived(toy, recorder, precision):
    model = PPOFP16(
        "MlpPolicy", toy(obs_scale=1e6, reward_scale=1e6), n_steps=64, seed=0, device="cpu", precision=precision
    )
    model.set_logger(recorder())
    if precision == "fp16":
        with pytest.warns(UserWarning, match="saturates"):
            model.learn(192)
        assert min(model.logger.values["train/saturated"]) > 100
    else:
        model.learn(192)
    assert np.isfinite(model.policy.parameters_to_vector()).all()


@pytest.mark.parametrize("precision", PRESETS)
def test_a_nan_observation_stops_with_its_name(toy, precision):
    env = toy()
    model = PPOFP16("MlpPolicy", env, n_steps=64, seed=0, device="cpu", precision=precision)
    env.obs_scale = np.nan
    with pytest.raises(ValueError, match="observation is nan"):
        model.learn(64)


@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", np.nan), ("learning_rate", np.inf), ("clip_range", -0.1)]
)
def test_unusable_schedules_are_named(toy, name, value):
    schedule = {name: lambda progress: 0.1 if progress == 1 else value}
    model = PPOFP16("MlpPolicy", toy(), n_steps=64, device="cpu", **schedule)
    before = model.policy.parameters_to_vector()
    with pytest.raises(ValueError, match=name):
        model.learn(64)
    np.testing.assert_array_equal(model.policy.parameters_to_vector(), before)


def test_save_and_load_go_on(toy, tmp_path):
    model = PPOFP16("MlpPolicy", toy(), n_steps=64, seed=0, device="cpu", precision="paper").learn(128)
    model.save(tmp_path / "model")
    twin = PPOFP16.load(tmp_path / "model", env=toy(), device="cpu")
    assert twin.precision == Precision.of("paper")
    for p, q in zip(model.policy.parameters(), twin.policy.parameters(), strict=True):
        assert q.dtype == th.float16
        assert th.equal(p, q)
        for name, value in model.policy.optimizer.state[p].items():
            assert th.equal(value, twin.policy.optimizer.state[q][name])
    obs = np.ones((5, 3), dtype=np.float32)
    np.testing.assert_array_equal(model.predict(obs, deterministic=True)[0], twin.predict(obs, deterministic=True)[0])
    twin.learn(128, reset_num_timesteps=False)
    assert twin.num_timesteps == 256
    assert isinstance(twin.rollout_buffer, RolloutBufferFP16)


def test_get_and_set_parameters(toy):
    first, second = (PPOFP16("MlpPolicy", toy(), n_steps=64, seed=s, device="cpu").learn(64) for s in (0, 1))
    second.set_parameters(first.get_parameters())
    np.testing.assert_array_equal(first.policy.parameters_to_vector(), second.policy.parameters_to_vector())
    first.learn(64)
    assert (first.policy.parameters_to_vector() != second.policy.parameters_to_vector()).any()


def test_progress_bar_and_tensorboard(toy, tmp_path):
    model = PPOFP16("MlpPolicy", toy(), n_steps=64, device="cpu", tensorboard_log=str(tmp_path))
    model.learn(64, progress_bar=True)
    (run,) = tmp_path.iterdir()
    assert run.name == "PPOFP16_1"


@pytest.mark.parametrize("precision", ["fp16", "paper"])
def test_learns_cartpole(precision):
    settings = {"n_steps": 256, "batch_size": 64, "n_epochs": 10, "learning_rate": 1e-3, "seed": 0, "device": "cpu"}
    env = make_vec_env("CartPole-v1", n_envs=4, seed=0)
    model = PPOFP16("MlpPolicy", env, precision=precision, **settings)
    model.learn(20_000)
    mean, _ = evaluate_policy(model, make_vec_env("CartPole-v1", seed=9), n_eval_episodes=10)
    assert mean > 400


def test_values_and_actions_at_the_bound_are_counted(toy, recorder):
    model = PPOFP16("MlpPolicy", toy(), n_steps=64, seed=0, device="cpu", policy_kwargs={"log_std_init": 12.0})
    model.set_logger(recorder())
    with th.no_grad():
        model.policy.value_net.bias.fill_(65_504.0)
        model.policy.value_net.weight.fill_(60_000.0)
    model.train = lambda: None
    model.learn(64)
    buffer = model.rollout_buffer
    for name in ("values", "actions"):
        at_bound = int((np.abs(getattr(buffer, name)) == 65_504).sum())
        assert at_bound > 20
        assert buffer.saturated[name] == at_bound


def test_a_callback_may_change_log_std_within_a_rollout(toy, recorder):
    """The behaviour policy is the one of each step: the same KL estimate as SB3's own PPO."""

    class Anneal(BaseCallback):
        def _on_step(self):
            with th.no_grad():
                self.model.policy.log_std.fill_(-0.01 * (self.n_calls % 64))
            return True

    def logged_kl(cls, **kwargs):
        settings = {"n_steps": 64, "batch_size": 64, "n_epochs": 1, "seed": 0, "device": "cpu"}
        model = cls("MlpPolicy", toy(), **settings, **kwargs)
        model.set_logger(recorder())
        model.learn(64, callback=Anneal())
        return model.logger.values["train/approx_kl"][0]

    assert logged_kl(PPOFP16) == pytest.approx(logged_kl(PPO), rel=0.02)
    assert logged_kl(PPO) > 0.01


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n_epochs": 0}, "n_epochs"),
        ({"n_epochs": 1.5}, "n_epochs"),
        ({"max_grad_norm": None}, "max_grad_norm"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"ent_coef": float("nan")}, "ent_coef"),
        ({"vf_coef": -1.0}, "vf_coef"),
        ({"target_kl": -0.1}, "target_kl"),
        ({"gamma": float("nan")}, "gamma"),
        ({"gae_lambda": float("inf")}, "gae_lambda"),
    ],
)
def test_wrong_arguments_are_named_at_once(toy, settings, named):
    with pytest.raises(ValueError, match=named):
        PPOFP16("MlpPolicy", toy(), device="cpu", **settings)


@pytest.mark.parametrize("action_space", [None, spaces.Discrete(3)])
def test_a_learning_rate_far_too_large_ends_in_a_clear_error_or_finite_parameters(toy, action_space):
    for lr in (1.0, 1e3, 1e10):
        model = PPOFP16("MlpPolicy", toy(action_space), learning_rate=lr, n_steps=64, n_epochs=2, seed=1, device="cpu")
        complaint = ""
        try:
            model.learn(640)
        except ValueError as error:
            complaint = str(error)
        assert not complaint or "learning_rate" in complaint
        assert np.isfinite(model.policy.parameters_to_vector()).all()


@pytest.mark.parametrize("squash", [True, False])
def test_gsde_sees_an_unchanged_policy_before_its_first_step(toy, recorder, squash):
    settings = {"use_sde": True, "policy_kwargs": {"squash_output": squash, "log_std_init": 1.0}}
    model = PPOFP16("MlpPolicy", toy(), n_steps=256, batch_size=256, n_epochs=1, seed=0, device="cpu", **settings)
    model.set_logger(recorder())
    model.learn(256)
    assert model.logger.values["train/approx_kl"][0] < 1e-5
    assert model.logger.values["train/clip_fraction"][0] == 0


def test_another_optimizer_gets_an_engine_of_its_own(toy):
    model = PPOFP16("MlpPolicy", toy(), n_steps=64, seed=0, device="cpu").learn(64)
    engine = model.engine
    assert model.engine is engine
    model.policy.optimizer = type(model.policy.optimizer)(reversed(list(model.policy.parameters())), lr=1e-3)
    assert model.engine is not engine
    model.learn(64)
