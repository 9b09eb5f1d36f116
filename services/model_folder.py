"""Where a model's files are: a folder, or a repository of the Hugging Face hub."""

import re
from pathlib import Path

from services.settings import ServiceSettings, SettingsError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_UNUSED = ("original/*", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")  # the same weights in other formats


def looks_like_hub_id(model: str) -> bool:
    """Whether a mesh file's `model` may be an id of the hub: `organisation/name`."""
    return _HUB_ID.fullmatch(model) is not None


def is_hub_id(settings: ServiceSettings, model: str) -> bool:
    """Whether a mesh file's `model` names a repository of the hub: what is no folder and looks like an id."""
    return not settings.resolve(model).is_dir() and looks_like_hub_id(model)


def model_folder(settings: ServiceSettings, model: str) -> Path:
    """The folder that a mesh file's `model` names; a hub id is fetched, unless it is there.

    The hub's own variables hold: HF_HOME (where to), HF_TOKEN, HF_HUB_OFFLINE.

    Raises:
        SettingsError: There is no such folder, or the hub does not have the model.
    """
    folder = settings.resolve(model)
    if not is_hub_id(settings, model):
        if not folder.is_dir():
            raise SettingsError(f"model {model}: no folder {folder}")
        return folder
    from huggingface_hub import snapshot_download  # with the engines that read models, not with the routers

    try:
        return Path(snapshot_download(model, ignore_patterns=list(_UNUSED)))
    except (OSError, ValueError) as error:  # the hub's errors are among these
        said = str(error).strip().partition("\n")[0]
        raise SettingsError(f"model {model}: no folder {folder}, and not to be had from the hub: {said}") from error
