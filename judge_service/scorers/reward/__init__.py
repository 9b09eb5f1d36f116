"""Reward models at SGLang servers."""
