"""The packages that these tests need are installed by `make test-kube` alone."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("helm_python") else ["test_*.py"]
