import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_fp16 import PPOFP16
from sb3_fp16.audit.ranges import GradientRange, range_rows
from sb3_fp16.audit.twin import SINGLE, Step, twin_of
from tests.audit.test_twin import SMALL, trained


def rows_of(model, most=1000):
    return {(row.kind, row.name): row for row in range_rows(twin_of(model, SINGLE), model.rollout_buffer, most)}


def test_largest_numbers(toy):
    model = trained(toy)
    rows = rows_of(model)
    buffer = model.rollout_buffer
    assert rows["observation", "observation"].largest == np.abs(buffer.observations.astype(np.float32)).max()
    for kind in ("reward", "value", "return"):
        assert rows[kind, kind].largest == np.abs(getattr(buffer, f"{kind}s").astype(np.float32)).max()
    weight = twin_of(model, SINGLE).policy.mlp_extractor.value_net[0].weight
    assert rows["weight", "mlp_extractor.value_net.0.weight"].largest == weight.abs().max()
    observations = th.from_numpy(buffer.observations.astype(np.float32)).reshape(-1, 3)
    first = observations @ weight.detach().T + twin_of(model, SINGLE).policy.mlp_extractor.value_net[0].bias.detach()
    assert rows["activation", "mlp_extractor.value_net.0"].largest == pytest.approx(float(first.abs().max()), rel=1e-5)
    assert rows["activation", "mlp_extractor.value_net.1"].largest == pytest.approx(
        float(first.abs().max().tanh()), rel=1e-5
    )


def test_what_saturated_is_said(toy):
    with pytest.warns(UserWarning, match="saturates"):
        model = PPOFP16("MlpPolicy", toy(obs_scale=1e5), **SMALL).learn(64)
    row = rows_of(model)["observation", "observation"]
    assert row.largest == 65504
    assert row.used == 1
    assert row.saturated > 10
    single = PPOFP16("MlpPolicy", toy(obs_scale=1e5), precision="fp32", **SMALL).learn(64)
    row = rows_of(single)["observation", "observation"]
    assert row.used > 1
    assert row.saturated == 0


def test_dict_observations_are_named():
    from tests.test_everything_trains import Anything

    space = spaces.Dict({"a": spaces.Box(-5, 5, (2,)), "b": spaces.Box(-50, 50, (3,))})
    env = DummyVecEnv([lambda: Anything(space, spaces.Discrete(2))])
    model = PPOFP16("MultiInputPolicy", env, **SMALL).learn(64)
    rows = rows_of(model, most=10)
    assert rows["observation", "b"].largest > rows["observation", "a"].largest > 0
    assert ("activation", "action_net") in rows


def test_gradients_against_the_lower_end():
    """2^-25 flushes to zero, 2^-24 to 2^-14 is subnormal."""
    watch = GradientRange(["weight"], [8.0])
    gradient = th.tensor([0.0, 2.0**-30, 2.0**-25, 2.0**-24, 2.0**-15, 2.0**-14, -1.0])
    watch.observe(Step([gradient], [None], [], []))
    watch.observe(Step([None], [None], [], []))
    (row,) = watch.rows()
    assert (row.name, row.scale) == ("weight", 8)
    assert (row.flushed, row.subnormal) == pytest.approx((2 / 6, 2 / 6))
    assert (row.flushed_when_scaled, row.subnormal_when_scaled) == pytest.approx((1 / 6, 2 / 6))
