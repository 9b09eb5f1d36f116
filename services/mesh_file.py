"""Reads mesh files."""

import hashlib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from penstock.question_files.errors import yaml_problem
from penstock.services.field_problems import SettingsError, field_problems, joined
from penstock.services.mesh_rules import disagreements
from penstock.services.mesh_schema.mesh import MeshFile


def load_mesh_file(path: Path) -> MeshFile:
    """Read a mesh file and check it.

    Raises:
        SettingsError: The file cannot be read, or holds bad values; the message names the file and every bad field.
    """
    data = read_mesh_data(path)
    try:
        mesh = MeshFile.model_validate(data)
    except ValidationError as error:
        problems = field_problems(error, MeshFile)
    else:
        problems = [*disagreements(mesh)]
        if not problems:
            return mesh
    raise SettingsError(f"{path}: {joined(problems)}", problems)


def read_mesh_data(path: Path) -> dict[str, Any]:
    """The content of a mesh file, unchecked.

    Raises:
        SettingsError: There is no such file, or it is not a YAML mapping.
    """
    try:
        data = yaml.load(path.read_text(), _UniqueKeyLoader)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text: {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not YAML: {yaml_problem(error)}") from None
    except RecursionError:
        raise SettingsError(f"{path}: nested too deep") from None
    if not isinstance(data, dict):
        raise SettingsError(f"{path}: must hold a mapping with at least `tiers`")
    return data


def digest(path: Path) -> str:
    """A short digest of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML would silently use the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[Any] = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is not None and name in names:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key '{name}'", key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)
