"""Replies that move from one worker to another: reading them, and the choice of the target by bids."""
