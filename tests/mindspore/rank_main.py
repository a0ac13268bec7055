"""The life of one process of a job (see `ranks`): join the others, run one program, leave its result in a
file."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path


def main() -> int:
    program, folder, *arguments = sys.argv[1:]
    import mindspore as ms
    from mindspore.communication import get_rank, init

    ms.set_device("CPU")
    # Where processes share cores, handing each operator from thread to thread takes most of the time.
    ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)
    init("mccl")
    if os.environ["MS_ROLE"] == "MS_SCHED":
        return 0
    import rank_programs

    try:
        result = getattr(rank_programs, program)(Path(folder), *arguments)
        path = Path(folder) / f"rank{get_rank()}.pickle"
        path.write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # MindSpore's exit handlers wait for the other processes, for up to half a minute
