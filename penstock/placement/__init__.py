"""Placing the processes of a mesh: what should run, what runs, and the back ends of `penstock up` that start and stop it.

`processes` says what should run, `mesh` compares it with what runs and decides, a `Placer` does it.
"""
