"""Folders, and models of the hub as its own cache holds them."""

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from penstock.services.field_problems import SettingsError
from penstock.services.model_folder import model_folder
from penstock.services.settings import ServiceSettings
from penstock.worker_service.text.hf import HfTokenizer
from tests.conftest import FAMILY


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no way to the hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return ServiceSettings.load(mesh_file=tmp_path / "mesh.yaml")


def test_a_folder_is_what_it_is(settings: ServiceSettings, tmp_path: Path) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert model_folder(settings, "org/model") == tmp_path / "org" / "model"  # though it looks like a hub id
    assert model_folder(settings, "/no/such/folder") == Path("/no/such/folder")  # its loader reports that it is missing


def test_a_hub_id_is_found_where_it_has_been_fetched(settings: ServiceSettings, cache: Path) -> None:
    repository = cache / "models--penstock--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree(FAMILY / "small", repository / "snapshots" / "abc")
    found = model_folder(settings, "penstock/small")
    assert found == repository / "snapshots" / "abc"
    assert HfTokenizer(found).vocab_size > 0


def test_a_hub_id_that_cannot_be_had_is_named(settings: ServiceSettings, cache: Path) -> None:
    assert not cache.exists()
    with pytest.raises(
        SettingsError, match=r"model nobody/nothing: no folder .* and it cannot be downloaded from the hub"
    ):
        model_folder(settings, "nobody/nothing")
