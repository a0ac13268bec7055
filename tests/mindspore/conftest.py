"""The tests of `megatron_ce_adaptor.mindspore`: run by the Python of st_scripts/setup_mindspore.sh's
environment."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# --import-mode=importlib leaves it out
sys.path.insert(0, str(Path(__file__).parent))

# Another environment has no MindSpore, and these tests have nothing to say there.
collect_ignore_glob = [] if importlib.util.find_spec("mindspore") else ["test_*.py"]

if not collect_ignore_glob:
    import mindspore

    # Where processes share cores, handing each operator from thread to thread takes most of the time.
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE, pynative_synchronize=True)
