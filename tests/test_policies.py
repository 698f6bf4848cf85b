import copy
import pickle
import threading

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from sb3_fp16 import ActorCriticPolicyFP16
from sb3_fp16.residuals import behaviour_of
from sb3_fp16.sharp import SHARP

OBS, BOX, DISCRETE = spaces.Box(-np.inf, np.inf, (17,)), spaces.Box(-1, 1, (6,)), spaces.Discrete(5)


def make(action_space=BOX, observation_space=OBS, cls=ActorCriticPolicyFP16, **kwargs):
    th.manual_seed(0)
    return cls(observation_space, action_space, lambda _: 3e-4, **kwargs)


def test_parameters_are_half_and_are_sb3s_rounded_once():
    ours, theirs = make(), make(cls=ActorCriticPolicy)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.dtype == th.float16
        assert th.equal(p, q.half())


def test_fp32_is_sb3s_policy_bit_for_bit():
    ours, theirs, obs = make(precision="fp32"), make(cls=ActorCriticPolicy), th.randn(9, 17)
    for method in ("forward", "predict_values"):
        th.manual_seed(1)
        a = getattr(ours, method)(obs)
        th.manual_seed(1)
        b = getattr(theirs, method)(obs)
        th.testing.assert_close(a, b, rtol=0, atol=0)
    assert type(ours.optimizer) is th.optim.Adam
    assert ours.optimizer.defaults == theirs.optimizer.defaults


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.ELU, nn.SiLU, nn.LeakyReLU, nn.GELU, nn.Mish, nn.Softsign])
@pytest.mark.parametrize("net_arch", [[], [64], {"pi": [7, 100], "vf": [33]}])
def test_each_layer_rounds_its_output_once(activation, net_arch):
    """Within half a unit of float64 layers on the same FP16 input."""
    policy = make(activation_fn=activation, net_arch=net_arch)
    actor, critic = policy.mlp_extractor.policy_net, policy.mlp_extractor.value_net
    for net, head in ((actor, policy.action_net), (critic, policy.value_net)):
        x = th.randn(200, 17).half()
        for layer in [*net, head]:
            ours = layer(x)
            assert ours.dtype == (th.float32 if layer is head else th.float16)
            with th.no_grad():
                stock = copy.deepcopy(layer)
                stock.__class__ = getattr(type(layer), "original", type(layer))
                wanted = stock.double()(x.double())
            unit = 2.0 ** (th.frexp(wanted.abs().clamp_min(2.0**-14))[1].double() - 11)
            off = (ours.double() - wanted).abs()
            assert (off <= 0.5 * unit * 1.001 + 2e-6).all()  # 2e-6: what FP32 sums themselves lose
            x = wanted.half()


def test_gradients_are_half_and_each_is_rounded_once():
    policy = make()
    layer = policy.mlp_extractor.policy_net[2]
    x = th.randn(64, 64).half().requires_grad_()
    signal = th.randn(64, 64).half()
    layer(x).backward(signal)
    for got, wanted in (
        (x.grad, signal.double() @ layer.weight.double()),
        (layer.weight.grad, signal.double().t() @ x.double()),
        (layer.bias.grad, signal.double().sum(0)),
    ):
        assert got.dtype == th.float16
        th.testing.assert_close(got.double(), wanted.detach(), rtol=2.0**-10.9, atol=1e-3)


def test_sampled_actions_are_what_the_rollout_stores():
    actions, values, log_prob = make()(th.randn(1000, 17))
    assert actions.dtype == values.dtype == log_prob.dtype == th.float32
    assert th.equal(actions, actions.half().float())
    (mean, log_std), correction = behaviour_of(log_prob)
    assert correction is None
    assert th.equal(mean, mean.half().float())
    assert th.equal(log_std, log_std.half().float())
    expected = th.distributions.Normal(mean.double(), log_std.double().exp()).log_prob(actions.double()).sum(1)
    th.testing.assert_close(log_prob.double(), expected, rtol=1e-5, atol=1e-5)


def test_paper_executes_the_unrounded_action():
    actions, _, _ = make(precision="paper")(th.randn(1000, 17))
    assert (actions != actions.half().float()).double().mean() > 0.9


def test_sampling_uses_sb3s_random_numbers():
    ours, theirs, obs = make(), make(cls=ActorCriticPolicy), th.randn(50, 17)
    th.manual_seed(3)
    a = ours(obs)[0]
    th.manual_seed(3)
    b = theirs(obs)[0]
    th.testing.assert_close(a, b, rtol=2e-3, atol=1e-2)


