"""The load of the worker, as metrics and for other processes."""
