"""A mesh on a Ray cluster: the second back end of `penstock up`.

A detached actor, the controller, decides what runs; one supervising actor for each process starts it again when it ends.
Ray starts the actors again when they or their nodes die. Clients talk gRPC to the processes as everywhere.
"""
