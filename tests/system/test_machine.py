"""Facts about the machine, read from files of the kernel."""

from __future__ import annotations

from pathlib import Path

from tierstore.system import machine


def test_gpus_and_huge_pages_come_from_kernel_files(tmp_path: Path) -> None:
    assert machine.gpus(tmp_path) == []
    assert machine.gpu_driver(tmp_path) is None
    assert machine.huge_pages(tmp_path) is None
    driver = tmp_path / "proc/driver/nvidia"
    (driver / "gpus/0000:01:00.0").mkdir(parents=True)
    (driver / "gpus/0000:01:00.0/information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    (driver / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\nGCC 12.3.0\n"
    )
    setting = tmp_path / "sys/kernel/mm/transparent_hugepage"
    setting.mkdir(parents=True)
    (setting / "enabled").write_text("always [madvise] never\n")
    assert machine.gpus(tmp_path) == ["NVIDIA H200"]
    assert machine.gpu_driver(tmp_path) == "570.86.15"
    assert machine.huge_pages(tmp_path) == "madvise"
