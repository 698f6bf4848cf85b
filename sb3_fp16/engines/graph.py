"""
The CUDA engine: the complete update as one CUDA graph.

The rollout is uploaded once, in its own 16-bit format. All else of an update happens on the device: minibatches are
gathered, networks run forwards and backwards into buffers that stay where they are, one kernel turns their outputs
into the losses' gradients (module B), others take the norm (module A) and step the optimizer (module C). Nothing is
read back before the end, so all launches of all epochs are captured once and replayed at each update.

On a device without graphs, which only tests use, the same launches run one by one.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from torch import Tensor, nn

from sb3_fp16.buffers import RolloutBufferFP16
from sb3_fp16.engines.contract import UpdateSettings, UpdateStats
from sb3_fp16.engines.eager import EagerEngine
from sb3_fp16.engines.native import is_ours
from sb3_fp16.engines.native_plan import HEADS, Parts, is_naive, obstacles_anywhere, obstacles_to_training, parts_of
from sb3_fp16.kernels import MODULES, NAMES, KernelParameter, OptimizerKernels, kernels_serve, stream_of
from sb3_fp16.policies import HalfPrecisionPolicy
from sb3_fp16.residuals import log_ratio_bounds
from sb3_fp16.sharp import SHARP, kernel_parameters, kernel_settings

_aten = th.ops.aten
_BITS = {th.float16: 10, th.bfloat16: 7, th.float32: 23}
LOGS = 6
"""Numbers that the loss kernels log of a minibatch: policy, value, entropy, clip fraction, KL, total."""


def why_no_graph(policy: HalfPrecisionPolicy, parts: Parts | None = None) -> str | None:
    """
    The first reason, if any, why no graph can train a policy.

    :param policy: with its optimizer
    :param parts: of the policy, where they are known already
    """
    parts = parts_of(policy) if parts is None else parts
    reasons = (_obstacles(policy), obstacles_anywhere(policy, parts), obstacles_to_training(policy, parts))
    return next((reason for source in reasons for reason in source), None) or next(_late_obstacles(policy), None)


def _obstacles(policy: HalfPrecisionPolicy) -> Iterator[str]:
    module: Any = MODULES.get(policy.device.type)
    if not hasattr(module, "losses"):  # a CPU's steps an optimizer and no more
        yield f"there are no kernels for {policy.device}: sb3_fp16._cuda was not built"
    elif not module.device_count():
        yield "no CUDA device can be used"
    if is_naive(policy.precision) or not policy.precision.format.is_native:
        yield f"{policy.precision.name} is a study of torch's own operations, or of formats that no device has"
    if policy.precision.compute.endswith("-sr"):
        yield "stochastic copies of the weights are made by torch"


def _late_obstacles(policy: HalfPrecisionPolicy) -> Iterator[str]:
    (group,) = policy.optimizer.param_groups
    state = policy.precision.dtype
    served = kernels_serve(policy.device, policy.precision.dtype, state, group["betas"], is_adam=state == th.float32)
    if not served:
        yield f"no kernel steps {type(policy.optimizer).__name__} with betas={group['betas']}"
    if HEADS[type(policy.action_dist)] == "bernoulli":
        yield "no kernel serves a Bernoulli distribution"


class GraphEngine(EagerEngine):
    """
    PPO's update as one CUDA graph; shares the reference's gradient scales and state.

    :param policy: one that ``why_no_graph`` has no reason against
    :param batch_size: minibatch size, which the initial gradient scales depend on
    """

    name = "graph"
    keeps_gradients = False

    def __init__(self, policy: HalfPrecisionPolicy, batch_size: int) -> None:
        super().__init__(policy, batch_size)
        self.reason = "the complete update is one CUDA graph"
        self.recorded = 0
        """How many graphs were captured."""
        self._update: _Update | None = None
        self._failure: str | None = None
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_update": None}  # which refers to memory; copies capture their own

    def update(self, rollout: RolloutBuffer, settings: UpdateSettings) -> UpdateStats:
        """See ``Engine.update``."""
        reason = self._failure or why_no_graph(self.policy)
        if reason is None and not is_ours(rollout, self.policy):
            reason = "the rollout is not complete, or not as RolloutBufferFP16 keeps it"
        behaviour: tuple[Any, ...] = getattr(rollout, "behaviour", None) or ()
        if reason is None and len(behaviour) == 2 and behaviour[1].ndim == 3:
            return super().update(rollout, settings)  # a callback has changed log_std within the rollout
        update = None if reason is not None else self._update_for(cast(RolloutBufferFP16, rollout), settings)
        if update is not None:
            return update.run(cast(RolloutBufferFP16, rollout), settings)
        if not self._warned:
            self._warned = True
            warnings.warn(f"The graph engine leaves updates to torch: {reason or self._failure}.", stacklevel=2)
        return super().update(rollout, settings)

    def _update_for(self, rollout: RolloutBufferFP16, settings: UpdateSettings) -> "_Update | None":
        """The last one, or where it was made for something else, a new one; None if none can be made."""
        _make_state(self.optimizer)
        key = _key(self, rollout, settings)
        if self._update is None or self._update.key != key:
            self._update = None  # its memory first
            try:
                self._update = _Update(self, rollout, settings, key)
            except RuntimeError as problem:  # no memory for its buffers, or a call that no graph can hold
                self._failure = f"no graph could be made: {problem}"
                return None
            self.recorded += 1
        return self._update

    def workspace(self) -> dict[str, int]:
        """See ``Engine.workspace``, in 4-byte numbers."""
        return {} if self._update is None else self._update.workspace()


def _make_state(optimizer: th.optim.Optimizer) -> None:
    """What an optimizer otherwise makes at its first step; Adam as torch has it, with steps counted on the host."""
    if isinstance(optimizer, SHARP):
        optimizer.initialize_state()
        return
    for parameter in optimizer.param_groups[0]["params"]:
        if not optimizer.state[parameter]:
            group = optimizer.param_groups[0]
            on_device = any(group.get(name) for name in ("capturable", "fused"))  # where such an Adam wants its count
            step = th.zeros((), device=parameter.device if on_device else "cpu")
            moments = {name: th.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter].update(step=step, **moments)


def _key(engine: GraphEngine, rollout: RolloutBufferFP16, settings: UpdateSettings) -> tuple[Any, ...]:
    """All that a graph was made for; what may change from update to update without a new one is left out."""
    optimizer = engine.optimizer
    (group,) = optimizer.param_groups
    fixed = replace(settings, learning_rate=0.0, clip_range=0.0, clip_range_vf=None)
    shapes = {name: array.shape for name, array in rollout.arrays().items()}
    tensors = [p.data_ptr() for p in group["params"]]
    tensors += [x.data_ptr() for p in group["params"] for x in optimizer.state[p].values()]
    kept = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
    mlp = engine.policy.mlp_extractor
    kinds = [_kind(module) for net in (mlp.policy_net, mlp.value_net) for module in list(net)[1::2]]
    modules = (type(engine.policy.action_dist), *kinds)
    return fixed, settings.clip_range_vf is None, tuple(shapes.items()), tuple(tensors), repr(kept), modules


class _Activation(NamedTuple):
    """An activation and its derivative, into buffers."""

    forward: Callable[[Tensor, Tensor], object]
    """(before, out)"""
    backward: Callable[[Tensor, Tensor, Tensor], object]
    """(signal, before, after): the signal is replaced"""


def _kind(module: nn.Module) -> tuple[type[nn.Module], float, float, str]:
    """An activation's class, slopes and way to approximate."""
    own = module.__dict__
    slopes = (own.get(name, 0.0) for name in ("negative_slope", "alpha"))
    return getattr(module, "original", type(module)), *slopes, own.get("approximate", "none")


