"""Length stages: what they are worth, how they are cut, and how requests move between them. Pure: no I/O, no clock."""
