"""The compile matrix of the device kernels: registers, spills and local memory per architecture.

`python -m benchmarks.gpu_compile` compiles them with nvcc, which needs no GPU, and prints the table
of docs/gpu.md. The text that is compiled is the one that NVRTC gets at run time.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels.gpu.source import OPTIONS, device_source

ARCHITECTURES = (80, 90, 100)
COMPILE_DEADLINE_S = 240

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What ptxas says of one kernel on one architecture. Sizes in bytes."""

    kernel: str
    architecture: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int


def parse(report: str) -> list[Compiled]:
    """The kernels in the output of ``ptxas -v``."""
    found = []
    entry = stack = None
    for line in report.splitlines():
        if match := _ENTRY.search(line):
            entry = match
        elif match := _STACK.search(line):
            stack = match
        elif (match := _USED.search(line)) and entry and stack:
            sizes = [int(size) for size in stack.groups()]
            found.append(
                Compiled(entry[1], int(entry[2]), int(match[1]), *sizes, int(match[2] or 0))
            )
            entry = stack = None
    return found


def compile_all(nvcc: str, architectures: Sequence[int] = ARCHITECTURES) -> tuple[str, str]:
    """ptxas' report of all kernels, and the first architecture's PTX.

    CalledProcessError with the compiler's words if it refuses.
    """
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "kernels.cu"
        source.write_text(device_source(), "utf-8")
        keep = ["--keep", "--keep-dir", name, "--fatbin", "-o", str(folder / "kernels.fatbin")]
        done = subprocess.run(
            [nvcc, *OPTIONS, *targets, "-Xptxas", "-v", *keep, str(source)],
            check=True,
            timeout=COMPILE_DEADLINE_S,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ptx = folder / f"kernels.compute_{architectures[0]}.ptx"
        return done.stdout, ptx.read_text("utf-8")


def markdown(rows: Sequence[Compiled]) -> str:
    """One line per kernel, registers per architecture; spills and stack are the worst of all."""
    architectures = sorted({row.architecture for row in rows})
    lines = [
        f"| kernel | {' | '.join(f'sm_{a}' for a in architectures)} | spills | stack | shared |",
        f"|---|{'---|' * (len(architectures) + 3)}",
    ]
    for kernel in sorted({row.kernel for row in rows}):
        own = {row.architecture: row for row in rows if row.kernel == kernel}
        registers = " | ".join(str(own[a].registers) for a in architectures)
        spills = max(row.spill_stores + row.spill_loads for row in own.values())
        stack = max(row.stack for row in own.values())
        shared = max(row.static_shared for row in own.values())
        lines.append(f"| {kernel} | {registers} | {spills} | {stack} | {shared or 'at launch'} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_compile", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("not compiled: no nvcc")
        return 0
    rows = parse(compile_all(nvcc)[0])
    print(markdown(rows))
    if options.json:
        report = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
