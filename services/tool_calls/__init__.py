"""How models write tool calls, and how calls are read from their replies. No I/O."""
