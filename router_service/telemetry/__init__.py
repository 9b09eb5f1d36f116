"""Counters of the router, samples of its requests for the planner, and traces made afterwards."""
