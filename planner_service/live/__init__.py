"""The planner at work: its API, the plan that is published, and planning again when the workload drifts."""
