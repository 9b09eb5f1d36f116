"""A request from its first tier to its answer: the cascade, retries and failover."""
