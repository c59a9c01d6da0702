"""`headrace render`: writes what an orchestrator needs to run a job."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.errors import SpecError, Unwritable
from headrace.service.cli.arguments import Overrides, SpecFile
from headrace.service.cli.panels import Panel, PanelledGroup
from headrace.service.kubernetes.config import IMAGE, ManifestSettings

app = typer.Typer()
render = typer.Typer(cls=PanelledGroup, no_args_is_help=True, help="Write what an orchestrator needs to run a job.")
app.add_typer(render, name="render", rich_help_panel=Panel.CLUSTER)


@render.callback()
def _group() -> None:
    """Keep the name of the one command."""


@render.command()
def kubernetes(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Namespace of all objects.")] = "default",
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Image of deploy/Dockerfile, by its digest.")] = IMAGE,
    identity_secret: Annotated[
        str,
        typer.Option(metavar="NAME", help="Secret with the job's authority.pem and join_token; default: JOB-identity."),
    ] = "",
    environment_secret: Annotated[
        str, typer.Option(metavar="NAME", help="Secret whose keys become variables; default: JOB-environment.")
    ] = "",
    replicas: Annotated[int, typer.Option(min=0, max=1000, metavar="N", help="Pods that serve predictions.")] = 0,
    metrics_from: Annotated[
        str | None, typer.Option(metavar="NAME", help="Namespace of Prometheus, which may read the job's figures.")
    ] = None,
    queue: Annotated[
        str | None, typer.Option(metavar="NAME", help="Queue of Volcano: the pods of the job start together.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new or empty folder for one file each; default: stdout.")
    ] = None,
) -> None:
    """Print Kubernetes manifests for a job whose `cluster.launcher` is "external".

    Secrets are named in them, never shown. Nothing is sent to a cluster: `kubectl apply` does it.

    Example: headrace render kubernetes job.toml --namespace ads --out manifests
    """
    from headrace.service.kubernetes.manifests import render_job

    settings = ManifestSettings(
        image=image,
        namespace=namespace,
        identity_secret=identity_secret,
        environment_secret=environment_secret,
        replicas=replicas,
        metrics_from=metrics_from,
        queue=queue,
    )
    texts = render_job(job, overrides, settings)
    if out is None:
        print("---\n".join(texts.values()), end="")
        return
    _write_all(out, texts)


def _write_all(folder: Path, texts: dict[str, str]) -> None:
    """Write one file each into a folder that has no other ones: all of it is applied together."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if other := sorted(path.name for path in folder.iterdir() if path.name not in texts):
            raise SpecError(f"{folder} has other files, such as {other[0]}; name a new folder, or remove them", "--out")
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unwritable(folder, error) from None
    print(f"{len(texts)} files in {folder}; `kubectl apply -f {folder}` applies them")
