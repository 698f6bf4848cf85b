"""Every preset stores what it says, computes as it says, and trains."""

import contextlib
import copy

import ml_dtypes
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from torch import nn

from sb3_fp16 import PPOFP16, ActorCriticPolicyFP16, Precision
from sb3_fp16.engines.eager import EagerEngine
from sb3_fp16.layers import LayerRule
from sb3_fp16.rounding import FORMATS
from tests.test_everything_trains import environment, train

PRESETS = tuple(Precision.presets)
SHORT = ("e5m9", "e5m8", "e5m7", "e5m6", "e5m5")
STORED = dict.fromkeys(("fp16", "paper", "naive-fp16"), th.float16) | dict.fromkeys(("bf16", "bf16-sr"), th.bfloat16)
OBS, BOX = spaces.Box(-np.inf, np.inf, (17,)), spaces.Box(-1, 1, (6,))


def stored_dtype(name):
    return STORED.get(name, th.float16 if name in SHORT else th.float32)


def policy(precision, **kwargs):
    th.manual_seed(0)
    return ActorCriticPolicyFP16(OBS, BOX, lambda _: 3e-4, precision=precision, **kwargs)


def on_the_grid(values, name):
    """Whether FP32 values are numbers of a format."""
    values = th.as_tensor(values).float()
    return bool((FORMATS[name].store(values).float() == values).all())


@contextlib.contextmanager
def allow_crash(allowed):
    """Torch's own Adam on FP16 parameters may crash; if it does, it must say so and keep the last good ones."""
    complaint = ""
    try:
        yield
    except ValueError as error:
        complaint = str(error)
    assert not complaint or (allowed and "made parameters infinite or NaN" in complaint), complaint


@pytest.mark.parametrize("engine", ["eager", "chosen"])
@pytest.mark.parametrize("name", PRESETS)
def test_what_is_stored(toy, name, engine):
    model = PPOFP16("MlpPolicy", toy(), n_steps=64, n_epochs=2, seed=0, device="cpu", precision=name)
    if engine == "eager":
        model.use_engine(EagerEngine(model.policy, 64))
    model.learn(128)
    wanted = stored_dtype(name)
    for p in model.policy.parameters():
        assert p.dtype == wanted
        assert p.grad is None or p.grad.dtype == wanted
        state = model.policy.optimizer.state[p]
        assert {v.dtype for k, v in state.items() if k not in ("step", "carry")} == {wanted}
        carried = p is model.policy.log_std and model.precision.log_std_writeback in ("residual", "swallowed")
        assert ("carry" in state) == (carried and model.precision.optimizer == "sharp")
        if name in SHORT:
            gradients = [] if p.grad is None else [p.grad]
            assert len(gradients) == (engine == "eager")
            for values in (p, *gradients, state["first_moment"], state["root_second_moment"]):
                assert on_the_grid(values.detach(), name)
    numpy_dtype = {th.float16: np.float16, th.bfloat16: ml_dtypes.bfloat16, th.float32: np.float32}[wanted]
    for key, array in model.rollout_buffer.arrays().items():
        if key != "episode_starts":
            assert array.dtype == numpy_dtype, key
            if name in SHORT:
                assert on_the_grid(array.astype(np.float32), name), key


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("case", ["box", "discrete", "multidiscrete", "multibinary", "image", "dict", "gsde"])
def test_every_preset_trains_everything(name, case):
    settings = {"precision": name}
    if name == "naive-fp16":
        settings["learning_rate"] = 1e-4  # at SB3's it soon divides by a second moment that is zero
    if case == "gsde":
        settings["use_sde"] = True
    kinds = {"image": ("image", "box"), "dict": ("dict", "box"), "gsde": ("box", "box")}
    env = environment(*kinds.get(case, ("box", case)))
    policy = {"image": "CnnPolicy", "dict": "MultiInputPolicy"}.get(case, "MlpPolicy")
    with allow_crash(name == "naive-fp16"):
        train(env, policy, moved=0.05 if name in SHORT else 0.2, **settings)


@pytest.mark.parametrize("name", PRESETS)
def test_plain_dictionaries_restore_presets(name):
    assert Precision.of(Precision.of(name).to_dict()) == Precision.of(name)
    assert Precision.of(name).name == name


