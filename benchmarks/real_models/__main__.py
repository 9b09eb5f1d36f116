"""`python -m benchmarks.real_models answers`, for hours; `records` adds what has been answered to the committed records;
`costs` measures what tokens cost, on a quiet machine."""

import argparse
import asyncio

from benchmarks.real_models import costs
from benchmarks.real_models.generate import answer_all
from benchmarks.real_models.prompts import MODELS
from benchmarks.real_models.records import read, update_all

parser = argparse.ArgumentParser(prog="python -m benchmarks.real_models", description=__doc__)
parser.add_argument("what", choices=("answers", "records", "costs"))
match parser.parse_args().what:
    case "answers":
        answer_all({model: read(model) for model in MODELS})
    case "records":
        asyncio.run(update_all())
    case "costs":
        costs.measure()
