"""
Fine-tuning at a learning rate so small that 16-bit copies of the weights stick, and what helps.

The task has the form of reinforcement learning from verifiable rewards: one question, one answer, a reward of 1 if it
is right and 0 if not. A policy is trained in FP32 on one rule for right answers, then fine-tuned on a similar one by
each method from the same weights, with the same seeds. Half a BF16 tick at the median weight is 61 learning rates, as
in the worked example of "BF16 vs FP16 in RL post-training", or 122. Run by ``python -m benchmarks.sticking``.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor
from torch.distributions import Categorical

from benchmarks.runner import RESULTS, pyplot, versions
from benchmarks.runs import Workers, run_missing
from benchmarks.timing import Array, Row
from sb3_fp16 import PPOFP16
from sb3_fp16.layers import LayerRule
from sb3_fp16.precision import Precision
from sb3_fp16.rounding import FORMATS

FILE = RESULTS / "sticking_remedies.csv"
QUESTIONS, NUMBERS, ANSWERS = 64, 16, 8
LAYERS, WIDTH = 8, 256
ITERATIONS, EVERY = 200, 5
PRETRAINING_LEARNING_RATE, PRETRAINED_REWARD = 1e-4, 0.5
SHARE = 0.5
"""Of what FP32 gains in a run: where iterations and drift are compared, at equal reward."""
EXAMINED = 1024
"""Fixed questions at which reward and KL divergence are computed from the probabilities of all answers."""


class Method(NamedTuple):
    """
    What is compared.

    :param name: in tables
    :param precision: preset of PPOFP16
    :param factor: of the setting's learning rate
    """

    name: str
    precision: str
    factor: float = 1.0


class Setting(NamedTuple):
    """
    Where methods are compared.

    :param name: in tables
    :param storage: format that the trained policy is saved in before it is fine-tuned; language models are distributed
        in BF16, so that their FP32 weights start on its ticks
    :param learning_rate: of Adam
    """

    name: str
    storage: str
    learning_rate: float


METHODS = {
    "fp32": Method("FP32", "fp32"),
    "amp-bf16": Method("BF16 copies", "amp-bf16"),
    "amp-fp16": Method("FP16 copies", "amp-fp16"),
    "amp-bf16-lr": Method("BF16 copies, twice the learning rate", "amp-bf16", 2.0),
    "amp-bf16-sr": Method("BF16 copies, stochastic", "amp-bf16-sr"),
}
SETTINGS = {
    "on-ticks": Setting("on BF16 ticks", "bf16", 2e-6),
    "between-ticks": Setting("between ticks", "fp32", 2e-6),
    "slow": Setting("on BF16 ticks, half the learning rate", "bf16", 1e-6),
}
SEEDS = tuple(range(6))
STUDENT_T = 2.571
"""97.5 % quantile with one degree of freedom less than there are seeds."""


class Questions(VecEnv):
    """
    Independent questions, each an episode of one step.

    A question is NUMBERS normal numbers; the right answer is the one to which a linear rule gives the highest score.

    :param rule: scores' weights and, in the last row, offsets; shape (NUMBERS + 1, ANSWERS)
    :param seed: of the questions
    """

    def __init__(self, rule: Array, seed: int) -> None:
        observations = spaces.Box(-np.inf, np.inf, (NUMBERS,), np.float32)
        super().__init__(QUESTIONS, observations, spaces.Discrete(ANSWERS))
        self.rule, self.random = rule, np.random.default_rng(seed)

    def reset(self) -> Array:
        """New questions, FP32, shape (QUESTIONS, NUMBERS)."""
        self.asked = questions(self.random, QUESTIONS)
        return self.asked

    def step_async(self, actions: Array) -> None:
        """Take the answers, shape (QUESTIONS,)."""
        self.answers = actions

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:
        """Mark the answers and ask anew."""
        rewards = (self.answers == right_answers(self.rule, self.asked)).astype(np.float32)
        return self.reset(), rewards, np.ones(QUESTIONS, bool), [{} for _ in range(QUESTIONS)]

    def close(self) -> None:
        """Nothing is open."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The same of every question."""
        return [getattr(self, attr_name, None)] * QUESTIONS

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Nothing can be set."""
        raise AttributeError(f"Questions have no attribute {attr_name} to set.")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Questions have no methods."""
        raise AttributeError(f"Questions have no method {method_name}.")

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """No question is."""
        return [False] * QUESTIONS


def questions(random: np.random.Generator, count: int) -> Array:
    """
    Draw questions.

    :param random: that they are drawn from
    :param count: how many
    :return: FP32, shape (count, NUMBERS)
    """
    return random.normal(size=(count, NUMBERS)).astype(np.float32)


