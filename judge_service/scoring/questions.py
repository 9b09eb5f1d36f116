"""Questions to language models that grade. No I/O."""

Messages = list[dict[str, str]]

REPLY_TOKENS = 4
"""Room for a grade: a digit, possibly after `Grade:`."""
TOP_LOGPROBS = 10  # enough for the digits
