"""``python -m sb3_fp16.audit model.zip --env ID``: is precision hurting this model?"""

import argparse
import csv
import pickle
import sys
from pathlib import Path

import gymnasium as gym
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.utils import get_device
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_fp16 import saving
from sb3_fp16.audit.pictures import draw
from sb3_fp16.audit.report import audit
from sb3_fp16.ppo import PPOFP16


def collected(
    path: str | Path, env: VecEnv, steps: int, seed: int = 0, precision: str | None = None, device: str = "auto"
) -> PPOFP16:
    """
    A saved model with a rollout of its own policy.

    :param path: of a model of PPOFP16 or SB3's PPO
    :param env: to act in
    :param steps: of the rollout, at least
    :param seed: of actions and environments
    :param precision: in place of the saved one, which for SB3's PPO is ``fp32``
    :param device: to load it to
    :raises ValueError: for a file that is damaged or not PPO's, an environment that does not fit, and observations,
        actions and rewards that are not finite
    """
    saving.check_file(path)
    data, _, _ = load_from_zip_file(path, device="cpu")
    if precision is None and "precision_settings" not in (data or {}):
        precision = "fp32"
    env.seed(seed)
    # At least a minibatch of 2 samples, whatever the number of environments.
    n_steps = max(2, -(-steps // env.num_envs))
    model = PPOFP16.load(path, env=env, device=device, precision=precision, n_steps=n_steps, verbose=0)
    timesteps, progress = model.num_timesteps, model._current_progress_remaining
    model.set_random_seed(seed)
    _, callback = model._setup_learn(n_steps, callback=None)
    model.collect_rollouts(env if model.env is None else model.env, callback, model.rollout_buffer, n_steps)
    model.num_timesteps, model._current_progress_remaining = timesteps, progress
    return model


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    result = argparse.ArgumentParser(prog="python -m sb3_fp16.audit", description=__doc__)
    result.add_argument("model", type=Path, help="saved by PPOFP16 or SB3's PPO")
    result.add_argument("--env", required=True, help="Gymnasium id of its environment")
    result.add_argument("--vec-normalize", type=Path, help="statistics that VecNormalize saved")
    result.add_argument("--n-envs", type=int, default=1, help="environments to act in (default: %(default)s)")
    result.add_argument("--steps", type=int, default=8192, help="to act for (default: %(default)s)")
    result.add_argument("--minibatches", type=int, default=64, help="of the replayed update (default: %(default)s)")
    result.add_argument("--precision", help="audit the model in another precision than its own")
    result.add_argument("--seed", type=int, default=0, help="of actions and environments (default: %(default)s)")
    result.add_argument("--device", default="auto", help="as SB3 takes it (default: %(default)s)")
    result.add_argument("--out", type=Path, help="folder for audit.csv, audit.png and verdict.txt")
    return result


def main(arguments: list[str] | None = None) -> int:
    """
    Audit, and print what was found.

    :param arguments: of the command line
    :return: exit status: 0, or 2 if the audit could not be made
    """
    given = parser().parse_args(arguments)
    for name in ("n_envs", "steps", "minibatches"):
        if getattr(given, name) < 1:
            parser().error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(given, name)}")
    try:
        get_device(given.device)  # SB3 leaves files open where it fails later
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
        env = make_vec_env(lambda: gym.make(given.env), given.n_envs)
        if given.vec_normalize is not None:
            env = VecNormalize.load(str(given.vec_normalize), env)
            env.training = False
        model = collected(given.model, env, given.steps, given.seed, given.precision, given.device)
        found = audit(model, model.rollout_buffer, given.minibatches)
        env.close()
    except (ValueError, OSError, RuntimeError, pickle.UnpicklingError, gym.error.Error) as problem:
        print(f"No audit: {problem}", file=sys.stderr)
        return 2
    print(found)
    if given.out is not None:
        rows = found.rows()
        with (given.out / "audit.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        (given.out / "verdict.txt").write_text(f"{found}\n")
        draw([found], given.out / "audit.png")
        print(f"written to {given.out}: audit.csv, audit.png, verdict.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
