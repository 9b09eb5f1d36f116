"""What the router counts of its requests, and samples of them for the planner."""
