"""
What each of two ranks does for ``tests/test_parallel.py``: ``python -m tests.ranks scenario ... --folder folder``.

A rank writes what it has seen of each scenario, or the error that ended it, to ``folder/rank<number>.pickle``.
"""

import argparse
import copy
import os
import pickle
import signal
import warnings
from pathlib import Path

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from sb3_fp16 import PPOFP16, distributed
from sb3_fp16.audit import AuditCallback
from sb3_fp16.buffers import RolloutBufferFP16
from tests.conftest import RecordingLogger, Toy

PRECISIONS = ("fp16", "paper", "bf16", "fp32")
SETTINGS = {"n_steps": 32, "batch_size": 32, "n_epochs": 5, "seed": 0, "device": "cpu"}
FOLDER = Path()


class Watched(DummyVecEnv):
    """Keeps what it has shown."""

    def __init__(self, count):
        super().__init__([Toy] * count)
        self.shown = []

    def reset(self):
        self.shown.append(super().reset().copy())
        return self.shown[-1]

    def step_wait(self):
        obs, *others = super().step_wait()
        self.shown.append(obs.copy())
        return obs, *others


def make_envs(count):
    return DummyVecEnv([Toy] * count)


def make_model(count=2, precision="fp16", **settings):
    return PPOFP16("MlpPolicy", make_envs(count), precision=precision, **{**SETTINGS, **settings})


def state_of(model):
    """All that must be the same on all ranks, apart from what differs by design."""
    optimizer = model.policy.optimizer.state_dict()
    return copy.deepcopy(
        {"policy": dict(model.policy.state_dict()), "optimizer": optimizer, **model.engine.state_dict()}
    )


def share_of(rollout, envs):
    """The part of a rollout that some of its environments have filled."""
    part = copy.deepcopy(rollout)
    part.n_envs = len(envs)
    for name in ("observations", "actions", "rewards", "values", "advantages", "returns", "episode_starts"):
        setattr(part, name, np.ascontiguousarray(getattr(rollout, name)[:, envs]))
    for name in ("log_probs", "corrections"):
        array = getattr(rollout, name)
        setattr(part, name, None if array is None else np.ascontiguousarray(array[:, envs]))
    if rollout.behaviour is not None:
        part.behaviour = tuple(np.ascontiguousarray(x[:, envs]) if x.ndim == 3 else x for x in rollout.behaviour)
    return part


def watch(engine, name, keep):
    """Call ``keep(result, *arguments)`` after each call of an engine's method."""
    method = getattr(engine, name)

    def watched(*args):
        result = method(*args)
        keep(result, *args)
        return result

    setattr(engine, name, watched)


def gradients_of(model):
    return [None if p.grad is None else p.grad.detach().clone() for p in model.policy.parameters()]


def same_samples(model, rollout):
    """One update on a rollout that is given; what it did."""
    model.rollout_buffer = rollout
    model.set_logger(RecordingLogger())
    norms, gradients = [], []
    watch(model.engine, "_step", lambda norm, *_: (norms.append(float(norm)), gradients.append(gradients_of(model))))
    np.random.seed(1)
    model.train()
    logs = {name: values[-1] for name, values in model.logger.values.items()}
    return {"state": state_of(model), "norms": norms, "gradients": gradients, "logs": logs}


class Do(BaseCallback):
    """Calls a function at each step of the environments."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def _on_step(self):
        return self.function(self) is not False


def identical(rank, precision):
    """Three updates of a model whose environments are not evenly spread, and minibatches that leave a rank without."""
    model = make_model((3, 1)[rank], precision, batch_size=6)
    rows = []
    watch(model.engine, "_losses", lambda _, batch, __: rows.append(len(batch.advantages)))
    model.learn(3 * 4 * 32)
    return {"state": state_of(model), "rows": rows, "steps": model.num_timesteps, "engine": model.engine.name}


def against_one(rank, precision):
    """The samples of one process with four environments, three of them this rank's or one."""
    parameters, rollout = pickle.loads((FOLDER / f"{precision}.pickle").read_bytes())
    model = make_model(1, precision)
    model.set_parameters(parameters)
    engine, own, moments = model.engine, [], []
    watch(engine, "_moments_of", lambda found, *_: moments.append(th.stack(found)))
    backward = engine._sum_gradients
    engine._sum_gradients = lambda: (own.append(gradients_of(model)), backward())
    found = same_samples(model, share_of(rollout, ([0, 1, 2], [3])[rank]))
    return {**found, "own": own, "moments": th.cat(moments, dim=1)}


