"""
SB3's ``train()`` in JAX, all epochs and minibatches in one jitted call: what a user can reach without C++.

For Gaussian policies with two tanh networks and one environment. One flat vector holds the parameters: on a CPU it is
faster than a tree of arrays. The flags below do not keep XLA to one core; ``benchmarks.cpu`` pins the whole process.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from stable_baselines3 import PPO
from stable_baselines3.common.distributions import DiagGaussianDistribution

# Read when JAX computes for the first time.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"

HALF_LOG_TAU = 0.5 * float(np.log(2 * np.pi))

Array = Any
"""A ``jax.Array``; mypy has to do without JAX."""
Parameters = dict[str, Array]
"""By SB3's names."""
Rollout = dict[str, Array]
"""By the names of SB3's buffer, rows first."""


class State(NamedTuple):
    """
    What an update changes.

    :param parameters: flat, shape (n,)
    :param first_moment: Adam's, FP32, shape (n,)
    :param second_moment: Adam's, FP32, shape (n,)
    :param step: optimizer steps taken, FP32
    """

    parameters: Array
    first_moment: Array
    second_moment: Array
    step: Array


def forward(parameters: Parameters, x: Array, network: str, head: str) -> Array:
    """
    SB3's MLP of up to five hidden layers, whose names are sorted.

    :param parameters: of the policy
    :param x: observations, shape (batch, features)
    :param network: ``policy_net`` or ``value_net``
    :param head: ``action_net`` or ``value_net``
    :return: FP32, shape (batch, outputs)
    """
    hidden = [name for name in parameters if name.startswith(f"mlp_extractor.{network}") and name.endswith("weight")]
    for layer in (name.removesuffix(".weight") for name in hidden):
        x = jnp.tanh(x @ parameters[f"{layer}.weight"].T + parameters[f"{layer}.bias"])
    return (x @ parameters[f"{head}.weight"].T + parameters[f"{head}.bias"]).astype(jnp.float32)


def loss(parameters: Parameters, batch: Rollout, model: PPO) -> tuple[Array, Array]:
    """
    PPO's objective as in SB3, normalised advantages and unclipped values.

    :param parameters: of the policy
    :param batch: a minibatch of the rollout
    :param model: for its hyperparameters
    :return: the loss, and SB3's statistics: policy loss, value loss, entropy loss, KL estimate, clip fraction
    """
    clip_range = model.clip_range(1.0)  # type: ignore[operator]
    log_std = parameters["log_std"].astype(jnp.float32)
    z = (batch["actions"] - forward(parameters, batch["observations"], "policy_net", "action_net")) / jnp.exp(log_std)
    values = forward(parameters, batch["observations"], "value_net", "value_net")[:, 0]

    advantages = batch["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    log_ratio = (-0.5 * z**2 - log_std - HALF_LOG_TAU).sum(axis=1) - batch["log_probs"]
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - clip_range, 1 + clip_range)
    policy_loss = -jnp.minimum(advantages * ratio, advantages * clipped).mean()
    value_loss = ((batch["returns"] - values) ** 2).mean()
    entropy_loss = -(log_std + HALF_LOG_TAU + 0.5).sum()

    clip_fraction = (jnp.abs(ratio - 1) > clip_range).mean(dtype=jnp.float32)
    statistics = jnp.stack([policy_loss, value_loss, entropy_loss, (ratio - 1 - log_ratio).mean(), clip_fraction])
    return policy_loss + model.ent_coef * entropy_loss + model.vf_coef * value_loss, statistics


