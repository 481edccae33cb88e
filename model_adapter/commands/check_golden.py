"""`ds41f check-golden`."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from model_adapter.commands.generate import Device

if TYPE_CHECKING:
    from model_adapter.golden import Report
    from model_adapter.golden.result import Result

_WIDTH_MIN = 120


class Dtype(StrEnum):
    """What the model computes in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def check_golden(
    directory: Annotated[Path, typer.Argument(help="A checkpoint with golden-*.safetensors.")],
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = Dtype.FLOAT32,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Device = "cpu",
) -> None:
    """Compare every tensor with golden vectors, end to end and block by block.

    Exits with 1 where a tensor is over its tolerance.
    """
    from model_adapter.devices import device_of
    from model_adapter.golden import check_golden as check

    report = check(directory, dtype.value, device_of(device))
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def _print(report: "Report") -> None:
    console = Console()
    console.width = max(console.width, _WIDTH_MIN)
    table = Table(box=None, title=f"{report.directory}, {report.dtype}")
    for column in ("part", "tensor", "measure", "error", "tolerance", "status", ""):
        right = column in ("error", "tolerance")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for r in report.results:
        numbers = ("–" if v is None else f"{v:.1e}" for v in (r.error, r.tolerance))
        table.add_row(r.part.value, r.key, r.measure, *numbers, r.status.value, _remark(r))
    console.print(table)
    for word, meaning in _REMARKS.items():
        if any(word in _remark(r) for r in report.results):
            console.print(meaning)
    console.print(_verdict(report))


def _remark(result: "Result") -> str:
    if result.turned:
        return f"{result.turned} turned"
    return "" if result.spread is None else f"spread {result.spread:.1e}"


_REMARKS = {
    "turned": "turned: so many values on a rounding midpoint were rounded the other way",
    "spread": "spread: how far the model lies from itself in another order of sums",
}


def _verdict(report: "Report") -> str:
    from model_adapter.golden import Status
    from model_adapter.golden.result import Part

    counts = ", ".join(f"{report.count(s)} {s.value}" for s in Status)
    worst = [w for part in Part if (w := report.worst(part)) is not None]
    return "\n".join(
        [
            f"{'within tolerance' if report.ok else 'OVER TOLERANCE'}: {counts}",
            *(f"worst {w.part.value}: {w.error:.1e} of {w.tolerance:.0e}, {w.key}" for w in worst),
        ]
    )
