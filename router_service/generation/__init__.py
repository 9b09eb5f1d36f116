"""A request from admission to its answer: the cascade, retries and failover."""