def test_discrete_logits_travel_to_the_rollout():
    policy = make(DISCRETE)
    actions, _, log_prob = policy(th.randn(100, 17))
    (logits,), _ = behaviour_of(log_prob)
    assert actions.dtype == th.int64
    th.testing.assert_close(log_prob, logits.log_softmax(1).gather(1, actions[:, None])[:, 0])


def test_many_logits_fall_back_to_the_absolute_log_ratio():
    policy = make(spaces.Discrete(257))
    assert behaviour_of(policy(th.randn(4, 17))[2]) == (None, None)
    assert "257 logits" in policy.absolute_because


@pytest.mark.parametrize("name", ["forward", "evaluate_actions", "_get_action_dist_from_latent"])
def test_an_overridden_method_is_honoured_through_the_absolute_log_ratio(name):
    def same(self, *args, **kwargs):
        return getattr(super(derived, self), name)(*args, **kwargs)

    derived = type("Derived", (ActorCriticPolicyFP16,), {name: same})
    policy = make(cls=derived)
    assert name in policy.absolute_because
    assert behaviour_of(policy(th.randn(4, 17))[2]) == (None, None)
    assert list(policy.networks) == ["shared"]


def test_networks_are_apart_unless_a_layer_serves_both():
    policy = make()
    assert list(policy.networks) == ["policy", "value"]
    names = {id(p): n for n, p in policy.named_parameters()}
    value = {names[id(p)] for p in policy.networks["value"]}
    assert value == {f"mlp_extractor.value_net.{i}.{k}" for i in (0, 2) for k in ("weight", "bias")} | {
        "value_net.weight",
        "value_net.bias",
    }
    assert len(policy.networks["policy"]) + len(value) == len(names)


def test_sharp_is_set_up_as_the_precision_says():
    policy = make(precision="paper")
    optimizer = policy.optimizer
    assert isinstance(optimizer, SHARP)
    (group,) = optimizer.param_groups
    modes = zip(group["sharing"], group["writeback"], strict=True)
    by_name = dict(zip([n for n, _ in policy.named_parameters()], modes, strict=True))
    assert by_name["log_std"] == ("row", "swallowed")
    assert by_name["action_net.weight"][0] == by_name["value_net.weight"][0] == "elementwise"
    assert by_name["mlp_extractor.policy_net.0.weight"] == ("row", "nearest")
    assert group["eps"] == 1e-5
    assert group["root_rounding"] == "nearest"
    optimizer.initialize_state()
    assert optimizer.state[policy.mlp_extractor.value_net[2].weight]["root_second_moment"].shape == (64,)
    assert optimizer.state[policy.log_std]["carry"].dtype == th.float32


def test_input_layers_share_as_asked():
    from sb3_fp16 import Precision

    policy = make(precision=Precision(input_sharing="elementwise", hidden_sharing="row"))
    policy.optimizer.initialize_state()
    state = policy.optimizer.state
    assert state[policy.mlp_extractor.policy_net[0].weight]["root_second_moment"].shape == (64, 17)
    assert state[policy.mlp_extractor.policy_net[2].weight]["root_second_moment"].shape == (64,)


def test_users_optimizer_settings_and_classes_are_kept():
    (group,) = make(optimizer_kwargs={"eps": 1e-4, "betas": (0.8, 0.99)}).optimizer.param_groups
    assert (group["eps"], group["betas"], group["root_rounding"]) == (1e-4, (0.8, 0.99), "dithered")
    settings = {"root_rounding": "fp32", "writeback": "nearest"}
    (group,) = make(optimizer_class=SHARP, optimizer_kwargs=settings).optimizer.param_groups
    assert (group["root_rounding"], group["writeback"]) == ("fp32", "nearest")
    assert type(make(optimizer_class=th.optim.SGD).optimizer) is th.optim.SGD


@pytest.mark.parametrize("action_space", [BOX, DISCRETE])
def test_copies_and_pickles_act_alike(action_space):
    policy, obs = make(action_space), np.random.default_rng(0).normal(size=(20, 17)).astype(np.float32)
    expected, _ = policy.predict(obs, deterministic=True)
    twin = copy.deepcopy(policy)
    np.testing.assert_array_equal(twin.predict(obs, deterministic=True)[0], expected)
    twin.action_net.weight.data.zero_()
    assert policy.action_net.weight.abs().sum() > 0


def test_policy_file_round_trip(tmp_path):
    policy = make(precision="paper", net_arch=[32])
    policy.save(tmp_path / "policy.pt")
    twin = ActorCriticPolicyFP16.load(tmp_path / "policy.pt")
    assert twin.precision == policy.precision
    for p, q in zip(policy.parameters(), twin.parameters(), strict=True):
        assert p.dtype == q.dtype == th.float16
        assert th.equal(p, q)


