"""What crosses the planner's edge: messages and plan files, to and from its own types."""
