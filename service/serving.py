"""`millrace replica`: answers predictions with a job's newest version. The work is trainer.replica's."""

from pathlib import Path
from typing import Annotated

import typer

from millrace import logs
from millrace.config import validate
from trainer.replica.config import ReplicaConfig


def replica(
    exports: Annotated[
        str | None, typer.Option(metavar="DIR|URI", help="Follow a stream of exports: where current.json is.")
    ] = None,
    feed: Annotated[
        str | None, typer.Option(metavar="URL", help="Follow the live feed of a service's job, http://.../v1/jobs/JOB.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Follow the live feed of the job that runs in a store here.")
    ] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Answer requests there.")] = "127.0.0.1:8090",
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Requests must bear the token in a file; health needs none.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answer over HTTPS with this certificate, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key, PEM.")] = None,
    anyone: Annotated[
        bool, typer.Option("--anyone", help="Listen on another address than loopback without a token.")
    ] = False,
    feed_token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the token for the service of --feed.")
    ] = None,
    address_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write host:port there once requests are answered.")
    ] = None,
    keep: Annotated[int, typer.Option(min=0, help="Versions to go back to, at most.")] = 100,
    keep_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for them, at most.")] = "1GiB",
    max_batch: Annotated[int, typer.Option(min=1, help="Samples of one request, at most.")] = 4096,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="The longest request.")] = "8MiB",
    max_requests: Annotated[int, typer.Option(min=1, help="Requests at once; more are answered 503.")] = 256,
) -> None:
    """Answer predictions over the Open Inference Protocol, from exports or a live feed, until Ctrl-C."""
    told = {
        "exports": exports,
        "feed": feed,
        "store": store,
        "listen": listen,
        "token_file": token_file,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "anyone": anyone,
        "feed_token_file": feed_token_file,
        "address_file": address_file,
        "keep_versions": keep,
        "keep_memory": keep_memory,
        "max_batch": max_batch,
        "max_body": max_body,
        "max_requests": max_requests,
    }
    from trainer.replica.running import run  # onnx and what answers requests: other commands need none of it

    logs.setup("replica")
    run(validate(ReplicaConfig, told))
