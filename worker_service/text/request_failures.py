"""Failures of single requests, which do not affect others."""

import logging

from penstock.services.domain.errors import RequestFailed

_log = logging.getLogger(__name__)


def request_failed(request_id: str, error: BaseException) -> RequestFailed:
    """Log an unexpected error of one request; return the error for its caller, with its type but no details.

    `error` may be any exception: a panic in the native code of a tokenizer is not an Exception.
    """
    _log.error("request %s failed; others are not affected", request_id, exc_info=error)
    failed = RequestFailed(f"the engine cannot compute this request ({type(error).__name__})")
    failed.__cause__ = error
    return failed
