import base64
import copy
import io
import json
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import zipfile
from functools import partial

import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from sb3_fp16 import PPOFP16, SHARP, ActorCriticPolicyFP16, Precision, saving
from sb3_fp16.buffers import RolloutBufferFP16
from tests.test_everything_trains import environment

SETTINGS = {"n_steps": 32, "batch_size": 16, "n_epochs": 2, "seed": 0, "device": "cpu"}
PRESETS = ("fp16", "paper", "fp32")
KINDS = {
    "box": ("MlpPolicy", {}, {}),
    "discrete": ("MlpPolicy", {"action": "discrete"}, {}),
    "image": ("CnnPolicy", {"observation": "image"}, {}),
    "dict": ("MultiInputPolicy", {"observation": "dict"}, {}),
    "gsde": ("MlpPolicy", {}, {"use_sde": True, "sde_sample_freq": 8}),
}


def trained(kind="box", precision="fp16", cls=PPOFP16, updates=2, **settings):
    policy, spaces_, more = KINDS[kind]
    settings = {**SETTINGS, **more, **settings}
    if cls is PPOFP16:
        settings["precision"] = precision
    return cls(policy, environment(**spaces_), **settings).learn(updates * settings["n_steps"])


def saved(model, **kwargs):
    file = io.BytesIO()
    model.save(file, **kwargs)
    return file


def through(model, cls, **kwargs):
    return cls.load(saved(model), device="cpu", **kwargs)


def assert_equal(one, other, where=""):
    """Nested containers are equal, tensors bit for bit and in their formats."""
    if isinstance(one, th.Tensor):
        assert one.dtype == other.dtype, where
        assert th.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    else:
        assert one == other, where


def everything(model):
    """All that training goes on from, apart from the rollout."""
    optimizer = model.policy.optimizer
    return copy.deepcopy(
        {
            "weights": dict(model.policy.state_dict()),
            "optimizer": optimizer.state_dict(),
            "engine": model.engine.state_dict(),
            "precision": model.precision_settings,
        }
    )


def train_alike(model, rollout):
    model.rollout_buffer = copy.deepcopy(rollout)
    np.random.seed(7)
    th.manual_seed(7)
    model.train()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", PRESETS)
def test_a_reload_keeps_every_bit_and_so_does_the_next_update(kind, precision):
    model = trained(kind, precision)
    twin = through(model, PPOFP16)
    assert model.policy.optimizer.state_dict()["state"]
    assert_equal(everything(model), everything(twin))
    for m in (model, twin):
        m.set_logger(model.logger)
    before = everything(model)["weights"]
    train_alike(twin, model.rollout_buffer)
    train_alike(model, model.rollout_buffer)
    assert_equal(everything(model), everything(twin))
    assert any(not th.equal(before[name], value) for name, value in model.policy.state_dict().items())


def test_carry_step_seed_and_reduced_gradient_scales_come_back():
    model = trained(seed=5)
    model.engine.load_state_dict({**model.engine.state_dict(), "scales": th.tensor([32.0, 0.5])})
    twin = through(model, PPOFP16, seed=6)
    state = twin.policy.optimizer.state[twin.policy.log_std]
    assert state["carry"].abs().max() > 0
    assert state["step"].dtype == th.int64
    assert state["step"] == 8
    assert twin.policy.optimizer.param_groups[0]["seed"] == 5
    assert twin.engine.state_dict()["scales"].tolist() == [32.0, 0.5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", PRESETS)
def test_sb3_reads_the_file_and_gives_back_weights_and_moments(kind, precision):
    model = trained(kind, precision)
    stock = through(model, PPO)
    assert type(stock.policy.optimizer) is th.optim.Adam
    for (name, p), q in zip(model.policy.state_dict().items(), stock.policy.state_dict().values(), strict=True):
        assert q.dtype == (p.dtype if name.endswith("num_batches_tracked") else th.float32)
        assert th.equal(p.float(), q.float()), name
    twin = through(stock, PPOFP16)
    assert twin.precision == model.precision
    assert_equal(everything(model)["weights"], everything(twin)["weights"])
    ours, theirs = (m.policy.optimizer.state_dict()["state"] for m in (model, twin))
    for key, state in ours.items():
        if precision == "fp32":
            assert_equal(state, theirs[key])
            continue
        m, w = state["first_moment"], state["root_second_moment"]
        assert_equal(m, theirs[key]["first_moment"])
        assert_equal(state["step"], theirs[key]["step"])
        if len(w) == len(m):  # not rank 1
            assert_equal(w, theirs[key]["root_second_moment"])
        assert ("carry" in state) == ("carry" in theirs[key])


def test_sb3s_optimizer_gets_adams_state_in_true_units():
    model = trained(precision="paper", learning_rate=1e-3, policy_kwargs={"optimizer_kwargs": {"weight_decay": 1e-4}})
    adam = through(model, PPO).policy.optimizer
    (group,) = adam.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-5, 1e-4)
    assert group.keys() == th.optim.Adam([th.zeros(1)]).param_groups[0].keys()
    shared = 0
    for p, q in zip(model.policy.parameters(), group["params"], strict=True):
        ours, theirs = model.policy.optimizer.state[p], adam.state[q]
        m, w = (ours[name].double() / 2.0**16 for name in ("first_moment", "root_second_moment"))
        assert theirs["step"].dtype == theirs["exp_avg"].dtype == theirs["exp_avg_sq"].dtype == th.float32
        assert th.equal(theirs["exp_avg"].double(), m)
        if w.shape != m.shape:
            shared += 1
            w = w[:, None].expand_as(m)
        assert th.equal(theirs["exp_avg_sq"].double(), w**2)
    assert shared == 2, "hidden layers of actor and critic"


