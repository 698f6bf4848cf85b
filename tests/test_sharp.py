import copy
import io
import itertools

import numpy as np
import pytest
import torch as th
from torch import nn

from sb3_fp16 import kernels, sharp
from sb3_fp16.sharp import ROOT_ROUNDING, SHARING, SHARP, WRITEBACK, root_shape, state_scale_for
from tests import oracle

EXACT = {"state_dtype": th.float32, "root_rounding": "fp32"}
DTYPES = {"fp16": th.float16, "bf16": th.bfloat16}


@pytest.fixture(params=["torch", "compiled"], autouse=True)
def steps(request, monkeypatch):
    """What steps on a CPU; the compiled step against torch's is tests/test_kernels.py."""
    if request.param == "torch":
        monkeypatch.delitem(kernels.MODULES, "cpu", raising=False)
    elif "cpu" not in kernels.MODULES:
        pytest.skip("sb3_fp16._cpu was not built")
    return request.param


def parameters(dtype=th.float32, seed=0, shapes=((20, 33), (7,), (5, 16), (6, 4, 3, 3), (9, 3), ())):
    g = th.Generator().manual_seed(seed)
    return [nn.Parameter((0.3 * th.randn(shape, generator=g)).to(dtype)) for shape in shapes]


def set_gradients(params, seed, scale=1.0):
    g = th.Generator().manual_seed(seed)
    for p in params:
        p.grad = (scale * th.randn(p.shape, generator=g) * (th.rand(p.shape, generator=g) ** 2)).to(p.dtype)


def oracles(params, sharing, **kwargs):
    """Oracle per parameter; only matrices of 16 columns or more share."""
    result = []
    for p in params:
        wide = p.ndim >= 2 and p.numel() // p.shape[0] >= 16
        theta = p.detach().double().numpy().reshape(p.shape or (1,))
        result.append(oracle.Sharp(theta, sharing=sharing if wide else "elementwise", **kwargs))
    return result


@pytest.mark.parametrize("sharing", SHARING)
def test_ten_steps_match_float64(sharing):
    params = parameters()
    reference = oracles(params, sharing, lr=1e-2)
    optimizer = SHARP(params, lr=1e-2, sharing=sharing, **EXACT)
    for step in range(10):
        set_gradients(params, step, scale=10.0 ** -(step % 4))
        for r, p in zip(reference, params, strict=True):
            r.step(p.grad.double().reshape(r.theta.shape).numpy())
        optimizer.step()
    for r, p in zip(reference, params, strict=True):
        np.testing.assert_allclose(p.detach().double().reshape(r.theta.shape).numpy(), r.theta, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("decay", "decoupled"), [(0.0, False), (0.1, False), (0.1, True)])
