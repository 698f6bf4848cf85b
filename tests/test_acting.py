"""The native actor against torch's way: same draws, same actions; and its rollouts against those of SB3's loop."""

import copy
import pickle
import threading
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from sb3_fp16 import PPOFP16, Precision
from sb3_fp16.engines.native import NativeEngine
from sb3_fp16.engines.native_actor import NativeActor
from tests.test_engines import collected
from tests.test_native import ACTIONS, ISAS, PRESETS, logged

pytest.importorskip("sb3_fp16._cpu")


def made(env, **settings):
    return PPOFP16("MlpPolicy", env, n_steps=64, seed=0, device="cpu", **settings)


def without_actor(model):
    """The same model acting through its modules."""
    twin = copy.deepcopy(model.policy)
    assert twin.actor is None
    return twin


def both_forward(model, obs, deterministic=False):
    policy, twin = model.policy, without_actor(model)
    results, states = [], []
    for each in (policy, twin):
        each.set_training_mode(False)
        th.manual_seed(1)
        with th.no_grad():
            results.append(each(obs, deterministic))
        states.append(th.get_rng_state())
    assert th.equal(*states), "as many random numbers as SB3 draws"
    return results


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("envs", [1, 3, 64])
def test_actions_values_and_log_probabilities(toy, isa, precision, actions, envs):
    model = made(toy(ACTIONS[actions]), precision=precision)
    model.use_engine(NativeEngine(model.policy, 64, isa))
    obs = th.randn(envs, 3, generator=th.Generator().manual_seed(0))
    tick = max(1e-6, 2.0**-model.precision.compute_format.significand_bits)
    for deterministic in (False, True):
        ours, theirs = both_forward(model, obs, deterministic)
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
        if model.precision.round_actions:
            assert th.equal(ours[0], model.precision.format.store(ours[0].float()).to(ours[0].dtype))
        if actions == "box":
            th.testing.assert_close(ours[0], theirs[0], rtol=2 * tick, atol=2 * tick)
        else:
            assert (ours[0] == theirs[0]).float().mean() > 0.98
        th.testing.assert_close(ours[1], theirs[1], rtol=4 * tick, atol=4 * tick)
        same = (ours[0] == theirs[0]).reshape(envs, -1).all(1) if actions != "box" else th.ones(envs, dtype=bool)
        th.testing.assert_close(ours[2][same], theirs[2][same], rtol=8 * tick, atol=16 * tick)
        assert hasattr(ours[2], "behaviour") == hasattr(theirs[2], "behaviour")


@pytest.mark.parametrize("actions", ACTIONS)
def test_predict_and_predict_values(toy, actions):
    model = made(toy(ACTIONS[actions]), precision="fp32")
    twin = without_actor(model)
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    for given in (obs, obs[0]):
        for deterministic in (False, True):
            th.manual_seed(2)
            ours, _ = model.predict(given, deterministic=deterministic)
            th.manual_seed(2)
            theirs, _ = twin.predict(given, deterministic=deterministic)
            assert ours.dtype == theirs.dtype
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
    with th.no_grad():
        values = model.policy.predict_values(th.as_tensor(obs))
        th.testing.assert_close(values, twin.predict_values(th.as_tensor(obs)), rtol=1e-5, atol=1e-6)


def test_gradients_and_training_mode_belong_to_torch(toy):
    model = made(toy(), precision="fp32")
    obs = th.zeros(1, 3)
    model.policy.set_training_mode(False)
    assert model.policy(obs)[1].requires_grad
    model.policy.set_training_mode(True)
    with th.no_grad():
        assert type(model.policy(obs)[1]) is th.Tensor


class Edits:
    """Ways in which others change a policy's weights."""

    @staticmethod
    def in_place(policy):
        with th.no_grad():
            policy.value_net.bias += 1

    @staticmethod
    def through_data(policy):
        policy.value_net.bias.data.add_(1)

    @staticmethod
    def another_tensor(policy):
        policy.value_net.bias.data = policy.value_net.bias.data + 1

    @staticmethod
    def through_numpy(policy):
        policy.value_net.bias.detach().numpy()[:] += 1

    @staticmethod
    def load_state_dict(policy):
        state = policy.state_dict()
        state["value_net.bias"] = state["value_net.bias"] + 1
        policy.load_state_dict(state)

    @staticmethod
    def vector(policy):
        vector = policy.parameters_to_vector()
        vector[-1] += 1  # the value head's bias is the last parameter
        policy.load_from_vector(vector)


