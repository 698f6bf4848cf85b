"""``python -m sb3_fp16``: versions, engines, devices, RL Zoo, what is missing and how to get it, and a self-test."""

import platform
import sys
import time
import warnings
from importlib.metadata import PackageNotFoundError, version

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces

from sb3_fp16 import PPOFP16, __version__, zoo
from sb3_fp16.engines.native_plan import BUILT, MISSING
from sb3_fp16.kernels import MODULES

PACKAGES = ("stable_baselines3", "sb3_contrib", "rl_zoo3", "gymnasium", "torch", "numpy")


def versions() -> list[str]:
    """A line per package."""
    lines = [
        f"sb3_fp16            {__version__}",
        f"python              {platform.python_version()}, {platform.platform()}",
    ]
    for package in PACKAGES:
        try:
            lines.append(f"{package:<20}{version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package:<20}not installed")
    return lines


def engines() -> list[str]:
    """A line per engine, device and RL Zoo: whether it is there, and what to do where it is not."""
    if BUILT:
        from sb3_fp16 import _cpu

        native = f"available, {_cpu.best()}, {th.get_num_threads()} threads for wide networks"
    else:
        native = f"missing: {MISSING}"
    cuda = th.cuda.get_device_name() if th.cuda.is_available() else "none that torch can use"
    kernels = "available" if "cuda" in MODULES else "missing: install CUDA's nvcc and reinstall with SB3_FP16_CUDA=1"
    return [
        "eager engine        available",
        f"native CPU engine   {native}",
        f"CUDA device         {cuda}",
        f"CUDA kernels        {kernels}",
        f"RL Zoo              {zoo.status()}",
    ]


class _Echo(gym.Env[np.ndarray, np.ndarray]):
    """Wants its observation back; one step per episode."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[np.ndarray, dict[str, object]]:
        super().reset(seed=seed)
        self.wanted = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.wanted, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        return self.wanted, -float(np.square(action - self.wanted).sum()), True, False, {}


def self_test(precision: str) -> str:
    """
    Train for a moment.

    :param precision: a preset's name
    :return: a line that tells the error before and after, and the engine
    :raises RuntimeError: if nothing was learned
    """
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PPOFP16(
            "MlpPolicy", _Echo(), precision=precision, n_steps=512, gamma=0.0, learning_rate=1e-3, seed=0, device="cpu"
        )
        observations = np.random.default_rng(0).uniform(-1, 1, (256, 2)).astype(np.float32)

        def error() -> float:
            return float(np.square(model.predict(observations, deterministic=True)[0] - observations).mean())

        before = error()
        model.learn(4096)
    after, seconds = error(), time.perf_counter() - started
    if not after < before / 2:
        raise RuntimeError(
            f"The self-test in {precision} learned nothing: error {before:.3f} before, {after:.3f} after."
        )
    return f"{precision:<20}{model.engine.name} engine, error {before:.3f} -> {after:.3f} in {seconds:.1f} s"


def main() -> int:
    """Print the diagnosis; the exit status tells whether the self-test passed."""
    print("\n".join([*versions(), "", *engines(), "", "self-test"]))
    try:
        print("\n".join(self_test(precision) for precision in ("fp16", "fp32")))
    except (RuntimeError, ValueError) as problem:
        print(problem)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
