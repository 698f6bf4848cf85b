"""
The CUDA kernels around the networks of an update, in the simulator: gather, advantages, losses.

Against float64 (the textbook's losses under torch's autograd), against the CPU engine's heads bit for bit, and against
what the eager engine calls.
"""

import ctypes
import subprocess
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_fp16.buffers import RolloutBufferFP16
from sb3_fp16.residuals import LOG_SQRT_2PI, GaussianBehaviour, categorical_log_ratio, gaussian_log_ratio
from sb3_fp16.rounding import FORMATS
from sb3_fp16.scalars import normalize_advantages
from tests import oracle

HERE = Path(__file__).parent
STORAGE = {"fp32": 0, "fp16": 1, "bf16": 2}
DTYPE = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
BITS = {"fp32": 23, "fp16": 10, "bf16": 7}
PAIRS = (("fp16", "fp16"), ("bf16", "bf16"), ("fp32", "fp32"), ("fp32", "fp16"), ("fp32", "bf16"))
GAUSSIAN, CATEGORICAL = 0, 1
ABSOLUTE, RESIDUAL, TWO_SUM = 0, 1, 2
LOGS = ("policy_loss", "value_loss", "entropy_loss", "clip_fraction", "approx_kl", "loss")

pointer, i64, i32, u64, f32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_uint64, ctypes.c_float


class StatisticsSettings(ctypes.Structure):
    _fields_ = [
        *((name, pointer) for name in ("advantages", "indices", "statistics")),
        *((name, i64) for name in ("samples", "batch_size", "epochs")),
        ("normalize", ctypes.c_bool),
        ("significand_bits", i32),
    ]


class GaeSettings(ctypes.Structure):
    _pointers = ("rewards", "values", "episode_starts", "advantages", "returns", "last_values", "last_continues")
    _fields_ = [
        *((name, pointer) for name in (*_pointers, "saturated")),
        *((name, i64) for name in ("steps", "envs")),
        *((name, f32) for name in ("gamma", "decay")),
        ("significand_bits", i32),
    ]


class LossSettings(ctypes.Structure):
    _rollout = ("actions", "advantages", "returns", "values", "behaviour", "correction", "old_log_prob", "statistics")
    _networks = ("outputs", "predictions", "policy_signal", "value_signal")
    _numbers = ("ent_coef", "vf_coef", "target_kl")
    _fields_ = [
        ("indices", pointer),
        ("count", i64),
        *((name, pointer) for name in (*_rollout, *_networks)),
        ("size", i64),
        *((name, pointer) for name in ("log_std", "log_std0", "log_std_gradient", "workspace", "choices")),
        ("heads", i64),
        *((name, pointer) for name in ("scales", "logs", "stopped")),
        *((name, i32) for name in ("networks", "log_ratio")),
        ("clip", pointer),
        *((name, f32) for name in _numbers),
        *((name, i32) for name in ("storage_bits", "compute_bits")),
    ]


class Rows(ctypes.Structure):
    _fields_ = [
        *((name, i64) for name in ("count", "size", "action_size")),
        *((name, pointer) for name in ("outputs", "actions", "behaviour", "old_log_prob", "log_std", "log_std0")),
        ("choices", pointer),
        ("heads", i64),
    ]


def address(array):
    assert array.flags.c_contiguous
    return array.ctypes.data


