"""`python -m benchmarks.real_models answers`, for hours; `records` adds what has been answered to the committed records."""

import argparse
import asyncio

from benchmarks.real_models.generate import answer_all
from benchmarks.real_models.prompts import MODELS
from benchmarks.real_models.records import read, update_all

parser = argparse.ArgumentParser(prog="python -m benchmarks.real_models", description=__doc__)
parser.add_argument("what", choices=("answers", "records"))
if parser.parse_args().what == "answers":
    answer_all({model: read(model) for model in MODELS})
else:
    asyncio.run(update_all())
