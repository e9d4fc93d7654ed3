"""Models with quantised weights, from the libraries that people use for that.

These libraries are in a separate environment, which `tools/quantised.py` makes, and in which it
runs these tests: diffusers, transformers and PEFT import whichever of them are installed, which
would take seconds in each process of all other tests.
"""