def build(name, folder):
    target = folder / f"{name}.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-psabi", "-Wno-attributes"]
    subprocess.run(["g++", *flags, str(HERE / f"{name}.cpp"), "-o", str(target), "-pthread"], check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    library = build("losses_simulated", tmp_path_factory.mktemp("losses"))
    for name, arguments in {
        "run_gather": (i32, pointer, pointer, pointer, i64, i64, u64),
        "run_statistics": (i32, pointer, i32, u64),
        "run_gae": (i32, pointer, u64),
        "run_losses": (i32, i32, i32, pointer, i32, u64),
    }.items():
        getattr(library, name).argtypes, getattr(library, name).restype = arguments, ctypes.c_char_p
    library.workspace_bytes.argtypes, library.workspace_bytes.restype = (i64, i64), i64
    library.threads_for.argtypes = (i64,)
    library.bytes_of_settings.restype = i64
    for which, kind in enumerate((StatisticsSettings, GaeSettings, LossSettings)):
        assert library.bytes_of_settings(which) == ctypes.sizeof(kind)
    return library


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    library = build("losses_on_cpu", tmp_path_factory.mktemp("losses"))
    library.evaluate_head.argtypes = (i32, i32, i32, pointer, pointer, f32, pointer)
    library.exponentials.argtypes = (pointer, pointer, i64, ctypes.c_bool)
    library.evaluate_head.restype = library.exponentials.restype = None
    return library


def check(error):
    if error is not None:
        raise RuntimeError(error.decode())


def stored(values, storage):
    """Rounded to a format."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(np.asarray(values, dtype=np.float32).astype(DTYPE[storage]))


def words(array):
    return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])


# Gather


@pytest.mark.parametrize("size", [1, 7, 8, 17, 24])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_rows_are_gathered(kernels, dtype, size):
    rng = np.random.default_rng(size)
    for count in (1, 63, 300):
        table = rng.integers(1, 2**16, (50, size)).astype(dtype)
        indices = rng.integers(0, 50, count)
        out = np.zeros((count + 1, size), dtype)
        check(kernels.run_gather(table.itemsize, address(table), address(indices), address(out), count, size, count))
        np.testing.assert_array_equal(out[:count], table[indices])
        assert not out[count:].any()


def test_rows_are_gathered_from_an_odd_address(kernels):
    memory = np.arange(1, 8 * 16 + 2, dtype=np.uint16)
    table, indices, out = memory[1:].reshape(16, 8), np.arange(15, -1, -1), np.zeros((16, 8), np.uint16)
    check(kernels.run_gather(2, address(table), address(indices), address(out), 16, 8, 1))
    np.testing.assert_array_equal(out, table[::-1])


# Advantages


def statistics_of(kernels, advantages, indices, batch_size, storage, normalize=True, threads=1024, seed=1):
    epochs, samples = indices.shape
    out = np.full((-(-samples // batch_size) * epochs, 2), np.nan, np.float32)
    settings = StatisticsSettings(
        address(advantages), address(indices), address(out), samples, batch_size, epochs, normalize, BITS[storage]
    )
    check(kernels.run_statistics(STORAGE[storage], ctypes.byref(settings), threads, seed))
    return out


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(("samples", "batch_size"), [(130, 64), (65, 64), (2, 2), (1025, 1025), (63, 100)])
def test_statistics_of_every_minibatch(kernels, storage, samples, batch_size):
    rng = np.random.default_rng(samples)
    advantages = stored(rng.normal(size=samples) * 3 + 20, storage)
    indices = np.stack([rng.permutation(samples) for _ in range(2)])
    found = statistics_of(kernels, advantages, indices, batch_size, storage)
    fewer = statistics_of(kernels, advantages, indices, batch_size, storage, threads=32 * 3, seed=2)
    np.testing.assert_allclose(fewer, found, rtol=3e-7)
    pieces = [epoch[i : i + batch_size] for epoch in indices for i in range(0, samples, batch_size)]
    assert len(pieces) == len(found)
    for piece, (mean, deviation) in zip(pieces, found, strict=True):
        exact = advantages[piece].astype(np.float64)
        if len(piece) == 1:
            assert (mean, deviation) == (0, 1)
            continue
        assert mean == pytest.approx(exact.mean(), rel=6e-8)
        assert deviation == pytest.approx(exact.std(ddof=1) + 1e-8, rel=1e-6)
        values = th.from_numpy(advantages[piece].astype(np.float32))
        ours = (values - mean) / deviation
        th.testing.assert_close(ours, normalize_advantages(values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("storage", STORAGE)
def test_equal_advantages_become_zero(kernels, storage):
    advantages = stored(np.full(1000, 0.1), storage)
    (mean, deviation), *_ = statistics_of(kernels, advantages, np.arange(1000)[None], 1000, storage)
    assert mean == advantages[0]
    assert deviation == np.float32(1e-8)


def test_advantages_stay_as_they_are_if_asked(kernels):
    advantages = stored(np.arange(10), "fp16")
    found = statistics_of(kernels, advantages, np.arange(10)[None], 4, "fp16", normalize=False)
    assert found.tolist() == [[0, 1]] * 3


def run_gae(kernels, storage, rewards, values, starts, last_values, last_continues, gamma, lam, seed=1):
    steps, envs = rewards.shape
    advantages, returns = (np.zeros((steps, envs), DTYPE[storage]) for _ in range(2))
    saturated = np.array([5], dtype=np.uint64)
    arrays = (rewards, values, starts, advantages, returns, last_values, last_continues, saturated)
    settings = GaeSettings(*map(address, arrays), steps, envs, gamma, gamma * lam, BITS[storage])
    check(kernels.run_gae(STORAGE[storage], ctypes.byref(settings), seed))
    return advantages, returns, int(saturated[0]) - 5


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("envs", [1, 3, 257])
def test_gae_is_the_buffers_and_close_to_explicit_sums(kernels, storage, envs):
    rng, steps, gamma, lam = np.random.default_rng(envs), 29, 0.97, 0.9
    scale = 1e4 if storage == "fp16" else 1.0  # some saturate
    box = spaces.Box(-1, 1, (1,))
    buffer = RolloutBufferFP16(steps, box, box, "cpu", lam, gamma, envs, precision=storage)
    buffer.rewards[:] = stored(rng.normal(size=(steps, envs)) * scale, storage)
    buffer.values[:] = stored(rng.normal(size=(steps, envs)) * scale, storage)
    buffer.episode_starts[:] = rng.random((steps, envs)) < 0.15
    last_values, dones = rng.normal(size=envs).astype(np.float32), rng.random(envs) < 0.5
    starts, continues = buffer.episode_starts.astype(np.uint8), 1 - dones.astype(np.float32)
    arrays = (buffer.rewards, buffer.values, starts, last_values, continues)
    advantages, returns, saturated = run_gae(kernels, storage, *arrays, gamma, lam)

    buffer.compute_returns_and_advantage(th.from_numpy(last_values), dones)
    np.testing.assert_array_equal(words(advantages), words(buffer.advantages))
    np.testing.assert_array_equal(words(returns), words(buffer.returns))
    assert saturated == buffer.saturated["returns"]
    assert saturated > 0 or storage != "fp16" or envs < 257

    rewards, values = buffer.rewards.astype(np.float64), buffer.values.astype(np.float64)
    largest = oracle.FORMATS[storage][2]
    for e in range(min(envs, 3)):
        exact = oracle.gae(rewards[:, e], values[:, e], starts[:, e], float(last_values[e]), dones[e], gamma, lam)
        inside = np.clip(exact, -largest, largest)
        tolerance = 0.501 * oracle.tick(inside, storage) + 1e-6 * np.abs(exact).max()
        assert (np.abs(advantages[:, e].astype(np.float64) - inside) <= tolerance).all()


def test_gae_counts_what_rounds_beyond_the_range(kernels):
    """65519 rounds to the largest number of FP16; 65520 does not."""
    rewards, zeros = stored([[65504.0, 65504.0]], "fp16"), stored([[0.0, 0.0]], "fp16")
    last_values = np.array([15.0, 16.0], np.float32)
    starts, continues = np.zeros((1, 2), np.uint8), np.ones(2, np.float32)
    found = run_gae(kernels, "fp16", rewards, zeros, starts, last_values, continues, 1.0, 1.0)
    assert (found[0] == 65504).all()
    assert found[2] == 2  # the advantage and the return of one environment


# Losses


class Minibatch:
    """A random minibatch, the kernel's answers to it, and everything an independent computation needs."""

    def __init__(self, head, storage, compute, count, size, seed=0, choices=None, near=0.05, log_ratio=RESIDUAL):
        rng = np.random.default_rng([seed, count, size])
        self.head, self.storage, self.compute, self.count, self.log_ratio = head, storage, compute, count, log_ratio
        self.choices = np.array([1] if choices is None else choices, dtype=np.int64)
        self.size = size if head == GAUSSIAN else int(self.choices.sum())
        rows = count + 5
        self.indices = rng.permutation(rows)[:count]
        r = partial(stored, storage=storage)
        self.log_std0 = r(rng.normal(size=self.size) * 0.3 - 0.5)
        self.log_std = r(self.log_std0.astype(np.float32) + rng.normal(size=self.size) * near * 0.3)
        self.behaviour = r(rng.normal(size=(rows, self.size)))
        if head == GAUSSIAN:
            noise = rng.normal(size=(rows, self.size)) * np.exp(self.log_std0.astype(np.float32))
            self.actions = r(self.behaviour.astype(np.float32) + noise)
        else:
            picks = [rng.integers(0, n, rows) for n in self.choices]
            self.actions = np.ascontiguousarray(np.stack(picks, 1).astype(np.float32))
        moved = self.behaviour[self.indices].astype(np.float32) + rng.normal(size=(count, self.size)) * near
        self.outputs = stored(moved, compute)
        self.advantages, self.returns = r(rng.normal(size=rows) * 2), r(rng.normal(size=rows) * 3)
        self.values = r(rng.normal(size=rows) * 3)
        self.predictions = stored(self.values[self.indices].astype(np.float32) + rng.normal(size=count) * 0.3, compute)
        self.correction = r(rng.normal(size=rows) * 0.01)
        self.old_log_prob = (rng.normal(size=rows) * near - 1).astype(np.float32)
        if log_ratio == ABSOLUTE:
            self.set_old_log_prob()
        self.statistics = np.array([0.125, 1.75], np.float32)
        self.scales = np.array([64.0, 16.0], np.float32)
        self.settings = {
            "clip_range": 0.2,
            "clip_range_vf": -1.0,
            "ent_coef": 0.0,
            "vf_coef": 0.5,
            "target_kl": -1.0,
            "networks": 2,
        }
        self.clear()

    def set_old_log_prob(self):
        """Of the behaviour policy, but for storage's rounding."""
        actions, outputs = self.actions, self.behaviour.astype(np.float64)
        if self.head == GAUSSIAN:
            exact = oracle.gaussian_log_prob(actions.astype(np.float64), outputs, self.log_std0.astype(np.float64))
        else:
            ends = np.cumsum(self.choices)
            heads = enumerate(np.split(outputs, ends[:-1], axis=1))
            exact = sum(oracle.categorical_log_prob(actions[:, h].astype(int), logits) for h, logits in heads)
        self.old_log_prob = exact.astype(np.float32)

    def clear(self):
        self.policy_signal = np.full((self.count, self.size), 77, DTYPE[self.compute])
        self.value_signal = np.full(self.count, 77, DTYPE[self.compute])
        self.log_std_gradient = np.full(self.size, 77, DTYPE[self.storage])
        self.row = np.full(7, 77, np.float32)
        self.stopped = np.zeros(1, bool)

    def run(self, kernels, seed=1, threads=None):
        room = np.full(kernels.workspace_bytes(self.count, self.size), 0xFF, np.uint8)
        absolute, of = self.log_ratio == ABSOLUTE, self.settings
        lower = np.log1p(-of["clip_range"]) if of["clip_range"] < 1 else -np.inf
        clip = np.array([lower, np.log1p(of["clip_range"]), of["clip_range_vf"]], np.float32)
        given = {
            "count": self.count,
            "size": self.size,
            "heads": len(self.choices),
            "workspace": address(room),
            "logs": address(self.row),
            "behaviour": None if absolute else address(self.behaviour),
            "correction": None if self.correction is None else address(self.correction),
            "old_log_prob": address(self.old_log_prob) if absolute else None,
            "log_ratio": self.log_ratio,
            "clip": address(clip),
            "storage_bits": BITS[self.storage],
            "compute_bits": BITS[self.compute],
        }
        names = "indices actions advantages returns values statistics outputs predictions policy_signal value_signal"
        names += " log_std log_std0 log_std_gradient choices scales stopped"
        given |= {name: address(getattr(self, name)) for name in names.split()}
        given["log_std0"] = None if absolute else given["log_std0"]
        given |= {name: value for name, value in of.items() if not name.startswith("clip")}
        formats = (self.head, STORAGE[self.storage], STORAGE[self.compute])
        threads = threads or kernels.threads_for(self.count)
        check(kernels.run_losses(*formats, ctypes.byref(LossSettings(**given)), threads, seed))
        assert self.row[6] == 77
        return self

    @property
    def logs(self):
        return dict(zip(LOGS, self.row.tolist(), strict=False))

    def of_rollout(self, name):
        """The minibatch's rows in float64."""
        return th.from_numpy(getattr(self, name)[self.indices].astype(np.float64))

    def log_prob_and_entropy(self, outputs, log_std, actions):
        if self.head == GAUSSIAN:
            z = (actions - outputs) / log_std.exp()
            return (-(z**2) / 2 - log_std - LOG_SQRT_2PI).sum(1), (log_std + 0.5 + LOG_SQRT_2PI).sum().expand(
                self.count
            )
        log_prob = entropy = th.zeros(self.count, dtype=th.float64)
        for h, logits in enumerate(outputs.split(self.choices.tolist(), 1)):
            log_p = logits.log_softmax(1)
            log_prob = log_prob + log_p.gather(1, actions[:, h : h + 1].long()).squeeze(1)
            entropy = entropy - (log_p.exp() * th.where(logits.isneginf(), 0.0, log_p)).sum(1)
        return log_prob, entropy

    def expected(self):
        """The losses of PPO's textbook form and, by autograd, their gradients, in float64."""
        of = self.settings
        leaves = [x.astype(np.float64) for x in (self.outputs, self.predictions, self.log_std)]
        outputs, values, log_std = (th.from_numpy(x).requires_grad_() for x in leaves)
        actions = self.of_rollout("actions")
        log_prob, entropy = self.log_prob_and_entropy(outputs, log_std, actions)
        if self.log_ratio == ABSOLUTE:
            old = self.of_rollout("old_log_prob")
        else:
            log_std0 = th.from_numpy(self.log_std0.astype(np.float64))
            old, _ = self.log_prob_and_entropy(self.of_rollout("behaviour"), log_std0, actions)
        d = log_prob - old - (0 if self.correction is None else self.of_rollout("correction"))
        mean, deviation = self.statistics.astype(np.float64)
        advantages, ratio, clip = (self.of_rollout("advantages") - mean) / deviation, d.exp(), of["clip_range"]
        policy = -th.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()
        predicted, old_values, limit = values, self.of_rollout("values"), of["clip_range_vf"]
        if limit >= 0:
            predicted = old_values + (values - old_values).clamp(-limit, limit)
        value = ((predicted - self.of_rollout("returns")) ** 2).mean()
        policy_side = policy - of["ent_coef"] * entropy.mean()
        value_side = of["vf_coef"] * value
        scales = self.scales.astype(np.float64)
        (scales[0] * policy_side + scales[of["networks"] - 1] * value_side).backward()
        logs = (policy, value, -entropy.mean(), ((ratio - 1).abs() > clip).double().mean(), (d.expm1() - d).mean())
        with_loss = dict(zip(LOGS, [x.item() for x in (*logs, policy_side + value_side)], strict=True))
        gradients = (None if x.grad is None else x.grad.numpy() for x in (outputs, values, log_std))
        return with_loss, *gradients

    def check(self, accuracy=3e-6):
        logs, of_outputs, of_values, of_log_std = self.expected()
        for name, exact in logs.items():
            assert self.logs[name] == pytest.approx(exact, rel=1e-5, abs=1e-6), name
        close(self.policy_signal, of_outputs, self.compute, accuracy)
        close(self.value_signal, of_values, self.compute, accuracy)
        if self.head == GAUSSIAN:
            close(self.log_std_gradient, of_log_std, self.storage, accuracy)
        else:
            assert (self.log_std_gradient == 77).all()
        assert not self.stopped[0]
        return self


def close(found, exact, storage, accuracy):
    """Rounded once, from numbers of FP32 accuracy."""
    tolerance = 0.5 * oracle.tick(exact, storage) + accuracy * max(np.abs(exact).max(), 0.1)
    assert np.isfinite(exact).all()
    assert (np.abs(found.astype(np.float64) - exact) <= tolerance).all()


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 1025])
@pytest.mark.parametrize("dims", [1, 3, 17])
def test_gaussian_losses(kernels, count, dims):
    for i, (storage, compute) in enumerate(PAIRS):
        batch = Minibatch(GAUSSIAN, storage, compute, count, dims, seed=i)
        batch.settings["ent_coef"] = 0.01 * i
        batch.settings["clip_range_vf"] = 0.2 if i % 2 else -1.0
        batch.run(kernels, seed=i).check()


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 1025])
@pytest.mark.parametrize("choices", [(2,), (3,), (7,), (3, 2, 5)], ids=str)
def test_categorical_losses(kernels, count, choices):
    for i, (storage, compute) in enumerate(PAIRS):
        batch = Minibatch(CATEGORICAL, storage, compute, count, 0, seed=i, choices=choices, near=0.1)
        batch.settings["ent_coef"] = 0.01 * i
        batch.settings["clip_range_vf"] = 0.2 if i % 2 else -1.0
        batch.run(kernels, seed=i).check()


