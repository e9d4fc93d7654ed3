"""A pretend accelerator that is asynchronous in earnest, beside the one that other tests use.

Kernels and copies run later than their call, at moments drawn by a seed that respect streams and
events and nothing else; memory is cached for each stream. One process has one of the two devices:
`TIERSTORE_PRETEND=asynchronous` in the environment chooses this one, under the same names.
`pretend.cpp` says what of CUDA it does not pretend. Tests that use the device take 1.7 times as
long on it.
"""
