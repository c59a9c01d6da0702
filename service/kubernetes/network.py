"""How the pods of a job are found, who may reach them, and how many of them may be away at once."""

from headrace.service.kubernetes.naming import Named
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
        found.append(service_of(made, f"{made.name}-replica", made.labels("replica"), "predict", REPLICA_PORT))
    return found


def policies(made: JobManifests) -> list[Part]:
    """NetworkPolicies for every pod of the job. Probes come from a pod's node, which no policy keeps out.

    Replicas join at the head, and read the feed of its shards, which listen at ports that the system chose.
    """
    first, last = EPHEMERAL_PORTS
    chosen = {"protocol": "TCP", "port": first, "endPort": last}
    join = {"protocol": "TCP", "port": made.port}
    of_job = _pods(made, "head", *made.workers, *(["replica"] if made.settings.replicas else []))
    head = [{"from": of_job, "ports": [join, chosen]}]
    if (name := made.settings.metrics_from) is not None:
        head.append(from_prometheus(name, METRICS_PORT))
    found = [
        _policy(made, made.head, ["head"], head),
        _policy(made, f"{made.name}-workers", made.workers, [{"from": of_job, "ports": [chosen]}]),
    ]
    if made.settings.replicas:
        found.append(_policy(made, f"{made.name}-replica", ["replica"], [from_clients(made, REPLICA_PORT)]))
    return found


def from_clients(made: Named, port: int) -> Part:
    """A rule for the pods with the label of clients."""
    clients = [{"podSelector": {"matchLabels": {CLIENT: made.name}}}]
    return {"from": clients, "ports": [{"protocol": "TCP", "port": port}]}


def from_prometheus(namespace: str, port: int) -> Part:
    """A rule for the pods of a namespace."""
    found = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}]
    return {"from": found, "ports": [{"protocol": "TCP", "port": port}]}


def disruption_budgets(made: JobManifests) -> list[Part]:
    """One pod of the training at a time, once it trains again: each eviction costs a replay. One replica at a time."""
    training = _selector(made, ["head", *made.workers])
    found = [_budget(made, made.name, {"minAvailable": made.least_pods - 1, "selector": training})]
    if made.settings.replicas:
        found.append(budget_of_replicas(made, f"{made.name}-replica", made.labels("replica")))
    return found


def budget_of_replicas(made: Named, name: str, labels: Part) -> Part:
    """One replica of these labels may be away at a time."""
    return _budget(made, name, {"maxUnavailable": 1, "selector": {"matchLabels": labels}})


def pod_groups(made: JobManifests) -> list[Part]:
    """The gang of the pods that train, for Volcano; none without a queue."""
    if made.settings.queue is None:
        return []
    spec = {"minMember": made.least_pods, "queue": made.settings.queue}
    kind = {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup"}
    return [{**kind, "metadata": made.metadata(made.name), "spec": spec}]


def service_of(made: Named, name: str, labels: Part, port_name: str, port: int) -> Part:
    """The Service of the pods of these labels, with an address of its own."""
    return _service(made, name, {"selector": labels, "ports": [{"name": port_name, "port": port, "protocol": "TCP"}]})


def _service(made: Named, name: str, spec: Part) -> Part:
    return {"apiVersion": "v1", "kind": "Service", "metadata": made.metadata(name), "spec": spec}


def _policy(made: JobManifests, name: str, components: list[str], ingress: list[Part]) -> Part:
    return policy_of(made, name, _selector(made, components), ingress)


def policy_of(made: Named, name: str, selector: Part, ingress: list[Part]) -> Part:
    """A policy for the pods of `selector`; without ingress nobody reaches them."""
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": made.metadata(name),
        "spec": spec,
    }


def _budget(made: Named, name: str, spec: Part) -> Part:
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": made.metadata(name), "spec": spec}


def _pods(made: JobManifests, *components: str) -> list[Part]:
    return [{"podSelector": _selector(made, [*components])}]


def _selector(made: JobManifests, components: list[str]) -> Part:
    values = {"key": "app.kubernetes.io/component", "operator": "In", "values": components}
    return {"matchLabels": made.labels(), "matchExpressions": [values]}