@pytest.mark.parametrize(("head", "choices"), [(GAUSSIAN, None), (CATEGORICAL, (3, 4))])
@pytest.mark.parametrize("near", [0.0, 0.02, 0.5])
def test_absolute_log_ratios(kernels, head, choices, near):
    batch = Minibatch(head, "fp32", "fp32", 130, 3, choices=choices, near=near, log_ratio=ABSOLUTE)
    batch.correction = None
    batch.run(kernels).check(accuracy=1e-5)


@pytest.mark.parametrize("head", [GAUSSIAN, CATEGORICAL])
@pytest.mark.parametrize("clip_range", [0.05, 0.5, 1.5])
def test_far_policies_are_clipped(kernels, head, clip_range):
    """Ratios on both sides of the bounds, for both signs of the advantage; from 1 on there is no lower one."""
    batch = Minibatch(head, "fp32", "fp32", 300, 3, choices=(2, 4), near=0.4)
    batch.settings["clip_range"], batch.settings["ent_coef"] = clip_range, 0.02
    batch.run(kernels).check(accuracy=1e-5)
    assert 0 < batch.logs["clip_fraction"] < 1
    assert (batch.policy_signal == 0).all(1).any() == (head == GAUSSIAN)


def test_an_unchanged_policy_has_ratio_1_exactly(kernels):
    for head, choices in ((GAUSSIAN, None), (CATEGORICAL, (3, 2))):
        for log_ratio in (RESIDUAL, TWO_SUM):
            batch = Minibatch(head, "fp16", "fp16", 65, 3, choices=choices, near=0.0, log_ratio=log_ratio)
            batch.correction = None
            batch.run(kernels)
            assert (batch.logs["approx_kl"], batch.logs["clip_fraction"]) == (0, 0)


