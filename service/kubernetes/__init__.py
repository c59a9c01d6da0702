"""Manifests that run a job on Kubernetes."""
