"""What numba compiles, and where compiled code is kept between processes: `@compiled()` instead of `numba.njit`.

Compiled code contains the functions that it calls and the constants that it reads, of other modules too; numba's own cache
looks at the function's file alone. So here the folder of a module's compiled code is named after a digest of

    its source, that of every compiled module it imports from, and so on, and of the modules that those read constants from.

After an edit of any of them no process finds the old folder, and the first to write the new one removes it. The folder is in
`__pycache__` next to the module; where that cannot be written, in `~/.cache/penstock`; with NUMBA_CACHE_DIR set, there.
Code is compiled for one kind of CPU: on another one, it is compiled again.
"""

import functools
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

P = ParamSpec("P")
R = TypeVar("R")

WORK = {
    "penstock.planner_service": ("the planner's simulators", 40),
    "penstock.worker_service": ("the engine's passes", 25),
    "penstock.services.domain.slo": ("the scheduler of latency objectives", 20),
    "penstock.services": ("products of matrices", 2),
}
"""What is compiled, by the beginning of its modules' names, and the seconds of CPU time that all of it takes."""
MARK = "@compiled("
_IMPORT = re.compile(r"^from (penstock[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
_PACKAGE = Path(__file__).parent.parent  # of the name `penstock`
_logger = logging.getLogger(__name__)


def compiled(*, allocates: bool = True, **options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile a function at its first call, without Python's lock, and keep the code. options: of `numba.njit`.

    allocates: else its arrays are the caller's, and no references to them are counted. Counting them, with atomic
    instructions at every call, took two thirds of a simulation.
    """
    if not allocates:
        options |= {"_nrt": False, "forceinline": True}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        dispatcher = numba.njit(nogil=True, **options)(function)
        dispatcher._cache = _Cache(function)
        result: Callable[P, R] = dispatcher
        return result

    return decorate


def sources(module: Path) -> set[Path]:
    """The files that the compiled code of a module is made of, itself included."""
    files, queue = {Path(__file__)}, [module]
    while queue:
        file = queue.pop()
        if file in files:
            continue
        files.add(file)
        text = file.read_text()
        if MARK in text:  # others are read for their constants
            queue += [each for match in _IMPORT.finditer(text) for each in _files(*match.groups())]
    return files


def _files(module: str, names: str) -> list[Path]:
    base = _PACKAGE.joinpath(*module.split(".")[1:])
    candidates = [base.with_suffix(".py"), base / "__init__.py"]
    candidates += [base / f"{name}.py" for name in re.findall(r"\w+", names)]
    return [file for file in candidates if file.is_file()]


@functools.cache
def folder_of(module: Path) -> Path:
    """Where the compiled code of a module is kept."""
    files = sorted((file.name, file.read_bytes()) for file in sources(module))
    digest = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
    name, near = f"{module.stem}-{digest}", module.parent / "__pycache__"
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR) / name
    if (near / name).is_dir() or os.access(module.parent, os.W_OK):
        return near / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / name


class _Locator(_CacheLocator):
    """What numba asks for the place of its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def from_function(cls, _: Any, py_file: str) -> "_Locator":
        return cls(folder_of(Path(py_file)))

    def get_cache_path(self) -> str:
        return str(self._folder)

    def ensure_cache_path(self) -> None:
        if self._folder.is_dir():
            return
        if self._folder.parent.name == "__pycache__":
            for old in self._folder.parent.glob(f"{self._folder.name.rpartition('-')[0]}-*"):
                shutil.rmtree(old, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)

    def get_source_stamp(self) -> str:
        return self._folder.name

    def get_disambiguator(self) -> str:
        return ""


class _Files(CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class _Cache(FunctionCache):
    """The cache of one function."""

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        code = super().load_overload(sig, target_context)
        if code is None and not Path(self.cache_path).is_dir():
            module = self._py_func.__module__
            what, seconds = next((work for part, work in WORK.items() if module.startswith(part)), (module, 10))
            _say("compiling %s: up to %d s of CPU time, once per installation", what, seconds)
        return code

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:  # a disk that is full, or not ours to write: the next process compiles again
            _say("compiled code is not kept: set NUMBA_CACHE_DIR to a folder for it (%s)", error.strerror)


@functools.cache
def _say(message: str, *values: object) -> None:
    """Once in this process."""
    _logger.warning(message, *values)
