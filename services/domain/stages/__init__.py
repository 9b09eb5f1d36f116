"""Length stages (CascadeInfer): types and rules shared by planner, router, workers and simulator. Pure."""
