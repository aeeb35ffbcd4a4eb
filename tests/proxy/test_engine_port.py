"""The ports that our servers listen on: Linux gives them to no other connection, and the error names a taken port."""

import socket
from pathlib import Path

import pytest

from proxy.config import EngineConfig
from proxy.engine.process import PORTS, free_port
from proxy.engine.sglang import Sglang
from proxy.pool.errors import UserError


def test_no_outgoing_connection_is_given_a_port_of_ours() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not set(PORTS) & set(range(first, last + 1))


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port, other = taken.getsockname()[1], free_port()  # drawn, as other tests draw theirs from the same ports
        monkeypatch.setattr("proxy.engine.process.PORTS", [port, other])
        assert free_port() == other


@pytest.mark.long
def test_an_engine_whose_port_was_taken_while_it_started_says_so(tiny_model: Path, tmp_path: Path) -> None:
    engine = Sglang(EngineConfig(model=str(tiny_model), dtype="float32"), tmp_path / "engine.log")
    try:
        port = int(engine.url.rpartition(":")[2])
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(UserError, match=f"another program took the port {port}; end that program"),
        ):
            engine.wait_healthy()
    finally:
        engine.stop()