def right_answers(rule: Array, asked: Array) -> Array:
    """
    Answers that are rewarded.

    :param rule: shape (NUMBERS + 1, ANSWERS)
    :param asked: shape (questions, NUMBERS)
    :return: int64, shape (questions,)
    """
    answers: Array = (asked @ rule[:-1] + rule[-1]).argmax(axis=1)
    return answers


def rules(seed: int) -> tuple[Array, Array]:
    """
    What is right in training, and in fine-tuning: there some answers are right more often than others.

    :param seed: of the rules
    """
    random = np.random.default_rng(seed)
    rule, offsets = random.normal(size=(NUMBERS + 1, ANSWERS)), random.normal(size=ANSWERS) * NUMBERS**0.5 / 2
    rule[-1] = 0
    return rule, np.concatenate([rule[:-1], offsets[None]])


def learner(precision: str, learning_rate: float, rule: Array, seed: int) -> PPOFP16:
    """
    An untrained model that takes four optimizer steps per iteration.

    :param precision: preset
    :param learning_rate: of Adam
    :param rule: what is right
    :param seed: of weights, questions and answers
    """
    return PPOFP16(
        "MlpPolicy",
        Questions(rule, seed),
        learning_rate=learning_rate,
        n_steps=1,
        batch_size=QUESTIONS // 4,
        n_epochs=1,
        policy_kwargs={"net_arch": {"pi": [WIDTH] * LAYERS, "vf": [64]}},
        seed=seed,
        device="cpu",
        precision=precision,
    )


@th.no_grad()
def answer_probabilities(model: PPOFP16, asked: Array) -> Tensor:
    """
    Of all answers, as the model's layers compute them.

    :param model: in any precision
    :param asked: shape (questions, NUMBERS)
    :return: FP64, shape (questions, ANSWERS)
    """
    model.policy.set_training_mode(False)
    distribution = cast(Categorical, model.policy.get_distribution(th.as_tensor(asked)).distribution)
    return distribution.logits.double().softmax(dim=1)


def mean_reward(probabilities: Tensor, rule: Array, asked: Array) -> float:
    """
    Expected reward, without the noise of sampled answers.

    :param probabilities: shape (questions, ANSWERS)
    :param rule: what is right
    :param asked: shape (questions, NUMBERS)
    """
    right = th.as_tensor(right_answers(rule, asked))
    return float(probabilities.gather(1, right[:, None]).mean())


@cache
def trained_weights(seed: int) -> dict[str, Tensor]:
    """
    FP32 weights of a policy that has learned the first rule up to PRETRAINED_REWARD.

    :param seed: of the run
    """
    rule = rules(seed)[0]
    model = learner("fp32", PRETRAINING_LEARNING_RATE, rule, seed)
    asked = questions(np.random.default_rng(seed), EXAMINED)
    while mean_reward(answer_probabilities(model, asked), rule, asked) < PRETRAINED_REWARD:
        model.learn(20 * QUESTIONS, reset_num_timesteps=False)
    return cast(dict[str, Tensor], model.policy.state_dict())


class Watch(BaseCallback):
    """
    What fine-tuning does to a policy's copies of its weights, to its rewards and to its distance from the start.

    :param rule: what is right
    :param asked: shape (questions, NUMBERS)
    """

    def __init__(self, rule: Array, asked: Array) -> None:
        super().__init__()
        self.rule, self.asked = rule, asked
        self.moved: list[float] = []
        self.stuck: list[float] = []
        self.net_steps: list[float] = []
        self.followed: list[float] = []
        self.curve: list[tuple[int, float, float]] = []
        self.skipped = 0

    def _on_training_start(self) -> None:
        self.weights, self.copies = self._look()
        self.first = self.weights, self.copies
        self.start = answer_probabilities(cast(PPOFP16, self.model), self.asked)
        self._examine()

    def _look(self) -> tuple[Tensor, Tensor]:
        """All weight matrices of the policy network, and the copies that its layers multiply with."""
        model = cast(PPOFP16, self.model)
        rule = copies_rule(model.precision)
        layers = [p.detach() for p in model.policy.mlp_extractor.policy_net.parameters() if p.ndim == 2]
        return (
            th.cat([layer.flatten() for layer in layers]),
            th.cat([rule.parameter(layer).flatten() for layer in layers]),
        )

    def _examine(self) -> None:
        p = answer_probabilities(cast(PPOFP16, self.model), self.asked)
        drift = float((p * (p.log() - self.start.log())).sum(dim=1).mean())
        self.curve.append((len(self.moved), mean_reward(p, self.rule, self.asked), drift))

    def _on_rollout_start(self) -> None:
        if self.num_timesteps > 0:
            self._after_update()

    def _on_training_end(self) -> None:
        self._after_update()

    def _after_update(self) -> None:
        model = cast(PPOFP16, self.model)
        weights, copies = self._look()
        updated, moved = weights != self.weights, copies != self.copies
        self.moved.append(float(moved.double().mean()))
        self.stuck.append(float((updated & ~moved).sum() / updated.sum().clamp_min(1)))
        steps = (weights - self.weights).abs() / float(model.lr_schedule(1.0))
        self.net_steps.append(float(steps.median()))
        self.followed.append(followed(weights - self.first[0], copies - self.first[1]))
        self.skipped += int(self.logger.name_to_value.get("train/skipped_steps", 0))
        self.weights, self.copies = weights, copies
        if len(self.moved) % EVERY == 0:
            self._examine()

    def _on_step(self) -> bool:
        return True


