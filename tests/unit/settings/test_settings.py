"""Settings: read from BALANCE_*, refused in sentences, printed without secrets."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from balance_service.errors import ConfigurationError
from balance_service.model.stage import Stage
from balance_service.settings import Settings, load_settings, unknown_variables
from balance_service.settings.kafka import printable_properties
from balance_service.settings.settings import variable_of
from tests.support.fakes import refusal

pytestmark = pytest.mark.usefixtures("no_environment")


def test_the_defaults_of_the_settings() -> None:
    settings = load_settings()

    assert {
        "bootstrap_servers": "localhost:9092",
        "schema_registry_url": None,
        "application_id": "balance-service",
        "models": ("balance",),
        "topic": "balance",
        "partitions": 2,
        "replication_factor": 1,
        "application_server": "localhost:5051",
        "http_host": "127.0.0.1",
        "http_port": 5051,
        "state_dir": Path("state"),
        "session_timeout_ms": 10_000,
        "max_records_per_batch": 2_000_000,
        "spark_jars": None,
        "read_timeout_seconds": 5.0,
        "kafka_config": {},
    }.items() <= dict(settings).items()


def test_the_internal_topics_are_named_after_the_application() -> None:
    settings = load_settings(application_id="app", topic="funds")
    stage = Stage(name="balance", owner="balance", application_id="app", source="funds")

    assert settings.topic_of("balance") == "funds"
    assert stage.changelog == "app-balance-changelog"
    assert stage.transactional_id(3) == "app-balance-3"
    assert settings.application_servers_topic == "app-application-servers"
    assert stage.dead_letters == "funds-dead-letters"


def test_a_read_model_of_another_topic_has_its_own_internal_topics() -> None:
    settings = load_settings(application_id="app", topic="funds")
    stage = Stage(name="orders", owner="orders", application_id="app", source=settings.topic_of("shop"))

    assert (stage.source, stage.changelog, stage.dead_letters) == ("shop", "app-orders-changelog", "shop-dead-letters")


def test_read_models_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_MODELS", "balance, orders,")

    assert load_settings().models == ("balance", "orders")


def test_an_instance_without_a_read_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "BALANCE_MODELS" in refusal(monkeypatch, BALANCE_MODELS=" , ")


def test_a_setting_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_TOPIC", "funds")
    monkeypatch.setenv("BALANCE_PARTITIONS", "12")

    assert (load_settings().topic, load_settings().partitions) == ("funds", 12)


def test_a_variable_without_the_prefix_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPIC", "funds")

    assert load_settings().topic == "balance"


def test_the_read_timeout_is_read_from_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_READ_TIMEOUT", "2.5")

    assert load_settings().read_timeout_seconds == 2.5


def test_the_read_timeout_can_be_overridden_by_field_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(read_timeout_seconds=0.5).read_timeout_seconds == 0.5
    monkeypatch.setenv("BALANCE_READ_TIMEOUT", "2.5")
    assert load_settings(read_timeout_seconds=0.5).read_timeout_seconds == 0.5


def test_an_override_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_TOPIC", "funds")

    assert load_settings(topic="other").topic == "other"


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(TypeError, match="topci"):
        load_settings(topci="balance")


def test_settings_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().topic = "other"


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("BALANCE_PARTITIONS", "0", "must be at least 1, not"),
        ("BALANCE_PARTITIONS", "many", "must be a whole number, not"),
        ("BALANCE_REPLICATION_FACTOR", "0", "must be at least 1, not"),
        ("BALANCE_HTTP_PORT", "65536", "must be at most 65535, not"),
        ("BALANCE_SESSION_TIMEOUT_MS", "10", "must be at least 3000, not"),
        ("BALANCE_MAX_RECORDS_PER_BATCH", "0", "must be at least 1, not"),
        ("BALANCE_READ_TIMEOUT", "0", "must be more than 0, not"),
        ("BALANCE_READ_TIMEOUT", "nan", "must be a number, not"),
        ("BALANCE_READ_TIMEOUT", "soon", "must be a number, not"),
        ("BALANCE_CREATE_TOPICS", "perhaps", "must be true or false, not"),
        ("BALANCE_BOOTSTRAP_SERVERS", "", "must have at least 1 character"),
        ("BALANCE_SCHEMA_REGISTRY_URL", "localhost:8081", "must be a URL of http or https, not"),
        ("BALANCE_APPLICATION_ID", "has space", "must be 1 to 200 letters, digits"),
        ("BALANCE_TOPIC", "a/b", "must be 1 to 200 letters, digits"),
        ("BALANCE_PARTITIONER", "any", "'any' is not possible: the events of a customer must be on one partition"),
        ("BALANCE_PARTITIONER", "CRC32", "must be 'murmur2', 'crc32' or 'fnv1a', not 'CRC32'"),
        ("BALANCE_TOPIC", ".", "is no topic name; give another"),
        ("BALANCE_TOPIC", "..", "is no topic name; give another"),
        ("BALANCE_RETRY_TOPICS", ".", "has '.', which is no topic name"),
        ("BALANCE_RETRY_TOPICS", "letters,..", "has '..', which is no topic name"),
        ("BALANCE_LOG_LEVEL", "LOUD", "must be 'DEBUG', 'INFO', 'WARNING' or 'ERROR', not"),
        ("BALANCE_SPARK_DRIVER_MEMORY", "lots", "must be a number of megabytes or gigabytes, such as 512m or 2g, not"),
        ("BALANCE_SPARK_DRIVER_MEMORY", "448m", "Spark does not start with less"),
        ("BALANCE_SPARK_DRIVER_MEMORY", "0g", "Spark does not start with less"),
        ("BALANCE_APPLICATION_SERVER", "localhost", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "localhost:", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", ":5051", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "localhost:0", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "localhost:70000", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "localhost:\uff15\uff10\uff15\uff11", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "bücher.example:5051", "is not host:port; give an address in ASCII"),
        ("BALANCE_APPLICATION_SERVER", "http://localhost:5051", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "user@localhost:5051", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "::1:5051", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "a..b:5051", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", ".a:5051", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", f"{'a' * 64}.example:5051", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", f"{'a.' * 127}:5051", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "0.0.0.0:5051", "is a wildcard address"),
        ("BALANCE_APPLICATION_SERVER", "[::]:5051", "is a wildcard address"),
        ("BALANCE_APPLICATION_SERVER", "*:5051", "is a wildcard address"),
        ("BALANCE_PEER_ALLOW_LIST", "10.0.0.256", "is no host name, *.domain, IP address or network"),
        ("BALANCE_PEER_ALLOW_LIST", "10.0.0", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "10.0.0.1/8", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "10.0.0.0/33", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "peer:5051", "without ports"),
        ("BALANCE_PEER_ALLOW_LIST", "[::1]", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "*", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "peer.*", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "a..b", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "http://peer", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "localhost,bad host", "has 'bad host', which is no host name"),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence_that_names_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
) -> None:
    message = refusal(monkeypatch, **{variable: value})

    assert message.startswith(f"{variable}: ")
    assert sentence in message
    assert f"'{value}'" in message
    assert "\n" not in message
    assert message.count("BALANCE_") == 1


def test_the_sentences_of_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, BALANCE_PARTITIONS="0") == ("BALANCE_PARTITIONS: must be at least 1, not '0'")
    monkeypatch.delenv("BALANCE_PARTITIONS")
    assert refusal(monkeypatch, BALANCE_APPLICATION_SERVER="localhost") == (
        "BALANCE_APPLICATION_SERVER: 'localhost' is not host:port; give an address in ASCII that peers can reach"
    )


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("{", "not JSON; give an object of property names and values"),
        ("[]", "not a JSON object; give an object of property names and values"),
        ('{"a": null}', "property 'a' is neither a string nor a number nor a boolean"),
        ('{"a": {"b": "hunter2"}}', "property 'a' is neither a string nor a number nor a boolean"),
        ('{"a": ["hunter2"]}', "property 'a' is neither a string nor a number nor a boolean"),
        ('{"sasl.password": "hunter2"', "not JSON; give an object of property names and values"),
    ],
)
def test_a_bad_kafka_config_is_refused_without_its_secrets(
    monkeypatch: pytest.MonkeyPatch, value: str, sentence: str
) -> None:
    assert refusal(monkeypatch, BALANCE_KAFKA_CONFIG=value) == f"BALANCE_KAFKA_CONFIG: {sentence}"


@pytest.mark.parametrize("variable", ["BALANCE_SCHEMA_REGISTRY_USER", "BALANCE_SCHEMA_REGISTRY_PASSWORD"])
def test_half_a_credential_is_refused_without_its_value(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    message = refusal(monkeypatch, **{variable: "hunter2"})

    assert message == (
        "BALANCE_SCHEMA_REGISTRY_USER and BALANCE_SCHEMA_REGISTRY_PASSWORD go together; set both or none"
    )


def test_all_bad_values_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, BALANCE_PARTITIONS="0", BALANCE_HTTP_PORT="x")

    assert "BALANCE_PARTITIONS: " in message
    assert "BALANCE_HTTP_PORT: " in message


@pytest.mark.parametrize("variable", ["BALANCE_SCHEMA_REGISTRY_URL", "BALANCE_TRACING_ENDPOINT"])
@pytest.mark.parametrize("url", ["ftp://me:hunter2@there", "me:hunter2@there:8081", "ftp://me:a/hunter2@there"])
def test_a_url_is_refused_without_its_credentials(monkeypatch: pytest.MonkeyPatch, variable: str, url: str) -> None:
    message = refusal(monkeypatch, **{variable: url})

    assert "hunter2" not in message
    assert "@there" in message


@pytest.mark.parametrize("password", ["hunter2", "a/hunter2", "a@hunter2"])
def test_a_url_is_printed_without_its_credentials(password: str) -> None:
    shown = load_settings(schema_registry_url=f"https://me:{password}@there:8081/v7").printable()

    assert shown["BALANCE_SCHEMA_REGISTRY_URL"] == "https://********@there:8081/v7"


@pytest.mark.parametrize(
    "address",
    [
        "localhost:5051",
        "10.0.0.1:80",
        "[::1]:5051",
        "balance-1.internal:65535",
        "balance_1.internal.:80",
        "xn--bcher-kva.example:1",
        f"{'a' * 63}.example:1",
    ],
)
def test_an_address_peers_can_reach_is_accepted(address: str) -> None:
    assert load_settings(application_server=address).application_server == address


def test_an_instance_can_advertise_its_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "3f9c0a51e2d4")

    assert load_settings(application_server="{hostname}:5051").application_server == "3f9c0a51e2d4:5051"


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a container would be told by a file; this machine may be one."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "3f9c0a51e2d4")
    mark = tmp_path / ".dockerenv"
    monkeypatch.setattr("balance_service.settings.network._CONTAINER_FILES", (str(tmp_path / "other"), str(mark)))
    return mark


@pytest.mark.parametrize("mark", ["file", "variable"])
def test_in_a_container_the_default_address_is_its_host_name(
    mark: str, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mark == "file":
        marks.touch()
    else:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")

    assert load_settings(http_host="0.0.0.0").application_server == "3f9c0a51e2d4:5051"
    assert load_settings(http_host="10.1.2.3", http_port=80).application_server == "3f9c0a51e2d4:80"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_in_a_container_that_listens_only_on_loopback_the_default_address_is_localhost(host: str, marks: Path) -> None:
    marks.touch()

    assert load_settings(http_host=host).application_server == "localhost:5051"


@pytest.mark.usefixtures("marks")
def test_outside_a_container_the_default_address_is_localhost_with_the_http_port() -> None:
    assert load_settings(http_host="0.0.0.0").application_server == "localhost:5051"
    assert load_settings(http_port=5062).application_server == "localhost:5062"
    assert load_settings(http_port=0).application_server == "localhost:5051"


@pytest.mark.usefixtures("marks")
def test_a_given_address_overrides_the_default_in_a_container(marks: Path) -> None:
    marks.touch()

    assert load_settings(http_host="0.0.0.0", application_server="a:1").application_server == "a:1"


def test_peers_may_be_hosts_domains_addresses_and_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_PEER_ALLOW_LIST", " peer-1,*.svc.Cluster.local, 10.0.0.0/8 ,192.0.2.1,::1,fd00::/8,")

    assert load_settings().peer_allow_list == (
        "peer-1",
        "*.svc.Cluster.local",
        "10.0.0.0/8",
        "192.0.2.1",
        "::1",
        "fd00::/8",
    )


def test_without_an_allow_list_any_host_may_be_a_peer() -> None:
    assert load_settings().peer_allow_list == ()


def test_a_short_peer_secret_is_refused_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, BALANCE_PEER_SECRET="hunter2")

    assert message.startswith("BALANCE_PEER_SECRET: ")
    assert "hunter2" not in message


def test_every_setting_is_printed_with_its_variable() -> None:
    printed = load_settings().printable()

    assert len(printed) == len(Settings.model_fields)
    assert all(name.startswith("BALANCE_") for name in printed)
    assert printed["BALANCE_READ_TIMEOUT"] == "5.0"
    assert printed["BALANCE_SPARK_JARS"] == ""


def test_printed_settings_can_be_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(kafka_config={"client.rack": "r1"}, read_timeout_seconds=1.5, create_topics=False)
    for name, value in settings.printable().items():
        if value:
            monkeypatch.setenv(name, value)

    assert load_settings() == settings


def test_secrets_are_never_printed() -> None:
    login = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "me"}
    secrets = {
        "sasl.password": "hunter2",
        "ssl.key.password": "hunter2",
        "ssl.keystore.password": "hunter2",
        "sasl.oauthbearer.client.secret": "hunter2",
        "sasl.oauthbearer.config": "principal=me secret=hunter2",
        "sasl.oauthbearer.assertion.private.key.passphrase": "hunter2",
        "sasl.jaas.config": "password=hunter2",
    }
    settings = load_settings(
        schema_registry_url="https://me:hunter2@hunter2@registry:8081/path",
        peer_secret="hunter2-hunter2-hunter2",
        peer_secrets_former="hunter2-hunter2-before,hunter2-hunter2-first",
        kafka_config={**secrets, **login},
    )
    other = load_settings(schema_registry_token="hunter2")

    printed = settings.printable()

    assert "hunter2" not in str(printed) + str(other.printable())
    assert "hunter2" not in repr(settings) + repr(other)
    assert json.loads(printed["BALANCE_KAFKA_CONFIG"])["sasl.username"] == "me"
    assert set(json.loads(printed["BALANCE_KAFKA_CONFIG"])) == {*secrets, *login}
    assert printed["BALANCE_SCHEMA_REGISTRY_URL"].endswith("@registry:8081/path")


def test_the_location_of_a_key_is_no_secret(tmp_path: Path) -> None:
    config = {"ssl.key.location": "/k", "ssl.keystore.location": "/s", "ssl.key.pem": "hunter2"}

    assert json.loads(printable_properties(config)) == {**config, "ssl.key.pem": "********"}


@pytest.mark.parametrize("field", Settings.model_fields)
def test_refusals_of_each_setting_are_in_the_words_of_the_service(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    refused = []
    for value in ("", "?", "-1", "1e99", "99999999999999999999"):
        monkeypatch.setenv(variable_of(field), value)
        with contextlib.suppress(ConfigurationError):
            load_settings()
            continue
        refused.append(refusal(monkeypatch))

    assert not re.search(r"Input|String|should|pattern|_type|pydantic|[0-9]e\+|\.0\b(?!\.)", " ".join(refused))


def test_the_bounds_of_settings_are_told_as_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, BALANCE_IDEMPOTENCY_WINDOW="99999999") == (
        "BALANCE_IDEMPOTENCY_WINDOW: must be at most 31536000, not '99999999'"
    )


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("BALANCE_TOPCI", "BALANCE_TOPIC"),
        ("BALANCE_MODEL", "BALANCE_MODELS"),
        ("BALANCE_HTP_PORTS", "BALANCE_HTTP_PORT"),
        ("balance_http_prot", "BALANCE_HTTP_PORT"),
        ("BALANCE_READ_TIMEOUTS", "BALANCE_READ_TIMEOUT"),
        ("BALANCE__TOPIC", "BALANCE_TOPIC"),
    ],
)
def test_a_variable_that_is_nearly_a_setting_is_refused_and_names_it(
    monkeypatch: pytest.MonkeyPatch, name: str, nearest: str
) -> None:
    assert refusal(monkeypatch, **{name: "1"}) == f"{name} is no setting: correct it to {nearest}, or remove it"


def test_a_misspelt_and_a_wrong_setting_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, BALANCE_TOPCI="a", BALANCE_PARTITIONS="0")

    assert message == (
        "BALANCE_TOPCI is no setting: correct it to BALANCE_TOPIC, or remove it; "
        "BALANCE_PARTITIONS: must be at least 1, not '0'"
    )


def test_other_variables_are_unknown_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"BALANCE_DISCOUNT": "5", "balance_url": "x", "BALANCE_PORT": "5051"}
    for name, value in others.items():
        monkeypatch.setenv(name, value)

    load_settings()

    environment = {**others, "BALANCE_TOPIC": "a", "balance_models": "b", "BALANCE_FAILPOINTS": "c", "BALANCED": "d"}
    assert unknown_variables(environment) == sorted(others)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BALANCE_SERVICE_HOST", "10.0.0.1"),
        ("BALANCE_SERVICE_PORT", "80"),
        ("BALANCE_SERVICE_PORT_HTTP", "80"),
        ("BALANCE_PORT", "tcp://10.0.0.1:80"),
        ("BALANCE_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("BALANCE_SERVICE_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("BALANCE_SERVICE_SERVICE_HOST", "10.0.0.1"),
        ("BALANCE_KAFKA_PORT_9092_UDP_PROTO", "udp"),
    ],
)
def test_variables_of_kubernetes_services_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    load_settings()

    assert unknown_variables({name: value}) == []
