"""GPU benchmarks and checks within a time limit, without network access.

    python -m tools.gpu --minutes 12 --out gpu
    python -m tools.gpu.pages gpu/*.json

Run it from the root of the repository, with torch 2.8 or later. Only the dependencies of tierstore
are required, and pytest with its plugins for the tests. Other libraries (diffusers, accelerate,
torchtune, torchao, deepspeed) are measured if they are installed. Install wheels with
`pip install --no-deps`, so that none of them replaces torch.

`parts.py` lists the parts, the most important first. Each part runs in separate processes and has a
JSON file, which is rewritten after each line. Running the same command with the same `--out` again
resumes with the lines that have no result. A line has figures and a verdict:

- `holds`, `missed`: its goals are met, or not. A line of tierstore that raises an error is missed.
- `measured`: it has figures, but no goal.
- `not run: why`: for example `not installed`, or `time`.

The exit status is 1 if a line was missed. Options:

- `--minutes N`: the time limit.
- `--device cuda:1`: the device (default: `cuda`); `pretend` is the tests' pretend accelerator.
- `--dir DIR`: the directory for weights and stores, on the NVMe disk. It needs 64 GB.
- `--small`: small sizes for a trial run of seconds, without meaningful speeds.
- `--only PART`: run only this part. It can be repeated.
"""
