"""Run a diffusers pipeline in a quarter of the memory that its weights take, with the same output.

The example builds a FluxPipeline of about 500 MB with random weights (nothing is downloaded) and
saves it as a sharded checkpoint, as on the hub. It then runs the checkpoint twice, each time in a
new process:

- plain: ``from_pretrained`` and a call, as usual;
- tierstore: with ``enable_group_offload`` between the two, under a RAM budget.

At the end it prints the cost of each run, and whether the two images are equal bit for bit. Memory
is the increase since ``from_pretrained``, read from /proc. diffusers maps weights from files, which
a plain run pages in, so mapped memory has its own row.

Takes one to three minutes on two cores, and 500 MB of disk. Needs diffusers and transformers; no
GPU, no network.

    python docs/examples/offload_pipeline.py
    python docs/examples/offload_pipeline.py --budget 64MB --steps 8
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from rich.console import Console
from rich.table import Table

IMAGE_SIZE = 128


def main() -> int:
    """Build the checkpoint if there is none, run it both ways, and compare."""
    options = parse_arguments()
    if options.role:
        run_child(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="tierstore-example-", dir=options.workdir) as directory:
        checkpoint = options.checkpoint or Path(directory, "checkpoint")
        if not (checkpoint / "model_index.json").exists():
            print(f"building a FluxPipeline in {checkpoint}", flush=True)
            build_checkpoint(checkpoint)
        size = sum(file.stat().st_size for file in checkpoint.rglob("*.safetensors"))
        budget = options.budget or f"{size // 4}B"
        arguments = ["--checkpoint", checkpoint, "--budget", budget, "--steps", options.steps]
        plain = run_in_fresh_process("plain", Path(directory), arguments)
        offloaded = run_in_fresh_process("tierstore", Path(directory), arguments)
    return report(plain, offloaded, size)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. ``--role`` and ``--result`` are for the processes that it starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--budget", help='RAM for the weights, such as "64MB" (default: a quarter of them)')
    add("--steps", type=int, default=4, help="denoising steps, 2 or more (default: %(default)s)")
    add("--checkpoint", type=Path, help="use this checkpoint, or build it here and keep it")
    add("--workdir", type=Path, help="where temporary files go (default: the system's directory)")
    add("--role", choices=("plain", "tierstore"), help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be 2 or more: the first step is not timed")
    if options.workdir and not options.workdir.is_dir():
        parser.error(f"there is no directory {options.workdir}: give an existing --workdir")
    return options


# --- the two runs ---------------------------------------------------------------------------------


def run_plain(checkpoint: Path, steps: int) -> dict[str, Any]:
    """Run the pipeline as usual."""
    pipe = load_pipeline(checkpoint)
    with measure_memory() as memory:
        image, seconds = generate(pipe, steps)
    return {"image": image, "seconds": seconds, **memory}


def run_offloaded(checkpoint: Path, steps: int, budget: str, disk_dir: Path) -> dict[str, Any]:
    """Run it with its weights in a store, of which at most ``budget`` are in RAM."""
    from tierstore import TierStore, enable_group_offload

    pipe = load_pipeline(checkpoint)
    with measure_memory() as memory, TierStore(ram_budget=budget, disk_dir=disk_dir) as store:
        enable_group_offload(pipe, store)
        image, seconds = generate(pipe, steps)
        stats = store.stats()
    return {
        "image": image,
        "seconds": seconds,
        **memory,
        "host": stats.peak_bytes["HOST"],
        "read": stats.bytes_read,
        "written": stats.bytes_written,
        "hits": stats.hits,
        "late": stats.late,
        "misses": stats.misses,
    }


def load_pipeline(checkpoint: Path) -> diffusers.FluxPipeline:
    """Load the pipeline in the dtype of its files."""
    pipe = diffusers.FluxPipeline.from_pretrained(checkpoint, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: diffusers.FluxPipeline, steps: int) -> tuple[torch.Tensor, float]:
    """Return an image, and the mean seconds per step without the first, which warms up."""
    ends = []

    def step_ended(_pipe: Any, _step: int, _timestep: Any, tensors: dict[str, Any]) -> Any:
        ends.append(time.perf_counter())
        return tensors

    image = pipe(
        "a red boat on a calm lake",
        height=IMAGE_SIZE,
        width=IMAGE_SIZE,
        num_inference_steps=steps,
        max_sequence_length=32,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        callback_on_step_end=step_ended,
    ).images
    return image, (ends[-1] - ends[0]) / (steps - 1)


# --- measuring ------------------------------------------------------------------------------------


@contextlib.contextmanager
def measure_memory() -> Iterator[dict[str, int]]:
    """Sample memory every 10 ms; after the block, the dict has the peaks above the start."""
    start = resident_memory()
    peak = dict(start)
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.01):
            for name, value in resident_memory().items():
                peak[name] = max(peak[name], value)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    gained: dict[str, int] = {}
    try:
        yield gained
    finally:
        done.set()
        sampler.join()
        gained.update({name: peak[name] - start[name] for name in start})


def resident_memory() -> dict[str, int]:
    """Return the anonymous and file-mapped bytes of this process in RAM."""
    status = Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    fields = {"anon": "RssAnon", "mapped": "RssFile"}
    return {name: int(lines[field].split()[0]) * 1024 for name, field in fields.items()}


def run_in_fresh_process(role: str, directory: Path, arguments: list[Any]) -> dict[str, Any]:
    """Run this file in a new process, so that earlier allocations are not in its figures."""
    print(f"running: {role}", flush=True)
    result = directory / f"{role}.pt"
    command = [sys.executable, __file__, "--role", role, "--result", result, *arguments]
    subprocess.run([str(word) for word in command], check=True)
    figures: dict[str, Any] = torch.load(result)
    return figures


def run_child(options: argparse.Namespace) -> None:
    """Do one run, in the process started for it."""
    if options.role == "plain":
        figures = run_plain(options.checkpoint, options.steps)
    else:
        disk_dir = options.result.parent / "store"
        figures = run_offloaded(options.checkpoint, options.steps, options.budget, disk_dir)
    torch.save(figures, options.result)


def report(plain: dict[str, Any], offloaded: dict[str, Any], size: int) -> int:
    """Print the table, then whether the example succeeded, and return the exit code."""
    identical = torch.equal(plain["image"], offloaded["image"])
    table = Table(title=f"FluxPipeline, {megabytes(size)} of weights")
    table.add_column("RAM: gained since from_pretrained")
    table.add_column("plain", justify="right")
    table.add_column("tierstore", justify="right")
    for name, key in (("peak RAM, anonymous", "anon"), ("peak RAM, mapped files", "mapped")):
        table.add_row(name, megabytes(plain[key]), megabytes(offloaded[key]))
    for name, key in (
        ("peak of the store's weights in RAM", "host"),
        ("read from disk", "read"),
        ("written to disk", "written"),
    ):
        table.add_row(name, "-", megabytes(offloaded[key]))
    waits = "{hits} / {late} / {misses}".format(**offloaded)
    table.add_row("acquires: hits / late / misses", "-", waits)
    table.add_row("seconds per step", f"{plain['seconds']:.2f}", f"{offloaded['seconds']:.2f}")
    table.add_row("identical output", "-", "yes" if identical else "NO")
    Console().print(table)
    outcome = "OK: the same image, bit for bit," if identical else "FAILED: another image"
    print(f"{outcome} with {megabytes(offloaded['host'])} of {megabytes(size)} of weights in RAM")
    return 0 if identical else 1


def megabytes(count: int) -> str:
    """Format bytes as MB (1,000,000 bytes)."""
    return f"{count / 1e6:,.1f} MB"


# --- a checkpoint without a download --------------------------------------------------------------


def build_checkpoint(directory: Path, heads: int = 6, blocks: int = 5) -> None:
    """Write a narrow FluxPipeline with the components and layout of FLUX.1 and random weights.

    It has `heads` attention heads of 128 channels, `blocks` blocks of two streams, and
    3 * `blocks` + 1 blocks of one stream.
    """
    torch.manual_seed(0)
    clip_width, t5_width, clip_vocabulary = 128, 256, clip_tokens()
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=blocks,
        num_single_layers=3 * blocks + 1,
        num_attention_heads=heads,
        joint_attention_dim=t5_width,
        pooled_projection_dim=clip_width,
        guidance_embeds=True,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 64, 128, 128),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        shift_factor=0.1,
    )
    text_encoder = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=len(clip_vocabulary),
            hidden_size=clip_width,
            intermediate_size=4 * clip_width,
            num_hidden_layers=3,
            num_attention_heads=2,
            bos_token_id=clip_vocabulary["<|startoftext|>"],
            eos_token_id=clip_vocabulary["<|endoftext|>"],
            pad_token_id=clip_vocabulary["<|endoftext|>"],
        )
    )
    text_encoder_2 = transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=256,
            d_model=t5_width,
            d_ff=2 * t5_width,
            num_layers=4,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        )
    )
    pipe = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=randomise(vae),
        text_encoder=randomise(text_encoder),
        tokenizer=transformers.CLIPTokenizer(vocab=clip_vocabulary, merges=[], model_max_length=77),
        text_encoder_2=randomise(text_encoder_2),
        tokenizer_2=transformers.T5TokenizerFast(vocab=t5_pieces(), model_max_length=512),
        transformer=randomise(transformer),
    )
    pipe.save_pretrained(directory, max_shard_size="100MB")


@torch.no_grad()
def randomise(module: torch.nn.Module) -> torch.nn.Module:
    """Fill matrices with bf16 noise scaled by fan-in, so that the image depends on all."""
    module = module.to(torch.bfloat16)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
    return module


def clip_tokens() -> dict[str, int]:
    """Return the 256 byte tokens of byte-level BPE, inside and at the end of a word."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(code) for code in (*printable, *range(256, 512 - len(printable)))]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return {word: index for index, word in enumerate(words)}


def t5_pieces() -> list[tuple[str, float]]:
    """Return one-character pieces, between T5's special tokens and its sentinels."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    characters = [(chr(code), -3.0) for code in range(0x21, 0x7F)]
    return [*special, *characters, *((f"<extra_id_{n}>", 0.0) for n in reversed(range(100)))]


def quiet_libraries() -> None:
    """Disable the libraries' progress bars and warnings."""
    for library in (transformers, diffusers):
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_error()


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(main())
