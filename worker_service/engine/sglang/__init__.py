"""The production engine: an SGLang server, used over HTTP."""
