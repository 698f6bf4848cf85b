"""``python -m sb3_fp16``."""

import subprocess
import sys

import pytest

from sb3_fp16 import __main__ as diagnosis


def test_the_diagnosis_names_versions_engines_and_passes_its_test():
    done = subprocess.run([sys.executable, "-m", "sb3_fp16"], capture_output=True, text=True, check=True)
    for part in (
        "sb3_fp16 ",
        "stable_baselines3",
        "native CPU engine",
        "CUDA device",
        "CUDA kernels",
        "RL Zoo",
        "fp16 ",
        "error",
    ):
        assert part in done.stdout, part
    assert done.stderr == ""


def test_what_is_missing_is_named_with_its_remedy():
    code = "import sys, warnings; warnings.simplefilter('ignore'); sys.modules['sb3_fp16._cpu'] = None\n"
    code += "from sb3_fp16.__main__ import engines; print(*engines())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "missing: " in done.stdout
    assert "source tree whose native CPU engine was not built" in done.stdout


def test_a_self_test_that_learns_nothing_fails(monkeypatch, capsys):
    monkeypatch.setattr(diagnosis.PPOFP16, "learn", lambda self, *_: self)
    with pytest.raises(RuntimeError, match="learned nothing"):
        diagnosis.self_test("fp16")
    assert diagnosis.main() == 1
    assert "learned nothing" in capsys.readouterr().out