@pytest.mark.parametrize("precision", ["fp16", "fp32", "amp-bf16"])
@pytest.mark.parametrize("edit", [name for name in vars(Edits) if not name.startswith("_")])
def test_weights_edited_from_outside_are_seen_by_the_next_action(toy, precision, edit):
    model = made(toy(), precision=precision)
    model.policy.set_training_mode(False)
    obs = th.zeros(1, 3)
    with th.no_grad():
        before = float(model.policy.predict_values(obs))
        getattr(Edits, edit)(model.policy)
        assert float(model.policy.predict_values(obs)) == pytest.approx(before + 1, abs=2e-3)


def test_training_is_seen_by_the_next_action(toy):
    model = collected(PPOFP16, toy(), learning_rate=0.01, n_epochs=5)
    obs = th.ones(1, 3)
    with th.no_grad():
        model.policy.set_training_mode(False)
        before = model.policy(obs, deterministic=True)
        model.train()
        model.policy.set_training_mode(False)
        after = model.policy(obs, deterministic=True)
        theirs = without_actor(model)(obs, deterministic=True)
    assert float(before[1]) != float(after[1])
    assert float(after[1]) == pytest.approx(float(theirs[1]), abs=2e-3)


@pytest.mark.parametrize("change", ["activation", "hook", "head"])
def test_structure_changed_after_the_choice_is_seen(toy, change):
    model = made(toy(), precision="fp32")
    obs, seen = np.ones((1, 3), np.float32), []
    model.predict(obs)
    if change == "activation":
        model.policy.mlp_extractor.policy_net[1] = nn.ReLU()
    elif change == "head":
        model.policy.action_net = nn.Linear(64, 2)
    else:
        model.policy.action_net.register_forward_hook(lambda *_: seen.append(1))
    ours, _ = model.predict(obs, deterministic=True)
    theirs, _ = without_actor(model).predict(obs, deterministic=True)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert bool(seen) == (change == "hook")


def test_copies_and_pickles_have_no_actor(toy):
    policy = made(toy()).policy
    assert isinstance(policy.actor, NativeActor)
    assert copy.deepcopy(policy).actor is None
    assert pickle.loads(pickle.dumps(policy.actor)) is None


def test_observations_that_are_not_finite_or_out_of_range(toy):
    model = made(toy())
    with pytest.raises(ValueError, match="observation is nan"):
        model.predict(np.array([np.nan, 0, 0], np.float32))
    with pytest.warns(UserWarning, match="saturates in fp16"):
        model.predict(np.array([1e6, 0, 0], np.float32))
    huge = without_actor(model)
    huge._saturation_warned.add("observation")
    obs = np.array([[1e6, -1e9, 0]], np.float32)
    np.testing.assert_allclose(
        model.predict(obs, deterministic=True)[0], huge.predict(obs, deterministic=True)[0], atol=2e-3
    )


def test_fp64_observations_beyond_fp32(toy):
    model = made(toy(dtype=np.float64))
    with pytest.warns(UserWarning, match="saturates in fp16"):
        model.predict(np.array([1e300, 0, 0]))
    model.rollout_buffer.add(
        np.full((1, 3), 1e300),
        np.zeros((1, 2)),
        np.zeros(1),
        np.zeros(1),
        *both_forward(model, th.zeros(1, 3))[0][1:],
    )
    assert (model.rollout_buffer.observations[0] == 65504).all()
    assert model.rollout_buffer.saturated["observations"] == 3


def test_observations_of_any_memory_layout_and_no_other_shape(toy):
    model = made(toy(), precision="fp32")
    obs = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    strided = obs.T[::2]
    wanted, _ = model.predict(np.ascontiguousarray(strided), deterministic=True)
    np.testing.assert_array_equal(model.predict(strided, deterministic=True)[0], wanted)
    actor = model.policy.actor
    np.testing.assert_array_equal(actor.predict(strided, True), actor.predict(np.ascontiguousarray(strided), True))
    assert actor.predict(np.zeros((1, 6), np.float32), True) is None, "two rows of three are not one of six"
    assert actor.predict(np.zeros((0, 3), np.float32), True).shape == (0, 2)