def test_masked_choices(kernels):
    """Logits of −inf, where the behaviour policy had them too, change nothing and get no gradient."""
    for storage in ("fp32", "fp16"):
        batch = Minibatch(CATEGORICAL, storage, storage, 65, 0, choices=(4, 3), near=0.2)
        batch.settings["ent_coef"] = 0.03
        masked = np.array([False, True, False, False, True, False, False])
        batch.actions[batch.actions[:, 0] == 1, 0] = 2
        batch.actions[batch.actions[:, 1] == 0, 1] = 1
        batch.behaviour[:, masked] = batch.outputs[:, masked] = -np.inf
        batch.run(kernels).check(accuracy=1e-5)
        assert (batch.policy_signal[:, masked] == 0).all()


def test_an_action_whose_probability_explodes_keeps_its_ratio(kernels):
    """Logit changes beyond 10, where the sum of expm1 terms would have lost everything."""
    batch = Minibatch(CATEGORICAL, "fp32", "fp32", 64, 0, choices=(3,))
    batch.behaviour *= 10
    batch.advantages[:] = -np.abs(batch.advantages) - 1  # nothing bounds the ratio from above
    batch.correction = None
    batch.run(kernels)
    logs, of_outputs, *_ = batch.expected()
    assert logs["approx_kl"] > 100
    assert batch.logs["policy_loss"] == pytest.approx(logs["policy_loss"], rel=1e-4)
    close(batch.policy_signal, of_outputs, "fp32", 1e-4)