def test_rank_one_moments_reach_adam_as_their_outer_product():
    model = trained()
    weight = model.policy.mlp_extractor.policy_net[2].weight
    own = model.policy.optimizer.state[weight]["root_second_moment"].double().numpy() / 2.0**16
    rows, columns = own[:64], own[64:]
    (key,) = (i for i, p in enumerate(model.policy.parameters()) if p is weight)
    entry = model.get_parameters()["policy.optimizer"]["state"][key]["exp_avg_sq"].numpy()
    np.testing.assert_allclose(entry, np.outer(rows, columns) ** 2 / (rows**2).mean(), rtol=1e-6)


@pytest.mark.parametrize("sharing", ["elementwise", "row", "rank1"])
def test_adam_becomes_sharp_as_float64_would_have_it(sharing):
    g = th.Generator().manual_seed(0)
    wide, bias, unused = (nn.Parameter(th.randn(s, generator=g).half()) for s in ((20, 33), (20,), (3, 40)))
    state = {
        i: {
            "step": th.tensor(7.0),
            "exp_avg": 1e-3 * th.randn(p.shape, generator=g),
            "exp_avg_sq": 1e-6 * th.rand(p.shape, generator=g) ** 4,
        }
        for i, p in enumerate((wide, bias))
    }
    group = {"lr": 0.5, "betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": 0.25, "amsgrad": False, "params": [0, 1, 2]}
    sharp = SHARP([wide, bias, unused], sharing=sharing, writeback="residual", seed=3, state_scale=2.0**14)
    sharp.load_state_dict(saving.from_adam({"state": state, "param_groups": [group]}, sharp))
    ours = sharp.param_groups[0]
    assert (ours["lr"], ours["betas"], ours["eps"], ours["weight_decay"], ours["seed"]) == (
        0.5,
        (0.8, 0.99),
        1e-4,
        0.25,
        3,
    )
    for i, p in enumerate((wide, bias)):
        v = state[i]["exp_avg_sq"].double().numpy()
        parts = {"elementwise": [v.ravel()], "row": [v.mean(-1)], "rank1": [v.mean(-1), v.mean(0)]}
        root = np.sqrt(np.concatenate(parts[sharing if v.ndim == 2 else "elementwise"])) * 2.0**14
        own = sharp.state[p]
        np.testing.assert_array_equal(own["root_second_moment"].numpy().ravel(), root.astype(np.float16))
        np.testing.assert_array_equal(own["first_moment"], (state[i]["exp_avg"].numpy() * 2.0**14).astype(np.float16))
        assert own["step"] == 7
        assert own["step"].dtype == th.int64
        assert th.equal(own["carry"], th.zeros(p.shape))
    assert not sharp.state[unused]


def test_moments_beyond_the_state_saturate():
    p = nn.Parameter(th.zeros(2).half())
    adam = th.optim.Adam([p.detach().float().requires_grad_()]).state_dict()
    adam["state"] = {0: {"step": th.tensor(1.0), "exp_avg": th.tensor([-99.0, 1]), "exp_avg_sq": th.tensor([1e6, 1])}}
    sharp = SHARP([p])
    sharp.load_state_dict(saving.from_adam(adam, sharp))
    assert sharp.state[p]["first_moment"].tolist() == [-65504, 4096]
    assert sharp.state[p]["root_second_moment"].tolist() == [65504, 4096]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_sb3_goes_on(kind):
    stock = trained(kind, cls=PPO)
    model = through(stock, PPOFP16, env=environment(**KINDS[kind][1]))
    assert model.precision.name == "fp16"
    assert isinstance(model.policy.optimizer, SHARP)
    for p, q in zip(stock.policy.parameters(), model.policy.parameters(), strict=True):
        assert th.equal(p.half(), q)
        assert model.policy.optimizer.state[q]["step"] == 8
    before = model.policy.parameters_to_vector()
    model.learn(64, reset_num_timesteps=False)
    assert model.num_timesteps == 128
    assert isinstance(model.rollout_buffer, RolloutBufferFP16)
    moved = np.abs(model.policy.parameters_to_vector() - before)
    assert np.isfinite(moved).all()
    assert 0 < moved.max() < 0.05, "8 steps of 3e-4, not the jumps of an empty second moment"


