import numpy as np
import pytest
import torch as th

from benchmarks import recurrent_toy as toy
from benchmarks.runner import read_csv
from benchmarks.split_k import split_k

SMALL = toy.Size(vocabulary=512, width=128, blocks=2)


def respond(name, seed=0, responses=4, tokens=24, **products):
    return toy.respond(toy.Weights.draw(SMALL), toy.CONDITIONS[name], seed, responses, tokens, **products)


@pytest.mark.parametrize("product", [split_k, th.mm])
@pytest.mark.parametrize("name", toy.CONDITIONS)
def test_identical_accumulation_is_exactly_zero(name, product):
    control = respond(name, rollout=product, trainer=product)
    assert not control.d.any()
    assert not control.kl.any()
    assert not control.state_gap.any()


def test_another_order_of_accumulation_is_not():
    assert respond("fp32").d.all()


def test_formats_differ_as_their_grids_do():
    """The document's ratios, 8 and 63.8, in wide bands; the start from equal states is left out."""
    rows = {}
    for name in toy.CONDITIONS:
        scored = toy.measure(name, seeds=(0, 1), responses=12, tokens=160, size=toy.Size(vocabulary=1024))
        rows[name] = toy.token_row(toy.Scored(*(values[:, 64:] for values in scored)))
    fp32, fp16, bf16, fp32_head = rows.values()
    assert 5 < bf16["mean_abs"] / fp16["mean_abs"] < 11
    assert 35 < bf16["kl"] / fp16["kl"] < 110
    assert fp16["mean_abs"] > 300 * fp32["mean_abs"]
    assert 5 * fp16["kl"] < fp32_head["kl"] < 0.9 * bf16["kl"]
    for row, bits in ((fp16, 10), (bf16, 7)):
        assert 0.3 < row["state_gap"] * 2**bits < 3
        assert row["mean_abs_1_to_10_percent"] > 2 * row["mean_abs_above_50_percent"]
    for row in rows.values():
        assert (row["responses"], row["tokens"]) == (24, 96)
        assert abs(row["ratio_minus_1"]) < 4 * row["ratio_error"]
        assert abs(row["k1"] - row["kl"]) < 4 * row["std"] / np.sqrt(24 * 96)
        assert row["kl_low"] < row["kl"] < row["kl_high"]
        assert sum(row[f"share_{name}"] for name in toy.SLICES) == pytest.approx(1)


def test_scores_are_those_of_log_softmax():
    g = th.Generator().manual_seed(0)
    mu, pi = (3 * th.randn(6, 50, generator=g) for _ in range(2))
    tokens, scored = toy.sample_and_score(mu, pi, th.rand(6, 1, generator=g, dtype=th.float64))
    log_mu, log_pi = mu.double().log_softmax(1), pi.double().log_softmax(1)
    chosen = th.arange(6), tokens
    expected = (
        (log_pi - log_mu)[chosen],
        (log_mu.exp() * (log_mu - log_pi)).sum(1),
        log_mu[chosen],
        -(log_mu.exp() * log_mu).sum(1),
    )
    for value, right in zip(scored, expected, strict=True):
        th.testing.assert_close(value, right, rtol=1e-12, atol=1e-13)


def test_a_small_divergence_does_not_cancel():
    """KL of a change δ is Var_μ(δ)/2 to first order, here 1e-17 of the entropy."""
    g = th.Generator().manual_seed(0)
    mu, change = th.randn(1, 50, generator=g).double(), 1e-9 * th.randn(1, 50, generator=g).double()
    _, (_, kl, _, _) = toy.sample_and_score(mu, mu + change, th.tensor([[0.5]], dtype=th.float64))
    p, change = mu.softmax(1), (mu + change) - mu
    variance = (p * (change - (p * change).sum()).square()).sum()
    assert kl.item() == pytest.approx(variance.item() / 2, rel=1e-6, abs=0)


def test_tokens_come_as_often_as_the_rollout_says():
    draws = 2000
    logits = th.tensor([[0.0, -np.inf, 2.0, 1.0, -np.inf]])
    uniform = (th.arange(draws, dtype=th.float64)[:, None] + 0.5) / draws
    finite = logits.clamp(min=-800).expand(draws, -1)
    tokens, _ = toy.sample_and_score(finite, finite, uniform)
    counts = np.bincount(tokens, minlength=5)
    np.testing.assert_allclose(counts, draws * logits.softmax(1)[0], atol=1)
    first, _ = toy.sample_and_score(finite[:1].flip(1), finite[:1].flip(1), uniform[:1] * 0)
    assert first.item() == 1  # and not 0, which has no probability


def test_the_trainer_reads_what_the_rollout_wrote():
    scored, control = respond("bf16"), respond("bf16", trainer=split_k)
    np.testing.assert_array_equal(scored.log_prob, control.log_prob)
    np.testing.assert_array_equal(scored.entropy, control.entropy)
    assert (respond("bf16").d == scored.d).all()
    assert (respond("bf16", seed=1).d != scored.d).any()


@pytest.mark.parametrize("name", toy.CONDITIONS)
def test_results_are_stored_in_the_formats_of_the_condition(name):
    condition = toy.CONDITIONS[name]
    drawn = toy.Weights.draw(SMALL)
    weights = drawn.cast(condition)
    logits, state = toy.step(weights, condition, th.mm, th.arange(8), th.zeros(8, 128))
    for values, storage in [(logits, condition.head), (weights.head, condition.head), (state, condition.body)]:
        assert values.dtype == th.float32
        assert (toy.stored(values, storage) == values).all()
    if condition.head == th.float32:
        assert (weights.head == drawn.head).all()
        assert (toy.stored(logits, th.float16) != logits).any()


def test_a_run_is_not_repeated(tmp_path, monkeypatch, capsys):
    calls = []

    def measure(name, seeds, responses, tokens):
        calls.append((name, seeds, responses, tokens))
        return respond(name, tokens=40)

    monkeypatch.setattr(toy, "FILE", tmp_path / "tokens.csv")
    monkeypatch.setattr(toy, "SEQUENCES_FILE", tmp_path / "sequences.csv")
    monkeypatch.setattr(toy, "measure", measure)
    monkeypatch.setattr("sys.argv", ["recurrent_toy"])
    toy.main()
    assert calls == [(name, (0, 1, 2), 128, 2048) for name in toy.CONDITIONS]
    first = capsys.readouterr().out
    toy.FILE.write_text("".join(toy.FILE.read_text().splitlines(keepends=True)[:-1]))  # as if the last had not ended
    toy.main()
    assert len(calls) == 5
    rows, sequences = read_csv(toy.FILE), read_csv(toy.SEQUENCES_FILE)
    assert [row["condition"] for row in rows] == list(toy.CONDITIONS)
    assert [(row["condition"], row["horizon"]) for row in sequences] == [
        (name, horizon) for name in toy.CONDITIONS for horizon in ("16", "32")
    ]
    tables = [toy.table(rows), toy.slice_table(rows), toy.sequence_table(sequences)]
    assert all(table in first for table in tables)
    assert [len(table.splitlines()) for table in tables] == [6, 6, 6]
    toy.draw(sequences, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
