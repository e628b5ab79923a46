#!/bin/sh
# Writes new secrets for compose.yaml or kuberay into a file that only you can read: infra/secrets.sh infra/.env
# The secrets are random. Whoever reads the file has the same access as the services.
set -eu
file=${1:?which file? infra/secrets.sh FILE}
if [ -e "$file" ]; then
  echo "secrets.sh: $file is there already; databases that were made with its passwords need them" >&2
  exit 1
fi
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
umask 077
cat > "$file" <<VALUES
POSTGRES_PASSWORD=$(random)
PREFECT_AUTH=rollflow:$(random)
RAY_TOKEN=$(random)$(random)
S3_KEY=rollflow
S3_SECRET=$(random)
VALUES