WITHOUT_SB3_FP16 = """
import pickle, sys, warnings
import gymnasium as gym
sys.modules["sb3_fp16"] = None  # importing it raises ModuleNotFoundError
warnings.simplefilter("error")
from stable_baselines3 import PPO

class Env(gym.Env):
    def __init__(self, model):
        self.observation_space, self.action_space = model.observation_space, model.action_space
    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 1.0, self.np_random.random() < 0.1, False, {}

for folder in sys.argv[1:]:
    model = PPO.load(f"{folder}/ours", device="cpu")
    with open(f"{folder}/observations", "rb") as file:
        actions = [model.predict(o, deterministic=True)[0] for o in pickle.load(file)]
    model = PPO.load(f"{folder}/ours", env=Env(model), device="cpu")
    steps = {int(s["step"]) for s in model.policy.optimizer.state.values()}
    model.learn(64, reset_num_timesteps=False)
    model.save(f"{folder}/theirs")
    with open(f"{folder}/actions", "wb") as file:
        pickle.dump((actions, steps), file)
"""


def test_sb3_loads_predicts_trains_and_saves_where_sb3_fp16_is_not_installed(tmp_path):
    models = {kind: trained(kind) for kind in KINDS}
    models["paper"] = trained(precision="paper")
    observations = {}
    for kind, model in models.items():
        (tmp_path / kind).mkdir()
        model.save(tmp_path / kind / "ours")
        observations[kind] = [model.observation_space.sample() for _ in range(5)]
        (tmp_path / kind / "observations").write_bytes(pickle.dumps(observations[kind]))
    folders = [str(tmp_path / kind) for kind in models]
    subprocess.run([sys.executable, "-c", WITHOUT_SB3_FP16, *folders], check=True, cwd=tmp_path)
    for kind, model in models.items():
        actions, steps = pickle.loads((tmp_path / kind / "actions").read_bytes())
        policy, spaces_, more = KINDS.get(kind, KINDS["box"])
        upcast = PPO(policy, environment(**spaces_), **SETTINGS, **more)
        upcast.policy.load_state_dict({name: value.float() for name, value in model.policy.state_dict().items()})
        wanted = [upcast.predict(o, deterministic=True)[0] for o in observations[kind]]
        np.testing.assert_array_equal(np.array(actions), np.array(wanted))
        assert steps == {8}
        back = PPOFP16.load(tmp_path / kind / "theirs", env=environment(**spaces_), device="cpu")
        assert back.precision == model.precision
        assert {int(s["step"]) for s in back.policy.optimizer.state.values()} == {16}
        assert back.num_timesteps == 128
        back.learn(32, reset_num_timesteps=False)
        assert np.isfinite(back.policy.parameters_to_vector()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_refers_to_nothing_of_ours(kind):
    with zipfile.ZipFile(saved(trained(kind, updates=1))) as archive:
        data = json.loads(archive.read("data"))
        assert data["sb3_fp16_format"] == saving.FORMAT == 1
        assert data["precision_settings"] == Precision().to_dict()
        for name, value in data.items():
            if isinstance(value, dict) and ":serialized:" in value:
                assert b"sb3_fp16" not in base64.b64decode(value[":serialized:"]), name
        entry = th.load(archive.open("policy.optimizer.pth"), weights_only=True)
    assert set(entry) == {"state", "param_groups", "sb3_fp16"}


def differences(one, other):
    """Largest differences of weights, exp_avg and sqrt(exp_avg_sq), relative to the largest magnitude of each."""
    one, other = one.get_parameters(), other.get_parameters()
    states = [[p["policy.optimizer"]["state"][i] for i in p["policy.optimizer"]["state"]] for p in (one, other)]
    pairs = {
        "weights": [(a, other["policy"][name]) for name, a in one["policy"].items()],
        "exp_avg": [(a["exp_avg"], b["exp_avg"]) for a, b in zip(*states, strict=True)],
        "root": [(a["exp_avg_sq"].sqrt(), b["exp_avg_sq"].sqrt()) for a, b in zip(*states, strict=True)],
    }
    return {
        name: float(max((a - b).abs().max() for a, b in each) / max(a.abs().max() for a, _ in each))
        for name, each in pairs.items()
    }


def round_trips(precision):
    """Rows of a table: the way taken and its largest relative differences."""
    ours, theirs = trained(precision=precision), trained(cls=PPO)
    ends = {
        "PPOFP16 → PPOFP16": (ours, through(ours, PPOFP16)),
        "PPOFP16 → PPO → PPOFP16": (ours, through(through(ours, PPO), PPOFP16)),
        "PPO → PPOFP16": (theirs, through(theirs, PPOFP16, precision=precision)),
        "PPO → PPOFP16 → PPO → PPOFP16": (
            through(theirs, PPOFP16, precision=precision),
            through(through(through(theirs, PPOFP16, precision=precision), PPO), PPOFP16),
        ),
    }
    return {way: differences(*pair) for way, pair in ends.items()}


@pytest.mark.parametrize("precision", PRESETS)
def test_round_trip_table(precision):
    """
    Largest differences relative to the largest magnitude, one run (``-s`` prints this run's):

    | way | preset | weights | exp_avg | sqrt(exp_avg_sq) |
    |---|---|---|---|---|
    | PPOFP16 → PPOFP16 | all | 0 | 0 | 0 |
    | PPOFP16 → PPO → PPOFP16 | all | 0 | 0 | 0 (``fp16``: rank-1 ones up to a unit in the last place) |
    | PPO → PPOFP16 | ``fp16`` | 3.6e-4 | 1.7e-4 | 5e-3, what sharing averages |
    | | ``paper`` | 3.6e-4 | 2.0e-4 | 2e-2 |
    | | ``fp32`` | 0 | 0 | 0 |
    | PPO → PPOFP16 → PPO → PPOFP16 | all | 0 | 0 | 0 |
    """
    table = round_trips(precision)
    print(f"\n{precision:<32}{'weights':>10}{'exp_avg':>10}{'root':>10}")
    for way, row in table.items():
        print(f"{way:<32}" + "".join(f"{value:>10.1e}" for value in row.values()))
    assert set(table["PPOFP16 → PPOFP16"].values()) == {0.0}
    for way in ("PPOFP16 → PPO → PPOFP16", "PPO → PPOFP16 → PPO → PPOFP16"):
        assert table[way]["weights"] == table[way]["exp_avg"] == 0
        assert table[way]["root"] <= (2**-10 if precision == "fp16" else 0)
    half, converted = precision != "fp32", table["PPO → PPOFP16"]
    assert (0 < converted["weights"] < 2**-11) if half else converted["weights"] == 0
    assert (0 < converted["exp_avg"] < 2**-11) if half else converted["exp_avg"] == 0
    assert (converted["root"] > 0) == half  # rows share one


def test_another_precision_converts_through_adams_form():
    model = trained()
    paper, single = (through(model, PPOFP16, precision=name) for name in ("paper", Precision.of("fp32")))
    assert (paper.precision.name, single.precision.name) == ("paper", "fp32")
    assert type(single.policy.optimizer) is th.optim.Adam
    reference = model.get_parameters()["policy.optimizer"]["state"]
    for i, (p, q, r) in enumerate(
        zip(model.policy.parameters(), paper.policy.parameters(), single.policy.parameters(), strict=True)
    ):
        assert th.equal(p, q)
        assert th.equal(p.float(), r)
        state = paper.policy.optimizer.state[q]
        assert th.equal(state["first_moment"], model.policy.optimizer.state[p]["first_moment"])
        assert state["step"] == 8
        assert_equal(reference[i], single.policy.optimizer.state[r])
        if p.ndim == 2 and p.shape == (64, 64):
            rows = reference[i]["exp_avg_sq"].double().mean(1).sqrt() * 2.0**16
            assert th.equal(state["root_second_moment"], rows.half())
    scales = paper.engine.state_dict()
    assert scales["good_steps"] == 0, "another precision starts with gradient scales of its own"
    back = through(single, PPOFP16, precision="fp16")
    assert_equal(everything(back)["weights"], everything(model)["weights"])
    assert isinstance(back.policy.optimizer, SHARP)


def test_another_max_grad_norm_rescales_the_state():
    model = trained()
    twin = through(model, PPOFP16, max_grad_norm=2.0)
    assert twin.policy.optimizer.param_groups[0]["state_scale"] == 2.0**14
    for p, q in zip(model.policy.parameters(), twin.policy.parameters(), strict=True):
        ours, theirs = (m.policy.optimizer.state[x]["first_moment"] for m, x in ((model, p), (twin, q)))
        th.testing.assert_close(theirs * 4, ours, rtol=2**-10, atol=4 * 2**-24)


def test_parameters_pass_between_living_models_and_are_copies():
    first, second, stock = trained(), trained(seed=1), trained(cls=PPO, seed=2)
    snapshot, before = first.get_parameters(), everything(first)
    kept = copy.deepcopy(snapshot)
    second.set_parameters(snapshot)
    stock.set_parameters(copy.deepcopy(snapshot))  # as Adam goes on in the tensors it is given
    assert_equal(before, everything(second))
    for model in (first, second, stock):
        model.learn(32, reset_num_timesteps=False)
    assert_equal(dict(kept["policy"]), dict(snapshot["policy"]))
    assert_equal(kept["policy.optimizer"]["sb3_fp16"], snapshot["policy.optimizer"]["sb3_fp16"])
    first.set_parameters(snapshot)
    assert_equal(before, everything(first))
    first.set_parameters(stock.get_parameters())
    for p, q in zip(stock.policy.parameters(), first.policy.parameters(), strict=True):
        assert th.equal(p.half(), q)


@pytest.mark.parametrize(("cls", "precision"), [(PPOFP16, "fp16"), (PPOFP16, "fp32"), (PPO, "fp16"), (PPO, "fp32")])
def test_two_models_never_share_state(cls, precision):
    first, second = trained(precision=precision, cls=cls), trained(precision=precision, seed=1)
    second.set_parameters(first.get_parameters())
    before = everything(second)
    first.learn(32, reset_num_timesteps=False)
    assert_equal(before, everything(second))


def test_partial_parameters_as_sb3_takes_them():
    first, second = trained(), trained(seed=1)
    before = everything(second)
    with pytest.raises(ValueError, match="Names of parameters do not match"):
        copy.deepcopy(second).set_parameters({"policy": first.policy.state_dict()})
    with pytest.raises(RuntimeError, match="Missing key"):
        copy.deepcopy(second).set_parameters({**first.get_parameters(), "policy": {}})
    with pytest.raises(ValueError, match="invalid object name"):
        second.set_parameters({"critic": {}}, exact_match=False)
    bias = {"value_net.bias": th.tensor([0.1])}
    second.set_parameters({"policy": bias}, exact_match=False)
    assert second.policy.value_net.bias.item() == th.tensor(0.1).half().item()
    after = everything(second)
    assert_equal(before["optimizer"], after["optimizer"])
    second.set_parameters({"policy.optimizer": first.get_parameters()["policy.optimizer"]}, exact_match=False)
    assert_equal(everything(second)["optimizer"], everything(first)["optimizer"])
    assert_equal(everything(second)["weights"], after["weights"])


def test_a_saved_model_gives_its_parameters_to_a_living_one(tmp_path):
    first, second = trained(), trained(seed=1)
    first.save(tmp_path / "model")
    second.set_parameters(str(tmp_path / "model"))
    assert_equal(everything(first), everything(second))


def test_adams_state_wins_where_someone_changed_it():
    model = trained()
    ours = model.get_parameters()["policy.optimizer"]
    for change in (
        lambda entry: entry["state"][0]["exp_avg"].mul_(2),
        lambda entry: entry["state"][0].update(step=th.tensor(9.0)),
        lambda entry: entry["param_groups"][0].update(lr=0.5),
        lambda entry: entry["state"].pop(0),
    ):
        changed = copy.deepcopy(ours)
        change(changed)
        twin = copy.deepcopy(model)
        twin.set_parameters({"policy.optimizer": changed}, exact_match=False)
        result = twin.get_parameters()["policy.optimizer"]
        assert result["param_groups"] == changed["param_groups"]
        assert result["state"].keys() == changed["state"].keys()
        if 0 in changed["state"]:
            assert_equal(result["state"][0]["exp_avg"], changed["state"][0]["exp_avg"])
            assert_equal(result["state"][0]["step"], changed["state"][0]["step"])


def test_state_that_fits_no_adam_is_refused_and_changes_nothing():
    model = trained(updates=1)
    before, good = everything(model), model.get_parameters()
    del good["policy.optimizer"]["sb3_fp16"]
    rmsprop = trained(cls=PPO, updates=1, policy_kwargs={"optimizer_class": th.optim.RMSprop}).get_parameters()
    infinite, shorter = copy.deepcopy(good), copy.deepcopy(good)
    infinite["policy.optimizer"]["state"][1]["exp_avg"][0, 0] = np.inf
    shorter["policy.optimizer"]["param_groups"][0]["params"].pop()
    for parameters, message in (
        (rmsprop, "not Adam's"), (infinite, "parameter 1 is not finite"), (shorter, "other parameters"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            model.set_parameters(parameters)
        assert_equal(before, everything(model))


@pytest.mark.parametrize(("optimizer", "kwargs"), [(th.optim.SGD, {"momentum": 0.9}), (th.optim.AdamW, {"eps": 1e-3})])
def test_users_optimizers_keep_their_own_state(optimizer, kwargs):
    settings = {"policy_kwargs": {"optimizer_class": optimizer, "optimizer_kwargs": kwargs}}
    model = trained(**settings)
    assert type(model.policy.optimizer) is optimizer
    twin = through(model, PPOFP16)
    assert_equal(everything(model), everything(twin))
    assert type(through(model, PPO).policy.optimizer) is optimizer
    other = trained(seed=1, **settings)
    other.set_parameters(model.get_parameters())
    before = everything(other)
    assert_equal(before, everything(model))
    model.learn(32, reset_num_timesteps=False)
    assert_equal(before, everything(other))


class Strict(th.optim.SGD):
    """Refuses what it did not write."""

    def load_state_dict(self, state_dict):
        assert state_dict.keys() == {"state", "param_groups"}
        super().load_state_dict(state_dict)


def test_an_optimizer_that_refuses_unknown_keys_gets_none():
    model = trained(policy_kwargs={"optimizer_class": Strict})
    for cls in (PPO, PPOFP16):
        assert type(through(model, cls).policy.optimizer) is Strict


def test_sharp_chosen_by_the_user_stays_sharp_everywhere():
    """With SHARP as SB3's optimizer_class, SB3's PPO builds it too and needs its own form."""
    settings = {"policy_kwargs": {"optimizer_class": SHARP, "optimizer_kwargs": {"writeback": "residual"}}}
    model, stock = trained(**settings), trained(cls=PPO, **settings)
    with pytest.warns(UserWarning, match="policy_kwargs refers to SHARP"):
        file = saved(model)
    assert_equal(everything(PPOFP16.load(file, device="cpu")), everything(model))
    theirs = PPO.load(file, device="cpu").policy.optimizer
    assert_equal(theirs.state_dict(), model.policy.optimizer.state_dict())
    back = through(stock, PPOFP16, env=environment())
    for p, q in zip(stock.policy.parameters(), back.policy.parameters(), strict=True):
        ours, theirs = back.policy.optimizer.state[q], stock.policy.optimizer.state[p]
        th.testing.assert_close(ours["first_moment"] / 2.0**4, theirs["first_moment"], rtol=2**-10, atol=2**-20)
        assert ours["step"] == theirs["step"]
        assert th.equal(ours["carry"], th.zeros_like(ours["carry"]))
    back.learn(32)
    with pytest.warns(UserWarning, match="SHARP"):
        single = through(model, PPOFP16, precision="fp32")
    assert single.policy.optimizer.state_dict()["state"].keys() == model.policy.optimizer.state_dict()["state"].keys()


class Shifted(ActorCriticPolicyFP16):
    """A user's policy that derives from ours."""


class ShiftedStock(ActorCriticPolicy):
    """A user's policy that derives from SB3's."""


class Extractor(BaseFeaturesExtractor):
    """A user's extractor with a BatchNorm, whose statistics are FP32 buffers."""

    def __init__(self, observation_space):
        super().__init__(observation_space, 20)
        self.net = nn.Sequential(nn.Linear(5, 20), nn.BatchNorm1d(20))

    def forward(self, observations):
        return self.net(observations)


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (Shifted, {}, "policy_class refers to Shifted"),
        (ActorCriticPolicyFP16, {}, "policy_class refers to ActorCriticPolicyFP16"),
        ("MlpPolicy", {"rollout_buffer_class": RolloutBufferFP16}, "rollout_buffer_class refers to RolloutBufferFP16"),
        (
            "MlpPolicy",
            {"policy_kwargs": {"optimizer_class": partial(SHARP, eps=1e-4)}},
            "policy_kwargs refers to SHARP",
        ),
        (ShiftedStock, {}, None),
        ("MlpPolicy", {"policy_kwargs": {"features_extractor_class": Extractor}}, None),
    ],
)
def test_save_says_when_the_file_will_need_sb3_fp16(policy, settings, message):
    model = PPOFP16(policy, environment(), **SETTINGS, **settings).learn(32)
    if message is None:
        file = saved(model)
        assert type(PPO.load(file, device="cpu").policy) is model.policy_class
    else:
        with pytest.warns(UserWarning, match=message):
            file = saved(model)
    twin = PPOFP16.load(file, device="cpu")
    assert_equal(everything(model), everything(twin))
    assert type(twin.policy) is type(model.policy)


def test_settings_given_again_or_anew():
    kwargs = {"net_arch": [8], "activation_fn": nn.ReLU}
    model = trained(policy_kwargs=kwargs)
    twin = through(model, PPOFP16, policy_kwargs=kwargs, learning_rate=1e-5, n_steps=64, env=environment())
    twin.learn(64)
    assert twin.policy.optimizer.param_groups[0]["lr"] == 1e-5
    assert twin.rollout_buffer.buffer_size == 64
    with pytest.raises(ValueError, match="policy kwargs do not equal"):
        through(model, PPOFP16, policy_kwargs={"net_arch": [9]})
    schedules = {"lr_schedule": lambda _: 0.0, "learning_rate": lambda _: 1e-6, "clip_range": lambda _: 0.05}
    twin = through(model, PPOFP16, custom_objects=schedules, env=environment())
    twin.learn(32)
    assert twin.policy.optimizer.param_groups[0]["lr"] == 1e-6
    assert twin.clip_range(1.0) == 0.05
    with pytest.raises(ValueError, match="Unknown precision 'fp61'"):
        through(model, PPOFP16, precision="fp61")


def test_copies_save_and_load():
    model = trained()
    twin = copy.deepcopy(model)
    model.learn(32, reset_num_timesteps=False)
    assert_equal(everything(through(twin, PPOFP16)), everything(twin))
    assert everything(twin)["optimizer"]["state"][0]["step"] == 8
    assert twin.engine.policy is twin.policy


def test_exclude_and_include(tmp_path):
    model = trained(updates=1)
    model.save(tmp_path / "model", exclude=["ep_info_buffer", "n_epochs"])
    twin = PPOFP16.load(tmp_path / "model", device="cpu")
    assert twin.n_epochs == 10
    assert twin.ep_info_buffer is None
    with pytest.warns(UserWarning, match="rollout_buffer refers to RolloutBufferFP16"):
        model.save(tmp_path / "model", include=["rollout_buffer"])
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        assert "rollout_buffer" in json.loads(archive.read("data"))


def test_compiled_policies_save_and_load():
    """SB3 issue 2137: a compiled policy is saved under the names of the original one, and takes them back."""
    model, other = trained(), trained(seed=1)
    before = everything(model)
    model.policy = th.compile(model.policy, backend="eager")
    assert_equal(everything(through(model, PPOFP16)), before)
    through(model, PPO)
    model.set_parameters(other.get_parameters())
    assert hasattr(model.policy, "_orig_mod")
    assert_equal(everything(through(model, PPOFP16)), everything(other))


def test_file_objects_are_written_and_read_where_they_are(tmp_path):
    model = trained(updates=1)
    with open(tmp_path / "any.name", "w+b") as file:
        model.save(file)
        file.seek(11)
        saving.check_file(file)
        assert file.tell() == 11
        assert_equal(everything(PPOFP16.load(file, device="cpu")), everything(model))
    assert [path.name for path in tmp_path.iterdir()] == ["any.name"]


def test_paths_are_sb3s(tmp_path, monkeypatch):
    model = trained(updates=1)
    monkeypatch.chdir(tmp_path)
    model.save("plain")
    model.save("v1.5")
    with pytest.warns(UserWarning, match="does not exist. Will create it"):
        model.save(tmp_path / "new" / "folder" / "model.zip")
    (tmp_path / "taken.zip").mkdir()
    with pytest.warns(UserWarning, match="is a folder. Will save instead to"):
        model.save("taken")
    (tmp_path / "link.zip").symlink_to("plain.zip")
    (tmp_path / "plain.zip").chmod(0o640)
    model.save("link")
    assert (tmp_path / "link.zip").is_symlink()
    assert (tmp_path / "plain.zip").stat().st_mode & 0o777 == 0o640
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"plain.zip", "link.zip", "v1.5", "new/folder/model.zip", "taken.zip_2"}
    for path in files:
        PPOFP16.load(path, device="cpu")
    PPOFP16.load("plain", device="cpu")
    with pytest.raises(FileNotFoundError):
        PPOFP16.load("absent")


