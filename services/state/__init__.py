"""The state of the mesh in Redis: instances and their load, plans, recent traces and sampled requests.

All of it can be rebuilt by the processes that wrote it.
"""
