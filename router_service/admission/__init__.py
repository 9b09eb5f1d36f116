"""Which request is served now, which waits, which is refused."""