def test_an_infinite_ratio_is_capped(kernels):
    """Of a Gaussian with a negative advantage: e^80 instead."""
    batch = Minibatch(GAUSSIAN, "fp32", "fp32", 1, 1)
    batch.advantages[:], batch.actions[:], batch.behaviour[:], batch.outputs[:] = -1, 50, 0, 50
    batch.log_std[:] = batch.log_std0[:] = 0
    batch.statistics[:] = 0, 1
    batch.run(kernels)
    assert batch.logs["policy_loss"] == pytest.approx(np.exp(80.0), rel=1e-5)
    assert batch.logs["clip_fraction"] == 1
    assert batch.policy_signal[0, 0] == 0


@pytest.mark.parametrize("networks", [1, 2])
def test_one_or_two_scales(kernels, networks):
    batch = Minibatch(GAUSSIAN, "fp16", "fp16", 64, 3)
    batch.settings["networks"] = networks
    batch.run(kernels).check()


def test_gradients_beyond_the_range_are_infinite(kernels):
    batch = Minibatch(GAUSSIAN, "fp16", "fp16", 64, 2)
    batch.scales[:] = 2.0**30
    batch.run(kernels)
    for gradient in (batch.policy_signal, batch.value_signal, batch.log_std_gradient):
        assert np.isinf(gradient.astype(np.float32)).any()


