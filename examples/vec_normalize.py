"""
Observations and rewards of any size: VecNormalize keeps them inside FP16's ±65,504.

``python examples/vec_normalize.py [--steps 200000]``
"""

import argparse
import tempfile
from pathlib import Path

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_fp16 import PPOFP16


def main() -> None:
    """Train, save model and statistics, load both, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    steps = parser.parse_args().steps
    env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=4, seed=0))
    model = PPOFP16("MlpPolicy", env, n_steps=512, gamma=0.9, learning_rate=1e-3, seed=0, device="cpu")
    model.learn(steps)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.zip")
        env.save(str(Path(folder) / "statistics.pkl"))
        # To evaluate, statistics stand still and rewards are the environment's own.
        evaluation = VecNormalize.load(str(Path(folder) / "statistics.pkl"), make_vec_env("Pendulum-v1", seed=1))
        evaluation.training, evaluation.norm_reward = False, False
        loaded = PPOFP16.load(Path(folder) / "model.zip", device="cpu")
    mean, std = evaluate_policy(loaded, evaluation, n_eval_episodes=10)
    print(f"return {mean:.1f} ± {std:.1f} over 10 episodes")


if __name__ == "__main__":
    main()
