"""`megatron-ce report`: make the report and the acceptance pages again from metrics.json and env.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import run_folder
from .metrics import MetricsError, read_metrics
from .report import ReportError, write_report

EPILOG = """\
example:
  megatron-ce report logs/2026-07-01_cpu_cpu_small

The verdict shown is the one in metrics.json; `megatron-ce compare DIR` derives it anew from the logs.
exit status: 0 written, 2 metrics.json is missing or cannot be used
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-ce report`."""
    parser.description = "Make the report and the acceptance pages of a compared run folder again."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder with metrics.json (and env.json)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the report here (default: DIR)")


def run(args: argparse.Namespace) -> int:
    """Write the report. Returns the exit status."""
    out: Path = args.out or args.folder
    try:
        metrics = read_metrics(args.folder / run_folder.METRICS)
        environment = run_folder.load_environment(args.folder)
        out.mkdir(parents=True, exist_ok=True)
        for path in write_report(out, metrics, environment):
            print(path)
    except (MetricsError, ReportError, run_folder.RunFolderError) as error:
        print(f"megatron-ce report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print(f"megatron-ce report: cannot write{where}: {error.strerror or error}.", file=sys.stderr)
        return 2
    return 0
