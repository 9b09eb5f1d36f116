"""llama.cpp's C interface, as far as the engine uses it, by ctypes.

ctypes needs neither a compiler nor a package, and releases the interpreter lock in every call. The structs below are those of
one version of llama.cpp, whose interface changes often; `load_library` refuses any other.
"""

import ctypes
import functools
import importlib.util
import logging
import os
from collections import deque
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint8, c_uint32, c_void_p
from pathlib import Path

_log = logging.getLogger(__name__)

PACKAGE, LIBRARY = "xllamacpp", "xllamacpp.abi3.so"
"""The package on PyPI whose module exports llama.cpp's C interface, and the module's file."""
VERSIONS = {"llama_version": "0.6.0-dev", "ggml_version": "0.26.0"}
"""What the library that the structs are written for says of itself: xllamacpp 2026.10.11549, which is llama.cpp b11549."""
BUILT_FOR = "llama.cpp 0.6.0-dev with ggml 0.26.0 (b11549)"

Token = c_int32
ERROR = 4  # of ggml_log_level
_LEVELS = {ERROR: logging.WARNING}  # its warnings are about files in which nothing is wrong


ProgressCallback = ctypes.CFUNCTYPE(c_bool, c_float, c_void_p)


class LibraryUnusable(Exception):
    """There is no library of llama.cpp, or it is not the version that this module is written for."""


def _fields(*kinds: tuple[type, str]) -> tuple[tuple[str, type], ...]:
    """The fields of a struct, from their types in order and the names of each."""
    return tuple((name, kind) for kind, names in kinds for name in names.split())


class ModelParams(ctypes.Structure):
    _fields_ = _fields(
        (c_void_p, "devices tensor_buft_overrides"),
        (c_int32, "n_gpu_layers split_mode load_mode lazy_mode main_gpu"),
        (c_void_p, "tensor_split progress_callback progress_callback_user_data kv_overrides"),
        (c_bool, "vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp"),
    )


class ContextParams(ctypes.Structure):
    _fields_ = _fields(
        (c_uint32, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq"),
        (c_int32, "n_threads n_threads_batch ctx_type"),
        (c_int32, "rope_scaling_type pooling_type attention_type flash_attn_type"),
        (c_float, "rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow"),
        (c_uint32, "yarn_orig_ctx"),
        (c_float, "defrag_thold"),
        (c_void_p, "cb_eval cb_eval_user_data"),
        (c_int32, "type_k type_v"),
        (c_size_t, "moe_cache_size"),
        (c_void_p, "abort_callback abort_callback_data"),
        (c_bool, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"),
        (c_void_p, "samplers"),
        (c_size_t, "n_samplers"),
        (c_void_p, "ctx_other"),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(Token)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


LogCallback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)

_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "llama_version": (c_char_p, ()),
    "ggml_version": (c_char_p, ()),
    "llama_log_set": (None, (LogCallback, c_void_p)),
    "llama_backend_init": (None, ()),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_model_n_params": (ctypes.c_uint64, (c_void_p,)),
    "llama_model_has_encoder": (c_bool, (c_void_p,)),
    "llama_model_has_decoder": (c_bool, (c_void_p,)),
    "llama_model_is_recurrent": (c_bool, (c_void_p,)),
    "llama_model_is_hybrid": (c_bool, (c_void_p,)),
    "llama_model_is_diffusion": (c_bool, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_free": (None, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits": (POINTER(c_float), (c_void_p,)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_state_seq_get_size": (c_size_t, (c_void_p, c_int32)),
    "llama_state_seq_get_data": (c_size_t, (c_void_p, POINTER(c_uint8), c_size_t, c_int32)),
    "llama_state_seq_set_data": (c_size_t, (c_void_p, POINTER(c_uint8), c_size_t, c_int32)),
}


_errors: deque[str] = deque(maxlen=8)


def logged_error() -> str:
    """The first error that llama.cpp has logged since the last call: the others follow from it."""
    first = _errors[0] if _errors else "it does not say why"
    _errors.clear()
    return first


def _log_message(level: int, text: bytes, _: object) -> None:
    message = (text or b"").decode("utf-8", "replace").rstrip()
    if level == ERROR and "failed to load model" not in message:
        _errors.append(message)
    _log.log(_LEVELS.get(level, logging.DEBUG), "%s", message)


_logged = LogCallback(_log_message)


def library_path(stated: str = "") -> Path:
    """The library's file: the stated one, or that of the package on PyPI.

    Raises:
        LibraryUnusable: There is none.
    """
    if stated:
        if not Path(stated).is_file():
            raise LibraryUnusable(f"no file {stated}")
        return Path(stated)
    package = importlib.util.find_spec(PACKAGE)
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        if (file := Path(folder) / LIBRARY).is_file():
            return file
    raise LibraryUnusable(f"GGUF models need llama.cpp's library: pip install 'penstock-mesh[gguf]' ({PACKAGE})")


@functools.cache
def load_library(path: Path) -> ctypes.CDLL:
    """The library with its functions declared; loaded once.

    Raises:
        LibraryUnusable: It cannot be loaded, or its version is another one.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # where it ends the process, it would attach a debugger first
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LibraryUnusable(f"{path}: {error}; this version of Penstock is written for {BUILT_FOR}") from None
    versions = {name: getattr(library, name)().decode() for name in VERSIONS}
    if versions != VERSIONS:
        text = f"llama.cpp {versions['llama_version']} with ggml {versions['ggml_version']}"
        raise LibraryUnusable(f"{path} is {text}; this version of Penstock is written for {BUILT_FOR}")
    if not _layout_is_ours(library):
        raise LibraryUnusable(f"{path}: its structs differ; this version of Penstock is written for {BUILT_FOR}")
    library.llama_log_set(_logged, None)
    library.llama_backend_init()
    return library


def _layout_is_ours(library: ctypes.CDLL) -> bool:
    """Whether the library's default parameters make sense in our structs: a development version may change them unsaid."""
    model, context = library.llama_model_default_params(), library.llama_context_default_params()
    return (
        (model.n_gpu_layers, model.load_mode, model.use_extra_bufts) == (-1, -1, True)
        and (context.n_ctx, context.n_batch, context.n_ubatch) == (512, 2048, 512)
        and context.n_threads == context.n_threads_batch > 0
        and (context.flash_attn_type, context.type_k, context.type_v) == (-1, 1, 1)
        and (context.no_perf, context.swa_full) == (True, True)
    )


def model_problem(library: ctypes.CDLL, file: Path) -> str:
    """Why llama.cpp cannot read a model's header and vocabulary; empty if it can. Takes up to a second."""
    params = library.llama_model_default_params()
    params.vocab_only, params.n_gpu_layers = True, 0
    model = library.llama_model_load_from_file(str(file).encode(), params)
    if not model:
        return f"{file}: {logged_error()}"
    library.llama_model_free(model)
    return ""
