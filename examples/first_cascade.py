"""The first tutorial (docs/tutorials/first-cascade.md): start the shipped cascade, ask it, change thresholds, stop it.

`python examples/first_cascade.py [MESH_FILE]`, from the root of the repository; the default is mesh.yaml.
"""

import json
import subprocess
import sys
from tempfile import TemporaryDirectory

from penstock import Client, Escalated, Judged, Tokens

PROMPTS = ("What is 12 + 30?", "Sort from small to large: 41, 7, 23", "Reverse the list: red, blue, green, pink")


def penstock(*arguments: str) -> str:
    """Run a command of `penstock` and return what it prints."""
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def ask(client: Client) -> list[str]:
    """Send the prompts; return the tier that answered each."""
    answered = []
    for prompt in PROMPTS:
        reply = client.generate(prompt, temperature=0)
        scores = ", ".join(f"{tier.tier} {tier.score:.0f}" for tier in reply.tiers if tier.score is not None)
        print(f"{prompt} -> {reply.text!r} by {reply.tier} (scores: {scores or 'none'})")
        answered.append(reply.tier)
    return answered


def stream(client: Client, prompt: str) -> None:
    """Show the events of one request as they happen."""
    for event in client.stream(prompt, temperature=0):
        if isinstance(event, Judged):
            print(f"  {event.tier}: scored {event.score}, accepted from {event.threshold} on: {event.accepted}")
        elif isinstance(event, Escalated):
            print(f"  escalates to {event.to_tier}: {event.reason}")
        elif isinstance(event, Tokens):
            print(f"  tokens of {event.tier}: {event.text!r}")


def main(mesh_file: str = "mesh.yaml") -> None:
    with TemporaryDirectory() as folder:
        mesh = json.loads(penstock("up", "--mesh", mesh_file, "--folder", folder, "--detach", "--json"))
        try:
            with Client(mesh["grpc"], admin=mesh["admin"]) as client:
                ask(client)
                stream(client, PROMPTS[0])
                penstock(
                    "plan", "set", "--threshold", "small=100", "--threshold", "medium=100", "--admin", mesh["admin"][0]
                )
                revision = json.loads(penstock("plan", "show", "--admin", mesh["admin"][0], "--json"))["revision"]
                for status in client.watch_status():
                    if status.plan_revision >= revision:  # routers read the plan ten times a second
                        break
                print("with thresholds of 100:")
                ask(client)
        finally:
            penstock("down", "--folder", folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
