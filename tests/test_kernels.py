"""SHARP's step as compiled code runs it on a CPU, against torch: every instruction set, mode and format."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch as th
from torch import nn

from sb3_fp16 import SHARP, kernels
from sb3_fp16.kernels import KernelParameter
from sb3_fp16.sharp import SHARING
from tests.stepping import CASES, MODES, assert_same_bits, compare, trained

_cpu = pytest.importorskip("sb3_fp16._cpu")
ISAS = [isa for isa in ("portable", "avx2", "avx512") if _cpu.supports(isa)]
CASES = [*CASES, (th.float32, {"significand_bits": 6}), (th.float32, {"state_dtype": th.float32})]


def use(monkeypatch, isa):
    """Steps on one instruction set."""
    module = SimpleNamespace(Optimizer=partial(_cpu.Optimizer, isa=isa), OPTIMIZER_FORMATS=_cpu.OPTIMIZER_FORMATS)
    monkeypatch.setitem(kernels.MODULES, "cpu", module)


def buckets_of(optimizer):
    return [type(bucket).__name__ for _, buckets in optimizer._buckets.values() for bucket in buckets]


def stepped(parameter, **settings):
    """An optimizer after one step on a gradient of ones."""
    optimizer = SHARP([parameter], lr=0.1, **settings)
    parameter.grad = th.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_a_cpus_compiled_code_is_used():
    assert kernels.MODULES["cpu"] is _cpu
    assert buckets_of(stepped(nn.Parameter(th.ones(3)))) == ["_KernelBucket"]


@pytest.mark.parametrize(("sharing", "writeback", "root_rounding"), MODES)
def test_every_mode_is_torchs(sharing, writeback, root_rounding, monkeypatch):
    modes = {"sharing": sharing, "writeback": writeback, "root_rounding": root_rounding}
    compare(th.float16, monkeypatch, **modes)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize(("dtype", "extra"), CASES)
def test_formats_and_settings_are_torchs(dtype, extra, sharing, monkeypatch):
    compare(dtype, monkeypatch, sharing=sharing, **extra)


@pytest.mark.parametrize("sharing", ["row", "rank1"])
def test_rows_far_from_their_layer_are_clipped(sharing, monkeypatch):
    compare(th.float16, monkeypatch, sharing=sharing, rows=(300.0, 1e-3), writeback="nearest")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize(("dtype", "extra"), [(th.float16, {}), *CASES])
def test_instruction_sets_have_the_same_bits(dtype, extra, sharing, isa, monkeypatch):
    expected = trained(dtype, sharing=sharing, **extra)
    use(monkeypatch, isa)
    assert_same_bits(trained(dtype, sharing=sharing, **extra), expected)


@pytest.mark.parametrize("sharing", ["elementwise", "rank1"])
def test_more_threads_change_no_bit(sharing):
    settings = {"sharing": sharing, "shapes": [(1024, 1024), (50,)], "steps": 2}
    expected = trained(th.float16, **settings)
    th.set_num_threads(3)
    try:
        found = trained(th.float16, **settings)
    finally:
        th.set_num_threads(1)
    assert_same_bits(found, expected)


def test_mixed_settings_of_one_group(monkeypatch):
    """Modes per parameter, formats and empty parameters side by side, in two groups, with a rate on a tensor."""

    def run():
        generator = th.Generator().manual_seed(0)
        shapes, dtypes = [(20, 33), (0, 4), (), (7,), (6, 4, 3, 3)], [th.float16, th.float32, th.bfloat16]
        parameters = [nn.Parameter(th.randn(s, generator=generator).to(d)) for d in dtypes for s in shapes]
        modes = {"sharing": ["row", *["rank1"] * 14], "writeback": ["residual", "swallowed", *["dithered"] * 13]}
        others = [nn.Parameter(p.detach().clone()) for p in parameters]
        optimizer = SHARP([{"params": parameters, **modes}, {"params": others}], lr=th.tensor(0.01))
        for _ in range(3):
            for p in [*parameters, *others]:
                p.grad = th.randn(p.shape, generator=generator).to(p.dtype)
            optimizer.step()
        return buckets_of(optimizer), [*parameters, *others]

    buckets, compiled = run()
    assert buckets == ["_KernelBucket"] * 6
    monkeypatch.delitem(kernels.MODULES, "cpu")
    buckets, by_torch = run()
    assert buckets == ["_TorchBucket"] * 6
    for p, q in zip(compiled, by_torch, strict=True):
        th.testing.assert_close(p, q, rtol=th.finfo(p.dtype).eps * (16 if p.dtype == th.float32 else 1), atol=1e-6)


def test_what_is_not_served_is_left_to_torch():
    for dtype, settings in (
        (th.float16, {"state_dtype": th.float32}),
        (th.float16, {"state_dtype": th.bfloat16}),
        (th.float16, {"betas": (0.9, 0.9999999)}),
    ):
        assert buckets_of(stepped(nn.Parameter(th.ones(4, 4, dtype=dtype)), **settings)) == ["_TorchBucket"]
    transposed = nn.Parameter(th.ones(20, 30).t())
    assert buckets_of(stepped(transposed)) == ["_TorchBucket"]


def test_state_of_other_settings_is_left_to_torch():
    """Compiled code goes by formats: it must neither misread numbers nor write beyond their memory."""
    for before, after in (("fp32", "nearest"), ("nearest", "fp32")):
        parameter = nn.Parameter(th.ones(40, 40, dtype=th.float16))
        optimizer = stepped(parameter, root_rounding=before, sharing="elementwise")
        assert buckets_of(optimizer) == ["_KernelBucket"]
        optimizer.param_groups[0]["root_rounding"] = after
        optimizer.step()
        assert buckets_of(optimizer) == ["_TorchBucket"]
    optimizer = stepped(nn.Parameter(th.ones(20, 20)))
    (state,) = optimizer.state.values()
    state["first_moment"] = state["first_moment"].t()
    optimizer.step()
    assert buckets_of(optimizer) == ["_TorchBucket"]
    state["first_moment"] = state["first_moment"].contiguous()
    optimizer.step()
    assert buckets_of(optimizer) == ["_KernelBucket"]


def test_parameters_may_share_a_counter():
    """As in a state that was made by hand: it advances once."""
    parameters = [nn.Parameter(th.ones(4)), nn.Parameter(th.ones(4))]
    optimizer, reference = SHARP(parameters, lr=0.1, root_rounding="nearest"), nn.Parameter(th.ones(4))
    optimizer.initialize_state()
    first, second = (optimizer.state[p] for p in parameters)
    second["step"] = first["step"]
    for _ in range(2):
        for p in parameters:
            p.grad = th.ones_like(p)
        optimizer.step()
    stepped(reference, root_rounding="nearest").step()
    assert int(first["step"]) == 2
    assert all(th.equal(p, reference) for p in parameters)


def test_torch_sees_that_parameters_have_changed():
    weight = nn.Parameter(th.ones(3))
    loss = (weight * weight).sum()
    loss.backward(retain_graph=True)
    SHARP([weight], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_scratch_is_the_largest_gradient():
    weight, bias = nn.Parameter(th.ones(20, 33)), nn.Parameter(th.ones(20))
    optimizer = SHARP([weight, bias])
    weight.grad, bias.grad = th.ones_like(weight), th.ones_like(bias)
    optimizer.step()
    assert optimizer.scratch() == 20 * 48


def test_settings_that_make_no_sense_are_refused():
    entry = KernelParameter(*[th.ones(4)] * 4, th.tensor(0), None, 1, 4, 0, 0).entry()
    for wrong, message in (({"sharing": "column"}, "unknown name column"), ({"rows": 0}, "no elements")):
        with pytest.raises(ValueError, match=message):
            _cpu.Optimizer("fp16", "fp16", [entry | wrong])
    with pytest.raises(ValueError, match="no step serves parameters in fp16 with moments in fp32"):
        _cpu.Optimizer("fp16", "fp32", [entry])
    with pytest.raises(ValueError, match="does not support sse9"):
        _cpu.Optimizer("fp16", "fp16", [entry], isa="sse9")
    with pytest.raises(ValueError, match="one gradient per parameter"):
        _cpu.Optimizer("fp16", "fp16", [entry]).step(0, 0, 0, [], {}, None)
