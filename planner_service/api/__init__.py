"""What commands, the service and planning again call: each thing is done in one way."""
