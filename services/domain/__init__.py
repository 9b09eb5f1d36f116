"""Domain types shared by all services. Pure: only the standard library, no I/O, no clock."""
