"""SHARP, Adam and the gradient norm as kernels, in the simulator, against torch and float64."""

import itertools
import math

import numpy as np
import pytest
import torch as th

from sb3_fp16 import SHARP, kernels
from sb3_fp16.kernels import KernelParameter, OptimizerKernels
from sb3_fp16.scalars import GradientScale, clip_coefficients
from sb3_fp16.sharp import ROOT_ROUNDING, SHARING, WRITEBACK
from tests.stepping import CASES, MODES, SHAPES, assert_same_bits, compare, trained


@pytest.mark.parametrize(("sharing", "writeback", "root_rounding"), MODES)
def test_every_mode_in_fp16(sharing, writeback, root_rounding, on_cpu, monkeypatch):
    modes = {"sharing": sharing, "writeback": writeback, "root_rounding": root_rounding}
    compare(th.float16, monkeypatch, shapes=SHAPES[:8], **modes)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dtype", "extra"), CASES)
def test_formats_and_settings(dtype, extra, seed, sharing, on_cpu, monkeypatch):
    compare(dtype, monkeypatch, seed=seed, sharing=sharing, **extra)


@pytest.mark.parametrize("sharing", ["row", "rank1"])
def test_rows_far_from_their_layer_are_clipped(sharing, on_cpu, monkeypatch):
    compare(th.float16, monkeypatch, sharing=sharing, rows=(300.0, 1e-3), writeback="nearest")


@pytest.mark.parametrize("order", range(4))
def test_the_order_of_threads_changes_no_bit(order, on_cpu, monkeypatch):
    expected = trained(th.float16)
    monkeypatch.setenv("SB3_FP16_SIMT_SEED", str(order + 1))
    assert_same_bits(trained(th.float16), expected)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize(("dtype", "extra"), [(th.float16, {}), *CASES])
def test_a_cpus_steps_have_the_same_bits(dtype, extra, sharing, simulated, monkeypatch):
    on_a_cpu = pytest.importorskip("sb3_fp16._cpu")
    for writeback, root_rounding in zip(WRITEBACK, itertools.cycle(ROOT_ROUNDING), strict=False):
        modes = {"sharing": sharing, "writeback": writeback, "root_rounding": root_rounding}
        results = []
        for module in (simulated, on_a_cpu):
            monkeypatch.setitem(kernels.MODULES, "cpu", module)
            results.append(trained(dtype, shapes=SHAPES[:8], steps=2, **modes, **extra))
        assert_same_bits(*results)


def test_more_parameters_than_a_table_holds(on_cpu, monkeypatch):
    compare(th.float16, monkeypatch, shapes=[(3, 17), (5,)] * 30)


def test_what_kernels_do_not_serve_is_left_to_torch(on_cpu):
    for dtype, settings in (
        (th.float16, {"state_dtype": th.float32}),
        (th.float16, {"betas": (0.9, 0.9999999)}),
    ):
        _, optimizer = trained(dtype, steps=1, shapes=[(4, 4)], **settings)
        ((_, buckets),) = optimizer._buckets.values()
        assert [type(bucket).__name__ for bucket in buckets] == ["_TorchBucket"]
    transposed = th.randn(20, 30).half().t().requires_grad_()
    optimizer = SHARP([transposed])
    transposed.grad = th.randn(30, 20).half()
    optimizer.step()
    ((_, (bucket,)),) = optimizer._buckets.values()
    assert type(bucket).__name__ == "_TorchBucket"


# --- the norm, and Adam ---


class Norm:
    """One step's norm settings on tensors."""

    def __init__(self, scales, max_norm=0.5, stopped=False):
        networks = len(scales)
        self.scale = GradientScale(th.tensor(scales))
        self.scales, self.coefficients = self.scale.scales.clone(), th.zeros(networks)
        self.norm, self.skip = th.zeros(()), th.tensor(False)
        self.counters, self.stopped, self.max_norm = th.zeros(3, dtype=th.int64), th.tensor(stopped), max_norm

    def settings(self):
        names = ("scales", "coefficients", "norm", "skip", "counters", "stopped")
        addresses = {name: getattr(self, name).data_ptr() for name in names}
        limits = {"floor": self.scale.floor.tolist(), "ceiling": self.scale.ceiling.tolist()}
        return addresses | limits | {"max_norm": self.max_norm}


ADAM = {
    "betas": (0.9, 0.999),
    "eps": 1e-5,
    "weight_decay": 0.0,
    "decoupled_weight_decay": False,
    "state_scale": 1.0,
    "root_rounding": "fp32",
    "seed": 0,
    "parameter_bits": 23,
    "state_bits": 23,
}


def adam_step(parameters, gradients, states, networks, norm, steps, kernels_=None, **settings):
    members = [
        KernelParameter(p, g, *state, t, None, 1, p.numel(), 0, network)
        for p, g, state, t, network in zip(parameters, gradients, states, steps, networks, strict=True)
    ]
    kernels_ = kernels_ or OptimizerKernels(th.device("cpu"))
    lr = th.tensor(3e-4)
    kernels_.step(members, ADAM | settings, lr, norm.coefficients, norm.skip, None, norm.settings())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [[5], [700, 1], [3000, 64, 9000]])
