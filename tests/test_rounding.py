import numpy as np
import pytest
import torch as th

from sb3_fp16.rounding import (
    FORMATS,
    check_finite,
    dither_key,
    dither_thresholds,
    random_key,
    random_thresholds,
    round_by_threshold,
)
from tests import oracle

DTYPES = {"fp16": th.float16, "bf16": th.bfloat16}
SHORT = ("e5m9", "e5m8", "e5m7", "e5m6", "e5m5")
ALL_WORDS = th.arange(-(2**15), 2**15, dtype=th.int32).to(th.int16)


def some_values(name: str) -> th.Tensor:
    """Normal, subnormal and tiny magnitudes of both signs."""
    generator = th.Generator().manual_seed(0)
    exponents = th.linspace(-27, 15, 20_000) if name == "fp16" else th.linspace(-100, 100, 20_000)
    return th.randn(20_000, generator=generator).sign() * th.exp2(exponents) * 1.3


@pytest.mark.parametrize("name", DTYPES)
def test_numbers_on_the_grid_never_move(name):
    numbers = ALL_WORDS.view(DTYPES[name]).float()
    numbers = numbers[th.isfinite(numbers)]
    for threshold in (0.0, 0.5, 1 - 2.0**-24):
        rounded = round_by_threshold(numbers, th.full_like(numbers, threshold), FORMATS[name])
        assert th.equal(rounded, numbers)


@pytest.mark.parametrize("name", DTYPES)
def test_the_two_neighbours_are_those_of_the_format(name):
    x = some_values(name)
    exact, step = x.double().numpy(), oracle.tick(x.numpy(), name)
    down = round_by_threshold(x, th.full_like(x, 1 - 2.0**-24), FORMATS[name])
    up = round_by_threshold(x, th.zeros_like(x), FORMATS[name])
    np.testing.assert_array_equal(down.double(), np.sign(exact) * np.floor(np.abs(exact) / step) * step)
    np.testing.assert_array_equal(up.double(), np.sign(exact) * np.ceil(np.abs(exact) / step) * step)
    assert th.equal(up.to(DTYPES[name]).float(), up), "the result must be representable"


@pytest.mark.parametrize("name", DTYPES)
def test_torch_rounds_to_nearest_even_as_the_oracle_says(name):
    x = some_values(name)
    expected = oracle.nearest(x.numpy(), name)
    np.testing.assert_array_equal(FORMATS[name].store(x).double(), expected)


@pytest.mark.parametrize("name", DTYPES)
def test_stochastic_rounding_is_unbiased(name):
    draws = 40_000
    index = th.arange(draws, dtype=th.int32)
    thresholds = random_thresholds(index, random_key(th.tensor(7), salt=1, seed=3))
    for value in (0.3001, -0.02503, 1e-7, -3e-6, 1234.56):
        x = th.full((draws,), value)
        mean = round_by_threshold(x, thresholds, FORMATS[name]).double().mean().item()
        standard_error = oracle.tick(np.array(value), name) / 2 / draws**0.5
        assert abs(mean - float(x[0])) < 4 * standard_error


def test_dithered_rounding_is_right_over_consecutive_steps():
    """Over n steps the accumulated error stays around one tick: the bias falls as 1/n, not 1/sqrt(n)."""
    steps = 4096
    thresholds = dither_thresholds(th.tensor(5, dtype=th.int32), dither_key(th.arange(steps), salt=9))
    for fraction in (0.01, 0.3, 0.77):
        x = th.full((steps,), 1 + fraction * 2.0**-10)
        ticks = (round_by_threshold(x, thresholds, FORMATS["fp16"]) - 1) * 2.0**10
        assert abs(ticks.mean().item() - fraction) < 4 / steps


def test_thresholds_are_even_over_elements_and_over_steps():
    index = th.arange(1 << 16, dtype=th.int32)
    steps = th.arange(1 << 16)
    zero = th.zeros(1, dtype=th.int32)
    for values, worst in (
        (dither_thresholds(index, dither_key(th.tensor(3), 1)), 2e-4),
        (dither_thresholds(zero, dither_key(steps, 1)), 2e-4),
        (random_thresholds(index, random_key(th.tensor(3), 1, 2)), 8e-3),
        (random_thresholds(zero, random_key(steps, 1, 2)), 8e-3),
    ):
        assert values.min() >= 0
        assert values.max() < 1
        uniform = (th.arange(1 << 16) + 0.5) / (1 << 16)
        assert (values.sort().values - uniform).abs().max() < worst


