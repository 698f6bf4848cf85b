"""Exported policies act as ``predict`` does."""

import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_fp16 import PPOFP16
from sb3_fp16.export import DeployedPolicy, main, to_onnx, to_torchscript

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
SMALL = {"n_steps": 64, "batch_size": 32, "n_epochs": 1}
ACTIONS = {
    "box": spaces.Box(-0.5, 2.0, (3,)),
    "discrete": spaces.Discrete(4),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary(3),
}


def run_onnx(path, inputs):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path))
    return session.run(None, {name: np.asarray(value) for name, value in inputs.items()})[0]


def run_torchscript(path, inputs):
    return th.jit.load(str(path))(*(th.as_tensor(value) for value in inputs.values())).numpy()


def check(model, tmp_path, observations, vec_normalize=None, given=None):
    """Both files, on batches of 1 and 7, against ``predict``."""
    files = {run_onnx: tmp_path / "policy.onnx", run_torchscript: tmp_path / "policy.pt"}
    to_onnx(model, files[run_onnx], vec_normalize)
    to_torchscript(model, files[run_torchscript], vec_normalize)
    for size in (1, 7):

        def cut(x, size=size):
            return {k: v[:size] for k, v in x.items()} if isinstance(x, dict) else x[:size]

        expected, _ = model.predict(cut(observations if given is None else given), deterministic=True)
        inputs = cut(observations)
        inputs = inputs if isinstance(inputs, dict) else {"observation": inputs}
        for run, file in files.items():
            actions = run(file, inputs)
            assert actions.shape == expected.shape, run
            np.testing.assert_allclose(actions, expected, atol=1e-3, rtol=0, err_msg=run.__name__)
            assert actions.dtype == (np.float32 if isinstance(model.action_space, spaces.Box) else np.int64)


@pytest.mark.parametrize("precision", ["fp16", "paper", "bf16-sr", "fp32", "amp-fp16", "amp-bf16"])
def test_every_precision(precision, toy, tmp_path):
    model = PPOFP16("MlpPolicy", toy(ACTIONS["box"]), precision=precision, **SMALL).learn(64)
    check(model, tmp_path, 2 * np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32))


@pytest.mark.parametrize("actions", ACTIONS)
def test_every_action_space(actions, toy, tmp_path):
    model = PPOFP16("MlpPolicy", toy(ACTIONS[actions]), **SMALL).learn(64)
    if actions == "box":  # means on both sides of the bounds and between them
        with th.no_grad():
            model.policy.action_net.bias.copy_(th.tensor([-3.0, 0.5, 3.0]))
    check(model, tmp_path, 2 * np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32))


def test_a_model_of_sb3(toy, tmp_path):
    model = PPO("MlpPolicy", toy(ACTIONS["box"]), **SMALL).learn(64)
    check(model, tmp_path, np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32))


def test_squashed_gsde(toy, tmp_path):
    settings = {"use_sde": True, "policy_kwargs": {"squash_output": True}}
    model = PPOFP16("MlpPolicy", toy(ACTIONS["box"]), **settings, **SMALL).learn(64)
    check(model, tmp_path, np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32))


class Both(gym.Env):
    """An image and a vector."""

    observation_space = spaces.Dict(
        {"image": spaces.Box(0, 255, (3, 36, 36), np.uint8), "vector": spaces.Box(-np.inf, np.inf, (2,))}
    )
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        return self.observation_space.sample(), 1.0, False, self.steps > 10, {}


def test_images_and_dictionaries_with_statistics(tmp_path):
    env = VecNormalize(make_vec_env(Both, 1), norm_obs_keys=["vector"])
    model = PPOFP16("MultiInputPolicy", env, **SMALL).learn(64)
    raw = {key: np.stack([space.sample() for _ in range(7)]) for key, space in Both.observation_space.spaces.items()}
    check(model, tmp_path, raw, env, env.normalize_obs(raw))


@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.MultiDiscrete([3, 4])])
def test_observations_that_are_numbers_of_classes(space, toy, tmp_path):
    class Numbers(toy):
        def __init__(self):
            super().__init__(ACTIONS["discrete"])
            self.observation_space = space

        def reset(self, **settings):
            super().reset(**settings)
            return space.sample(), {}

        def step(self, action):
            _, reward, *ends = super().step(0)
            return space.sample(), reward, *ends

        def _observe(self):
            self.obs = np.zeros(1)

    model = PPOFP16("MlpPolicy", Numbers(), **SMALL).learn(64)
    check(model, tmp_path, np.stack([space.sample() for _ in range(7)]))


def test_statistics_are_part_of_the_file(tmp_path):
    env = VecNormalize(make_vec_env("Pendulum-v1", 2), clip_obs=1.5)
    model = PPOFP16("MlpPolicy", env, **SMALL).learn(128)
    env.save(tmp_path / "statistics.pkl")
    raw = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32) * [1, 1, 8]
    check(model, tmp_path, raw.astype(np.float32), tmp_path / "statistics.pkl", env.normalize_obs(raw))
    with_, without = DeployedPolicy(model, env), DeployedPolicy(model)
    inputs = th.as_tensor(raw, dtype=th.float32)
    assert (with_(inputs) - without(inputs)).abs().max() > 1e-2


