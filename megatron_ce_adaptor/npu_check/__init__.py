"""`megatron-ce npu-check`: what the compiler for Ascend NPUs makes of a Triton kernel, found out on any x86
machine.

`compiler` runs triton-ascend and bishengir-compile up to the point where only CANN goes on; `hivm` reads the
program that comes out; `cost` estimates what it costs a row; `shipped` lists this package's kernels with
every tile they are launched with; `worker` does it in a process of a Python that has the toolchain; `command`
is the command.

Nothing here imports torch: the toolchain does not need it.
"""