def test_threads_may_act_for_different_numbers_of_environments(toy):
    policy = made(toy()).policy
    policy.set_training_mode(False)
    failures = []

    def run(envs):
        try:
            for _ in range(200):
                assert policy.actor.act(np.zeros((envs, 3), np.float32))[0].shape == (envs, 2)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(envs,)) for envs in (1, 2, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_change_is_not_forgotten_over_an_observation_that_is_refused(toy):
    model = made(toy())
    model.policy.set_training_mode(False)
    actor = model.policy.actor
    actor.act(np.zeros((1, 3), np.float32))
    model.policy.log_std.data -= 1
    assert actor.act(np.full((1, 3), np.nan, np.float32)) is None
    assert (actor.act(np.zeros((1, 3), np.float32))[1].behaviour[1] == -1).all()


@pytest.mark.parametrize("edit", ["in_place", "another_tensor", "load_state_dict", "vector", "through_data"])
@pytest.mark.parametrize("width", [256, 1100])
def test_weights_of_large_networks_are_looked_at(toy, edit, width):
    """Beyond 4 MiB only what torch counts as a change, and all of them after an update and for a rollout."""
    model = made(toy(), policy_kwargs={"net_arch": [width, width]})
    policy, obs = model.policy, np.zeros((1, 3), np.float32)
    policy.set_training_mode(False)
    before = policy.actor.predict_values(obs).item()
    getattr(Edits, edit)(policy)
    if edit == "through_data" and width == 1100:
        policy.actor.look()
    assert policy.actor.predict_values(obs).item() == pytest.approx(before + 1, abs=2e-3)


def test_outputs_that_overflow_are_an_error(toy):
    model = made(toy())
    model.policy.action_net.weight.data.fill_(6e4)
    model.policy.mlp_extractor.policy_net[2].bias.data.fill_(5)
    with pytest.raises(ValueError, match="activations overflow fp16"):
        model.predict(np.ones(3, np.float32))


def test_threads_may_act_together(toy):
    model = made(toy())
    obs = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    wanted, _ = model.predict(obs, deterministic=True)
    wrong = []

    def run():
        for _ in range(50):
            if not np.array_equal(model.predict(obs, deterministic=True)[0], wanted):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def rollout_of(model, loop):
    """Arrays of one rollout, collected by PPOFP16's own loop or by SB3's."""
    model.train = lambda: None
    if loop == "sb3":
        model.collect_rollouts = partial(OnPolicyAlgorithm.collect_rollouts, model)
    model.learn(64 * model.n_envs)
    return model.rollout_buffer.arrays()


class SometimesOver(gym.Wrapper):
    """Ends episodes both ways."""

    def step(self, action):
        obs, reward, _, truncated, info = self.env.step(action)
        return obs, reward, self.env.unwrapped.steps % 13 == 0, truncated, info


@pytest.mark.parametrize("precision", ["fp16", "paper", "bf16", "fp32", "e5m7"])
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("n_envs", [1, 5])
def test_a_rollout_is_the_one_sb3s_loop_collects(toy, precision, actions, n_envs):
    rollouts = []
    for loop in ("ours", "sb3"):
        env = DummyVecEnv([lambda: SometimesOver(toy(ACTIONS[actions], obs_scale=3.0))] * n_envs)
        rollouts.append(rollout_of(made(env, precision=precision, gamma=0.9), loop))
    ours, theirs = rollouts
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def test_a_rollout_of_fp64_observations(toy):
    """As MuJoCo's are; FP32's rollout agrees with PPO's own."""
    ours = rollout_of(made(toy(dtype=np.float64), precision="fp32"), "ours")
    ppo = PPO("MlpPolicy", toy(dtype=np.float64), n_steps=64, seed=0, device="cpu")
    ppo.train = lambda: None
    ppo.learn(64)
    for name in ("observations", "actions", "rewards", "values", "log_probs", "advantages", "returns"):
        np.testing.assert_allclose(ours[name], getattr(ppo.rollout_buffer, name), rtol=1e-5, atol=2e-6, err_msg=name)


class Watching(BaseCallback):
    """Keeps the names and types of SB3's local variables, and may end the rollout."""

    def __init__(self, stop_at=10**9):
        super().__init__()
        self.stop_at, self.seen, self.calls = stop_at, {}, []

    def _on_rollout_start(self):
        self.calls.append("start")

    def _on_step(self):
        self.seen = {name: type(value) for name, value in self.locals.items()}
        self.calls.append(self.num_timesteps)
        return self.n_calls < self.stop_at

    def _on_rollout_end(self):
        self.calls.append("end")


@pytest.mark.parametrize("stop_at", [10**9, 40])
def test_callbacks_see_what_sb3_shows_them(toy, stop_at):
    watchers = []
    for cls in (PPO, PPOFP16):
        watchers.append(Watching(stop_at))
        model = cls("MlpPolicy", toy(), n_steps=64, n_epochs=1, seed=0, device="cpu")
        model.learn(128, callback=watchers[-1])
    theirs, ours = watchers
    assert ours.calls == theirs.calls
    leftovers = {"idx", "done", "terminal_obs", "terminal_value"}  # of an inner loop
    for name in theirs.seen.keys() - leftovers - {"self", "rollout_buffer"}:
        assert ours.seen[name] is theirs.seen[name], name


class ChangesLogStd(BaseCallback):
    def _on_step(self):
        if self.n_calls == 30:
            with th.no_grad():
                self.model.policy.log_std -= 0.5
        return True


def test_log_std_changed_within_a_rollout(toy):
    rollouts = []
    for loop in ("ours", "sb3"):
        model = made(toy())
        model.train = lambda: None
        if loop == "sb3":
            model.collect_rollouts = partial(OnPolicyAlgorithm.collect_rollouts, model)
        model.learn(64, callback=ChangesLogStd())
        rollouts.append(model.rollout_buffer)
    for name, array in rollouts[0].arrays().items():
        np.testing.assert_array_equal(array, rollouts[1].arrays()[name], err_msg=name)
    log_std = rollouts[0].behaviour[1]
    assert log_std.shape == (64, 1, 2)
    assert (log_std[:30] == 0).all()
    assert (log_std[30:] == -0.5).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["fp16", "bf16-sr", "fp32", Precision(storage="e5m8")], ids=str)
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("net_arch", [[64, 64], [], [300]], ids=str)
def test_the_first_minibatch_sees_a_log_ratio_of_exactly_zero(toy, isa, precision, actions, net_arch):
    """A row has the same bits whether it was computed for an action or in a minibatch (numerics: Module B)."""
    env = DummyVecEnv([partial(toy, ACTIONS[actions])] * 3)
    kwargs = {"net_arch": net_arch}
    model = made(env, precision=precision, n_epochs=1, batch_size=192, learning_rate=0.0, policy_kwargs=kwargs)
    model.use_engine(NativeEngine(model.policy, 192, isa))
    model.learn(192)
    assert logged(model)["train/approx_kl"] == 0
    assert logged(model)["train/clip_fraction"] == 0


def test_vec_normalize_and_a_mean_reward(toy):
    env = VecNormalize(DummyVecEnv([toy] * 2))
    model = made(env).learn(512)
    assert model.engine.name == "native"
    assert np.isfinite(model.policy.parameters_to_vector()).all()
    assert len(model.ep_info_buffer) == 0  # no Monitor, as SB3 has it


@pytest.mark.parametrize("kind", ["observation", "reward"])
def test_numbers_that_are_not_finite_name_their_environment(toy, kind):
    class Poisoned(toy):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            if self.steps == 7:
                obs, reward = (obs * np.nan, reward) if kind == "observation" else (obs, np.nan)
            return obs, reward, *rest

    with pytest.raises(ValueError, match=f"{kind} is nan in environment 1"):
        made(DummyVecEnv([toy, Poisoned])).learn(256)


def test_precision_without_rounded_actions_stores_the_correction(toy):
    model = collected(PPOFP16, toy(), precision=Precision(round_actions=False))
    corrections = model.rollout_buffer.corrections
    assert corrections is not None
    assert np.abs(corrections).max() > 0
    assert np.abs(corrections).max() < 0.05
