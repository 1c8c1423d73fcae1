"""The images of the compose file: pulled, built, or replaced by stand-ins.

If an image cannot be pulled, the Python image is a Debian from debootstrap, broker and registry are made of the jars
of the local stack, and Prometheus is Debian's package. Ports, variables and paths are those of the originals.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from balance_service.errors import ConfigurationError
from balance_service.process.jars import REGISTRY_JAVA, java_executable, resolve_jars, unpack
from tests.compose.programs import run

ROOT = Path(__file__).resolve().parents[2]
_STAND_INS = Path(__file__).with_name("stand_ins")
_PREFIX = "balance-compose-test"
_PULL_SECONDS = 600
_BUILD_SECONDS = 3_000
_DEBIAN = "bookworm"
_PACKAGES = "ca-certificates,python3,python3-pip,python3-venv"
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
                ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _DEBIAN, root],
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
        java = java_executable(REGISTRY_JAVA, bundled=True).resolve().parent.parent
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
