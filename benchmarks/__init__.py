"""What makes the figures in README and docs: each writes JSON and names data, seed and machine."""
