"""Fetch what the control machine's services need, into files of FOLDER that their systemd units read.

    control_secrets.py FOLDER DATABASE_HOST:PORT DATABASE_SECRET PREFECT_SECRET

It makes MLflow's database where there is none. Exit code 0: the files are as they were; 3: they have changed, because
RDS has rotated the password, say, and who reads them is to be restarted.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from urllib.parse import quote

import asyncpg
import botocore.session

CHANGED = 3


def read_secret(name: str) -> str:
    """Return the value of a secret of Secrets Manager."""
    client = botocore.session.get_session().create_client("secretsmanager")
    return str(client.get_secret_value(SecretId=name)["SecretString"])


def environment_files(endpoint: str, database: dict[str, str], prefect: str) -> dict[str, str]:
    """Return the content of each file by its name."""
    login = f"{quote(database['username'], safe='')}:{quote(database['password'], safe='')}@{endpoint}"
    return {
        "prefect": f"PREFECT_SERVER_DATABASE_CONNECTION_URL=postgresql+asyncpg://{login}/prefect\n"
        f"PREFECT_SERVER_API_AUTH_STRING=rollflow:{prefect}\n",
        "mlflow": f"MLFLOW_BACKEND_STORE_URI=postgresql://{login}/mlflow\n",
        "client": f"PREFECT_API_URL=http://127.0.0.1:4200/api\nPREFECT_API_AUTH_STRING=rollflow:{prefect}\n",
    }


async def make_database(endpoint: str, database: dict[str, str]) -> None:
    """Make the database "mlflow" where there is none; TLS as `PGSSLMODE` says."""
    (host, _, port), user, password = endpoint.rpartition(":"), database["username"], database["password"]
    connection = await asyncpg.connect(
        host=host, port=int(port), user=user, password=password, database="prefect", timeout=60
    )
    try:
        await connection.execute("CREATE DATABASE mlflow")
    except asyncpg.DuplicateDatabaseError:
        return
    finally:
        await connection.close()


def write_changed(folder: Path, files: dict[str, str]) -> bool:
    """Write the files, readable by their owner alone; return whether any was different before."""
    changed = False
    for name, text in files.items():
        file, new = folder / name, folder / f"{name}.new"
        if file.exists() and file.read_text() == text:
            continue
        new.touch(mode=0o600)
        new.write_text(text)
        os.replace(new, file)
        changed = True
    return changed


def main(folder: str, endpoint: str, database_secret: str, prefect_secret: str) -> int:
    """Return the exit code."""
    database = json.loads(read_secret(database_secret))
    asyncio.run(make_database(endpoint, database))
    files = environment_files(endpoint, database, read_secret(prefect_secret))
    return CHANGED if write_changed(Path(folder), files) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
