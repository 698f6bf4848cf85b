"""
Several processes train one model, each with environments of its own.

``torchrun --nproc-per-node 2 examples/train_parallel.py [--env Pendulum-v1] [--n-envs 4] [--steps 100000]``
"""

import argparse

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_fp16 import PPOFP16, distributed


def main() -> None:
    """Train, and let rank 0 evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--n-envs", type=int, default=4, help="of each process")
    parser.add_argument("--steps", type=int, default=100_000, help="of all processes together")
    arguments = parser.parse_args()

    rank = distributed.init("cpu")
    env = VecNormalize(make_vec_env(arguments.env, n_envs=arguments.n_envs), gamma=0.9)
    model = PPOFP16("MlpPolicy", env, n_steps=512, batch_size=64, gamma=0.9, seed=0, device="cpu")
    model.learn(arguments.steps)

    if rank == 0:
        env.training = env.norm_reward = False
        mean, spread = evaluate_policy(model, env, n_eval_episodes=10)
        print(f"return {mean:.1f} ± {spread:.1f} after {model.num_timesteps} steps, {model.engine.reason}")


if __name__ == "__main__":
    main()
