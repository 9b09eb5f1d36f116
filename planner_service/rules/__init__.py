"""The rules of routing in addition to thresholds: how each is fitted to judged prompts, and what is tried of it. No I/O."""
