"""Facts about this machine and process."""

from __future__ import annotations

import platform
import resource
from pathlib import Path

import torch

from packed_sdpa._library import ops
from packed_sdpa.errors import InputError


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its maximum outlives exec, so a child would start with its parent's.
        return _status_kib(status, "VmHWM:") / 1024
    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maximum / (2**20 if platform.system() == "Darwin" else 2**10)


def reset_peak_rss() -> float:
    """Sets the peak back to what is resident now, and returns that in MiB. Linux only (/proc/self/clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_kib(Path("/proc/self/status"), "VmRSS:") / 1024


def _status_kib(status: Path, name: str) -> int:
    for line in status.read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise OSError(f"{status} has no {name} line")


def cpu_name() -> str:
    """Model name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_isa() -> str:
    """Instruction set that the CPU kernels use now. Raises InputError for a bad PACKED_SDPA_CPU_ISA."""
    try:
        return ops.cpu_isa()
    except ValueError as error:
        raise InputError(str(error).splitlines()[0]) from error


def available_cpu_isas() -> list[str]:
    """Instruction sets of the CPU kernels that run on this machine, ascending."""
    return list(ops.available_cpu_isas())


def machine() -> dict[str, str]:
    """What a measurement depends on."""
    return {
        "cpu": cpu_name(),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
