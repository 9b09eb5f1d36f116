"""Reads the files of a planning question, for commands, the SDK and planning again."""
