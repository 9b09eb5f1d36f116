"""The planner service: owns the plan that the mesh follows."""
