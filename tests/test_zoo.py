"""RL Zoo: registration in every kind of installation, hyperparameters, and its unmodified commands."""

import fcntl
import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import optuna
import pytest
import yaml
from rl_zoo3 import exp_manager, hyperparams_opt, utils
from stable_baselines3 import PPO

from benchmarks.zoo import COMMANDS, Command, copy_of_tree, new_environment, run
from sb3_fp16 import PPOFP16, Precision, hyperparams, zoo

PAPER_TASKS = ("HalfCheetah", "Hopper", "Walker2d", "Humanoid", "InvertedDoublePendulum", "Swimmer")


# --- hyperparameters ---


def zoos_own() -> dict:
    return yaml.safe_load((Path(utils.__file__).parent / "hyperparams" / "ppo.yml").read_text())


def compact(values: dict) -> dict:
    """Python code in a value may be laid out in any way."""
    return {
        key: re.sub(r"\s|,(?=\s*\))", "", value) if isinstance(value, str) else value for key, value in values.items()
    }


@pytest.mark.parametrize("task", PAPER_TASKS)
def test_the_papers_tasks_have_the_papers_values(task):
    values = hyperparams.read("ppo_fp16.yml")[f"{task}-v5"]
    policy, defaults = values.pop("policy_kwargs"), inspect.signature(PPO).parameters
    assert values == {
        "policy": "MlpPolicy",
        "n_timesteps": 512_000,
        "n_envs": 1,
        "n_steps": 2048,
        "batch_size": 64,
        "n_epochs": 10,
        "learning_rate": "lin_3e-4",
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_range": 0.2,
        "max_grad_norm": 0.5,
        **{name: defaults[name].default for name in ("ent_coef", "vf_coef", "normalize_advantage")},
    }
    nn = import_module("torch.nn")
    assert eval(policy, {"nn": nn}) == {
        "net_arch": {"pi": [64, 64], "vf": [64, 64]},
        "activation_fn": nn.Tanh,
        "optimizer_kwargs": {"eps": 1e-5},
    }


def test_everything_else_is_rl_zoos():
    ours, theirs = hyperparams.read("ppo_fp16.yml"), zoos_own()
    assert set(ours) == set(theirs) | {f"{task}-v5" for task in PAPER_TASKS}
    for env, values in theirs.items():
        assert compact(ours[env]) == compact(values), env


def test_the_tuned_values_are_rl_zoos():
    ours, theirs = hyperparams.read("ppo_fp16_tuned.yml"), zoos_own()
    assert set(ours) == {f"{task}-v5" for task in PAPER_TASKS}
    for env, values in ours.items():
        task = env.removesuffix("-v5")
        assert compact(values) == compact(theirs.get(f"{task}-v4") or theirs[f"{task}-v2"]), env
    assert import_module("sb3_fp16.hyperparams.tuned").hyperparams == ours


@pytest.mark.parametrize("preset", [name for name in Precision.presets if name != "fp16"])
def test_a_comparisons_file_differs_in_precision_only(preset):
    module = import_module(f"sb3_fp16.hyperparams.{preset.replace('-', '_')}")
    base = hyperparams.read("ppo_fp16.yml")
    assert module.hyperparams.keys() == base.keys()
    for env, values in module.hyperparams.items():
        assert values == {**base[env], "precision": preset}


def test_every_file_has_its_test():
    names = {path.stem for path in hyperparams.FOLDER.glob("*.py")}
    assert names == {"__init__", "tuned"} | {name.replace("-", "_") for name in Precision.presets if name != "fp16"}


# --- registration in this process ---


@pytest.fixture
def manager_of(tmp_path):
    """Makes RL Zoo's ExperimentManager, extended twice."""
    zoo.register()
    zoo.register()

    def make(algo, *args, **kwargs):
        return exp_manager.ExperimentManager(None, algo, "CartPole-v1", str(tmp_path), *args, **kwargs)

    return make


def test_register_adds_the_algorithm_everywhere(manager_of):
    assert utils.ALGOS["ppo_fp16"] is PPOFP16
    assert hyperparams_opt.HYPERPARAMS_SAMPLER["ppo_fp16"] is hyperparams_opt.sample_ppo_params
    assert hyperparams_opt.HYPERPARAMS_CONVERTER["ppo_fp16"] is hyperparams_opt.convert_onpolicy_params
    assert Path(manager_of("ppo_fp16").config) == hyperparams.FOLDER / "ppo_fp16.yml"


def test_conf_and_other_algorithms_are_left_alone(manager_of):
    assert manager_of("ppo_fp16", config="mine.yml").config == "mine.yml"
    assert manager_of(algo="ppo").config.endswith("rl_zoo3/hyperparams/ppo.yml")


