"""`headrace replica`: serves predictions of a job's newest version. The work is in trainer.replica."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.service.cli.arguments import Health
from headrace.service.cli.panels import Panel

app = typer.Typer()

Exports = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|URI",
        help="Follow a stream of exports: the folder of current.json. With a live feed: while too slow for it.",
    ),
]
Feed = Annotated[
    str | None, typer.Option(metavar="URL", help="Follow the live feed of a service's job, http://.../v1/jobs/JOB.")
]
FeedToken = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with the token for the service in --feed, or with the join token for --join."
    ),
]
Items = Annotated[
    list[str] | None,
    typer.Option(metavar="FILES", help="Catalogue of items to retrieve, if not where the job file says; repeatable."),
]
Ranker = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIR|URI", help="A job whose model ranks retrieved items: its store here, or its exports; repeatable."
    ),
]
Join = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Follow the live feed of the job whose launcher listens there."),
]
GrpcListen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Address for gRPC, with the same token and certificate. Default: none."),
]


@app.command(rich_help_panel=Panel.SERVE)
def replica(
    exports: Exports = None,
    feed: Feed = None,
    store: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Follow the live feed of the job that runs in a store on this machine."),
    ] = None,
    join: Join = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to listen on.")] = "127.0.0.1:8090",
    grpc_listen: GrpcListen = None,
    health: Health = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the token that requests must have; health needs none."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Serve HTTPS with this certificate, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key, PEM.")] = None,
    anyone: Annotated[
        bool, typer.Option("--anyone", help="Listen on another address than loopback without a token.")
    ] = False,
    feed_token_file: FeedToken = None,
    address_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File that gets host:port once the replica listens.")
    ] = None,
    items: Items = None,
    ranker: Ranker = None,
    keep: Annotated[int, typer.Option(min=0, metavar="N", help="Most older versions to keep for a rollback.")] = 100,
    keep_memory: Annotated[str, typer.Option(metavar="SIZE", help="Most memory for them.")] = "1GiB",
    max_batch: Annotated[int, typer.Option(min=1, metavar="N", help="Most samples of one request.")] = 4096,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="The longest request.")] = "8MiB",
    max_requests: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most requests at a time; further ones get 503.")
    ] = 256,
) -> None:
    """Serve predictions over the Open Inference Protocol, from exports or a live feed, until Ctrl-C.

    Example: headrace replica --exports runs/clicks/exports/serving/clicks
    """
    from headrace import logs
    from headrace.config import validate
    from headrace.trainer.replica.config import ReplicaConfig
    from headrace.trainer.replica.replica import run as serve

    options = {
        "exports": exports,
        "feed": feed,
        "store": store,
        "join": join,
        "listen": listen,
        "grpc_listen": grpc_listen,
        "health": health,
        "token_file": token_file,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "anyone": anyone,
        "feed_token_file": feed_token_file,
        "address_file": address_file,
        "items": tuple(items or ()),
        "rankers": tuple(ranker or ()),
        "keep_versions": keep,
        "keep_memory": keep_memory,
        "max_batch": max_batch,
        "max_body": max_body,
        "max_requests": max_requests,
    }
    logs.setup("replica")
    serve(validate(ReplicaConfig, options))
