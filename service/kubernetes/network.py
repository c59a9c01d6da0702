"""How the pods of a job are found, who may reach them, and how many of them may be away at once."""

from headrace.service.kubernetes.pods import EPHEMERAL_PORTS, Part
from headrace.service.kubernetes.workloads import METRICS_PORT, REPLICA_PORT, JobManifests

CLIENT = "headrace/client"
"""Label of pods that may send requests to replicas; its value is the name of the job."""


def services(made: JobManifests) -> list[Part]:
    """A headless Service for the head, and one for the replicas."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # workers join before the head is ready
        "selector": made.labels("head"),
        "ports": [{"name": "join", "port": made.port, "protocol": "TCP"}],
    }
    found = [_service(made, made.head, spec)]
    if made.settings.replicas:
        ports = [{"name": "predict", "port": REPLICA_PORT, "protocol": "TCP"}]
        found.append(_service(made, f"{made.name}-replica", {"selector": made.labels("replica"), "ports": ports}))
    return found


def policies(made: JobManifests) -> list[Part]:
    """NetworkPolicies for every pod of the job. Probes come from a pod's node, which no policy keeps out.

    Replicas join at the head, and read the feed of its shards, which listen at ports that the system chose.
    """
    first, last = EPHEMERAL_PORTS
    chosen = {"protocol": "TCP", "port": first, "endPort": last}
    join = {"protocol": "TCP", "port": made.port}
    of_job = _pods(made, "head", "trainer", "shard", *(["replica"] if made.settings.replicas else []))
    head = [{"from": of_job, "ports": [join, chosen]}]
    if (name := made.settings.metrics_from) is not None:
        prometheus = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}]
        head.append({"from": prometheus, "ports": [{"protocol": "TCP", "port": METRICS_PORT}]})
    found = [
        _policy(made, made.head, ["head"], head),
        _policy(made, f"{made.name}-workers", ["trainer", "shard"], [{"from": of_job, "ports": [chosen]}]),
    ]
    if made.settings.replicas:
        clients = [{"podSelector": {"matchLabels": {CLIENT: made.name}}}]
        rule = {"from": clients, "ports": [{"protocol": "TCP", "port": REPLICA_PORT}]}
        found.append(_policy(made, f"{made.name}-replica", ["replica"], [rule]))
    return found


def disruption_budgets(made: JobManifests) -> list[Part]:
    """One pod of the training at a time, once it trains again: each eviction costs a replay. One replica at a time."""
    training = _selector(made, ["head", "trainer", "shard"])
    found = [_budget(made, made.name, {"minAvailable": made.num_pods - 1, "selector": training})]
    if made.settings.replicas:
        selector = {"matchLabels": made.labels("replica")}
        found.append(_budget(made, f"{made.name}-replica", {"maxUnavailable": 1, "selector": selector}))
    return found


def pod_groups(made: JobManifests) -> list[Part]:
    """The gang of the pods that train, for Volcano; none without a queue."""
    if made.settings.queue is None:
        return []
    spec = {"minMember": made.num_pods, "queue": made.settings.queue}
    kind = {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup"}
    return [{**kind, "metadata": made.metadata(made.name), "spec": spec}]


def _service(made: JobManifests, name: str, spec: Part) -> Part:
    return {"apiVersion": "v1", "kind": "Service", "metadata": made.metadata(name), "spec": spec}


def _policy(made: JobManifests, name: str, components: list[str], ingress: list[Part]) -> Part:
    spec = {"podSelector": _selector(made, components), "policyTypes": ["Ingress"], "ingress": ingress}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": made.metadata(name),
        "spec": spec,
    }


def _budget(made: JobManifests, name: str, spec: Part) -> Part:
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": made.metadata(name), "spec": spec}


def _pods(made: JobManifests, *components: str) -> list[Part]:
    return [{"podSelector": _selector(made, [*components])}]


def _selector(made: JobManifests, components: list[str]) -> Part:
    values = {"key": "app.kubernetes.io/component", "operator": "In", "values": components}
    return {"matchLabels": made.labels(), "matchExpressions": [values]}