def test_weights_are_stored_in_half_precision_and_only_the_actors(toy, tmp_path):
    onnx = pytest.importorskip("onnx")
    model = PPOFP16("MlpPolicy", toy(ACTIONS["box"]), policy_kwargs={"net_arch": [64, 64]}, **SMALL)
    to_onnx(model, tmp_path / "policy.onnx")
    weights = [x for x in onnx.load(tmp_path / "policy.onnx").graph.initializer if len(x.dims) == 2]
    assert {x.data_type for x in weights} == {onnx.TensorProto.FLOAT16}
    assert sorted(tuple(x.dims) for x in weights) == [(3, 64), (64, 3), (64, 64)]
    assert (tmp_path / "policy.onnx").stat().st_size < 2 * (64 * 64 + 2 * 64 * 3 + 64 + 64 + 3) + 8_000


def test_the_model_stays_as_it_was(toy, tmp_path):
    model = PPOFP16("MlpPolicy", toy(ACTIONS["box"]), **SMALL).learn(64)
    twin = PPOFP16("MlpPolicy", toy(ACTIONS["box"]), **SMALL).learn(64)
    twin.set_parameters(model.get_parameters())
    to_torchscript(model, tmp_path / "policy.pt")
    observations = np.zeros((2, 3), np.float32)
    np.testing.assert_array_equal(
        model.predict(observations, deterministic=True)[0], twin.predict(observations, deterministic=True)[0]
    )
    assert model.policy.optimizer is not None
    assert all(parameter.requires_grad for parameter in model.policy.parameters())
    model.learn(64)


def test_what_cannot_be_exported_is_refused_by_name(toy, tmp_path):
    class OwnForward(PPOFP16("MlpPolicy", toy()).policy_class):
        def forward(self, obs, deterministic=False):
            return super().forward(obs, deterministic)

    with pytest.raises(ValueError, match="overrides forward"):
        to_onnx(PPOFP16(OwnForward, toy(), **SMALL), tmp_path / "policy.onnx")
    with pytest.raises(ValueError, match="e5m7"):
        to_onnx(PPOFP16("MlpPolicy", toy(), precision="e5m7", **SMALL), tmp_path / "policy.onnx")
    with pytest.raises(ValueError, match="amp-bf16-sr"):
        to_torchscript(PPOFP16("MlpPolicy", toy(), precision="amp-bf16-sr", **SMALL), tmp_path / "policy.pt")
    other = VecNormalize(make_vec_env("CartPole-v1", 1))
    model = PPOFP16("MlpPolicy", toy(), **SMALL)
    with pytest.raises(ValueError, match="another environment"):
        to_onnx(model, tmp_path / "policy.onnx", other)
    (tmp_path / "none.pkl").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="holds no VecNormalize statistics"):
        to_onnx(model, tmp_path / "policy.onnx", tmp_path / "none.pkl")
    assert not (tmp_path / "policy.onnx").exists()


def test_without_onnx(toy, tmp_path, monkeypatch):
    monkeypatch.setattr("sb3_fp16.export.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install sb3_fp16"):
        to_onnx(PPOFP16("MlpPolicy", toy(), **SMALL), tmp_path / "policy.onnx")


def test_the_example_needs_neither_torch_nor_sb3(tmp_path):
    pytest.importorskip("onnxruntime")
    env = VecNormalize(make_vec_env("Pendulum-v1", 1))
    model = PPOFP16("MlpPolicy", env, **SMALL).learn(64)
    to_onnx(model, tmp_path / "policy.onnx", env)
    code = f"""
import runpy, sys
for name in ("torch", "stable_baselines3", "sb3_fp16"):
    sys.modules[name] = None
sys.argv = ["deploy_onnx.py", {str(tmp_path / "policy.onnx")!r}, "Pendulum-v1", "--episodes", "1"]
runpy.run_path("examples/deploy_onnx.py", run_name="__main__")
"""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    plain = gym.make("Pendulum-v1")
    observation, _ = plain.reset(seed=0)
    total, ended = 0.0, False
    while not ended:
        action, _ = model.predict(env.normalize_obs(observation), deterministic=True)
        observation, reward, _, ended, _ = plain.step(action)
        total += float(reward)
    assert float(done.stdout.split()[-1]) == pytest.approx(total, rel=1e-2)


def test_the_command(tmp_path, capsys):
    env = VecNormalize(make_vec_env("Pendulum-v1", 1))
    PPOFP16("MlpPolicy", env, **SMALL).learn(64).save(tmp_path / "model.zip")
    env.save(tmp_path / "statistics.pkl")
    given = [tmp_path / "model.zip", tmp_path / "policy.onnx", "--vec-normalize", tmp_path / "statistics.pkl"]
    main([*map(str, given)])
    assert "policy.onnx" in capsys.readouterr().out
    assert (tmp_path / "policy.onnx").exists()
    (tmp_path / "damaged.zip").write_bytes((tmp_path / "model.zip").read_bytes()[:5000])
    for model, file, words in (
        ("none.zip", "policy.onnx", "none.zip"),
        ("damaged.zip", "policy.onnx", "damaged.zip"),
        ("model.zip", "policy.tflite", "neither .onnx nor .pt"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / model), str(tmp_path / file)])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
