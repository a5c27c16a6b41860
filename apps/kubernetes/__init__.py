"""Kubernetes: pods of workers, and the manifests of a driver."""
