"""Look up known vulnerabilities of the locked dependencies: `python -m scripts.audit_dependencies`.

Runs pip-audit over constraints.txt. Where it is not installed, or cannot reach its service, that is said and is no failure.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "constraints.txt"
TIMEOUT_S = 300.0


def main() -> None:
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(FILE), "--no-deps", "--disable-pip"]
    try:
        done = subprocess.run(
            [*command, "--format", "json", "--progress-spinner", "off"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"dependencies are not audited: no result within {TIMEOUT_S:g} s")
        return
    sys.exit(verdict(done.stdout, done.stderr))


def verdict(output: str, errors: str) -> int:
    """Print the result of pip-audit; return the exit status: 1 for a known vulnerability.

    output: its report in JSON; anything else is the end of an attempt that failed, for the reason in `errors`.
    """
    try:
        packages: list[dict[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        reason = (errors.strip().splitlines() or ["no report"])[-1]
        print(f"dependencies are not audited: {reason}")
        return 0
    count = 0
    for package in packages:
        for vulnerability in package.get("vulns", ()):
            count += 1
            fixed = ", ".join(vulnerability.get("fix_versions", ())) or "no version"
            print(f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}")
    print(f"{len(packages)} dependencies, {count} known vulnerabilities")
    return 1 if count else 0


if __name__ == "__main__":
    main()
