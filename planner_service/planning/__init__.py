"""The search for a plan: rules, thresholds and deployment together, and what the plan says of itself. No I/O."""
