"""RL Zoo's tuned PPO values for the paper's six tasks."""

from sb3_fp16.hyperparams import read

hyperparams = read("ppo_fp16_tuned.yml")
