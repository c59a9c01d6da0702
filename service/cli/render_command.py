"""`headrace render`: writes what an orchestrator needs to run a job."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from headrace.errors import SpecError, Unwritable
from headrace.service.cli.arguments import Overrides, SpecFile
from headrace.service.cli.panels import Panel, PanelledGroup
from headrace.service.kubernetes.config import IMAGE, ManifestSettings

app = typer.Typer()
MAX_REPLICAS = 1000
render = typer.Typer(
    cls=PanelledGroup, no_args_is_help=True, help="Write the files that an orchestrator needs to run a job."
)
app.add_typer(render, name="render", rich_help_panel=Panel.CLUSTER)


Namespace = Annotated[str, typer.Option("--namespace", metavar="NAME", help="Namespace of all objects.")]
Image = Annotated[str, typer.Option("--image", metavar="IMAGE", help="Image of deploy/Dockerfile, by its digest.")]
Pods = Annotated[
    Path | None,
    typer.Option(
        "--pods", metavar="FILE", help="YAML or TOML: volumes, node selector, tolerations, affinity and so on of pods."
    ),
]
EnvironmentSecret = Annotated[
    str,
    typer.Option(
        "--environment-secret", metavar="NAME", help="Secret whose keys become variables; default: JOB-environment."
    ),
]
Kustomize = Annotated[
    bool, typer.Option("--kustomize", help="With --out: a kustomization.yaml, too, for `kubectl apply -k`.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="A new or empty folder for one file each; default: stdout."),
]


@render.command()
def kubernetes(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    namespace: Namespace = "default",
    image: Image = IMAGE,
    pods: Pods = None,
    identity_secret: Annotated[
        str,
        typer.Option(metavar="NAME", help="Secret with the job's authority.pem and join_token; default: JOB-identity."),
    ] = "",
    environment_secret: EnvironmentSecret = "",
    replicas: Annotated[
        int, typer.Option(min=0, max=MAX_REPLICAS, metavar="N", help="Pods that serve predictions.")
    ] = 0,
    metrics_from: Annotated[
        str | None, typer.Option(metavar="NAME", help="Namespace of Prometheus, which may read the job's figures.")
    ] = None,
    queue: Annotated[
        str | None, typer.Option(metavar="NAME", help="Queue of Volcano: the pods of the job start together.")
    ] = None,
    kustomize: Kustomize = False,
    out: Out = None,
) -> None:
    """Print Kubernetes manifests for a job whose `cluster.launcher` is "external".

    Secrets are named in them, never shown. Nothing is sent to a cluster: `kubectl apply` does it.

    Example: headrace render kubernetes job.toml --namespace ads --out manifests
    """
    from headrace.service.kubernetes.manifests import render_job
    from headrace.service.kubernetes.pod_settings import load_pods

    settings = ManifestSettings(
        image=image,
        namespace=namespace,
        identity_secret=identity_secret,
        environment_secret=environment_secret,
        replicas=replicas,
        metrics_from=metrics_from,
        queue=queue,
        pods=load_pods(pods),
    )
    _show(render_job(job, overrides, settings), out, kustomize=kustomize)


@render.command()
def kubernetes_prediction(
    job: SpecFile,
    words: Annotated[list[str], typer.Argument(metavar="-- OPTIONS", help="Options of `headrace predict`.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the prediction.")] = "prediction",
    overrides: Overrides = [],  # noqa: B006
    namespace: Namespace = "default",
    image: Image = IMAGE,
    pods: Pods = None,
    environment_secret: EnvironmentSecret = "",
    kustomize: Kustomize = False,
    out: Out = None,
) -> None:
    """Print Kubernetes manifests for one run of `headrace predict` in a pod.

    Events and output are on volumes, or in an object store.

    Example: headrace render kubernetes-prediction job.toml -- --topic clicks --output /srv/o
    """
    from headrace.service.cli.prediction_commands import request_of_words
    from headrace.service.kubernetes.manifests import render_prediction
    from headrace.service.kubernetes.pod_settings import load_pods
    from headrace.service.kubernetes.prediction_pod import PredictionRun

    given, request = request_of_words([str(job), *words])
    run = PredictionRun(
        name=name,
        words=words,
        output=request.output,
        inputs=given["input_"],
        root=request.input.root,
        version=request.version,
        trainers=request.trainers,
        shards=request.num_shards,
        on=request.on,
    )
    settings = ManifestSettings(
        image=image, namespace=namespace, environment_secret=environment_secret, pods=load_pods(pods)
    )
    _show(render_prediction(job, overrides, settings, run), out, kustomize=kustomize)


@render.command()
def kubernetes_service(
    config: Annotated[Path, typer.Argument(metavar="SERVICE.TOML", help="The service file.", show_default=False)],
    cores: Annotated[float, typer.Option(min=0.1, metavar="N", help="Cores of the service and all of its jobs.")],
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of the service and all of its jobs.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the service.")] = "headrace",
    gpus: Annotated[int, typer.Option(min=0, max=64, metavar="N", help="GPUs of its jobs.")] = 0,
    replicas: Annotated[
        list[str], typer.Option("--replicas", metavar="JOB=N", help="Pods that serve predictions of a job of it.")
    ] = [],  # noqa: B006
    replica_cores: Annotated[float, typer.Option(min=0.1, metavar="N", help="Cores of one replica.")] = 1.0,
    replica_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of one replica.")] = "2GiB",
    namespace: Namespace = "default",
    image: Image = IMAGE,
    pods: Pods = None,
    environment_secret: Annotated[
        str,
        typer.Option(
            "--environment-secret",
            metavar="NAME",
            help="Secret whose keys become variables; default: NAME-environment.",
        ),
    ] = "",
    metrics_from: Annotated[
        str | None, typer.Option(metavar="NAME", help="Namespace of Prometheus, which may read /metrics.")
    ] = None,
    kustomize: Kustomize = False,
    out: Out = None,
) -> None:
    """Print Kubernetes manifests for `headrace serve` in a pod, with replicas of its jobs in others.

    Secrets are named in them, never shown.

    Example: headrace render kubernetes-service service.toml --cores 8 --memory 32GiB
    """
    from headrace.service.kubernetes.manifests import render_service
    from headrace.service.kubernetes.pod_settings import load_pods
    from headrace.service.kubernetes.service_pod import ServiceRun
    from headrace.service.spec.config import WorkerResources

    run = ServiceRun.of(
        config,
        WorkerResources(cores=cores, memory=_size(memory, "--memory"), gpus=gpus),
        _numbers_of(replicas),
        WorkerResources(cores=replica_cores, memory=_size(replica_memory, "--replica-memory")),
    )
    settings = ManifestSettings(
        image=image,
        namespace=namespace,
        environment_secret=environment_secret,
        metrics_from=metrics_from,
        pods=load_pods(pods),
    )
    _show(render_service(name, settings, run), out, kustomize=kustomize)


def _size(text: str, option: str) -> int:
    from headrace.config import parse_size

    try:
        size = parse_size(text)
    except ValueError as error:
        raise SpecError(str(error), option) from None
    if size == 0:
        raise SpecError("is 0, and a container has a limit of memory", option)
    return size


def _numbers_of(replicas: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for text in replicas:
        job, equals, number = text.rpartition("=")
        if not equals or not number.isdecimal() or not 1 <= int(number) <= MAX_REPLICAS:
            raise SpecError(f"{text!r} is not of the form JOB=N, with 1 to {MAX_REPLICAS} pods", "--replicas")
        if job in found:
            raise SpecError(f"names {job!r} twice", "--replicas")
        found[job] = int(number)
    return found


def _show(texts: dict[str, str], out: Path | None, *, kustomize: bool) -> None:
    """Print the objects, or write a file each."""
    if out is not None:
        _write_all(out, {**texts, **({"kustomization.yaml": kustomization(texts)} if kustomize else {})})
    elif kustomize:
        raise SpecError("names files, so it needs --out", "--kustomize")
    else:
        print("---\n".join(texts.values()), end="")


def kustomization(names: Iterable[str]) -> str:
    """The file by which `kubectl apply -k`, and overlays of kustomize, take all of the files."""
    head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n"
    return head + "".join(f"- {name}\n" for name in names)


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
    flag = "-k" if "kustomization.yaml" in texts else "-f"
    print(f"{len(texts)} files in {folder}; `kubectl apply {flag} {folder}` applies them")
