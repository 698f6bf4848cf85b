"""
Float64 answers, written from the paper's equations and the formats' definitions alone.

Nothing here imports sb3_fp16: a mistake there cannot hide by being made twice.
"""

import math

import numpy as np

# explicit significand bits, smallest normal exponent, largest finite value
FORMATS = {
    "fp16": (10, -14, 65504.0),
    "bf16": (7, -126, (2 - 2.0**-7) * 2.0**127),
    "fp32": (23, -126, (2 - 2.0**-23) * 2.0**127),
}


def tick(x: np.ndarray, name: str) -> np.ndarray:
    """Distance between neighbouring numbers of a format at x."""
    bits, smallest, _ = FORMATS[name]
    exponent = np.floor(np.log2(np.maximum(np.abs(np.asarray(x, dtype=np.float64)), 2.0**smallest)))
    return 2.0 ** (exponent - bits)


def nearest(x: np.ndarray, name: str) -> np.ndarray:
    """Round to the nearest number of a format, ties to even, saturating."""
    x = np.asarray(x, dtype=np.float64)
    step = tick(x, name)
    largest = FORMATS[name][2]
    return np.clip(np.rint(x / step) * step, -largest, largest)


def gaussian_log_prob(a: np.ndarray, mean: np.ndarray, log_std: np.ndarray) -> np.ndarray:
    """Log density of a diagonal Gaussian, summed over the last dimension, from its textbook form."""
    a, mean, std = (np.asarray(x, dtype=np.longdouble) for x in (a, mean, np.exp(np.asarray(log_std, np.longdouble))))
    density = np.log(1 / (std * np.sqrt(2 * np.longdouble(math.pi)))) - (a - mean) ** 2 / (2 * std**2)
    return density.sum(axis=-1)


def gaussian_log_ratio(a, mean, log_std, mean0, log_std0) -> np.ndarray:
    """log pi/pi0 as the difference of two absolute log-densities in extended precision."""
    return np.asarray(gaussian_log_prob(a, mean, log_std) - gaussian_log_prob(a, mean0, log_std0), dtype=np.float64)


def categorical_log_prob(action: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Log probability of one of the choices."""
    logits = np.asarray(logits, dtype=np.longdouble)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return np.take_along_axis(log_p, np.asarray(action)[:, None], axis=1)[:, 0]


def clipped_loss(d: np.ndarray, advantages: np.ndarray, clip: float) -> float:
    """PPO's surrogate in its textbook form, on ratios."""
    ratio = np.exp(d)
    return float(-np.minimum(advantages * ratio, advantages * np.clip(ratio, 1 - clip, 1 + clip)).mean())


def gae(rewards, values, starts, last_value, last_done, gamma, lam) -> np.ndarray:
    """
    Advantages of one environment as explicit sums of discounted residuals, episode by episode.

    A_t = sum_k (gamma*lambda)^k delta_{t+k} up to the end of t's episode.
    """
    steps = len(rewards)
    ends = [bool(starts[t + 1]) if t + 1 < steps else bool(last_done) for t in range(steps)]
    following = [*values[1:], last_value]
    delta = [rewards[t] + (0.0 if ends[t] else gamma * following[t]) - values[t] for t in range(steps)]
    advantages = np.zeros(steps)
    for t in range(steps):
        weight = 1.0
        for k in range(t, steps):
            advantages[t] += weight * delta[k]
            if ends[k]:
                break
            weight *= gamma * lam
    return advantages


class Sharp:
    """
    SHARP for one parameter in float64, element by element, with no rounding of state.

    :param sharing: ``elementwise``, ``row`` or ``rank1``, taken as given
    """

    def __init__(self, theta, lr, betas=(0.9, 0.999), eps=1e-5, sharing="row"):
        self.theta = np.array(theta, dtype=np.float64)
        self.lr, self.betas, self.eps, self.sharing = lr, betas, eps, sharing
        self.m = np.zeros_like(self.theta)
        self.rows = np.zeros(self.theta.shape[0])
        self.columns = np.zeros(self.theta.size // self.theta.shape[0])
        self.own = np.zeros_like(self.theta)
        self.t = 0

    def update(self, g):
        """The amount subtracted from theta; advances the state."""
        g = np.asarray(g, dtype=np.float64)
        (b1, b2), matrix = self.betas, g.reshape(g.shape[0], -1)
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * g
        self.own = np.hypot(math.sqrt(b2) * self.own, math.sqrt(1 - b2) * np.abs(g))
        row_rms = np.array([math.sqrt(sum(x * x for x in row) / len(row)) for row in matrix])
        column_rms = np.array([math.sqrt(sum(x * x for x in column) / len(column)) for column in matrix.T])
        self.rows = np.hypot(math.sqrt(b2) * self.rows, math.sqrt(1 - b2) * row_rms)
        self.columns = np.hypot(math.sqrt(b2) * self.columns, math.sqrt(1 - b2) * column_rms)
        return self.lr * self.m / (1 - b1**self.t) / (self.denominator(g.shape) + self.eps)

    def denominator(self, shape):
        unbias = math.sqrt(1 - self.betas[1] ** self.t)
        if self.sharing == "elementwise":
            return self.own / unbias
        rows, columns = self.rows / unbias, self.columns / unbias
        layer = math.sqrt((rows**2).mean())
        rows = np.clip(rows, layer / 4, 4 * layer)
        matrix = np.repeat(rows[:, None], len(columns), axis=1)
        if self.sharing == "rank1":
            matrix = matrix * columns[None, :] / layer if layer else matrix
        return matrix.reshape(shape)

    def step(self, g):
        self.theta = self.theta - self.update(g)