def _activation(module: nn.Module) -> _Activation:
    kind, slope, alpha, approximate = _kind(module)
    known: dict[type[nn.Module], _Activation] = {
        nn.Tanh: _Activation(
            lambda x, out: th.tanh(x, out=out),
            lambda s, x, y: _aten.tanh_backward.grad_input(s, y, grad_input=s),
        ),
        nn.ReLU: _Activation(
            lambda x, out: th.clamp_min(x, 0, out=out),
            lambda s, x, y: _aten.threshold_backward.grad_input(s, x, 0, grad_input=s),
        ),
        nn.LeakyReLU: _Activation(
            lambda x, out: _aten.leaky_relu.out(x, slope, out=out),
            lambda s, x, y: _aten.leaky_relu_backward.grad_input(s, x, slope, False, grad_input=s),
        ),
        nn.ELU: _Activation(
            lambda x, out: _aten.elu.out(x, alpha, 1, 1, out=out),
            lambda s, x, y: _aten.elu_backward.grad_input(s, alpha, 1, 1, False, x, grad_input=s),
        ),
        nn.SiLU: _Activation(
            lambda x, out: _aten.silu.out(x, out=out),
            lambda s, x, y: _aten.silu_backward.grad_input(s, x, grad_input=s),
        ),
        nn.GELU: _Activation(
            lambda x, out: _aten.gelu.out(x, approximate=approximate, out=out),
            lambda s, x, y: _aten.gelu_backward.grad_input(s, x, approximate=approximate, grad_input=s),
        ),
    }
    return known[kind]


