"""Structured output: what a reply's next token may be. `token_grammar` is loaded where it is needed: it loads a library."""
