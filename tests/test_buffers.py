import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_fp16.buffers import RolloutBufferFP16
from sb3_fp16.residuals import GaussianBehaviour, LogitsBehaviour, attach_behaviour, gaussian_log_prob
from tests import oracle

OBS, ACT = spaces.Box(-np.inf, np.inf, (5,)), spaces.Box(-1, 1, (2,))
STEPS, ENVS = 37, 3


def fill(buffer, seed=0, behaviour=True, action_scale=1.0, reward_scale=1.0):
    """A rollout with episode ends at different times per environment; the last step ends one."""
    rng = np.random.default_rng(seed)
    log_std = th.tensor([-0.5, 0.25]).half().float()
    last_starts = np.ones(ENVS, dtype=bool)
    for _ in range(STEPS):
        mean = th.tensor(rng.normal(size=(ENVS, 2)), dtype=th.float32).half().float()
        action = mean + log_std.exp() * th.tensor(rng.normal(size=(ENVS, 2)), dtype=th.float32) * action_scale
        log_prob = gaussian_log_prob(action, mean, log_std)
        if behaviour:
            stored = gaussian_log_prob(action.half().float(), mean, log_std)
            exact = buffer.precision.name != "paper"
            attach_behaviour(log_prob, GaussianBehaviour(mean, log_std), None if exact else log_prob - stored)
        value = th.tensor(rng.normal(size=(ENVS, 1)) * 10, dtype=th.float32)
        obs, rewards = rng.normal(size=(ENVS, 5)), rng.normal(size=ENVS) * reward_scale
        buffer.add(obs, action.numpy(), rewards, last_starts, value, log_prob)
        last_starts = rng.random(ENVS) < 0.15
    dones = np.array([True, False, False])
    buffer.compute_returns_and_advantage(th.tensor([[1.0], [2.0], [3.0]]), dones)
    return dones


@pytest.mark.parametrize("precision", ["fp16", "paper", "fp32"])
def test_gae_matches_explicit_sums(precision):
    buffer = RolloutBufferFP16(STEPS, OBS, ACT, "cpu", 0.9, 0.97, ENVS, precision=precision)
    dones = fill(buffer)
    for env in range(ENVS):
        rewards, values = buffer.rewards[:, env].astype(float), buffer.values[:, env].astype(float)
        last = (1.0 + env, dones[env])
        expected = oracle.gae(rewards, values, buffer.episode_starts[:, env], *last, 0.97, 0.9)
        kind = "fp32" if precision == "fp32" else "fp16"
        tolerance = 0.51 * oracle.tick(expected, kind) + 1e-5
        assert (np.abs(buffer.advantages[:, env] - expected) <= tolerance).all()
        assert (np.abs(buffer.returns[:, env] - (expected + values)) <= 2 * tolerance + 1e-2 * (kind == "fp16")).all()


def test_everything_is_stored_in_16_bits():
    buffer = RolloutBufferFP16(STEPS, OBS, ACT, "cpu", n_envs=ENVS, precision="paper")
    fill(buffer)
    kinds = {name: array.dtype for name, array in buffer.arrays().items()}
    assert kinds.pop("episode_starts") == np.dtype(bool)
    assert set(kinds.values()) == {np.dtype(np.float16)}
    assert {"observations", "corrections", "behaviour 0", "behaviour 1"} <= set(kinds)
    assert "log_probs" not in kinds


def test_without_behaviour_parameters_the_log_probability_is_kept_in_fp32():
    buffer = RolloutBufferFP16(STEPS, OBS, ACT, "cpu", n_envs=ENVS)
    fill(buffer, behaviour=False)
    batch = next(buffer.get(8))
    assert batch.behaviour is None
    assert batch.old_log_prob.dtype == th.float32


def test_minibatches_are_sb3s_in_sb3s_order():
    ours = RolloutBufferFP16(STEPS, OBS, ACT, "cpu", n_envs=ENVS, precision="fp32")
    theirs = RolloutBuffer(STEPS, OBS, ACT, "cpu", n_envs=ENVS)
    fill(ours, behaviour=False)
    fill(theirs, behaviour=False)
    for _ in range(2):  # twice, as each epoch draws again from unchanged arrays
        np.random.seed(3)
        batches = list(ours.get(20))
        np.random.seed(3)
        expected = list(theirs.get(20))
        assert len(batches) == len(expected) == 6
        for a, b in zip(batches, expected, strict=True):
            for name in ("observations", "actions", "old_values", "old_log_prob", "advantages", "returns"):
                th.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-6, atol=1e-6)
    assert len(list(ours.get())) == 1


def test_categorical_behaviour_comes_back_with_its_minibatch():
    buffer = RolloutBufferFP16(4, OBS, spaces.Discrete(3), "cpu", n_envs=2)
    for step in range(4):
        log_prob = th.zeros(2)
        attach_behaviour(log_prob, LogitsBehaviour(th.full((2, 3), float(step))))
        buffer.add(np.full((2, 5), step), np.array([[0], [1]]), np.zeros(2), np.zeros(2), th.zeros(2, 1), log_prob)
    batch = next(buffer.get())
    assert isinstance(batch.behaviour, LogitsBehaviour)
    assert th.equal(batch.behaviour.logits[:, 0], batch.observations[:, 0])
    assert buffer.actions.dtype == np.int64


def test_saturation_is_counted_and_finite():
    buffer = RolloutBufferFP16(2, OBS, ACT, "cpu", n_envs=2)
    obs = np.zeros((2, 5))
    obs[0, 0], obs[1, 1] = 1e6, -1e5
    for _ in range(2):
        value = th.tensor([[th.inf], [0.0]])
        buffer.add(obs, np.zeros((2, 2)), np.array([1e5, 0.0]), np.zeros(2), value, th.zeros(2))
    buffer.compute_returns_and_advantage(th.tensor([[60_000.0], [0.0]]), np.zeros(2))
    assert buffer.saturated["observations"] == 4
    assert buffer.saturated["rewards"] == 2
    assert buffer.saturated["values"] == 2
    assert buffer.saturated["returns"] >= 2
    for name, array in buffer.arrays().items():
        assert np.isfinite(array).all(), name
    assert buffer.observations[0, 0, 0] == 65504
    buffer.reset()
    assert set(buffer.saturated.values()) == {0}


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("what", ["observations", "actions", "rewards"])
def test_bad_input_names_itself_and_its_environment(what, bad, precision):
    buffer = RolloutBufferFP16(2, OBS, ACT, "cpu", n_envs=2, precision=precision)
    given = {"observations": np.zeros((2, 5)), "actions": np.zeros((2, 2)), "rewards": np.zeros(2)}
    given[what][1] = bad
    with pytest.raises(ValueError, match=f"{what.removesuffix('s')} is .* in environment 1"):
        buffer.add(*given.values(), np.zeros(2), th.zeros(2, 1), th.zeros(2))


def test_float64_observations_round_as_the_policy_rounds_them():
    """Through FP32: a direct conversion of float64 differs near the middle between two halves."""
    buffer = RolloutBufferFP16(1, OBS, ACT, "cpu", n_envs=1)
    obs = np.full((1, 5), 1 + 2.0**-11 + 2.0**-40)
    buffer.add(obs, np.zeros((1, 2)), np.zeros(1), np.zeros(1), th.zeros(1, 1), th.zeros(1))
    assert th.equal(th.from_numpy(buffer.observations[0]), th.from_numpy(obs).float().half())
    assert buffer.observations[0, 0, 0] != obs.astype(np.float16)[0, 0]
