import pytest
import torch as th

from sb3_fp16 import Precision
from sb3_fp16.audit.optimizer import RootWatch, Shadow, state_rows
from sb3_fp16.audit.twin import replay, sharp_of, twin_of
from tests.audit.test_twin import trained


def test_state_is_counted(toy):
    twin = twin_of(trained(toy))
    for state in twin.policy.optimizer.state.values():
        state["first_moment"].fill_(1)
        state["root_second_moment"].fill_(1)
    state = twin.policy.optimizer.state[twin.policy.mlp_extractor.policy_net[2].weight]
    moment = state["first_moment"].view(-1)
    moment[:10], moment[10:30], moment[30:60] = 0, 1e-5, -65504
    rows = {row.name: row for row in state_rows(twin)}
    row = rows["first_moment"]
    total = sum(p.numel() for p in twin.policy.parameters())
    assert (row.storage, row.elements) == ("fp16", total)
    assert [row.zero, row.subnormal, row.saturated] == pytest.approx([10 / total, 20 / total, 30 / total])
    assert rows["root_second_moment"][3:] == (0, 0, 0, 0)


def test_adams_second_moment_is_also_seen_as_fp16_would_keep_it(toy):
    twin = twin_of(trained(toy, "fp32"))
    for state in twin.policy.optimizer.state.values():
        state["exp_avg_sq"].fill_(1e-9)
    rows = {(row.name, row.storage): row for row in state_rows(twin)}
    assert rows["exp_avg_sq", "fp32"].zero == 0
    assert rows["exp_avg_sq", "fp16"].zero == 1
    assert ("exp_avg", "fp16") not in rows


def test_steps_beside_adam(toy):
    """Adam in FP16 loses its second moment and takes giant steps; SHARP does neither."""
    model = trained(toy)
    shadow = Shadow(sharp_of(model), model.device)
    replay(twin_of(model), model.rollout_buffer, 4, shadow.observe)
    sharp, half = shadow.rows()
    assert (sharp.optimizer, half.optimizer) == ("SHARP", "Adam in FP16")
    assert sharp.ratio == pytest.approx(1, abs=0.15)
    assert sharp.cosine > 0.9
    assert sharp.zeroed < 0.01
    assert half.zeroed > 0.2
    assert half.ratio > 3


def test_without_sharing_and_rounding_sharp_is_adam(toy):
    precision = Precision(input_sharing="elementwise", hidden_sharing="elementwise", root_rounding="fp32")
    model = trained(toy, precision)
    shadow = Shadow(sharp_of(model), model.device)
    replay(twin_of(model), model.rollout_buffer, 4, shadow.observe)
    assert shadow.rows()[0].ratio == pytest.approx(1, abs=1e-3)
    assert shadow.rows()[0].cosine == pytest.approx(1, abs=1e-4)


def test_the_sharp_of_other_models_is_that_of_the_preset(toy):
    assert sharp_of(model := trained(toy)) is model.policy.optimizer
    other = sharp_of(trained(toy, "sb3"))
    assert other.param_groups[0]["root_rounding"] == Precision.presets["fp16"].root_rounding


def test_clipped_rows_and_frozen_roots(toy):
    model = trained(toy, "paper", learning_rate=0.0)
    twin = twin_of(model)
    weight = twin.policy.mlp_extractor.policy_net[2].weight
    root = twin.policy.optimizer.state[weight]["root_second_moment"]
    root[:] = 64.0
    root[:3] = 6400.0  # L is 1388: these three lie above 4L, the others below L/4
    watch = RootWatch(twin)
    replay(twin, model.rollout_buffer, 1, watch.observe)
    (row,) = watch.rows()
    value = twin.policy.optimizer.state[twin.policy.mlp_extractor.value_net[2].weight]["root_second_moment"].double()
    layer = value.square().mean().sqrt()
    others = int(((value < layer / 4) | (value > 4 * layer)).sum())
    assert row.clipped_rows == pytest.approx((64 + others) / 128)
    assert 0 < row.dead_band < 1


def test_the_dead_band_is_where_rounding_to_nearest_changes_nothing(toy):
    """Two replays of one minibatch: what would have stood still under rounding to nearest does."""
    model = trained(toy, "paper")
    twin, watch = twin_of(model), None
    watch = RootWatch(twin)
    roots = [state["root_second_moment"].clone() for state in twin.policy.optimizer.state.values()]
    replay(twin, model.rollout_buffer, 1, watch.observe)
    after = [state["root_second_moment"] for state in twin.policy.optimizer.state.values()]
    frozen = sum(int((a == b).sum()) for a, b in zip(roots, after, strict=True)) / sum(map(th.numel, roots))
    assert watch.rows()[0].dead_band == pytest.approx(frozen, abs=0.15)