def test_nan_reaches_the_gradients(kernels):
    for head in (GAUSSIAN, CATEGORICAL):
        batch = Minibatch(head, "fp16", "fp16", 64, 2, choices=(2,))
        batch.outputs[7], batch.predictions[9] = np.nan, np.nan
        batch.run(kernels)
        assert np.isnan(batch.policy_signal[7].astype(np.float32)).all()
        assert np.isfinite(np.delete(batch.policy_signal, 7, 0).astype(np.float32)).all()
        assert np.isnan(batch.value_signal.astype(np.float32)).nonzero()[0].tolist() == [9]
        assert np.isnan(batch.logs["loss"])
        assert head == CATEGORICAL or np.isnan(batch.log_std_gradient.astype(np.float32)).all()


def test_the_kl_estimate_stops_the_update(kernels):
    for head in (GAUSSIAN, CATEGORICAL):
        batch = Minibatch(head, "fp16", "fp16", 64, 2, choices=(2, 3), near=0.3)
        kl = batch.run(kernels).logs["approx_kl"]
        assert not batch.stopped[0]
        for factor, stops in ((0.99, True), (1.01, False)):
            batch.clear()
            batch.settings["target_kl"] = kl / 1.5 * factor
            assert batch.run(kernels).stopped[0] == stops
            assert batch.logs["approx_kl"] == kl

        batch.clear()
        batch.stopped[:] = True
        batch.run(kernels)
        assert np.isnan(batch.row[: len(LOGS)]).all()
        assert (batch.policy_signal == 77).all()
        assert (batch.value_signal == 77).all()
        assert (batch.log_std_gradient == 77).all()


