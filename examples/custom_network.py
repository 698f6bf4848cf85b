"""
A features extractor of your own: any torch module works; what the native engine does not know runs on torch.

``python examples/custom_network.py [--steps 20000]``
"""

import argparse
from typing import cast

import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from sb3_fp16 import PPOFP16


class Residual(BaseFeaturesExtractor):
    """
    A linear layer, then one block with a skip connection.

    :param observation_space: of vectors
    :param features_dim: width
    """

    def __init__(self, observation_space: spaces.Box, features_dim: int = 64) -> None:
        super().__init__(observation_space, features_dim)
        self.first = nn.Linear(observation_space.shape[0], features_dim)
        self.block = nn.Sequential(nn.LayerNorm(features_dim), nn.Linear(features_dim, features_dim), nn.SiLU())

    def forward(self, observations: Tensor) -> Tensor:
        """Features, shape (batch, features_dim), in the precision's storage format."""
        features = self.first(observations)
        return cast(Tensor, features + self.block(features))


def main() -> None:
    """Train, then show what the weights are stored in."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    network = {"features_extractor_class": Residual, "net_arch": [64], "activation_fn": nn.SiLU}
    model = PPOFP16("MlpPolicy", "CartPole-v1", policy_kwargs=network, verbose=1, seed=0, device="cpu")
    model.learn(steps)
    assert {parameter.dtype for parameter in model.policy.parameters()} == {torch.float16}
    print(model.precision_report())


if __name__ == "__main__":
    main()