def test_random_thresholds_differ_between_seeds_salts_and_steps():
    index = th.arange(10_000, dtype=th.int32)
    base = random_thresholds(index, random_key(th.tensor(1), salt=2, seed=3))
    for step, salt, seed in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 2, 0xFFFFFFFF)):
        other = random_thresholds(index, random_key(th.tensor(step), salt, seed))
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.05


def test_thresholds_equal_the_same_arithmetic_on_python_integers():
    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    for step, i in ((1, 0), (123_456, 7), (2**31 + 5, 2**31 - 1), (10**10, 99_999)):
        weyl = (i * 0xC13FA9A9 + step * 0x9E3779B9 + 0xDEADBEEF) % 2**32
        index = th.tensor([i], dtype=th.int32)
        assert dither_thresholds(index, dither_key(th.tensor(step), 0xDEADBEEF)).item() == (weyl >> 8) / 2**24
        key = mix(mix((step * 0x9E3779B9) % 2**32 ^ 0x89ABCDEF) ^ 0xDEADBEEF)
        hashed = mix((i * 0xC13FA9A9) % 2**32 ^ key)
        drawn = random_thresholds(index, random_key(th.tensor(step), 0xDEADBEEF, 0x89ABCDEF))
        assert drawn.item() == (hashed >> 8) / 2**24


def test_saturate_keeps_nan_and_bounds_infinity():
    x = FORMATS["fp16"].saturate(th.tensor([th.inf, -th.inf, 7e4, th.nan, 3.0]))
    assert x[:3].tolist() == [65504, -65504, 65504]
    assert th.isnan(x[3])
    assert x[4] == 3


def test_check_finite_names_the_environment_and_the_value():
    check_finite(th.zeros(3, 4), "observation")
    bad = th.zeros(3, 4)
    bad[1, 2] = th.nan
    with pytest.raises(ValueError, match="observation is nan in environment 1"):
        check_finite(bad, "observation")
    with pytest.raises(ValueError, match="reward is -inf in environment 2"):
        check_finite(th.tensor([0.0, 1.0, -th.inf]), "reward")


def test_weight_sticking_example_of_stochastic_rounding():
    """At 0.025 a BF16 tick is 1.22e-4: a step of 1e-6 must move the weight in about 0.8 % of the draws."""
    draws = 200_000
    weight = th.tensor(0.025).to(th.bfloat16).float()
    step = oracle.tick(np.array(0.025), "bf16")
    assert step == pytest.approx(1.22e-4, rel=2e-3)
    assert oracle.tick(np.array(0.025), "fp16") / 2 == pytest.approx(7.6e-6, rel=5e-3)
    thresholds = random_thresholds(th.arange(draws, dtype=th.int32), random_key(th.tensor(1), 1, 1))
    moved = round_by_threshold((weight + 1e-6).expand(draws), thresholds, FORMATS["bf16"]) != weight
    p = float((weight + 1e-6 - weight) / step)
    assert p == pytest.approx(0.0082, abs=2e-4)
    assert abs(moved.double().mean().item() - p) < 4 * (p * (1 - p) / draws) ** 0.5


@pytest.mark.parametrize("name", SHORT)
def test_short_formats_are_rint_on_their_grid(name):
    """Exhaustively over FP16 and over values between: ties to even, subnormals, saturation, infinity."""
    bits = int(name[-1])
    kind = FORMATS[name]
    largest = (2 - 2.0**-bits) * 2.0**15
    assert kind.max == largest
    numbers = ALL_WORDS.view(th.float16).float()
    numbers = numbers[th.isfinite(numbers)]
    x = th.cat([numbers, numbers * 1.0004, some_values("fp16")]).clamp(-7e4, 7e4)
    exact = x.double().numpy()
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14))) - bits)
    rounded = np.rint(exact / step) * step
    np.testing.assert_array_equal(kind.store(x).double(), np.clip(rounded, -largest, largest))
    beyond = np.abs(rounded) > largest
    np.testing.assert_array_equal(kind.round(x).double(), np.where(beyond, np.copysign(np.inf, exact), rounded))
    down = round_by_threshold(x, th.full_like(x, 1 - 2.0**-24), kind).double()
    np.testing.assert_array_equal(down, np.sign(exact) * np.floor(np.abs(exact) / step) * step)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_round_values_forwards_and_gradients_backwards(name):
    kind = FORMATS[name]
    x = th.tensor([0.1, -3.3], requires_grad=True)
    y = kind.round(x)
    assert y.dtype == kind.dtype
    z = kind.upcast(y)
    assert z.dtype == th.float32
    z.backward(th.tensor([0.7, 1e-3]))
    assert th.equal(x.grad, kind.store(th.tensor([0.7, 1e-3])).float())
