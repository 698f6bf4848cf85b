import math

import numpy as np
import pytest
import torch as th

from sb3_fp16 import residuals
from sb3_fp16.residuals import GaussianBehaviour
from sb3_fp16.rounding import FORMATS
from tests import oracle

EPS32 = 2.0**-24
FP16 = FORMATS["fp16"]


def gaussian_case(seed: int, batch: int = 4096, dims: int = 3, change: float = 0.03, log_std: float = 0.0):
    """FP16 policies a small change apart, actions drawn from the behaviour policy."""
    g = th.Generator().manual_seed(seed)
    mean0 = th.randn(batch, dims, generator=g).half()
    log_std0 = (th.randn(dims, generator=g) * 0.2 + log_std).half()
    actions = (mean0.float() + log_std0.float().exp() * th.randn(batch, dims, generator=g)).half()
    mean = (mean0.float() + change * log_std0.float().exp() * th.randn(batch, dims, generator=g)).half()
    new_log_std = (log_std0.float() + 0.3 * change * th.randn(dims, generator=g)).half()
    return mean, new_log_std, actions, GaussianBehaviour(mean0, log_std0)


def exact_ratio(mean, log_std, actions, behaviour):
    a, m, s, m0, s0 = (x.double().numpy() for x in (actions, mean, log_std, *behaviour))
    return oracle.gaussian_log_ratio(a, m, s, m0, s0)


@pytest.mark.parametrize("log_std", [-3.0, 0.0, 1.0])
@pytest.mark.parametrize("dims", [1, 3, 17])
def test_gaussian_residual_is_exact_to_fp32(dims, log_std):
    mean, log_sigma, actions, behaviour = gaussian_case(dims, dims=dims, log_std=log_std)
    d = residuals.gaussian_log_ratio(mean.float(), log_sigma.float(), actions, behaviour)
    exact = exact_ratio(mean, log_sigma, actions, behaviour)
    # A few roundings of terms no larger than |z0 dz|, which is at most about 5 |d| here.
    assert np.abs(d.double().numpy() - exact).max() < 64 * EPS32 * np.abs(exact).max()


def test_residual_mae_ratio_of_the_paper():
    """FP16 TwoSum residuals against the FP16 difference of absolute log-probabilities, rms d near 0.1."""
    mean, log_sigma, actions, behaviour = gaussian_case(0, batch=20_000, change=0.055)
    exact = exact_ratio(mean, log_sigma, actions, behaviour)
    assert 0.08 < np.sqrt((exact**2).mean()) < 0.12

    def absolute(mu, log_sigma):  # each operation rounded to FP16
        z = (actions - mu) * th.exp(-log_sigma)
        terms = -log_sigma - (0.5 * z.square()) - th.tensor(residuals.LOG_SQRT_2PI).half()
        return terms.sum(dim=1)

    direct = (absolute(mean, log_sigma) - absolute(*behaviour)).double().numpy()
    new = mean.float(), log_sigma.float()
    ours = residuals.gaussian_log_ratio(*new, actions, behaviour, two_sum=FP16).double().numpy()
    mae_direct, mae_ours = np.abs(direct - exact).mean(), np.abs(ours - exact).mean()
    assert mae_ours < 7e-5
    assert mae_direct / mae_ours > 20
    registers = residuals.gaussian_log_ratio(*new, actions, behaviour).double().numpy()
    assert np.abs(registers - exact).mean() < 1e-7


def test_two_sum_falls_back_where_fp16_overflows():
    behaviour = GaussianBehaviour(th.zeros(1, 1), th.zeros(1))
    actions, mean, log_std = th.full((1, 1), 3.0), th.zeros(1, 1), th.full((1,), -8.0)
    d = residuals.gaussian_log_ratio(mean, log_std, actions, behaviour, two_sum=FP16)
    exact = exact_ratio(mean, log_std, actions, behaviour)
    assert float(d) == pytest.approx(exact[0], rel=1e-5)


def test_unchanged_parameters_give_exactly_zero():
    mean, log_sigma, actions, _ = gaussian_case(3)
    for two_sum in (None, FP16):
        d = residuals.gaussian_log_ratio(
            mean.float(), log_sigma.float(), actions, GaussianBehaviour(mean, log_sigma), two_sum
        )
        assert (d == 0).all()
    logits = th.randn(50, 9, generator=th.Generator().manual_seed(0)).half()
    choice = th.arange(50) % 9
    assert (residuals.categorical_log_ratio(logits.float(), choice, logits) == 0).all()


