import math
from dataclasses import replace

import pytest
import torch as th
from stable_baselines3 import PPO

from sb3_fp16 import PPOFP16, Precision
from sb3_fp16.audit import Audit, audit, draw
from tests.audit.test_mismatch import acted
from tests.audit.test_twin import SMALL, bits, trained


def levels(found: Audit):
    return {section: [v.level for v in found.verdicts() if v.section == section] for _, section, _ in found.verdicts()}


@pytest.mark.parametrize("precision", [*Precision.presets, "sb3"])
def test_every_precision_is_audited_and_left_as_it_is(toy, precision):
    model = trained(toy, precision) if precision == "sb3" else acted(toy, precision)
    if precision == "sb3":
        _, callback = model._setup_learn(64, None, reset_num_timesteps=False)
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    before, rng = bits(model), th.get_rng_state()
    found = audit(model, model.rollout_buffer, minibatches=2, formats=False)
    assert all(th.equal(a, b) for a, b in zip(before, bits(model), strict=True))
    assert th.equal(rng, th.get_rng_state())
    assert found.precision.name == ("fp32" if precision == "sb3" else precision)
    assert {"weights", "optimizer", "mismatch", "range", "gradients"} == set(levels(found))
    assert levels(found)["range"] == ["fine"]
    assert all(math.isfinite(row["value"]) or math.isnan(row["value"]) for row in found.rows())
    text = str(found)
    assert text.startswith(f"precision {found.precision.name}, after {model.num_timesteps:,} steps")
    assert all(str(verdict) in text for verdict in found.verdicts())


def test_sticking_weights_hurt_where_they_are_all_there_is(toy):
    def level(precision):
        model = acted(toy, precision, learning_rate=1e-6)
        return levels(audit(model, model.rollout_buffer, formats=False))["weights"]

    assert level("bf16") == ["hurts"]
    assert level("bf16-sr") == ["fine"]
    assert level("amp-bf16") == ["watch"]  # the FP32 weights go on
    assert level("fp32") == ["fine"]


def test_own_writeback_is_the_models(toy):
    ways = {"fp16": ("fp16", "stochastic"), "paper": ("fp16", "nearest"), "amp-bf16-sr": ("bf16", "copy, stochastic")}
    for precision, way in ways.items():
        model = acted(toy, precision)
        found = audit(model, model.rollout_buffer, minibatches=2, formats=False)
        assert (found.own_writeback.storage, found.own_writeback.writeback) == way
    model = acted(toy, "fp32")
    assert audit(model, model.rollout_buffer, minibatches=2, formats=False).own_writeback is None


def test_stale_weights_show_as_a_mismatch(toy):
    model = PPOFP16("MlpPolicy", toy(), **{**SMALL, "learning_rate": 0.01}).learn(128)
    assert levels(audit(model, model.rollout_buffer, formats=False))["mismatch"] == ["hurts"]


def test_numbers_beyond_the_range_hurt_in_fp16_and_are_foreseen_in_fp32(toy):
    with pytest.warns(UserWarning, match="saturates"):
        model = PPOFP16("MlpPolicy", toy(obs_scale=1e5), **SMALL).learn(64)
    found = audit(model, model.rollout_buffer, formats=False)
    assert levels(found)["range"] == ["hurts"]
    assert "VecNormalize" in str(found)
    model = PPO("MlpPolicy", toy(obs_scale=1e5), **SMALL).learn(64)
    found = audit(model, model.rollout_buffer, formats=False)
    assert levels(found)["range"] == ["watch"]
    assert "FP16 would saturate" in str(found)


def test_flushed_gradients_and_zeroed_state_and_far_steps(toy):
    model = acted(toy, "fp16")
    found = audit(model, model.rollout_buffer, minibatches=2, formats=False)
    gradients = tuple(row._replace(flushed_when_scaled=0.6) for row in found.gradients)
    state = tuple(row._replace(lost=0.05) for row in found.state)
    shadows = tuple(row._replace(cosine=0.5) for row in found.shadows)
    worse = levels(replace(found, gradients=gradients, state=state, shadows=shadows))
    assert worse["gradients"] == ["hurts"]
    assert worse["optimizer"] == ["watch", "watch", "fine"]
    saturated = tuple(row._replace(saturated=0.01) for row in found.state)
    assert levels(replace(found, state=saturated))["optimizer"][0] == "hurts"


