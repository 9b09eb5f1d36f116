"""Finds the files of a model: in a folder, in a GGUF file, or in a repository of the Hugging Face hub."""

import re
from dataclasses import dataclass
from pathlib import Path

from penstock.services.field_problems import SettingsError
from penstock.services.gguf import gguf_file, is_gguf
from penstock.services.settings import ServiceSettings

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_UNUSED = ("original/*", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")  # the same weights in other formats


@dataclass(frozen=True, slots=True)
class ModelProblem:
    """of_host: another machine may have the model."""

    text: str
    of_host: bool = False


def is_hub_id(settings: ServiceSettings, model: str) -> bool:
    """Whether `model` refers to the hub: it has the form `organisation/name`, and is no folder, in none, and no GGUF file."""
    folder = settings.resolve(model)
    if is_gguf(folder):
        return False
    return _HUB_ID.fullmatch(model) is not None and not folder.is_dir() and not folder.parent.is_dir()


def model_problem(settings: ServiceSettings, model: str) -> ModelProblem | None:
    """Why `model` cannot be loaded; None if it can be, or is an id at the hub, which is not looked up."""
    folder, of_host = settings.resolve(model), Path(model).is_absolute()
    if is_hub_id(settings, model):
        return None
    if is_gguf(folder):
        return None if folder.is_file() else ModelProblem(f"no file {folder}", of_host)
    if folder.is_dir():
        return None
    in_folder = f", and {folder.parent.name}/ is a folder, so this is no id at the hub"
    return ModelProblem(f"no folder {folder}" + (in_folder if _HUB_ID.fullmatch(model) else ""), of_host)


def folder_problem(folder: Path) -> str:
    """Why this folder is no model in Hugging Face format; empty if it is one."""
    if gguf_file(folder) is not None:
        return f"{folder} is a model in GGUF format, which engine: llamacpp serves"
    if (folder / "config.json").is_file():
        return ""
    return f"{folder} has no config.json: not a model of Hugging Face's format"


def model_folder(settings: ServiceSettings, model: str) -> Path:
    """The folder of a model, or its GGUF file. A model of the hub is downloaded unless it is in the cache.

    The environment variables of the hub apply: HF_HOME (the cache), HF_TOKEN, HF_HUB_OFFLINE.

    Raises:
        SettingsError: There is no such folder, and the model cannot be downloaded.
    """
    folder = settings.resolve(model)
    if not is_hub_id(settings, model):
        return folder
    from huggingface_hub import snapshot_download  # installed with engines, not with routers

    try:
        return Path(snapshot_download(model, ignore_patterns=list(_UNUSED)))
    except (OSError, ValueError) as error:  # base classes of the hub's errors
        reason = str(error).strip().partition("\n")[0]
        raise SettingsError(
            f"model {model}: no folder {folder}, and it cannot be downloaded from the hub: {reason}"
        ) from error
