"""Logs of other servers as traces: vLLM's request log, LiteLLM's spend logs, and OpenAI's usage export.

Only arrivals and token counts are taken from them, and how many prompt tokens were cached where they say so. Fields that are
not needed are ignored. Faults name the file, the line or entry, and the field.
"""