def test_vector_round_trip_keeps_the_format():
    policy = make()
    vector = policy.parameters_to_vector()
    assert vector.dtype == np.float32
    policy.load_from_vector(vector + 1e-3)
    assert all(p.dtype == th.float16 for p in policy.parameters())
    np.testing.assert_allclose(policy.parameters_to_vector(), vector + 1e-3, atol=1e-3)
    policy.optimizer.initialize_state()
    assert len(policy.optimizer.state) == len(list(policy.parameters()))


def test_bad_observations_name_their_environment():
    policy = make()
    policy.set_training_mode(False)
    obs = th.zeros(4, 17)
    obs[2, 3] = th.nan
    for method in (policy.forward, policy.predict_values, policy.get_distribution):
        with pytest.raises(ValueError, match="observation is nan in environment 2"):
            method(obs)
    with pytest.raises(ValueError, match="environment 2"):
        policy.predict(obs.numpy())


def test_large_observations_saturate_with_one_warning():
    policy = make()
    policy.set_training_mode(False)
    obs = th.full((2, 17), 1e6)
    with pytest.warns(UserWarning, match=r"observation exceeds ±65504 and saturates in fp16"):
        first = policy.predict_values(obs)
    assert th.equal(first, policy.predict_values(th.full((2, 17), 65504.0)))
    assert th.isfinite(policy.predict_values(obs)).all()


def test_values_beyond_fp16_are_bounded_for_bootstrapping():
    policy = make()
    policy.value_net.bias.data.fill_(65_000.0)
    policy.value_net.weight.data.fill_(1000.0)
    assert (policy.predict_values(th.randn(20, 17)).abs() <= 65_504).all()


def test_integer_observations():
    for space in (spaces.Discrete(5), spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(6)):
        policy = make(observation_space=space)
        obs = th.as_tensor(np.array([space.sample() for _ in range(3)]))
        assert th.isfinite(policy(obs)[1]).all()


def test_module_repr_still_reads_linear():
    assert "Linear(in_features=64, out_features=64" in repr(make())
    assert isinstance(make().action_net, nn.Linear)


def test_layers_pickle():
    extractor, x = make().mlp_extractor, th.randn(3, 17).half()
    twin = pickle.loads(pickle.dumps(extractor))
    assert th.equal(twin.policy_net(x), extractor.policy_net(x))


def test_threads_that_predict_leave_the_policy_as_it_is():
    """Layers may not change themselves, even for the length of a call."""
    policy, obs = make(), np.ones((8, 17), dtype=np.float32)
    policy.set_training_mode(False)
    expected = policy.predict_values(th.ones(8, 17))
    stop, failures = threading.Event(), []

    def act():
        while not stop.is_set():
            if not th.equal(policy.predict_values(th.as_tensor(obs)), expected):
                failures.append("another value")

    threads = [threading.Thread(target=act) for _ in range(3)]
    for thread in threads:
        thread.start()
    stop.wait(1.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert {(type(p), p.dtype) for p in policy.parameters()} == {(nn.Parameter, th.float16)}


@pytest.mark.parametrize("action_space", [BOX, DISCRETE])
def test_activations_that_overflow_are_an_error_and_not_a_nan_action(action_space):
    policy = make(action_space, activation_fn=nn.ReLU)
    obs = np.random.default_rng(0).uniform(-6e4, 6e4, (100, 17)).astype(np.float32)
    with th.no_grad():
        for p in policy.parameters():
            p *= 8
    for call in (policy.predict, lambda x: policy(th.as_tensor(x)), lambda x: policy.get_distribution(th.as_tensor(x))):
        policy.set_training_mode(False)
        with pytest.raises(ValueError, match="activations overflow fp16"):
            call(obs)


def test_settings_of_sharp_can_be_given_without_naming_it():
    (group,) = make(optimizer_kwargs={"writeback": "dithered", "weight_decay": 0.1}).optimizer.param_groups
    assert (group["writeback"], group["weight_decay"]) == ("dithered", 0.1)


def test_each_model_warns_of_its_own_large_observations():
    for _ in range(2):
        policy = make()
        policy.set_training_mode(False)
        with pytest.warns(UserWarning, match="saturates"):
            policy.predict_values(th.full((2, 17), 1e6))


def test_float64_observations_beyond_fp32_saturate():
    policy = make()
    policy.set_training_mode(False)
    with pytest.warns(UserWarning, match="saturates"):
        values = policy.predict_values(th.full((2, 17), 1e300, dtype=th.float64))
    assert th.isfinite(values).all()
