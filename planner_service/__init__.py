"""The planner service: owns the plan that the mesh follows."""

import os

# The planner multiplies small matrices: threads of OpenBLAS only wait for the next ones, busily. A plan of 2.6 CPU seconds
# took .6 more on two cores. Read when numpy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