@pytest.mark.parametrize(("head", "choices"), [(GAUSSIAN, None), (CATEGORICAL, (3, 4))])
def test_neither_threads_nor_their_order_change_a_bit(kernels, head, choices):
    found = []
    for seed, threads in ((0, None), (3, None), (4, 1024)):
        batch = Minibatch(head, "fp32", "fp32", 70, 5, choices=choices)
        batch.run(kernels, seed, threads)
        found.append(
            [x.tobytes() for x in (batch.row, batch.policy_signal, batch.value_signal, batch.log_std_gradient)]
        )
    assert found[0] == found[1] == found[2]


def rows_of(batch):
    """For the CPU engine: a structure, and the arrays that it points to."""
    fp32 = {"outputs": batch.outputs.astype(np.float32)}
    for name in ("actions", "behaviour", "old_log_prob"):
        fp32[name] = np.ascontiguousarray(getattr(batch, name)[batch.indices].astype(np.float32))
    padding = np.zeros(16, np.float32)
    for name in ("log_std", "log_std0"):
        fp32[name] = np.concatenate([getattr(batch, name).astype(np.float32), padding])
    choices = None if batch.head == GAUSSIAN else address(batch.choices)
    addresses = {name: address(array) for name, array in fp32.items()}
    sizes = (batch.count, batch.size, fp32["actions"].shape[1])
    return Rows(*sizes, **addresses, choices=choices, heads=len(batch.choices)), fp32


def exponential(on_cpu, x, minus_1=False):
    x = np.ascontiguousarray(x, np.float32)
    result = np.empty_like(x)
    on_cpu.exponentials(address(x), address(result), x.size, minus_1)
    return result


def signals_on_cpu(on_cpu, batch):
    """The policy's signals in FP32, and d: cpu/heads.inl between the lines of cpu/update.inl, policy_loss."""
    rows, _alive = rows_of(batch)
    evaluate = partial(on_cpu.evaluate_head, STORAGE[batch.storage], batch.head, batch.log_ratio, ctypes.byref(rows))
    d, signal = np.empty(batch.count, np.float32), np.empty((batch.count, batch.size), np.float32)
    evaluate(None, 0.0, address(d))
    d -= batch.correction[batch.indices].astype(np.float32)
    mean, deviation = batch.statistics
    advantages = (batch.advantages[batch.indices].astype(np.float32) - mean) / deviation
    clip = np.float32(batch.settings["clip_range"])
    lower = np.where(advantages >= 0, np.float32(-np.inf), np.float32(np.log1p(-clip)))
    upper = np.minimum(np.where(advantages >= 0, np.float32(np.log1p(clip)), np.float32(np.inf)), np.float32(80))
    gain = advantages * exponential(on_cpu, np.minimum(upper, np.maximum(lower, d)))
    scale = batch.scales[0] / np.float32(batch.count)
    slopes = np.where((d < lower) | (d > upper), np.float32(0), -gain * scale)
    evaluate(address(slopes), -np.float32(batch.settings["ent_coef"]) * scale, address(signal))
    return signal, d


