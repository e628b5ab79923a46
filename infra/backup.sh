#!/bin/sh
# Saves or restores the databases of Prefect and MLflow. See "Backup and restore" in docs/recovery.md.
#
#     infra/backup.sh save FOLDER        # while everything runs
#     infra/backup.sh restore FOLDER     # into a Postgres with empty databases, before Prefect and MLflow start
#
# The address of Postgres is read from PGHOST, PGPORT, PGUSER and PGPASSWORD, as by all tools of Postgres.
set -eu
action=${1:?save or restore? infra/backup.sh save|restore FOLDER}
folder=${2:?which folder? infra/backup.sh save|restore FOLDER}
case $action in
save)
  umask 077
  mkdir -p "$folder"
  for database in prefect mlflow; do
    pg_dump --format=custom --file "$folder/$database.new" "$database"
    mv "$folder/$database.new" "$folder/$database.dump" # an incomplete dump never replaces a complete one
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
