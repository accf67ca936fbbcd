"""`regard info`: versions, devices and backends."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from regard.report.terminal import facts

__all__ = ["info", "installed_version"]

_PACKAGES = ("regard", "torch", "triton", "numpy")


def info() -> None:
    """Show versions, devices, and the state of each backend: which one a plain call uses, and why not the others."""
    import torch

    from regard.functional import why

    console = Console(highlight=False)
    versions = {name: installed_version(name) for name in _PACKAGES}
    console.print(facts({"python": platform.python_version(), **versions}))
    console.print(Rule("devices", align="left"))
    console.print(facts(_devices()))
    example = torch.zeros(1, 8, 1024, 64, device="cuda" if torch.cuda.is_available() else "cpu")
    for function, observing in (("attention", False), ("observe", True)):
        console.print(Rule(f"{function} on (1, 8, 1024, 64), {example.dtype}, {example.device.type}", align="left"))
        table = str(why(example, example, example, observe=observing))
        console.print(Text(table))


def installed_version(package: str) -> str:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> dict[str, str]:
    import torch

    devices = {"cpu": f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"capability {gpu.major}.{gpu.minor}"
        devices[f"cuda:{index}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {capability}"
    if torch.backends.mps.is_available():
        devices["mps"] = "available"
    return devices
