"""A server's database with all migrations, made once for a version of Prefect: to migrate takes 7 processor seconds."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import prefect

BUILD = Path(__file__).parents[2] / "build"


def migrated_database() -> Path:
    """Return the database's path. Other processes that ask for it meanwhile wait until it is there."""
    home = BUILD / f"prefect-{prefect.__version__}"
    home.mkdir(parents=True, exist_ok=True)
    database = home / "prefect.db"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not database.exists():
            making = home / "making.db"
            making.unlink(missing_ok=True)
            prefect_command = Path(sys.executable).with_name("prefect")
            environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
            environment["PREFECT_API_DATABASE_CONNECTION_URL"] = f"sqlite+aiosqlite:///{making}"
            upgrade = [prefect_command, "server", "database", "upgrade", "--yes"]
            subprocess.run(upgrade, env=environment, check=True, timeout=300, capture_output=True)
            making.rename(database)
    return database


def put_database(folder: Path, name: str = "prefect.db") -> None:
    """Put a copy into a folder without a database. A server whose PREFECT_HOME is the folder uses the default name."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / name).exists():
        shutil.copy(migrated_database(), folder / name)
