"""`python -m scripts.code_lines`: lines of code by folder, without blanks, comments, docstrings and generated files."""

import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("penstock", "services", "router_service", "worker_service", "planner_service", "judge_service")
GENERATED = ("penstock/proto/", "penstock/client/sync")
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    """How many lines of a module hold code. A string that is a statement of its own is a docstring."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in _LAYOUT for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)


def by_folder() -> Counter[str]:
    """Lines of code of every top-level folder that is tracked."""
    names = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    counts: Counter[str] = Counter()
    for name in names.split():
        if not name.startswith(GENERATED):
            counts[name.partition("/")[0]] += code_lines((ROOT / name).read_text())
    return counts


if __name__ == "__main__":
    counts = by_folder()
    for folder, count in counts.most_common():
        print(f"{count:8,} {folder}")
    print(f"{sum(counts[folder] for folder in PRODUCT):8,} of the product ({', '.join(PRODUCT)})")
