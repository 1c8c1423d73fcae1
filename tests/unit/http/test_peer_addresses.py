"""Addresses of peers: those on the list may be asked, and nothing that is not plainly a host and a port."""

from __future__ import annotations

import pytest

from balance_service.http.peers.trust import PeerTrust

ALLOWED = ["peer-1.example.org", "*.Cluster.local", "10.1.0.0/16", "192.0.2.7", "fd00::/8", "localhost"]


@pytest.mark.parametrize(
    "address",
    [
        "peer-1.example.org:1",
        "PEER-1.Example.org:5051",
        "peer-1.example.org.:5051",
        "a.cluster.local:1",
        "b.a.CLUSTER.LOCAL:1",
        "10.1.255.255:65535",
        "192.0.2.7:80",
        "[fd12::1]:80",
        "[::ffff:10.1.0.1]:80",
        "localhost:1",
    ],
)
def test_a_host_on_the_list_may_be_asked(address: str) -> None:
    assert PeerTrust(allow_list=ALLOWED).allows(address)


@pytest.mark.parametrize(
    "address",
    [
        "example.org:1",
        "x.peer-1.example.org:1",
        "cluster.local:1",
        "evilcluster.local:1",
        "a.cluster.local.evil.org:1",
        "10.2.0.1:1",
        "192.0.2.8:1",
        "0xa010001:1",
        "167837697:1",
        "10.1.0.0.evil.org:1",
        "[::1]:1",
        "[::ffff:10.2.0.1]:80",
    ],
)
def test_a_host_that_is_not_on_the_list_may_not_be_asked(address: str) -> None:
    assert not PeerTrust(allow_list=ALLOWED).allows(address)
    assert PeerTrust().allows(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":1",
        "localhost",
        "localhost:",
        "localhost:0",
        "localhost:65536",
        "localhost:\u0661",
        "bücher.cluster.local:80",
        "localhost:1/evil",
        "localhost:1?x",
        "localhost:1#x",
        "localhost:1@evil.org:80",
        "localhost@evil.org:80",
        "user:word@localhost:80",
        "localhost/@evil.org:80",
        "localhost\\@evil.org:80",
        "localhost%2f:80",
        "local host:80",
        "localhost:80\n",
        "localhost:80\r\nX: y",
        "http://localhost:80",
        "[::1:80",
        "::1:80",
        "[fe80::1%25eth0]:80",
        "x" * 254 + ":80",
    ],
)
@pytest.mark.parametrize("allow_list", [[], ALLOWED])
def test_what_is_not_plainly_a_host_and_a_port_is_never_asked(address: str, allow_list: list[str]) -> None:
    assert not PeerTrust(allow_list=allow_list).allows(address)
