#!/bin/sh
# Save and restore the databases of Prefect and MLflow; docs/recovery.md, "Backup and restore", says when.
#
#     infra/backup.sh save FOLDER        # while everything runs
#     infra/backup.sh restore FOLDER     # into a Postgres with empty databases, before Prefect and MLflow start
#
# Postgres is found by PGHOST, PGPORT, PGUSER and PGPASSWORD, as by all its tools.
set -eu
action=${1:?save or restore? infra/backup.sh save|restore FOLDER}
folder=${2:?which folder? infra/backup.sh save|restore FOLDER}
case $action in
save)
  umask 077
  mkdir -p "$folder"
  for database in prefect mlflow; do
    pg_dump --format=custom --file "$folder/$database.new" "$database"
    mv "$folder/$database.new" "$folder/$database.dump" # a dump that was cut off replaces none
  done
  ;;
restore)
  for database in prefect mlflow; do
    pg_restore --exit-on-error --single-transaction --clean --if-exists --no-owner --dbname "$database" "$folder/$database.dump"
  done
  ;;
*)
  echo "backup.sh: $action is neither save nor restore" >&2
  exit 2
  ;;
esac
