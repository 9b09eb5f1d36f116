"""How the processes of one router read each other's counters and pass on moves."""
