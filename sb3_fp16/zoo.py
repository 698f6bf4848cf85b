"""
RL Zoo: ``rl_zoo3 train --algo ppo_fp16`` and every other command of it.

``python -m sb3_fp16.zoo enable | disable | status`` switches the registration that runs when Python starts (a wheel
brings it; an editable install does not), and ``python -m sb3_fp16.zoo train ...`` runs RL Zoo's commands without it.
"""

import functools
import inspect
import os
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib import import_module, metadata, resources
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from stable_baselines3.common.base_class import BaseAlgorithm

from sb3_fp16.ppo import PPOFP16

ALGORITHMS: dict[str, type[BaseAlgorithm]] = {"ppo_fp16": PPOFP16}
COMMANDS = ("train", "enjoy", "plot_train", "plot_from_file", "all_plots")
USAGE = f"""usage: python -m sb3_fp16.zoo enable | disable | status
       python -m sb3_fp16.zoo {" | ".join(COMMANDS)} ..."""
# What runs when Python starts, in the folder of installed packages, and the environment variable that switches it off.
HOOK, SWITCH = "sb3_fp16_zoo.pth", "SB3_FP16_ZOO"


def _offer_algorithms(utils: ModuleType) -> None:
    """``--algo``."""
    utils.ALGOS.update(ALGORITHMS)


def _offer_samplers(hyperparams_opt: ModuleType) -> None:
    """``-optimize`` and ``--trial-id``: the same search space as PPO's."""
    for table in (hyperparams_opt.HYPERPARAMS_SAMPLER, hyperparams_opt.HYPERPARAMS_CONVERTER):
        table.update(dict.fromkeys(ALGORITHMS, table["ppo"]))


def _offer_hyperparams(exp_manager: ModuleType) -> None:
    """Without ``-conf`` RL Zoo reads {algorithm}.yml in a folder of its own; those of our algorithms are in ours."""
    manager = exp_manager.ExperimentManager
    construct = manager.__init__
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def extended(*args: object, **kwargs: object) -> None:
        call = signature.bind(*args, **kwargs)
        algorithm = call.arguments["algo"]
        if algorithm in ALGORITHMS and not call.arguments.get("config"):
            call.arguments["config"] = str(hyperparams_folder() / f"{algorithm}.yml")
        construct(*call.args, **call.kwargs)

    manager.__init__ = extended


def hyperparams_folder() -> Path:
    """
    Where ``sb3_fp16.hyperparams`` lies.

    A source tree keeps it beside the package, where Python would not look for it when the tree is the current folder.
    """
    name, beside = "sb3_fp16.hyperparams", Path(__file__).parents[1] / "hyperparams"
    if name not in sys.modules and find_spec(name) is None:
        spec = spec_from_file_location(name, beside / "__init__.py", submodule_search_locations=[str(beside)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return Path(str(import_module(name).FOLDER))


EXTENSIONS: dict[str, Callable[[ModuleType], None]] = {
    "rl_zoo3.utils": _offer_algorithms,
    "rl_zoo3.hyperparams_opt": _offer_samplers,
    "rl_zoo3.exp_manager": _offer_hyperparams,
}


def extend(module: ModuleType) -> None:
    """
    Add our algorithms to a module of RL Zoo; again does no harm.

    :param module: one that EXTENSIONS names
    :raises Exception: if it is not as we know it; ``--algo`` offers none of our algorithms then
    """
    try:
        hyperparams_folder()  # also for ``-conf sb3_fp16.hyperparams.paper``
        EXTENSIONS[module.__name__](module)
    except Exception:
        for name in ALGORITHMS:
            getattr(sys.modules.get("rl_zoo3.utils"), "ALGOS", {}).pop(name, None)
        raise


def register() -> None:
    """
    Add our algorithms to RL Zoo in this process, e.g. in a notebook.

    :raises ImportError: without rl_zoo3
    """
    for name in EXTENSIONS:
        extend(import_module(name))


def _home() -> tuple[Path, metadata.Distribution]:
    """
    The folder that sb3_fp16 is installed in, read by Python at its start, and the record of that installation.

    :raises FileNotFoundError: if there is none
    """
    for folder in (sysconfig.get_path("purelib"), site.getusersitepackages(), *site.getsitepackages()):
        for distribution in metadata.distributions(name="sb3_fp16", path=[folder]):
            return Path(folder), distribution
    raise FileNotFoundError(
        f"{Path(__file__).parent} is not installed where {sys.executable} looks for .pth files at its start. "
        "pip install it there, or do without: python -m sb3_fp16.zoo train ..."
    )


def enable() -> str:
    """
    Register our algorithms whenever RL Zoo is imported, in every Python process that starts from now on.

    The file is entered among those installed, so that uninstalling sb3_fp16 removes it.

    :return: what was done
    :raises OSError: if sb3_fp16 is not installed, or its folder cannot be written
    """
    folder, distribution = _home()
    files = distribution.files or []
    record = next((file for file in files if file.name == "RECORD"), None)
    (folder / HOOK).write_bytes((resources.files("_sb3_fp16_zoo") / HOOK).read_bytes())
    if record is not None and HOOK not in map(str, files):
        with open(record.locate(), "a", encoding="utf-8") as listing:
            listing.write(f"{HOOK},,\n")
    return f"enabled, by {folder / HOOK}"


def disable() -> str:
    """
    Undo ``enable``, or what a wheel brought.

    :return: what was done
    :raises OSError: if sb3_fp16 is not installed, or its folder cannot be written
    """
    folder, _ = _home()
    (folder / HOOK).unlink(missing_ok=True)
    return "disabled; `python -m sb3_fp16.zoo train ...` works without"


_ABSENT = 3
# What a new process knows, as the registration happens only when one starts.
_PROBE = f"""
import sys
if "_sb3_fp16_zoo" not in sys.modules: sys.exit({_ABSENT})
from rl_zoo3 import exp_manager, hyperparams_opt, utils
tables = utils.ALGOS, hyperparams_opt.HYPERPARAMS_SAMPLER, hyperparams_opt.HYPERPARAMS_CONVERTER
sys.exit(not all(name in table for table in tables for name in {tuple(ALGORITHMS)}))
"""


def status() -> str:
    """Whether this Python's ``rl_zoo3`` knows our algorithms, tried in a new process, and what to do if it does not."""
    if not is_installed():
        return 'RL Zoo is not installed; the extra of sb3_fp16 brings it: pip install ".[zoo]"'
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    done = subprocess.run([sys.executable, "-c", _PROBE], check=False, capture_output=True, text=True)
    if done.returncode == _ABSENT:
        return "not enabled: python -m sb3_fp16.zoo enable"
    if done.returncode:
        return f"enabled, but it fails: {(done.stderr.splitlines() or ['unknown'])[-1]}"
    return f"enabled: rl_zoo3 train --algo {' | '.join(ALGORITHMS)}"


def is_installed() -> bool:
    """Whether there is an RL Zoo, and no mere folder of that name."""
    spec = find_spec("rl_zoo3")
    return spec is not None and spec.origin is not None


def main() -> int:
    """Run the command that stands in ``sys.argv``; returns the exit status."""
    own = {"enable": enable, "disable": disable, "status": status}
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in own and len(sys.argv) == 2:
        try:
            print(own[command]())
        except OSError as problem:
            print(problem, file=sys.stderr)
            return 1
        return 0
    if command not in COMMANDS:
        asked = command in ("-h", "--help")
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    if not is_installed():
        print(status(), file=sys.stderr)
        return 1
    register()
    import_module("rl_zoo3.cli").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
