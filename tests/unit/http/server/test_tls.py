"""TLS contexts: each error in a certificate or key is one sentence that names the setting."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest

from balance_service.errors import ConfigurationError
from balance_service.http.server.tls import TlsFiles, client_context, load_tls
from tests.support.credentials import Authority

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def refusal(files: TlsFiles) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_tls(files)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_clients_need_a_certificate_only_with_a_client_ca(authority: Authority) -> None:
    certificate, key = authority.issue("server")

    assert load_tls(TlsFiles(certificate, key)).server.verify_mode is ssl.CERT_NONE
    strict = load_tls(TlsFiles(certificate, key, client_ca=authority.certificate))
    assert strict.server.verify_mode is ssl.CERT_REQUIRED


def test_both_contexts_require_tls_1_2_and_the_client_checks_names(authority: Authority) -> None:
    tls = load_tls(TlsFiles(*authority.issue("server"), ca=authority.certificate))

    assert {c.minimum_version for c in (tls.server, tls.client)} == {ssl.TLSVersion.TLSv1_2}
    assert tls.client.check_hostname
    assert tls.client.verify_mode is ssl.CERT_REQUIRED
    assert len(tls.client.get_ca_certs()) == 1


def test_the_key_may_be_encrypted(authority: Authority) -> None:
    certificate, key = authority.issue("server", password="open sesame")

    load_tls(TlsFiles(certificate, key, "open sesame"))

    assert refusal(TlsFiles(certificate, key)).startswith("BALANCE_TLS_KEY: ")
    assert "BALANCE_TLS_KEY_PASSWORD" in refusal(TlsFiles(certificate, key))
    wrong = refusal(TlsFiles(certificate, key, "hunter2"))
    assert wrong.startswith("BALANCE_TLS_KEY_PASSWORD ")
    assert "hunter2" not in wrong


def test_a_missing_file_is_named_with_its_setting(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    nowhere = tmp_path / "nowhere.pem"

    for files, setting in (
        (TlsFiles(nowhere, key), "BALANCE_TLS_CERTIFICATE"),
        (TlsFiles(certificate, nowhere), "BALANCE_TLS_KEY"),
        (TlsFiles(certificate, key, ca=nowhere), "BALANCE_TLS_CA"),
        (TlsFiles(certificate, key, client_ca=nowhere), "BALANCE_TLS_CLIENT_CA"),
    ):
        assert refusal(files).startswith(f"{setting}: {nowhere} cannot be read (No such file"), setting


@pytest.mark.parametrize("junk", [b"", b"junk", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_file_with_other_content_is_named_with_its_setting(authority: Authority, tmp_path: Path, junk: bytes) -> None:
    certificate, key = authority.issue("server")
    other = tmp_path / "other.pem"
    other.write_bytes(junk)

    for files, setting in (
        (TlsFiles(other, key), "BALANCE_TLS_CERTIFICATE"),
        (TlsFiles(certificate, other), "BALANCE_TLS_KEY"),
        (TlsFiles(certificate, key, ca=other), "BALANCE_TLS_CA"),
        (TlsFiles(certificate, key, client_ca=other), "BALANCE_TLS_CLIENT_CA"),
    ):
        assert refusal(files).startswith(f"{setting}: {other} holds no"), setting


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    certificate, _ = authority.issue("server")
    _, key = authority.issue("other")

    assert refusal(TlsFiles(certificate, key)).startswith(f"BALANCE_TLS_KEY: {key} is not the key of")


def test_a_command_trusts_the_cas_of_the_system_by_default(authority: Authority) -> None:
    assert len(client_context(authority.certificate).get_ca_certs()) == 1
    with pytest.raises(ConfigurationError, match="BALANCE_TLS_CA"):
        client_context(authority.certificate.with_suffix(".gone"))