def not_finite(rank):
    """One rank's gradient overflows in one of two minibatches."""
    model = make_model(batch_size=64, n_epochs=1)
    model.learn(4 * 32)
    engine, states, calls = model.engine, [], []

    def spoil(*_):
        calls.append(None)
        if rank == 1 and len(calls) == 1:
            next(iter(model.policy.parameters())).grad.view(-1)[0] = th.inf

    summed = engine._sum_gradients
    engine._sum_gradients = lambda: (spoil(), summed())
    watch(engine, "_step", lambda *_: states.append(state_of(model)))
    before = state_of(model)
    model.set_logger(RecordingLogger())
    model.train()
    return {"states": [before, *states], "skipped": model.logger.values["train/skipped_steps"]}


def target_kl(rank):
    model = make_model(target_kl=3e-3, n_epochs=50, learning_rate=3e-3)
    model.learn(4 * 32)
    return {
        "state": state_of(model),
        "epochs": model._n_updates,
        "steps": model.policy.optimizer.state_dict()["state"][0],
    }


def save_and_load(rank):
    model = make_model(verbose=1, tensorboard_log=str(FOLDER / "logs"))
    model.learn(2 * 4 * 32)
    model.save(FOLDER / f"by_rank_{rank}.zip")
    distributed.barrier()
    saved = state_of(model)
    loaded = PPOFP16.load(FOLDER / "by_rank_0.zip", make_envs(2), device="cpu")
    found = {"saved": saved, "loaded": state_of(loaded), "quiet": (loaded.verbose, loaded.tensorboard_log)}
    loaded.learn(2 * 4 * 32, reset_num_timesteps=False)
    return {**found, "state": state_of(loaded), "steps": loaded.num_timesteps, "updates": loaded._n_updates}


def takes_over(rank):
    """Rank 0 goes on with a trained model, rank 1 has a new one."""
    model = make_model(seed=rank)
    model.learn(4 * 32)
    other = make_model(seed=7 + rank)
    if rank == 0:
        other.set_parameters(model.get_parameters())
        other.num_timesteps, other._n_updates = model.num_timesteps, model._n_updates
        other.engine.gradient_scale.scales /= 4
        other._last_obs = None
    before, seen = state_of(other), []
    other.train = lambda: seen.append(state_of(other))
    other.learn(4 * 32, reset_num_timesteps=False)
    return {"before": before, "after": seen[0], "steps": other.num_timesteps, "updates": other._n_updates}


def made_before_the_ranks_met(rank, model):
    """Of one process until then; its gradient scales go on."""
    engine = model.engine.name
    model.engine.gradient_scale.scales /= 2
    scales = []
    model.learn(4 * 32, callback=Do(lambda _: scales.append(model.engine.gradient_scale.scales.tolist())))
    return {"before": engine, "after": model.engine.name, "scales": scales[0], "state": state_of(model)}


def seeds(rank):
    """First observations of each environment, and first actions, of a model with a seed and of seeded generators."""
    found = {}
    for name in ("model", "script"):
        if name == "script":
            th.manual_seed(3)
            np.random.seed(3)
        env = make_vec_env(Toy, n_envs=(2, 3)[rank], seed=3 if name == "script" else None)
        model = PPOFP16("MlpPolicy", env, **{**SETTINGS, "seed": 3 if name == "model" else None})
        first = []

        def keep(callback, first=first):
            if not first:
                first.extend((callback.locals["obs_tensor"].numpy().copy(), callback.locals["actions"].copy()))
            return False

        model.learn(5 * 32, callback=Do(keep))
        noise = th.randn(4).tolist(), np.random.rand(4).tolist()
        found[name] = {"observations": first[0], "actions": first[1], "noise": noise}
    return found


