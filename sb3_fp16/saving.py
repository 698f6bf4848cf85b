"""
Model files that pass between PPOFP16 and SB3's PPO, both ways.

One format serves both. A file names SB3's classes, holds FP32 weights and, for SHARP, the state that torch's Adam
would have; an ordinary ``PPO.load`` reads it where sb3_fp16 is not installed. Beside Adam's state lies an entry that
torch ignores: SHARP's own state and the engine's, from which ``PPOFP16.load`` restores every bit.
"""

import contextlib
import copy
import functools
import io
import json
import math
import pathlib
import shutil
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from os import fsync
from typing import Any

import torch as th
from stable_baselines3.common.save_util import open_path
from torch import Tensor

from sb3_fp16.sharp import SHARP, stored_format

FORMAT = 1
"""Version of the file format, saved as ``sb3_fp16_format``; raised when older versions could misread a file."""

ENTRY = "sb3_fp16"
"""Key, in the optimizer's state, of what Adam has no place for."""

StateDict = dict[str, Any]
Path = str | pathlib.Path | io.BufferedIOBase

_ADAM_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_NO_LAYOUT = ("seed", *_ADAM_SETTINGS)  # settings of SHARP that its state does not depend on
_SMALLEST = th.finfo(th.float32).tiny
_REQUIRED = ("data", "policy.pth", "policy.optimizer.pth")


def upcast(weights: StateDict) -> StateDict:
    """
    A copy of a module's state with 16-bit numbers as FP32; other formats stay.

    :param weights: from ``state_dict()``; its values are replaced
    """
    for name, value in weights.items():
        if isinstance(value, Tensor):
            is_half = value.is_floating_point() and value.dtype.itemsize == 2
            weights[name] = value.to(th.float32 if is_half else value.dtype, copy=True)
    return weights


def portable_optimizer_state(optimizer: th.optim.Optimizer, as_adam: bool, extra: Mapping[str, Any]) -> StateDict:
    """
    An optimizer's state as it is saved; shares no memory with the optimizer.

    :param optimizer: of the policy
    :param as_adam: give SHARP's state in Adam's form, as Adam will be there where SB3 loads it
    :param extra: plain types and tensors to go along, for ``PPOFP16.load``
    """
    own = copy.deepcopy(optimizer.state_dict())
    if isinstance(optimizer, SHARP) and as_adam:
        return {**to_adam(own), ENTRY: {**extra, "sharp": own}}
    # Others may refuse a key they don't know.
    ignores_keys = type(optimizer).load_state_dict in (th.optim.Optimizer.load_state_dict, SHARP.load_state_dict)
    return {**own, ENTRY: dict(extra)} if ignores_keys else own


def own_optimizer_state(saved: Mapping[str, Any], optimizer: th.optim.Optimizer) -> StateDict:
    """
    What to give to an optimizer's ``load_state_dict``, from any form a file may hold.

    SHARP's own state is taken bit for bit if it has the layout that the optimizer asks for and still says the same as
    Adam's state beside it; otherwise Adam's is converted.

    :param saved: Adam's or SHARP's state, or that of the optimizer's own class
    :param optimizer: of the policy
    :return: shares no memory with ``saved`` where torch would keep sharing it
    :raises ValueError: if SHARP is to be given the state of an optimizer other than Adam, or one that is not finite
    """
    state = {name: value for name, value in saved.items() if name != ENTRY}
    is_sharp = all("state_scale" in group for group in state["param_groups"])
    if not isinstance(optimizer, SHARP):
        return copy.deepcopy(to_adam(state) if is_sharp else state)
    own = state if is_sharp else saved.get(ENTRY, {}).get("sharp")
    if own is None:
        return from_adam(state, optimizer)
    adam = to_adam(own)
    if _fits(own, optimizer) and (is_sharp or _agree(adam, state)):
        return own
    return from_adam(adam if is_sharp else state, optimizer)


