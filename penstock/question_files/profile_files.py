"""What a question needs of a profile file: the replica that was measured."""

import json
from pathlib import Path

from penstock.question_files.errors import FileError
from penstock.types.planning import EngineBatch, MeasuredReplica

FORMAT = "penstock-profile-1"


def load_replica(path: Path) -> MeasuredReplica:
    """FileError says what is wrong with the file."""
    try:
        content = json.loads(path.read_text())
        if content.get("format") != FORMAT:
            raise FileError(f"{path}: format: must be {FORMAT}, not {content.get('format')!r}")
        latency = content["latency"]
        return MeasuredReplica(
            tuple(map(float, latency["knot_tokens"])),
            tuple(map(float, latency["knot_s"])),
            int(content["tp"]),
            int(content["pp"]),
            int(content["kv_tokens"]),
            EngineBatch(*(int(content[name]) for name in ("max_running", "max_step_tokens", "block_tokens"))),
            float(latency["context_token_s"]),
            float(latency["pair_s"]),
            float(latency["gap_s"]),
            int(content.get("ep", 1)),
            int(content.get("attn_dp", 1)),
            str(content["machine"]),
        )
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{path}: not a profile: {error!r}") from None