def counting(rank):
    """Steps and rates that callbacks and schedules see."""
    rates, seen = [], []

    def rate(progress):
        rates.append(progress)
        return 1e-3 * progress

    env = make_vec_env(Toy, n_envs=(3, 1)[rank])
    model = PPOFP16("MlpPolicy", env, learning_rate=rate, **{**SETTINGS, "verbose": 1})
    rates.clear()
    model.learn(2 * 4 * 32, callback=Do(lambda callback: seen.append((callback.num_timesteps, model.num_timesteps))))
    episodes = sorted(info["r"] for info in model.ep_info_buffer)
    return {"seen": seen, "last": rates[-1], "steps": model.num_timesteps, "episodes": episodes}


def stops(rank):
    """A callback of rank 1 ends training in the second of four rollouts."""
    model, updates = make_model(), []
    watch(model, "train", lambda *_: updates.append(None))
    model.learn(4 * 4 * 32, callback=Do(lambda callback: rank == 0 or callback.n_calls < 40))
    return {"updates": len(updates), "steps": model.num_timesteps, "state": state_of(model)}


def normalized(rank):
    """Statistics of VecNormalize after two rollouts, and all that environments have shown."""
    env = VecNormalize(Watched((3, 1)[rank]), gamma=0.9)
    model = PPOFP16("MlpPolicy", env, **SETTINGS)
    model.learn(2 * 4 * 32)
    first = {name: copy.deepcopy(getattr(env, name)) for name in ("obs_rms", "ret_rms")}
    shown = np.concatenate(env.venv.shown)
    env.training = False
    model.learn(4 * 32, reset_num_timesteps=False)
    return {"first": first, "frozen": (env.obs_rms.mean, env.obs_rms.var, env.ret_rms.var), "shown": shown}


def comes_apart(rank):
    """A callback of rank 1 changes one weight."""
    model = make_model()

    def change(callback):
        if rank == 1 and callback.n_calls == 40:
            with th.no_grad():
                model.policy.action_net.bias[0] += 0.25

    model.learn(3 * 4 * 32, callback=Do(change))


def refused(rank, name):
    """Rank 1 has another setting; the model of rank 0 must be as it was."""
    settings = {
        "precision": {"precision": "paper"},
        "network": {"policy_kwargs": {"net_arch": [32]}},
        "n_steps": {"n_steps": 16},
        "schedule": {"learning_rate": 1e-5},
        "frozen": {},
        "total": {},
    }[name]
    model = make_model(**(settings if rank == 1 else {}))
    if name == "frozen" and rank == 1:
        model.policy.action_net.bias.requires_grad_(False)
    model.learn(4 * 32 + (name == "total") * rank)


def changed_settings(rank):
    """A callback of rank 1 changes a hyperparameter."""
    model = make_model()
    model.learn(4 * 4 * 32, callback=Do(lambda _: setattr(model, "n_epochs", 5 - 3 * rank)))


class Network(nn.Module):
    """A part of the features is used only by some samples' rank, another by none."""

    def __init__(self, features, rank):
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(features, 8) for _ in range(3))
        self.latent_dim_pi = self.latent_dim_vf = 8
        self.rank = rank

    def forward(self, features):
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features):
        return self.first(features) if self.rank == 0 else self.second(features)

    forward_critic = forward_actor


def parts_that_no_sample_uses(rank):
    """Gradients of a network of which each rank uses another part."""
    from stable_baselines3.common.policies import ActorCriticPolicy

    class Policy(ActorCriticPolicy):
        def _build_mlp_extractor(self):
            self.mlp_extractor = Network(self.features_dim, rank)

    model = PPOFP16(Policy, make_envs(2), **SETTINGS)
    model.learn(4 * 32)
    present = {name: p.grad is not None for name, p in model.policy.named_parameters()}
    return {"present": present, "state": state_of(model), "engine": model.engine.reason}


