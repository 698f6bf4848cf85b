"""
Run an exported policy with NumPy, Gymnasium and onnxruntime alone: no torch, no Stable-Baselines3, no sb3_fp16.

``python examples/deploy_onnx.py policy.onnx Pendulum-v1 [--episodes 3]``
"""

import argparse

import gymnasium as gym
import numpy as np
import onnxruntime


def main() -> None:
    """Print the return of each episode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", help="file written by python -m sb3_fp16.export")
    parser.add_argument("env", help="that the policy was trained in")
    parser.add_argument("--episodes", type=int, default=3)
    arguments = parser.parse_args()
    session = onnxruntime.InferenceSession(arguments.policy)
    keys = [given.name for given in session.get_inputs()]
    env = gym.make(arguments.env)
    for episode in range(arguments.episodes):
        observation, _ = env.reset(seed=episode)
        done, total = False, 0.0
        while not done:
            parts = observation if isinstance(observation, dict) else {keys[0]: observation}
            batch = {key: np.asarray(parts[key])[None] for key in keys}
            # Exported policies take FP32 where observations are floating-point numbers.
            batch = {key: x.astype(np.float32) if x.dtype.kind == "f" else x for key, x in batch.items()}
            action = session.run(None, batch)[0][0]
            observation, reward, terminated, truncated, _ = env.step(action)
            done, total = terminated or truncated, total + float(reward)
        print(f"episode {episode}: return {total:.1f}")


if __name__ == "__main__":
    main()