def test_where_rl_zoo_is_not_as_we_know_it_no_algorithm_is_offered(manager_of, monkeypatch):
    monkeypatch.delattr(hyperparams_opt, "HYPERPARAMS_CONVERTER")
    with pytest.raises(AttributeError):
        zoo.extend(hyperparams_opt)
    assert "ppo_fp16" not in utils.ALGOS
    zoo.extend(utils)
    assert "ppo_fp16" in utils.ALGOS


# --- the hook ---


class Finder:
    """A finder of this test's: ``rl_zoo3.utils`` is a module of one loader that serves others, too."""

    class Loader:
        __slots__ = ("ran",)

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            self.ran = [*getattr(self, "ran", []), module.__name__]

    def __init__(self):
        self.loader, self.found = self.Loader(), "rl_zoo3.utils"

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self.loader) if name == self.found else None


@pytest.fixture
def hook(monkeypatch):
    """The hook's module, alone among the finders but for one of the test's, and what it tells."""
    spec = spec_from_file_location("hook_of_the_test", Path(__file__).parent.parent / "zoo_hook" / "__init__.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.told = []
    monkeypatch.setattr(module, "tell", lambda loaded: module.told.append(loaded.__name__))
    module.finder = Finder()
    monkeypatch.setattr(sys, "meta_path", [module.WATCHER, module.finder])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    return module


def load(spec):
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_hook_tells_of_rl_zoos_modules_and_leaves_no_trace(hook):
    assert hook.WATCHER.find_spec("rl_zoo3.callbacks") is None
    module = load(hook.WATCHER.find_spec("rl_zoo3.utils"))
    assert hook.told == hook.finder.loader.ran == ["rl_zoo3.utils"]
    assert module.__spec__.loader is module.__loader__ is hook.finder.loader


def test_finders_that_ask_all_others_find_an_end(hook):
    class Asking:
        def find_spec(self, name, path=None, target=None):
            answers = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            return next(filter(None, answers), None)

    sys.meta_path[1:1] = [Asking()]
    load(hook.WATCHER.find_spec("rl_zoo3.utils"))
    assert hook.told == ["rl_zoo3.utils"]


def test_what_fails_in_the_hook_is_left_to_the_other_finders(hook):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            raise RuntimeError("broken")

    hook.finder.found = None
    assert hook.WATCHER.find_spec("rl_zoo3.utils") is None
    sys.meta_path.append(Broken())
    assert hook.WATCHER.find_spec("rl_zoo3.utils") is None
    sys.meta_path.remove(hook.WATCHER)  # by a tool that wraps every finder
    assert hook.WATCHER.find_spec("rl_zoo3.utils") is None


# --- RL Zoo's commands in a new environment ---


@pytest.fixture(scope="session")
def programs(tmp_path_factory, worker_id):
    """The programs of a new environment with ``pip install ".[zoo]"``, made by the first worker of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    with open(shared / "zoo.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = shared / "zoo" / "made"
        if not made.exists():
            new_environment(made.parent)
            made.touch()
    return made.parent / "venv" / "bin"


def succeeds(programs: Path, command: Command, folder: Path) -> str:
    done = run(programs, command.line, folder)
    assert done.returncode == 0, done.stdout
    assert re.search(command.prints, done.stdout), done.stdout
    for name in command.leaves:
        assert (folder / name).exists(), f"{name}\n{done.stdout}"
    return done.stdout


def test_commands(programs, tmp_path, subtests):
    for name, command in COMMANDS.items():
        with subtests.test(name):
            succeeds(programs, command, tmp_path)


def test_a_model_of_sb3s_ppo_goes_on_in_fp16(programs, tmp_path):
    succeeds(programs, Command("rl_zoo3 train --algo ppo --env CartPole-v1 -n 256", "Saving to"), tmp_path)
    agent = "logs/ppo/CartPole-v1_1/CartPole-v1.zip"
    line = f"rl_zoo3 train --algo ppo_fp16 --env CartPole-v1 -n 256 -i {agent}"
    succeeds(programs, Command(line, r"(?s)Loading pretrained agent.*precision fp16"), tmp_path)


# Rewards that fall with every environment made: later trials are worse. The fourth is the second trial's. Both workers
# begin when both are ready, so that neither does all the work.
FALLING = """
import itertools, os, pathlib, time, gymnasium, numpy

pathlib.Path(f"{os.getpid()}.ready").touch()
while len(list(pathlib.Path().glob("*.ready"))) < 2:
    time.sleep(0.01)

class Falling(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Box(-1, 1, (1,), numpy.float32)
    made = itertools.count(1)

    def __init__(self, render_mode=None):
        self.number, self.steps = next(self.made), 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return numpy.zeros(1, numpy.float32), {}

    def step(self, action):
        self.steps += 1
        reward = float("nan") if self.number == 4 else -float(self.number)
        return numpy.zeros(1, numpy.float32), reward, self.steps == 10, False, {}

gymnasium.register("Falling-v0", Falling)
"""
SEARCH = (
    "rl_zoo3 train --algo ppo_fp16 --env Falling-v0 --gym-packages falling -n 600 -optimize --max-total-trials 12 "
    "--n-startup-trials 1 --n-evaluations 6 --sampler random --no-optim-plots --storage study.log --study-name shared"
)


def test_two_workers_complete_one_study_and_prune(programs, tmp_path):
    (tmp_path / "falling.py").write_text(FALLING)
    outputs = []

    def work():
        outputs.append(run(programs, SEARCH, tmp_path, PYTHONPATH=str(tmp_path)))

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done = [set(re.findall(r"Trial (\d+) (?:finished|pruned)", output.stdout)) for output in outputs]
    for output, trials in zip(outputs, done, strict=True):
        assert output.returncode == 0, output.stdout
        assert trials, output.stdout
    # A worker's second trial meets a reward that is no number; one worker at least has come that far.
    said = "".join(output.stdout for output in outputs)
    assert "reward is nan" in said, said
    assert "Sampled hyperparams:" in said, said
    assert not done[0] & done[1]
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log")))
    trials = optuna.load_study(study_name="shared", storage=storage).trials
    assert {str(trial.number) for trial in trials} == done[0] | done[1]
    assert len(trials) >= 12
    states = [trial.state.name for trial in trials]
    assert set(states) == {"COMPLETE", "PRUNED"}
    assert states.count("PRUNED") >= 4


# --- what runs when Python starts ---

KNOWN = "import rl_zoo3.exp_manager; print('ppo_fp16' in rl_zoo3.ALGOS)"
HOOK = Path("zoo_hook") / zoo.HOOK


def test_python_starts_as_fast_as_before(programs, tmp_path):
    line = "python -X importtime -c pass"
    times = [re.search(r"(\d+) \|\s+_sb3_fp16_zoo", run(programs, line, tmp_path).stdout) for _ in range(7)]
    assert min(int(time[1]) for time in times) < 1000  # microseconds
    code = "python -c 'import sys; print(*sys.modules)'"
    on, off = (set(run(programs, code, tmp_path, SB3_FP16_ZOO=switch).stdout.split()) for switch in "10")
    assert on - off == {"_sb3_fp16_zoo"}
    assert off <= on


class Light:
    """An environment with sb3_fp16 alone; its dependencies are those of this one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, folder / "light" / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "light"], check=True)
        (self.site,) = folder.glob("light/lib/python*/site-packages")

    def pip(self, *arguments: object) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.programs / "python", "--quiet"]
        # The native engine takes a minute to build, and is not what these tests are about.
        subprocess.run(
            [*map(str, [*pip, *arguments])], env={**os.environ, "SB3_FP16_CPU": "0", "SB3_FP16_CUDA": "0"}, check=True
        )

    def python(self, code: str, **environment: str) -> str:
        done = self.run(f'python -c "{code}"', **environment)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def run(self, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run(self.programs, line, self.folder, PYTHONPATH=sysconfig.get_path("purelib"), **environment)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The sources as a wheel, without the native engine."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder]
    subprocess.run(
        [*build, copy_of_tree(folder)], env={**os.environ, "SB3_FP16_CPU": "0", "SB3_FP16_CUDA": "0"}, check=True
    )
    return next(folder.glob("*.whl"))


@pytest.fixture
def light(tmp_path):
    return Light(tmp_path)


@pytest.fixture
def from_wheel(light, wheel):
    light.pip("install", "--no-deps", wheel)
    return light


def test_a_wheel_is_enabled_can_be_switched_off_and_uninstalled(from_wheel):
    assert from_wheel.python(KNOWN).splitlines()[-1] == "True"
    assert from_wheel.run("python -m sb3_fp16.zoo status").stdout.splitlines()[-1].startswith("enabled")
    assert from_wheel.python(KNOWN, SB3_FP16_ZOO="0").splitlines()[-1] == "False"
    assert "switched off" in from_wheel.run("python -m sb3_fp16.zoo status", SB3_FP16_ZOO="0").stdout
    from_wheel.pip("uninstall", "--yes", "sb3_fp16")
    assert list(from_wheel.site.rglob("*sb3_fp16*")) == []
    assert from_wheel.python("pass") == ""


def test_in_the_source_trees_folder_all_works_too(from_wheel):
    from_wheel.folder = copy_of_tree(from_wheel.folder)
    assert (
        "hyperparams/ppo_fp16.yml"
        in from_wheel.run("python -m rl_zoo3.train --algo ppo_fp16 --env CartPole-v1 -n 64").stdout
    )
    done = from_wheel.run(
        "python -m sb3_fp16.zoo train --algo ppo_fp16 --env Hopper-v5 -conf sb3_fp16.hyperparams.tuned -n 8"
    )
    assert "sb3_fp16.hyperparams.tuned" in done.stdout
    assert done.returncode == 0, done.stdout


def test_status_tries_what_it_tells(from_wheel):
    (from_wheel.folder / "rl_zoo3").mkdir()
    for module in ("utils", "hyperparams_opt", "exp_manager"):
        (from_wheel.folder / "rl_zoo3" / f"{module}.py").write_text("raise OSError('no such zoo')")
    (from_wheel.folder / "rl_zoo3" / "__init__.py").touch()
    assert "fails: OSError: no such zoo" in from_wheel.run("python -m sb3_fp16.zoo status").stdout


def test_enable_and_disable_work_in_a_wheels_place_too(from_wheel):
    for command, known in (("disable", "False"), ("enable", "True"), ("enable", "True"), ("disable", "False")):
        assert from_wheel.run(f"python -m sb3_fp16.zoo {command}").returncode == 0
        assert from_wheel.python(KNOWN).splitlines()[-1] == known
    (record,) = from_wheel.site.glob("*/RECORD")
    assert record.read_text().count(f"\n{zoo.HOOK},") == 1  # the first line of it is another file's


def test_an_editable_install_is_enabled_by_hand(light):
    tree = copy_of_tree(light.folder)
    for module in (Path(zoo.__file__).parent).glob("_cpu*.so"):
        shutil.copy(module, tree / "sb3_fp16")
    light.pip("install", "--no-deps", "--editable", tree)
    status = "python -m sb3_fp16.zoo status"
    assert light.python(KNOWN).splitlines()[-1] == "False"
    assert "sb3_fp16.zoo enable" in light.run(status).stdout
    assert "ppo_fp16" in light.run("python -m sb3_fp16.zoo train --help").stdout
    assert light.run("python -m sb3_fp16.zoo enable").returncode == 0
    assert light.python(KNOWN).splitlines()[-1] == "True"
    assert "enabled: rl_zoo3 train" in light.run(status).stdout
    light.pip("uninstall", "--yes", "sb3_fp16")
    assert not (light.site / zoo.HOOK).exists()


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ("sb3_fp16/zoo.py", "raise RuntimeError('broken')"),
        ("_sb3_fp16_zoo/__init__.py", "("),
        ("sb3_fp16/__init__.py", "("),
    ],
)
def test_a_broken_package_breaks_no_python_and_no_rl_zoo(broken, text, from_wheel):
    (from_wheel.site / broken).write_text(text)
    assert from_wheel.python("pass") == ""
    output = from_wheel.python(KNOWN)
    assert output.endswith("False\n")
    # Once for three modules; where the hook itself is broken nobody is left to say anything.
    assert output.count("RL Zoo runs without ppo_fp16") == (broken != "_sb3_fp16_zoo/__init__.py")


def test_a_hook_without_its_package_is_silent(light):
    shutil.copy(HOOK, light.site)
    assert light.python("pass") == ""


def test_where_nothing_is_installed_enable_says_so(monkeypatch, capsys):
    monkeypatch.setattr(zoo.metadata, "distributions", lambda **_: iter(()))
    monkeypatch.setattr(sys, "argv", ["zoo", "enable"])
    assert zoo.main() == 1
    assert "pip install" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--help"], 0), (["trian"], 2), (["enable", "now"], 2)])
def test_usage(arguments, status, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zoo", *arguments])
    assert zoo.main() == status
    output = capsys.readouterr()
    assert "enable | disable | status" in (output.err if status else output.out)


def test_without_rl_zoo_the_remedy_is_named(monkeypatch, capsys):
    for spec in (None, ModuleSpec("rl_zoo3", None)):  # nothing, or a mere folder of that name
        monkeypatch.setattr(zoo, "find_spec", lambda _, spec=spec: spec)
        assert ".[zoo]" in zoo.status()
    monkeypatch.setattr(sys, "argv", ["zoo", "train"])
    assert zoo.main() == 1
    assert ".[zoo]" in capsys.readouterr().err
