"""
RL Zoo's commands in a new environment that has only ``pip install ".[zoo]"``: each once, with its time.

``python -m benchmarks.zoo`` runs them and keeps the training table that the first prints. tests/test_zoo.py runs the
same commands and looks at what they say and leave.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.runner import RESULTS, versions, write_csv

ROOT = Path(__file__).parent.parent
FILE, CAPTURE = RESULTS / "zoo.csv", RESULTS / "zoo_training.txt"


class Command(NamedTuple):
    """A command line, a regular expression of what it prints, and the files that it leaves."""

    line: str
    prints: str
    leaves: tuple[str, ...] = ()


TRAIN = "rl_zoo3 train --algo ppo_fp16 --env"
FIRST, AGENT = "logs/ppo_fp16/HalfCheetah-v5_1", "logs/ppo_fp16/HalfCheetah-v5_1/HalfCheetah-v5.zip"
ENJOY = "rl_zoo3 enjoy --algo ppo_fp16 --env HalfCheetah-v5 -f logs --exp-id 1 --no-render -n 1000"
TUNED = f"{TRAIN} Hopper-v5 -n 1024 -conf sb3_fp16.hyperparams.tuned"
SEARCH = f"{TRAIN} CartPole-v1 -n 4096 --storage study.log --study-name cartpole"
# In this order: later ones use what earlier ones leave.
COMMANDS = {
    "train": Command(
        f"{TRAIN} HalfCheetah-v5 -n 8192 -P -tb tb --eval-freq 4096 --save-freq 4096 --seed 1",
        r"(?s)hyperparams/ppo_fp16.yml.*native engine.*total_timesteps *\| 8192.*Saving to",
        (AGENT, f"{FIRST}/best_model.zip", f"{FIRST}/rl_model_8192_steps.zip", f"{FIRST}/evaluations.npz", "tb"),
    ),
    "resume": Command(f"{TRAIN} HalfCheetah-v5 -n 2048 -i {AGENT}", r"Loading pretrained agent"),
    "another precision": Command(
        f"{TRAIN} HalfCheetah-v5 -n 2048 -params \"precision:'paper'\"", r"Using precision paper and the native engine"
    ),
    "another file": Command(
        f"{TRAIN} HalfCheetah-v5 -n 2048 -conf sb3_fp16.hyperparams.amp_fp16", r"'precision', 'amp-fp16'"
    ),
    "RL Zoo's tuned values": Command(TUNED, r"(?s)'n_steps', 512.*Normaliz"),
    "resume with normalization": Command(
        f"{TUNED} -i logs/ppo_fp16/Hopper-v5_1/Hopper-v5.zip", r"(?s)Loading saved VecNormalize stats.*Saving to"
    ),
    "processes": Command(f"{TRAIN} Swimmer-v5 -n 4096 --vec-env subproc -params n_envs:2", r"Using 2 environments"),
    "optimize": Command(
        f"{SEARCH} -optimize --n-trials 3 --n-jobs 2 --n-startup-trials 1 --n-evaluations 2 --no-optim-plots",
        r"(?s)Best trial:.*batch_size_pow.*Writing report",
        ("study.log",),
    ),
    "what was found": Command(f"{SEARCH} --trial-id 1", r"(?s)Loading from Optuna study.*Saving to"),
    "enjoy": Command(ENJOY, r"Mean reward: -?\d"),
    "enjoy the best": Command(f"{ENJOY} --load-best", r"(?s)best_model.zip.*Mean reward: -?\d"),
    "enjoy a checkpoint": Command(f"{ENJOY} --load-checkpoint 4096", r"(?s)rl_model_4096_steps.*Mean reward: -?\d"),
    "plot training": Command(
        "rl_zoo3 plot_train -a ppo_fp16 -e HalfCheetah-v5 -f logs -w 2", r"(?s)\A(?!.*(No data|No artists))"
    ),
    "plot evaluations": Command(
        "rl_zoo3 all_plots -a ppo_fp16 -e HalfCheetah-v5 -f logs --no-display -o results",
        r"\|HalfCheetah-v5\| *-?\d",
        ("results.pkl",),
    ),
    "a module": Command(
        "python -m rl_zoo3.train --algo ppo_fp16 --env CartPole-v1 -n 256", r"Saving to logs/ppo_fp16/CartPole-v1_"
    ),
    "the wrapper": Command(
        "python -m sb3_fp16.zoo train --algo ppo_fp16 --env CartPole-v1 -n 256", r"Saving to logs/ppo_fp16/CartPole-v1_"
    ),
}


def copy_of_tree(folder: Path) -> Path:
    """The sources, without what was built or installed among them."""
    ignore = shutil.ignore_patterns(".*", "*.so", "build", "*.egg-info", "__pycache__", "demo", "logs")
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=ignore))


def new_environment(folder: Path) -> Path:
    """
    A virtual environment with ``pip install ".[zoo]"``, at the versions of constraints.txt.

    :param folder: where it is made
    :return: its folder of programs
    """
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    environment = {**os.environ, "SB3_FP16_CUDA": "0"}  # kernels take a while to compile, and no command here has a use
    subprocess.run([*map(str, pip), f"{copy_of_tree(folder)}[zoo]"], env=environment, check=True)
    return programs


def run(programs: Path, line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """
    One command as its user types it.

    :param programs: folder of programs of its environment
    :param folder: current folder
    :param environment: variables beside those of this process
    :return: with both outputs in ``stdout``
    """
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    own = {"PATH": path, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment}
    return subprocess.run(
        shlex.split(line),
        cwd=folder,
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def training_table(output: str) -> str:
    """The last table with all that is logged of a rollout and an update, as ``train`` printed it."""
    tables: list[str] = re.findall(r"(?m)^-{10,}\n(?:\|.*\n)+-{10,}$", output)
    return next(table for table in reversed(tables) if "rollout/" in table and "train/" in table)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    The commands with their times, and the training table, as Markdown.

    :param rows: of the results file
    """
    lines = ["| command | seconds |", "|---|---:|"]
    lines += [f"| `{row['line']}` | {row['seconds']} |" for row in rows]
    return "\n".join(
        [*lines, "", "A table that the first prints while it trains:", "", "```", CAPTURE.read_text().rstrip(), "```"]
    )


def main() -> None:
    """Run, write, print."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = new_environment(folder)
        for title, command in COMMANDS.items():
            started = time.perf_counter()
            done = run(programs, command.line, folder)
            if done.returncode:
                sys.exit(f"{command.line}\n{done.stdout}")
            seconds = round(time.perf_counter() - started, 1)
            rows.append({"name": title, "line": command.line, "seconds": seconds, **versions()})
            if title == "train":
                CAPTURE.write_text(training_table(done.stdout) + "\n")
    write_csv(FILE, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
