#!/usr/bin/env python3
"""Say goal by goal whether the benchmark's results meet it.

    python benchmarks/check_results.py FILE.json...

Takes the files of the parts: bench_cross_entropy.py on a GPU, with --tp 2 and with --cpu, and
mass_acceptance.py --accuracy and --speed. What was not measured does not count as met, except
where a peer declares that it does not take such logits.

Exit status: 0 all goals are met, 1 one is not, 2 a part is missing or a file is not a result.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import results
from goals import judge

_SHOWN = 12


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    options = parser.parse_args(arguments)
    parts = {}
    for part in results.read_or_exit(options.files):
        if part["part"] in parts:
            print(f"two files hold the part {part['part']}", file=sys.stderr)
            return 2
        parts[part["part"]] = part
    verdicts = judge(parts)
    for verdict in verdicts:
        print(f"{'met    ' if verdict.met else 'NOT MET'} {verdict.goal}")
        for line in verdict.shortfalls[:_SHOWN]:
            print(f"          {line}")
        if len(verdict.shortfalls) > _SHOWN:
            print(f"          and {len(verdict.shortfalls) - _SHOWN} more")
    missing = [name for name in results.PARTS if name not in parts]
    if missing:
        print(f"missing parts: {', '.join(missing)}", file=sys.stderr)
        return 2
    return 0 if all(v.met for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
