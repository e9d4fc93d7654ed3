"""The first run on a GPU: three commands of at most ten minutes each, without network.

    python -m tools.gpu.correctness --out correctness.json
    python -m tools.gpu.inference   --out inference.json
    python -m tools.gpu.training    --out training.json
    python -m tools.gpu.pages       correctness.json inference.json training.json

Run them from the root of the repository, in this order, with `PYTHONPATH=.` and whatever torch the
machine has: nothing has to be installed but what tierstore itself needs (safetensors, numpy,
psutil, xxhash, aiofiles, click, rich). Other libraries are measured where they are installed
(diffusers, accelerate, torchtune, torchao, deepspeed), and are told of as not installed where not.
Carried wheels are installed with `pip install --no-deps`, so that none of them replaces torch.

Each command writes one JSON file, anew after each line, and stops by itself after 9.5 minutes with
what it has. A line has figures and a verdict:

- `holds`, `missed`: its goals are met, or not. Whatever of ours raises an error has missed.
- `measured`: it has figures, and no goal.
- `not run: why`: as `not installed`, or `time`.

The exit status is 1 if a line was missed. Of correctness, a group of lines with one that was missed
ends the run, since what comes later would measure a store that is wrong.

Options that all three have:

- `--device cuda:1`: another device than `cuda`.
- `--dir DIR`: where weights and the stores' files are: on the NVMe disk. 64 GB are enough.
- `--small`: sizes for a trial of seconds, whose speeds mean nothing.
- `--only NAME`: one group of lines, or one line; it may be there several times.
- `--setup MODULE`: import this first, and call its `load()`. With `--device pretend
  --setup tests.device.pretend` the commands run on the tests' pretend accelerator.
"""
