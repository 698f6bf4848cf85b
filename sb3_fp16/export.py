"""
A trained policy as one file that acts without Stable-Baselines3: ONNX or TorchScript.

Observations come in as the environment gives them, in FP32; weights stay in the model's format, layers compute as in
the model, and actions come out as ``predict(deterministic=True)`` gives them. A plain SB3 file needs no export: it is
what ``PPOFP16.save`` writes.

``python -m sb3_fp16.export model.zip policy.onnx [--vec-normalize vec_normalize.pkl]``
"""

import argparse
import os
import pickle
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.torch_layers import MlpExtractor
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor, nn

from sb3_fp16.audit.twin import twin_of
from sb3_fp16.layers import round_activations
from sb3_fp16.policies import HalfPrecisionPolicy
from sb3_fp16.ppo import PPOFP16

Statistics = VecNormalize | str | os.PathLike[str] | None


class DeployedPolicy(nn.Module):
    """
    A policy's deterministic actions, from observations to what ``env.step`` takes.

    :param model: of PPOFP16 or SB3's PPO; copied
    :param vec_normalize: the statistics it was trained with, or the file that they were saved to
    :raises ValueError: for a policy that cannot be exported, saying why
    """

    low: Tensor
    high: Tensor

    def __init__(self, model: PPO, vec_normalize: Statistics = None) -> None:
        super().__init__()
        policy = _plain(model)
        self.observation_space, self.action_space = policy.observation_space, policy.action_space
        self.observation_keys = (
            list(policy.observation_space.spaces) if isinstance(policy.observation_space, spaces.Dict) else []
        )
        policy.eval()
        policy.training = True  # of the policy alone: what looks at values while acting cannot be exported
        self.policy = policy
        self._normalize(_statistics(vec_normalize))
        if isinstance(self.action_space, spaces.Box):
            self.register_buffer("low", th.as_tensor(self.action_space.low))
            self.register_buffer("high", th.as_tensor(self.action_space.high))

    def _normalize(self, statistics: VecNormalize | None) -> None:
        """Keep what ``VecNormalize.normalize_obs`` needs, as buffers by observation key."""
        self.normalized: dict[str, tuple[str, str]] = {}
        self.clip_obs = 0.0
        if statistics is None or not statistics.norm_obs:
            return
        self.clip_obs = float(statistics.clip_obs)
        of_keys: dict[str, RunningMeanStd]
        if isinstance(self.observation_space, spaces.Dict):
            of_keys = {key: cast(Any, statistics.obs_rms)[key] for key in statistics.norm_obs_keys or ()}
        else:
            of_keys = {"": cast(RunningMeanStd, statistics.obs_rms)}
        for number, (key, moments) in enumerate(of_keys.items()):
            expected = (self.observation_space[key] if key else self.observation_space).shape  # type: ignore[index]
            if moments.mean.shape != expected:
                raise ValueError(
                    f"The VecNormalize statistics{f' of {key!r}' if key else ''} have shape {moments.mean.shape}, "
                    f"observations {expected}: they belong to another environment."
                )
            names = f"mean_{number}", f"std_{number}"
            self.register_buffer(names[0], th.as_tensor(moments.mean, dtype=th.float64))
            self.register_buffer(names[1], th.as_tensor(np.sqrt(moments.var + statistics.epsilon), dtype=th.float64))
            self.normalized[key] = names

    def forward(self, *observations: Tensor) -> Tensor:
        """
        Act.

        :param observations: a batch, shape (batch, \\*obs); for Dict observations one per key, in their order
        :return: actions, shape (batch, \\*action): FP32 of a Box, within its bounds, else INT64
        """
        keys = self.observation_keys or [""]
        normalized = {key: self._normalized(key, obs) for key, obs in zip(keys, observations, strict=True)}
        obs: Any = normalized if self.observation_keys else normalized[""]
        policy = self.policy
        features = policy.extract_features(obs, policy.pi_features_extractor)
        latent = policy.mlp_extractor.forward_actor(cast(Tensor, features))
        actions = policy._get_action_dist_from_latent(latent).get_actions(deterministic=True)
        if not isinstance(self.action_space, spaces.Box):
            return actions.long()
        actions = actions.float().reshape(-1, *self.action_space.shape)
        if policy.squash_output:
            return self.low + 0.5 * (actions + 1.0) * (self.high - self.low)
        return th.minimum(th.maximum(actions, self.low), self.high)

    def _normalized(self, key: str, obs: Tensor) -> Tensor:
        """In FP64, as VecNormalize does it."""
        if key not in self.normalized:
            return obs
        mean, std = (cast(Tensor, getattr(self, name)) for name in self.normalized[key])
        return ((obs.double() - mean) / std).clamp(-self.clip_obs, self.clip_obs).float()

    def examples(self) -> tuple[Tensor, ...]:
        """Two observations of each input, to trace with."""
        of_keys = self.observation_space.spaces.values() if self.observation_keys else [self.observation_space]  # type: ignore[attr-defined]
        samples = (np.stack([np.asarray(space.sample()) for _ in range(2)]) for space in of_keys)
        return tuple(_input(sample) for sample in samples)


