import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_fp16 import PPOFP16
from sb3_fp16.audit.mismatch import as_trained, between_formats, episodes_of, samples_in_order
from sb3_fp16.audit.twin import twin_of
from sb3_fp16.residuals import GaussianBehaviour, bernoulli_kl, categorical_kl, gaussian_kl
from tests.audit.test_twin import SMALL, trained


def acted(toy, precision="fp16", envs=1, space=None, **settings):
    """A model and a rollout of its present policy."""
    env = DummyVecEnv([lambda: toy(space) for _ in range(envs)])
    model = PPOFP16("MlpPolicy", env, precision=precision, **{**SMALL, **settings}).learn(128 * envs)
    _, callback = model._setup_learn(64, None, reset_num_timesteps=False)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return model


def pairs(model, rollout=None):
    found = between_formats(model, rollout or model.rollout_buffer)
    return {(mismatch.acts, mismatch.trains): mismatch for mismatch in found}


@pytest.mark.parametrize("space", [None, spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)])
def test_between_implementations_and_formats(toy, space):
    model = acted(toy, envs=2, space=space, n_steps=512)
    found = pairs(model)
    for storage in ("fp32", "fp16", "bf16"):
        same = found[f"{storage}, native", f"{storage}, native"].steps
        assert (same.count, same.zero_fraction, same.kl) == (1024, 1, 0)
        assert found[f"{storage}, native", f"{storage}, torch"].steps.mean_abs < 0.01
    half, brain = (found["fp32, torch", f"{storage}, torch"].steps for storage in ("fp16", "bf16"))
    assert 4 < brain.mean_abs / half.mean_abs < 16
    assert 16 < brain.kl / half.kl < 256
    for steps in (half, brain):
        assert steps.mean_ratio == pytest.approx(1, abs=4 * steps.mean_ratio_error)
        assert steps.k1 == pytest.approx(steps.kl, abs=4 * steps.std / np.sqrt(steps.count))
    rows = found["fp32, torch", "bf16, torch"].sequences
    assert [row.horizon for row in rows] == [1, 4, 16, 64, 256]
    assert all(row.rms.low <= row.rms.value <= row.rms.high for row in rows)
    assert sum(part.count for part in found["fp32, torch", "bf16, torch"].slices) == 1024


def test_none_where_policies_have_no_parameters_to_compare(toy):
    model = PPOFP16("MlpPolicy", toy(), use_sde=True, **SMALL).learn(64)
    assert between_formats(model, model.rollout_buffer) == []


def test_as_trained_sees_what_the_weights_have_moved(toy):
    model = acted(toy)
    same, correction = as_trained(twin_of(model), model.rollout_buffer, most=1000)
    assert same.steps.mean_abs < 1e-5
    assert same.steps.count == 64
    assert correction is None
    twin = twin_of(model)
    with th.no_grad():
        twin.policy.action_net.bias.add_(0.25)
    moved, _ = as_trained(twin, model.rollout_buffer, most=16)
    assert moved.steps.count == 16
    std = twin.policy.log_std.detach().float().exp()
    assert moved.steps.std == pytest.approx(float((0.25 / std).norm()), rel=0.5)


def test_what_the_correction_takes_away(toy):
    """gSDE's stored standard deviation is rounded, and the log-ratio is off by what c holds."""
    model = acted(toy, "fp16", use_sde=True)
    _, correction = as_trained(twin_of(model), model.rollout_buffer, most=1000)
    assert correction.without > 1e-5
    assert correction.with_correction < correction.without / 3


def test_the_correction_is_all_there_is_where_only_actions_were_rounded(toy):
    """Both log-probabilities are taken at the stored action then, and nothing is off before c is subtracted."""
    model = acted(toy, "paper")
    found, correction = as_trained(twin_of(model), model.rollout_buffer, most=1000)
    assert correction.without < 1e-6
    assert correction.with_correction == found.steps.mean_abs
    assert found.steps.mean_abs == pytest.approx(np.abs(model.rollout_buffer.corrections).mean(), rel=1e-2)


