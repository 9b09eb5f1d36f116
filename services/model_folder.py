"""Finds the files of a model: in a folder, or in a repository of the Hugging Face hub."""

import re
from pathlib import Path

from services.field_problems import SettingsError
from services.settings import ServiceSettings

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_UNUSED = ("original/*", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")  # the same weights in other formats


def looks_like_hub_id(model: str) -> bool:
    """Whether `model` has the form of an id at the hub: `organisation/name`."""
    return _HUB_ID.fullmatch(model) is not None


def is_hub_id(settings: ServiceSettings, model: str) -> bool:
    """Whether `model` refers to the hub: it is not a folder and looks like an id."""
    return not settings.resolve(model).is_dir() and looks_like_hub_id(model)


def model_folder(settings: ServiceSettings, model: str) -> Path:
    """The folder of a model. A model of the hub is downloaded unless it is in the cache.

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
