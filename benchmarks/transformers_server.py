"""transformers' continuous batching in a process of its own: one JSON workload per input line, one result per output line.

Run by engine.py as `python -m benchmarks.transformers_server MODEL`.
"""

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE_TOKENS, BLOCKS, STEP_TOKENS = 32, 1024, 512


def answer(model: Any, prompts: list[list[int]], concurrency: int, output_tokens: int, pad: int) -> float:
    """Seconds for all prompts, at most `concurrency` of them concurrently; the manager's start is not counted."""
    manager = model.init_continuous_batching(
        # an end token that never comes: every answer has the same length
        generation_config=GenerationConfig(
            max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=pad
        ),
        # without these it takes all memory there is
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=BLOCKS, page_size=PAGE_TOKENS, max_batch_tokens=STEP_TOKENS, max_requests_per_batch=concurrency
        ),
    )
    manager.start()
    try:
        manager.add_request(prompts[0], max_new_tokens=2)
        _finished(manager, 1, 2)
        began = time.perf_counter()
        manager.add_requests(inputs=prompts, max_new_tokens=output_tokens)
        _finished(manager, len(prompts), output_tokens)
        return time.perf_counter() - began
    finally:
        manager.stop(block=True)


def _finished(manager: Any, count: int, tokens: int) -> None:
    while count:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped")
        elif result.is_finished():
            if result.error is not None or len(result.generated_tokens) != tokens:
                raise RuntimeError(f"{result.error}, {len(result.generated_tokens)} tokens")
            count -= 1


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", attn_implementation="sdpa").eval()
    print("ready", flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        seconds = answer(model, work["prompts"], work["concurrency"], work["output_tokens"], model.config.pad_token_id)
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