def adam(state: State, gradient: Array, learning_rate: float, max_grad_norm: float) -> State:
    """
    Clip by the global norm, then a step as torch's Adam takes it with SB3's eps.

    :param state: before
    :param gradient: shape (n,)
    :param learning_rate: of this update
    :param max_grad_norm: largest norm that is not scaled down
    """
    gradient = gradient.astype(jnp.float32)
    gradient = gradient * jnp.minimum(1, max_grad_norm / (jnp.sqrt(jnp.vdot(gradient, gradient)) + 1e-6))
    step = state.step + 1
    first = 0.9 * state.first_moment + 0.1 * gradient
    second = 0.999 * state.second_moment + 0.001 * gradient**2
    denominator = jnp.sqrt(second) / jnp.sqrt(1 - 0.999**step) + 1e-5
    change = learning_rate / (1 - 0.9**step) * first / denominator
    parameters = (state.parameters.astype(jnp.float32) - change).astype(state.parameters.dtype)
    return State(parameters, first, second, step)


def jitted_update(model: PPO, unflatten: Callable[[Array], Parameters]) -> Callable[..., tuple[State, Array]]:
    """
    One whole update as one compiled function of state, rollout and order; the state's memory is reused.

    :param model: for its hyperparameters
    :param unflatten: parameters from their flat vector
    """

    def minibatch(rollout: Rollout, state: State, rows: Array) -> tuple[State, Array]:
        batch = {name: array[rows] for name, array in rollout.items()}
        gradient, statistics = jax.grad(lambda x: loss(unflatten(x), batch, model), has_aux=True)(state.parameters)
        return adam(state, gradient, model.lr_schedule(1.0), model.max_grad_norm), statistics

    def update(state: State, rollout: Rollout, order: Array) -> tuple[State, Array]:
        rollout["observations"] = rollout["observations"].astype(state.parameters.dtype)

        def epoch(state: State, rows: Array) -> tuple[State, Array]:
            return cast(tuple[State, Array], lax.scan(lambda s, r: minibatch(rollout, s, r), state, rows))

        state, statistics = lax.scan(epoch, state, order)
        return state, statistics.mean(axis=(0, 1))

    return cast(Callable[..., tuple[State, Array]], jax.jit(update, donate_argnums=0))


class JaxUpdate:
    """
    A copy of a model whose updates run in JAX.

    :param model: SB3's PPO with a rollout in its buffer, at SB3's defaults for what ``loss`` and ``adam`` leave out
    :param half: parameters, layers and gradients in FP16; loss, norm and Adam's moments stay FP32. Without a gradient
        scale: it serves to compare times, not learning
    """

    def __init__(self, model: PPO, half: bool = False) -> None:
        assert type(model.policy.action_dist) is DiagGaussianDistribution
        assert model.n_envs == 1
        assert model.clip_range_vf is None
        assert model.normalize_advantage
        assert model.target_kl is None
        kind = jnp.float16 if half else jnp.float32
        parameters = {name: jnp.asarray(p.detach().numpy(), kind) for name, p in model.policy.named_parameters()}
        flat, self._unflatten = ravel_pytree(parameters)
        self.model, self.state = model, State(flat, jnp.zeros(flat.shape), jnp.zeros(flat.shape), jnp.zeros(()))
        self._update = jitted_update(model, self._unflatten)

    def train(self) -> np.ndarray[Any, Any]:
        """
        One update on the model's rollout, minibatches drawn as SB3 draws them.

        :return: means of the statistics that ``loss`` names
        """
        buffer, rows = self.model.rollout_buffer, self.model.n_steps
        shapes = {"observations": (rows, -1), "actions": (rows, -1)}
        names = ("observations", "actions", "log_probs", "advantages", "returns")
        rollout = {name: getattr(buffer, name).astype(np.float32).reshape(shapes.get(name, rows)) for name in names}
        order = np.stack([np.random.permutation(rows) for _ in range(self.model.n_epochs)]).astype(np.int32)
        order = order.reshape(self.model.n_epochs, -1, self.model.batch_size)
        self.state, statistics = self._update(self.state, rollout, order)
        self.state.parameters.block_until_ready()
        return np.asarray(statistics)

    def parameters(self) -> dict[str, np.ndarray[Any, Any]]:
        """By SB3's names."""
        return {name: np.asarray(array) for name, array in self._unflatten(self.state.parameters).items()}
