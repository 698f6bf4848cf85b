"""Twins, and the promise that an audit changes nothing."""

import random

import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO

from sb3_fp16 import PPOFP16
from sb3_fp16.audit.twin import Step, parameters_of, replay, same_random_numbers, twin_of
from sb3_fp16.engines.eager import EagerEngine

SMALL = {"n_steps": 64, "batch_size": 16, "n_epochs": 2, "seed": 3, "device": "cpu"}


def trained(toy, precision="fp16", **settings):
    settings = {**SMALL, **settings}
    if precision == "sb3":
        return PPO("MlpPolicy", toy(), **settings).learn(128)
    return PPOFP16("MlpPolicy", toy(), precision=precision, **settings).learn(128)


def bits(model):
    return [p.detach().clone() for p in model.policy.parameters()]


@pytest.mark.parametrize("precision", ["fp16", "paper", "bf16", "fp32", "amp-fp16", "e5m7"])
def test_twin_has_the_same_weights_and_optimizer_state_and_memory_of_its_own(toy, precision):
    model = trained(toy, precision)
    twin = twin_of(model)
    assert twin.precision == model.precision
    states = zip(model.policy.optimizer.state.values(), twin.policy.optimizer.state.values(), strict=True)
    for own, copied in states:
        assert own.keys() == copied.keys()
        assert all(th.equal(th.as_tensor(own[name]), th.as_tensor(copied[name])) for name in own)
    for own, copied in zip(bits(model), twin.policy.parameters(), strict=True):
        assert own.dtype == copied.dtype
        assert th.equal(own, copied)
    with th.no_grad():
        next(iter(twin.policy.parameters())).add_(1)
    assert not th.equal(next(iter(twin.policy.parameters())), next(iter(model.policy.parameters())))


def test_twin_of_sb3s_ppo_is_single_precision(toy):
    model = trained(toy, "sb3")
    twin = twin_of(model)
    assert twin.precision.name == "fp32"
    assert all(th.equal(a, b) for a, b in zip(bits(model), twin.policy.parameters(), strict=True))
    assert twin_of(model, "bf16").policy.action_net.weight.dtype == th.bfloat16


def test_random_numbers_are_put_back():
    def draw():
        return random.random(), np.random.rand(), th.rand(1).item()

    for seed in (random.seed, np.random.seed, th.manual_seed):
        seed(5)
    expected = draw()
    for seed in (random.seed, np.random.seed, th.manual_seed):
        seed(5)

    def fail():
        with same_random_numbers():
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draw() == expected


@pytest.mark.parametrize("precision", ["fp16", "fp32", "naive-fp16"])
def test_a_replay_takes_the_steps_of_the_reference_engine(toy, precision):
    model, other = trained(toy, precision, n_epochs=1), trained(toy, precision, n_epochs=1)
    twin, steps = twin_of(model), []
    np.random.seed(0)
    replay(twin, model.rollout_buffer, 3, lambda step: steps.append([p.detach().clone() for p in step.after]))
    assert len(steps) == 3

    other.use_engine(EagerEngine(other.policy, other.batch_size))
    other.policy.set_training_mode(True)
    np.random.seed(0)
    twin_rollout, taken = other.rollout_buffer, []
    optimizer = other.policy.optimizer
    optimizer.register_step_post_hook(lambda *_: taken.append(bits(other)))
    other.engine.update(twin_rollout, other.update_settings())
    for seen, expected in zip(steps, taken[:3], strict=True):
        named = dict(zip((n for n, _ in other.policy.named_parameters()), expected, strict=True))
        for name, value in zip(parameters_of(twin), seen, strict=True):
            assert th.equal(value, named[name]), name


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_clipped_gradients_are_in_true_units(toy, precision):
    model = trained(toy, precision, max_grad_norm=1e-3)
    norms, scaled = [], []

    def observe(step: Step):
        norms.append(float(th.cat([g.flatten() for g in step.clipped]).norm()))
        scaled.append(float(th.cat([g.float().flatten() for g in step.gradients]).norm()))

    replay(twin_of(model), model.rollout_buffer, 2, observe)
    assert norms == pytest.approx([1e-3, 1e-3], rel=2e-3)
    assert min(scaled) > 1e-2


def test_skipped_steps_are_not_observed(toy):
    model = trained(toy)
    twin = twin_of(model)
    with th.no_grad():
        twin.policy.value_net.bias.fill_(th.finfo(th.float16).max)
    model.rollout_buffer.returns[:] = -60000  # its gradient overflows at any scale of the first steps
    seen = []
    replay(twin, model.rollout_buffer, 2, seen.append)
    assert seen == []
