import copy
import math
import warnings

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_fp16 import PPOFP16, Precision
from sb3_fp16.engines.eager import EagerEngine
from tests import oracle

DISCRETE = spaces.Discrete(4)


def collected(cls, env, **kwargs):
    """A model with one rollout in its buffer and no update done."""
    settings = {"n_steps": 64, "batch_size": 64, "n_epochs": 1, "seed": 0, "device": "cpu", **kwargs}
    model = cls("MlpPolicy", env, **settings)
    train, model.train = model.train, lambda: None
    model.learn(settings["n_steps"])
    model.train = train
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_range_vf": 0.1, "ent_coef": 0.01},
        {"normalize_advantage": False, "vf_coef": 0.3, "max_grad_norm": 0.05},
        {"clip_range": 0.02, "learning_rate": 3e-3},
        {"batch_size": 24},
        {"policy_kwargs": {"net_arch": [], "log_std_init": -1.0}},
    ],
)
@pytest.mark.parametrize("action_space", [None, DISCRETE])
def test_fp32_tracks_sb3_over_20_minibatches(toy, recorder, action_space, settings):
    theirs = collected(PPO, toy(copy.deepcopy(action_space)), **settings)
    ours = collected(PPOFP16, toy(copy.deepcopy(action_space)), precision="fp32", **settings)
    np.testing.assert_array_equal(ours.rollout_buffer.observations, theirs.rollout_buffer.observations)
    np.testing.assert_allclose(ours.rollout_buffer.advantages, theirs.rollout_buffer.advantages, rtol=1e-6)
    logs = []
    for model in (ours, theirs):
        model.set_logger(recorder())
        np.random.seed(0)
        for _ in range(20):
            model.train()
        logs.append(model.logger.values)
    a, b = logs
    np.testing.assert_allclose(a["train/policy_gradient_loss"], b["train/policy_gradient_loss"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(a["train/value_loss"], b["train/value_loss"], rtol=1e-4)
    for key in ("entropy_loss", "approx_kl", "clip_fraction", "loss", "explained_variance"):
        np.testing.assert_allclose(a[f"train/{key}"], b[f"train/{key}"], rtol=1e-3, atol=2e-5, err_msg=key)
    assert set(b) <= set(a), "SB3's own keys must all be there"
    for p, q in zip(ours.policy.parameters(), theirs.policy.parameters(), strict=True):
        th.testing.assert_close(p, q, rtol=0, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp16", "paper"])
@pytest.mark.parametrize("action_space", [None, DISCRETE])
def test_gradients_match_float64(toy, precision, action_space):
    """The unscaled FP16 gradients against autograd in float64 on the same stored numbers and textbook formulas."""
    model = collected(PPOFP16, toy(action_space), precision=precision, ent_coef=0.01, clip_range_vf=0.2)
    policy, engine = model.policy, model.engine
    generator = th.Generator().manual_seed(0)
    with th.no_grad():
        for p in policy.parameters():
            p += 0.03 * th.randn(p.shape, generator=generator).half()
    batch = next(model.rollout_buffer.get(64))
    losses = engine._losses(batch, model.update_settings())
    (losses.per_network * engine.gradient_scale.scales).sum().backward()
    scale_of = {
        id(p): s for s, net in zip(engine.gradient_scale.scales, policy.networks.values(), strict=True) for p in net
    }

    exact = {name: p.detach().double().requires_grad_() for name, p in policy.named_parameters()}

    def mlp(x, net, head):
        for layer in (0, 2):
            name = f"mlp_extractor.{net}.{layer}"
            x = th.tanh(x @ exact[f"{name}.weight"].t() + exact[f"{name}.bias"])
        return x @ exact[f"{head}.weight"].t() + exact[f"{head}.bias"]

    obs, actions = batch.observations.double(), batch.actions.double()
    out, values = mlp(obs, "policy_net", "action_net"), mlp(obs, "value_net", "value_net")[:, 0]
    if action_space is None:
        mean0, log_std0 = (x.double() for x in batch.behaviour)
        new = th.distributions.Normal(out, exact["log_std"].exp())
        d = (new.log_prob(actions) - th.distributions.Normal(mean0, log_std0.exp()).log_prob(actions)).sum(1)
        entropy = new.entropy().sum(1)
        if batch.correction is not None:
            d = d - batch.correction.double()
    else:
        new = th.distributions.Categorical(logits=out)
        old = th.distributions.Categorical(logits=batch.behaviour.logits.double())
        d, entropy = new.log_prob(actions.flatten()) - old.log_prob(actions.flatten()), new.entropy()
    a = batch.advantages.double()
    a = (a - a.mean()) / (a.std() + 1e-8)
    ratio, old_values = d.exp(), batch.old_values.double()
    surrogate = -th.min(a * ratio, a * ratio.clamp(0.8, 1.2)).mean()
    clipped = old_values + (values - old_values).clamp(-0.2, 0.2)
    value_loss = (batch.returns.double() - clipped).square().mean()
    (surrogate - 0.01 * entropy.mean() + 0.5 * value_loss).backward()

    assert float(losses.policy.detach()) == pytest.approx(float(surrogate.detach()), abs=2e-3)
    for name, p in policy.named_parameters():
        got, want = (p.grad.double() / scale_of[id(p)]).flatten(), exact[name].grad.flatten()
        # FP16 forward and backward signals: each rounded, errors of many samples averaging out.
        assert (got - want).norm() < 0.02 * want.norm() + 1e-6, name


@pytest.mark.parametrize("precision", ["fp16", "paper"])
def test_first_minibatch_sees_an_unchanged_policy(toy, precision):
    """BLAS may round differently for another batch size, so d is what two units of the mean cause, at most."""
    model = collected(PPOFP16, toy(), precision=precision, n_steps=512)
    batch = next(model.rollout_buffer.get(512))
    d, _, _ = model.engine.evaluate(batch)
    mean0, log_std0 = (x.float() for x in batch.behaviour)
    z0 = ((batch.actions - mean0) * th.exp(-log_std0)).abs()
    unit = 2.0 ** (th.frexp(mean0.abs().clamp_min(2.0**-14))[1].float() - 11)
    bound = (z0 * 2 * unit * th.exp(-log_std0)).sum(1) + 1e-6
    correction = 0 if batch.correction is None else batch.correction.float()
    assert ((d + correction).abs() <= bound).all()
    assert float(d.abs().mean().detach()) < 1e-3


def test_a_step_that_overflows_writes_nothing(toy, recorder):
    model = collected(PPOFP16, toy())
    model.set_logger(recorder())
    model.train()
    before = copy.deepcopy(model.policy.state_dict()), copy.deepcopy(model.policy.optimizer.state_dict()["state"])
    model.engine.gradient_scale.scales = th.tensor([2.0**40, 2.0**7])
    model.train()
    for name, value in model.policy.state_dict().items():
        assert th.equal(value, before[0][name]), name
    for key, state in model.policy.optimizer.state_dict()["state"].items():
        assert all(th.equal(value, before[1][key][name]) for name, value in state.items())
    assert model.logger.values["train/skipped_steps"] == [0, 1]
    assert math.isnan(model.logger.values["train/grad_norm"][-1])
    assert model.engine.gradient_scale.scales.tolist() == [2.0**39, 2.0**7]
    model.train()
    assert model.engine.gradient_scale.scales.tolist()[0] == 2.0**38


def test_training_that_cannot_recover_stops_with_the_last_good_parameters(toy):
    model = collected(PPOFP16, toy(), n_epochs=60)
    model.train()
    before = copy.deepcopy(model.policy.state_dict())
    model.rollout_buffer.advantages[3] = np.nan
    model.normalize_advantage = False
    with pytest.raises(ValueError, match="steps in a row"):
        model.train()
    for name, value in model.policy.state_dict().items():
        assert th.equal(value, before[name]), name


def test_fp32_skips_what_is_not_finite_too(toy):
    model = collected(PPOFP16, toy(), precision="fp32", n_epochs=3)
    before = copy.deepcopy(model.policy.state_dict())
    model.rollout_buffer.advantages[3] = np.nan
    model.train()
    assert all(th.equal(v, before[k]) for k, v in model.policy.state_dict().items())


def test_the_norm_that_is_applied_is_in_true_units(toy):
    """SHARP is invariant to gradient scale, so only the first moment shows what clipping did."""
    model = collected(PPOFP16, toy(), max_grad_norm=0.05, learning_rate=0.0)
    model.train()
    total = 0.0
    for p in model.policy.parameters():
        (group,) = model.policy.optimizer.param_groups
        m = model.policy.optimizer.state[p]["first_moment"].double() / group["state_scale"]
        total += float((m / 0.1).square().sum())
    assert math.sqrt(total) == pytest.approx(0.05, rel=2e-3)


@pytest.mark.parametrize(
    ("batch_size", "scales"), [(64, [4096, 128]), (256, [4096, 128]), (63, [2048, 64]), (16, [1024, 32])]
)
def test_initial_scales_follow_small_batches(toy, batch_size, scales):
    model = PPOFP16("MlpPolicy", toy(), n_steps=256, batch_size=batch_size, device="cpu")
    assert model.engine.gradient_scale.scales.tolist() == scales


def test_scaling_off_means_one(toy):
    model = PPOFP16("MlpPolicy", toy(), device="cpu", precision=Precision(gradient_scaling="off"))
    assert model.engine.gradient_scale.scales.tolist() == [1, 1]


@pytest.mark.parametrize("precision", ["fp16", "paper", "fp32"])
def test_target_kl_stops_as_sb3_stops(toy, capsys, precision, recorder):
    settings = {"target_kl": 1e-4, "n_epochs": 50, "learning_rate": 1e-2, "verbose": 1}
    model = collected(PPOFP16, toy(), precision=precision, **settings)
    model.set_logger(recorder())
    model.train()
    assert "Early stopping at step" in capsys.readouterr().out
    assert 1 < model.logger.values["train/n_updates"][-1] < 50
    assert model.logger.values["train/approx_kl"][-1] > 1.5e-4


class UsersBuffer(RolloutBuffer):
    """What SB3's documentation tells a user to write."""


def test_a_users_buffer_trains_through_absolute_log_ratios(toy):
    model = collected(PPOFP16, toy(), rollout_buffer_class=UsersBuffer)
    before = model.policy.parameters_to_vector()
    with warnings.catch_warnings():  # the native engine, where there is one, says that it leaves this to torch
        warnings.simplefilter("ignore", UserWarning)
        model.train()
    assert np.abs(model.policy.parameters_to_vector() - before).max() > 0


OPTIMIZERS = ["SGD", "Adagrad", "AdamW", "RMSprop", "RAdam", "NAdam"]


@pytest.mark.parametrize("precision", ["fp16", "paper", "bf16", "e5m7"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_users_optimizer_works_in_fp32(toy, optimizer, precision):
    """The step is the one that the optimizer makes on FP32 copies with true gradients, rounded to a neighbour."""
    settings = {"policy_kwargs": {"optimizer_class": getattr(th.optim, optimizer)}, "learning_rate": 1e-2}
    model = collected(PPOFP16, toy(), precision=precision, max_grad_norm=0.05, **settings)
    parameters, engine = list(model.policy.parameters()), model.engine
    copies = [th.nn.Parameter(p.detach().float()) for p in parameters]
    reference = getattr(th.optim, optimizer)(copies, lr=1e-2)
    step, given = model.policy.optimizer.step, []
    model.policy.optimizer.step = lambda: (given.extend(p.grad.clone() for p in parameters), step())
    model.train()
    assert math.sqrt(sum(float(g.double().square().sum()) for g in given)) == pytest.approx(0.05, rel=2e-2)
    for copy_, gradient in zip(copies, given, strict=True):
        copy_.grad = gradient.float()
    reference.step()
    kind, off = model.precision.format, []
    for p, q in zip(parameters, copies, strict=True):
        assert p.dtype == kind.dtype
        assert th.equal(kind.store(p.detach().float()), p.detach())
        assert ((p.detach().float() - q.detach()).abs() <= kind.tick(q.detach())).all()
        off.append(((p.detach().float().abs() - q.detach().abs()) / kind.tick(q.detach())).flatten())
        for value in model.policy.optimizer.state[p].values():
            assert not isinstance(value, th.Tensor) or value.dtype == th.float32
    assert abs(float(th.cat(off).mean())) < 0.03, "magnitudes are rounded up as often as they should be"
    del model.policy.optimizer.step
    for _ in range(5):
        model.train()
    assert np.isfinite(model.policy.parameters_to_vector()).all()
    assert engine is model.engine


def test_torchs_adam_on_fp16_state_diverges_and_is_taken_back(toy):
    """Its second moment underflows to zero, and 1e-8 is zero too."""
    kwargs = {"optimizer_kwargs": {"eps": 1e-8}}
    model = collected(PPOFP16, toy(), precision=Precision(optimizer="adam"), policy_kwargs=kwargs)
    before = model.policy.parameters_to_vector()
    with pytest.raises(ValueError, match="Adam made parameters infinite"):
        model.train()
    np.testing.assert_array_equal(model.policy.parameters_to_vector(), before)


def test_losses_are_logged_from_what_the_oracle_computes(toy, recorder):
    model = collected(PPOFP16, toy(), learning_rate=0.0, normalize_advantage=False)
    model.set_logger(recorder())
    model.train()
    buffer = model.rollout_buffer
    d = np.zeros(buffer.advantages.size)
    advantages = buffer.advantages.astype(float).flatten()
    expected = oracle.clipped_loss(d, advantages, 0.2)
    logged = {key: values[-1] for key, values in model.logger.values.items()}
    assert logged["train/policy_gradient_loss"] == pytest.approx(expected, rel=2e-3)
    value_loss = ((buffer.returns.astype(float) - buffer.values.astype(float)) ** 2).mean()
    assert logged["train/value_loss"] == pytest.approx(value_loss, rel=2e-3)
    assert logged["train/entropy_loss"] == pytest.approx(-2 * 0.5 * math.log(2 * math.pi * math.e), rel=1e-3)
    assert logged["train/approx_kl"] < 1e-6
    assert logged["train/clip_fraction"] == 0


def test_engine_state_round_trip(toy):
    first, second = (EagerEngine(collected(PPOFP16, toy()).policy, 64) for _ in range(2))
    first.gradient_scale.update(th.tensor([th.inf, 1.0]))
    second.load_state_dict(first.state_dict())
    assert second.gradient_scale.scales.tolist() == [2048, 128]
