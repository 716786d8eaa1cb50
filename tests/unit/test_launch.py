"""What the launcher finds, what it makes of the server's log, and what it leaves of its processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from distserve_tools import server_files, server_log
from distserve_tools.launch import ServerOptions, ServerStartError, TritonServer
from distserve_tools.processes import (
    ProcessId,
    descendants,
    free_ports,
    port_is_free,
    session_members,
    wait_gone,
)
from distserve_tools.server_files import (
    Installation,
    ServerNotFoundError,
    find_installation,
    server_environment,
)


def make_server(root: Path, body: str = "#!/bin/sh\nexit 3\n") -> Path:
    """A folder that looks like an installed tritonserver, whose program is a shell script."""
    binary = root / "bin/tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text(body)
    binary.chmod(0o755)
    (root / "backends/python").mkdir(parents=True)
    (root / "backends/python/libtriton_python.so").touch()
    return binary


def test_a_server_on_path_is_preferred_to_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = make_server(tmp_path)
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    assert find_installation() == Installation(
        binary, tmp_path / "backends", (tmp_path / "lib",), str(tmp_path)
    )


def test_the_wheels_files_are_copied_side_by_side_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    first = find_installation()
    assert {p.name for p in (first.backends / "python").iterdir()} == {
        "libtriton_python.so",
        "triton_python_backend_utils.py",
        "triton_python_backend_stub",
    }
    stamp = first.backends.stat().st_mtime_ns
    (first.backends / "python/triton_python_backend_utils.py").unlink()
    again = find_installation()  # a copy that lost a file is made again
    assert again == first
    assert (first.backends / "python/triton_python_backend_utils.py").is_file()
    assert find_installation().backends.stat().st_mtime_ns >= stamp
    assert [p.name for p in (tmp_path / "tritonserver").iterdir() if p.name.startswith(".")] == []


def test_a_given_program_must_be_a_server(tmp_path: Path) -> None:
    with pytest.raises(ServerNotFoundError, match="not an executable file"):
        find_installation(str(tmp_path / "nothing"))
    binary = make_server(tmp_path)
    (tmp_path / "backends/python/libtriton_python.so").unlink()
    with pytest.raises(ServerNotFoundError, match="no Python backend"):
        find_installation(str(binary))


def test_a_static_python_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sysconfig.get_config_var
    monkeypatch.setattr(
        server_files.sysconfig,
        "get_config_var",
        lambda name: 0 if name == "Py_ENABLE_SHARED" else real(name),
    )
    with pytest.raises(ServerNotFoundError, match="--enable-shared"):
        server_files.check_shared_python()


def with_libdir(monkeypatch: pytest.MonkeyPatch, libdir: str) -> None:
    real = sysconfig.get_config_var
    monkeypatch.setattr(
        server_files.sysconfig, "get_config_var", lambda name: libdir if name == "LIBDIR" else real(name)
    )


def test_environment_puts_this_python_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_libdir(monkeypatch, "/opt/python/lib")
    installation = Installation(tmp_path / "t", tmp_path / "b", (tmp_path / "libs",), "test")
    env = server_environment(installation, {"PATH": "/bin", "LD_LIBRARY_PATH": "/old", "HOME": "/h"})
    assert env["PATH"].split(":") == [str(Path(sys.executable).parent), "/bin"]
    assert env["LD_LIBRARY_PATH"].split(":") == ["/opt/python/lib", str(tmp_path / "libs"), "/old"]
    assert (env["PYTHONDONTWRITEBYTECODE"], env["HOME"]) == ("1", "/h")


def test_a_system_python_leaves_cuda_compatibility_libraries_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_libdir(monkeypatch, "/usr/lib/x86_64-linux-gnu")
    installation = Installation(tmp_path / "t", tmp_path / "b", (Path("/opt/tritonserver/lib"),), "test")
    env = server_environment(installation, {"LD_LIBRARY_PATH": "/usr/local/cuda/compat/lib"})
    assert env["LD_LIBRARY_PATH"].split(":") == ["/opt/tritonserver/lib", "/usr/local/cuda/compat/lib"]


def test_a_stub_for_another_python_is_refused_with_the_fix(tmp_path: Path) -> None:
    binary = make_server(tmp_path)
    stub = tmp_path / "backends/python/triton_python_backend_stub"
    stub.write_bytes(b"\x7fELF...libc.so.6\0libpython3.4.so.1.0\0")
    with pytest.raises(ServerNotFoundError, match=r"embeds Python 3\.4.*with python3\.4"):
        find_installation(str(binary))
    stub.write_bytes(f"libpython{server_files.python_version()}.so.1.0".encode())
    assert find_installation(str(binary)).binary == binary


LOG = """\
Error: Failed to initialize NVML
W1129 21:05:36.335666 7932 metrics.cc:798] "DCGM unable to start: DCGM initialization error"
I1129 21:05:36.1 7932 model_lifecycle.cc:472] "loading: a:1"
I1129 21:05:36.1 7932 model_lifecycle.cc:472] "loading: b:1"
I1129 21:05:36.2 7932 model_lifecycle.cc:839] "successfully loaded 'a'"
E1129 21:05:36.0 7932 cuda.cc:1] "CudaDriverHelper has not been initialized."
E1129 21:05:36.3 7932 model_lifecycle.cc:642] "failed to load 'b' version 1: ImportError: no\\n\\nAt: x"
E1129 21:05:36.3 7932 model_lifecycle.cc:642] "failed to load 'b' version 1: ImportError: no\\n\\nAt: x"
Traceback (most recent call last):
  File "/a/b.py", line 7, in run
    raise ValueError("bad")
