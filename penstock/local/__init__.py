"""A mesh on one machine: Redis, services and workers as supervised processes.

The CLI reads the run file to find the mesh; that works without the `mesh` extra.
"""