@pytest.mark.parametrize("name", ["amp-fp16", "amp-bf16"])
def test_mixed_precision_layers_are_autocasts(name):
    """Forward, and gradients of FP32 parameters, against torch.autocast on the same layers."""
    ours, dtype = policy(name), Precision.of(name).compute_format.dtype
    net = ours.mlp_extractor.policy_net
    stock = copy.deepcopy(net)
    for layer in stock:
        layer.__class__ = getattr(type(layer), "original", type(layer))
    x = th.randn(64, 17)
    a = net(x)
    with th.autocast("cpu", dtype):
        b = stock(x)
    assert a.dtype == b.dtype == dtype
    eps = th.finfo(dtype).eps
    th.testing.assert_close(a.float(), b.float(), rtol=2 * eps, atol=2 * eps)
    signal = th.randn(64, 64).to(dtype)
    a.backward(signal)
    b.backward(signal)
    for p, q in zip(net.parameters(), stock.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == th.float32
        assert (p.grad - q.grad).norm() < 8 * eps * q.grad.norm()
        assert th.equal(p.grad, p.grad.to(dtype).float()), "a weight gradient is a 16-bit number"


def test_mixed_precision_leaves_normalisation_in_fp32():
    from tests.test_everything_trains import Normalised

    actor = policy("amp-fp16", features_extractor_class=Normalised)
    norm, product = actor.features_extractor.net[2], actor.features_extractor.net[1]
    assert product(th.randn(5, 17)).dtype == th.float16
    assert norm(th.randn(5, 20).half()).dtype == th.float32


def test_stochastic_copy_is_unbiased_on_the_grid_and_stays_until_weights_change():
    rule = LayerRule(FORMATS["bf16"], stochastic=True)
    generator = th.Generator().manual_seed(0)
    weights = (0.025 + 1e-4 * th.rand(200_000, generator=generator)).requires_grad_()
    copied = rule.parameter(weights)
    assert th.equal(copied, rule.parameter(weights))
    assert on_the_grid(copied.detach(), "bf16")
    tick = 2.0**-13
    error = (copied - weights).detach().double()
    assert abs(error.mean()) < 4 * tick / 2 / len(weights) ** 0.5
    assert error.abs().max() < tick
    with th.no_grad():
        changed = rule.parameter(weights + 1e-7)
    assert (changed != copied).double().mean() > 0.05
    copied.backward(th.full_like(weights, 1 + 2.0**-12))
    assert (weights.grad == 1).all(), "the gradient is rounded to BF16 on its way"


def test_grad_scaler_rules(toy):
    model = PPOFP16("MlpPolicy", toy(), n_steps=64, seed=0, device="cpu", precision="amp-fp16")
    scale = model.engine.gradient_scale
    assert scale.scales.tolist() == [65536]
    scale.update(th.tensor([th.inf]))
    assert scale.scales.tolist() == [32768]
    for _ in range(6000):
        scale.update(th.tensor([1.0]))
    assert scale.scales.tolist() == [262144], "unlike ours, it grows beyond where it started"
    for name in ("amp-bf16", "bf16", "bf16-sr", "fp32"):
        other = PPOFP16("MlpPolicy", toy(), device="cpu", precision=name)
        assert set(other.engine.gradient_scale.scales.tolist()) == {1}


@pytest.mark.parametrize("name", ["bf16", "bf16-sr"])
def test_bf16_needs_no_state_scale(toy, name):
    model = PPOFP16("MlpPolicy", toy(), device="cpu", precision=name)
    assert {group["state_scale"] for group in model.policy.optimizer.param_groups} == {1.0}


@pytest.mark.parametrize("name", SHORT)
def test_short_formats_round_every_layer_and_signal(name):
    actor = policy(name)
    layer, activation = actor.mlp_extractor.policy_net[0], actor.mlp_extractor.policy_net[1]
    kind = FORMATS[name]
    x = kind.store(th.randn(64, 17)).requires_grad_()
    hidden = layer(x)
    out = activation(hidden)
    exact = th.tanh(hidden.detach().double())
    assert on_the_grid(hidden.detach(), name)
    assert on_the_grid(out.detach(), name)
    assert ((out.detach().double() - exact).abs() <= 0.501 * kind.tick(exact.float())).all()
    out.backward(kind.store(th.randn(64, 64)))
    for gradient in (x.grad, layer.weight.grad, layer.bias.grad):
        assert on_the_grid(gradient, name)
    assert not on_the_grid(layer.weight.grad, "e5m5") or name == "e5m5"


def test_naive_half_precision_is_pytorchs_own(toy, recorder):
    """Its losses equal torch's half operations on the stored rollout; gradients that overflow end it."""
    model = PPOFP16("MlpPolicy", toy(), n_steps=64, seed=0, device="cpu", precision="naive-fp16")
    train_, model.train = model.train, lambda: None
    model.learn(64)
    batch = next(model.rollout_buffer.get(64))
    assert batch.old_log_prob.dtype == th.float16
    losses = model.engine._losses(batch, model.update_settings())
    with th.no_grad():
        dist = model.policy.get_distribution(batch.observations)
        mean, log_std, a = dist.mean.half(), model.policy.log_std, batch.actions.half()
        z = (a - mean) * th.exp(-log_std)
        log_prob = (-log_std - 0.5 * z.square() - 0.9189385332046727).sum(1)
        ratio = (log_prob - batch.old_log_prob).exp()
        adv = batch.advantages
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        surrogate = -th.min(adv * ratio, adv * ratio.clamp(0.8, 1.2)).mean()
        values = model.policy.predict_values(batch.observations).half().flatten()
        value = (batch.returns - values).square().mean()
    assert losses.policy.dtype == losses.value.dtype == th.float16
    assert float(losses.policy.detach()) == float(surrogate)
    assert float(losses.value.detach()) == float(value)
    model.rollout_buffer.returns[:] = 60_000
    with pytest.raises(ValueError, match="infinite or NaN"):
        train_()


@pytest.mark.parametrize(
    "switches",
    [
        {"global_scalars": False, "gradient_scaling": "off"},
        {"log_ratio": "absolute-stored"},
        {"optimizer": "adam"},
        {"log_ratio": "absolute-stored", "optimizer": "adam"},
        {"global_scalars": False, "gradient_scaling": "off", "log_ratio": "absolute-stored"},
        {"global_scalars": False, "gradient_scaling": "off", "optimizer": "adam"},
    ],
)
def test_module_switches(switches):
    """Each of A, B, C off, alone and in pairs: without C, training may crash, and says so."""
    with allow_crash("optimizer" in switches):
        train(environment(), precision=Precision(**switches), learning_rate=1e-4)


def test_nn_modules_are_still_what_they_were():
    actor = policy("amp-fp16")
    assert isinstance(actor.action_net, nn.Linear)
    assert [type(m).__name__ for m in actor.mlp_extractor.policy_net] == ["Linear", "Tanh", "Linear", "Tanh"]
