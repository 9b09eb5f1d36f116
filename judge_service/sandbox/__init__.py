"""Runs code that models wrote, in a sandbox."""

from judge_service.sandbox.bubblewrap import Sandbox, SandboxLimits, SandboxUnavailable

__all__ = ["Sandbox", "SandboxLimits", "SandboxUnavailable"]