def test_frozen_roots_are_watched_only_where_rounding_is_to_nearest(toy):
    for precision, level in (("paper", "watch"), ("fp16", "fine")):
        model = acted(toy, precision)
        found = audit(model, model.rollout_buffer, minibatches=2, formats=False)
        frozen = tuple(row._replace(dead_band=0.9) for row in found.roots)
        assert levels(replace(found, roots=frozen))["optimizer"][-1] == level


def test_a_weight_beyond_fp16_is_a_verdict(toy):
    model = PPO("MlpPolicy", toy(), **SMALL).learn(64)
    with th.no_grad():
        model.policy.value_net.weight[0, 0] = 70_000.0
    found = audit(model, model.rollout_buffer, minibatches=2)
    assert levels(found)["range"] == ["watch"]
    assert "FP16 would saturate" in str(found)
    assert not any("fp16" in mismatch.trains for mismatch in found.mismatches)
    assert any("bf16" in mismatch.trains for mismatch in found.mismatches)


def test_second_moments_of_no_gradients_are_not_lost(toy):
    class Blind(toy):
        def _observe(self):
            observation = super()._observe()
            observation[1:] = 0
            return observation

    for precision in ("sb3", "fp16"):
        model = PPO("MlpPolicy", Blind(), **SMALL) if precision == "sb3" else PPOFP16("MlpPolicy", Blind(), **SMALL)
        model.learn(128)
        found = audit(model, model.rollout_buffer, minibatches=2, formats=False)
        assert levels(found)["optimizer"][0] == "fine"
    model = PPO("MlpPolicy", Blind(), **SMALL).learn(128)
    rows = {(row.name, row.storage): row for row in audit(model, model.rollout_buffer, 2, formats=False).state}
    assert rows["exp_avg_sq", "fp32"].zero > 0.01
    assert rows["exp_avg_sq", "fp32"].lost == 0
    assert rows["exp_avg_sq", "fp16"].lost > 0.1


def test_naive_halves_are_judged_by_their_own_steps(toy):
    model = acted(toy, "naive-fp16")
    found = audit(model, model.rollout_buffer, minibatches=2, formats=False)
    verdicts = [verdict for verdict in found.verdicts() if verdict.section == "optimizer"]
    assert any(verdict.level == "hurts" and "Adam in FP16 takes" in verdict.text for verdict in verdicts)


def test_a_short_significand_is_written_back_in_its_own_format(toy):
    model = acted(toy, "e5m5")
    found = audit(model, model.rollout_buffer, minibatches=2, formats=False)
    assert found.own_writeback.storage == "e5m5"
    assert (
        found.own_writeback.unchanged
        > {row.writeback: row for row in found.writebacks if row.storage == "bf16"}["nearest"].unchanged
    )


def test_nothing_is_known_where_nothing_moved(toy):
    model = acted(toy, "fp16", learning_rate=0.0)
    assert "nothing is known" in str(audit(model, model.rollout_buffer, minibatches=2, formats=False))


def test_an_incomplete_rollout_is_refused(toy):
    model = PPOFP16("MlpPolicy", toy(), **SMALL)
    with pytest.raises(ValueError, match="0 of 64"):
        audit(model, model.rollout_buffer)


def test_rows_hold_everything(toy):
    model = acted(toy, "paper", n_steps=256)
    found = audit(model, model.rollout_buffer, minibatches=2)
    rows = found.rows()
    sections = {row["section"] for row in rows}
    assert sections == {
        *("layers", "writebacks", "state", "shadow", "roots", "mismatch", "sequences"),
        *("slices", "correction", "range", "gradients"),
    }
    keys = [(row["section"], row["subject"], row["measure"]) for row in rows]
    assert len(set(keys)) == len(keys)


def test_pictures_of_one_and_of_several(toy, tmp_path):
    model = acted(toy, "paper", n_steps=128)
    one, other = (audit(model, model.rollout_buffer, 2, formats=formats) for formats in (True, False))
    draw([one], tmp_path / "one.png")
    draw([other, replace(other, timesteps=10_000)], tmp_path / "several.png")
    for name in ("one.png", "several.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
        assert (tmp_path / name).stat().st_size > 20_000
    with pytest.raises(ValueError, match="no audit"):
        draw([], tmp_path / "none.png")