@pytest.mark.parametrize("magnitude", [1.0, 1e-15, 1e15])
def test_the_norm_is_float64s(seed, sizes, magnitude, on_cpu):
    generator = th.Generator().manual_seed(seed)
    networks = [0] + [1] * (len(sizes) - 1)
    gradients = [th.randn(n, generator=generator) * magnitude for n in sizes]
    norm = Norm([2.0**12, 2.0**7][: len(set(networks))])
    states = [(th.zeros(n), th.zeros(n)) for n in sizes]
    adam_step([th.zeros(n) for n in sizes], gradients, states, networks, norm, [th.tensor(0) for _ in sizes])
    in_true_units = [g.double().numpy() / (2.0**12, 2.0**7)[k] for g, k in zip(gradients, networks, strict=True)]
    expected = math.sqrt(sum(float(np.square(g).sum()) for g in in_true_units))
    assert float(norm.norm) == pytest.approx(expected, rel=1e-5)
    wanted = min(1.0, 0.5 / (expected + 1e-6))
    assert norm.coefficients.tolist() == pytest.approx([wanted / s for s in norm.scale.scales.tolist()], rel=1e-5)
    assert not norm.skip
    assert norm.counters.tolist() == [1, 0, 0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("network", [0, 1])
def test_a_gradient_that_is_not_finite_skips_the_step(bad, network, on_cpu):
    gradients = [th.ones(600), th.ones(40)]
    gradients[network][-1] = bad
    parameters, states = [th.ones(600), th.ones(40)], [(th.zeros(600), th.zeros(600)), (th.zeros(40), th.zeros(40))]
    norm, steps = Norm([2.0**12, 2.0**7]), [th.tensor(7), th.tensor(7)]
    adam_step(parameters, gradients, states, [0, 1], norm, steps)
    assert norm.skip
    assert math.isnan(norm.norm)
    assert steps == [7, 7]
    assert all(bool((x == 1).all()) for x in parameters)
    assert all(bool((x == 0).all()) for state in states for x in state)
    # The rules are GradientScale's.
    norm.scale.update(th.tensor([bad if network == k else 1.0 for k in range(2)]))
    assert th.equal(norm.scales, norm.scale.scales)
    assert norm.counters.tolist() == [
        int(norm.scale.good_steps),
        int(norm.scale.skipped_steps),
        int(norm.scale.skips_at_floor),
    ]


def test_scales_fall_to_their_floor_and_grow_again_as_gradient_scales_do(on_cpu):
    norm, steps, kernels_ = Norm([2.0**-22, 2.0**7]), [th.tensor(0), th.tensor(0)], OptimizerKernels(th.device("cpu"))
    parameters, states = [th.zeros(3), th.zeros(2)], [(th.zeros(3), th.zeros(3)), (th.zeros(2), th.zeros(2))]
    random = np.random.default_rng(0)
    for number in range(200):
        if number == 100:  # nearly time to grow
            norm.counters[0] = norm.scale.good_steps = th.tensor(1950)
        gradients = [th.ones(3), th.ones(2)]
        bad = [k for k in range(2) if number < 100 and random.random() < 0.3]
        for k in bad:
            gradients[k][0] = math.inf
        adam_step(parameters, gradients, states, [0, 1], norm, steps, kernels_)
        norm.scale.update(th.tensor([math.inf if k in bad else 1.0 for k in range(2)]))
        assert th.equal(norm.scales, norm.scale.scales), number
        own = (norm.scale.good_steps, norm.scale.skipped_steps, norm.scale.skips_at_floor)
        assert norm.counters.tolist() == list(map(int, own)), number


def test_after_a_stop_nothing_is_written(on_cpu):
    norm, step = Norm([1.0], stopped=True), th.tensor(3)
    parameters, states = [th.ones(20)], [(th.zeros(20), th.zeros(20))]
    adam_step(parameters, [th.ones(20)], states, [0], norm, [step])
    assert norm.skip
    assert int(step) == 3
    assert bool((parameters[0] == 1).all())
    assert norm.counters.tolist() == [0, 0, 0]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torchs(weight_decay, on_cpu):
    generator = th.Generator().manual_seed(0)
    start = [th.randn(shape, generator=generator) for shape in ((50, 70), (70,), (3000,))]
    ours, theirs = [x.clone() for x in start], [x.clone().requires_grad_() for x in start]
    states = [(th.zeros_like(x), th.zeros_like(x)) for x in ours]
    adam = th.optim.Adam(theirs, lr=3e-4, eps=1e-5, weight_decay=weight_decay)
    norm, steps, kernels_ = Norm([1.0]), [th.tensor(0) for _ in start], OptimizerKernels(th.device("cpu"))
    for _ in range(5):
        gradients = [th.randn(x.shape, generator=generator) for x in start]
        adam_step(ours, gradients, states, [0] * 3, norm, steps, kernels_, weight_decay=weight_decay)
        norms = th.stack([th.cat([g.flatten() for g in gradients]).norm()])
        _, coefficient = clip_coefficients(norms, th.ones(1), 0.5)
        for x, g in zip(theirs, gradients, strict=True):
            x.grad = g * coefficient
        adam.step()
    assert steps == [5, 5, 5]
    for x, y in zip(ours, theirs, strict=True):
        assert float((x - y.detach()).abs().max()) < 1e-6


def test_settings_that_make_no_sense_are_refused(on_cpu):
    entry = KernelParameter(*[th.ones(4)] * 4, th.tensor(0), None, 1, 4, 0, 0).entry()
    make = on_cpu.Optimizer
    for wrong, message in (({"sharing": "column"}, "sharing"), ({"rows": 0}, "no elements")):
        with pytest.raises(ValueError, match=message):
            make("fp16", "fp16", [entry | wrong])
    with pytest.raises(ValueError, match="format"):
        make("fp8", "fp16", [entry])
    optimizer = make("fp16", "fp16", [entry])
    with pytest.raises(ValueError, match="one gradient per parameter"):
        optimizer.step(0, 0, 0, [], {}, None)
    norm = Norm([1.0]).settings()
    with pytest.raises(ValueError, match="no network"):
        make("fp32", "fp32", [entry | {"coefficient": 1}]).step(0, 0, 0, [0], ADAM, norm)
