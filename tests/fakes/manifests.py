"""Manifests of commits that no trainer made."""

from headrace.trainer.checkpoint.commits import FORMAT_OF_FILES, CommitManifest, order_of


def manifest_of(name: str, **fields) -> CommitManifest:
    """The manifest of the commit `name`: these fields, and for all others what any commit may have."""
    timeline, version, generation = order_of(name)
    common = {
        **{"format": FORMAT_OF_FILES, "job": "job", "timeline": f"t{timeline}", "version": version, "name": name},
        **{"parent": None, "generation": generation, "world": 1, "made_at": "2026-01-01T00:00:00+00:00"},
        **{"fingerprint": {}, "positions": {}, "log_from": 1, "files": {}, "shards": [], "state": {}},
    }
    return CommitManifest(**{**common, **fields})
