"""Length stages: which stage this instance serves, which requests should move, and bid-ask."""