ValueError: bad
error: creating server: Internal - failed to load all models
"""


def test_the_log_tells_states_and_reasons(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert server_log.model_states(log) == {}
    log.write_text(LOG)
    assert server_log.model_states(log) == {"a": "ready", "b": "loading"}
    errors = server_log.first_errors(log)
    assert len(errors) == 3
    assert errors[0].startswith("failed to load 'b' version 1: ImportError: no\n")
    assert errors[1] == "ValueError: bad (/a/b.py:7)"
    assert errors[2] == "error: creating server: Internal - failed to load all models"
    assert not server_log.port_was_taken(log)
    log.write_text('E1129 1 main.cc:293] "failed to start Metrics service: Unavailable - Socket in use"\n')
    assert server_log.port_was_taken(log)


def test_a_start_that_fails_says_why_and_cleans_up(tmp_path: Path) -> None:
    seconds = f"60.{os.getpid()}"  # tells this sleeper from any other
    script = f"#!/bin/sh\nsleep {seconds} &\necho 'E1129 1 x.cc:1] \"no such backend\"'\nexit 7\n"
    binary = make_server(tmp_path / "server", script)
    (tmp_path / "repository").mkdir()
    log = tmp_path / "log"
    server = TritonServer(
        ServerOptions(tmp_path / "repository", tritonserver=str(binary), log_path=log, drain_timeout_s=0.5)
    )
    with pytest.raises(ServerStartError) as caught:
        server.start()
    assert "ended with code 7" in str(caught.value)
    assert "no such backend" in str(caught.value)
    assert str(log) in str(caught.value)
    # the orphan that the script left, in a session of its own
    assert not [p for p in _sleepers(seconds) if p.alive()]


def _sleepers(seconds: str) -> list[ProcessId]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == f"sleep\0{seconds}\0".encode():
                pid = int(path.parent.name)
                found += [p for p in session_members(os.getsid(pid)) if p.pid == pid]
        except OSError:
            continue
    return found


def test_a_server_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    binary = make_server(tmp_path / "server", "#!/bin/sh\nexec sleep 50\n")
    (tmp_path / "repository").mkdir()
    server = TritonServer(
        ServerOptions(
            tmp_path / "repository",
            tritonserver=str(binary),
            log_path=tmp_path / "log",
            start_timeout_s=0.5,
            drain_timeout_s=0.5,
        )
    )
    with pytest.raises(ServerStartError, match=r"not ready after 0.5 s; still loading: none began to load"):
        server.start()
    assert not server.alive()


HANGS_ONCE = """#!/bin/sh
if [ -e "{flag}" ]; then exit 7; fi
touch "{flag}"
echo 'I1129 1 model_lifecycle.cc:472] "loading: p:1"'
echo '2026-11-29 p INFO distserve.serving.stage: engine of p (prefill) is ready, process 7'
exec sleep 50
"""


def test_a_start_that_hangs_in_triton_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("distserve_tools.launch._HANG_S", 0.2)
    binary = make_server(tmp_path / "server", HANGS_ONCE.format(flag=tmp_path / "flag"))
    (tmp_path / "repository").mkdir()
    server = TritonServer(
        ServerOptions(tmp_path / "repository", tritonserver=str(binary), log_path=tmp_path / "log")
    )
    with pytest.raises(ServerStartError, match="ended with code 7"):
        server.start()
    assert "p has been ready for 0 s, and Triton does not load it" in caplog.text
    assert "starting tritonserver again" in caplog.text


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    binary = make_server(tmp_path / "server")
    (tmp_path / "repository").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ServerOptions(tmp_path / "repository", tritonserver=str(binary), grpc_port=port)
        with pytest.raises(ServerStartError, match=f"--grpc-port {port}: in use"):
            TritonServer(options).start()


def test_free_ports_are_distinct_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(port_is_free(port) for port in ports)


def test_processes_are_found_and_ended() -> None:
    script = "import subprocess, time; subprocess.Popen(['sleep', '40']); time.sleep(40)"
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as parent:
        deadline = time.monotonic() + 20
        while len(descendants(parent.pid)) < 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (child,) = descendants(parent.pid)
        assert {p.pid for p in session_members(parent.pid)} == {parent.pid, child.pid}
        parent.kill()
        parent.wait(10)
        assert session_members(parent.pid) == {child}  # found although its parent is gone
        assert wait_gone({child}, 0.05) == {child}
        child.kill()
        assert wait_gone({child}, 10) == set()


def test_a_reused_pid_is_another_process() -> None:
    (me,) = [p for p in session_members(os.getsid(0)) if p.pid == os.getpid()]
    assert me.alive()
    assert not ProcessId(me.pid, me.started - 1).alive()
