"""Docker for the compose test: an engine, images, and programs with a time limit.

If an image cannot be pulled, the Python image is a Debian from debootstrap, broker and registry are made of the jars
of the local stack, and Prometheus is Debian's package. Ports, variables and paths are those of the originals.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.process.jars import resolve_jars, unpack
from balance_service.process.java import REGISTRY_JAVA, java_executable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_TAIL_LINES = 15


def run(
    command: Sequence[str | Path],
    timeout_seconds: float,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    log: Path | None = None,
) -> str:
    """Runs a program and returns its output; with `log`, the output goes there and "" is returned.

    Raises:
        ConfigurationError: the program failed or took too long; with the end of its output.
    """
    name = " ".join(str(part) for part in command[:4])
    try:
        if log is None:
            done = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                check=False,
            )
            said = done.stdout + done.stderr
        else:
            with log.open("w") as output:
                done = subprocess.run(
                    command,
                    env=environment,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=timeout_seconds,
                    check=False,
                )
            said = log.read_text(errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{name} … failed: {error}") from error
    if done.returncode:
        raise ConfigurationError(f"{name} … ended with code {done.returncode}:\n{_end_of(said)}")
    return done.stdout or ""


def _end_of(said: str) -> str:
    return "\n".join(f"  {line}" for line in said.splitlines()[-_TAIL_LINES:])


# Program → Debian package.
_PACKAGES = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
}
_START_SECONDS = 60
_INSTALL_SECONDS = 900


@contextmanager
def engine(folder: Path) -> Iterator[dict[str, str]]:
    """Yields environment variables for `docker` and `docker-compose` to reach an engine.

    Args:
        folder: the data of a private engine, whose images are kept for the next run.

    Raises:
        ConfigurationError: no engine runs, and none can be started.
    """
    environment = {**os.environ, "BUILDKIT_PROGRESS": "plain"}
    if _answers(environment):
        yield environment
        return
    _require_means()
    folder.mkdir(parents=True, exist_ok=True)
    socket = folder / "docker.sock"
    environment["DOCKER_HOST"] = f"unix://{socket}"
    if _answers(environment):
        yield environment
        return
    with (folder / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            [
                "dockerd",
                f"--data-root={folder / 'data'}",
                f"--exec-root={folder / 'exec'}",
                f"--pidfile={folder / 'pid'}",
                f"--host=unix://{socket}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C in a terminal would otherwise end the daemon before the containers are removed.
            start_new_session=True,
        )
    try:
        _wait_for(daemon, environment, folder)
        yield environment
    finally:
        daemon.terminate()
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(30)
        daemon.kill()


def _answers(environment: dict[str, str]) -> bool:
    if not shutil.which("docker"):
        return False
    asked = subprocess.run(
        ["docker", "version", "--format", "{{.Server.Version}}"],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return asked.returncode == 0


def _require_means() -> None:
    missing = sorted({package for program, package in _PACKAGES.items() if not shutil.which(program)})
    if os.geteuid() != 0:
        also = f", with the packages {', '.join(missing)} installed" if missing else ""
        raise ConfigurationError(
            f"no Docker engine answers, and only root can start one: start one, or run this as root{also}"
        )
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise ConfigurationError(f"no Docker engine answers, and this is no Debian: install {', '.join(missing)}")
    sys.stderr.write(f"installing {', '.join(missing)} …\n")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update"], _INSTALL_SECONDS, environment=environment)
    run(["apt-get", "install", "--yes", "--no-install-recommends", *missing], _INSTALL_SECONDS, environment=environment)


def _wait_for(daemon: subprocess.Popen[bytes], environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(environment):
        if daemon.poll() is not None or time.monotonic() > deadline:
            end = (folder / "dockerd.log").read_text(errors="replace").splitlines()[-8:]
            raise ConfigurationError(
                "the Docker engine did not start; it needs control groups, network namespaces, iptables and an overlay "
                "file system, which a container without privileges does not have. Its log ends with:\n" + "\n".join(end)
            )
        time.sleep(0.5)


ROOT = Path(__file__).resolve().parents[2]
_STAND_INS = Path(__file__).with_name("stand_ins")
_PREFIX = "balance-compose-test"
_PULL_SECONDS = 600
_BUILD_SECONDS = 3_000
_DEBIAN = "bookworm"
_PYTHON_PACKAGES = "ca-certificates,python3,python3-pip,python3-venv"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]+)\}")
# The same exclusions as in the slim Python images.
_DPKG = "path-exclude /usr/share/doc/*\npath-exclude /usr/share/man/*\npath-exclude /usr/share/locale/*\n"


def prepare_images(environment: dict[str, str], logs: Path) -> dict[str, str]:
    """Builds the service's image and returns the variables that name the images to use.

    Raises:
        ConfigurationError: an image is unavailable.
    """
    defaults = dict(_VARIABLE.findall((ROOT / "docker-compose.yml").read_text()))
    docker = _Docker(environment, logs)
    python = defaults["PYTHON_IMAGE"]
    if not docker.has(python):
        python = docker.python_image(f"{_PREFIX}/python:{_DEBIAN}")
    images = {"PYTHON_IMAGE": python, "BALANCE_IMAGE": f"{_PREFIX}/balance-service:local"}
    docker.build_service(images)
    stand_ins = {
        "KAFKA_IMAGE": docker.kafka,
        "REGISTRY_IMAGE": docker.registry,
        "PROMETHEUS_IMAGE": docker.prometheus,
    }
    for variable, stand_in in stand_ins.items():
        if docker.has(defaults[variable]):
            images[variable] = defaults[variable]
        else:
            images[variable] = stand_in(python)
    return images


def image_bytes(environment: dict[str, str], image: str) -> int:
    """Returns the size of an image on disk, all layers together."""
    return int(run(["docker", "image", "inspect", "--format", "{{.Size}}", image], 30, environment=environment))


class _Docker:
    def __init__(self, environment: dict[str, str], logs: Path) -> None:
        self._environment = environment
        self._logs = logs

    def has(self, image: str) -> bool:
        """Whether an image exists locally or can be pulled."""
        try:
            self._docker("image", "inspect", image)
        except ConfigurationError:
            try:
                self._docker("pull", image, timeout_seconds=_PULL_SECONDS)
            except ConfigurationError:
                return False
        return True

    def python_image(self, name: str) -> str:
        """Makes a Debian with Python by debootstrap; it trusts the certificates of this machine."""
        try:
            self._docker("image", "inspect", name)
        except ConfigurationError:
            sys.stderr.write(f"making {name} with debootstrap …\n")
        else:
            return name
        with tempfile.TemporaryDirectory(dir=self._logs) as temporary:
            root = Path(temporary) / "root"
            run(
                ["debootstrap", "--variant=minbase", f"--include={_PYTHON_PACKAGES}", _DEBIAN, root],
                _BUILD_SECONDS,
                log=self._logs / "debootstrap.log",
            )
            (root / "etc/dpkg/dpkg.cfg.d/docker").write_text(_DPKG)
            for folder in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt/lists"):
                shutil.rmtree(root / folder)
                (root / folder).mkdir()
            _trust_as_here(root)
            with subprocess.Popen(["tar", "--directory", root, "--create", "."], stdout=subprocess.PIPE) as tar:
                subprocess.run(
                    ["docker", "import", "--change", 'CMD ["python3"]', "-", name],
                    stdin=tar.stdout,
                    env=self._environment,
                    stdout=subprocess.DEVNULL,
                    timeout=_BUILD_SECONDS,
                    check=True,
                )
        return name

    def build_service(self, images: dict[str, str]) -> None:
        """Builds the service's image as the compose file does."""
        sys.stderr.write("building the service's image …\n")
        self._build(
            ROOT,
            ROOT / "deploy/Dockerfile",
            images["BALANCE_IMAGE"],
            "balance-service",
            PYTHON_IMAGE=images["PYTHON_IMAGE"],
        )

    def kafka(self, python: str) -> str:
        """Builds a broker that takes the same configuration as the official image."""
        return self._stand_in("kafka", python, {"jars": resolve_jars("kafka")[0].parent})

    def registry(self, python: str) -> str:
        """Builds a registry that takes the same configuration as the official image, with its Java."""
        java = java_executable(REGISTRY_JAVA).resolve().parent.parent
        return self._stand_in("registry", python, {"app": unpack(resolve_jars("registry")[0]), "java": java})

    def prometheus(self, python: str) -> str:
        """Builds an image of Debian's Prometheus that starts like the official image."""
        sys.stderr.write("prometheus' image cannot be pulled; using Debian's package …\n")
        image = f"{_PREFIX}/prometheus:local"
        with tempfile.TemporaryDirectory(dir=self._logs) as empty:
            self._build(Path(empty), _STAND_INS / "prometheus.Dockerfile", image, "prometheus", BASE=python)
        return image

    def _stand_in(self, name: str, python: str, parts: dict[str, Path]) -> str:
        sys.stderr.write(f"{name}'s image cannot be pulled; using the same jars …\n")
        base, image = f"{_PREFIX}/java:local", f"{_PREFIX}/{name}:local"
        self._build(ROOT, ROOT / "deploy/Dockerfile", base, "java", "--target=base", PYTHON_IMAGE=python)
        with tempfile.TemporaryDirectory(dir=self._logs) as temporary:
            context = Path(temporary)
            for part, folder in parts.items():
                shutil.copytree(folder, context / part)
            shutil.copy(_STAND_INS / f"{name}.sh", context / "start.sh")
            self._build(context, _STAND_INS / "Dockerfile", image, name, BASE=base)
        return image

    def _build(self, context: Path, dockerfile: Path, image: str, log: str, *options: str, **arguments: str) -> None:
        given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        run(
            ["docker", "build", *options, *given, "--file", dockerfile, "--tag", image, context],
            _BUILD_SECONDS,
            environment=self._environment,
            log=self._logs / f"build-{log}.log",
        )

    def _docker(self, *arguments: str, timeout_seconds: float = 60) -> str:
        return run(["docker", *arguments], timeout_seconds, environment=self._environment)


def _trust_as_here(root: Path) -> None:
    """Adds the certificates that this machine trusts in addition to Debian's, such as a company proxy's."""
    if not _CERTIFICATES.is_file():
        return
    known = {_bare(c) for c in _CERTIFICATE.findall((root / "etc/ssl/certs/ca-certificates.crt").read_text())}
    ours = [c for c in _CERTIFICATE.findall(_CERTIFICATES.read_text()) if _bare(c) not in known]
    for number, certificate in enumerate(ours):
        (root / f"usr/local/share/ca-certificates/machine-{number}.crt").write_text(certificate + "\n")
    run(["chroot", root, "update-ca-certificates"], 120)


def _bare(certificate: str) -> str:
    return "".join(certificate.split())