def test_write_protected_files_are_not_replaced(tmp_path, monkeypatch):
    """Root may write everywhere, so the refusal is made here."""
    path = tmp_path / "model.zip"
    path.write_bytes(b"precious")
    open_ = pathlib.Path.open

    def refuse(self, mode="r", *args, **kwargs):
        if self.name == path.name and "+" in mode:
            raise PermissionError(f"{self} is write-protected")
        return open_(self, mode, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with pytest.raises(PermissionError):
        trained(updates=1).save(path)
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]


def test_a_save_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    model = trained(updates=1)
    model.save(tmp_path / "model")
    before = (tmp_path / "model.zip").read_bytes()

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(th, "save", full)
    with pytest.raises(OSError, match="disk full"):
        model.save(tmp_path / "model")
    assert (tmp_path / "model.zip").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.zip"]


def test_kill_9_in_mid_save_keeps_the_old_file(tmp_path):
    model = trained(updates=1)
    model.save(tmp_path / "model")
    before = (tmp_path / "model.zip").read_bytes()
    code = f"""
import time, torch
from sb3_fp16 import PPOFP16
model = PPOFP16.load({str(tmp_path / "model")!r}, device="cpu")
def hang(*args):
    print("half written", flush=True)
    time.sleep(600)
torch.save = hang
model.save({str(tmp_path / "model")!r})
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "half written\n"
        finally:
            process.send_signal(signal.SIGKILL)
    assert (tmp_path / "model.zip").read_bytes() == before
    assert_equal(everything(PPOFP16.load(tmp_path / "model", device="cpu")), everything(model))


def rewritten(file, **changes):
    """The same zip with entries changed, or left out where None."""
    result = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(result, "w") as new:
        for name in old.namelist():
            content = changes.get(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return result


def test_damaged_and_foreign_files_are_refused_by_name(tmp_path):
    model = trained(updates=1)
    file = saved(model)
    content = file.getvalue()
    for size in (0, 100, len(content) // 2, len(content) - 30):
        (tmp_path / "cut.zip").write_bytes(content[:size])
        with pytest.raises(ValueError, match="cut is truncated"):
            PPOFP16.load(tmp_path / "cut")
    flipped = bytearray(content)
    flipped[content.index(b"policy.pth") + 3000] ^= 1
    cases = {
        "policy.pth in it does not match its checksum": io.BytesIO(flipped),
        "holds no data": rewritten(file, data=None),
        "holds no policy.pth": rewritten(file, **{"policy.pth": None}),
        "holds no policy.optimizer.pth": saved(SAC("MlpPolicy", environment(), buffer_size=10, device="cpu")),
        "data is not JSON": rewritten(file, data=b"\xff"),
    }
    for message, broken in cases.items():
        with pytest.raises(ValueError, match=message):
            PPOFP16.load(broken)
        before = everything(model)
        with pytest.raises(ValueError, match=message):
            model.set_parameters(broken)
        assert_equal(before, everything(model))


def test_a_newer_format_asks_for_an_upgrade_and_save_writes_the_current_one():
    model = trained(updates=1)
    file = saved(model)
    with zipfile.ZipFile(file) as archive:
        data = json.loads(archive.read("data"))
    newer = rewritten(file, data=json.dumps({**data, "sb3_fp16_format": 2, "precision_settings": {"unknown": 1}}))
    with pytest.raises(ValueError, match=r"saved by a newer sb3_fp16 .*upgrade"):
        PPOFP16.load(newer)
    older = PPOFP16.load(rewritten(file, data=json.dumps({**data, "sb3_fp16_format": 0})), device="cpu")
    assert older.sb3_fp16_format == 1


@pytest.mark.parametrize("value", [65505.0, -1e30, np.inf, np.nan])
def test_weights_that_fp16_cannot_hold_are_named(value):
    stock = trained(cls=PPO, updates=1)
    with th.no_grad():
        stock.policy.action_net.weight[1, 3] = value
        stock.policy.value_net.bias[0] = value
    file = saved(stock)
    with pytest.raises(ValueError, match=r"action_net.weight holds .*beyond the ±65504 of fp16; load"):
        PPOFP16.load(file, device="cpu")
    model = trained(updates=1)
    before = everything(model)
    for load in (model.set_parameters, lambda p: model.policy.load_state_dict(p["policy"])):
        with pytest.raises(ValueError, match=re.escape(f"action_net.weight holds {value:g}, ")):
            load(stock.get_parameters())
        assert_equal(before, everything(model))
    if np.isfinite(value):
        single = PPOFP16.load(file, device="cpu", precision="fp32")
        assert single.policy.action_net.weight[1, 3] == th.tensor(value)


def test_the_largest_weights_and_fp16_ones_load():
    model = trained(updates=1, precision="fp32")
    weights = {name: th.full_like(value, 65504.0).half() for name, value in model.policy.state_dict().items()}
    for policy in (model.policy, trained(updates=1).policy):
        policy.load_state_dict(weights)
        assert all((p == 65504).all() for p in policy.parameters())
    weights["log_std"][0] = np.inf
    with pytest.raises(ValueError, match="log_std holds inf"):
        model.policy.load_state_dict(weights)