def copies_rule(precision: Precision) -> LayerRule:
    """
    How layers copy their weights.

    :param precision: mixed, or ``fp32``, where the copies are the weights
    """
    return LayerRule(precision.compute_format, stochastic=precision.compute.endswith("-sr"))


def followed(due: Tensor, change: Tensor) -> float:
    """
    Of the movement of the FP32 weights, the part that their copies have made.

    :param due: movement of the weights, any shape
    :param change: movement of their copies, same shape
    :return: Σ change·sign(due) / Σ|due|, 1 where copies follow on average
    """
    due, change = due.double(), change.double()
    return float((change * due.sign()).sum() / due.abs().sum().clamp_min(th.finfo(th.float64).tiny))


def run(setting: str, method: str, seed: int, iterations: int = ITERATIONS) -> Row:
    """One fine-tuning run as one row."""
    th.set_num_threads(1)
    rule, trained = rules(seed)[1], trained_weights(seed)  # before a model is made, which seeds torch's generator
    learning_rate, storage = SETTINGS[setting].learning_rate, FORMATS[SETTINGS[setting].storage]
    model = learner(METHODS[method].precision, METHODS[method].factor * learning_rate, rule, 1000 + seed)
    model.policy.load_state_dict({name: storage.store(w).float() for name, w in trained.items()})
    watch = Watch(rule, questions(np.random.default_rng(seed), EXAMINED))
    model.learn(iterations * QUESTIONS, callback=watch)
    done, rewards, drifts = np.asarray(watch.curve).T
    weights = watch.first[0]
    return {
        "setting": setting,
        "method": method,
        "seed": seed,
        "iterations": iterations,
        "learning_rate": METHODS[method].factor * learning_rate,
        "steps_to_half_tick": _digits((FORMATS["bf16"].tick(weights) / 2).median() / learning_rate),
        "net_steps_first": _digits(watch.net_steps[0]),
        "net_steps": _digits(np.mean(watch.net_steps)),
        "moved_first": _digits(watch.moved[0]),
        "moved": _digits(np.mean(watch.moved)),
        "stuck": _digits(np.mean(watch.stuck)),
        "followed_first": _digits(watch.followed[0]),
        "followed_tenth": _digits(watch.followed[len(watch.followed) // 10 - 1]),
        "followed_last": _digits(watch.followed[-1]),
        "skipped_steps": watch.skipped,
        "start_reward": _digits(rewards[0]),
        "final_reward": _digits(rewards[-1]),
        "reward_auc": _digits(np.trapezoid(rewards, done) / done[-1]),
        "area_gained": _digits(np.trapezoid(rewards - rewards[0], done) / done[-1]),
        "final_drift": _digits(drifts[-1]),
        "curve": " ".join(f"{i:.0f}:{r:.5f}:{d:.4g}" for i, r, d in zip(done, rewards, drifts, strict=True)),
        **versions(),
    }


def first_reach(rewards: Array, values: Array, threshold: float) -> float:
    """
    A quantity where the reward first reaches a threshold, interpolated linearly.

    :param rewards: along a run, shape (points,)
    :param values: at the same points, shape (points,)
    :param threshold: of the reward
    :return: NaN if it is never reached
    """
    reached = np.flatnonzero(rewards >= threshold)
    if len(reached) == 0:
        return float("nan")
    last = int(reached[0])
    if last == 0:
        return float(values[0])
    part = (threshold - rewards[last - 1]) / (rewards[last] - rewards[last - 1])
    return float(values[last - 1] + part * (values[last] - values[last - 1]))


def _digits(value: Any) -> float:
    return float(f"{float(value):.5g}")


def measure(workers: Workers) -> None:
    """
    Run what is missing.

    :param workers: who does
    """
    # A process trains the policy of a seed once, so the runs of a seed stand together.
    wanted = [(setting, method, seed) for seed, setting, method in product(SEEDS, SETTINGS, METHODS)]
    run_missing(FILE, ("setting", "method", "seed"), wanted, run, workers)


def curve_of(row: Mapping[str, Any]) -> Array:
    """
    Iterations done, reward and drift along a run.

    :param row: of the results file
    :return: FP64, shape (points, 3)
    """
    return np.array([[float(number) for number in point.split(":")] for point in row["curve"].split()])


def against_fp32(rows: Sequence[Mapping[str, Any]], setting: str, method: str) -> dict[str, tuple[float, float]]:
    """
    A method over FP32, seed by seed: area gained, and at equal reward the iterations until then and the drift.

    :param rows: of the results file
    :param setting: where
    :param method: that is compared
    :return: means over the seeds, and halves of their 95 % confidence intervals (Student's t); NaN where a run does
        not reach the reward
    """
    own, reference = (
        {int(row["seed"]): row for row in rows if (row["setting"], row["method"]) == (setting, name)}
        for name in (method, "fp32")
    )
    ratios: dict[str, list[float]] = {"area": [], "iterations": [], "drift": []}
    for seed in SEEDS:
        mine, theirs = curve_of(own[seed]), curve_of(reference[seed])
        ratios["area"].append(float(own[seed]["area_gained"]) / float(reference[seed]["area_gained"]))
        reward = theirs[0, 1] + SHARE * (theirs[-1, 1] - theirs[0, 1])
        for column, name in ((0, "iterations"), (2, "drift")):
            of_mine, of_theirs = (first_reach(curve[:, 1], curve[:, column], reward) for curve in (mine, theirs))
            ratios[name].append(of_mine / of_theirs)
    error = STUDENT_T / len(SEEDS) ** 0.5
    return {name: (float(np.mean(x)), float(error * np.std(x, ddof=1))) for name, x in ratios.items()}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Means over the seeds as Markdown, those against FP32 with 95 % confidence intervals.

    :param rows: of the results file, complete
    """
    lines = [
        "| weights start | method | copies moved in the first iteration | in each | updates without effect "
        f"| movement followed after 1, {ITERATIONS // 10}, {ITERATIONS} iterations | area gained / FP32's "
        f"| iterations to {SHARE:.0%} of FP32's gain / FP32's | KL there / FP32's |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for setting, method in product(SETTINGS, METHODS):
        chosen = [row for row in rows if (row["setting"], row["method"]) == (setting, method)]
        mean = {
            column: 100 * float(np.mean([float(row[column]) for row in chosen]))
            for column in ("moved_first", "moved", "stuck", "followed_first", "followed_tenth", "followed_last")
        }
        parts = [f"{mean[column]:.2f} %" for column in ("moved_first", "moved", "stuck")]
        parts.append(", ".join(f"{mean[f'followed_{when}']:.0f} %" for when in ("first", "tenth", "last")))
        parts += ["{:.3f} ±{:.3f}".format(*ratio) for ratio in against_fp32(rows, setting, method).values()]
        lines.append(f"| {SETTINGS[setting].name} | {METHODS[method].name} | {' | '.join(parts)} |")
    return "\n".join(lines)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """
    Gained reward over iterations, and KL divergence over gained reward, means over the seeds; a row per setting.

    :param rows: of the results file, complete
    :param path: of the picture
    """
    figure, axes = pyplot().subplots(len(SETTINGS), 2, figsize=(10, 10), layout="constrained", squeeze=False)
    for (left, right), setting in zip(axes, SETTINGS, strict=True):
        for method, kind in METHODS.items():
            curves = np.array([curve_of(row) for row in rows if (row["setting"], row["method"]) == (setting, method)])
            done, rewards, drifts = curves.mean(axis=0).T
            left.plot(done, rewards - rewards[0], label=kind.name)
            right.plot(rewards - rewards[0], drifts, label=kind.name)
        left.set(xlabel="iterations", ylabel="reward above the start", title=f"weights start {SETTINGS[setting].name}")
        right.set(xlabel="reward above the start", ylabel="KL from the start", title=f"mean of {len(SEEDS)} seeds")
        left.grid(alpha=0.3)
        right.grid(alpha=0.3)
    axes[0, 0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
