"""Failures of single requests, which do not affect others."""

import logging
from collections.abc import Callable
from typing import TypeVar

from penstock.services.domain.errors import PenstockError, RequestFailed

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


def request_failed(request_id: str, error: BaseException) -> RequestFailed:
    """Log an unexpected error of one request; return the error for its caller, with its type but no details.

    `error` may be any exception: a panic in the native code of a tokenizer is not an Exception.
    """
    _log.error("request %s failed; others are not affected", request_id, exc_info=error)
    failed = RequestFailed(f"the engine cannot compute this request ({type(error).__name__})")
    failed.__cause__ = error
    return failed


def guarded(request_id: str, work: Callable[[], _T]) -> _T:
    """The result of work for one request.

    Raises:
        PenstockError: Raised by `work`; any other exception becomes RequestFailed.
    """
    try:
        return work()
    except PenstockError:
        raise
    except BaseException as error:
        raise request_failed(request_id, error) from error
