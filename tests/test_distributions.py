import copy

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import StateDependentNoiseDistribution, make_proba_distribution

from sb3_fp16 import ActorCriticPolicyFP16
from sb3_fp16.distributions import ResidualDistribution, with_residuals
from sb3_fp16.precision import Precision
from sb3_fp16.residuals import LogitsBehaviour, behaviour_of
from tests import oracle

FP16, PAPER = Precision.of("fp16"), Precision.of("paper")
OBS = spaces.Box(-np.inf, np.inf, (17,))
SPACES = {
    "box": spaces.Box(-1, 1, (3,)),
    "discrete": spaces.Discrete(5),
    "multidiscrete": spaces.MultiDiscrete([2, 5, 3]),
    "multibinary": spaces.MultiBinary(4),
}
SDE = [{"full_std": full, "squash_output": squash} for full in (True, False) for squash in (True, False)]


def policy(space="box", **kwargs):
    th.manual_seed(0)
    return ActorCriticPolicyFP16(OBS, SPACES[space], lambda _: 3e-4, **kwargs)


def moved(policy, amount=0.03):
    """The policy after a small change of all its parameters."""
    other, generator = copy.deepcopy(policy), th.Generator().manual_seed(1)
    with th.no_grad():
        for p in other.parameters():
            p += (amount * th.randn(p.shape, generator=generator)).to(p.dtype)
    return other


@pytest.mark.parametrize("space", ["multidiscrete", "multibinary", "discrete", "box"])
def test_log_ratio_is_the_difference_of_torchs_log_probabilities(space):
    old, obs = policy(space), th.randn(500, 17)
    new = moved(old)
    actions, _, log_prob = old(obs)
    behaviour, correction = behaviour_of(log_prob)
    assert correction is None
    d = new.get_distribution(obs).log_ratio(actions.float(), behaviour)
    exact = new.get_distribution(obs).log_prob(actions).double() - old.get_distribution(obs).log_prob(actions).double()
    assert exact.abs().mean() > 1e-3
    th.testing.assert_close(d.double(), exact, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("precision", ["fp16", "paper"])
@pytest.mark.parametrize("settings", SDE)
def test_gsde_log_ratio_and_correction(settings, precision):
    """d̃ − c is the log-ratio to the policy that acted, for the stored action."""
    old, obs = policy(use_sde=True, precision=precision, log_std_init=-1.0, **settings), th.randn(500, 17)
    old.reset_noise(500)
    new = moved(old, 0.003)
    with th.no_grad():
        actions, _, log_prob = old(obs)
    behaviour, correction = behaviour_of(log_prob)
    stored_actions, stored = actions.half().float(), type(behaviour)(*(x.half() for x in behaviour))
    distribution = new.get_distribution(obs)
    d = distribution.log_ratio(stored_actions, stored) - correction.half().float()
    exact = distribution.log_prob(stored_actions).double() - log_prob.double()
    assert exact.abs().mean() > 1e-3
    assert (d.double() - exact).abs().mean() < (3e-3 if precision == "paper" else 5e-4)
    assert actions.shape == (500, 3)
    assert th.isfinite(log_prob).all()


def test_correction_is_what_storage_changed():
    """In the paper preset the executed action is not rounded; c = L0 - L0~ in float64, to FP32 accuracy."""
    actor, obs = policy(precision="paper"), th.randn(2000, 17)
    with th.no_grad():
        actions, _, log_prob = actor(obs)
    (mean, log_std), correction = behaviour_of(log_prob)
    m, s = mean.double().numpy(), log_std.double().numpy()
    sampled = oracle.gaussian_log_prob(actions.double().numpy(), m, s)
    rebuilt = oracle.gaussian_log_prob(actions.half().double().numpy(), m, s)
    change = (sampled - rebuilt).astype(float)
    assert np.abs(change).mean() > 1e-4
    np.testing.assert_allclose(correction, change, atol=3e-6)


@pytest.mark.parametrize("settings", SDE)
def test_gsde_policies_copy(settings):
    actor = policy(use_sde=True, **settings)
    actor.reset_noise(4)
    twin = copy.deepcopy(actor)
    obs = th.randn(4, 17)
    assert th.equal(actor(obs)[0], twin(obs)[0])


def test_squashed_actions_stay_inside_where_tanh_can_be_inverted():
    actor = policy(use_sde=True, squash_output=True, log_std_init=2.0)
    actor.reset_noise(1000)
    actions, _, log_prob = actor(th.randn(1000, 17))
    assert actions.abs().max() < 1
    assert actions.abs().max() > 0.999
    assert th.isfinite(log_prob).all()


@pytest.mark.parametrize("space", ["multidiscrete", "multibinary", "discrete"])
def test_gradients_equal_autograds(space):
    old, obs = policy(space), th.randn(100, 17)
    actions, _, log_prob = old(obs)
    behaviour, _ = behaviour_of(log_prob)
    new = moved(old)
    distribution = new.get_distribution(obs)
    logits = distribution.logits.detach().requires_grad_()
    distribution.proba_distribution(logits)
    distribution.log_ratio(actions.float(), behaviour).sum().backward()
    ours = logits.grad.clone()
    logits.grad = None
    distribution.proba_distribution(logits).log_prob(actions).sum().backward()
    th.testing.assert_close(ours, logits.grad, rtol=1e-5, atol=1e-6)


def test_bernoulli_large_changes():
    space = SPACES["multibinary"]
    distribution = with_residuals(make_proba_distribution(space), FP16)
    logits0 = th.tensor([[-30.0, 30.0, 0.0, 60_000.0]])
    logits = th.tensor([[30.0, -30.0, -25.0, -60_000.0]])
    actions = th.tensor([[1.0, 1.0, 1.0, 0.0]])
    d = distribution.proba_distribution(logits).log_ratio(actions, LogitsBehaviour(logits0))
    x, x0, sign = logits.double(), logits0.double(), 2 * actions.double() - 1
    exact = (th.nn.functional.logsigmoid(sign * x) - th.nn.functional.logsigmoid(sign * x0)).sum()
    assert float(d) == pytest.approx(float(exact), rel=1e-5)


def test_every_sb3_distribution_has_a_residual_form_and_others_are_left_alone():
    for space in SPACES.values():
        assert isinstance(with_residuals(make_proba_distribution(space), FP16), ResidualDistribution)
    sde = make_proba_distribution(SPACES["box"], use_sde=True, dist_kwargs={"squash_output": True, "full_std": False})
    ours = with_residuals(sde, FP16)
    assert isinstance(ours, ResidualDistribution)
    assert (ours.full_std, ours.bijector is None, ours.use_expln) == (False, False, False)

    class Own(StateDependentNoiseDistribution):
        pass

    own = Own(3)
    assert with_residuals(own, FP16) is own


@pytest.mark.parametrize("space", SPACES)
def test_sampling_and_mode_agree_with_sb3s(space):
    stock, ours = make_proba_distribution(SPACES[space]), with_residuals(make_proba_distribution(SPACES[space]), PAPER)
    logits = {"discrete": 5, "multidiscrete": 10, "multibinary": 4}
    parameters = (th.randn(50, 3), th.zeros(3)) if space == "box" else (th.randn(50, logits[space]),)
    for deterministic in (True, False):
        th.manual_seed(0)
        a = stock.actions_from_params(*parameters, deterministic=deterministic)
        th.manual_seed(0)
        b = ours.actions_from_params(*parameters, deterministic=deterministic)
        assert th.equal(a, b)
    th.testing.assert_close(stock.entropy(), ours.entropy())
    th.testing.assert_close(stock.log_prob(a), ours.log_prob(a))