def stays_on_its_device(rank):
    """What a step reads from tensors."""
    model = make_model((3, 1)[rank])
    read, inside = [], []
    step = model.engine._step

    def watched(*args):
        inside.append(None)
        try:
            return step(*args)
        finally:
            inside.pop()

    model.engine._step = watched
    names = ("cpu", "numpy", "item", "tolist", "__bool__", "__float__", "__int__")
    originals = {name: getattr(th.Tensor, name) for name in names}
    try:
        for name, method in originals.items():

            def reading(tensor, *args, name=name, method=method, **kwargs):
                if inside:
                    read.append((name, tuple(tensor.shape)))
                return method(tensor, *args, **kwargs)

            setattr(th.Tensor, name, reading)
        model.learn(4 * 32)
    finally:
        for name, method in originals.items():
            setattr(th.Tensor, name, method)
    return {"read": read}


def output(rank):
    """Callbacks that only print, log or save."""
    calls, folder = [], FOLDER / "output"
    model = make_model(verbose=1, tensorboard_log=str(FOLDER / "logs"))
    evaluation = EvalCallback(make_vec_env(Toy), eval_freq=32, best_model_save_path=str(folder), log_path=str(folder))
    audits = AuditCallback(folder, minibatches=2)
    callbacks = [evaluation, audits, lambda *_: calls.append(None) is None]
    model.learn(2 * 4 * 32, callback=callbacks)
    return {"evaluated": len(evaluation.evaluations_timesteps), "audits": len(audits.audits), "calls": len(calls)}


class OwnBuffer(RolloutBufferFP16):
    def minibatch_rows(self):
        return np.arange(self.buffer_size * self.n_envs)


def own_buffer(rank):
    make_model(rollout_buffer_class=OwnBuffer).learn(4 * 32)


def on_devices(rank):
    """For two CUDA devices."""
    model = make_model((3, 1)[rank], device="auto")
    model.learn(3 * 4 * 32)
    state = state_of(model)
    devices = {str(p.device) for p in model.policy.parameters()}
    cpu = {"policy": {name: x.cpu() for name, x in state["policy"].items()}, "scales": state["scales"].cpu()}
    return {"state": cpu, "devices": devices, "backend": th.distributed.get_backend_config()}


def lost(rank, how):
    """Rank 1 is killed while it steps its environments or in an update, or hangs."""
    model = make_model()

    def die(*_):
        calls.append(None)
        if rank == 1 and len(calls) == 40:
            os.kill(os.getpid(), signal.SIGSTOP if how == "hangs" else signal.SIGKILL)

    calls = []
    if how == "update":
        watch(model.engine, "_losses", die)
    model.learn(9 * 4 * 32, callback=None if how == "update" else Do(die))


SCENARIOS = {
    **{f"identical {precision}": (identical, precision) for precision in PRECISIONS},
    **{f"against one {precision}": (against_one, precision) for precision in PRECISIONS},
    **{
        f"refused {name}": (refused, name)
        for name in ("precision", "network", "n_steps", "schedule", "frozen", "total")
    },
    **{
        function.__name__: (function,)
        for function in (
            not_finite,
            target_kl,
            save_and_load,
            takes_over,
            seeds,
            counting,
            stops,
            normalized,
            comes_apart,
            changed_settings,
            parts_that_no_sample_uses,
            stays_on_its_device,
            output,
            own_buffer,
        )
    },
}
ALONE = {"on_devices": (on_devices,), **{f"lost {how}": (lost, how) for how in ("rollout", "update", "hangs")}}


def main():
    global FOLDER
    parser = argparse.ArgumentParser()
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--timeout", type=float, default=60.0)
    arguments = parser.parse_args()
    FOLDER = arguments.folder
    th.set_num_threads(1)
    warnings.simplefilter("ignore")
    early = make_model(verbose=1)
    rank = distributed.init("auto" if "on_devices" in arguments.scenarios else "cpu", arguments.timeout)
    if any(name in ALONE for name in arguments.scenarios):
        function, *more = ALONE[arguments.scenarios[0]]
        found = {arguments.scenarios[0]: function(rank, *more)}
    else:
        found = {"early": made_before_the_ranks_met(rank, early)}
        for name in arguments.scenarios:
            function, *more = SCENARIOS[name]
            try:
                found[name] = function(rank, *more)
            except Exception as error:
                found[name] = error
    (FOLDER / f"rank{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