def test_elementwise_is_adam_and_adamw(decay, decoupled):
    ours, theirs = parameters(), parameters()
    settings = {"lr": 1e-2, "weight_decay": decay}
    ours_optimizer = SHARP(ours, sharing="elementwise", decoupled_weight_decay=decoupled, **settings, **EXACT)
    adam = (th.optim.AdamW if decoupled else th.optim.Adam)(theirs, eps=1e-5, **settings)
    for step in range(20):
        for params, optimizer in ((ours, ours_optimizer), (theirs, adam)):
            set_gradients(params, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        th.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("sharing", SHARING)
def test_one_step_from_stored_state_rounds_once(name, sharing):
    """From whatever 16-bit state, m, w and theta are the float64 result rounded to nearest."""
    dtype = DTYPES[name]
    params = parameters(dtype)
    optimizer = SHARP(params, lr=1e-2, sharing=sharing, root_rounding="nearest", writeback="nearest")
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    scale = 2.0**12
    for p in params:
        state = optimizer.state[p]
        reference = oracles([p], sharing, lr=1e-2)[0]
        shape = p.shape or (1,)
        reference.t = int(state["step"])
        reference.m = (state["first_moment"].double() / scale).reshape(shape).numpy()
        w = (state["root_second_moment"].double() / scale).numpy()
        if reference.sharing == "elementwise":
            reference.own = w.reshape(shape)
        else:
            reference.rows, reference.columns = w[: shape[0]], w[shape[0] :]
            if reference.sharing == "row":
                reference.columns = np.zeros(p.numel() // shape[0])
        p.reference = reference
    set_gradients(params, 99)
    for p in params:
        p.reference.step(p.grad.double().reshape(p.shape or (1,)).numpy())
    optimizer.step()
    for p in params:
        state, r = optimizer.state[p], p.reference
        w = {"elementwise": r.own, "row": r.rows, "rank1": np.concatenate([r.rows, r.columns])}[r.sharing]
        exact = (r.m * scale, w * scale, r.theta)
        for stored, want in zip((state["first_moment"], state["root_second_moment"], p.detach()), exact, strict=True):
            assert stored.dtype == dtype
            ticks = want.ravel() / oracle.tick(want.ravel(), name)
            off = np.abs(stored.double().numpy().ravel() / oracle.tick(want.ravel(), name) - ticks)
            assert (off < 0.501).all(), "nearest, but for ties that FP32 cannot tell from their neighbours"


def test_state_bytes_of_the_paper():
    """Optimizer state against FP32 Adam at obs 17, act 6: the paper's figures."""
    for width, percent, mebibytes in ((64, 72.8, None), (512, 74.65, None), (2048, 74.91, (64.70, 16.23))):
        shapes = [(6,), (width, 17), (width,), (width, width), (width,), (6, width), (6,)]
        shapes += [(width, 17), (width,), (width, width), (width,), (1, width), (1,)]
        heads = {5: "elementwise", 11: "elementwise"}
        elements = sum(int(np.prod(s)) for s in shapes)
        roots = sum(int(np.prod(root_shape(s, heads.get(i, "row")))) for i, s in enumerate(shapes))
        ours, adam = 2 * (elements + roots), 8 * elements
        assert 100 * (1 - ours / adam) == pytest.approx(percent, abs=0.05)
        if mebibytes:
            assert (round(adam / 2**20, 2), round(ours / 2**20, 2)) == mebibytes


@pytest.mark.parametrize(("sharing", "root", "write"), list(itertools.product(SHARING, ROOT_ROUNDING, WRITEBACK)))
@pytest.mark.parametrize("dtype", [th.float16, th.bfloat16, th.float32])
def test_every_mode_minimises_a_quadratic(dtype, sharing, root, write):
    params = parameters(dtype, shapes=((12, 20), (12,), (3, 12)))
    optimizer = SHARP(params, lr=0.02, sharing=sharing, root_rounding=root, writeback=write)

    def loss():
        return sum((p.float() - 0.5).square().sum() for p in params)

    before = float(loss().detach())
    for _ in range(150):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert float(loss().detach()) < 0.02 * before
    for p in params:
        state = optimizer.state[p]
        assert p.dtype == dtype
        assert state["first_moment"].dtype == (dtype if dtype != th.float32 else th.float16)
        assert state["root_second_moment"].dtype == (th.float32 if root == "fp32" else state["first_moment"].dtype)
        assert ("carry" in state) == (write in ("residual", "swallowed") and dtype != th.float32)


def drift(writeback: str, step: float, steps: int = 1000, start: float = -0.3) -> float:
    """How far a parameter moves under a constant update."""
    p = nn.Parameter(th.full((64,), start, dtype=th.float16))
    origin = p.detach().double().mean()
    optimizer = SHARP([p], lr=step, betas=(0.0, 0.0), eps=1e-12, writeback=writeback, state_scale=1.0)
    for _ in range(steps):
        p.grad = -th.ones_like(p)
        optimizer.step()
    return float(p.detach().double().mean() - origin)


def test_writeback_of_updates_below_half_a_tick():
    """At 0.3 half an FP16 tick is 1.2e-4: nearest loses a 3e-5 update, the others deliver it."""
    due = 1000 * 3e-5
    assert drift("nearest", 3e-5) == 0
    assert drift("residual", 3e-5) == pytest.approx(due, abs=2.5e-4)
    assert drift("dithered", 3e-5) == pytest.approx(due, rel=0.02)
    assert drift("stochastic", 3e-5) == pytest.approx(due, rel=0.02)
    assert drift("swallowed", 3e-5) > 1.2 * due, "the paper's rule forgets what it overshoots"


def test_dithered_root_state_is_unbiased_where_nearest_freezes():
    """Shrink gradients by 4: w must follow. Nearest rounding leaves it too large."""

    def final_ratio(root: str) -> float:
        p = nn.Parameter(th.zeros(64, dtype=th.float16))
        optimizer = SHARP([p], lr=0.0, root_rounding=root)
        for step in range(6000):
            p.grad = th.full_like(p, 1.0 if step < 1000 else 0.25)
            optimizer.step(coefficient=0.01)
        return float(optimizer.state[p]["root_second_moment"].double().mean()) / (2.0**12 * 0.0025)

    decayed = ((1 - 0.999**1000) * 16 * 0.999**5000 + (1 - 0.999**5000)) ** 0.5
    assert final_ratio("dithered") == pytest.approx(decayed, rel=0.002)
    assert final_ratio("stochastic") == pytest.approx(decayed, rel=0.01)
    assert final_ratio("nearest") > 1.4 * decayed


def test_naive_fp16_adam_zeroes_its_second_moment_and_sharp_does_not():
    g = th.Generator().manual_seed(0)
    p = nn.Parameter(th.zeros(200, 64, dtype=th.float16))
    optimizer = SHARP([p], lr=1e-3, state_scale=state_scale_for(0.5), root_rounding="nearest")
    v = th.zeros(200, 64, dtype=th.float16)
    for _ in range(50):
        p.grad = (10 ** (-5 + 2 * th.rand(200, 64, generator=g)) * th.randn(200, 64, generator=g)).half()
        optimizer.step()
        v = 0.999 * v + 0.001 * p.grad.square()
    assert (v == 0).double().mean() > 0.5
    assert (optimizer.state[p]["root_second_moment"] == 0).double().mean() < 0.01


def test_row_clip_holds_rows_to_a_factor_of_four_of_the_layer():
    p = nn.Parameter(th.zeros(16, 16))
    optimizer = SHARP([p], lr=1.0, eps=1e-12, sharing="row", **EXACT)
    p.grad = th.ones_like(p)
    p.grad[0], p.grad[1] = 1e-3, 100.0
    optimizer.step()
    layer = ((14 + 1e-6 + 1e4) / 16) ** 0.5
    np.testing.assert_allclose(-p.detach()[0], 1e-3 / (layer / 4), rtol=1e-4)
    np.testing.assert_allclose(-p.detach()[1], 100 / min(100, 4 * layer), rtol=1e-4)


def test_zero_gradients_move_nothing_and_missing_ones_are_passed_by():
    params = parameters(th.float16)
    before = [p.detach().clone() for p in params]
    optimizer = SHARP(params, lr=0.1)
    for p in params[1:]:
        p.grad = th.zeros_like(p)
    optimizer.step()
    assert all(th.equal(a, p.detach()) for a, p in zip(before, params, strict=True))
    assert params[0] not in optimizer.state
    assert int(optimizer.state[params[1]]["step"]) == 1
    set_gradients(params, 0)
    optimizer.step()
    assert int(optimizer.state[params[0]]["step"]) == 1
    assert int(optimizer.state[params[1]]["step"]) == 2


def test_a_late_parameter_is_bias_corrected_by_its_own_step():
    params = parameters()
    optimizer = SHARP(params, lr=1e-2, sharing="row", **EXACT)
    for step in range(5):
        set_gradients(params[:1], step)
        optimizer.step()
    reference = oracles([params[1]], "row", lr=1e-2)[0]
    set_gradients(params, 9)
    reference.step(params[1].grad.double().numpy())
    optimizer.step()
    np.testing.assert_allclose(params[1].detach().double(), reference.theta, rtol=1e-6, atol=1e-7)


def test_skip_writes_nothing_and_does_not_advance():
    for write in WRITEBACK:
        params = parameters(th.float16)
        optimizer = SHARP(params, lr=0.1, writeback=write)
        set_gradients(params, 0)
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
        for p in params:
            p.grad = th.full_like(p, th.nan)
        optimizer.step(skip=th.tensor(True))
        assert all(th.equal(a, p.detach()) for a, p in zip(before[1], params, strict=True))
        for key, state in optimizer.state_dict()["state"].items():
            assert all(th.equal(value, before[0]["state"][key][name]) for name, value in state.items())
        set_gradients(params, 1)
        optimizer.step(skip=th.tensor(False))
        assert int(optimizer.state[params[0]]["step"]) == 2


def test_coefficient_per_parameter_multiplies_the_gradient():
    ours, theirs = parameters(), parameters()
    kappa = th.rand(len(ours), generator=th.Generator().manual_seed(0))
    a, b = SHARP(ours, lr=1e-2, **EXACT), SHARP(theirs, lr=1e-2, **EXACT)
    set_gradients(ours, 0)
    set_gradients(theirs, 0)
    for p, k in zip(theirs, kappa, strict=True):
        p.grad *= k
    a.step(coefficient=kappa)
    b.step()
    for p, q in zip(ours, theirs, strict=True):
        th.testing.assert_close(p, q, rtol=1e-6, atol=0)


def test_param_groups_keep_their_own_settings():
    first, second = parameters(th.float16), parameters(th.float16, seed=1)
    optimizer = SHARP([{"params": first, "sharing": "row"}, {"params": second, "lr": 0.0}], lr=0.1)
    before = [p.detach().clone() for p in second]
    set_gradients([*first, *second], 0)
    optimizer.step()
    assert optimizer.state[first[0]]["root_second_moment"].shape == (20,)
    assert optimizer.state[second[0]]["root_second_moment"].shape == (53,)
    assert all(th.equal(a, p.detach()) for a, p in zip(before, second, strict=True))
    third = nn.Parameter(th.ones(4, 32, dtype=th.bfloat16))
    optimizer.add_param_group({"params": [third], "sharing": ["elementwise"], "writeback": "residual"})
    third.grad = th.ones_like(third)
    optimizer.step()
    assert optimizer.state[third]["root_second_moment"].shape == (4, 32)
    assert optimizer.state[third]["carry"].dtype == th.float32


def test_settings_can_change_between_steps():
    params = parameters(th.float16)
    optimizer = SHARP(params, lr=0.1, writeback="nearest")
    set_gradients(params, 0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = th.tensor(0.0)
    optimizer.param_groups[0]["writeback"] = "stochastic"
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert all(th.equal(a, p.detach()) for a, p in zip(before, params, strict=True))


def test_float_and_tensor_lr_agree():
    ours, theirs = parameters(th.float16), parameters(th.float16)
    a, b = SHARP(ours, lr=0.0625), SHARP(theirs, lr=th.tensor(0.0625))
    for step in range(3):
        for params, optimizer in ((ours, a), (theirs, b)):
            set_gradients(params, step)
            optimizer.step()
    assert all(th.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_closure_runs_with_gradients_and_its_loss_comes_back():
    p = nn.Parameter(th.ones(3))
    optimizer = SHARP([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 3
    assert (p < 1).all()


@pytest.mark.parametrize("write", WRITEBACK)
@pytest.mark.parametrize("dtype", [th.float16, th.bfloat16, th.float32])
def test_state_dict_round_trip_in_mid_run(dtype, write):
    def run(params, optimizer, steps):
        for step in steps:
            set_gradients(params, step)
            optimizer.step()

    params = parameters(dtype)
    optimizer = SHARP(params, lr=0.01, writeback=write, seed=5, root_rounding="stochastic")
    run(params, optimizer, range(5))
    file = io.BytesIO()
    th.save(optimizer.state_dict(), file)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    twin = SHARP(twins, lr=1.0)
    file.seek(0)
    saved = th.load(file, weights_only=True)
    twin.load_state_dict(saved)
    for p, q in zip(params, twins, strict=True):
        for name, value in optimizer.state[p].items():
            assert value.dtype == twin.state[q][name].dtype
            assert th.equal(value, twin.state[q][name])
    run(params, optimizer, range(5, 10))
    run(twins, twin, range(5, 10))
    assert all(th.equal(p, q) for p, q in zip(params, twins, strict=True))
    # the loaded dictionary is untouched by the steps that followed
    file.seek(0)
    for key, state in th.load(file, weights_only=True)["state"].items():
        assert all(th.equal(value, saved["state"][key][name]) for name, value in state.items())


def test_loading_what_does_not_fit_changes_nothing():
    params = parameters()
    optimizer = SHARP(params, lr=0.1)
    set_gradients(params, 0)
    optimizer.step()
    before = optimizer.state[params[0]]["first_moment"].clone()
    other = parameters(shapes=((20, 34), (7,), (5, 16), (6, 4, 3, 3), (9, 3), ()))
    misfit = SHARP(other)
    set_gradients(other, 0)
    misfit.step()
    with pytest.raises(ValueError, match="shape"):
        optimizer.load_state_dict(misfit.state_dict())
    adam = th.optim.Adam(parameters())
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.load_state_dict(adam.state_dict())
    assert th.equal(optimizer.state[params[0]]["first_moment"], before)


def test_deepcopy_goes_on_alike_and_apart():
    model = nn.Linear(20, 20).half()
    optimizer = SHARP(model.parameters(), lr=0.1)
    set_gradients(list(model.parameters()), 0)
    optimizer.step()
    twin_model, twin = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (twin_model, twin)):
        set_gradients(list(m.parameters()), 1)
        o.step()
    assert th.equal(model.weight, twin_model.weight)
    set_gradients(list(model.parameters()), 2)
    optimizer.step()
    assert not th.equal(model.weight, twin_model.weight)


def test_memory_layout_of_parameters_does_not_matter(steps):
    """Strided parameters are torch's; where contiguous ones are not, a rounding may differ."""
    plain = [nn.Parameter(p.detach().clone()) for p in parameters(th.float16, shapes=((8, 4, 3, 3), (20, 30)))]
    strided = [
        nn.Parameter(plain[0].detach().clone().to(memory_format=th.channels_last)),
        nn.Parameter(plain[1].detach().clone().t().contiguous().t()),
    ]
    assert not any(p.is_contiguous() for p in strided)
    a, b = SHARP(plain, lr=0.1), SHARP(strided, lr=0.1)
    for step in range(3):
        set_gradients(plain, step)
        for p, q in zip(plain, strided, strict=True):
            q.grad = th.empty_like(q).copy_(p.grad)
        a.step()
        b.step()
    for p, q in zip(plain, strided, strict=True):
        th.testing.assert_close(p.detach(), q.detach(), rtol=0 if steps == "torch" else 2.0**-10, atol=0)
        assert not q.is_contiguous()


def test_updating_in_portions_changes_no_bit(monkeypatch):
    def run(limit):
        monkeypatch.setattr(sharp, "_MAX_BUCKET_ELEMENTS", limit)
        params = [*parameters(th.float16), *parameters(th.bfloat16, seed=1)]
        optimizer = SHARP(params, lr=0.01)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
        return params

    for p, q in zip(run(1 << 22), run(100), strict=True):
        assert th.equal(p, q)


def test_runs_with_equal_seeds_agree_and_others_differ():
    def run(seed):
        params = parameters(th.float16)
        optimizer = SHARP(params, lr=1e-3, seed=seed)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
        return th.cat([p.detach().flatten() for p in params])

    assert th.equal(run(1), run(1))
    assert not th.equal(run(1), run(2))


def test_moments_and_parameters_saturate_and_are_counted():
    p = nn.Parameter(th.full((8,), 65_000.0, dtype=th.float16))
    optimizer = SHARP([p], lr=1e5)
    p.grad = th.full_like(p, -60_000.0)
    optimizer.step()
    assert (p == 65_504).all()
    state = optimizer.state[p]
    assert th.isfinite(state["first_moment"]).all()
    assert th.isfinite(state["root_second_moment"]).all()
    nonzero, stuck, saturated = optimizer.pop_statistics()
    assert (nonzero, stuck) == (8, 0)
    assert saturated == 24
    assert optimizer.pop_statistics() == (0, 0, 0)


def test_stuck_updates_are_counted():
    p = nn.Parameter(th.ones(10, dtype=th.float16))
    optimizer = SHARP([p], lr=1e-6, writeback="nearest")
    p.grad = th.ones_like(p)
    p.grad[:4] = 0
    optimizer.step()
    assert optimizer.pop_statistics()[:2] == (6, 6)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": th.tensor(-1.0)}, "lr"),
        ({"seed": 1.5}, "seed"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"sharing": "columns"}, "elementwise, row, rank1"),
        ({"sharing": ["row"]}, "one per parameter"),
        ({"root_rounding": "up"}, "root_rounding"),
        ({"writeback": "never"}, "writeback"),
        ({"state_scale": 3.0}, "state_scale"),
        ({"state_dtype": th.int8}, "state_dtype"),
    ],
)
def test_wrong_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        SHARP(parameters(), **settings)


def test_wrong_parameters_are_named_and_a_failed_group_leaves_no_trace():
    with pytest.raises(ValueError, match="float64"):
        SHARP([nn.Parameter(th.zeros(2, dtype=th.float64))])
    optimizer = SHARP(parameters())
    with pytest.raises(ValueError, match="eps"):
        optimizer.add_param_group({"params": [nn.Parameter(th.zeros(2))], "eps": -1.0})
    assert len(optimizer.param_groups) == 1


def test_state_scale_for_the_default_gradient_bound():
    assert state_scale_for(0.5) == 2.0**16
    assert state_scale_for(100.0) == 2.0**12
    assert state_scale_for(0.0) == 2.0**23


def test_stands_in_for_adam_under_stock_sb3():
    from stable_baselines3 import PPO

    settings = {"optimizer_class": SHARP, "optimizer_kwargs": {"sharing": "row"}}
    model = PPO("MlpPolicy", "Pendulum-v1", n_steps=64, seed=0, device="cpu", policy_kwargs=settings)
    before = model.policy.parameters_to_vector()
    model.learn(128)
    after = model.policy.parameters_to_vector()
    assert np.isfinite(after).all()
    assert (before != after).mean() > 0.9
    weight = model.policy.mlp_extractor.policy_net[2].weight
    assert model.policy.optimizer.state[weight]["first_moment"].dtype == th.float16
    assert model.policy.optimizer.state[weight]["root_second_moment"].shape == (64,)


def test_large_gradients_stay_finite_as_in_adam():
    for dtype in (th.float32, th.bfloat16):
        for root in ROOT_ROUNDING:
            params = parameters(dtype)
            optimizer = SHARP(params, root_rounding=root)
            for _ in range(3):
                for p in params:
                    p.grad = th.full_like(p, 1e30)
                optimizer.step()
            for p in params:
                assert th.isfinite(p).all()
                assert all(th.isfinite(value).all() for value in optimizer.state[p].values())


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(th.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        SHARP(embedding.parameters()).step()


def test_skip_may_be_a_plain_bool():
    params = parameters()
    optimizer = SHARP(params, lr=0.1)
    set_gradients(params, 0)
    before = params[0].detach().clone()
    optimizer.step(skip=True)
    assert th.equal(before, params[0].detach())
    optimizer.step(skip=False)
    assert not th.equal(before, params[0].detach())


def test_writeback_can_change_in_mid_run_and_sharing_cannot():
    params = parameters(th.float16)
    optimizer = SHARP(params, lr=0.1, writeback="nearest", sharing="row")
    set_gradients(params, 0)
    optimizer.step()
    optimizer.param_groups[0]["writeback"] = "residual"
    optimizer.step()
    assert "carry" in optimizer.state[params[0]]
    optimizer.param_groups[0]["sharing"] = "rank1"
    with pytest.raises(ValueError, match="root_second_moment of a parameter of shape"):
        optimizer.step()


def test_incomplete_and_misshapen_states_are_refused():
    params = parameters()
    optimizer = SHARP(params, lr=0.1)
    set_gradients(params, 0)
    optimizer.step()
    for change in (lambda s: s.pop("first_moment"), lambda s: s.update(root_second_moment=th.zeros(3))):
        saved = copy.deepcopy(optimizer.state_dict())
        change(saved["state"][0])
        with pytest.raises(ValueError, match="SHARP:"):
            SHARP(parameters()).load_state_dict(saved)
