import csv
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_fp16 import PPOFP16
from sb3_fp16.audit.__main__ import main
from tests.conftest import Toy

ENV = "AuditToy-v0"
SMALL = {"n_steps": 32, "batch_size": 16, "n_epochs": 1, "device": "cpu"}
FEW = ["--steps", "64", "--minibatches", "2", "--device", "cpu"]


class Broken(Toy):
    def step(self, action):
        observation, *rest = super().step(action)
        return (np.full_like(observation, np.nan), *rest)


@pytest.fixture(autouse=True)
def registered():
    gym.register(ENV, Toy, max_episode_steps=20)
    gym.register("AuditBroken-v0", Broken, disable_env_checker=True)
    yield
    for name in (ENV, "AuditBroken-v0"):
        del gym.registry[name]


@pytest.mark.parametrize("precision", ["fp16", "bf16-sr", "sb3"])
def test_a_saved_model(tmp_path, capsys, precision):
    kind, own = (PPO, {}) if precision == "sb3" else (PPOFP16, {"precision": precision})
    kind("MlpPolicy", Toy(), **SMALL, **own).learn(96).save(tmp_path / "model")
    assert main([str(tmp_path / "model.zip"), "--env", ENV, "--n-envs", "2", "--out", str(tmp_path / "out"), *FEW]) == 0
    text = capsys.readouterr().out
    assert f"precision {'fp32' if precision == 'sb3' else precision}, after 96 steps" in text
    assert "bf16, native -> bf16, torch" in text
    with (tmp_path / "out" / "audit.csv").open() as file:
        assert len(list(csv.DictReader(file))) > 100
    assert (tmp_path / "out" / "audit.png").exists()
    assert (tmp_path / "out" / "verdict.txt").read_text() in text + "\n"


def test_another_precision_and_normalized_observations(tmp_path, capsys):
    env = VecNormalize(DummyVecEnv([lambda: Toy(obs_scale=1e6)]))
    PPO("MlpPolicy", env, **SMALL).learn(64).save(tmp_path / "model")
    env.save(tmp_path / "normalize.pkl")
    command = [str(tmp_path / "model"), "--env", ENV, "--precision", "paper", *FEW]
    assert main([*command, "--vec-normalize", str(tmp_path / "normalize.pkl")]) == 0
    text = capsys.readouterr().out
    assert "precision paper" in text
    assert "hurts range" not in text


def test_the_same_seed_gives_the_same_audit(tmp_path, capsys):
    PPOFP16("MlpPolicy", Toy(), **SMALL).learn(32).save(tmp_path / "model")
    texts = []
    for _ in range(2):
        assert main([str(tmp_path / "model"), "--env", ENV, *FEW]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_what_cannot_be_audited_is_told(tmp_path, capsys):
    PPOFP16("MlpPolicy", Toy(), **SMALL).learn(32).save(tmp_path / "model")
    whole = (tmp_path / "model.zip").read_bytes()
    (tmp_path / "half.zip").write_bytes(whole[: len(whole) // 2])
    DQN("MlpPolicy", "CartPole-v1", device="cpu").save(tmp_path / "dqn")
    cases = {
        "missing.zip": (ENV, "missing"),
        "half.zip": (ENV, "truncated"),
        "model.zip": ("NoSuchEnvironment-v0", "NoSuchEnvironment"),
        "dqn.zip": ("CartPole-v1", "PPO"),
    }
    for name, (env, message) in cases.items():
        assert main([str(tmp_path / name), "--env", env, *FEW]) == 2
        assert message in capsys.readouterr().err
    assert main([str(tmp_path / "model.zip"), "--env", "CartPole-v1", *FEW]) == 2
    assert "space" in capsys.readouterr().err.lower()
    assert main([str(tmp_path / "model.zip"), "--env", "AuditBroken-v0", *FEW]) == 2
    assert "nan" in capsys.readouterr().err.lower()
    assert main([str(tmp_path / "model.zip"), "--env", ENV, "--precision", "fp17", *FEW]) == 2
    assert "fp17" in capsys.readouterr().err
    for option, value in (
        ("--device", "bogus"),
        ("--out", "/proc/audit"),
        ("--vec-normalize", str(tmp_path / "dqn.zip")),
    ):
        assert main([str(tmp_path / "model.zip"), "--env", ENV, *FEW, option, value]) == 2
        assert "No audit: " in capsys.readouterr().err
    for option in ("--steps", "--minibatches", "--n-envs"):
        with pytest.raises(SystemExit):
            main([str(tmp_path / "model.zip"), "--env", ENV, option, "0"])


def test_the_command(tmp_path):
    PPOFP16("MlpPolicy", "CartPole-v1", **SMALL).learn(32).save(tmp_path / "model")
    command = [sys.executable, "-m", "sb3_fp16.audit", str(tmp_path / "model.zip"), "--env", "CartPole-v1", *FEW]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "writing 16-bit weights back" in done.stdout
