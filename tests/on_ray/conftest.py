"""Ray is installed by `make test-ray` alone."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if find_spec("ray") else ["test_cluster.py", "test_head.py", "test_nodes.py", "test_scaling.py"]
)