@pytest.mark.parametrize("two_sum", [None, FP16])
def test_gaussian_gradients_match_finite_differences_of_the_oracle(two_sum):
    mean, log_sigma, actions, behaviour = gaussian_case(5, batch=64, dims=4)
    mean, log_sigma = mean.float().requires_grad_(), log_sigma.float().requires_grad_()
    weights = th.randn(64, generator=th.Generator().manual_seed(1))
    (residuals.gaussian_log_ratio(mean, log_sigma, actions, behaviour, two_sum) * weights).sum().backward()

    a, m, s, m0, s0 = (x.detach().double().numpy() for x in (actions, mean, log_sigma, *behaviour))
    w, h = weights.double().numpy(), 1e-5
    for j in range(4):
        dm, ds = np.zeros_like(m), np.zeros_like(s)
        dm[:, j], ds[j] = h, h
        by_mean = (
            oracle.gaussian_log_ratio(a, m + dm, s, m0, s0) - oracle.gaussian_log_ratio(a, m - dm, s, m0, s0)
        ) / (2 * h)
        by_log_std = (
            oracle.gaussian_log_ratio(a, m, s + ds, m0, s0) - oracle.gaussian_log_ratio(a, m, s - ds, m0, s0)
        ) / (2 * h)
        np.testing.assert_allclose(mean.grad[:, j], w * by_mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(log_sigma.grad[j], (w * by_log_std).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("choices", [2, 9, 256])
def test_categorical_residual_is_exact_to_fp32(choices):
    g = th.Generator().manual_seed(choices)
    logits0 = (2 * th.randn(2000, choices, generator=g)).half()
    logits = (logits0.float() + 0.05 * th.randn(2000, choices, generator=g)).half()
    action = th.multinomial(logits0.float().softmax(1), 1, generator=g).flatten()
    d = residuals.categorical_log_ratio(logits.float(), action, logits0)
    exact = oracle.categorical_log_prob(action, logits.double()) - oracle.categorical_log_prob(action, logits0.double())
    assert np.abs(d.double().numpy() - exact.astype(float)).max() < 1e-6


def test_categorical_large_changes_use_log_sum_exp():
    logits0 = th.tensor([[0.0, 0.0, 0.0], [20.0, 0.0, -20.0], [0.0, 60_000.0, 0.0]])
    logits = th.tensor([[-30.0, 20.0, 0.0], [-20.0, 0.0, 20.0], [60_000.0, 0.0, 0.0]])
    action = th.tensor([0, 2, 0])
    d = residuals.categorical_log_ratio(logits, action, logits0)
    exact = oracle.categorical_log_prob(action, logits.double()) - oracle.categorical_log_prob(action, logits0.double())
    np.testing.assert_allclose(d.double(), exact.astype(float), rtol=1e-5)


def test_categorical_gradient_is_one_hot_minus_probabilities():
    g = th.Generator().manual_seed(0)
    logits0 = th.randn(20, 5, generator=g)
    logits = (logits0 + 0.1 * th.randn(20, 5, generator=g)).requires_grad_()
    action = th.arange(20) % 5
    residuals.categorical_log_ratio(logits, action, logits0).sum().backward()
    p = np.exp(logits.detach().double().numpy())
    expected = np.eye(5)[action] - p / p.sum(1, keepdims=True)
    np.testing.assert_allclose(logits.grad, expected, atol=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.2, 0.9, 1.0, 3.0])
def test_clipped_loss_equals_ppos_on_ratios(clip):
    g = th.Generator().manual_seed(0)
    d, advantages = th.randn(5000, generator=g) * 0.5, th.randn(5000, generator=g)
    expected = oracle.clipped_loss(d.double().numpy(), advantages.double().numpy(), clip)
    assert float(residuals.policy_loss(d, advantages, clip)) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    ratio = np.exp(d.double().numpy())
    assert float(residuals.clip_fraction(d, clip)) == pytest.approx((np.abs(ratio - 1) > clip).mean(), abs=3e-4)


def test_no_gradient_where_clipped():
    d = th.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    residuals.policy_loss(d, th.tensor([1.0, 1.0, -1.0, -1.0]), 0.2).backward()
    np.testing.assert_allclose(d.grad * 4, [0, -math.exp(-0.5), math.exp(0.5), 0], rtol=1e-6)


def test_unbounded_ratios_stay_finite():
    d = th.tensor([300.0, 3e38], requires_grad=True)
    loss = residuals.policy_loss(d, th.tensor([-1.0, -1.0]), 0.2)
    loss.backward()
    assert th.isfinite(loss)
    assert th.isfinite(d.grad).all()


def test_approx_kl_keeps_small_changes():
    d = th.tensor([1e-4, -1e-4])
    assert float(residuals.approx_kl(d)) == pytest.approx(5e-9, rel=1e-3)
    assert float(residuals.approx_kl(th.zeros(10))) == 0
