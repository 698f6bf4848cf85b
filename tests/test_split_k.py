import pytest
import torch as th

from benchmarks import split_k


def test_partial_sums_are_added_in_order():
    """Two halves of an ulp, each lost when it is added to 1, would make a whole one if they met first."""
    b = th.zeros(256, 1)
    b[0], b[64], b[128] = 1.0, 2.0**-24, 2.0**-24
    assert split_k.split_k(th.ones(1, 256), b).item() == 1
    assert split_k.split_k(th.ones(1, 256), b.flip(0)).item() == 1 + 2.0**-23


def test_product_is_right():
    g = th.Generator().manual_seed(0)
    a, b = th.randn(5, 300, generator=g), th.randn(300, 7, generator=g)  # a last chunk that is not full
    th.testing.assert_close(split_k.split_k(a, b).double(), a.double() @ b.double(), rtol=0, atol=1e-4)


# Shares, medians and norms of the document, in bands that leave room for another BLAS. A difference that survives
# rounding is one step of the grid, so that the gaps lie between 2^-(m+1) and 2^-m.
BANDS = {
    "fp32": ((0.6, 0.99), (1e-7, 1e-6), (1e-7, 6e-7)),
    "fp16": ((7e-4, 3e-3), (2.0**-11, 2.0**-10), (6e-6, 2.5e-5)),
    "bf16": ((3e-5, 2.5e-4), (2.0**-8, 2.0**-7), (1e-5, 6e-5)),
}


@pytest.mark.parametrize("name", BANDS)
def test_what_survives_rounding(name):
    numbers = split_k.difference(name, seed=0)
    for (key, value), (low, high) in zip(numbers.items(), BANDS[name], strict=True):
        assert low < value < high, key


def test_table_has_a_row_per_format():
    rows = [{"format": name, "differing": 0.001, "median_gap": 1e-3, "norm": 1e-5} for name in split_k.FORMATS]
    lines = split_k.table(rows).splitlines()
    assert lines[3] == "| FP16 | 0.1 % | 0.1 to 0.1 % | 1.00e-03 | 1.00e-05 |"
    assert len(lines) == 2 + len(split_k.FORMATS)
