"""The examples of docs/how-to/secure.md are accepted by the service, and its scopes are those of the code."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from balance_service.errors import ConfigurationError
from balance_service.http.access.authentication import load_tokens
from balance_service.http.access.clients import Scope
from balance_service.http.server.tls import TlsFiles, client_context
from balance_service.settings import load_settings
from tests.docs.pages import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs/how-to/secure.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.usefixtures("no_environment")


def block(language: str, text: str) -> str:
    """The block of code of a language that contains a text."""
    (found,) = (b for b in re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if text in b)
    return str(found)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files that the commands of the page make."""
    folder = tmp_path_factory.mktemp("tls")
    commands = block("sh", "openssl req").partition("export ")[0]
    subprocess.run(["sh", "-ec", commands], cwd=folder, check=True, capture_output=True)
    return folder


def test_the_commands_make_a_certificate_that_clients_of_its_ca_trust(files: Path) -> None:
    client_context(files / "ca.pem", TlsFiles(files / "instance.pem", files / "instance.key", None))
    verify = ["openssl", "verify", "-CAfile", "ca.pem", "-verify_hostname", "localhost", "instance.pem"]

    assert b"OK" in subprocess.run(verify, cwd=files, check=True, capture_output=True).stdout


def test_the_service_reads_the_file_of_tokens(tmp_path: Path) -> None:
    example = json.loads(block("json", '"tokens"'))
    for token in example["tokens"]:
        token["sha256"] = hashlib.sha256(token["name"].encode()).hexdigest()
    (tmp_path / "tokens.json").write_text(json.dumps(example))

    assert {client.name for client in load_tokens(tmp_path / "tokens.json").values()} == {
        "token:checkout",
        "token:prometheus",
        "token:operator",
    }


def test_the_page_has_every_scope() -> None:
    assert re.findall(r"^\| `(balance:\w+)` \|", PAGE, re.MULTILINE) == [*Scope]


def logins() -> dict[str, dict[str, str]]:
    """The properties of each login of the page; None stands for a value of the reader."""
    lines = block("properties", "SCRAM").splitlines()
    scram = dict(line.split("=", 1) for line in lines)
    found = {"SCRAM": scram, "PLAIN": scram | {"sasl.mechanism": "PLAIN"}}
    for login, row in re.findall(r"^\| (client certificate|OAuth)[^|]* \| (.*) \|$", PAGE, re.MULTILINE):
        names = [name.replace("….", "sasl.oauthbearer.") for name in re.findall("`([^`]+)`", row)]
        found[login] = {"security.protocol": "SASL_SSL"} | dict((*name.split("="), "")[:2] for name in names)
    return found


@pytest.mark.parametrize("login", ["SCRAM", "PLAIN", "client certificate", "OAuth"])
def test_the_service_accepts_the_properties_of_a_login(files: Path, login: str) -> None:
    of_reader = {
        "ca.location": str(files / "ca.pem"),
        "certificate.location": str(files / "instance.pem"),
        "key.location": str(files / "instance.key"),
        "endpoint.url": "https://idp.example.com/token",
    }
    properties = logins()[login]
    for name in properties:
        known = next((value for end, value in of_reader.items() if name.endswith(end)), "given")
        properties[name] = known if known != "given" else properties[name] or known

    assert load_settings(kafka_config=properties).kafka_properties.keys() >= properties.keys()


@pytest.mark.parametrize(
    "refused", ["ssl.cipher.suites", "ssl.curves.list", "ssl.crl.location", "enable.ssl.certificate.verification"]
)
def test_the_service_refuses_what_the_page_says(refused: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(refused)):
        load_settings(kafka_config={refused: "false"})