def keep_formats(state: StateDict, optimizer: th.optim.Optimizer) -> None:
    """
    Put back what torch has cast to the parameters' format: a user's optimizer keeps FP32 state of 16-bit parameters.

    :param state: what the optimizer has loaded
    :param optimizer: changed in place; SHARP keeps formats by itself
    """
    if isinstance(optimizer, SHARP):
        return
    keys = [key for group in state["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, parameter in zip(keys, parameters, strict=True):
        for name, value in state["state"].get(key, {}).items():
            if name != "step" and isinstance(value, Tensor):
                optimizer.state[parameter][name] = value.to(parameter.device, copy=True)


def to_adam(own: Mapping[str, Any]) -> StateDict:
    """
    SHARP's state as torch's Adam keeps it: exp_avg = m/S, exp_avg_sq = (w/S)², FP32, exact for FP16 m and w.

    A row's w stands for each of its elements; rank-1 ones are r_i·c_j/L, L the RMS over the rows.

    :param own: from ``SHARP.state_dict()``
    :return: as from ``Adam.state_dict()``, same order of parameters
    """
    state, groups = {}, []
    for group in own["param_groups"]:
        settings = {**{name: group[name] for name in _ADAM_SETTINGS}, "lr": float(group["lr"])}
        (form,) = th.optim.Adam([th.zeros(())], **settings).state_dict()["param_groups"]
        if "decoupled_weight_decay" in form:  # since torch 2.6
            form["decoupled_weight_decay"] = group["decoupled_weight_decay"]
        groups.append({**form, "params": list(group["params"])})
        for key in group["params"]:
            if key in own["state"]:
                state[key] = _adam_state(own["state"][key], group["state_scale"])
    return {"state": state, "param_groups": groups}


def _adam_state(own: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    moment, root = own["first_moment"], own["root_second_moment"].float() / scale
    if root.shape != moment.shape:
        rows, columns = root[: len(moment)], root[len(moment) :]
        if len(columns):  # in float64, so that every device rounds to the same FP32 number
            layer = rows.double().square().mean().sqrt().float()
            root = th.outer(rows / layer.clamp_min(_SMALLEST), columns)
        else:
            root = rows.unsqueeze(1).expand(-1, math.prod(moment.shape[1:]))
        root = root.reshape(moment.shape)
    return {"step": own["step"].float().cpu(), "exp_avg": moment.float() / scale, "exp_avg_sq": root.square()}


def from_adam(adam: Mapping[str, Any], optimizer: SHARP) -> StateDict:
    """
    Adam's state as this SHARP keeps it: m = S·exp_avg, w = S·sqrt(mean exp_avg_sq) over the elements that share it.

    Means and roots are taken in float64 and rounded to nearest, saturating; carries are zero. Learning rate, betas,
    eps and weight decay are Adam's, all other settings the optimizer's.

    :param adam: as from ``Adam.state_dict()``
    :param optimizer: says which parameters share what, in which format; its empty states are made
    :return: for ``SHARP.load_state_dict``
    :raises ValueError: if the state is not Adam's, does not fit the parameters, or is not finite
    """
    optimizer.initialize_state()
    own = optimizer.state_dict()
    if [len(group["params"]) for group in adam["param_groups"]] != [len(g["params"]) for g in own["param_groups"]]:
        raise ValueError("The optimizer state is one of other parameters than the policy's.")
    state = {}
    for theirs, group in zip(adam["param_groups"], own["param_groups"], strict=True):
        if not set(_ADAM_SETTINGS) <= set(theirs):
            raise ValueError("The optimizer state is not Adam's; give the policy the optimizer_class that made it.")
        group.update({name: theirs[name] for name in _ADAM_SETTINGS})
        for source, key in zip(theirs["params"], group["params"], strict=True):
            if source in adam["state"]:
                state[key] = _sharp_state(adam["state"][source], own["state"][key], group, key)
    return {"state": state, "param_groups": own["param_groups"]}


def _sharp_state(
    adam: Mapping[str, Any], form: Mapping[str, Tensor], group: Mapping[str, Any], key: int
) -> dict[str, Tensor]:
    """One parameter's state in the formats and shapes of ``form``."""
    scale = group["state_scale"]
    moment, square = adam["exp_avg"].double(), adam["exp_avg_sq"].double()
    if not (th.isfinite(moment).all() and th.isfinite(square).all() and (square >= 0).all()):
        raise ValueError(
            f"The optimizer state of parameter {key} is not finite or negative; the file is damaged or diverged."
        )
    root = square
    if form["root_second_moment"].shape != form["first_moment"].shape:
        square = square.flatten(1)
        rows, columns = square.mean(1), square.mean(0)
        root = rows if len(form["root_second_moment"]) == len(rows) else th.cat([rows, columns])
    values = {"first_moment": moment * scale, "root_second_moment": root.sqrt() * scale}
    empty = {name: th.zeros_like(value) for name, value in form.items()}
    stored = {n: stored_format(group, form[n]).store(value.float()) for n, value in values.items()}
    return {**empty, **stored, "step": th.as_tensor(adam["step"]).to(th.int64)}


def _fits(own: Mapping[str, Any], optimizer: SHARP) -> bool:
    """Whether a state of SHARP is laid out as the optimizer's: formats, sharing, scale, carries."""
    optimizer.initialize_state()
    wanted = optimizer.state_dict()

    def settings(groups: list[StateDict]) -> list[StateDict]:
        return [{name: value for name, value in group.items() if name not in _NO_LAYOUT} for group in groups]

    same_settings = settings(own["param_groups"]) == settings(wanted["param_groups"])
    return same_settings and all(layout(own["state"][k]) == layout(wanted["state"].get(k, {})) for k in own["state"])


def layout(state: Mapping[str, Tensor]) -> dict[str, tuple[th.dtype, th.Size]]:
    """Format and shape of each tensor of a state."""
    return {name: (value.dtype, value.shape) for name, value in state.items()}


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states of Adam say the same, but for the last bits that another device may round otherwise."""

    def settings(groups: list[StateDict]) -> list[Any]:
        return [(float(g["lr"]), *g["betas"], g["eps"], g["weight_decay"], *g["params"]) for g in groups]

    def same(a: Tensor, b: Any) -> bool:
        b = th.as_tensor(b).to(a)
        return a.shape == b.shape and th.allclose(a, b, rtol=1e-6, atol=0)

    if settings(one["param_groups"]) != settings(other["param_groups"]) or one["state"].keys() != other["state"].keys():
        return False
    return all(
        same(value, other["state"][key][name]) for key, state in one["state"].items() for name, value in state.items()
    )


def check_file(path: Path) -> None:
    """
    Refuse a file that cannot be loaded, before anything is built from it.

    :param path: as for SB3's ``load``; a file object is left at its position
    :raises ValueError: for a file that is damaged, holds no model of PPO, or was saved by a newer version
    :raises FileNotFoundError: if there is none
    """
    file = open_path(path, "r", suffix="zip")
    position = file.tell()
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"{path} is damaged: {damaged} in it does not match its checksum.")
            missing = [name for name in _REQUIRED if name not in archive.namelist()]
            if missing:
                raise ValueError(f"{path} is truncated or no file of PPO.save: it holds no {missing[0]}.")
            data = json.loads(archive.read("data"))
            if not isinstance(data, dict) or "clip_range" not in data:
                raise ValueError(f"{path} is no file of PPO.save: its data is that of something else.")
            version = data.get("sb3_fp16_format", FORMAT)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or no file of PPO.save: it is not a complete zip.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no file of PPO.save: its data is not JSON.") from error
    finally:
        if isinstance(path, (str, pathlib.Path)):
            file.close()
        else:
            file.seek(position)
    if not isinstance(version, int):
        raise ValueError(f"{path} is damaged: sb3_fp16_format is {version!r}.")
    if version > FORMAT:
        raise ValueError(f"{path} was saved by a newer sb3_fp16 (format {version}, known {FORMAT}); upgrade sb3_fp16.")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """
    What to write to so that a file is replaced at once or not at all: a temporary file beside it.

    :param path: as for SB3's ``save``, which appends ``.zip``, creates folders and avoids them as targets; a file
        object is written directly
    """
    if not isinstance(path, (str, pathlib.Path)):
        yield path
        return
    target = _target(pathlib.Path(path))
    if target.exists():
        target.open("r+b").close()  # which a write-protected file refuses
    temporary = target.with_name(f".sb3_fp16-{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _target(path: pathlib.Path) -> pathlib.Path:
    """The file SB3's ``save`` would write, through links; warns as it does."""
    if path.suffix == "":
        path = pathlib.Path(f"{path}.zip")
    while path.is_dir():
        warnings.warn(f"Path '{path}' is a folder. Will save instead to {path}_2", stacklevel=5)
        path = pathlib.Path(f"{path}_2")
    if not path.parent.exists():
        warnings.warn(f"Path '{path.parent}' does not exist. Will create it.", stacklevel=5)
        path.parent.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def warn_if_only_for_us(attributes: Mapping[str, Any]) -> None:
    """
    Say so when a file will not load where sb3_fp16 is not installed.

    :param attributes: of a model, by name, that are pickled by reference
    """
    for name, value in attributes.items():
        if found := _classes_of_ours(value):
            warnings.warn(
                f"Loading this file needs sb3_fp16 installed, even with SB3's PPO, as {name} refers to {found[0]}.",
                stacklevel=3,
            )


def _classes_of_ours(value: Any) -> list[str]:
    """Names of classes in a value that are this package's or derived from one of them."""
    if isinstance(value, functools.partial):
        value = (value.func, *value.args, value.keywords)
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return [name for item in value for name in _classes_of_ours(item)]
    cls = value if isinstance(value, type) else type(value)
    return [cls.__name__] if any(base.__module__.split(".")[0] == "sb3_fp16" for base in cls.__mro__) else []
