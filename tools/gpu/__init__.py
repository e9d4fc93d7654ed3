"""Measure a GPU within so many minutes, without network.

    python -m tools.gpu --minutes 12 --out gpu
    python -m tools.gpu.pages gpu/*.json

Run it from the root of the repository, with any torch from 2.8 on: nothing has to be installed but
what tierstore itself needs, and pytest with its plugins for the tests. Other libraries are measured
where they are installed (diffusers, accelerate, torchtune, torchao, deepspeed). Install carried
wheels with `pip install --no-deps`, so that none of them replaces torch.

`parts.py` lists the parts, the most important first. Each has processes of its own, and a JSON file
that is written anew after each line. The same command with the same `--out` goes on with the lines
that have no result yet. A line has figures and a verdict:

- `holds`, `missed`: its goals are met, or not. A line of ours that raises an error has missed.
- `measured`: it has figures, and no goal.
- `not run: why`: as `not installed`, or `time`.

The exit status is 1 if a line was missed. Options:

- `--minutes N`: it ends by then, with what it has.
- `--device cuda:1`: another device than `cuda`; `pretend` is the tests' pretend accelerator.
- `--dir DIR`: where weights and the stores' files are: on the NVMe disk. 64 GB are enough.
- `--small`: sizes for a trial of seconds, whose speeds mean nothing.
- `--only PART`: one part; it may be there several times.
"""
