"""Deployment files for a placement: Docker image, compose file, Helm chart."""
