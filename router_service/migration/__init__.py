"""Replies that move from one worker to another: the stream that follows them, and the bids that choose the target."""
