"""The error of a file that cannot be used."""


class FileError(Exception):
    """A file cannot be used; the message names it, and what in it is at fault."""