def _input(observations: Any) -> Tensor:
    """In the type that a deployed policy takes: integers as they are, all else FP32."""
    tensor = th.as_tensor(observations)
    return tensor.float() if tensor.is_floating_point() else tensor


def _plain(model: PPO) -> HalfPrecisionPolicy:
    """A copy of the model's policy, on the CPU, that torch can trace."""
    copy = twin_of(model)
    policy, precision = copy.policy, copy.precision
    if not (precision.format.is_native and precision.compute_format.is_native):
        raise ValueError(f"{precision.storage} is no format of ONNX or TorchScript; load the model as 'fp16'.")
    if precision.compute == "bf16-sr":
        raise ValueError("amp-bf16-sr rounds its weights at random; load the model as 'amp-bf16' to export it.")
    if policy.overridden:
        raise ValueError(f"{type(policy).__name__} overrides {', '.join(policy.overridden)}: what it does is unknown.")
    round_activations(policy, precision.compute_format)
    policy.value_net = cast(Any, nn.Identity())  # acting needs no values
    if isinstance(policy.mlp_extractor, MlpExtractor):
        policy.mlp_extractor.value_net = nn.Sequential()
    if policy.vf_features_extractor is not policy.pi_features_extractor:
        policy.vf_features_extractor = cast(Any, nn.Identity())
    return policy.to("cpu").requires_grad_(False)


def _statistics(vec_normalize: Statistics) -> VecNormalize | None:
    if vec_normalize is None or isinstance(vec_normalize, VecNormalize):
        return vec_normalize
    try:
        with open(vec_normalize, "rb") as file:
            found = pickle.load(file)
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise ValueError(f"{vec_normalize} holds no VecNormalize statistics: {error}") from error
    if not isinstance(found, VecNormalize):
        raise ValueError(f"{vec_normalize} holds a {type(found).__name__}, not VecNormalize statistics.")
    return found


@th.no_grad()
def to_torchscript(model: PPO, path: str | os.PathLike[str], vec_normalize: Statistics = None) -> None:
    """
    Write the policy for ``torch.jit.load``, in Python or C++.

    :param model: of PPOFP16 or SB3's PPO
    :param path: of the file
    :param vec_normalize: the statistics it was trained with, or their file
    :raises ValueError: for a policy that cannot be exported, saying why
    """
    deployed = DeployedPolicy(model, vec_normalize)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checks in torch.distributions, which see the example only
        traced = th.jit.trace(deployed, deployed.examples(), check_trace=False)  # type: ignore[no-untyped-call]
    traced.save(os.fspath(path))


@th.no_grad()
def to_onnx(model: PPO, path: str | os.PathLike[str], vec_normalize: Statistics = None) -> None:
    """
    Write the policy as an ONNX model, for any number of observations at a time. Needs ``pip install sb3_fp16[export]``.

    Inputs are ``observation``, or the keys of Dict observations; the output is ``action``.

    :param model: of PPOFP16 or SB3's PPO
    :param path: of the file
    :param vec_normalize: the statistics it was trained with, or their file
    :raises ValueError: for a policy that cannot be exported, saying why
    :raises ImportError: without onnx
    """
    if find_spec("onnx") is None:
        raise ImportError("ONNX files are written with the package onnx: pip install sb3_fp16[export].")
    deployed = DeployedPolicy(model, vec_normalize)
    names = deployed.observation_keys or ["observation"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        th.onnx.export(
            deployed,
            deployed.examples(),
            os.fspath(path),
            input_names=names,
            output_names=["action"],
            dynamic_axes={name: {0: "batch"} for name in [*names, "action"]},
            do_constant_folding=False,  # it would store the FP32 copies of the weights
            dynamo=False,
        )


_WRITERS = {".onnx": to_onnx, ".pt": to_torchscript}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m sb3_fp16.export", description="a saved model as one file to deploy"
    )
    parser.add_argument("model", type=Path, help="saved by PPOFP16 or SB3's PPO")
    parser.add_argument("file", type=Path, help="to write: .onnx, or .pt for TorchScript")
    parser.add_argument("--vec-normalize", type=Path, help="saved statistics that the model was trained with")
    options = parser.parse_args(arguments)
    if options.file.suffix not in _WRITERS:
        parser.error(f"{options.file} is neither .onnx nor .pt")
    try:
        _WRITERS[options.file.suffix](PPOFP16.load(options.model, device="cpu"), options.file, options.vec_normalize)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    print(f"{options.file}: {options.file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
