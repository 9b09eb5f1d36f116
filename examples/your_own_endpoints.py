"""The second tutorial (docs/tutorials/your-own-endpoints.md): a cascade of OpenAI-compatible endpoints.

`python examples/your_own_endpoints.py [MESH_FILE]`, from the root of the repository. The endpoints of the default,
examples/mesh-endpoints.yaml, are tiers of the mesh that `penstock up` starts.
"""

import json
import subprocess
import sys
from tempfile import TemporaryDirectory

from openai import OpenAI


def penstock(*arguments: str) -> str:
    """Run a command of `penstock` and return what it prints."""
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(mesh_file: str = "examples/mesh-endpoints.yaml") -> None:
    print(penstock("check", mesh_file))
    with TemporaryDirectory() as folder:
        mesh = json.loads(penstock("up", "--mesh", mesh_file, "--folder", folder, "--detach", "--json"))
        try:
            client = OpenAI(base_url=f"http://{mesh['http'][0]}/v1", api_key="-")
            for model in ("cascade", "large"):
                reply = client.chat.completions.create(
                    model=model, temperature=0, messages=[{"role": "user", "content": "What is 12 + 30?"}]
                )
                tiers = (reply.model_extra or {})["penstock"]["tiers"]
                print(
                    f"{model}: {reply.choices[0].message.content!r}", [(tier["tier"], tier["score"]) for tier in tiers]
                )
        finally:
            penstock("down", "--folder", folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
