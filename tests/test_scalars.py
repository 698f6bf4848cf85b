import math

import numpy as np
import pytest
import torch as th

from sb3_fp16 import scalars
from sb3_fp16.scalars import GradientScale


def stress_gradients() -> list[th.Tensor]:
    """24 inputs with finite FP16 elements whose squares leave FP16: 6 magnitudes x 4 sizes."""
    generator = th.Generator().manual_seed(0)
    shapes = (64, 1024, 4096, 40_000)
    return [
        (th.rand(n, generator=generator) * 0.5 + 0.5).mul(magnitude).half()
        for magnitude in (300.0, 1e3, 2e3, 1e4, 3e4, 6.5e4)
        for n in shapes
    ]


def test_norm_stress_24_of_24():
    naive = [g.square().sum().sqrt() for g in stress_gradients()]
    assert sum(not th.isfinite(n) for n in naive) == 24
    ours = [scalars.gradient_norm([g]) for g in stress_gradients()]
    assert sum(bool(th.isfinite(n)) for n in ours) == 24
    for g, n in zip(stress_gradients(), ours, strict=True):
        assert float(n) == pytest.approx(np.linalg.norm(g.double().numpy()), rel=1e-5)


def test_norm_of_tiny_mixed_and_zero_gradients():
    tiny = [th.full((3, 5), 2.0**-24).half(), th.full((7,), 2.0**-24).half()]
    assert float(scalars.gradient_norm(tiny)) == pytest.approx(2.0**-24 * math.sqrt(22), rel=1e-6)
    assert float(scalars.gradient_norm([th.zeros(4).half()])) == 0
    assert float(scalars.gradient_norm([th.full((10,), 1e-30)])) == pytest.approx(1e-30 * 10**0.5, rel=1e-5)


@pytest.mark.parametrize("bad", [th.inf, -th.inf, th.nan])
def test_norm_shows_what_is_not_finite(bad):
    g = th.ones(100).half()
    g[17] = bad
    assert not th.isfinite(scalars.gradient_norm([g]))


def test_clip_coefficients_unscale_and_clip_in_true_units():
    scales = th.tensor([4096.0, 128.0])
    true = np.array([3.0, 4.0])
    norm, kappa = scalars.clip_coefficients(th.tensor(true).float() * scales, scales, max_norm=0.5)
    assert float(norm) == pytest.approx(5.0)
    np.testing.assert_allclose(kappa * scales, 0.5 / (5 + 1e-6), rtol=1e-6)
    norm, kappa = scalars.clip_coefficients(th.tensor([0.1, 0.1]) * scales, scales, max_norm=0.5)
    np.testing.assert_allclose(kappa * scales, 1.0)


def test_advantages_match_float64_and_survive_degenerate_batches():
    a = (th.randn(64, generator=th.Generator().manual_seed(1)) * 300 + 1000).half()
    x = a.double().numpy()
    expected = (x - x.mean()) / (x.std(ddof=1) + 1e-8)
    np.testing.assert_allclose(scalars.normalize_advantages(a.float()).numpy(), expected, rtol=2e-4, atol=2e-5)
    assert th.isfinite(scalars.normalize_advantages(th.full((64,), 3.0))).all()
    assert scalars.normalize_advantages(th.tensor([2.0])).tolist() == [2.0]


def test_value_loss_and_explained_variance_do_not_overflow():
    values, returns = th.full((64,), -300.0).half(), th.linspace(0, 60_000, 64).half()
    v, r = values.double().numpy(), returns.double().numpy()
    assert float(scalars.mean_squared_error(values.float(), returns.float())) == pytest.approx(
        ((v - r) ** 2).mean(), rel=1e-5
    )
    assert scalars.explained_variance(returns * 0.5, returns) == pytest.approx(0.75, rel=1e-3)
    assert math.isnan(scalars.explained_variance(values, th.ones(64).half()))


class TestGradientScale:
    def make(self, *initial: float) -> GradientScale:
        return GradientScale(th.tensor(initial or (4096.0, 128.0)))

    def test_overflow_skips_both_and_halves_the_offender(self):
        scale = self.make()
        assert not scale.update(th.tensor([1.0, 2.0]))
        assert scale.update(th.tensor([th.inf, 2.0]))
        assert scale.scales.tolist() == [2048, 128]
        assert scale.update(th.tensor([1.0, th.nan]))
        assert scale.scales.tolist() == [2048, 64]
        assert int(scale.skipped_steps) == 2

    def test_recovers_after_2000_good_steps_up_to_the_initial_value(self):
        scale = self.make()
        for _ in range(2):
            scale.update(th.tensor([th.inf, 1.0]))
        good = th.ones(2)
        for _ in range(1999):
            scale.update(good)
        assert scale.scales.tolist() == [1024, 128]
        scale.update(good)
        assert scale.scales.tolist() == [2048, 128]
        for _ in range(6000):
            scale.update(good)
        assert scale.scales.tolist() == [4096, 128]

    def test_a_skip_restarts_the_count(self):
        scale = self.make()
        scale.update(th.tensor([th.inf, 1.0]))
        for _ in range(1999):
            scale.update(th.ones(2))
        scale.update(th.tensor([1.0, th.inf]))
        for _ in range(1999):
            scale.update(th.ones(2))
        assert scale.scales.tolist() == [2048, 64]

    def test_ten_skips_in_a_row_at_the_floor_are_an_error(self):
        scale = self.make(2.0**-22)
        for _ in range(2 + 9):
            scale.update(th.tensor([th.nan]))
        scale.raise_if_unrecoverable()
        assert scale.scales.item() == 2.0**-24
        scale.update(th.tensor([th.nan]))
        with pytest.raises(ValueError, match="10 steps in a row"):
            scale.raise_if_unrecoverable()

    def test_good_steps_between_skips_are_no_error(self):
        scale = self.make(2.0**-24)
        for _ in range(30):
            scale.update(th.tensor([th.inf]))
            scale.update(th.tensor([1.0]))
        scale.raise_if_unrecoverable()

    def test_without_adaption_it_still_skips(self):
        scale = GradientScale(th.ones(1), adapt=False)
        assert scale.update(th.tensor([th.nan]))
        assert scale.scales.item() == 1

    def test_state_round_trip_shares_no_memory(self):
        scale, other = self.make(), self.make()
        scale.update(th.tensor([th.inf, 1.0]))
        other.load_state_dict(scale.state_dict())
        scale.scales.mul_(0.5)
        assert other.scales.tolist() == [2048, 128]
        assert int(other.skipped_steps) == 1
