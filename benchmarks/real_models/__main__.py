"""`python -m benchmarks.real_models answers`, for hours; `records` adds what has been answered to the committed records;
`costs` measures what tokens cost, `drafts` what escalated answers cost, `ties` whether texts are the same in batches and with
drafts, and `live [PART ...]` meshes of the models, on a quiet machine."""

import argparse
import asyncio

from benchmarks.real_models import costs, live, ties
from benchmarks.real_models.generate import answer_all
from benchmarks.real_models.prompts import MODELS
from benchmarks.real_models.records import read, update_all

parser = argparse.ArgumentParser(prog="python -m benchmarks.real_models", description=__doc__)
parser.add_argument("what", choices=("answers", "records", "costs", "drafts", "ties", "live"))
parser.add_argument("parts", nargs="*", metavar="PART", help=f"of live: {', '.join(live.PARTS)}; default: all")
arguments = parser.parse_args()
match arguments.what:
    case "answers":
        answer_all({model: read(model) for model in MODELS})
    case "records":
        asyncio.run(update_all())
    case "costs":
        costs.measure()
    case "drafts":
        costs.measure_drafts()
    case "ties":
        ties.measure()
    case "live":
        live.measure(arguments.parts)
