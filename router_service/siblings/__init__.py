"""What the processes of one router know of each other."""