class _Layer:
    """
    One linear layer with what it reads and writes at each minibatch.

    :param linear: the policy's own
    :param activation: what follows it; None at the end
    :param weights: of the layer in the compute format, and their gradients: pairs for weight and bias
    :param batch: rows
    """

    def __init__(self, activation: nn.Module | None, weights: Sequence[tuple[Tensor, Tensor]], batch: int) -> None:
        (self.weight, self.weight_gradient), (self.bias, self.bias_gradient) = weights
        self.activation = None if activation is None else _activation(activation)
        self.before, self.signal = (self.weight.new_zeros(batch, self.weight.shape[0]) for _ in range(2))
        self.after = self.before if activation is None else th.zeros_like(self.before)

    def forward(self, x: Tensor) -> Tensor:
        """Products accumulate in FP32 and are rounded once."""
        count = len(x)
        before, after = self.before[:count], self.after[:count]
        th.addmm(self.bias, x, self.weight.t(), out=before)
        if self.activation is not None:
            self.activation.forward(before, after)
        return after

    def backward(self, x: Tensor, upstream: Tensor | None) -> None:
        """
        Gradients from the signal of the layer's outputs.

        :param x: its inputs
        :param upstream: receives the signal of the inputs
        """
        count = len(x)
        signal = self.signal[:count]
        if self.activation is not None:
            self.activation.backward(signal, self.before[:count], self.after[:count])
        th.mm(signal.t(), x, out=self.weight_gradient)
        th.sum(signal, 0, out=self.bias_gradient)
        if upstream is not None:
            th.mm(signal, self.weight, out=upstream)


