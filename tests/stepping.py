"""Steps of SHARP on drawn gradients, and how near two ways to compute them must be."""

import itertools

import torch as th

from sb3_fp16 import SHARP, kernels
from sb3_fp16.sharp import ROOT_ROUNDING, SHARING, WRITEBACK

# Odd rows and columns, vectors, a single element, more than a block's rows, columns and elements, narrow matrices.
SHAPES = [(33, 40), (40,), (17, 64), (6, 33), (6,), (1,), (1, 70), (5, 8), (2, 3, 5), (70, 300)]
MODES = list(itertools.product(SHARING, WRITEBACK, ROOT_ROUNDING))

# Formats and settings that have arithmetic of their own.
CASES = [
    (th.float16, {"weight_decay": 0.1}),
    (th.float16, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (th.float16, {"significand_bits": 6}),
    (th.float16, {"state_scale": 2.0**16, "scale": 300.0}),  # moments saturate
    (th.bfloat16, {}),
    (th.bfloat16, {"scale": 1e25}),  # squares leave FP32
    (th.bfloat16, {"scale": 1e-25, "eps": 1e-30}),
    (th.float32, {}),
    (th.float32, {"state_scale": 2.0**16, "scale": 300.0}),  # their moments do, and they do not
    (th.float32, {"state_dtype": th.bfloat16, "weight_decay": 0.1}),
]


def trained(dtype, seed=0, steps=4, shapes=SHAPES, scale=3.0, rows=(), device="cpu", **settings):
    """Parameters and optimizer after some steps on drawn gradients, the third skipped; ``rows`` are factors of rows."""
    generator = th.Generator().manual_seed(seed)
    drawn = [(th.randn(shape, generator=generator) * 0.1).to(dtype) for shape in shapes]
    parameters = [x.to(device).requires_grad_() for x in drawn]
    optimizer = SHARP(parameters, lr=1e-2, seed=5, **settings)
    for step in range(steps):
        for parameter in parameters:
            gradient = th.randn(parameter.shape, generator=generator) * scale
            for row, factor in enumerate(rows[: len(gradient)] if parameter.ndim > 1 else ()):
                gradient[row] *= factor
            parameter.grad = gradient.to(dtype).to(device)
        coefficients = th.rand(len(parameters), generator=generator).to(device)
        optimizer.step(coefficient=coefficients, skip=th.tensor(step == 2, device=device))
    return parameters, optimizer


def assert_same_bits(ours, theirs):
    """Of parameters, state and statistics, each as ``trained`` gives them, perhaps on two devices."""
    for x, y in zip(ours[0], theirs[0], strict=True):
        assert th.equal(x.cpu(), y.cpu())
        for name, value in theirs[1].state[y].items():
            assert th.equal(ours[1].state[x][name].cpu(), value.cpu()), name
    assert ours[1].pop_statistics() == theirs[1].pop_statistics()


def compare(dtype, monkeypatch, share=0.002, device="cpu", **settings):
    """
    Compiled steps against torch's: t and first moments are the same bits, and so are nearly all 16-bit parameters and
    second moments; where the order of a sum decides a rounding, they are a step apart.
    """
    compiled, compileds_own = trained(dtype, device=device, **settings)
    assert all(type(b).__name__ == "_KernelBucket" for _, buckets in compileds_own._buckets.values() for b in buckets)
    monkeypatch.delitem(kernels.MODULES, device)
    by_torch, torchs_own = trained(dtype, device=device, **settings)
    assert all(type(b).__name__ == "_TorchBucket" for _, buckets in torchs_own._buckets.values() for b in buckets)
    differing = total = 0
    for a, b in zip(compiled, by_torch, strict=True):
        for name, x in {"": a.data, **compileds_own.state[a]}.items():
            y = b.data if not name else torchs_own.state[b][name]
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            if name in ("step", "first_moment"):
                assert th.equal(x, y), name
                continue
            if name == "carry":  # what rounding left: where one went the other way, a step of the parameter is in it
                differing, total = differing + int(((x - y).abs() > 1e-6).sum()), total + x.numel()
                assert float((x - y).abs().max()) <= 2.1 * th.finfo(a.dtype).eps * float(a.data.abs().max())
                continue
            if x.dtype == th.float32:
                tolerance = {"": 5e-5}.get(name, 1e-6)  # a parameter feels a tick of its second moment
                assert float((x - y).abs().max()) <= tolerance * max(1e-3, float(y.abs().max()))
                continue
            differing, total = differing + int((x != y).sum()), total + x.numel()
            bits = settings.get("significand_bits")
            ulp = 0 if not x.is_floating_point() else 2.0**-bits if bits else th.finfo(x.dtype).eps
            assert float((x.double() - y.double()).abs().max()) <= 2.1 * ulp * float(y.double().abs().max())
    assert differing <= share * total
    counts, others = compileds_own.pop_statistics(), torchs_own.pop_statistics()
    assert counts[0] == others[0] > 0
    assert abs(counts[1] - others[1]) <= 3
    assert counts[2] == others[2]
