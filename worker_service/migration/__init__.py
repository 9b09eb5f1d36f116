"""Running requests move between workers: two pure state machines, and what drives them."""