class _Weights:
    """
    Parameters, their gradients, and where layers compute in another format a copy in that.

    :param parameters: of the policy
    :param compute: format of layers
    :param head: parameters that no layer has, log_std
    """

    def __init__(self, parameters: Sequence[nn.Parameter], compute: th.dtype, others: Sequence[nn.Parameter]) -> None:
        self.gradients = {id(p): th.zeros_like(p.data) for p in others}
        in_layers = [p for p in parameters if id(p) not in self.gradients]
        storage = parameters[0].dtype
        device, sizes = parameters[0].device, [-(-p.numel() // 8) * 8 for p in in_layers]
        flat = th.zeros(sum(sizes), dtype=storage, device=device)
        self._flat, self._computed = flat, flat if compute == storage else th.zeros_like(flat, dtype=compute)
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        for p, own, computed in zip(in_layers, th.split(flat, sizes), th.split(self._computed, sizes), strict=True):
            weights = p.data
            if compute != storage:
                weights = p.data.to(compute)
                self._copies.append((weights, p.data))
            self.gradients[id(p)] = own[: p.numel()].view(p.shape)
            self._pairs[id(p)] = weights, computed[: p.numel()].view(p.shape)

    def of(self, layer: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """What a layer computes with: weights and their gradients, then the bias's."""
        return [self._pairs[id(layer.weight)], self._pairs[id(layer.bias)]]

    def refresh(self) -> None:
        """Copies from parameters."""
        if self._copies:
            th._foreach_copy_([copy for copy, _ in self._copies], [own for _, own in self._copies])

    def collect(self) -> None:
        """Gradients in the parameters' format."""
        if self._flat is not self._computed:
            self._flat.copy_(self._computed)


class _Update:
    """
    Everything on the device that one shape of update needs, and its graph.

    :param engine: whose policy is trained
    :param rollout: complete
    :param settings: resolved hyperparameters
    :param key: of what it was made for
    """

    def __init__(
        self, engine: GraphEngine, rollout: RolloutBufferFP16, settings: UpdateSettings, key: tuple[Any, ...]
    ) -> None:
        self.engine, self.policy, self.key = engine, engine.policy, key
        self.device, self.settings = engine.policy.device, settings
        self.module = MODULES[self.device.type]
        self.samples = rollout.buffer_size * rollout.n_envs
        self.batch = min(settings.batch_size, self.samples)
        self.epochs = settings.n_epochs if settings.target_kl is None else 1  # of one replay
        precision = self.policy.precision
        self.storage = precision.dtype
        self.compute = self.storage if precision.compute == "storage" else precision.compute_format.dtype
        self.head = HEADS[type(self.policy.action_dist)]
        self._make_networks()
        self._make_rollout(rollout)
        self._make_state()
        self._make_optimizer()
        with _full_sums():
            self._replay = self._capture(self._launch_all)

    # --- what lies on the device ---

    def _make_networks(self) -> None:
        mlp, policy = self.policy.mlp_extractor, self.policy
        others = [policy.log_std] if self.head == "gaussian" else []
        self.weights = _Weights(list(policy.parameters()), self.compute, others)

        def layers(net: nn.Module, head: nn.Module) -> list[_Layer]:
            modules = [*cast(nn.Sequential, net), head]
            activations: list[nn.Module | None] = [*modules[1::2], None]
            pairs = zip(modules[::2], activations, strict=True)
            return [_Layer(activation, self.weights.of(linear), self.batch) for linear, activation in pairs]

        self.networks = (layers(mlp.policy_net, policy.action_net), layers(mlp.value_net, policy.value_net))

    def _make_rollout(self, rollout: RolloutBufferFP16) -> None:
        self.rollout = {name: th.empty_like(x, device=self.device) for name, x in self._arrays(rollout).items()}
        size = self.rollout["observations"].shape[1]
        self.observations = self.rollout["observations"].new_zeros(self.batch, size)
        self.order = th.zeros(self.epochs * self.samples, dtype=th.int64, device=self.device)

    def _arrays(self, rollout: RolloutBufferFP16) -> dict[str, Tensor]:
        """The rollout's arrays, one row per sample, on the host; choices as FP32 numbers."""
        behaviour, log_std = (*(rollout.behaviour or ()), None, None)[:2]
        found = {
            "observations": rollout.observations,
            "actions": rollout.actions,
            "values": rollout.values,
            "advantages": rollout.advantages,
            "returns": rollout.returns,
            "behaviour": behaviour,
            "correction": rollout.corrections,
            "old_log_prob": rollout.log_probs,
        }
        tensors = {name: _tensor(x).view(self.samples, -1) for name, x in found.items() if x is not None}
        if log_std is not None:
            tensors["log_std0"] = _tensor(log_std)
        if self.head != "gaussian":
            tensors["actions"] = tensors["actions"].float()
        tensors["observations"] = tensors["observations"].to(self.compute)
        return tensors

    def _make_state(self) -> None:
        def zeros(*shape: int, dtype: th.dtype = th.float32) -> Tensor:
            return th.zeros(shape, dtype=dtype, device=self.device)

        minibatches = math.ceil(self.samples / self.batch) * self.epochs
        networks = len(self.engine.networks)
        self.lr, self.clip = zeros(), zeros(3)
        self.statistics, self.logs, self.norms = zeros(minibatches, 2), zeros(minibatches, LOGS), zeros(minibatches)
        self.scales, self.coefficients, self.counters = zeros(networks), zeros(networks), zeros(3, dtype=th.int64)
        self.skip, self.stopped = zeros(dtype=th.bool), zeros(dtype=th.bool)
        scale = self.engine.gradient_scale  # on the device, which no launch may read
        self.limits = {"floor": scale.floor.tolist(), "ceiling": scale.ceiling.tolist()}
        self.counts = zeros(3, dtype=th.int64)
        outputs = self.networks[0][-1].weight.shape[0]
        self.loss_room = zeros(self.module.loss_workspace(self.batch, outputs), dtype=th.uint8)
        dims = getattr(self.policy.action_dist, "action_dims", getattr(self.policy.action_dist, "action_dim", 0))
        self.choices = th.as_tensor(np.atleast_1d(dims), dtype=th.int64).to(self.device)

    def _make_optimizer(self) -> None:
        optimizer, gradients = self.engine.optimizer, self.weights.gradients
        (group,) = optimizer.param_groups
        network_of = self.engine._network_of_parameter.tolist()
        if isinstance(optimizer, SHARP):
            parameters = kernel_parameters(optimizer, group, gradients, network_of)
            self.optimizer_settings = kernel_settings(group, parameters[0].data, parameters[0].first_moment)
            self.adam_steps: list[Tensor] = []
        else:
            parameters = self._adam_parameters(group["params"], network_of)
            self.adam_steps = [parameter.step for parameter in parameters]
            plain = {"decoupled_weight_decay": False, "state_scale": 1.0, "root_rounding": "fp32", "seed": 0}
            self.optimizer_settings = {**group, **plain, "parameter_bits": 23, "state_bits": 23}
        self.parameters = sorted(parameters, key=lambda parameter: parameter.coefficient)
        self.optimizer = OptimizerKernels(self.device)

    def _adam_parameters(self, parameters: Sequence[nn.Parameter], network_of: Sequence[int]) -> list[KernelParameter]:
        """With steps counted on the device."""
        members = []
        for parameter, network in zip(parameters, network_of, strict=True):
            state = self.engine.optimizer.state[parameter]
            step = th.zeros((), dtype=th.int64, device=self.device)
            moments = (state["exp_avg"], state["exp_avg_sq"])
            gradient = self.weights.gradients[id(parameter)]
            size = parameter.numel()
            members.append(KernelParameter(parameter.data, gradient, *moments, step, None, 1, size, 0, network))
        return members

    # --- what is launched ---

    def _launch_all(self) -> None:
        self.weights.refresh()
        self._call(self.module.statistics, self._statistics())
        starts = range(0, self.samples, self.batch)
        for number, (epoch, start) in enumerate((e, s) for e in range(self.epochs) for s in starts):
            self._launch(number, epoch * self.samples + start, min(self.batch, self.samples - start))

    def _launch(self, number: int, start: int, count: int) -> None:
        """One minibatch: samples ``start`` to ``start + count`` of the order."""
        indices = self.order[start:]
        observations, source = self.observations[:count], self.rollout["observations"]
        words = (source.itemsize, source.data_ptr(), indices.data_ptr(), observations.data_ptr())
        self.module.gather(*self._where(), *words, count, source.shape[1])
        inputs = [self._forward(network, observations) for network in self.networks]
        self._call(self.module.losses, self._losses(number, indices, count))
        for network, of_layers in zip(self.networks, inputs, strict=True):
            upstream = [None, *(layer.signal[:count] for layer in network)]
            for layer, x, signal in reversed(list(zip(network, of_layers, upstream, strict=False))):
                layer.backward(x, signal)
        self.weights.collect()
        step = (self.optimizer_settings, self.lr, self.coefficients, self.skip, self.counts, self._norm(number))
        self.optimizer.step(self.parameters, *step)
        self.weights.refresh()

    def _forward(self, network: list[_Layer], x: Tensor) -> list[Tensor]:
        """The inputs of each layer."""
        inputs = []
        for layer in network:
            inputs.append(x)
            x = layer.forward(x)
        return inputs

    def _where(self) -> tuple[int, int]:
        return self.device.index or 0, stream_of(self.device)

    def _call(self, function: Callable[..., None], settings: dict[str, Any]) -> None:
        """With tensors as their addresses, and what kernels ask of every format."""
        formats = {"storage": NAMES[self.storage], "compute": NAMES[self.compute]}
        bits = {"storage_bits": _BITS[self.storage], "compute_bits": _BITS[self.compute]}
        plain = {name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in settings.items()}
        function(*self._where(), {**formats, **bits, **plain})

    def _statistics(self) -> dict[str, Any]:
        return {
            "advantages": self.rollout["advantages"],
            "indices": self.order,
            "statistics": self.statistics,
            "samples": self.samples,
            "batch_size": self.batch,
            "epochs": self.epochs,
            "normalize": self.settings.normalize_advantage,
        }

    def _losses(self, number: int, indices: Tensor, count: int) -> dict[str, Any]:
        settings, policy = self.settings, self.policy
        names = ("actions", "advantages", "returns", "values", "behaviour", "correction", "old_log_prob", "log_std0")
        two_sum = policy.precision.log_ratio == "residual-twosum" and self.head == "gaussian"
        absolute = "behaviour" not in self.rollout
        gaussian = self.head == "gaussian"
        actor, critic = (network[-1] for network in self.networks)
        return {
            **{name: self.rollout.get(name, 0) for name in names},
            "head": self.head,
            "indices": indices,
            "count": count,
            "statistics": self.statistics[number],
            "outputs": actor.before,
            "predictions": critic.before,
            "policy_signal": actor.signal,
            "value_signal": critic.signal,
            "size": actor.weight.shape[0],
            "log_std": policy.log_std.data if gaussian else 0,
            "log_std_gradient": self.weights.gradients[id(policy.log_std)] if gaussian else 0,
            "workspace": self.loss_room,
            "choices": self.choices,
            "heads": len(self.choices),
            "scales": self.scales,
            "logs": self.logs[number],
            "stopped": self.stopped,
            "networks": len(self.scales),
            "log_ratio": "absolute" if absolute else "two_sum" if two_sum else "residual",
            "clip": self.clip,
            "ent_coef": settings.ent_coef,
            "vf_coef": settings.vf_coef,
            "target_kl": -1.0 if settings.target_kl is None else settings.target_kl,
        }

    def _norm(self, number: int) -> dict[str, Any]:
        tensors = {
            "scales": self.scales,
            "coefficients": self.coefficients,
            "norm": self.norms[number],
            "skip": self.skip,
            "stopped": self.stopped,
            "counters": self.counters,
        }
        addresses = {name: x.data_ptr() for name, x in tensors.items()}
        return {**addresses, **self.limits, "max_norm": self.settings.max_grad_norm}

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A function that runs all of ``work``'s launches."""
        if self.device.type != "cuda":
            return work
        # Libraries prepare themselves at their first call, which no graph may hold: a rehearsal in which every
        # minibatch counts as stopped, so that nothing is written. On the stream where the policy has acted: each
        # stream that products run on keeps a workspace of cuBLAS's, 32 MiB on large devices.
        self.stopped.fill_(True)
        for count in {self.batch, self.samples % self.batch or self.batch}:
            self._launch(0, 0, count)
        self._call(self.module.statistics, self._statistics())
        graph, stream = th.cuda.CUDAGraph(), _capture_stream(self.device)
        # torch's own stream for captures is on the device that was current first; other threads may use the device.
        with th.cuda.device(self.device), th.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    # --- one update ---

    def run(self, rollout: RolloutBufferFP16, settings: UpdateSettings) -> UpdateStats:
        """
        All epochs on a rollout.

        :param rollout: of the shape that this was made for
        :param settings: likewise, but for the schedules' values
        """
        skipped_before = self.engine.gradient_scale.skipped_steps
        self._upload(rollout, settings)
        logs, norms, epochs = [], [], 0
        while epochs < settings.n_epochs:
            orders = np.stack([rollout.minibatch_rows() for _ in range(self.epochs)])
            self.order.copy_(th.from_numpy(orders.reshape(-1)))
            with _full_sums():
                self._replay()
            epochs += self.epochs
            logs.append(self.logs.to("cpu", copy=True))
            norms.append(self.norms.to("cpu", copy=True))
            if settings.target_kl is not None and self.stopped:
                break
        self._download()
        return self._stats(logs, norms, epochs, int(self.engine.gradient_scale.skipped_steps - skipped_before))

    def _upload(self, rollout: RolloutBufferFP16, settings: UpdateSettings) -> None:
        for name, x in self._arrays(rollout).items():
            self.rollout[name].copy_(x)  # which waits: some of these arrays are gone when this returns
        scale = self.engine.gradient_scale
        self.scales.copy_(scale.scales)
        self.counters.copy_(th.stack([scale.good_steps, scale.skipped_steps, scale.skips_at_floor]))
        (group,) = self.engine.optimizer.param_groups
        self.lr.fill_(float(group["lr"]))
        value_range = -1.0 if settings.clip_range_vf is None else settings.clip_range_vf
        self.clip.copy_(th.tensor([*log_ratio_bounds(settings.clip_range), value_range]))
        self.stopped.zero_()
        self.counts.zero_()
        for parameter, step in zip(group["params"], self.adam_steps, strict=False):
            step.fill_(int(self.engine.optimizer.state[parameter]["step"]))

    def _download(self) -> None:
        scale = self.engine.gradient_scale
        scale.scales = self.scales.clone()
        scale.good_steps, scale.skipped_steps, scale.skips_at_floor = self.counters.clone().unbind()
        (group,) = self.engine.optimizer.param_groups
        for parameter, step in zip(group["params"], self.adam_steps, strict=False):
            self.engine.optimizer.state[parameter]["step"].fill_(float(step))
        scale.raise_if_unrecoverable()

    def _stats(self, logs: list[Tensor], norms: list[Tensor], epochs: int, skipped: int) -> UpdateStats:
        log, of_last_epoch, stopped_at = th.cat(logs), logs[-1][-(len(logs[-1]) // self.epochs) :], None
        if self.settings.target_kl is not None and self.stopped:
            last = int((log[:, 4] > 1.5 * self.settings.target_kl).nonzero()[0])  # what follows was not computed
            stopped_at = float(log[last, 4])
            of_last_epoch = of_last_epoch[: last + 1 - (len(log) - len(of_last_epoch))]
            log = log[: last + 1]
        nonzero, stuck, saturated = self.counts.tolist()
        policy, value, entropy, clipped = log[:, :4].mean(dim=0).tolist()
        return UpdateStats(
            entropy_loss=entropy,
            policy_loss=policy,
            value_loss=value,
            approx_kl=float(of_last_epoch[:, 4].mean()),
            clip_fraction=clipped,
            loss=float(log[-1, 5]),
            grad_norm=float(th.cat(norms).nanmean()),
            loss_scale=float(self.scales.min()),
            skipped_steps=skipped,
            stuck_fraction=stuck / max(1, nonzero),
            saturated=saturated,
            epochs=epochs,
            stopped_at_kl=stopped_at,
        )

    def workspace(self) -> dict[str, int]:
        """4-byte numbers on the device, by purpose."""

        def size(tensors: Sequence[Tensor]) -> int:
            return sum(x.nbytes for x in tensors) // 4

        layers = [layer for network in self.networks for layer in network]
        buffers = {x.data_ptr(): x for layer in layers for x in (layer.before, layer.after, layer.signal)}
        return {
            "rollout on the device": size(list(self.rollout.values())),
            "gradients": size(list(self.weights.gradients.values())),
            "activations and signals": size([*buffers.values(), self.observations]),
        }


@cache
def _capture_stream(device: th.device) -> th.cuda.Stream:
    """The same for all graphs of a device, as their libraries' workspaces stay with it."""
    return th.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _tensor(array: Any) -> Tensor:
    """numpy and torch share no name for BF16."""
    if array.dtype.name == "bfloat16":
        return th.from_numpy(array.view(np.int16)).view(th.bfloat16)
    return th.from_numpy(array)


@contextmanager
def _full_sums() -> Iterator[None]:
    """Products of 16-bit matrices accumulate in FP32 throughout, also where they are split."""
    matmul = th.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [(name, getattr(matmul, name), getattr(matmul, f"{name}_split_k", None)) for name in names]
    try:
        for name, _, split in before:  # newer torch: two settings in one
            setattr(matmul, name, False if split is None else (False, split))
        yield
    finally:
        for name, allowed, split in before:
            setattr(matmul, name, allowed if split is None else (allowed, split))
