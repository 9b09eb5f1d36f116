"""Errors of one request: that request ends, nothing else does."""

import logging

from services.domain.errors import RequestFailed

_log = logging.getLogger(__name__)


def request_failed(request_id: str, error: BaseException) -> RequestFailed:
    """Log an unexpected error of one request and return what its caller gets: the kind of error, without details.

    `error` may be any exception: a panic inside a tokenizer's native code is not an Exception.
    """
    _log.error("request %s failed; the others go on", request_id, exc_info=error)
    failed = RequestFailed(f"the engine cannot compute this request ({type(error).__name__})")
    failed.__cause__ = error
    return failed
