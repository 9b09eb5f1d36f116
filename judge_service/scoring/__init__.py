"""What scores answers: the interface of scorers, their registry and queues, and guards."""
