"""DESCRIBE: the immutable data types shared by all other layers.

This package does not import torch, start threads or open files. The exception is `sizes`, which
reads the machine's memory limits.
"""
