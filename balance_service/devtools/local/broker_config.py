"""What the local broker is told: one process that is its own controller, sized for one machine."""

from __future__ import annotations

from dataclasses import dataclass

from balance_service.devtools.local.ports import HOST, free_port

_CONFIG = """\
process.roles={roles}
node.id=1
# Named here and not kept in the log, so that the port may change from run to run.
controller.quorum.voters=1@{host}:{controller_port}
listeners={listeners}
controller.listener.names=CONTROLLER
log.dirs={log_dir}

auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1

# Small: the default would take 128 MB of heap.
log.cleaner.dedupe.buffer.size=16777216
num.network.threads=2
num.io.threads=4
background.threads=2
# The controller's idle heartbeat to its own log, by default twice a second.
metadata.max.idle.interval.ms=10000
"""

LOG4J_PROPERTIES = """\
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d{ISO8601} %p %c{1}: %m%n
rootLogger.level=INFO
rootLogger.appenderRef.out.ref=out
# Every setting with its value, several times over.
logger.config.name=org.apache.kafka.common.config.AbstractConfig
logger.config.level=WARN
"""


_PROXIED_LISTENER = """\
advertised.listeners=PLAINTEXT://{host}:{port},PROXIED://{host}:{advertised_port}
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT
"""


@dataclass(frozen=True, slots=True)
class BrokerExtras:
    """What a broker is told beyond its own, such as how to secure further listeners."""

    listeners: tuple[str, ...] = ()
    """Each as `NAME://host:port`; the properties say what the name stands for."""
    properties: str = ""
    """Lines for server.properties."""
    jvm_flags: tuple[str, ...] = ()


def server_properties(
    port: int,
    log_dir: str,
    *,
    controller_only: bool = False,
    proxied: tuple[int, int] | None = None,
    extras: BrokerExtras | None = None,
) -> str:
    """Contents of server.properties for clients on `port`, with a free port for the controller.

    `log_dir` is relative to the working directory, because Kafka splits paths at commas and reads this
    file as Latin-1. `controller_only` leaves the broker out, and takes it for dead without delay. `proxied`
    is the port of a second listener, and the port of the proxy that is advertised to whoever comes by it.
    """
    controller_port = free_port()
    listeners = [f"CONTROLLER://{HOST}:{controller_port}"]
    if not controller_only:
        listeners.append(f"PLAINTEXT://{HOST}:{port}")
        if proxied is not None:
            listeners.append(f"PROXIED://{HOST}:{proxied[0]}")
        if extras is not None:
            listeners += extras.listeners
    text = _CONFIG.format(
        roles="controller" if controller_only else "broker,controller",
        host=HOST,
        controller_port=controller_port,
        listeners=",".join(listeners),
        log_dir=log_dir,
    )
    if controller_only:
        return text + "broker.session.timeout.ms=100\n"
    if proxied is not None:
        text += _PROXIED_LISTENER.format(host=HOST, port=port, advertised_port=proxied[1])
    return text if extras is None else text + extras.properties
