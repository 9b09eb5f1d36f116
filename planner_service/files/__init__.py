"""The data of a planning question, checked, as the planner computes with it; and files that hold such data."""
