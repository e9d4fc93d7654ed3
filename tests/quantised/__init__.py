"""Models with quantised weights, of the libraries that people use for that.

These libraries are in an environment of their own, which `tools/quantised.py` makes and runs these
tests in: diffusers, transformers and PEFT import whichever of them are there, and take seconds
longer in each process of all other tests.
"""
