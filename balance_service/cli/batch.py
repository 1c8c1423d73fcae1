"""The batch job of `rebuild --master`, in the process of the command: its checks, the job, and the request."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.cli.waiting import servers_of, telling
from balance_service.client import InvalidCallError
from balance_service.errors import BalanceServiceError
from balance_service.observability.logs import configure_logging
from balance_service.process.open_files import raise_limit
from balance_service.process.runtime import keep_files_private
from balance_service.process.scratch import temporary_scratch
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.client import Client
    from balance_service.process.scratch import Scratch
    from balance_service.settings import Settings
    from balance_service.spark.batch_job import BatchJob

_MOST_TOLD = 3


@dataclass(frozen=True, slots=True)
class BatchRebuild:
    """What the options of `rebuild` say of a job. `conf` are settings of Spark."""

    master: str
    files: str
    conf: Mapping[str, str]
    keeps_files: bool

    def run(self, client: Client, model: str, given: Mapping[str, Any]) -> None:
        """Folds a read model into files, and has the instances begin a generation that is loaded from them.

        If no generation begins, the files are deleted.

        Args:
            given: further arguments of `Client.rebuild`.

        Raises:
            ClientError: the instance refuses, or does not answer.
            BalanceServiceError: the job cannot run, or an instance does not see its folder.
        """
        from balance_service.spark.batch_session import check_cluster

        settings = load_settings()
        configure_logging("WARNING")
        raise_limit()
        keep_files_private()
        check_cluster(self.master, self.conf)
        # Before Spark starts, and without the class.
        client.generations(model)
        with temporary_scratch() as scratch:
            job = self._job(settings, scratch, model)
            try:
                digest = self._made(job, scratch, client, model)
            except BaseException:
                with suppress(BalanceServiceError):
                    job.folder.delete()
                raise
            try:
                client.rebuild(model, files=self.files, digest=digest, keep_files=self.keeps_files, **given)
            except InvalidCallError:
                # Of any other error, the generation may have begun; and it may load what another command has made.
                with suppress(BalanceServiceError):
                    if (made := job.folder.manifest()) is not None and made.digest == digest:
                        job.folder.delete()
                raise

    def _job(self, settings: Settings, scratch: Scratch, model: str) -> BatchJob:
        from balance_service.cli.models import chosen_models
        from balance_service.hosting.cluster_rebuild import next_job
        from balance_service.spark.batch_session import launch_driver

        # A model with a `transform` would start a JVM for this machine alone.
        launch_driver(settings, scratch, self.master)
        with telling(servers_of(settings)):
            *_, chosen = chosen_models(settings, [model])
            return next_job(settings, chosen, self.master, self.files, self.conf)

    def _made(self, job: BatchJob, scratch: Scratch, client: Client, model: str) -> str:
        """Runs the job; returns the digest of the manifest."""
        from balance_service.devtools.progress import progress_bar
        from balance_service.spark.batch_job import run

        job.folder.delete()
        job.folder.check()
        if problems := client.check_files(model, self.files):
            told = "; ".join(f"at {one['applicationServer']}: {one['problem']}" for one in problems[:_MOST_TOLD])
            raise BalanceServiceError(f"not all instances could load the files: {told}")
        # The bar is there from the start, also while Spark starts.
        with progress_bar(f"folding {model} on {self.master}", job.offsets) as (bar, task):
            return run(job, scratch, lambda at, of: bar.update(task, completed=at, total=of)).digest
