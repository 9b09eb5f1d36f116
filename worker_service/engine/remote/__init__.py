"""An endpoint of OpenAI's API as an engine."""