@pytest.mark.parametrize(("storage", "compute"), PAIRS)
@pytest.mark.parametrize("log_ratio", [ABSOLUTE, RESIDUAL, TWO_SUM], ids=["absolute", "residual", "two-sum"])
@pytest.mark.parametrize(("head", "choices"), [(GAUSSIAN, None), (CATEGORICAL, (3, 4))])
def test_signals_have_the_cpu_engines_bits(kernels, on_cpu, head, choices, log_ratio, storage, compute):
    for near in (0.01, 0.2, 30.0):
        batch = Minibatch(head, storage, compute, 65, 5, choices=choices, near=near, log_ratio=log_ratio)
        batch.settings["ent_coef"] = 0.01
        batch.run(kernels)
        signal, d = signals_on_cpu(on_cpu, batch)
        np.testing.assert_array_equal(words(batch.policy_signal), words(stored(signal, compute)))
        estimate = (exponential(on_cpu, d, minus_1=True) - d).astype(np.float64).mean()
        assert batch.logs["approx_kl"] == pytest.approx(estimate, rel=1e-6)


@pytest.mark.parametrize("storage", ["fp16", "bf16"])
def test_two_sum_falls_back_where_the_format_overflows(kernels, on_cpu, storage):
    """z₀ = 3 and Δl = −8 make ½Δz² infinite in FP16."""
    batch = Minibatch(GAUSSIAN, storage, storage, 4, 1, log_ratio=TWO_SUM)
    batch.behaviour[:], batch.actions[:], batch.outputs[:] = 0, 3, 0
    batch.log_std0[:], batch.log_std[:], batch.correction[:] = 0, -8, 0
    batch.run(kernels)
    _, d = signals_on_cpu(on_cpu, batch)
    assert np.isfinite(d).all()
    exact = 8 - 4.5 * (np.exp(16.0) - 1)
    assert batch.logs["approx_kl"] == pytest.approx(-1 - exact, rel=2e-2 if storage == "bf16" else 1e-5)


# d as torch's side of the package has it: read from the surrogate of one sample at a time.


def log_ratios(kernels, batch):
    batch.settings["clip_range"], batch.correction = 100.0, None
    batch.statistics[:], batch.advantages[:] = (0, 1), -1
    found, indices, outputs = np.empty(batch.count), batch.indices, batch.outputs
    for i in range(batch.count):
        batch.indices, batch.outputs, all_of = indices[i : i + 1].copy(), outputs[i : i + 1].copy(), batch.count
        batch.count = 1
        found[i] = np.log(batch.run(kernels).logs["policy_loss"])
        batch.count = all_of
    batch.indices, batch.outputs = indices, outputs
    return found


@pytest.mark.parametrize(
    ("storage", "log_ratio"),
    [("fp16", RESIDUAL), ("bf16", RESIDUAL), ("fp32", RESIDUAL), ("fp16", TWO_SUM), ("bf16", TWO_SUM)],
)
def test_gaussian_log_ratios_are_torchs(kernels, storage, log_ratio):
    batch = Minibatch(GAUSSIAN, storage, storage, 40, 3, near=0.05, log_ratio=log_ratio)
    found = log_ratios(kernels, batch)
    outputs, actions, mean0 = (
        th.from_numpy(x.astype(np.float32))
        for x in (batch.outputs, batch.actions[batch.indices], batch.behaviour[batch.indices])
    )
    log_std, log_std0 = (th.from_numpy(x.astype(np.float32)) for x in (batch.log_std, batch.log_std0))
    two_sum = FORMATS[storage] if log_ratio == TWO_SUM else None
    expected = gaussian_log_ratio(outputs, log_std, actions, GaussianBehaviour(mean0, log_std0), two_sum).numpy()
    off = np.abs(found - expected)
    assert off.max() < 3e-7 + 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("near", [0.05, 15.0])
def test_categorical_log_ratios_are_torchs(kernels, near):
    batch = Minibatch(CATEGORICAL, "fp32", "fp32", 40, 0, choices=(5,), near=near)
    found = log_ratios(kernels, batch)
    actions = th.from_numpy(batch.actions[batch.indices, 0])
    logits, logits0 = th.from_numpy(batch.outputs), th.from_numpy(batch.behaviour[batch.indices])
    expected = categorical_log_ratio(logits, actions, logits0).numpy()
    assert np.abs(found - np.maximum(expected, -85)).max() < 3e-7 + 2e-6 * np.abs(expected).max()
