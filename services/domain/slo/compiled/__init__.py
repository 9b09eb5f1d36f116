"""The SLO scheduler, compiled: one implementation for worker, simulated engine and simulator. Needs numba and numpy.

`step` forms a batch, `replay` repeats it in virtual time as the certificate of an admission, `admission` is the dynamic
program followed by the certificate, `table` holds the requests in between. Every function releases the interpreter lock.
"""
