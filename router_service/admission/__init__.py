"""Which requests run, wait, or are refused."""
