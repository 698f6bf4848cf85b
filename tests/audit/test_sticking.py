import pytest
import torch as th
from torch import nn

from sb3_fp16 import PPOFP16
from sb3_fp16.audit.sticking import (
    COPIES,
    STORAGES,
    WRITEBACKS,
    OwnSticking,
    WritebackSimulation,
    seen_by_layers,
)
from sb3_fp16.audit.twin import SINGLE, Step, parameters_of, replay, twin_of
from tests.audit.test_twin import trained


def stream(weights, update, steps):
    """The same update at every step, in FP64 so that FP32 weights do not stick."""
    simulation = WritebackSimulation()
    weights = weights.clone()
    for _ in range(steps):
        after = nn.Parameter(weights + update)
        simulation.observe(Step([None], [None], [weights], [after]))
        weights = after.detach()
    return {(row.storage, row.writeback): row for row in simulation.rows()}


def test_the_documents_worked_example():
    """A weight of 0.025 and updates of 1e-6: 61 steps to half a tick in BF16, 8 in FP16."""
    weights = th.full((1000,), 0.025)
    for storage, unit in (("bf16", 2.0**-13), ("fp16", 2.0**-16)):
        start = (0.025 / unit).__round__() * unit  # on the grid
        weights = th.full((1000,), start, dtype=th.float64)
        rows = stream(weights.float(), th.tensor(1e-6), 5)
        row = rows[storage, "copy, nearest"]
        assert row.steps_to_half_tick == pytest.approx({"bf16": 61, "fp16": 7.6}[storage], rel=0.01)
        assert (row.unchanged, row.moved, row.retained) == (1, 0, 0)
    due = {"bf16": 62, "fp16": 8}
    for storage, steps in due.items():
        grid = th.full((10,), 0.025, dtype=th.bfloat16).float()
        assert stream(grid, th.tensor(1e-6), steps - 1)[storage, "copy, nearest"].moved == 0
        assert stream(grid, th.tensor(1e-6), steps)[storage, "copy, nearest"].moved == 1


@pytest.mark.parametrize("storage", STORAGES)
def test_what_each_way_keeps_of_small_updates(storage):
    th.manual_seed(0)
    count, steps = 20_000, 40
    weights = (th.rand(count) * 0.5 + 0.5).bfloat16().float()
    tick = {"bf16": 2.0**-8, "fp16": 2.0**-11}[storage]
    rows = stream(weights, -th.tensor(tick / 16), steps)
    nearest = rows[storage, "nearest"]
    assert (nearest.unchanged, nearest.retained) == (1, 0)
    assert nearest.noise == pytest.approx(1, rel=1e-3)
    for way in WRITEBACKS[1:]:
        row = rows[storage, way]
        assert row.retained == pytest.approx(1, abs={"stochastic": 0.02, "dithered": 0.02, "residual": 0.25}[way])
        # a tick is 16 updates, so that 15 of 16 change nothing
        assert row.unchanged == pytest.approx(15 / 16, abs=0.02)
        assert row.moved > 0.85
    # A draw per step strays by sqrt(40 · 1/16 · 15/16) ticks of 2.5 due; an even sequence by less than one.
    assert rows[storage, "stochastic"].noise > 2 * rows[storage, "dithered"].noise
    copies = [rows[storage, way] for way in COPIES]
    assert copies[0].retained == pytest.approx(2 / 2.5, abs=0.3)  # to nearest, 2.5 ticks are 2 or 3
    assert copies[1].retained == pytest.approx(1, abs=0.02)
    assert copies[1].unchanged < copies[0].unchanged  # each step draws anew


@pytest.mark.parametrize("precision", ["fp16", "paper", "bf16"])
def test_own_counts_are_those_of_the_optimizer(toy, precision):
    model = trained(toy, precision)
    twin = twin_of(model)
    twin.policy.optimizer.pop_statistics()
    own = OwnSticking(twin)
    counts = []

    def observe(step):
        own.observe(step)
        counts.append(twin.policy.optimizer.pop_statistics())

    replay(twin, model.rollout_buffer, 4, observe)
    rows = own.rows()
    assert [row.name for row in rows] == list(parameters_of(twin))
    assert sum(row.weights for row in rows) == sum(p.numel() for p in model.policy.parameters())
    nonzero, stuck = (sum(column) for column in list(zip(*counts, strict=True))[:2])
    assert sum(row.nonzero for row in rows) == pytest.approx(nonzero, rel=0.01)
    assert sum(row.unchanged * row.nonzero for row in rows) == pytest.approx(stuck, rel=0.01)
    assert 0 < stuck < nonzero


def test_mixed_precision_is_judged_by_its_copies(toy):
    model = trained(toy, "amp-bf16", learning_rate=1e-6)
    parameters = list(parameters_of(model).values())
    seen = seen_by_layers(model.precision, list(parameters_of(model)), parameters)
    for name, copy, parameter in zip(parameters_of(model), seen, parameters, strict=True):
        expected = parameter if name == "log_std" else parameter.bfloat16().float()
        assert th.equal(copy, expected), name
    twin = twin_of(model)
    own = OwnSticking(twin)
    replay(twin, model.rollout_buffer, 4, own.observe)
    by_name = {row.name: row for row in own.rows()}
    assert by_name["mlp_extractor.policy_net.2.weight"].unchanged > 0.99
    assert by_name["log_std"].unchanged == 0  # stays in FP32


def test_stochastic_copies_move_where_copies_to_nearest_do_not(toy):
    def moved(precision):
        model = trained(toy, precision, learning_rate=1e-6)
        twin = twin_of(model)
        own = OwnSticking(twin)
        replay(twin, model.rollout_buffer, 2, own.observe)
        return {row.name: row.moved for row in own.rows()}["mlp_extractor.policy_net.2.weight"]

    assert moved("amp-bf16") < 0.01
    assert moved("amp-bf16-sr") > 0.05


def test_a_learning_rate_of_zero_has_no_updates(toy):
    model = PPOFP16("MlpPolicy", toy(), n_steps=64, batch_size=16, learning_rate=0.0, device="cpu").learn(64)
    twin = twin_of(model)
    simulation, own = WritebackSimulation(), OwnSticking(twin)
    replay(twin, model.rollout_buffer, 2, own.observe)
    replay(twin_of(model, SINGLE), model.rollout_buffer, 2, simulation.observe)
    assert simulation.rows() == []
    assert sum(row.nonzero for row in own.rows()) == 0
