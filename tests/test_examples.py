"""Every example runs; the notebook from top to bottom."""

import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from sb3_fp16 import PPOFP16

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize(
    ("name", "steps", "says"),
    [
        ("vec_normalize.py", 2048, r"return -?\d+\.\d ± \d+\.\d over 10 episodes"),
        ("images_and_vectors.py", 512, r"mean return of the last \d+ episodes: \d+\.\d of at most 50"),
        ("train_parallel.py", 2048, r"return -\d+\.\d ± \d+\.\d after 2048 steps"),
        ("custom_network.py", 2048, r"(?s)eager engine.*FP32"),
        ("sharp_alone.py", 20, r"(?s)Adam.*SHARP +torch.bfloat16"),
    ],
)
def test_it_runs_and_says_so(name, steps, says, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    run(name, "--steps", steps, monkeypatch=monkeypatch)
    assert re.search(says, capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_sharp_has_less_state_and_learns(monkeypatch, capsys):
    run("sharp_alone.py", "--steps", 200, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    losses = [float(re.search(r"loss (\S+),", line)[1]) for line in lines]
    sizes = [int(re.search(r"([\d,]+) bytes", line)[1].replace(",", "")) for line in lines]
    assert losses[2] < 0.6 * losses[1]  # Adam in BF16 loses small updates
    assert losses[2] == pytest.approx(losses[0], rel=0.1)
    assert sizes[2] < 0.6 * sizes[1] < 0.6 * sizes[0]


def test_upload(monkeypatch, tmp_path, toy, capsys):
    uploaded = {}

    class HfApi:
        def create_repo(self, repository, exist_ok):
            uploaded["repository"] = repository

        def upload_folder(self, repo_id, folder_path):
            uploaded["files"] = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
            return f"https://huggingface.co/{repo_id}"

    hub = ModuleType("huggingface_hub")
    hub.HfApi = HfApi
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    PPOFP16("MlpPolicy", toy(), n_steps=64, precision="paper").save(tmp_path / "model.zip")
    run("upload_to_hub.py", tmp_path / "model.zip", "me/ppo", "--env", "Toy-v0", monkeypatch=monkeypatch)
    assert capsys.readouterr().out.strip() == "https://huggingface.co/me/ppo"
    assert uploaded["repository"] == "me/ppo"
    assert b"precision `paper`" in uploaded["files"]["README.md"]
    (tmp_path / "again.zip").write_bytes(uploaded["files"]["model.zip"])
    assert PPOFP16.load(tmp_path / "again.zip").precision.name == "paper"


def test_the_notebook_runs_from_top_to_bottom(monkeypatch, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code[0].startswith("%pip install")
    names = {}
    for source in code[1:]:
        short = re.sub(r"\b\d\d_000\b", "2_048", source)
        exec(compile(short, "quickstart.ipynb", "exec"), names)
    printed = capsys.readouterr().out
    assert "engine native" in printed
    stock, own = (names[name].predict(names["observation"], deterministic=True)[0] for name in ("stock", "again"))
    np.testing.assert_array_equal(stock, own)
    assert (tmp_path / "policy.onnx").exists()
    assert all(not cell.get("outputs") for cell in cells)  # committed without outputs
