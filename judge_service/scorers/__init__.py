"""Scorers behind one interface."""

from judge_service.scorers.interface import JudgedAnswer, LogprobSummary, RawScore, Scorer, ScorerKind

__all__ = ["JudgedAnswer", "LogprobSummary", "RawScore", "Scorer", "ScorerKind"]
