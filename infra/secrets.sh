#!/bin/sh
# Print new secrets for compose.yaml and kuberay: infra/secrets.sh > infra/.env
# Every value is random. Whoever reads the file can do all that the services can.
set -eu
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
umask 077
echo "POSTGRES_PASSWORD=$(random)"
echo "PREFECT_AUTH=rollflow:$(random)"
echo "RAY_TOKEN=$(random)$(random)"
echo "S3_KEY=rollflow"
echo "S3_SECRET=$(random)"
