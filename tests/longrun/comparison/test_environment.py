"""env.json tells what a run ran on, and nothing about whose machine it was."""

from __future__ import annotations

import json
import os
import platform
import socket
import stat

import pytest

from megatron_ce_adaptor.longrun import environment


@pytest.fixture
def private(monkeypatch, tmp_path):
    """A machine with a name, a user and a home that must not be seen."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-node-17.cluster.example")
    monkeypatch.setattr(platform, "node", lambda: "gpu-node-17")
    monkeypatch.setenv("USER", "alice")
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setenv("HOME", "/data/people/alice")
    return monkeypatch


def test_collect_has_the_facts_and_is_json():
    facts = environment.collect()
    json.dumps(facts, allow_nan=False)
    assert facts["python"] == platform.python_version() and facts["cpu count"] == os.cpu_count()
    assert facts["memory GiB"] > 0.1 and facts["cpu"] and facts["os"]
    assert facts["packages"]["torch"].startswith("2.") and "numpy" in facts["packages"]
    assert facts["mindspeed active"] is False


def test_nothing_names_the_machine_or_the_person(private):
    private.setenv("CUDA_HOME", "/data/people/alice/cuda")
    private.setenv("NCCL_SOCKET_IFNAME", "eth0")
    private.setenv("HCCL_IF_IP", "10.12.0.7")
    private.setenv("NCCL_HOSTS", "gpu-node-17:8,gpu-node-17.cluster.example:8,fe80::1ff:fe23:4567:890a")
    private.setenv("TORCH_HOME", "/home/bob/.cache/torch")
    private.setenv("ASCEND_HOME_PATH", "/home/someone/Ascend")
    private.setenv("MCE_API_TOKEN", "s3cret")
    private.setenv("NCCL_DEBUG_FILE", "/tmp/alice/nccl.log")
    private.setenv("SSH_CLIENT", "192.168.1.5 1 2")
    text = json.dumps(environment.collect())
    for secret in (
        "gpu-node-17",
        "cluster.example",
        "alice",
        "10.12.0.7",
        "fe80",
        "0a:1b",
        "bob",
        "/home/someone",
        "s3cret",
        "192.168",
    ):
        assert secret not in text, secret
    variables = environment.collect()["variables"]
    assert variables["CUDA_HOME"] == "~/cuda" and variables["TORCH_HOME"] == "~/.cache/torch"
    assert variables["HCCL_IF_IP"] == "<address>" and variables["NCCL_SOCKET_IFNAME"] == "eth0"
    assert variables["NCCL_HOSTS"] == "<host>:8,<host>:8,<address>"


@pytest.mark.parametrize(
    "harmless",
    [
        "NCCL 2.32.3",
        "12:34:56",
        "driver 570.86.15",
        "9.0.0.RC1.alpha001",
        "2026-07-01T12:34:56+00:00",
        "torch::deploy",
        "root cause",
    ],
)
def test_redaction_leaves_versions_and_times(private, harmless):
    assert environment.redact({"k": [harmless]}) == {"k": [harmless]}


def test_device_tools_are_quoted_without_their_processes(private, tmp_path):
    table = "| NPU 0  910B3 | OK |\n| Process id | Process name |\n| 4711 | alice_train |\n"
    for name in ("npu-smi", "nvidia-smi"):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\nprintf '{table}'\n".replace("%", "%%"))
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    private.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    facts = environment.collect()
    assert facts["npu-smi"] == "| NPU 0  910B3 | OK |" and "910B3" in facts["nvidia-smi"]
    (tmp_path / "npu-smi").write_text("#!/bin/sh\nexit 1\n")
    assert environment.collect()["npu-smi"] is None


def test_cann_version(private, tmp_path):
    (tmp_path / "version.cfg").write_text("runtime_running_version=[9.0.0]\n")
    private.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    assert "9.0.0" in environment.collect()["CANN"]["content"]
