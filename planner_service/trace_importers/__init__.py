"""Logs of other servers as traces: vLLM's request log, LiteLLM's spend logs, and OpenAI's usage export.

Only arrivals and token counts are taken from them, and how many prompt tokens were cached where they say so. Fields that are
not needed are ignored. Faults name the file, the line or entry, and the field.
"""

from penstock.planner_service.trace_importers.imported import ImportedTrace
from penstock.planner_service.trace_importers.litellm import from_litellm
from penstock.planner_service.trace_importers.openai import from_openai
from penstock.planner_service.trace_importers.vllm import from_vllm

__all__ = ["ImportedTrace", "from_litellm", "from_openai", "from_vllm"]
