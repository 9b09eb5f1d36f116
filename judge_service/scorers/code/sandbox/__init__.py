"""Runs code that models wrote, in a sandbox."""

from penstock.judge_service.scorers.code.sandbox.bubblewrap import Sandbox, SandboxUnavailable

__all__ = ["Sandbox", "SandboxUnavailable"]
