"""What the benchmarks compare with does the work that it stands for."""

import numpy as np
import pytest
from stable_baselines3 import PPO

from tests.test_engines import collected

pytest.importorskip("jax")

from benchmarks.jax_peer import JaxUpdate

STATISTICS = ("policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction")


def trained_by_both(model, recorder, half=False):
    """The peer and its statistics after one update of both, and where the parameters started."""
    model.set_logger(recorder())
    before = {name: p.detach().clone().numpy() for name, p in model.policy.named_parameters()}
    peer = JaxUpdate(model, half)
    np.random.seed(0)
    statistics = dict(zip(STATISTICS, peer.train(), strict=True))
    np.random.seed(0)
    model.train()
    return peer, statistics, before


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.05, "ent_coef": 0.1, "clip_range": 0.02}])
def test_jax_follows_sb3(toy, recorder, settings):
    model = collected(PPO, toy(), n_steps=256, n_epochs=2, learning_rate=1e-3, **settings)
    peer, statistics, before = trained_by_both(model, recorder)
    for name, p in model.policy.named_parameters():
        got, want = peer.parameters()[name], p.detach().numpy()
        moved = np.abs(want - before[name]).max()
        assert moved > 1e-4, name
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * moved, err_msg=name)
    logged = {name: model.logger.values[f"train/{name}"][0] for name in STATISTICS}
    assert (logged["clip_fraction"] > 0.1) == bool(settings)
    del logged["approx_kl"]  # SB3 logs that of the last epoch
    for name, value in logged.items():
        assert statistics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_jax_in_half_precision_stays_near(toy, recorder):
    model = collected(PPO, toy(), n_steps=256, n_epochs=2, learning_rate=1e-3)
    peer, _, before = trained_by_both(model, recorder, half=True)
    for name, p in model.policy.named_parameters():
        got, want = peer.parameters()[name], p.detach().numpy()
        assert got.dtype == np.float16
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-3, err_msg=name)  # updates below half an ulp are lost
        if name.endswith("bias"):
            assert np.abs(got - want).max() < 0.05 * np.abs(want - before[name]).max(), name