@pytest.mark.parametrize("precision", ["sb3", "fp32", "amp-bf16", "naive-fp16"])
def test_as_trained_of_absolute_log_probabilities(toy, precision):
    model = trained(toy, precision)
    _, callback = model._setup_learn(64, None, reset_num_timesteps=False)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    found, _ = as_trained(twin_of(model), model.rollout_buffer, most=1000)
    assert found.steps.mean_abs < {"sb3": 1e-6, "fp32": 1e-6}.get(precision, 1e-2)


@pytest.mark.parametrize("precision", ["sb3", "fp16"])
def test_samples_come_in_order(toy, precision):
    env = DummyVecEnv([lambda i=i: toy(obs_scale=1 + i) for i in range(3)])
    if precision == "sb3":
        from stable_baselines3 import PPO

        model = PPO("MlpPolicy", env, **SMALL).learn(192)
    else:
        model = PPOFP16("MlpPolicy", env, **SMALL).learn(192)
    buffer = model.rollout_buffer
    _, callback = model._setup_learn(64, None)
    model.collect_rollouts(model.env, callback, buffer, model.n_steps)
    expected = buffer.observations.astype(np.float32).reshape(-1, 3).copy()
    for stride in (1, 5):
        batches = samples_in_order(buffer, 10, stride)
        seen = np.concatenate([batch.observations.float().numpy() for batch in batches])
        np.testing.assert_array_equal(seen, expected[::stride])


def test_episodes_are_cut_where_they_start():
    class Rollout:
        episode_starts = np.array([[1, 0], [0, 1], [0, 0], [1, 1], [0, 0]], dtype=np.float32)

    episodes = episodes_of(Rollout())
    rows = [row[row >= 0].tolist() for row in episodes.rows]
    assert rows == [[0, 2, 4], [6, 8], [3, 5], [7, 9]]
    assert episodes.available.tolist() == [5, 2, 4, 2]
    assert episodes.lengths.tolist() == [3, 3, 2, 3]  # the two that the rollout's end cuts off go on beyond it
    np.testing.assert_array_equal(episodes.arrange(np.arange(10.0))[1], [6, 8, 0])


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 0.3, 3.0])
def test_closed_forms_of_the_kl(scale):
    """Against torch's in FP64, and where that cancels against the second-order expansion."""
    th.manual_seed(0)
    mean0, log_std0, logits0 = th.randn(50, 4).double(), th.randn(4).double() * 0.3, th.randn(50, 4).double()
    mean, log_std, logits = (x + scale * th.randn(x.shape).double() for x in (mean0, log_std0, logits0))
    kl = th.distributions.kl_divergence
    normal, categorical, bernoulli = th.distributions.Normal, th.distributions.Categorical, th.distributions.Bernoulli
    expected = {
        "gaussian": kl(normal(mean0, log_std0.exp()), normal(mean, log_std.exp())).sum(1),
        "categorical": kl(categorical(logits=logits0), categorical(logits=logits)),
        "bernoulli": kl(bernoulli(logits=logits0), bernoulli(logits=logits)).sum(1),
    }
    if scale < 1e-5:
        p, p1 = logits0.softmax(1), logits0.sigmoid()
        change = logits - logits0
        dl, shift = log_std - log_std0, (mean - mean0) / log_std0.exp()
        expected = {
            "gaussian": (dl.square() + shift.square() / 2).sum(1),
            "categorical": ((p * change.square()).sum(1) - (p * change).sum(1).square()) / 2,
            "bernoulli": (p1 * (1 - p1) * change.square()).sum(1) / 2,
        }
    found = {
        "gaussian": gaussian_kl(mean, log_std, GaussianBehaviour(mean0, log_std0)),
        "categorical": categorical_kl(logits, logits0),
        "bernoulli": bernoulli_kl(logits, logits0),
    }
    for name, value in found.items():
        th.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-18, msg=lambda m, n=name: f"{n}: {m}")


def test_masked_actions_have_no_part_in_the_kl():
    logits0, logits = th.tensor([[0.0, 1.0, -th.inf]]).double(), th.tensor([[0.2, 1.0, -th.inf]]).double()
    th.testing.assert_close(categorical_kl(logits, logits0), categorical_kl(logits[:, :2], logits0[:, :2]))
